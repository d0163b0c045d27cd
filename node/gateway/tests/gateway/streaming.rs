//! Streams over a real socket: tokens come as they are sampled, and a caller that goes away costs nothing.

use crate::support::{Script, World, calc, code, eventually, request, say, user};
use futures::StreamExt;
use serde_json::{Value, json};
use starling_protocol::rollout::FinishReason;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Sends a chat request and returns the response as it arrives.
async fn post(url: &str, key: &str, body: &Value) -> reqwest::Response {
    let request = reqwest::Client::new().post(format!("{url}/v1/chat/completions"));
    let request = request.header("authorization", format!("Bearer {key}")).header("content-type", "application/json");
    request.body(body.to_string()).send().await.unwrap()
}

/// The events of a whole stream; the last one must be `[DONE]`.
async fn events(response: reqwest::Response) -> Vec<Value> {
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    let text = response.text().await.unwrap();
    let mut lines: Vec<&str> = text.split("\n\n").filter(|e| !e.is_empty()).collect();
    assert_eq!(lines.pop(), Some("data: [DONE]"), "{text}");
    lines.iter().map(|e| serde_json::from_str(e.strip_prefix("data: ").unwrap()).unwrap()).collect()
}

fn deltas(events: &[Value]) -> Vec<&Value> {
    events.iter().filter_map(|e| e["choices"].get(0)).map(|c| &c["delta"]).collect()
}

#[tokio::test]
async fn a_stream_has_a_chunk_a_token_and_whole_characters() {
    let world = World::new();
    let url = world.listen().await;
    let agent = world.begin().await;
    world.script([say("Hé!")]);
    let more = json!({ "stream": true, "stream_options": { "include_usage": true }, "logprobs": true });
    let events = events(post(&url, &agent.key, &request(json!([user("q")]), more)).await).await;
    let deltas = deltas(&events);
    assert_eq!(*deltas[0], json!({ "role": "assistant", "content": "" }));
    let texts: Vec<_> = deltas[1..].iter().filter_map(|d| d["content"].as_str()).collect();
    assert_eq!(texts, ["H", "é", "!"]);
    // The character of two tokens comes with both of their logprobs.
    assert_eq!(events[2]["choices"][0]["logprobs"]["content"].as_array().unwrap().len(), 2);
    let n = events.len();
    assert_eq!(events[n - 2]["choices"][0]["finish_reason"], "stop");
    assert_eq!(events[n - 2]["choices"][0]["delta"], json!({}));
    assert_eq!(events[n - 1]["choices"], json!([]));
    assert_eq!(events[n - 1]["usage"]["completion_tokens"], 5);
    assert!(events[..n - 1].iter().all(|e| e["usage"].is_null() && e["id"] == events[0]["id"]));
    let turns = agent.done().await.rollout.turns;
    assert_eq!((turns.len(), turns[0].completion_len), (1, 5));
}

#[tokio::test]
async fn a_streamed_tool_call_is_a_delta_of_its_own() {
    let world = World::new();
    let url = world.listen().await;
    let agent = world.begin().await;
    world.script([say(r#"hm <|call|>calc{"x":"1"}<|call|>calc{"x":"2"}"#)]);
    let more = json!({ "stream": true, "tools": calc() });
    let events = events(post(&url, &agent.key, &request(json!([user("q")]), more)).await).await;
    let deltas = deltas(&events);
    let text: String = deltas.iter().filter_map(|d| d["content"].as_str()).collect();
    assert_eq!(text, "hm ");
    let calls: Vec<_> = deltas.iter().filter_map(|d| d["tool_calls"].get(0)).collect();
    assert_eq!(calls.len(), 2);
    assert_eq!((&calls[1]["index"], &calls[1]["type"]), (&json!(1), &json!("function")));
    assert_eq!(calls[1]["function"], json!({ "name": "calc", "arguments": "{\"x\":\"2\"}" }));
    assert!(calls[1]["id"].as_str().unwrap().starts_with("call_"));
    assert!(events.iter().all(|e| e.get("usage").is_none()));
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
    assert_eq!(agent.done().await.rollout.turns[0].finish, FinishReason::ToolCalls);
}

#[tokio::test]
async fn streamed_stop_strings_are_held_back() {
    let world = World::new();
    let url = world.listen().await;
    let agent = world.begin().await;
    world.script([say("ab STOX STOP c")]);
    let more = json!({ "stream": true, "stop": "STOP" });
    let events = events(post(&url, &agent.key, &request(json!([user("q")]), more)).await).await;
    let texts: Vec<_> = deltas(&events).into_iter().filter_map(|d| d["content"].as_str()).collect();
    assert_eq!(texts, ["", "a", "b", " ", "STOX", " "]);
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "stop");
    agent.done().await;
}

#[tokio::test]
async fn several_streamed_answers_are_told_apart() {
    let world = World::new();
    let url = world.listen().await;
    let agent = world.begin().await;
    world.script([say("aaa"), say("bb")]);
    let events =
        events(post(&url, &agent.key, &request(json!([user("q")]), json!({ "stream": true, "n": 2 }))).await).await;
    let mut texts = [String::new(), String::new()];
    let mut finished = 0;
    for event in &events {
        let choice = &event["choices"][0];
        let index = usize::try_from(choice["index"].as_u64().unwrap()).unwrap();
        texts[index].push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        finished += usize::from(choice["finish_reason"] == "stop");
    }
    assert_eq!((texts, finished), (["aaa".into(), "bb".into()], 2));
    assert_eq!(agent.done().await.rollout.timelines.len(), 2);
}

#[tokio::test]
async fn tokens_are_sent_before_the_answer_ends_and_hanging_up_cancels_it() {
    let world = World::new();
    let url = world.listen().await;
    let agent = world.begin().await;
    world.script([Script::Hang(vec![97, 98])]);
    let response = post(&url, &agent.key, &request(json!([user("q")]), json!({ "stream": true }))).await;
    let mut body = response.bytes_stream();
    let mut seen = String::new();
    while !seen.contains("\"b\"") {
        let chunk = tokio::time::timeout(Duration::from_secs(5), body.next()).await.unwrap().unwrap().unwrap();
        seen.push_str(std::str::from_utf8(&chunk).unwrap());
    }
    assert_eq!(world.node.cancelled.load(Ordering::SeqCst), 0);
    drop(body);
    eventually("the stream is dropped", || world.node.cancelled.load(Ordering::SeqCst) == 1).await;
    let rollout = agent.done().await.rollout;
    assert_eq!((rollout.turns.len(), rollout.timelines.len()), (0, 0));
}

#[tokio::test]
async fn hanging_up_on_a_whole_answer_cancels_it_too() {
    let world = World::new();
    let url = world.listen().await;
    let agent = world.begin().await;
    world.script([Script::Hang(vec![97]), Script::Hang(vec![98])]);
    let body = request(json!([user("q")]), json!({ "n": 2 }));
    tokio::select! {
        _ = post(&url, &agent.key, &body) => panic!("the engine hangs"),
        () = eventually("both generations run", || world.node.requests.lock().unwrap().len() == 2) => {}
    }
    eventually("both streams are dropped", || world.node.cancelled.load(Ordering::SeqCst) == 2).await;
    assert!(agent.done().await.rollout.turns.is_empty());
}

#[tokio::test]
async fn a_stream_that_fails_ends_with_an_error_event_and_not_with_done() {
    let world = World::new();
    let url = world.listen().await;
    let agent = world.begin().await;
    world.script([Script::Fail(vec![97], true)]);
    let response = post(&url, &agent.key, &request(json!([user("q")]), json!({ "stream": true }))).await;
    let text = response.text().await.unwrap();
    let last = text.trim_end().rsplit("data: ").next().unwrap();
    assert_eq!(code(&serde_json::from_str(last).unwrap()), "engine_unavailable");
    assert!(!text.contains("[DONE]"));
    assert!(agent.done().await.rollout.turns.is_empty());
}

#[tokio::test]
async fn a_refusal_of_a_stream_has_its_status() {
    let world = World::new();
    let url = world.listen().await;
    let response = post(&url, "EMPTY", &request(json!([user("q")]), json!({ "stream": true, "n": 99 }))).await;
    assert_eq!(response.status(), 400);
}
