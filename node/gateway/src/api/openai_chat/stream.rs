//! Chunks of a chat answer: one for what each sampled token shows.

use super::response::{Call, Chunk, ChunkChoice, Delta, Logprobs, Usage, finish_reason};
use crate::answer::Block;
use crate::api::ApiError;
use crate::api::sse::{Renderer, data};
use crate::call::Calls;

/// How much of an answer was sent.
#[derive(Debug, Default, Clone, Copy)]
struct Shown {
    blocks: usize,
    /// Bytes of the text that follows those blocks.
    text: usize,
    calls: usize,
}

pub(super) struct ChatStream {
    id: String,
    include_usage: bool,
    shown: Vec<Shown>,
}

impl ChatStream {
    pub(super) fn new(id: String, include_usage: bool) -> Self {
        Self { id, include_usage, shown: Vec::new() }
    }

    fn chunk(&self, calls: &Calls, choices: &[ChunkChoice<'_>], usage: Option<Usage>, out: &mut Vec<u8>) {
        let (call, _) = calls.single();
        let fingerprint = calls.fingerprint();
        let chunk = Chunk {
            id: &self.id,
            object: "chat.completion.chunk",
            created: call.created,
            model: call.model.as_str(),
            system_fingerprint: fingerprint.as_deref(),
            choices,
            usage: self.include_usage.then_some(usage),
        };
        data(out, &chunk);
    }
}

impl Renderer for ChatStream {
    fn begin(&mut self, calls: &Calls, out: &mut Vec<u8>) {
        let answers = calls.single().0.answers.len();
        self.shown = vec![Shown::default(); answers];
        for index in 0..answers {
            let delta = Delta { role: Some("assistant"), content: Some(""), tool_calls: None };
            self.chunk(calls, &[ChunkChoice { index, delta, logprobs: None, finish_reason: None }], None, out);
        }
    }

    fn more(&mut self, calls: &mut Calls, out: &mut Vec<u8>) {
        let wants_logprobs = calls.single().0.settings.logprobs;
        for index in 0..self.shown.len() {
            let mut shown = self.shown[index];
            let answer = &mut calls.list[0].answers[index];
            let nothing = match &answer.blocks[shown.blocks..] {
                [] => true,
                [Block::Text(last)] => last.len() == shown.text,
                _ => false,
            };
            if nothing {
                continue;
            }
            let tokens = std::mem::take(&mut answer.token_logprobs);
            let mut logprobs = wants_logprobs.then_some(Logprobs { content: &tokens, refusal: None });
            let blocks = &calls.list[0].answers[index].blocks;
            while let Some(block) = blocks.get(shown.blocks) {
                let delta = match block {
                    Block::Text(text) => {
                        let new = &text[shown.text..];
                        shown.text = text.len();
                        Delta { content: Some(new), ..Delta::default() }
                    }
                    Block::Call { id, call } => {
                        let call = Call::new(Some(shown.calls), id, call);
                        shown.calls += 1;
                        Delta { tool_calls: Some([call]), ..Delta::default() }
                    }
                };
                // A text at the end may still grow.
                let open = matches!(block, Block::Text(_)) && shown.blocks + 1 == blocks.len();
                if delta.content != Some("") {
                    let logprobs = logprobs.take();
                    self.chunk(calls, &[ChunkChoice { index, delta, logprobs, finish_reason: None }], None, out);
                }
                if open {
                    break;
                }
                shown.blocks += 1;
                shown.text = 0;
            }
            self.shown[index] = shown;
        }
    }

    fn finish(&mut self, calls: &mut Calls, out: &mut Vec<u8>) {
        for index in 0..self.shown.len() {
            let answer = &mut calls.list[0].answers[index];
            // Tokens that showed nothing, such as those of a stop string.
            let tokens = std::mem::take(&mut answer.token_logprobs);
            let finish_reason = answer.finish().map(finish_reason);
            let logprobs = (!tokens.is_empty()).then_some(Logprobs { content: &tokens, refusal: None });
            let delta = Delta::default();
            self.chunk(calls, &[ChunkChoice { index, delta, logprobs, finish_reason }], None, out);
        }
        if self.include_usage {
            self.chunk(calls, &[], Some(Usage::of(calls)), out);
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
    }

    fn fail(&mut self, _: &Calls, error: &ApiError, out: &mut Vec<u8>) {
        // Clients raise on an event with `error`.
        data(out, &error.body());
    }
}
