//! Begin, calls, end: the life of an episode.

use crate::support::{Script, World, calc, code, eventually, request, say, user};
use serde_json::{Value, json};
use starling_gateway::{AbortError, ClaimRequest, EndError, GatewayConfig};
use starling_protocol::assignment::Purpose;
use starling_protocol::job::Sampling;
use starling_protocol::rollout::FinishReason;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

#[tokio::test]
async fn an_episode_with_a_tool_reuses_exact_tokens_and_seals_a_rollout_that_verifies() {
    let world = World::new();
    let agent = world.begin().await;
    assert_eq!(agent.episode["task"], json!({ "id": "null", "prompt": "Say something." }));
    assert_eq!(agent.episode["task_id"], "null");
    assert!(agent.key.starts_with("sk-starling-") && agent.key.len() > 70);

    world.script([say(r#"<|call|>calc{"x": "12*34"}"#), say(" 408 ")]);
    let mut messages = vec![json!({ "role": "developer", "content": "Calculate." }), user("12*34?")];
    let first = agent.ask(json!(messages), json!({ "tools": calc() })).await;
    let choice = &first["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], Value::Null);
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!(call["function"], json!({ "name": "calc", "arguments": "{\"x\": \"12*34\"}" }));
    let prompt = world.last_request().prompt;
    assert_eq!(first["usage"]["prompt_tokens"], prompt.len());

    // The client's library spells the arguments its own way; the tokens stay those that were sampled.
    let mut message = choice["message"].clone();
    message["tool_calls"][0]["function"]["arguments"] = json!("{\"x\":\"12*34\"}");
    message["function_call"] = Value::Null;
    messages.push(message);
    messages
        .push(json!({ "role": "tool", "tool_call_id": call["id"], "content": [{ "type": "text", "text": "408" }] }));
    let second = agent.ask(json!(messages), json!({ "tools": calc() })).await;
    assert_eq!(second["choices"][0]["message"]["content"], " 408 ");
    assert_eq!(second["choices"][0]["finish_reason"], "stop");
    let Script::Say(sampled) = say(r#"<|call|>calc{"x": "12*34"}"#) else { unreachable!() };
    let mut exact = prompt.clone();
    exact.extend(&sampled);
    let next = world.last_request().prompt;
    assert_eq!(next[..exact.len()], exact);
    assert_eq!(next[exact.len()..], crate::support::bytes("<|tool|>408<|end|><|assistant|>"));

    // An answer whose white space the client trimmed is still the same answer.
    messages.push(json!({ "role": "assistant", "content": "408" }));
    messages.push(user("Thanks."));
    world.script([say("Welcome.")]);
    agent.ask(json!(messages), json!({ "tools": calc() })).await;

    let (status, end) = agent.end(r#"{"reward": 0.5, "metrics": {"steps": 2}, "task_id": "null"}"#).await;
    assert_eq!(status, 200, "{end}");
    let verified = world.rollout();
    assert_eq!(end["rollout"], verified.id.to_string());
    let rollout = &verified.rollout;
    assert_eq!((rollout.reward, rollout.agent.as_str()), (0.5, "tester"));
    assert_eq!(rollout.metrics, BTreeMap::from([("steps".to_owned(), 2.0)]));
    assert_eq!(rollout.timelines.len(), 1);
    let finishes: Vec<_> = rollout.turns.iter().map(|t| (t.finish, t.fork_cause.clone())).collect();
    let stop = (FinishReason::Stop, None);
    assert_eq!(finishes, [(FinishReason::ToolCalls, None), stop.clone(), stop]);
    let trained = rollout.timelines[0].loss_mask.iter().filter(|m| **m).count();
    assert_eq!(trained, sampled.len() + " 408 ".len() + 1 + "Welcome.".len() + 1);

    // The end is idempotent, whatever it says now; calls are refused.
    let (status, again) = agent.end(r#"{"reward": 1}"#).await;
    assert_eq!((status.as_u16(), &again), (200, &end));
    let (status, refused) = agent.chat(request(json!([user("more")]), json!({}))).await;
    assert_eq!((status.as_u16(), code(&refused)), (409, "episode_ended"));
    let (_, list) = world.send("GET", "/v1/episodes", Some(&agent.key), "").await;
    assert_eq!(list["data"][0]["state"], "ended");
    assert_eq!(list["data"][0]["rollout"], end["rollout"]);
    assert!(!list.to_string().contains("sk-starling"), "keys are never listed");
}

#[tokio::test]
async fn a_wrong_end_leaves_the_episode_open_for_a_right_one() {
    let world = World::new();
    let agent = world.begin().await;
    for (body, expected, param) in [
        ("{}", "missing_required_parameter", "reward"),
        (r#"{"reward": null}"#, "invalid_value", "reward"),
        (r#"{"reward": "1"}"#, "invalid_value", "reward"),
        (r#"{"reward": NaN}"#, "invalid_value", "reward"),
        (r#"{"reward": 1e999}"#, "invalid_value", "reward"),
        (r#"{"reward": 1e300}"#, "not_finite", "reward"),
        (r#"{"reward": 1, "metrics": {"a": -1e300}}"#, "not_finite", "metrics.a"),
        (r#"{"reward": 1, "metrics": {"a": true}}"#, "invalid_value", "metrics.a"),
        (r#"{"reward": 1, "task_id": "another"}"#, "wrong_task", "task_id"),
        (r#"{"reward": 1, "task": "null"}"#, "unknown_parameter", "task"),
    ] {
        let (status, answer) = agent.end(body).await;
        let got = (status.as_u16(), code(&answer), answer["error"]["param"].as_str().unwrap_or("none"));
        assert_eq!(got, (400, expected, param), "{body}: {answer}");
    }
    let (status, answer) = agent.end(r#"{"reward": 1"#).await;
    assert_eq!((status.as_u16(), answer["error"]["type"].as_str().unwrap()), (400, "invalid_request_error"));
    agent.done().await;
}

#[tokio::test]
async fn an_end_that_is_not_durable_is_not_acknowledged_and_may_be_sent_again() {
    let world = World::new();
    let agent = world.begin().await;
    world.node.seal_failures.store(1, Ordering::SeqCst);
    let (status, answer) = agent.end(r#"{"reward": 1}"#).await;
    assert_eq!((status.as_u16(), code(&answer)), (503, "not_durable"));
    world.script([say("still open")]);
    agent.ask(json!([user("q")]), json!({})).await;
    assert_eq!(agent.done().await.rollout.turns.len(), 1);
}

#[tokio::test]
async fn ends_at_the_same_time_get_one_rollout() {
    let world = World::new();
    let agent = world.begin().await;
    let ends = (0..8).map(|_| agent.end(r#"{"reward": 1}"#));
    let all = futures::future::join_all(ends).await;
    let id = world.rollout().id.to_string();
    assert!(all.iter().all(|(status, answer)| *status == 200 && answer["rollout"] == id), "{all:?}");
}

#[tokio::test]
async fn no_work_is_said_with_its_reason() {
    let world = World::new();
    *world.node.wait.lock().unwrap() = Some("quota full: 64 of 64 episodes".into());
    let (status, answer) = world.send("POST", "/v1/episodes", None, "").await;
    assert_eq!((status.as_u16(), code(&answer)), (503, "no_work"));
    assert_eq!(answer["error"]["message"], "quota full: 64 of 64 episodes");
    for (body, expected) in [
        (r#"{"model": "other"}"#, (404, "model_not_found")),
        (r#"{"model": "a b"}"#, (400, "invalid_value")),
        (r#"{"jobs": 1}"#, (400, "unknown_parameter")),
    ] {
        *world.node.wait.lock().unwrap() = None;
        let (status, answer) = world.send("POST", "/v1/episodes", None, body).await;
        assert_eq!((status.as_u16(), code(&answer)), expected, "{body}");
    }
}

#[tokio::test]
async fn an_abort_releases_the_lease_and_refuses_what_comes_after() {
    let world = World::new();
    let agent = world.begin().await;
    let path = format!("/v1/episodes/{}/abort", agent.id);
    for _ in 0..2 {
        let (status, answer) = world.send("POST", &path, Some(&agent.key), r#"{"cause": "tests are done"}"#).await;
        assert_eq!((status.as_u16(), answer["state"].as_str().unwrap()), (200, "aborted"));
    }
    assert_eq!(*world.node.aborted.lock().unwrap(), ["tests are done"]);
    let (status, answer) = agent.end(r#"{"reward": 1}"#).await;
    assert_eq!((status.as_u16(), code(&answer)), (409, "episode_aborted"));
    let (status, answer) = agent.chat(request(json!([user("q")]), json!({}))).await;
    assert_eq!((status.as_u16(), code(&answer)), (409, "episode_aborted"));
}

#[tokio::test]
async fn an_episode_whose_lease_was_lost_is_over() {
    let world = World::new();
    let agent = world.begin().await;
    world.node.leased.store(false, Ordering::SeqCst);
    let (status, answer) = agent.chat(request(json!([user("q")]), json!({}))).await;
    assert_eq!((status.as_u16(), code(&answer)), (409, "lease_lost"));
    let (status, answer) = agent.end(r#"{"reward": 1}"#).await;
    assert_eq!((status.as_u16(), code(&answer)), (409, "lease_lost"));
    assert!(world.gateway.running().is_empty());
}

#[tokio::test]
async fn keys_open_their_own_episode_only() {
    let world = World::with(
        GatewayConfig { open_inference: false, admin_token: Some("root".into()), ..GatewayConfig::default() },
        Purpose::Train,
        Sampling::default(),
    );
    let (status, answer) = world.send("POST", "/v1/episodes", None, "").await;
    assert_eq!((status.as_u16(), code(&answer)), (401, "admin_token_required"));
    let (status, one) = world.send("POST", "/v1/episodes", Some("root"), "").await;
    assert_eq!(status, 200);
    let (_, two) = world.send("POST", "/v1/episodes", Some("root"), "").await;
    let end = format!("/v1/episodes/{}/end", one["episode"].as_str().unwrap());
    let chat = "/v1/chat/completions";
    let body = r#"{"reward": 1}"#;
    let unknown = format!("sk-starling-{}", "0".repeat(64));
    for (path, key, expected) in [
        (end.as_str(), two["api_key"].as_str(), (403, "wrong_episode")),
        (&end, None, (401, "missing_api_key")),
        (&end, Some("sk-other"), (401, "invalid_api_key")),
        (&end, Some(&*unknown), (401, "invalid_api_key")),
        ("/v1/episodes/zz/end", one["api_key"].as_str(), (404, "episode_not_found")),
        (chat, None, (401, "missing_api_key")),
        (chat, Some("sk-other"), (401, "invalid_api_key")),
        (chat, Some(&*unknown), (401, "invalid_api_key")),
    ] {
        let (status, answer) = world.send("POST", path, key, body).await;
        assert_eq!((status.as_u16(), code(&answer)), expected, "{path} {key:?}");
    }
    let (_, own) = world.send("GET", "/v1/episodes", one["api_key"].as_str(), "").await;
    assert_eq!(own["data"].as_array().unwrap().len(), 1);
    let (_, all) = world.send("GET", "/v1/episodes", Some("root"), "").await;
    assert_eq!(all["data"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn an_agent_in_process_shares_the_service() {
    let world = World::new();
    let handle = world.gateway.begin(ClaimRequest::default(), "runner").await.unwrap();
    assert_eq!(handle.base_url, "http://127.0.0.1:10086/v1");
    world.script([say("hello")]);
    let body = request(json!([user("q")]), json!({})).to_string();
    let (status, _) = world.send("POST", "/v1/chat/completions", Some(&handle.key.0), &body).await;
    assert_eq!(status, 200);
    let id = handle.assignment.episode;
    assert_eq!(world.gateway.running(), [id]);
    let e = world.gateway.end(id, f64::NAN, BTreeMap::new()).await.unwrap_err();
    assert!(matches!(e, EndError::NotFinite { .. }), "{e}");
    let rollout = world.gateway.end(id, 1.0, BTreeMap::new()).await.unwrap();
    assert_eq!(world.rollout().id, rollout);
    assert_eq!(world.gateway.abort(id, "late").await, Err(AbortError::Ended(id)));
}

#[tokio::test]
async fn silent_and_lost_episodes_are_reaped() {
    let config = GatewayConfig { episode_idle_max: Duration::from_millis(20), ..GatewayConfig::default() };
    let world = World::with(config, Purpose::Train, Sampling::default());
    let agent = world.begin().await;
    assert!(world.gateway.reap().await.is_empty());
    tokio::time::sleep(Duration::from_millis(60)).await;
    let reaped = world.gateway.reap().await;
    assert_eq!((reaped.len(), reaped[0].to_string()), (1, agent.id.clone()));
    assert_eq!(world.node.aborted.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn a_call_under_way_ends_when_its_episode_does() {
    let world = World::new();
    let agent = world.begin().await;
    world.script([Script::Hang(vec![97])]);
    let calling = agent.chat(request(json!([user("q")]), json!({})));
    let ending = async {
        eventually("the call runs", || !world.node.requests.lock().unwrap().is_empty()).await;
        agent.done().await
    };
    let ((status, answer), verified) = tokio::join!(calling, ending);
    assert_eq!((status.as_u16(), code(&answer)), (409, "episode_ended"));
    assert!(verified.rollout.turns.is_empty());
    assert_eq!(world.node.cancelled.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn models_are_listed_by_their_mesh_names() {
    let world = World::new();
    let (_, list) = world.send("GET", "/v1/models", None, "").await;
    assert_eq!(list["data"][0]["id"], "test/bytes");
    let (status, one) = world.send("GET", "/v1/models/test/bytes", None, "").await;
    assert_eq!((status.as_u16(), &one), (200, &list["data"][0]));
    let (status, answer) = world.send("GET", "/v1/models/other", None, "").await;
    assert_eq!((status.as_u16(), code(&answer)), (404, "model_not_found"));
}
