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
use std::time::Instant;
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
            let mut calls = 0;
            let mut spent = std::time::Duration::ZERO;
            for _ in 0..200 {
                let episode = gateway.begin(ClaimRequest::default(), "bench").await.unwrap();
                let mut messages = vec![json!({ "role": "system", "content": "You are a calculator." })];
                for i in 0..turns {
                    messages.push(json!({ "role": "user", "content": format!("What is 12 * {i}? Think first.") }));
                    let body = json!({ "model": MODEL, "messages": messages, "tools": calc(), "stream": stream });
                    let request = Request::post("/v1/chat/completions")
                        .header("authorization", format!("Bearer {}", episode.key.0))
                        .body(Body::from(body.to_string()))
                        .unwrap();
                    let start = Instant::now();
                    let response = router.clone().oneshot(request).await.unwrap();
                    let body = response.into_body().collect().await.unwrap().to_bytes();
                    spent += start.elapsed();
                    calls += 1;
                    assert!(!body.is_empty());
                    messages.push(json!({ "role": "assistant", "content": "The answer is 408, I think." }));
                }
                gateway.end(episode.assignment.episode, 1.0, BTreeMap::new()).await.unwrap();
            }
            println!("stream {stream}, {turns} turns: {:.1} µs a call", spent.as_secs_f64() * 1e6 / f64::from(calls));
        }
    }
}
