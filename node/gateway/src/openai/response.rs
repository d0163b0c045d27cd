//! A chat answer, whole or in chunks.

use crate::text::ToolCall;
use serde::Serialize;

#[derive(Debug, Serialize)]
pub(crate) struct Completion<'a> {
    pub(crate) id: &'a str,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: &'a str,
    pub(crate) system_fingerprint: Option<String>,
    pub(crate) choices: Vec<Choice<'a>>,
    pub(crate) usage: Usage,
}

#[derive(Debug, Serialize)]
pub(crate) struct Choice<'a> {
    pub(crate) index: usize,
    pub(crate) message: Message<'a>,
    pub(crate) logprobs: Option<Logprobs<'a>>,
    pub(crate) finish_reason: &'static str,
}

#[derive(Debug, Serialize)]
pub(crate) struct Message<'a> {
    pub(crate) role: &'static str,
    pub(crate) content: Option<&'a str>,
    pub(crate) refusal: Option<()>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) tool_calls: Vec<Call<'a>>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Call<'a> {
    /// In chunks only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) index: Option<usize>,
    pub(crate) id: &'a str,
    #[serde(rename = "type")]
    pub(crate) kind: &'static str,
    pub(crate) function: Function<'a>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Function<'a> {
    pub(crate) name: &'a str,
    pub(crate) arguments: &'a str,
}

impl<'a> Call<'a> {
    pub(crate) fn new(index: Option<usize>, id: &'a str, call: &'a ToolCall) -> Self {
        let function = Function { name: &call.name, arguments: &call.arguments };
        Self { index, id, kind: "function", function }
    }
}

#[derive(Debug, Serialize)]
pub(crate) struct Logprobs<'a> {
    pub(crate) content: &'a [TokenLogprob],
    pub(crate) refusal: Option<()>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct TokenLogprob {
    #[serde(flatten)]
    pub(crate) token: Alternative,
    pub(crate) top_logprobs: Vec<Alternative>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Alternative {
    pub(crate) token: String,
    pub(crate) logprob: f32,
    pub(crate) bytes: Vec<u8>,
}

#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: usize,
    pub(crate) completion_tokens: usize,
    pub(crate) total_tokens: usize,
}

#[derive(Debug, Serialize)]
pub(crate) struct Chunk<'a> {
    pub(crate) id: &'a str,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: &'a str,
    pub(crate) system_fingerprint: Option<&'a str>,
    pub(crate) choices: &'a [ChunkChoice<'a>],
    /// `Some(None)` prints null: usage was asked for and comes in the last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) usage: Option<Option<Usage>>,
}

#[derive(Debug, Serialize)]
pub(crate) struct ChunkChoice<'a> {
    pub(crate) index: usize,
    pub(crate) delta: Delta<'a>,
    pub(crate) logprobs: Option<Logprobs<'a>>,
    pub(crate) finish_reason: Option<&'static str>,
}

#[derive(Debug, Default, Serialize)]
pub(crate) struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tool_calls: Option<[Call<'a>; 1]>,
}
