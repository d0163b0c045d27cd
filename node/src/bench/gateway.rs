//! What the gateway adds to a chat call: a call through it, whose 16 tokens are there at once, beside the same bytes
//! from a bare handler. Calls of both alternate, one at a time.

use super::http::{Agent, Begun, MODEL, Server, answer};
use super::report::{Better, Row, percentile};
use axum::Router;
use axum::body::Bytes;
use axum::http::header;
use axum::routing::post;
use starling_bootstrap::Identity;
use starling_gateway::null::{NullBackend, byte_format};
use starling_gateway::{Gateway, GatewayConfig};
use starling_protocol::ModelName;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Calls of each kind in a run: ten lie above the 99th percentile.
const CALLS: usize = 1000;
/// A run ends after so long.
const TIME_MAX: Duration = Duration::from_secs(5);
const PEER: &str = "bare axum handler";

/// The rows of `gateway`.
///
/// # Errors
/// When a call fails.
pub(super) async fn measure(runs: usize) -> anyhow::Result<Vec<Row>> {
    let format = Arc::new(byte_format(8192)?);
    let null = NullBackend::new(Arc::new(Identity::generate()), ModelName::new(MODEL)?, format, answer())
        .tokens_per_frame(answer().len());
    let server = Server::start(Gateway::new(Arc::new(null), GatewayConfig::default()).router()).await?;
    let agent = Agent::new()?;
    let (first, _) = agent.begin(&server.base).await?;
    let canned = agent.chat(&server.base, &first).await?;
    let peer = Server::start(bare(canned)).await?;

    run(&agent, &server.base, &peer.base).await?;
    let mut values: [[Vec<f64>; 3]; 2] = Default::default();
    for _ in 0..runs {
        let (ours, theirs) = run(&agent, &server.base, &peer.base).await?;
        for (percent, [a, b, added]) in [50, 99].into_iter().zip(&mut values) {
            let (x, y) = (percentile(&ours, percent), percentile(&theirs, percent));
            a.push(x);
            b.push(y);
            added.push(x - y);
        }
    }
    let mut rows = Vec::new();
    for (name, [ours, theirs, added]) in ["p50", "p99"].into_iter().zip(&values) {
        rows.push(Row::new(format!("chat call, 16 tokens, {name}"), "µs", Better::Less, ours, Some((PEER, theirs))));
        rows.push(Row::new(format!("the gateway adds, {name}"), "µs", Better::Less, added, None));
    }
    Ok(rows)
}

fn bare(completion: Bytes) -> Router {
    let say = move |_request: Bytes| async move { ([(header::CONTENT_TYPE, "application/json")], completion) };
    Router::new().route("/v1/chat/completions", post(say))
}

/// Microseconds of each call, ours and the peer's.
async fn run(agent: &Agent, ours: &str, peer: &str) -> anyhow::Result<(Vec<f64>, Vec<f64>)> {
    let (mut mine, mut other) = (Vec::with_capacity(CALLS), Vec::with_capacity(CALLS));
    let begin = Instant::now();
    for i in 0..CALLS {
        if begin.elapsed() > TIME_MAX {
            break;
        }
        // An episode of its own for each call: the first turn is the one that renders the whole prompt.
        let (episode, _) = agent.begin(ours).await?;
        if i % 2 == 0 {
            mine.push(timed(agent, ours, &episode).await?);
            other.push(timed(agent, peer, &episode).await?);
        } else {
            other.push(timed(agent, peer, &episode).await?);
            mine.push(timed(agent, ours, &episode).await?);
        }
        agent.end(ours, &episode).await?;
    }
    Ok((mine, other))
}

async fn timed(agent: &Agent, base: &str, episode: &Begun) -> anyhow::Result<f64> {
    let start = Instant::now();
    agent.chat(base, episode).await?;
    Ok(start.elapsed().as_secs_f64() * 1e6)
}
