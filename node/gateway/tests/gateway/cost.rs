//! What the gateway adds to a call, with an engine that costs nothing. `--ignored --nocapture` prints it.

use crate::support::{MODEL, Notary, calc, say};
use axum::body::Body;
use axum::http::Request;
use http_body_util::BodyExt;
use serde_json::json;
use starling_gateway::null::{NullBackend, byte_format};
use starling_gateway::{Backend, ClaimRequest, Gateway, GatewayConfig};
use starling_protocol::ModelName;
use std::collections::BTreeMap;
use std::sync::Arc;
use tower::ServiceExt;

#[tokio::test]
#[ignore = "a measurement, not a check"]
async fn microseconds_per_call() {
    let crate::support::Script::Say(answer) = say("The answer is 408, I think.") else { unreachable!() };
    let format = Arc::new(byte_format(8192).unwrap());
    let null = NullBackend::new(Arc::new(Notary), ModelName::new(MODEL).unwrap(), format, answer).tokens_per_frame(4);
    let gateway = Gateway::new(Arc::new(null) as Arc<dyn Backend>, GatewayConfig::default());
    let router = gateway.router();
    for stream in [false, true] {
        for turns in [1, 10] {
            let mut messages = vec![json!({ "role": "system", "content": "You are a calculator." })];
            let mut bodies = Vec::new();
            for i in 0..turns {
                messages.push(json!({ "role": "user", "content": format!("What is 12 * {i}? Think first.") }));
                let body = json!({ "model": MODEL, "messages": messages, "tools": calc(), "stream": stream });
                bodies.push(body.to_string());
                messages.push(json!({ "role": "assistant", "content": "The answer is 408, I think." }));
            }
            let mut spent = 0;
            for _ in 0..200 {
                let episode = gateway.begin(ClaimRequest::default(), "bench").await.unwrap();
                let start = cpu_ns();
                for body in &bodies {
                    let request = Request::post("/v1/chat/completions")
                        .header("authorization", format!("Bearer {}", episode.key.0))
                        .body(Body::from(body.clone()))
                        .unwrap();
                    let response = router.clone().oneshot(request).await.unwrap();
                    let body = response.into_body().collect().await.unwrap().to_bytes();
                    assert!(!body.is_empty());
                }
                spent += cpu_ns() - start;
                gateway.end(episode.assignment.episode, 1.0, BTreeMap::new()).await.unwrap();
            }
            println!("stream {stream}, {turns} turns: {} µs a call", spent / 1000 / (200 * turns));
        }
    }
}

/// Processor time of this thread: the wall clock would measure the machine's other work too.
fn cpu_ns() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    text.split(' ').next().unwrap().parse().unwrap()
}
