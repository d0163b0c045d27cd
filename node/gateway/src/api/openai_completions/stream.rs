//! Completions, as they are sampled.

use super::request::Options;
use super::response::{Choice, Completion, Logprobs, finish_reason};
use crate::api::ApiError;
use crate::api::openai_chat::Usage;
use crate::api::sse::{Renderer, data};
use crate::call::Calls;

pub(super) struct CompletionStream {
    id: String,
    options: Options,
    /// Of each answer: bytes of text sent, and characters of the tokens whose logprobs were.
    shown: Vec<(usize, usize)>,
}

impl CompletionStream {
    pub(super) fn new(id: String, options: Options) -> Self {
        Self { id, options, shown: Vec::new() }
    }

    fn chunk(&self, calls: &Calls, choices: Vec<Choice>, usage: Option<Usage>, out: &mut Vec<u8>) {
        let call = &calls.list[0];
        let chunk = Completion {
            id: &self.id,
            object: "text_completion",
            created: call.created,
            model: call.model.as_str(),
            system_fingerprint: calls.fingerprint(),
            choices,
            usage: self.options.include_usage.then_some(usage),
        };
        data(out, &chunk);
    }

    /// A chunk for each answer that has something new, or for all of them at the end.
    fn news(&mut self, calls: &mut Calls, last: bool, out: &mut Vec<u8>) {
        let mut index = 0;
        for prompt in 0..calls.list.len() {
            for i in 0..calls.list[prompt].answers.len() {
                let answer = &mut calls.list[prompt].answers[i];
                let (shown, offset) = &mut self.shown[index];
                let text = answer.text()[*shown..].to_owned();
                if !text.is_empty() || last {
                    *shown += text.len();
                    let tokens = std::mem::take(&mut answer.token_logprobs);
                    let logprobs = self.options.logprobs.filter(|_| !tokens.is_empty());
                    let logprobs = logprobs.map(|n| Logprobs::of(&tokens, n, offset));
                    let finish_reason = if last { answer.finish().map(finish_reason) } else { None };
                    self.chunk(calls, vec![Choice { index, text, logprobs, finish_reason }], None, out);
                }
                index += 1;
            }
        }
    }
}

impl Renderer for CompletionStream {
    fn begin(&mut self, calls: &Calls, out: &mut Vec<u8>) {
        let answers: Vec<usize> =
            calls.list.iter().enumerate().flat_map(|(i, call)| call.answers.iter().map(move |_| i)).collect();
        self.shown = vec![(0, 0); answers.len()];
        let Some(echo) = self.options.echo.clone() else { return };
        for (index, prompt) in answers.into_iter().enumerate() {
            let text = echo.get(prompt).cloned().unwrap_or_default();
            self.chunk(calls, vec![Choice { index, text, logprobs: None, finish_reason: None }], None, out);
        }
    }

    fn more(&mut self, calls: &mut Calls, out: &mut Vec<u8>) {
        self.news(calls, false, out);
    }

    fn finish(&mut self, calls: &mut Calls, out: &mut Vec<u8>) {
        self.news(calls, true, out);
        if self.options.include_usage {
            self.chunk(calls, Vec::new(), Some(Usage::of(calls)), out);
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
    }

    fn fail(&mut self, _: &Calls, error: &ApiError, out: &mut Vec<u8>) {
        data(out, &error.body());
    }
}
