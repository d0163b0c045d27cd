//! A message, whole.

use crate::answer::{Answer, Block};
use crate::call::{Call, Calls};
use serde::Serialize;
use serde_json::value::RawValue;
use starling_protocol::rollout::FinishReason;

#[derive(Debug, Serialize)]
pub(super) struct Message<'a> {
    pub(super) id: &'a str,
    #[serde(rename = "type")]
    pub(super) kind: &'static str,
    pub(super) role: &'static str,
    pub(super) model: &'a str,
    pub(super) content: Vec<ContentBlock<'a>>,
    pub(super) stop_reason: Option<&'static str>,
    pub(super) stop_sequence: Option<&'a str>,
    pub(super) usage: Usage,
}

#[derive(Debug, Default, Serialize)]
pub(super) struct ContentBlock<'a> {
    #[serde(rename = "type")]
    pub(super) kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) text: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) name: Option<&'a str>,
    /// As it was sampled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) input: Option<&'a RawValue>,
}

#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Usage {
    pub(super) input_tokens: usize,
    pub(super) cache_creation_input_tokens: usize,
    pub(super) cache_read_input_tokens: usize,
    pub(super) output_tokens: usize,
}

impl Usage {
    pub(super) fn of(calls: &Calls) -> Self {
        let (input_tokens, output_tokens) = calls.usage();
        Self { input_tokens, cache_creation_input_tokens: 0, cache_read_input_tokens: 0, output_tokens }
    }
}

/// A call's id as this API's clients know it.
pub(super) fn tool_use_id(id: &str) -> String {
    format!("toolu_{}", id.strip_prefix("call_").unwrap_or(id))
}

/// `{}`, which a tool's input is until it is known.
pub(super) fn no_input() -> &'static RawValue {
    serde_json::from_str("{}").unwrap_or(RawValue::NULL)
}

pub(super) fn text_block(text: &str) -> ContentBlock<'_> {
    ContentBlock { kind: "text", text: Some(text), ..ContentBlock::default() }
}

pub(super) fn tool_use_block<'a>(id: &str, name: &'a str, input: &'a RawValue) -> ContentBlock<'a> {
    ContentBlock {
        kind: "tool_use",
        id: Some(tool_use_id(id)),
        name: Some(name),
        input: Some(input),
        ..ContentBlock::default()
    }
}

fn content_block(block: &Block) -> ContentBlock<'_> {
    match block {
        Block::Text(text) => text_block(text),
        Block::Call { id, call } => {
            // The parser gives objects only.
            let input = serde_json::from_str(&call.arguments).unwrap_or_else(|_| no_input());
            tool_use_block(id, &call.name, input)
        }
    }
}

/// Why it ended, and at which stop sequence.
pub(super) fn stop<'a>(call: &Call, answer: &'a Answer) -> (Option<&'static str>, Option<&'a str>) {
    let stop_sequence = answer.stop_string();
    let reason = answer.finish().map(|finish| match finish {
        FinishReason::Stop if stop_sequence.is_some() => "stop_sequence",
        FinishReason::Stop => "end_turn",
        FinishReason::Length if call.shortened => "model_context_window_exceeded",
        FinishReason::Length => "max_tokens",
        FinishReason::ToolCalls => "tool_use",
    });
    (reason, stop_sequence.filter(|_| reason == Some("stop_sequence")))
}

pub(super) fn whole<'a>(id: &'a str, calls: &'a Calls) -> Message<'a> {
    let (call, answer) = calls.single();
    let (stop_reason, stop_sequence) = stop(call, answer);
    Message {
        id,
        kind: "message",
        role: "assistant",
        model: call.model.as_str(),
        content: answer.blocks.iter().map(content_block).collect(),
        stop_reason,
        stop_sequence,
        usage: Usage::of(calls),
    }
}
