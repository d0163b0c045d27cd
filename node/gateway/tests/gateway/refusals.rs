//! Every field is honoured or refused by name.

use crate::support::{World, calc, code, request, say, user};
use serde_json::{Value, json};
use starling_gateway::GatewayConfig;
use starling_protocol::assignment::Purpose;
use starling_protocol::job::Sampling;

const CHAT: &str = "/v1/chat/completions";

async fn refused(world: &World, body: &Value, expected: (u16, &str, &str)) {
    let (status, answer) = world.send("POST", CHAT, None, &body.to_string()).await;
    let e = &answer["error"];
    let got = (status.as_u16(), code(&answer), e["param"].as_str().unwrap_or("none"));
    assert_eq!(got, expected, "{body}: {answer}");
    assert_eq!(e["type"], "invalid_request_error");
    assert!(!e["message"].as_str().unwrap().is_empty());
}

#[tokio::test]
async fn fields_that_are_not_honoured_are_refused_by_name() {
    let world = World::new();
    for (name, value) in [
        ("presence_penalty", json!(0.5)),
        ("frequency_penalty", json!(-1)),
        ("logit_bias", json!({ "5": 1 })),
        ("store", json!(true)),
        ("service_tier", json!("flex")),
        ("modalities", json!(["text", "audio"])),
        ("audio", json!({})),
        ("prediction", json!({ "type": "content" })),
        ("reasoning_effort", json!("high")),
        ("verbosity", json!("low")),
        ("web_search_options", json!({})),
        ("functions", json!([])),
        ("function_call", json!("auto")),
        ("response_format", json!({ "type": "json_object" })),
        ("tool_choice", json!("required")),
        ("tool_choice", json!({ "type": "function", "function": { "name": "calc" } })),
    ] {
        let body = request(json!([user("q")]), json!({ name: value, "tools": calc() }));
        refused(&world, &body, (400, "unsupported_parameter", name)).await;
    }
    for name in ["min_p", "best_of", "max_token", "guided_json"] {
        let body = request(json!([user("q")]), json!({ name: 1 }));
        refused(&world, &body, (400, "unknown_parameter", name)).await;
    }
}

#[tokio::test]
async fn values_that_change_nothing_are_let_through() {
    let world = World::new();
    world.script([say("a")]);
    let body = request(
        json!([
            { "role": "system", "content": [{ "type": "text", "text": "s" }] }, user("q"),
            { "role": "assistant", "content": null, "refusal": null, "annotations": [], "audio": null,
              "function_call": null, "tool_calls": null },
            user("r"),
        ]),
        json!({
            "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "store": false, "service_tier": "auto",
            "modalities": ["text"], "response_format": { "type": "text" }, "tool_choice": "none", "stop": null,
            "user": "u", "metadata": { "a": "b" }, "parallel_tool_calls": true, "tools": null, "seed": null, "n": 1,
            "audio": null, "functions": null, "stream": false, "logprobs": false, "safety_identifier": "x",
        }),
    );
    let (status, answer) = world.send("POST", CHAT, None, &body.to_string()).await;
    assert_eq!(status, 200, "{answer}");
}

#[tokio::test]
async fn values_out_of_range_are_refused_with_their_field() {
    let world = World::new();
    for (more, param) in [
        (json!({ "temperature": 2.1 }), "temperature"),
        (json!({ "temperature": -0.1 }), "temperature"),
        (json!({ "temperature": "hot" }), "temperature"),
        (json!({ "top_p": 0 }), "top_p"),
        (json!({ "top_p": 1.5 }), "top_p"),
        (json!({ "top_k": -2 }), "top_k"),
        (json!({ "top_k": 1.5 }), "top_k"),
        (json!({ "max_tokens": 0 }), "max_tokens"),
        (json!({ "max_tokens": -1 }), "max_tokens"),
        (json!({ "max_completion_tokens": 0 }), "max_completion_tokens"),
        (json!({ "max_tokens": 1, "max_completion_tokens": 2 }), "max_tokens"),
        (json!({ "stop": ["a", "b", "c", "d", "e"] }), "stop"),
        (json!({ "stop": "" }), "stop"),
        (json!({ "stop": 5 }), "stop"),
        (json!({ "stop": ["a", 5] }), "stop[1]"),
        (json!({ "n": 0 }), "n"),
        (json!({ "n": 17 }), "n"),
        (json!({ "seed": 1.5 }), "seed"),
        (json!({ "logprobs": 1 }), "logprobs"),
        (json!({ "top_logprobs": 3 }), "top_logprobs"),
        (json!({ "logprobs": true, "top_logprobs": 21 }), "top_logprobs"),
        (json!({ "stream_options": {} }), "stream_options"),
        (json!({ "stream": "yes" }), "stream"),
        (json!({ "model": "a b" }), "model"),
        (json!({ "model": 5 }), "model"),
        (json!({ "tools": [{ "type": "function" }] }), "tools[0].function.name"),
        (json!({ "tools": [{}] }), "tools[0].type"),
        (
            json!({ "tools": [{ "type": "function", "function": { "name": "a", "parameters": 1 } }] }),
            "tools[0].function.parameters",
        ),
    ] {
        refused(&world, &request(json!([user("q")]), more), (400, "invalid_value", param)).await;
    }
    let strict = json!({ "tools": [{ "type": "function", "function": { "name": "a", "strict": true } }] });
    refused(&world, &request(json!([user("q")]), strict), (400, "unsupported_parameter", "tools[0].function.strict"))
        .await;
    let search = json!({ "tools": [{ "type": "web_search" }] });
    refused(&world, &request(json!([user("q")]), search), (400, "unsupported_parameter", "tools[0].type")).await;
    let padded = json!({ "stream": true, "stream_options": { "include_usages": true } });
    refused(&world, &request(json!([user("q")]), padded), (400, "unknown_parameter", "stream_options.include_usages"))
        .await;
}

#[tokio::test]
async fn messages_that_cannot_be_are_refused_with_their_place() {
    let world = World::new();
    let call = json!([{ "id": "c", "type": "function", "function": { "name": "f", "arguments": "{}" } }]);
    for (message, code, param) in [
        (json!({ "role": "critic", "content": "x" }), "invalid_value", "messages[1].role"),
        (json!({ "role": "function", "content": "x" }), "unsupported_parameter", "messages[1].role"),
        (json!({ "content": "x" }), "missing_required_parameter", "messages[1].role"),
        (json!({ "role": "user" }), "missing_required_parameter", "messages[1].content"),
        (json!({ "role": "user", "content": 5 }), "invalid_value", "messages[1].content"),
        (json!({ "role": "user", "content": "x", "mood": 1 }), "unknown_parameter", "messages[1].mood"),
        (
            json!({ "role": "user", "content": [{ "type": "text", "text": "x" }, { "type": "image_url", "image_url": {} }] }),
            "unsupported_parameter",
            "messages[1].content[1].type",
        ),
        (json!({ "role": "tool", "content": "x" }), "missing_required_parameter", "messages[1].tool_call_id"),
        (json!({ "role": "user", "content": "x", "tool_call_id": "c" }), "invalid_value", "messages[1].tool_call_id"),
        (json!({ "role": "user", "content": "x", "tool_calls": call }), "invalid_value", "messages[1].tool_calls"),
        (
            json!({ "role": "assistant", "content": "x", "audio": { "id": "a" } }),
            "unsupported_parameter",
            "messages[1].audio",
        ),
        (
            json!({ "role": "assistant", "content": "x", "refusal": "no" }),
            "unsupported_parameter",
            "messages[1].refusal",
        ),
        (
            json!({ "role": "assistant", "tool_calls": [{ "type": "custom", "function": { "name": "f", "arguments": "{}" } }] }),
            "unsupported_parameter",
            "messages[1].tool_calls[0].type",
        ),
        (
            json!({ "role": "assistant", "tool_calls": [{ "function": { "name": "f", "arguments": {} } }] }),
            "invalid_value",
            "messages[1].tool_calls[0].function.arguments",
        ),
    ] {
        refused(&world, &request(json!([user("q"), message]), json!({})), (400, code, param)).await;
    }
    refused(&world, &request(json!([]), json!({})), (400, "invalid_value", "messages")).await;
    refused(&world, &json!({ "messages": [] }), (400, "missing_required_parameter", "model")).await;
    refused(&world, &request(json!([user("q")]), json!({ "model": "other" })), (404, "model_not_found", "model")).await;
}

#[tokio::test]
async fn bodies_that_are_no_json_or_too_long_are_refused() {
    let config = GatewayConfig { body_len_bytes_max: 1000, ..GatewayConfig::default() };
    let world = World::with(config, Purpose::Train, Sampling::default());
    for body in ["", "{", "null", "[]", "\"x\"", "{\"model\": \"test/bytes\",}", "{} {}"] {
        let (status, answer) = world.send("POST", CHAT, None, body).await;
        assert_eq!(status, 400, "{body}");
        assert!(answer["error"]["message"].is_string(), "{body}: {answer}");
    }
    let body = request(json!([user("q")]), json!({})).to_string() + " x";
    let (status, answer) = world.send("POST", CHAT, None, &body).await;
    assert_eq!((status.as_u16(), code(&answer)), (400, "invalid_json"));
    let body = request(json!([user(&"x".repeat(1000))]), json!({})).to_string();
    let (status, answer) = world.send("POST", CHAT, None, &body).await;
    assert_eq!((status.as_u16(), code(&answer)), (413, "body_too_long"));
}

#[tokio::test]
async fn an_episodes_model_is_its_own() {
    let world = World::new();
    let agent = world.begin().await;
    let (status, answer) = agent.chat(request(json!([user("q")]), json!({ "model": "gpt-4o" }))).await;
    assert_eq!((status.as_u16(), code(&answer)), (404, "model_not_found"));
    assert!(answer["error"]["message"].as_str().unwrap().contains("test/bytes"), "{answer}");
}
