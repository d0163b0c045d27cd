//! Completions, whole.

use super::request::Options;
use crate::answer::{Alternative, TokenLogprob};
use crate::api::openai_chat::Usage;
use crate::call::Calls;
use serde::Serialize;
use serde_json::{Map, Value};
use starling_protocol::rollout::FinishReason;

#[derive(Debug, Serialize)]
pub(super) struct Completion<'a> {
    pub(super) id: &'a str,
    pub(super) object: &'static str,
    pub(super) created: u64,
    pub(super) model: &'a str,
    pub(super) system_fingerprint: Option<String>,
    pub(super) choices: Vec<Choice>,
    /// `Some(None)` prints null: usage was asked for and comes in a stream's last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) usage: Option<Option<Usage>>,
}

#[derive(Debug, Serialize)]
pub(super) struct Choice {
    pub(super) index: usize,
    pub(super) text: String,
    pub(super) logprobs: Option<Logprobs>,
    pub(super) finish_reason: Option<&'static str>,
}

/// Lists of one length, a place a token.
#[derive(Debug, Serialize)]
pub(super) struct Logprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    top_logprobs: Option<Vec<Value>>,
    text_offset: Vec<usize>,
}

impl Logprobs {
    /// Of tokens whose first begins `offset` characters after the answer's start; that of the next is put there.
    pub(super) fn of(tokens: &[TokenLogprob], alternatives: u8, offset: &mut usize) -> Self {
        let starts = tokens.iter().map(|t| {
            let at = *offset;
            // A character is counted with the token that begins it.
            *offset += t.token.bytes.iter().filter(|b| **b & 0xC0 != 0x80).count();
            at
        });
        let starts = starts.collect();
        let top = |t: &TokenLogprob| {
            let all = std::iter::once(&t.token).chain(&t.top_logprobs);
            Value::Object(all.map(|a| (text(a), a.logprob.into())).collect::<Map<_, _>>())
        };
        Self {
            tokens: tokens.iter().map(|t| text(&t.token)).collect(),
            token_logprobs: tokens.iter().map(|t| t.token.logprob).collect(),
            top_logprobs: (alternatives > 0).then(|| tokens.iter().map(top).collect()),
            text_offset: starts,
        }
    }
}

/// As this API writes a token: what is no text by itself as its bytes.
fn text(token: &Alternative) -> String {
    match std::str::from_utf8(&token.bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => token.bytes.iter().fold("bytes:".to_owned(), |text, b| text + &format!("\\x{b:02x}")),
    }
}

/// This API has no tool calls.
pub(super) fn finish_reason(finish: FinishReason) -> &'static str {
    match finish {
        FinishReason::Length => "length",
        FinishReason::Stop | FinishReason::ToolCalls => "stop",
    }
}

pub(super) fn whole<'a>(id: &'a str, calls: &'a Calls, options: &Options) -> Completion<'a> {
    let mut choices = Vec::new();
    for (prompt, call) in calls.list.iter().enumerate() {
        for answer in &call.answers {
            let mut text = answer.text().into_owned();
            if let Some(echo) = options.echo.as_ref().and_then(|e| e.get(prompt)) {
                text.insert_str(0, echo);
            }
            choices.push(Choice {
                index: choices.len(),
                text,
                logprobs: options.logprobs.map(|n| Logprobs::of(&answer.token_logprobs, n, &mut 0)),
                finish_reason: Some(answer.finish().map_or("stop", finish_reason)),
            });
        }
    }
    let call = &calls.list[0];
    Completion {
        id,
        object: "text_completion",
        created: call.created,
        model: call.model.as_str(),
        system_fingerprint: calls.fingerprint(),
        choices,
        usage: Some(Some(Usage::of(calls))),
    }
}
