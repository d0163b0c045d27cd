//! `/v1/responses`: items in, items and numbered events out.

use crate::support::{MODEL, Script, World, bytes, code, eventually, say};
use serde_json::{Value, json};
use starling_gateway::GatewayConfig;
use starling_protocol::assignment::Purpose;
use starling_protocol::job::Sampling;
use std::sync::atomic::Ordering;

const PATH: &str = "/v1/responses";

fn request(input: Value, more: Value) -> Value {
    let mut body = json!({ "model": MODEL, "input": input });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

async fn ask(world: &World, key: Option<&str>, body: Value) -> Value {
    let (status, answer) = world.send("POST", PATH, key, &body.to_string()).await;
    assert_eq!(status, 200, "{answer}");
    answer
}

fn calc() -> Value {
    let schema = json!({ "type": "object", "properties": { "x": { "type": "string" } }, "required": ["x"] });
    json!([{ "type": "function", "name": "calc", "description": "Calculates.", "parameters": schema, "strict": false }])
}

#[tokio::test]
async fn a_response_says_what_was_asked_and_what_came() {
    let world = World::new();
    world.script([say("hello")]);
    let more = json!({
        "instructions": "Be brief.", "temperature": 0.5, "top_p": 0.9, "max_output_tokens": 20,
        "metadata": { "run": "7" }, "user": "u", "text": { "format": { "type": "text" } }, "store": false,
    });
    let answer = ask(&world, None, request(json!("hi"), more)).await;
    assert_eq!(world.last_request().prompt, bytes("<|system|>Be brief.<|end|><|user|>hi<|end|><|assistant|>"));
    assert_eq!((answer["object"].as_str(), answer["status"].as_str()), (Some("response"), Some("completed")));
    assert!(answer["id"].as_str().unwrap().starts_with("resp_"));
    let item = &answer["output"][0];
    assert!(item["id"].as_str().unwrap().starts_with("msg_"));
    assert_eq!(
        (&item["type"], &item["role"], &item["status"]),
        (&json!("message"), &json!("assistant"), &json!("completed"))
    );
    assert_eq!(item["content"], json!([{ "type": "output_text", "text": "hello", "annotations": [], "logprobs": [] }]));
    let usage = &answer["usage"];
    assert_eq!(
        (&usage["output_tokens"], &usage["total_tokens"]),
        (&json!(6), &json!(6 + world.last_request().prompt.len()))
    );
    for (field, value) in [
        ("instructions", json!("Be brief.")),
        ("temperature", json!(0.5)),
        ("max_output_tokens", json!(20)),
        ("metadata", json!({ "run": "7" })),
        ("user", json!("u")),
        ("store", json!(false)),
        ("error", Value::Null),
        ("tool_choice", json!("auto")),
        ("tools", json!([])),
        ("previous_response_id", Value::Null),
        ("incomplete_details", Value::Null),
        ("parallel_tool_calls", json!(true)),
    ] {
        assert_eq!(answer[field], value, "{field}");
    }
}

#[tokio::test]
async fn a_cut_answer_is_incomplete_and_says_why() {
    let world = World::new();
    world.script([say("too long"), say("too long")]);
    let body = request(json!("hi"), json!({ "max_output_tokens": 3 }));
    let answer = ask(&world, None, body.clone()).await;
    assert_eq!((&answer["status"], &answer["output"][0]["status"]), (&json!("incomplete"), &json!("incomplete")));
    assert_eq!(answer["incomplete_details"], json!({ "reason": "max_output_tokens" }));
    let mut body = body;
    body["stream"] = json!(true);
    let events = world.events(PATH, None, &body).await;
    assert_eq!(events.last().unwrap().0, "response.incomplete");
}

#[tokio::test]
async fn events_announce_fill_and_close_each_item_in_order_with_numbers() {
    let world = World::new();
    let agent = world.begin().await;
    world.script([say(r#"ab<|call|>calc{"x": "1"}<|call|>calc{"x":"2"}"#)]);
    let body = request(json!("q"), json!({ "stream": true, "tools": calc() }));
    let events = world.events(PATH, Some(&agent.key), &body).await;
    let names: Vec<_> = events.iter().map(|(name, _)| name.strip_prefix("response.").unwrap()).collect();
    assert_eq!(
        names,
        [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "completed",
        ]
    );
    for (i, (name, event)) in events.iter().enumerate() {
        assert_eq!((event["type"].as_str().unwrap(), &event["sequence_number"]), (name.as_str(), &json!(i)));
    }
    let output = events.last().unwrap().1["response"]["output"].clone();
    let done: Vec<_> =
        events.iter().filter(|(n, _)| n == "response.output_item.done").map(|(_, e)| e["item"].clone()).collect();
    assert_eq!(output, json!(done), "the last snapshot is what was streamed");
    assert_eq!(output[1]["arguments"], r#"{"x": "1"}"#);
    assert_eq!((&output[2]["type"], &output[2]["name"]), (&json!("function_call"), &json!("calc")));
    assert!(output[2]["call_id"].as_str().unwrap().starts_with("call_"));
    for (name, event) in &events {
        if let Some(index) = event["output_index"].as_u64() {
            let id = if event["item"].is_null() { &event["item_id"] } else { &event["item"]["id"] };
            assert_eq!(*id, output[usize::try_from(index).unwrap()]["id"], "{name}");
        }
    }
    assert_eq!(agent.done().await.rollout.turns.len(), 1);
}

#[tokio::test]
async fn an_empty_answer_is_an_empty_message() {
    let world = World::new();
    world.script([say(""), say("")]);
    let answer = ask(&world, None, request(json!("q"), json!({}))).await;
    assert_eq!(answer["output"][0]["content"][0]["text"], "");
    let events = world.events(PATH, None, &request(json!("q"), json!({ "stream": true }))).await;
    let names: Vec<_> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names[2..],
        [
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
}

#[tokio::test]
async fn items_that_are_sent_back_continue_the_exact_tokens() {
    let world = World::new();
    let agent = world.begin().await;
    world.script([say(r#"So: <|call|>calc{"x": "1"}<|call|>calc{"x":"2"}"#), say("3")]);
    let mut input = vec![json!({ "role": "user", "content": [{ "type": "input_text", "text": "q" }] })];
    let first = ask(&world, Some(&agent.key), request(json!(input), json!({ "tools": calc() }))).await;
    let before = world.last_request().prompt;
    let output = first["output"].as_array().unwrap();
    input.extend(output.iter().cloned());
    for call in output.iter().filter(|i| i["type"] == "function_call") {
        input.push(json!({ "type": "function_call_output", "call_id": call["call_id"], "output": "r" }));
    }
    ask(&world, Some(&agent.key), request(json!(input), json!({ "tools": calc() }))).await;
    let mut exact = before;
    exact.extend(bytes(r#"So: <|call|>calc{"x": "1"}<|call|>calc{"x":"2"}<|end|>"#));
    exact.extend(bytes("<|tool|>r<|end|><|tool|>r<|end|><|assistant|>"));
    assert_eq!(world.last_request().prompt, exact);
    assert_eq!(agent.done().await.rollout.timelines.len(), 1);
}

#[tokio::test]
async fn a_previous_response_is_gone_on_from_whole_or_streamed() {
    let world = World::new();
    let agent = world.begin().await;
    world.script([say(r#"<|call|>calc{"x": "1"}"#), say("three"), say("four")]);
    let key = Some(agent.key.as_str());
    let first = ask(&world, key, request(json!("q"), json!({ "tools": calc() }))).await;
    let result = json!([{ "type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "1" }]);
    let body = request(result, json!({ "tools": calc(), "previous_response_id": first["id"], "stream": true }));
    let events = world.events(PATH, key, &body).await;
    let second = &events.last().unwrap().1["response"];
    assert_eq!(second["previous_response_id"], first["id"]);
    ask(&world, key, request(json!("r"), json!({ "tools": calc(), "previous_response_id": second["id"] }))).await;
    let exact = concat!(
        r#"<|tools|>calc(x)<|end|><|user|>q<|end|><|assistant|><|call|>calc{"x": "1"}<|end|>"#,
        "<|tool|>1<|end|><|assistant|>three<|end|><|user|>r<|end|><|assistant|>",
    );
    assert_eq!(world.last_request().prompt, bytes(exact));
    assert_eq!(agent.done().await.rollout.timelines.len(), 1);
}

#[tokio::test]
async fn instructions_are_not_inherited() {
    let world = World::new();
    world.script([say("a"), say("b")]);
    let first = ask(&world, None, request(json!("q"), json!({ "instructions": "one" }))).await;
    let more = json!({ "instructions": "two", "previous_response_id": first["id"] });
    ask(&world, None, request(json!("r"), more)).await;
    let exact = "<|system|>two<|end|><|user|>q<|end|><|assistant|>a<|end|><|user|>r<|end|><|assistant|>";
    assert_eq!(world.last_request().prompt, bytes(exact));
}

#[tokio::test]
async fn a_response_is_known_to_its_own_episode_or_key_only_and_only_if_stored() {
    let world = World::new();
    let (one, two) = (world.begin().await, world.begin().await);
    world.script(["a", "b", "c"].map(say));
    let of_one = ask(&world, Some(&one.key), request(json!("q"), json!({}))).await;
    let of_key = ask(&world, Some("k"), request(json!("q"), json!({}))).await;
    let unstored = ask(&world, Some(&one.key), request(json!("q"), json!({ "store": false }))).await;
    for (key, id) in [
        (Some(two.key.as_str()), &of_one["id"]),
        (None, &of_one["id"]),
        (Some("other"), &of_key["id"]),
        (None, &of_key["id"]),
        (Some(one.key.as_str()), &of_key["id"]),
        (Some(one.key.as_str()), &unstored["id"]),
        (None, &json!("resp_guessed")),
    ] {
        let body = request(json!("r"), json!({ "previous_response_id": id }));
        let (status, answer) = world.send("POST", PATH, key, &body.to_string()).await;
        assert_eq!((status.as_u16(), code(&answer)), (400, "previous_response_not_found"), "{key:?} {id}");
        assert_eq!(answer["error"]["param"], "previous_response_id");
    }
}

#[tokio::test]
async fn a_failure_on_the_way_is_the_last_event() {
    let world = World::new();
    world.script([Script::Fail(vec![97], true)]);
    let events = world.events(PATH, None, &request(json!("q"), json!({ "stream": true }))).await;
    let (name, last) = events.last().unwrap();
    assert_eq!((name.as_str(), &last["response"]["status"]), ("response.failed", &json!("failed")));
    assert_eq!(last["response"]["error"]["code"], "server_error");
    assert!(last["response"]["error"]["message"].as_str().unwrap().starts_with("engine_unavailable"), "{last}");
    let begun = &last["response"]["output"][0];
    assert_eq!((&begun["content"][0]["text"], &begun["status"]), (&json!("a"), &json!("incomplete")));
    let id = &last["response"]["id"];
    let body = request(json!("r"), json!({ "previous_response_id": id }));
    let (status, _) = world.send("POST", PATH, None, &body.to_string()).await;
    assert_eq!(status, 400, "a failed response is not kept");
}

#[tokio::test]
async fn hanging_up_cancels_and_keeps_nothing() {
    let world = World::new();
    let url = world.listen().await;
    let agent = world.begin().await;
    world.script([Script::Hang(vec![97])]);
    let post =
        reqwest::Client::new().post(format!("{url}{PATH}")).header("authorization", format!("Bearer {}", agent.key));
    let body = request(json!("q"), json!({ "stream": true })).to_string();
    let response = post.header("content-type", "application/json").body(body).send().await.unwrap();
    eventually("the generation runs", || world.node.requests.lock().unwrap().len() == 1).await;
    drop(response);
    eventually("the stream is dropped", || world.node.cancelled.load(Ordering::SeqCst) == 1).await;
    assert!(agent.done().await.rollout.turns.is_empty());
}

#[tokio::test]
async fn a_silent_stream_gets_signs_of_life() {
    let config = GatewayConfig {
        heartbeat: std::time::Duration::from_millis(10),
        frame_timeout: std::time::Duration::from_secs(1),
        ..GatewayConfig::default()
    };
    let world = World::with(config, Purpose::Train, Sampling::default());
    for (path, body, sign) in [
        (PATH, request(json!("q"), json!({ "stream": true })), ": waiting"),
        (
            "/v1/chat/completions",
            crate::support::request(json!([crate::support::user("q")]), json!({ "stream": true })),
            ": waiting",
        ),
        (
            "/v1/messages",
            json!({ "model": MODEL, "max_tokens": 5, "messages": [crate::support::user("q")], "stream": true }),
            "event: ping",
        ),
    ] {
        world.script([Script::Hang(vec![97])]);
        let (_, _, text) = world.post(path, &[], &body).await;
        // More than the one that every message begins with, and a silence that is too long is still noticed.
        assert!(text.matches(sign).count() >= 2, "{path}: {text}");
        assert!(text.contains("silent"), "{path}: {text}");
    }
}

#[tokio::test]
async fn what_is_not_honoured_is_refused_by_name() {
    let world = World::new();
    let tool = |more: Value| {
        let mut tool = calc()[0].clone();
        tool.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({ "tools": [tool] })
    };
    for (more, expected, param) in [
        (json!({ "truncation": "auto" }), "unsupported_parameter", "truncation"),
        (json!({ "include": ["file_search_call.results"] }), "unsupported_parameter", "include"),
        (json!({ "reasoning": { "effort": "low" } }), "unsupported_parameter", "reasoning"),
        (json!({ "background": true }), "unsupported_parameter", "background"),
        (json!({ "background_options": {} }), "unsupported_parameter", "background_options"),
        (json!({ "context_management": [{ "type": "compaction" }] }), "unsupported_parameter", "context_management"),
        (json!({ "conversation": "conv_1" }), "unsupported_parameter", "conversation"),
        (json!({ "image": {} }), "unsupported_parameter", "image"),
        (json!({ "max_tool_calls": 3 }), "unsupported_parameter", "max_tool_calls"),
        (json!({ "moderation": {} }), "unsupported_parameter", "moderation"),
        (json!({ "prompt": { "id": "p" } }), "unsupported_parameter", "prompt"),
        (json!({ "prompt_cache_options": {} }), "unsupported_parameter", "prompt_cache_options"),
        (json!({ "prompt_cache_retention": "24h" }), "unsupported_parameter", "prompt_cache_retention"),
        (json!({ "service_tier": "flex" }), "unsupported_parameter", "service_tier"),
        (json!({ "top_logprobs": 2 }), "unsupported_parameter", "top_logprobs"),
        (json!({ "access_programs": {} }), "unsupported_parameter", "access_programs"),
        (json!({ "tool_choice": "required" }), "unsupported_parameter", "tool_choice"),
        (json!({ "tool_choice": { "type": "function", "name": "calc" } }), "unsupported_parameter", "tool_choice"),
        (json!({ "text": { "format": { "type": "json_object" } } }), "unsupported_parameter", "text.format"),
        (json!({ "text": { "verbosity": "low" } }), "unsupported_parameter", "text.verbosity"),
        (json!({ "text": { "colour": "red" } }), "unknown_parameter", "text.colour"),
        (json!({ "tools": [{ "type": "web_search" }] }), "unsupported_parameter", "tools[0].type"),
        (tool(json!({ "strict": true })), "unsupported_parameter", "tools[0].strict"),
        (tool(json!({ "defer_loading": true })), "unsupported_parameter", "tools[0].defer_loading"),
        (tool(json!({ "name": "" })), "invalid_value", "tools[0].name"),
        (tool(json!({ "parameters": 1 })), "invalid_value", "tools[0].parameters"),
        (tool(json!({ "function": {} })), "unknown_parameter", "tools[0].function"),
        (json!({ "metadata": { "a": 1 } }), "invalid_value", "metadata"),
        (json!({ "max_output_tokens": 0 }), "invalid_value", "max_output_tokens"),
        (json!({ "temperature": 2.5 }), "invalid_value", "temperature"),
        (json!({ "stream_options": {} }), "invalid_value", "stream_options"),
        (
            json!({ "stream": true, "stream_options": { "include_obfuscation": true } }),
            "unsupported_parameter",
            "stream_options.include_obfuscation",
        ),
        (json!({ "stop": "x" }), "unknown_parameter", "stop"),
        (json!({ "input": 5 }), "invalid_value", "input"),
        (json!({ "input": [] }), "invalid_value", "input"),
        (json!({ "input": ["x"] }), "invalid_value", "input[0]"),
        (json!({ "input": [{ "content": "x" }] }), "missing_required_parameter", "input[0].role"),
        (json!({ "input": [{ "role": "tool", "content": "x" }] }), "invalid_value", "input[0].role"),
        (json!({ "input": [{ "role": "user" }] }), "missing_required_parameter", "input[0].content"),
        (json!({ "input": [{ "role": "user", "content": "x", "mood": 1 }] }), "unknown_parameter", "input[0].mood"),
        (
            json!({ "input": [{ "role": "user", "content": [{ "type": "input_image", "image_url": "x" }] }] }),
            "unsupported_parameter",
            "input[0].content[0].type",
        ),
        (json!({ "input": [{ "type": "reasoning", "summary": [] }] }), "unsupported_parameter", "input[0].type"),
        (json!({ "input": [{ "type": "item_reference", "id": "x" }] }), "unsupported_parameter", "input[0].type"),
        (
            json!({ "input": [{ "type": "function_call", "name": "f", "arguments": "{}" }] }),
            "missing_required_parameter",
            "input[0].call_id",
        ),
        (
            json!({ "input": [{ "type": "function_call_output", "call_id": "c" }] }),
            "missing_required_parameter",
            "input[0].output",
        ),
        (json!({ "input": "x".repeat(1030) }), "context_length_exceeded", "input"),
    ] {
        let body = request(json!("q"), more);
        let (status, answer) = world.send("POST", PATH, None, &body.to_string()).await;
        let got = (status.as_u16(), code(&answer), answer["error"]["param"].as_str().unwrap_or("none"));
        assert_eq!(got, (400, expected, param), "{body}: {answer}");
    }
    let neutral = json!({
        "truncation": "disabled", "include": ["reasoning.encrypted_content"], "reasoning": { "effort": null }, "background": false,
        "service_tier": "auto", "top_logprobs": 0, "tool_choice": "none", "text": { "verbosity": "medium" }, "top_k": 0,
        "safety_identifier": "s", "prompt_cache_key": "k", "tools": calc(), "parallel_tool_calls": false, "stream": false,
    });
    world.script([say("<|call|>calc{}")]);
    let answer = ask(&world, None, request(json!("q"), neutral)).await;
    assert_eq!(
        answer["output"][0]["content"][0]["text"], "calc{}",
        "tools that are not to be called are not looked for"
    );
}
