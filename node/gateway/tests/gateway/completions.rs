//! `/v1/completions`: prompts without a chat template.

use crate::support::{END, Script, World, bytes, code, eventually, say};
use serde_json::{Value, json};
use std::sync::atomic::Ordering;

const PATH: &str = "/v1/completions";

fn request(prompt: Value, more: Value) -> Value {
    let mut body = json!({ "model": crate::support::MODEL, "prompt": prompt });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

async fn ask(world: &World, body: Value) -> Value {
    let (status, answer) = world.send("POST", PATH, None, &body.to_string()).await;
    assert_eq!(status, 200, "{answer}");
    answer
}

#[tokio::test]
async fn a_text_reaches_the_engine_as_it_stands() {
    let world = World::new();
    world.script([say("lo!")]);
    let answer =
        ask(&world, request(json!("<|user|>hel"), json!({ "temperature": 0.5, "seed": 3, "user": "u" }))).await;
    assert_eq!(answer["object"], "text_completion");
    assert!(answer["id"].as_str().unwrap().starts_with("cmpl-"));
    let choice = &answer["choices"][0];
    assert_eq!(*choice, json!({ "index": 0, "text": "lo!", "logprobs": null, "finish_reason": "stop" }));
    assert_eq!(answer["usage"], json!({ "prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8 }));
    let sent = world.last_request();
    assert_eq!(sent.prompt, bytes("<|user|>hel"));
    assert_eq!((sent.temperature, sent.seed), (0.5, 3));
    // The provider's own default where no job has one.
    assert_eq!(sent.max_tokens, 16);
}

#[tokio::test]
async fn prompts_come_as_texts_or_ids_one_or_several() {
    for (prompt, sent) in [
        (json!("ab"), vec![vec![97, 98]]),
        (json!(["ab", "c"]), vec![vec![97, 98], vec![99]]),
        (json!([97, END]), vec![vec![97, END]]),
        (json!([[97], [98, 99]]), vec![vec![97], vec![98, 99]]),
    ] {
        let world = World::new();
        world.script(sent.iter().map(|_| say("x")));
        let answer = ask(&world, request(prompt, json!({}))).await;
        let requests: Vec<_> = world.node.requests.lock().unwrap().iter().map(|r| r.prompt.clone()).collect();
        assert_eq!(requests, sent);
        let indices: Vec<_> = answer["choices"].as_array().unwrap().iter().map(|c| c["index"].clone()).collect();
        assert_eq!(indices, (0..sent.len()).map(|i| json!(i)).collect::<Vec<_>>());
    }
}

#[tokio::test]
async fn several_answers_to_several_prompts_keep_their_places() {
    let world = World::new();
    world.script(["a", "b", "c", "d"].map(say));
    let answer =
        ask(&world, request(json!(["p", "q"]), json!({ "n": 2, "best_of": 2, "echo": true, "seed": 1 }))).await;
    let texts: Vec<_> = answer["choices"].as_array().unwrap().iter().map(|c| c["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["pa", "pb", "qc", "qd"]);
    let mut seeds: Vec<_> = world.node.requests.lock().unwrap().iter().map(|r| r.seed).collect();
    seeds.sort_unstable();
    seeds.dedup();
    assert_eq!(seeds.len(), 4);
}

#[tokio::test]
async fn logprobs_have_the_shape_of_this_api() {
    let world = World::new();
    world.script([say("hé!"), say("a")]);
    let answer = ask(&world, request(json!("p"), json!({ "logprobs": 1 }))).await;
    let logprobs = &answer["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"], json!(["h", "bytes:\\xc3", "bytes:\\xa9", "!"]));
    assert_eq!(logprobs["token_logprobs"], json!([-0.5, -0.5, -0.5, -0.5]));
    assert_eq!(logprobs["text_offset"], json!([0, 1, 2, 2]));
    assert_eq!(logprobs["top_logprobs"][0]["h"], -0.5);
    assert_eq!(logprobs["top_logprobs"].as_array().unwrap().len(), 4);
    let answer = ask(&world, request(json!("p"), json!({ "logprobs": 0 }))).await;
    assert_eq!(answer["choices"][0]["logprobs"]["top_logprobs"], Value::Null);
    assert_eq!(answer["choices"][0]["logprobs"]["tokens"], json!(["a"]));
}

#[tokio::test]
async fn a_stream_has_a_chunk_a_token_and_ends_with_done() {
    let world = World::new();
    world.script([say("ab")]);
    let more = json!({ "stream": true, "stream_options": { "include_usage": true }, "echo": true });
    let events = world.events(PATH, None, &request(json!("p"), more)).await;
    let (done, events) = events.split_last().unwrap();
    assert_eq!(done.1, "[DONE]");
    let texts: Vec<_> = events.iter().filter_map(|(_, e)| e["choices"][0]["text"].as_str()).collect();
    assert_eq!(texts, ["p", "a", "b", ""]);
    assert_eq!(events[3].1["choices"][0]["finish_reason"], "stop");
    assert_eq!(events[4].1["usage"]["total_tokens"], 4);
    assert!(events[..4].iter().all(|(_, e)| e["usage"].is_null() && e["object"] == "text_completion"));
}

#[tokio::test]
async fn streamed_logprobs_go_on_with_their_offsets() {
    let world = World::new();
    world.script([say("abc")]);
    let events = world.events(PATH, None, &request(json!("p"), json!({ "stream": true, "logprobs": 0 }))).await;
    let offsets: Vec<_> =
        events.iter().filter_map(|(_, e)| e["choices"][0]["logprobs"]["text_offset"].as_array()).flatten().collect();
    assert_eq!(offsets, [&json!(0), &json!(1), &json!(2)]);
}

#[tokio::test]
async fn in_an_episode_each_prompt_is_a_timeline_trained_once() {
    let world = World::new();
    let agent = world.begin().await;
    world.script([say("one"), say("two"), say("three")]);
    for prompt in [json!(["p", "q"]), json!("p")] {
        let body = request(prompt, json!({ "max_tokens": 9 })).to_string();
        let (status, answer) = world.send("POST", PATH, Some(&agent.key), &body).await;
        assert_eq!(status, 200, "{answer}");
    }
    let rollout = agent.done().await.rollout;
    assert_eq!((rollout.timelines.len(), rollout.turns.len()), (3, 3));
    let trained: usize = rollout.timelines.iter().map(|t| t.loss_mask.iter().filter(|m| **m).count()).sum();
    assert_eq!(trained, "onetwothree".len() + 3);
    let causes: Vec<_> = rollout.turns.iter().filter_map(|t| t.fork_cause.as_deref()).collect();
    assert!(causes.contains(&"the same prompt again"), "{causes:?}");
}

#[tokio::test]
async fn hanging_up_cancels_every_prompt_and_records_none() {
    let world = World::new();
    let url = world.listen().await;
    let agent = world.begin().await;
    // The first prompt is answered long before the reader goes away.
    world.script([say("whole"), Script::Hang(vec![97])]);
    let body = request(json!(["p", "q"]), json!({ "stream": true })).to_string();
    let post =
        reqwest::Client::new().post(format!("{url}{PATH}")).header("authorization", format!("Bearer {}", agent.key));
    let response = post.header("content-type", "application/json").body(body).send().await.unwrap();
    eventually("both generations run", || world.node.requests.lock().unwrap().len() == 2).await;
    drop(response);
    eventually("the stream is dropped", || world.node.cancelled.load(Ordering::SeqCst) == 1).await;
    assert!(agent.done().await.rollout.turns.is_empty());
}

#[tokio::test]
async fn what_is_not_honoured_is_refused_by_name() {
    let world = World::new();
    for (more, expected, param) in [
        (json!({ "suffix": "end" }), "unsupported_parameter", "suffix"),
        (json!({ "presence_penalty": 1 }), "unsupported_parameter", "presence_penalty"),
        (json!({ "frequency_penalty": 1 }), "unsupported_parameter", "frequency_penalty"),
        (json!({ "logit_bias": { "1": 1 } }), "unsupported_parameter", "logit_bias"),
        (json!({ "best_of": 3 }), "unsupported_parameter", "best_of"),
        (json!({ "echo": true, "logprobs": 1 }), "unsupported_parameter", "echo"),
        (json!({ "echo": true, "prompt": [1, 2] }), "unsupported_parameter", "echo"),
        (json!({ "logprobs": 6 }), "invalid_value", "logprobs"),
        (json!({ "max_tokens": 0 }), "invalid_value", "max_tokens"),
        (json!({ "n": 0 }), "invalid_value", "n"),
        (json!({ "n": 3, "prompt": vec!["p"; 64] }), "invalid_value", "n"),
        (json!({ "prompt": [] }), "invalid_value", "prompt"),
        (json!({ "prompt": vec!["p"; 65] }), "invalid_value", "prompt"),
        (json!({ "prompt": ["p", 1] }), "invalid_value", "prompt"),
        (json!({ "prompt": 5 }), "invalid_value", "prompt"),
        (json!({ "prompt": [99999] }), "invalid_value", "prompt"),
        (json!({ "prompt": "" }), "context_length_exceeded", "prompt"),
        (json!({ "prompt": "x".repeat(1024) }), "context_length_exceeded", "prompt"),
        (json!({ "temperature": 3 }), "invalid_value", "temperature"),
        (json!({ "stream_options": {} }), "invalid_value", "stream_options"),
        (json!({ "messages": [] }), "unknown_parameter", "messages"),
    ] {
        let body = request(json!("p"), more);
        let (status, answer) = world.send("POST", PATH, None, &body.to_string()).await;
        let got = (status.as_u16(), code(&answer), answer["error"]["param"].as_str().unwrap_or("none"));
        assert_eq!(got, (400, expected, param), "{body}: {answer}");
    }
    world.script([say("a")]);
    let neutral = json!({
        "suffix": null, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "best_of": 1, "echo": false,
        "stop": ["never"], "top_p": 1, "top_k": -1, "stream": false,
    });
    ask(&world, request(json!("p"), neutral)).await;
}
