//! Calls that are sent again with their `Idempotency-Key`.

use crate::support::{Script, World, bytes, code, eventually, request, say, user};
use futures::StreamExt;
use serde_json::{Value, json};
use starling_gateway::GatewayConfig;
use starling_protocol::assignment::Purpose;
use starling_protocol::job::Sampling;
use std::sync::atomic::Ordering;
use tower::ServiceExt;

fn headers<'a>(bearer: &'a str, key: &'a str) -> [(&'static str, &'a str); 2] {
    [("authorization", bearer), ("idempotency-key", key)]
}

#[tokio::test]
async fn a_repeated_call_gets_the_first_answer_and_is_recorded_once() {
    let world = World::new();
    let agent = world.begin().await;
    let bearer = format!("Bearer {}", agent.key);
    let chat = request(json!([user("q")]), json!({}));
    let message = json!({ "model": chat["model"], "max_tokens": 8, "messages": [user("other")] });
    let response = json!({ "model": chat["model"], "input": "third" });
    for (path, body) in [("/v1/chat/completions", &chat), ("/v1/messages", &message), ("/v1/responses", &response)] {
        world.script([say("one")]);
        let key = format!("retry-{path}");
        let (status, first_headers, first) = world.post(path, &headers(&bearer, &key), body).await;
        assert_eq!(status, 200, "{first}");
        assert!(!first_headers.contains_key("idempotent-replayed"));
        for _ in 0..2 {
            // No script is left: sampling again would panic.
            let (status, again_headers, again) = world.post(path, &headers(&bearer, &key), body).await;
            assert_eq!((status.as_u16(), &again), (200, &first));
            assert_eq!(again_headers["idempotent-replayed"], "true");
            assert_eq!(again_headers["content-type"], first_headers["content-type"]);
        }
    }
    // The same request with another key is another call.
    world.script([say("two")]);
    let (_, _, second) = world.post("/v1/chat/completions", &headers(&bearer, "new"), &chat).await;
    assert!(second.contains("two"), "{second}");
    let rollout = agent.done().await.rollout;
    assert_eq!(rollout.turns.len(), 4);
}

#[tokio::test]
async fn a_repeated_stream_gets_the_same_events() {
    let world = World::new();
    let agent = world.begin().await;
    let bearer = format!("Bearer {}", agent.key);
    world.script([say("abc")]);
    let body = request(json!([user("q")]), json!({ "stream": true }));
    let (_, _, first) = world.post("/v1/chat/completions", &headers(&bearer, "k"), &body).await;
    let (status, replayed, again) = world.post("/v1/chat/completions", &headers(&bearer, "k"), &body).await;
    assert_eq!((status.as_u16(), again), (200, first));
    assert_eq!(replayed["content-type"], "text/event-stream");
    assert_eq!(agent.done().await.rollout.turns.len(), 1);
}

#[tokio::test]
async fn what_failed_or_was_hung_up_on_is_tried_again() {
    let world = World::new();
    let url = world.listen().await;
    let agent = world.begin().await;
    let bearer = format!("Bearer {}", agent.key);
    let chat = request(json!([user("q")]), json!({}));
    world.script([Script::Fail(bytes("x"), true), say("fine")]);
    let (status, _, _) = world.post("/v1/chat/completions", &headers(&bearer, "k"), &chat).await;
    assert_eq!(status, 503);
    let (status, replayed, text) = world.post("/v1/chat/completions", &headers(&bearer, "k"), &chat).await;
    assert_eq!(status, 200, "{text}");
    assert!(!replayed.contains_key("idempotent-replayed"));

    // A stream that fails in its middle has its status behind it already; it is no answer to keep either.
    let stream = request(json!([user("q")]), json!({ "stream": true }));
    world.script([Script::Fail(bytes("x"), false), say("fine")]);
    let (_, _, broken) = world.post("/v1/chat/completions", &headers(&bearer, "s"), &stream).await;
    assert!(broken.contains("went away"), "{broken}");
    let (_, replayed, whole) = world.post("/v1/chat/completions", &headers(&bearer, "s"), &stream).await;
    assert!(whole.ends_with("data: [DONE]\n\n"), "{whole}");
    assert!(!replayed.contains_key("idempotent-replayed"));

    // Hung up on: cancelled, and a repetition is the first call again.
    world.script([Script::Hang(bytes("ab")), say("fine")]);
    let post = reqwest::Client::new().post(format!("{url}/v1/chat/completions")).body(chat.to_string());
    let post = post.header("authorization", &bearer).header("idempotency-key", "h");
    let hung = tokio::spawn(post.try_clone().unwrap().send());
    eventually("the call is under way", || world.node.requests.lock().unwrap().len() == 5).await;
    hung.abort();
    // It may come while the first is not over yet: then it waits.
    let answer: Value = post.send().await.unwrap().json().await.unwrap();
    assert_eq!(answer["choices"][0]["message"]["content"], "fine", "{answer}");
    assert_eq!(world.node.cancelled.load(Ordering::SeqCst), 1);
    assert_eq!(agent.done().await.rollout.turns.len(), 3);
}

#[tokio::test]
async fn a_repetition_beside_the_first_call_waits_for_its_answer() {
    let world = World::new();
    let agent = world.begin().await;
    let bearer = format!("Bearer {}", agent.key);
    let chat = request(json!([user("q")]), json!({}));
    world.script([say("once")]);
    let headers = headers(&bearer, "k");
    let call = || world.post("/v1/chat/completions", &headers, &chat);
    let (a, b, c) = tokio::join!(call(), call(), call());
    assert_eq!((&a.2, &a.2), (&b.2, &c.2));
    assert_eq!(agent.done().await.rollout.turns.len(), 1);
}

#[tokio::test]
async fn repetitions_that_wait_are_bounded_like_calls() {
    let config = GatewayConfig { in_flight_max: 1, ..GatewayConfig::default() };
    let world = World::with(config, Purpose::Train, Sampling::default());
    let agent = world.begin().await;
    let bearer = format!("Bearer {}", agent.key);
    let chat = request(json!([user("q")]), json!({}));
    world.script([Script::Hang(bytes("a"))]);
    let (first, other) = (headers(&bearer, "k"), headers(&bearer, "j"));
    let mut hangs = std::pin::pin!(world.post("/v1/chat/completions", &first, &chat));
    let mut waits = std::pin::pin!(world.post("/v1/chat/completions", &first, &chat));
    for _ in 0..10 {
        assert!(futures::poll!(&mut hangs).is_pending() && futures::poll!(&mut waits).is_pending());
        tokio::task::yield_now().await;
    }
    let (status, _, text) = world.post("/v1/chat/completions", &other, &chat).await;
    let error: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((status.as_u16(), code(&error)), (429, "too_many_calls"));
}

#[tokio::test]
async fn a_key_stands_for_one_request_of_one_open_episode() {
    let world = World::new();
    let (agent, other) = (world.begin().await, world.begin().await);
    let (bearer, others) = (format!("Bearer {}", agent.key), format!("Bearer {}", other.key));
    let chat = |text: &str| request(json!([user(text)]), json!({}));
    world.script([say("one"), say("two")]);
    let (_, _, first) = world.post("/v1/chat/completions", &headers(&bearer, "k"), &chat("q")).await;
    let (status, _, text) = world.post("/v1/chat/completions", &headers(&bearer, "k"), &chat("another")).await;
    let error: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((status.as_u16(), code(&error)), (422, "idempotency_key_reused"));
    let (status, _, text) = world.post("/v1/messages", &headers(&bearer, "k"), &chat("q")).await;
    let error: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((status.as_u16(), error["error"]["type"].as_str()), (422, Some("invalid_request_error")), "{text}");
    let (_, _, second) = world.post("/v1/chat/completions", &headers(&others, "k"), &chat("q")).await;
    assert_ne!(first, second);
    let (status, _, text) = world.post("/v1/chat/completions", &headers(&bearer, &"k".repeat(256)), &chat("q")).await;
    assert_eq!(status, 400, "{text}");
    assert!(text.contains("idempotency-key"), "{text}");
    agent.done().await;
    let (status, _, text) = world.post("/v1/chat/completions", &headers(&bearer, "k"), &chat("q")).await;
    assert_eq!(status, 409, "{text}");
    other.done().await;
}

#[tokio::test]
async fn a_further_attempt_of_an_sdk_gets_the_answer_that_nobody_read() {
    let world = World::new();
    let agent = world.begin().await;
    let bearer = format!("Bearer {}", agent.key);
    for more in [json!({}), json!({ "stream": true })] {
        let chat = request(json!([user("q")]), more);
        let attempt = |count| {
            let request = http_request(&bearer, count, &chat);
            world.router.clone().oneshot(request)
        };
        world.script([say("lost"), say("read"), say("another")]);
        // Answered, recorded, and the connection broke: with a stream, behind its last event.
        let mut body = attempt("0").await.unwrap().into_body().into_data_stream();
        if chat["stream"] == true {
            while !String::from_utf8_lossy(&body.next().await.unwrap().unwrap()).contains("[DONE]") {}
        }
        drop(body);
        let again = attempt("1").await.unwrap();
        assert_eq!(again.headers()["idempotent-replayed"], "true");
        let text = text(again).await;
        assert!(text.contains("lost") || text.contains("\"l\""), "{text}");
        // Read answers are somebody's: the same request is another sample, whether it says that it is a further attempt or not.
        for count in ["0", "1"] {
            let answer = attempt(count).await.unwrap();
            assert!(!answer.headers().contains_key("idempotent-replayed"));
            self::text(answer).await;
        }
    }
    assert_eq!(agent.done().await.rollout.turns.len(), 6);
}

fn http_request(bearer: &str, count: &str, body: &Value) -> axum::extract::Request {
    let request = axum::http::Request::post("/v1/chat/completions").header("authorization", bearer);
    let request = request.header("content-type", "application/json").header("x-stainless-retry-count", count);
    request.body(axum::body::Body::from(body.to_string())).unwrap()
}

async fn text(response: axum::response::Response) -> String {
    let bytes = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
    String::from_utf8(bytes.to_vec()).unwrap()
}
