//! One answer of a call: from sampled tokens to text, tool calls and logprobs.

use crate::api::ApiError;
use crate::backend::GenerateStream;
use crate::request::{Settings, canonical_answer};
use crate::text::{ChatFormat, Detokenizer, Piece, PlainText, StopScanner, ToolCall, ToolCallParser};
use axum::http::StatusCode;
use serde::Serialize;
use starling_protocol::PolicyVersion;
use starling_protocol::rollout::{FinishReason, TurnReceipt};
use starling_protocol::timeline::{CanonicalMessage, Completion};
use starling_protocol::wire::TokenFrame;
use std::borrow::Cow;
use std::sync::Arc;

/// A part of an answer, in the order in which the model wrote them. No two texts follow each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Block {
    Text(String),
    /// A tool call and the id that the agent refers to it by.
    Call {
        id: String,
        call: ToolCall,
    },
}

/// How an answer ended.
#[derive(Debug)]
pub(crate) struct AnswerEnd {
    pub(crate) finish: FinishReason,
    pub(crate) receipt: Option<TurnReceipt>,
}

/// One answer of a call.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) stream: GenerateStream,
    format: Arc<ChatFormat>,
    detokenizer: Detokenizer,
    stops: StopScanner,
    parser: Box<dyn ToolCallParser>,
    logprobs: bool,
    one_call: bool,
    /// Set when the answer was stopped here: later tokens do not count.
    stopped: bool,
    pub(crate) sampled: Completion,
    pieces: Vec<Piece>,
    pub(crate) blocks: Vec<Block>,
    /// Of the tokens so far, or since they were last taken out.
    pub(crate) token_logprobs: Vec<TokenLogprob>,
    pub(crate) completion_len: usize,
    /// That sampled the last token.
    pub(crate) version: Option<PolicyVersion>,
    pub(crate) end: Option<AnswerEnd>,
}

impl Answer {
    pub(crate) fn new(stream: GenerateStream, format: Arc<ChatFormat>, settings: &Settings) -> Self {
        Self {
            stream,
            detokenizer: Detokenizer::new(Arc::clone(&format)),
            stops: StopScanner::new(settings.stops.clone()),
            parser: if settings.parse_tools { format.tool_parser() } else { Box::new(PlainText) },
            format,
            logprobs: settings.logprobs,
            one_call: !settings.parallel_tool_calls,
            stopped: false,
            sampled: Completion::default(),
            pieces: Vec::new(),
            blocks: Vec::new(),
            token_logprobs: Vec::new(),
            completion_len: 0,
            version: None,
            end: None,
        }
    }

    /// All its text, without the calls.
    pub(crate) fn text(&self) -> Cow<'_, str> {
        let mut texts = self.blocks.iter().filter_map(|block| match block {
            Block::Text(text) => Some(text.as_str()),
            Block::Call { .. } => None,
        });
        let first = texts.next().unwrap_or_default();
        match texts.next() {
            None => Cow::Borrowed(first),
            Some(second) => Cow::Owned([first, second].into_iter().chain(texts).collect()),
        }
    }

    /// All its tool calls with their ids.
    pub(crate) fn calls(&self) -> impl Iterator<Item = (&str, &ToolCall)> {
        self.blocks.iter().filter_map(|block| match block {
            Block::Text(_) => None,
            Block::Call { id, call } => Some((id.as_str(), call)),
        })
    }

    fn has_calls(&self) -> bool {
        self.calls().next().is_some()
    }

    /// Why it ended; `None` while it goes on.
    pub(crate) fn finish(&self) -> Option<FinishReason> {
        self.end.as_ref().map(|end| end.finish)
    }

    /// The stop string that ended it, if one did.
    pub(crate) fn stop_string(&self) -> Option<&str> {
        self.stops.found()
    }

    /// As the timeline tree will know it again.
    pub(crate) fn canonical(&self) -> CanonicalMessage<'_> {
        canonical_answer(self.text(), self.calls().map(|(_, c)| (c.name.as_str(), c.arguments.as_str())))
    }

    pub(crate) fn tokens(&mut self, tokens: Vec<TokenFrame>) -> Result<(), ApiError> {
        let format = Arc::clone(&self.format);
        let mut text = String::new();
        for token in tokens {
            if self.stopped {
                return Ok(());
            }
            // Such a turn could not be sealed; better this call fails than the episode.
            if !token.logprob.is_finite() || token.logprob > 1e-3 {
                let message = format!("the engine gave token {} the logprob {}", token.id, token.logprob);
                return Err(ApiError::new(StatusCode::BAD_GATEWAY, "engine_failed", message));
            }
            self.sampled.tokens.push(token.id);
            self.sampled.logprobs.push(token.logprob);
            self.sampled.versions.push(token.version);
            self.version = Some(token.version);
            self.completion_len += 1;
            if format.stop_ids().binary_search(&token.id).is_ok() {
                continue;
            }
            if self.logprobs {
                self.token_logprobs.push(token_logprob(&format, &token));
            }
            text.clear();
            let mut found = false;
            if let Some(special) = format.special(token.id) {
                self.detokenizer.flush(&mut text);
                found = self.scan(&text);
                if !found {
                    let mut held = String::new();
                    self.stops.flush(&mut held);
                    self.parser.text(&held, &mut self.pieces);
                    self.parser.special(special, &mut self.pieces);
                }
            } else {
                self.detokenizer.push(token.id, &mut text);
                if !text.is_empty() {
                    found = self.scan(&text);
                }
            }
            self.collect();
            if found || (self.one_call && self.has_calls()) {
                self.stopped = true;
                self.stream.stop(u32::try_from(self.completion_len).unwrap_or(u32::MAX));
            }
        }
        Ok(())
    }

    /// Text goes through the stop strings to the parser. True when a stop string was found.
    fn scan(&mut self, text: &str) -> bool {
        let mut certain = String::new();
        let found = self.stops.push(text, &mut certain);
        self.parser.text(&certain, &mut self.pieces);
        found
    }

    /// Moves the parser's pieces into blocks.
    fn collect(&mut self) {
        for piece in std::mem::take(&mut self.pieces) {
            // An answer with one call ends with it: what the model began behind it is not shown.
            if self.one_call && self.has_calls() {
                break;
            }
            match piece {
                Piece::Content(text) => match self.blocks.last_mut() {
                    Some(Block::Text(last)) => last.push_str(&text),
                    _ if text.is_empty() => {}
                    _ => self.blocks.push(Block::Text(text)),
                },
                Piece::Call(call) => {
                    let id = format!("call_{:024x}", rand::random::<u128>() >> 32);
                    self.blocks.push(Block::Call { id, call });
                }
            }
        }
    }

    pub(crate) fn end(&mut self, finish: FinishReason, receipt: Option<TurnReceipt>) {
        if !self.stopped {
            let mut text = String::new();
            self.detokenizer.flush(&mut text);
            let found = self.scan(&text);
            if !found {
                text.clear();
                self.stops.flush(&mut text);
                self.parser.text(&text, &mut self.pieces);
            }
        }
        let cut = finish == FinishReason::Length && !self.stopped;
        self.parser.finish(!cut, &mut self.pieces);
        self.collect();
        let finish = match (cut, self.has_calls()) {
            (true, _) => FinishReason::Length,
            (false, true) => FinishReason::ToolCalls,
            (false, false) => FinishReason::Stop,
        };
        self.end = Some(AnswerEnd { finish, receipt });
    }
}

/// A token's logprob and those of the likeliest others, as OpenAI's chat completions show them.
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

fn token_logprob(format: &ChatFormat, token: &TokenFrame) -> TokenLogprob {
    let alternative = |id: u32, logprob: f32| {
        let bytes = format.token_bytes(id).into_owned();
        // As OpenAI does for tokens that are all but impossible; JSON has no infinity.
        let logprob = if logprob.is_finite() { logprob } else { -9999.0 };
        Alternative { token: String::from_utf8_lossy(&bytes).into_owned(), logprob, bytes }
    };
    TokenLogprob {
        token: alternative(token.id, token.logprob),
        top_logprobs: token.top.iter().map(|&(id, logprob)| alternative(id, logprob)).collect(),
    }
}
