//! Episodes that the soak plays itself, through the HTTP of the nodes, so that it knows at first hand what was
//! acknowledged: the answer to an episode's end names the rollout.

use crate::log::Log;
use crate::watch::{Board, Shown};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use starling_protocol::RolloutId;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

/// Generous: the agent of an episode whose server is cut off waits for another one.
const CALL_LIMIT: Duration = Duration::from_secs(90);
/// An end that was not acknowledged may be asked for again.
const ENDS: u32 = 3;

/// What was acknowledged to the soak, and what its calls came to.
#[derive(Default)]
pub(crate) struct Ledger {
    pub(crate) acknowledged: RefCell<Vec<RolloutId>>,
    pub(crate) failures: RefCell<BTreeMap<String, u64>>,
}

impl Ledger {
    fn failed(&self, why: &str) {
        *self.failures.borrow_mut().entry(why.to_owned()).or_default() += 1;
    }
}

/// Plays one episode after another, each on a node drawn anew.
pub(crate) async fn play(
    board: Board,
    log: Rc<Log>,
    client: reqwest::Client,
    ledger: Rc<Ledger>,
    mut rng: ChaCha8Rng,
    pause: Duration,
) {
    loop {
        tokio::time::sleep(pause).await;
        let mut up: Vec<Shown> = board.borrow().iter().filter(|n| n.answers).cloned().collect();
        if up.is_empty() {
            continue;
        }
        let node = up.swap_remove(rng.random_range(0..up.len()));
        match episode(&client, &node).await {
            Ok((episode, rollout)) => {
                log.acknowledged(&node.name, &json!({ "episode": episode, "rollout": rollout }));
                ledger.acknowledged.borrow_mut().push(rollout);
            }
            Err(why) => ledger.failed(&why),
        }
    }
}

/// Begin, one call of the model, end. The error is where and how it failed, to be counted.
async fn episode(client: &reqwest::Client, node: &Shown) -> Result<(String, RolloutId), String> {
    let begun = post(client, node, "/v1/episodes", &node.token, &json!({})).await.map_err(|e| format!("begin: {e}"))?;
    let text = |field: &str| begun[field].as_str().unwrap_or_default().to_owned();
    let (id, key) = (text("episode"), text("api_key"));
    let expression = begun["task"]["expression"].as_str().unwrap_or_default();
    let body = json!({ "model": begun["model"], "messages": [{ "role": "user", "content": expression }] });
    let said = match post(client, node, "/v1/chat/completions", &key, &body).await {
        Ok(said) => said,
        Err(e) => {
            let body = json!({ "cause": "the model did not answer" });
            let _ = post(client, node, &format!("/v1/episodes/{id}/abort"), &key, &body).await;
            return Err(format!("call: {e}"));
        }
    };
    let content = said["choices"][0]["message"]["content"].as_str().unwrap_or_default().trim().to_owned();
    let reward = f64::from(u8::from(Some(content.as_str()) == begun["task"]["answer"].as_str()));
    let mut last = String::new();
    for _ in 0..ENDS {
        match post(client, node, &format!("/v1/episodes/{id}/end"), &key, &json!({ "reward": reward })).await {
            Ok(ended) => {
                let rollout = ended["rollout"].as_str().and_then(|r| r.parse().ok());
                return rollout.map(|r| (id, r)).ok_or_else(|| format!("end: no rollout in {ended}"));
            }
            Err(why) => last = why,
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
    }
    Err(format!("end: {last}"))
}

async fn post(client: &reqwest::Client, node: &Shown, route: &str, key: &str, body: &Value) -> Result<Value, String> {
    let request = client.post(format!("{}{route}", node.http)).bearer_auth(key).json(body).timeout(CALL_LIMIT);
    let response = request.send().await.map_err(|e| kind(&e).to_owned())?;
    let status = response.status();
    let answer: Value = response.json().await.map_err(|e| kind(&e).to_owned())?;
    if status.is_success() {
        return Ok(answer);
    }
    let code = answer["error"]["code"].as_str().or(answer["error"]["type"].as_str()).unwrap_or("no code");
    Err(format!("{} {code}", status.as_u16()))
}

fn kind(e: &reqwest::Error) -> &'static str {
    if e.is_timeout() {
        "no answer in time"
    } else if e.is_connect() {
        "cannot connect"
    } else {
        "the connection broke"
    }
}
