//! What a chat request asks for is what it gets.

use crate::support::{END, Script, World, bytes, calc, code, request, say, user};
use serde_json::{Value, json};
use starling_gateway::GatewayConfig;
use starling_protocol::assignment::{EvalPhase, Purpose};
use starling_protocol::job::Sampling;
use starling_protocol::rollout::FinishReason;

fn content(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().unwrap()
}

#[tokio::test]
async fn stop_strings_end_an_answer_across_tokens_and_are_not_shown() {
    let world = World::new();
    let agent = world.begin().await;
    world.script([say("one, STOX, two STOP three"), say("next")]);
    let first = agent.ask(json!([user("q")]), json!({ "stop": ["nowhere", "STOP"] })).await;
    assert_eq!(content(&first), "one, STOX, two ");
    assert_eq!(first["choices"][0]["finish_reason"], "stop");
    let kept = "one, STOX, two STOP";
    assert_eq!(first["usage"]["completion_tokens"], kept.len());
    // History keeps what was sampled, stop text included, and closes the message.
    agent.ask(json!([user("q"), { "role": "assistant", "content": "one, STOX, two" }, user("r")]), json!({})).await;
    assert_eq!(
        world.last_request().prompt,
        bytes("<|user|>q<|end|><|assistant|>one, STOX, two STOP<|end|><|user|>r<|end|><|assistant|>")
    );
    let verified = agent.done().await;
    assert_eq!(verified.rollout.turns[0].completion_len as usize, kept.len());
    assert_eq!(verified.rollout.timelines.len(), 1);
}

#[tokio::test]
async fn a_stop_string_that_begins_but_does_not_end_is_shown() {
    let world = World::new();
    world.script([say("wait S")]);
    let (_, answer) = world
        .send("POST", "/v1/chat/completions", None, &request(json!([user("q")]), json!({ "stop": "STOP" })).to_string())
        .await;
    assert_eq!(content(&answer), "wait S");
}

#[tokio::test]
async fn an_answer_cut_at_the_limit_says_so() {
    let world = World::new();
    let agent = world.begin().await;
    world.script([say("a long answer"), say(r#"<|call|>calc{"x":"1"}"#)]);
    let answer = agent.ask(json!([user("q")]), json!({ "max_completion_tokens": 6 })).await;
    assert_eq!((content(&answer), answer["choices"][0]["finish_reason"].as_str().unwrap()), ("a long", "length"));
    assert_eq!(world.last_request().max_tokens, 6);
    // A call that is cut is no call, even where its text happens to be whole.
    let answer = agent.ask(json!([user("q")]), json!({ "max_tokens": 14, "tools": calc() })).await;
    assert_eq!(content(&answer), r#"<|call|>calc{"x":"1"}"#);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    let turns = agent.done().await.rollout.turns;
    assert!(turns.iter().all(|t| t.finish == FinishReason::Length));
}

#[tokio::test]
async fn a_malformed_call_stays_text() {
    let world = World::new();
    let agent = world.begin().await;
    world.script([say("<|call|>calc{x}"), say("<|call|>calc{}"), say("<|call|>calc{}")]);
    let answer = agent.ask(json!([user("q")]), json!({ "tools": calc() })).await;
    assert_eq!((content(&answer), &answer["choices"][0]["finish_reason"]), ("<|call|>calc{x}", &json!("stop")));
    // Tools that are not to be called are not looked for.
    let answer = agent.ask(json!([user("q")]), json!({ "tools": calc(), "tool_choice": "none" })).await;
    assert_eq!(content(&answer), "calc{}");
    let answer = agent.ask(json!([user("q")]), json!({})).await;
    assert_eq!(content(&answer), "calc{}");
    let verified = agent.done().await;
    let causes: Vec<_> = verified.rollout.turns.iter().map(|t| t.fork_cause.as_deref()).collect();
    assert_eq!(causes, [None, Some("the same prompt again"), Some("tools changed")]);
}

#[tokio::test]
async fn one_call_at_a_time_if_asked() {
    let world = World::new();
    let agent = world.begin().await;
    let two = r#"<|call|>calc{"x":"1"}<|call|>calc{"x":"2"}"#;
    world.script([say(two), say(two)]);
    let answer = agent.ask(json!([user("q")]), json!({ "tools": calc() })).await;
    assert_eq!(answer["choices"][0]["message"]["tool_calls"].as_array().unwrap().len(), 2);
    let answer = agent.ask(json!([user("r")]), json!({ "tools": calc(), "parallel_tool_calls": false })).await;
    assert_eq!(answer["choices"][0]["message"]["tool_calls"].as_array().unwrap().len(), 1);
    assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls");
    agent.done().await;
}

#[tokio::test]
async fn several_answers_are_sampled_apart_and_each_can_be_gone_on_from() {
    let world = World::new();
    let agent = world.begin().await;
    world.script([say("a"), say("b"), say("c"), say("d")]);
    let answer = agent.ask(json!([user("q")]), json!({ "n": 3, "seed": 5 })).await;
    let texts: Vec<_> =
        answer["choices"].as_array().unwrap().iter().map(|c| c["message"]["content"].as_str().unwrap()).collect();
    assert_eq!(texts, ["a", "b", "c"]);
    assert_eq!(answer["choices"][2]["index"], 2);
    assert_eq!(answer["usage"]["completion_tokens"], 6);
    {
        let requests = world.node.requests.lock().unwrap();
        let mut seeds: Vec<_> = requests.iter().map(|r| r.seed).collect();
        assert_eq!(seeds[0], 5);
        seeds.sort_unstable();
        seeds.dedup();
        assert_eq!(seeds.len(), 3);
    }
    agent.ask(json!([user("q"), { "role": "assistant", "content": "b" }, user("r")]), json!({})).await;
    let exact = bytes("<|user|>q<|end|><|assistant|>b<|end|><|user|>r<|end|><|assistant|>");
    assert_eq!(world.last_request().prompt, exact);
    let rollout = agent.done().await.rollout;
    assert_eq!((rollout.timelines.len(), rollout.turns.len()), (3, 4));
    assert_eq!(rollout.turns[3].timeline, rollout.turns[1].timeline);
}

#[tokio::test]
async fn logprobs_cover_each_token_of_the_text() {
    let world = World::new();
    world.script([say("hé")]);
    let body = request(json!([user("q")]), json!({ "logprobs": true, "top_logprobs": 2 }));
    let (_, answer) = world.send("POST", "/v1/chat/completions", None, &body.to_string()).await;
    let tokens = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(tokens.len(), 3);
    assert_eq!(tokens[0]["token"], "h");
    assert_eq!(tokens[0]["logprob"], -0.5);
    assert_eq!(tokens[0]["top_logprobs"].as_array().unwrap().len(), 2);
    // Half a character has no text, but its byte.
    assert_eq!(tokens[1]["bytes"], json!([0xC3]));
    assert_eq!(world.last_request().top_logprobs, 2);
}

#[tokio::test]
async fn an_episodes_job_gives_the_defaults_and_requests_overrule_them() {
    let sampling = Sampling { temperature: 0.7, top_p: 0.9, top_k: 40, max_tokens: 33 };
    let world = World::with(GatewayConfig::default(), Purpose::Train, sampling);
    let agent = world.begin().await;
    world.script((0..4).map(|_| say("a")));
    agent.ask(json!([user("q")]), json!({})).await;
    let r = world.last_request();
    assert_eq!((r.temperature, r.top_p, r.top_k, r.max_tokens), (0.7, 0.9, 40, 33));
    assert_eq!(r.stop_token_ids, [END]);
    agent.ask(json!([user("q")]), json!({ "temperature": 0, "top_p": 1, "top_k": -1, "max_tokens": 5000 })).await;
    let r = world.last_request();
    assert_eq!((r.temperature, r.top_p, r.top_k), (0.0, 1.0, 0));
    // At most what the context has room for.
    assert_eq!(r.max_tokens as usize, 1024 - r.prompt.len());
    // Seeds are the episode's, one a call.
    let seeds: Vec<_> = world.node.requests.lock().unwrap().iter().map(|r| r.seed).collect();
    assert_ne!(seeds[0], seeds[1]);
    let other = World::with(GatewayConfig::default(), Purpose::Train, sampling);
    let twin = other.begin().await;
    other.script([say("a"), say("a")]);
    twin.ask(json!([user("q")]), json!({})).await;
    assert_eq!(other.last_request().seed, seeds[0]);
    twin.ask(json!([user("q")]), json!({ "seed": -1 })).await;
    assert_eq!(other.last_request().seed, u64::MAX);
}

#[tokio::test]
async fn a_greedy_evaluation_is_greedy_whatever_the_agent_asks() {
    let purpose = Purpose::Eval { phase: EvalPhase::End, greedy: true, slot: 0 };
    let world = World::with(GatewayConfig::default(), purpose, Sampling::default());
    let agent = world.begin().await;
    world.script([say("a")]);
    agent.ask(json!([user("q")]), json!({ "temperature": 1.5 })).await;
    assert!(world.last_request().temperature.abs() < f32::EPSILON);
}

#[tokio::test]
async fn a_call_outside_an_episode_is_answered_but_not_recorded() {
    let world = World::new();
    world.script([say("a")]);
    for key in [None, Some("EMPTY")] {
        world.script([say("a")]);
        let body = request(json!([user("q")]), json!({})).to_string();
        let (status, answer) = world.send("POST", "/v1/chat/completions", key, &body).await;
        assert_eq!((status.as_u16(), content(&answer)), (200, "a"));
        assert_eq!(answer["system_fingerprint"], "starling-v1");
    }
    // No job limits its length.
    let r = world.last_request();
    assert_eq!(r.max_tokens as usize, 1024 - r.prompt.len());
    assert!(world.gateway.episodes().is_empty());
}

#[tokio::test]
async fn a_prompt_that_fills_the_context_is_refused() {
    let world = World::new();
    let body = request(json!([user(&"x".repeat(1030))]), json!({})).to_string();
    let (status, answer) = world.send("POST", "/v1/chat/completions", None, &body).await;
    assert_eq!((status.as_u16(), code(&answer)), (400, "context_length_exceeded"));
    assert!(answer["error"]["message"].as_str().unwrap().contains("1033 tokens"), "{answer}");
}

#[tokio::test]
async fn a_backend_that_gives_up_ends_the_call_with_its_reason_and_records_nothing() {
    let world = World::new();
    let agent = world.begin().await;
    world.script([Script::Fail(vec![97], true)]);
    let (status, answer) = agent.chat(request(json!([user("r")]), json!({}))).await;
    assert_eq!((status.as_u16(), code(&answer)), (503, "engine_unavailable"));
    world.script([Script::Fail(vec![], false)]);
    let (status, answer) = agent.chat(request(json!([user("r")]), json!({}))).await;
    assert_eq!((status.as_u16(), code(&answer)), (500, "engine_failed"));
    world.script([say("whole")]);
    agent.ask(json!([user("q")]), json!({})).await;
    assert_eq!(agent.done().await.rollout.turns.len(), 1);
}

#[tokio::test]
async fn what_a_lost_server_streamed_is_recorded_and_not_trained_on() {
    let world = World::new();
    let agent = world.begin().await;
    world.script([Script::Continued(vec![97, 98], vec![99, END]), say("on")]);
    let answer = agent.ask(json!([user("q")]), json!({})).await;
    assert_eq!(content(&answer), "abc");
    // Its own text stays the history of the next call.
    let history = json!([user("q"), { "role": "assistant", "content": "abc" }, user("r")]);
    agent.ask(history, json!({})).await;
    let rollout = agent.done().await.rollout;
    assert_eq!((rollout.timelines.len(), rollout.turns.len()), (1, 2));
    let (turn, timeline) = (&rollout.turns[0], &rollout.timelines[0]);
    let at = turn.prompt_len as usize;
    assert_eq!(timeline.tokens[at..at + 4], [97, 98, 99, END]);
    assert_eq!(timeline.loss_mask[at..at + 4], [false, false, true, true]);
    assert_eq!(turn.receipt.as_ref().unwrap().unreceipted_len, 2);
}

#[tokio::test]
async fn a_silent_engine_is_given_up() {
    let config = GatewayConfig { frame_timeout: std::time::Duration::from_millis(30), ..GatewayConfig::default() };
    let world = World::with(config, Purpose::Train, Sampling::default());
    world.script([Script::Hang(vec![97])]);
    let body = request(json!([user("q")]), json!({})).to_string();
    let (status, answer) = world.send("POST", "/v1/chat/completions", None, &body).await;
    assert_eq!((status.as_u16(), code(&answer)), (504, "engine_timeout"));
}

#[tokio::test]
async fn more_calls_than_allowed_are_refused_at_once() {
    let world = World::with(
        GatewayConfig { in_flight_max: 0, ..GatewayConfig::default() },
        Purpose::Train,
        Sampling::default(),
    );
    let body = request(json!([user("q")]), json!({})).to_string();
    let (status, answer) = world.send("POST", "/v1/chat/completions", None, &body).await;
    assert_eq!((status.as_u16(), code(&answer)), (429, "too_many_calls"));
}
