//! A chat answer, whole or in chunks.

use crate::answer::{Answer, TokenLogprob};
use crate::call::Calls;
use crate::text::ToolCall;
use serde::Serialize;
use starling_protocol::rollout::FinishReason;
use std::borrow::Cow;

#[derive(Debug, Serialize)]
pub(super) struct Completion<'a> {
    pub(super) id: &'a str,
    pub(super) object: &'static str,
    pub(super) created: u64,
    pub(super) model: &'a str,
    pub(super) system_fingerprint: Option<String>,
    pub(super) choices: Vec<Choice<'a>>,
    pub(super) usage: Usage,
}

#[derive(Debug, Serialize)]
pub(super) struct Choice<'a> {
    pub(super) index: usize,
    pub(super) message: Message<'a>,
    pub(super) logprobs: Option<Logprobs<'a>>,
    pub(super) finish_reason: &'static str,
}

#[derive(Debug, Serialize)]
pub(super) struct Message<'a> {
    pub(super) role: &'static str,
    pub(super) content: Option<Cow<'a, str>>,
    pub(super) refusal: Option<()>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) tool_calls: Vec<Call<'a>>,
}

#[derive(Debug, Serialize)]
pub(super) struct Call<'a> {
    /// In chunks only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) index: Option<usize>,
    pub(super) id: &'a str,
    #[serde(rename = "type")]
    pub(super) kind: &'static str,
    pub(super) function: Function<'a>,
}

#[derive(Debug, Serialize)]
pub(super) struct Function<'a> {
    pub(super) name: &'a str,
    pub(super) arguments: &'a str,
}

impl<'a> Call<'a> {
    pub(super) fn new(index: Option<usize>, id: &'a str, call: &'a ToolCall) -> Self {
        let function = Function { name: &call.name, arguments: &call.arguments };
        Self { index, id, kind: "function", function }
    }
}

#[derive(Debug, Serialize)]
pub(super) struct Logprobs<'a> {
    pub(super) content: &'a [TokenLogprob],
    pub(super) refusal: Option<()>,
}

#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Usage {
    pub(super) prompt_tokens: usize,
    pub(super) completion_tokens: usize,
    pub(super) total_tokens: usize,
}

impl Usage {
    pub(crate) fn of(calls: &Calls) -> Self {
        let (prompt_tokens, completion_tokens) = calls.usage();
        Self { prompt_tokens, completion_tokens, total_tokens: prompt_tokens + completion_tokens }
    }
}

pub(super) fn whole<'a>(id: &'a str, calls: &'a Calls) -> Completion<'a> {
    let (call, _) = calls.single();
    Completion {
        id,
        object: "chat.completion",
        created: call.created,
        model: call.model.as_str(),
        system_fingerprint: calls.fingerprint(),
        choices: call.answers.iter().enumerate().map(|(i, a)| choice(i, a, call.settings.logprobs)).collect(),
        usage: Usage::of(calls),
    }
}

fn choice(index: usize, answer: &Answer, logprobs: bool) -> Choice<'_> {
    let text = answer.text();
    let tool_calls: Vec<_> = answer.calls().map(|(id, call)| Call::new(None, id, call)).collect();
    Choice {
        index,
        message: Message {
            role: "assistant",
            content: (!text.is_empty() || tool_calls.is_empty()).then_some(text),
            refusal: None,
            tool_calls,
        },
        logprobs: logprobs.then_some(Logprobs { content: &answer.token_logprobs, refusal: None }),
        finish_reason: answer.finish().map_or("stop", finish_reason),
    }
}

/// In OpenAI's word.
pub(super) fn finish_reason(finish: FinishReason) -> &'static str {
    match finish {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::ToolCalls => "tool_calls",
    }
}

#[derive(Debug, Serialize)]
pub(super) struct Chunk<'a> {
    pub(super) id: &'a str,
    pub(super) object: &'static str,
    pub(super) created: u64,
    pub(super) model: &'a str,
    pub(super) system_fingerprint: Option<&'a str>,
    pub(super) choices: &'a [ChunkChoice<'a>],
    /// `Some(None)` prints null: usage was asked for and comes in the last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) usage: Option<Option<Usage>>,
}

#[derive(Debug, Serialize)]
pub(super) struct ChunkChoice<'a> {
    pub(super) index: usize,
    pub(super) delta: Delta<'a>,
    pub(super) logprobs: Option<Logprobs<'a>>,
    pub(super) finish_reason: Option<&'static str>,
}

#[derive(Debug, Default, Serialize)]
pub(super) struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tool_calls: Option<[Call<'a>; 1]>,
}
