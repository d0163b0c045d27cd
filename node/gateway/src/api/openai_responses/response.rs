//! The response object and its items.

use super::request::Echo;
use crate::answer::{Answer, Block};
use crate::api::{ApiError, new_id};
use crate::call::Calls;
use serde_json::{Value, json};
use starling_protocol::rollout::FinishReason;
use std::cell::RefCell;

/// What all snapshots of one response have in common.
pub(super) struct Shape {
    pub(super) id: String,
    created: u64,
    model: String,
    temperature: f32,
    top_p: f32,
    parallel_tool_calls: bool,
    echo: Echo,
}

/// The ids of the items, one for each block of the answer, made when first asked for.
#[derive(Debug, Default)]
pub(super) struct Ids(RefCell<Vec<String>>);

impl Ids {
    pub(super) fn get(&self, index: usize, prefix: &str) -> String {
        let mut ids = self.0.borrow_mut();
        while ids.len() <= index {
            ids.push(new_id(""));
        }
        format!("{prefix}{}", ids[index])
    }
}

pub(super) fn text_part(text: &str) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": [] })
}

pub(super) fn message_item(id: &str, text: Option<&str>, status: &str) -> Value {
    let content: Vec<Value> = text.map(text_part).into_iter().collect();
    json!({ "id": id, "type": "message", "status": status, "role": "assistant", "content": content })
}

pub(super) fn call_item(id: &str, call_id: &str, name: &str, arguments: &str, status: &str) -> Value {
    json!({
        "id": id, "type": "function_call", "status": status, "call_id": call_id, "name": name, "arguments": arguments,
    })
}

/// `completed`, or `incomplete` for an answer that was cut or failed on the way.
pub(super) fn status(answer: &Answer) -> &'static str {
    match answer.finish() {
        Some(FinishReason::Stop | FinishReason::ToolCalls) => "completed",
        Some(FinishReason::Length) | None => "incomplete",
    }
}

/// The items of a complete answer; one empty message if it has none. What was cut is the last item.
pub(super) fn output(answer: &Answer, ids: &Ids) -> Vec<Value> {
    if answer.blocks.is_empty() {
        return vec![message_item(&ids.get(0, "msg_"), Some(""), status(answer))];
    }
    let last = answer.blocks.len() - 1;
    let item = |(i, block): (usize, &Block)| match block {
        Block::Text(text) => {
            let status = if i == last { status(answer) } else { "completed" };
            message_item(&ids.get(i, "msg_"), Some(text), status)
        }
        Block::Call { id, call } => call_item(&ids.get(i, "fc_"), id, &call.name, &call.arguments, "completed"),
    };
    answer.blocks.iter().enumerate().map(item).collect()
}

impl Shape {
    pub(super) fn new(id: String, echo: Echo, calls: &Calls) -> Self {
        let (call, _) = calls.single();
        Self {
            id,
            created: call.created,
            model: call.model.to_string(),
            temperature: call.sampling.temperature,
            top_p: call.sampling.top_p,
            parallel_tool_calls: call.settings.parallel_tool_calls,
            echo,
        }
    }

    fn object(&self, status: &str, output: Vec<Value>) -> Value {
        let echo = &self.echo;
        json!({
            "id": self.id, "object": "response", "created_at": self.created, "status": status, "background": false,
            "error": null, "incomplete_details": null, "instructions": echo.instructions,
            "max_output_tokens": echo.max_output_tokens, "max_tool_calls": null, "model": self.model, "output": output,
            "parallel_tool_calls": self.parallel_tool_calls, "previous_response_id": echo.previous_response_id,
            "prompt_cache_key": echo.prompt_cache_key, "reasoning": { "effort": null, "summary": null },
            "safety_identifier": echo.safety_identifier, "service_tier": "default", "store": echo.store,
            "temperature": self.temperature, "text": { "format": { "type": "text" } },
            "tool_choice": echo.tool_choice, "tools": echo.tools, "top_logprobs": 0, "top_p": self.top_p,
            "truncation": "disabled", "usage": null, "user": echo.user, "metadata": echo.metadata,
        })
    }

    /// Before its end.
    pub(super) fn in_progress(&self) -> Value {
        self.object("in_progress", Vec::new())
    }

    /// After its end: `completed` or `incomplete`.
    pub(super) fn complete(&self, calls: &Calls, ids: &Ids) -> Value {
        let (_, answer) = calls.single();
        let status = status(answer);
        let mut object = self.object(status, output(answer, ids));
        if status == "incomplete" {
            object["incomplete_details"] = json!({ "reason": "max_output_tokens" });
        }
        let (input, output) = calls.usage();
        object["usage"] = json!({
            "input_tokens": input, "input_tokens_details": { "cached_tokens": 0, "cache_write_tokens": 0 },
            "output_tokens": output, "output_tokens_details": { "reasoning_tokens": 0 },
            "total_tokens": input + output,
        });
        object
    }

    /// After a failure on the way.
    pub(super) fn failed(&self, calls: &Calls, ids: &Ids, error: &ApiError) -> Value {
        let (_, answer) = calls.single();
        let begun = if answer.blocks.is_empty() { Vec::new() } else { output(answer, ids) };
        let mut object = self.object("failed", begun);
        object["error"] = json!({ "code": "server_error", "message": format!("{}: {}", error.code, error.message) });
        object
    }
}
