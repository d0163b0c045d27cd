//! One episode: the conversation and its reward.

use crate::calculator::calc;
use crate::chat::{Endpoint, ToolCall, ask};
use crate::task::{Kind, Task};
use anyhow::Result;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Most calls of the model: two for the operations, one for the answer, one to spare.
const TURNS_MAX: usize = 4;

/// How an episode went.
pub(crate) struct Outcome {
    pub(crate) reward: f64,
    pub(crate) metrics: BTreeMap<&'static str, f64>,
}

/// Runs an episode. An error means that there is no reward to report: the episode is given up and run again.
pub(crate) async fn run(client: &reqwest::Client, model: &Endpoint, task: &Task) -> Result<Outcome> {
    let (tools, turns_max) = match task.kind {
        Kind::Sums => (Value::Null, 1),
        Kind::Calculator => (tools(), TURNS_MAX),
    };
    let mut messages = vec![json!({ "role": "user", "content": task.expression })];
    let mut count = BTreeMap::from([("turns", 0.0), ("tool_calls", 0.0), ("tool_errors", 0.0)]);
    let mut reward = 0.0;
    for _ in 0..turns_max {
        let reply = ask(client, model, &messages, &tools).await?;
        *count.entry("turns").or_default() += 1.0;
        if reply.tool_calls.is_empty() {
            reward = task.reward(&reply.content);
            break;
        }
        // The message goes back as it came, so that the gateway knows its own tokens again.
        messages.push(reply.message);
        for call in &reply.tool_calls {
            let result = run_tool(call);
            *count.entry("tool_calls").or_default() += 1.0;
            *count.entry("tool_errors").or_default() += f64::from(u8::from(result.is_none()));
            let content = result.unwrap_or_else(|| "error".to_owned());
            messages.push(json!({ "role": "tool", "tool_call_id": call.id, "content": content }));
        }
    }
    if task.kind == Kind::Sums {
        count.clear(); // they are always the same
    }
    Ok(Outcome { reward, metrics: count })
}

fn tools() -> Value {
    json!([{ "type": "function", "function": {
        "name": "calc",
        "parameters": { "type": "object", "properties": { "x": { "type": "string" } }, "required": ["x"] },
    } }])
}

/// `None` for whatever is wrong with the call: the model may try again.
fn run_tool(call: &ToolCall) -> Option<String> {
    let arguments: Value = serde_json::from_str(&call.function.arguments).ok()?;
    (call.function.name == "calc").then(|| calc(arguments.get("x")?.as_str()?)).flatten()
}
