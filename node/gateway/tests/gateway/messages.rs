//! `/v1/messages` and `/v1/messages/count_tokens`: Anthropic's blocks, events and errors.

use crate::support::{MODEL, Script, World, bytes, events, eventually, say, user};
use serde_json::{Value, json};
use starling_gateway::GatewayConfig;
use starling_protocol::assignment::Purpose;
use starling_protocol::job::Sampling;
use std::sync::atomic::Ordering;

const PATH: &str = "/v1/messages";
const COUNT: &str = "/v1/messages/count_tokens";

fn request(messages: Value, more: Value) -> Value {
    let mut body = json!({ "model": MODEL, "max_tokens": 100, "messages": messages });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

async fn ask(world: &World, key: Option<&str>, body: Value) -> Value {
    let headers: Vec<_> =
        key.iter().map(|key| ("x-api-key", *key)).chain([("anthropic-version", "2023-06-01")]).collect();
    let (status, headers, text) = world.post(PATH, &headers, &body).await;
    assert_eq!(status, 200, "{text}");
    assert!(headers["request-id"].to_str().unwrap().starts_with("req_"));
    serde_json::from_str(&text).unwrap()
}

fn calc() -> Value {
    let schema = json!({ "type": "object", "properties": { "x": { "type": "string" } }, "required": ["x"] });
    json!([{ "name": "calc", "description": "Calculates.", "input_schema": schema, "cache_control": { "type": "ephemeral" } }])
}

#[tokio::test]
async fn a_message_has_blocks_a_reason_and_its_usage() {
    let world = World::new();
    let agent = world.begin().await;
    world.script([say(r#"So: <|call|>calc{"x": "12"}<|call|>calc{"x":"3"}"#)]);
    let more = json!({
        "system": [{ "type": "text", "text": "Be ", "cache_control": { "type": "ephemeral" } }, { "type": "text", "text": "brief." }],
        "tools": calc(), "temperature": 0.5, "top_p": 0.9, "top_k": 7, "metadata": { "user_id": "u" },
    });
    let answer = ask(&world, Some(&agent.key), request(json!([user("q")]), more)).await;
    let sent = world.last_request();
    assert_eq!(sent.prompt, bytes("<|tools|>calc(x)<|end|><|system|>Be brief.<|end|><|user|>q<|end|><|assistant|>"));
    assert_eq!((sent.temperature, sent.top_p, sent.top_k, sent.max_tokens), (0.5, 0.9, 7, 100));
    assert!(answer["id"].as_str().unwrap().starts_with("msg_"));
    assert_eq!(
        (&answer["type"], &answer["role"], &answer["model"]),
        (&json!("message"), &json!("assistant"), &json!(MODEL))
    );
    let content = answer["content"].as_array().unwrap();
    assert_eq!(content[0], json!({ "type": "text", "text": "So: " }));
    assert_eq!(
        (&content[1]["type"], &content[1]["name"], &content[1]["input"]),
        (&json!("tool_use"), &json!("calc"), &json!({ "x": "12" }))
    );
    assert!(content[2]["id"].as_str().unwrap().starts_with("toolu_"));
    assert_eq!((&answer["stop_reason"], &answer["stop_sequence"]), (&json!("tool_use"), &Value::Null));
    assert_eq!(answer["usage"]["input_tokens"], sent.prompt.len());
    assert_eq!(answer["usage"]["output_tokens"], world.node_answer_len());
    assert_eq!(agent.done().await.rollout.turns.len(), 1);
}

#[tokio::test]
async fn blocks_that_are_sent_back_continue_the_exact_tokens() {
    let world = World::new();
    let agent = world.begin().await;
    let sampled = r#"So: <|call|>calc{"x": "12"}<|call|>calc{"x":"3"}"#;
    world.script([say(sampled), say("done")]);
    let key = Some(agent.key.as_str());
    let first = ask(&world, key, request(json!([user("q")]), json!({ "tools": calc() }))).await;
    let before = world.last_request().prompt;
    let result = |i: usize, content: Value| json!({ "type": "tool_result", "tool_use_id": first["content"][i]["id"], "content": content });
    let results = json!([
        result(1, json!("12")), result(2, json!([{ "type": "text", "text": "3" }])), { "type": "text", "text": "go on" },
    ]);
    let messages = json!([user("q"), { "role": "assistant", "content": first["content"] }, { "role": "user", "content": results }]);
    ask(&world, key, request(messages, json!({ "tools": calc() }))).await;
    let mut exact = before;
    exact.extend(bytes(sampled));
    exact.extend(bytes("<|end|><|tool|>12<|end|><|tool|>3<|end|><|user|>go on<|end|><|assistant|>"));
    assert_eq!(world.last_request().prompt, exact);
    let rollout = agent.done().await.rollout;
    assert_eq!((rollout.timelines.len(), rollout.turns.len()), (1, 2));
}

#[tokio::test]
async fn results_that_failed_and_text_before_results_reach_the_template() {
    let world = World::new();
    world.script([say("a")]);
    let blocks = json!([
        { "type": "text", "text": "look: " },
        { "type": "tool_result", "tool_use_id": "t", "content": "no such file", "is_error": true },
        { "type": "tool_result", "tool_use_id": "u" },
    ]);
    let call = json!([{ "type": "tool_use", "id": "t", "name": "calc", "input": { "x": 1 } }]);
    ask(
        &world,
        None,
        request(
            json!([user("q"), { "role": "assistant", "content": call }, { "role": "user", "content": blocks }]),
            json!({}),
        ),
    )
    .await;
    let exact = concat!(
        r#"<|user|>q<|end|><|assistant|><|call|>calc{"x":1}<|end|><|user|>look: <|end|>"#,
        "<|tool|>Error: no such file<|end|><|tool|><|end|><|assistant|>",
    );
    assert_eq!(world.last_request().prompt, bytes(exact));
}

#[tokio::test]
async fn every_stop_reason_is_the_true_one() {
    let world = World::new();
    world.script([
        say("a STOP b"),
        say("long enough"),
        say("x"),
        say(&"y".repeat(2000)),
        say("<|call|>calc{}"),
        say("<|call|>calc{}"),
    ]);
    for (more, reason, sequence) in [
        (json!({ "stop_sequences": ["nowhere", "STOP"] }), "stop_sequence", json!("STOP")),
        (json!({ "max_tokens": 4 }), "max_tokens", Value::Null),
        (json!({ "stop_sequences": ["STOP"] }), "end_turn", Value::Null),
        (json!({ "max_tokens": 5000 }), "model_context_window_exceeded", Value::Null),
        (json!({ "tools": calc() }), "tool_use", Value::Null),
        (json!({ "tools": calc(), "tool_choice": { "type": "none" } }), "end_turn", Value::Null),
    ] {
        let answer = ask(&world, None, request(json!([user("q")]), more.clone())).await;
        assert_eq!((&answer["stop_reason"], &answer["stop_sequence"]), (&json!(reason), &sequence), "{more}");
    }
}

#[tokio::test]
async fn one_call_at_a_time_if_asked() {
    let world = World::new();
    world.script([say("<|call|>calc{}<|call|>calc{}")]);
    let choice = json!({ "type": "auto", "disable_parallel_tool_use": true });
    let answer =
        ask(&world, None, request(json!([user("q")]), json!({ "tools": calc(), "tool_choice": choice }))).await;
    assert_eq!(answer["content"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn events_start_fill_and_stop_each_block_in_order() {
    let world = World::new();
    let agent = world.begin().await;
    world.script([say(r#"Hé<|call|>calc{"x": "1"}<|call|>calc{"x":"2"}"#)]);
    let body = request(json!([user("q")]), json!({ "stream": true, "tools": calc() }));
    let events = world.events(PATH, Some(&agent.key), &body).await;
    for (name, event) in &events {
        assert_eq!(event["type"], *name);
    }
    let names: Vec<_> = events.iter().map(|(name, _)| name.strip_prefix("content_block_").unwrap_or(name)).collect();
    assert_eq!(
        names,
        [
            "message_start",
            "ping",
            "start",
            "delta",
            "delta",
            "stop",
            "start",
            "delta",
            "stop",
            "start",
            "delta",
            "stop",
            "message_delta",
            "message_stop",
        ]
    );
    let start = &events[0].1["message"];
    assert_eq!(
        (&start["content"], &start["stop_reason"], &start["role"]),
        (&json!([]), &Value::Null, &json!("assistant"))
    );
    assert_eq!(start["usage"]["input_tokens"], world.last_request().prompt.len());
    assert_eq!(events[2].1["content_block"], json!({ "type": "text", "text": "" }));
    assert_eq!(events[4].1["delta"], json!({ "type": "text_delta", "text": "é" }));
    let call = &events[6].1["content_block"];
    assert_eq!((&call["type"], &call["name"], &call["input"]), (&json!("tool_use"), &json!("calc"), &json!({})));
    assert_eq!(events[7].1["delta"], json!({ "type": "input_json_delta", "partial_json": r#"{"x": "1"}"# }));
    let indices: Vec<_> = events.iter().filter_map(|(_, e)| e["index"].as_u64()).collect();
    assert_eq!(indices, [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]);
    let last = &events[12].1;
    assert_eq!(last["delta"], json!({ "stop_reason": "tool_use", "stop_sequence": null }));
    assert_eq!(last["usage"]["output_tokens"], world.node_answer_len());
    assert_eq!(agent.done().await.rollout.turns.len(), 1);
}

#[tokio::test]
async fn an_empty_answer_has_no_blocks() {
    let world = World::new();
    world.script([say("")]);
    let events = world.events(PATH, None, &request(json!([user("q")]), json!({ "stream": true }))).await;
    let names: Vec<_> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["message_start", "ping", "message_delta", "message_stop"]);
}

#[tokio::test]
async fn a_failure_on_the_way_is_an_error_event_of_this_api() {
    let world = World::new();
    world.script([Script::Fail(vec![97], true)]);
    let (_, headers, text) = world.post(PATH, &[], &request(json!([user("q")]), json!({ "stream": true }))).await;
    let all = events(&text);
    let (name, error) = all.last().unwrap();
    assert_eq!((name.as_str(), &error["type"]), ("error", &json!("error")));
    assert_eq!(error["error"]["type"], "overloaded_error");
    assert_eq!(error["request_id"], headers["request-id"].to_str().unwrap());
}

#[tokio::test]
async fn hanging_up_cancels_and_records_nothing() {
    let world = World::new();
    let url = world.listen().await;
    let agent = world.begin().await;
    world.script([Script::Hang(vec![97])]);
    let post = reqwest::Client::new().post(format!("{url}{PATH}")).header("x-api-key", &agent.key);
    let body = request(json!([user("q")]), json!({ "stream": true })).to_string();
    let response = post.header("content-type", "application/json").body(body).send().await.unwrap();
    eventually("the generation runs", || world.node.requests.lock().unwrap().len() == 1).await;
    drop(response);
    eventually("the stream is dropped", || world.node.cancelled.load(Ordering::SeqCst) == 1).await;
    assert!(agent.done().await.rollout.turns.is_empty());
}

#[tokio::test]
async fn a_count_is_what_a_call_would_send_and_samples_nothing() {
    let world = World::new();
    let agent = world.begin().await;
    world.script([say(" spaced ")]);
    let key = [("x-api-key", agent.key.as_str())];
    ask(&world, Some(&agent.key), request(json!([user("q")]), json!({ "system": "s", "tools": calc() }))).await;
    let messages = json!([user("q"), { "role": "assistant", "content": "spaced" }, user("r")]);
    let body = json!({ "model": MODEL, "messages": messages, "system": "s", "tools": calc() });
    let (status, _, text) = world.post(COUNT, &key, &body).await;
    assert_eq!(status, 200, "{text}");
    let exact = bytes(
        "<|tools|>calc(x)<|end|><|system|>s<|end|><|user|>q<|end|><|assistant|> spaced <|end|><|user|>r<|end|><|assistant|>",
    );
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), json!({ "input_tokens": exact.len() }));
    assert_eq!(world.node.requests.lock().unwrap().len(), 1);
    let (status, _, text) = world.post(COUNT, &[], &request(json!([user("q")]), json!({}))).await;
    assert_eq!(status, 400);
    assert!(text.contains("max_tokens"), "{text}");
    assert_eq!(agent.done().await.rollout.turns.len(), 1);
}

#[tokio::test]
async fn what_is_not_honoured_is_refused_by_name_in_this_apis_shape() {
    let world = World::new();
    let block = |block: Value| json!({ "messages": [{ "role": "user", "content": [block] }] });
    let tool = |more: Value| {
        let mut tool = calc()[0].clone();
        tool.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({ "tools": [tool] })
    };
    for (more, code, param) in [
        (json!({ "thinking": { "type": "enabled", "budget_tokens": 1024 } }), "unsupported_parameter", "thinking"),
        (json!({ "service_tier": "priority" }), "unsupported_parameter", "service_tier"),
        (json!({ "speed": "fast" }), "unsupported_parameter", "speed"),
        (json!({ "container": "c" }), "unsupported_parameter", "container"),
        (json!({ "context_management": { "edits": [] } }), "unsupported_parameter", "context_management"),
        (json!({ "diagnostics": {} }), "unsupported_parameter", "diagnostics"),
        (json!({ "inference_geo": "eu" }), "unsupported_parameter", "inference_geo"),
        (json!({ "mcp_servers": [{}] }), "unsupported_parameter", "mcp_servers"),
        (json!({ "output_config": { "effort": "low" } }), "unsupported_parameter", "output_config"),
        (json!({ "output_format": {} }), "unsupported_parameter", "output_format"),
        (json!({ "user_profile_id": "p" }), "unsupported_parameter", "user_profile_id"),
        (json!({ "workspace_id": "w" }), "unsupported_parameter", "workspace_id"),
        (json!({ "tool_choice": { "type": "any" } }), "unsupported_parameter", "tool_choice.type"),
        (json!({ "tool_choice": { "type": "tool", "name": "calc" } }), "unsupported_parameter", "tool_choice.type"),
        (json!({ "tool_choice": { "type": "all" } }), "invalid_value", "tool_choice.type"),
        (json!({ "tool_choice": "auto" }), "invalid_value", "tool_choice"),
        (json!({ "tools": [{ "type": "bash_20250124", "name": "bash" }] }), "unsupported_parameter", "tools[0].type"),
        (tool(json!({ "strict": true })), "unsupported_parameter", "tools[0].strict"),
        (tool(json!({ "defer_loading": true })), "unsupported_parameter", "tools[0].defer_loading"),
        (tool(json!({ "input_examples": [{}] })), "unsupported_parameter", "tools[0].input_examples"),
        (tool(json!({ "input_schema": null })), "missing_required_parameter", "tools[0].input_schema"),
        (tool(json!({ "function": {} })), "unknown_parameter", "tools[0].function"),
        (json!({ "seed": 1 }), "unknown_parameter", "seed"),
        (json!({ "max_tokens": null }), "missing_required_parameter", "max_tokens"),
        (json!({ "max_tokens": 0 }), "invalid_value", "max_tokens"),
        (json!({ "temperature": 1.5 }), "invalid_value", "temperature"),
        (json!({ "top_k": -2 }), "invalid_value", "top_k"),
        (json!({ "stop_sequences": [""] }), "invalid_value", "stop_sequences"),
        (json!({ "messages": [] }), "invalid_value", "messages"),
        (json!({ "messages": [{ "role": "system", "content": "x" }] }), "invalid_value", "messages[0].role"),
        (json!({ "messages": [{ "role": "user" }] }), "missing_required_parameter", "messages[0].content"),
        (
            json!({ "messages": [{ "role": "user", "content": "x", "name": "n" }] }),
            "unknown_parameter",
            "messages[0].name",
        ),
        (
            json!({ "messages": [user("q"), { "role": "assistant", "content": "The answer is" }] }),
            "unsupported_parameter",
            "messages",
        ),
        (block(json!({ "type": "image", "source": {} })), "unsupported_parameter", "messages[0].content[0].type"),
        (block(json!({ "type": "document", "source": {} })), "unsupported_parameter", "messages[0].content[0].type"),
        (block(json!({ "type": "thinking", "thinking": "x" })), "unsupported_parameter", "messages[0].content[0].type"),
        (
            block(json!({ "type": "tool_use", "id": "a", "name": "b", "input": {} })),
            "invalid_value",
            "messages[0].content[0].type",
        ),
        (
            block(json!({ "type": "text", "text": "x", "citations": [{}] })),
            "unsupported_parameter",
            "messages[0].content[0].citations",
        ),
        (block(json!({ "type": "text", "text": "x", "mood": 1 })), "unknown_parameter", "messages[0].content[0].mood"),
        (
            block(json!({ "type": "tool_result", "tool_use_id": "t", "content": [{ "type": "image" }] })),
            "unsupported_parameter",
            "messages[0].content[0].content[0].type",
        ),
        (json!({ "messages": [user(&"x".repeat(1030))] }), "context_length_exceeded", "1033 tokens"),
    ] {
        let body = request(json!([user("q")]), more);
        let (status, headers, text) = world.post(PATH, &[], &body).await;
        assert_eq!(status, 400, "{body}: {text}");
        let answer: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            (&answer["type"], &answer["error"]["type"]),
            (&json!("error"), &json!("invalid_request_error")),
            "{text}"
        );
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(
            message.starts_with(code) && message.contains(param),
            "{body}: expected {code} of {param}, got {message}"
        );
        assert_eq!(answer["request_id"], headers["request-id"].to_str().unwrap());
    }
    let neutral = json!({
        "thinking": { "type": "disabled" }, "service_tier": "auto", "speed": "standard", "mcp_servers": [], "output_config": {},
        "container": null, "tool_choice": { "type": "auto" }, "stop_sequences": [], "stream": false, "tools": [],
    });
    world.script([say("a")]);
    ask(&world, None, request(json!([user("q")]), neutral)).await;
}

#[tokio::test]
async fn keys_versions_and_other_refusals_have_their_status_and_type() {
    let config = GatewayConfig { open_inference: false, body_len_bytes_max: 2000, ..GatewayConfig::default() };
    let world = World::with(config, Purpose::Train, Sampling::default());
    let agent = world.begin().await;
    let body = request(json!([user("q")]), json!({}));
    let long = request(json!([user(&"x".repeat(2000))]), json!({}));
    let other = request(json!([user("q")]), json!({ "model": "other" }));
    let key = ("x-api-key", agent.key.as_str());
    for (headers, body, status, kind) in [
        (vec![], &body, 401, "authentication_error"),
        (vec![("x-api-key", "sk-guessed")], &body, 401, "authentication_error"),
        (vec![key, ("anthropic-version", "2023-01-01")], &body, 400, "invalid_request_error"),
        (vec![key], &long, 413, "request_too_large"),
        (vec![key], &other, 404, "not_found_error"),
    ] {
        let (got, _, text) = world.post(PATH, &headers, body).await;
        let answer: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((got.as_u16(), &answer["error"]["type"]), (status, &json!(kind)), "{text}");
    }
    world.script([say("a"), Script::Fail(vec![], true)]);
    let (status, headers, _) = world.post(PATH, &[key, ("anthropic-beta", "context-1m")], &body).await;
    assert_eq!(status, 200);
    assert!(headers["warning"].to_str().unwrap().contains("anthropic-beta"));
    let (status, headers, text) = world.post(PATH, &[key], &body).await;
    assert_eq!(status, 503, "{text}");
    assert!(text.contains("overloaded_error") && headers.contains_key("retry-after"), "{text}");
    agent.done().await;
    let (status, _, text) = world.post(PATH, &[key], &body).await;
    assert_eq!(status, 409);
    assert!(text.contains("conflict_error") && text.contains("episode_ended"), "{text}");
}
