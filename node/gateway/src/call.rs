//! One model call: from a conversation to prompt ids, from sampled tokens to text, and into the episode's tree.
//!
//! A [`Call`] is driven by whoever awaits it, without a task of its own: when the HTTP connection goes away the
//! call is dropped, and with it every [`GenerateStream`]. It reaches the tree only when all its answers are
//! complete.

use crate::backend::{AnswerEvent, BackendError, GenerateStream};
use crate::episode::{Episode, InFlight, Stage};
use crate::gateway::Inner;
use crate::openai::ApiError;
use crate::openai::request::{ChatRequest, Options, canonical_answer};
use crate::openai::response::{Alternative, TokenLogprob};
use crate::text::{ChatFormat, Detokenizer, Piece, PlainText, StopScanner, ToolCall, ToolCallParser};
use axum::http::StatusCode;
use futures::Stream;
use starling_protocol::assignment::Purpose;
use starling_protocol::job::Sampling;
use starling_protocol::rollout::{FinishReason, TIMELINES_MAX, TurnReceipt};
use starling_protocol::timeline::{CallPlan, Completion, TurnInfo};
use starling_protocol::wire::{Generate, TokenFrame};
use starling_protocol::{Hash, ModelName, PolicyVersion};
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::Instant;
use tokio::sync::OwnedSemaphorePermit;

/// Most calls recorded in an episode. Its part of a sealed rollout: 4096 × about 200 bytes < 1 MiB.
const TURNS_MAX: usize = 4096;
/// Most tokens of an episode's timelines together: 3 MiB / (5 bytes id and mask + 4 logprob + 2 version).
const EPISODE_TOKENS_MAX: usize = 280_000;

/// Where a call comes from.
#[derive(Debug)]
pub(crate) enum Caller {
    /// An episode's agent: recorded.
    Episode(Arc<Episode>),
    /// Anyone else: answered, not recorded.
    Open,
}

#[derive(Debug)]
struct Recording {
    in_flight: InFlight,
    plan: CallPlan,
    new_prompt: Vec<u32>,
    closed: tokio::sync::watch::Receiver<bool>,
}

impl Recording {
    /// Sets room aside for the call's answers in the episode's sealed rollout. Returns how long each of them may
    /// be, `max_tokens` at most.
    fn reserve(&mut self, choices: u32, prompt_len: usize, max_tokens: u32) -> Result<u32, ApiError> {
        let n = choices as usize;
        // A call that continues a timeline adds to it rather than starting one; its other answers do start one.
        let continues = self.plan.known_messages > 0 && self.plan.fork_cause.is_none();
        let new_timelines = n - usize::from(continues);
        let (turns, leaves, tokens) = {
            let state = self.in_flight.episode().state();
            let (reserved, tree) = (&state.reserved, &state.tree);
            let tokens = tree.leaf_tokens() + reserved.tokens + new_timelines * prompt_len;
            let tokens = tokens + if continues { self.new_prompt.len() } else { 0 };
            (tree.turns() + reserved.answers + n, tree.leaves() + reserved.answers + new_timelines, tokens)
        };
        let room = EPISODE_TOKENS_MAX.saturating_sub(tokens) / n;
        if turns > TURNS_MAX || leaves > TIMELINES_MAX || room == 0 {
            let message = format!(
                "the episode would have {turns} answers (at most {TURNS_MAX}), {leaves} timelines (at most {TIMELINES_MAX}) \
                 and {tokens} tokens (at most {EPISODE_TOKENS_MAX}): its rollout could not be stored"
            );
            return Err(ApiError::new(StatusCode::BAD_REQUEST, "episode_too_long", message));
        }
        let max_tokens = max_tokens.min(u32::try_from(room).unwrap_or(u32::MAX));
        self.in_flight.reserve(n, new_timelines * prompt_len + n * max_tokens as usize);
        Ok(max_tokens)
    }
}

/// A call under way.
pub(crate) struct Call {
    inner: Arc<Inner>,
    recording: Option<Recording>,
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: ModelName,
    pub(crate) options: Options,
    pub(crate) prompt_len: usize,
    pub(crate) answers: Vec<Answer>,
    request: Generate,
    started: Instant,
    _permit: OwnedSemaphorePermit,
}

/// What [`Call::advance`] brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Some answer may have new pieces.
    More,
    /// All answers are complete, and recorded if they are an episode's.
    Done,
}

impl Call {
    /// Checks a request, finds what is known of its conversation, and starts its answers.
    pub(crate) async fn begin(
        inner: Arc<Inner>,
        caller: Caller,
        request: ChatRequest<'_>,
        permit: OwnedSemaphorePermit,
    ) -> Result<Self, ApiError> {
        let started = Instant::now();
        let backend = Arc::clone(&inner.backend);
        let (model, format, options) = match &caller {
            Caller::Episode(e) => {
                let a = &e.assignment;
                if request.model != a.model.as_str() {
                    let message =
                        format!("`model`: this episode's model is {:?}, got {:?}", a.model.as_str(), request.model);
                    let error = ApiError::field("model_not_found", "model", message);
                    return Err(ApiError { status: StatusCode::NOT_FOUND, ..error });
                }
                let greedy = matches!(a.purpose, Purpose::Eval { greedy: true, .. });
                (a.model.clone(), Arc::clone(&e.format), request.options(&a.sampling, greedy)?)
            }
            Caller::Open => {
                let options = request.options(&Sampling::default(), false)?;
                let name = ModelName::new(&*request.model).map_err(|e| ApiError::invalid("model", e.expected))?;
                let format = backend.chat_format(&name).await?;
                (name, format, options)
            }
        };
        let conversation = request.conversation(&format)?;
        let render = |all: &crate::openai::request::Conversation<'_>| {
            format.encode(&format.render_full(&all.messages, &all.tools, true)?)
        };
        let (prompt, recording) = match caller {
            Caller::Open => (render(&conversation)?, None),
            Caller::Episode(episode) => {
                let mut plan = {
                    let mut state = episode.state();
                    refuse_closed(&episode, &state.stage)?;
                    state.last_activity = backend.now();
                    state.tree.begin_call(conversation.tools_hash, &conversation.canonical)
                };
                let mut new_prompt = Vec::new();
                if !plan.prompt_is_complete() {
                    let known = plan.known_messages;
                    let last = plan.history_tokens.last().copied();
                    let suffix = match known {
                        0 => None,
                        _ => format.render_suffix(&conversation.messages, &conversation.tools, known, last)?,
                    };
                    new_prompt = match suffix {
                        Some(text) => format.encode(&text)?,
                        None => {
                            plan.discard_history("template rewrites history");
                            render(&conversation)?
                        }
                    };
                }
                let mut prompt = std::mem::take(&mut plan.history_tokens);
                prompt.extend_from_slice(&new_prompt);
                let closed = episode.closed.subscribe();
                (prompt, Some(Recording { in_flight: InFlight::new(episode), plan, new_prompt, closed }))
            }
        };
        let mut call = Self {
            id: format!("chatcmpl-{:032x}", rand::random::<u128>()),
            created: backend.now().0 / 1000,
            prompt_len: prompt.len(),
            answers: Vec::with_capacity(options.choices as usize),
            request: Generate {
                model: model.clone(),
                prompt,
                temperature: options.sampling.temperature,
                top_p: options.sampling.top_p,
                top_k: options.sampling.top_k,
                seed: 0,
                drawn: 0,
                max_tokens: 0,
                stop_token_ids: format.stop_ids().to_vec(),
                top_logprobs: options.top_logprobs,
            },
            inner,
            recording,
            model,
            options,
            started,
            _permit: permit,
        };
        call.limit(&format)?;
        call.start(&format).await?;
        Ok(call)
    }

    /// Fits the call into the context and the episode.
    fn limit(&mut self, format: &ChatFormat) -> Result<(), ApiError> {
        let context = format.context_len();
        let room = context.saturating_sub(self.prompt_len);
        if room == 0 || self.prompt_len == 0 {
            let message = format!(
                "the prompt has {} tokens; the model's context holds {context}, at least one of them for the answer",
                self.prompt_len
            );
            return Err(ApiError::field("context_length_exceeded", "messages", message));
        }
        let room = u32::try_from(room).unwrap_or(u32::MAX);
        // Outside an episode there is no job whose default counts.
        let unlimited = self.recording.is_none() && !self.options.max_tokens_given;
        let max_tokens = if unlimited { room } else { self.options.sampling.max_tokens.min(room) };
        self.request.max_tokens = match &mut self.recording {
            None => max_tokens,
            Some(recording) => recording.reserve(self.options.choices, self.prompt_len, max_tokens)?,
        };
        Ok(())
    }

    async fn start(&mut self, format: &Arc<ChatFormat>) -> Result<(), ApiError> {
        let base = match (self.options.seed, &self.recording) {
            (Some(seed), _) => seed,
            (None, Some(recording)) => {
                let episode = &recording.in_flight.episode();
                let call = episode.calls.fetch_add(1, Ordering::Relaxed);
                mix(episode.assignment.seed, call)
            }
            (None, None) => rand::random(),
        };
        let backend = &self.inner.backend;
        let seeds = (0..u64::from(self.options.choices)).map(|i| if i == 0 { base } else { mix(base, i) });
        let seeds: Vec<u64> = seeds.collect();
        let streams = if let [seed] = seeds[..] {
            vec![backend.generate(Generate { seed, ..self.request.clone() }).await?]
        } else {
            let all = seeds.iter().map(|&seed| backend.generate(Generate { seed, ..self.request.clone() }));
            futures::future::try_join_all(all).await?
        };
        let answers = streams.into_iter().map(|stream| Answer::new(stream, Arc::clone(format), &self.options));
        self.answers.extend(answers);
        Ok(())
    }

    /// Waits for the next frame of any answer and takes it in. After the last answer's end, records the call.
    pub(crate) async fn advance(&mut self) -> Result<Progress, ApiError> {
        let frame = next_frame(&mut self.answers);
        let timeout = self.inner.config.frame_timeout;
        let frame = async {
            tokio::time::timeout(timeout, frame).await.map_err(|_elapsed| {
                let message = format!("the engine was silent for {} s", timeout.as_secs());
                ApiError::new(StatusCode::GATEWAY_TIMEOUT, "engine_timeout", message)
            })
        };
        let (index, frame) = match &mut self.recording {
            None => frame.await?,
            Some(recording) => {
                let closed = async {
                    let _ = recording.closed.wait_for(|closed| *closed).await;
                };
                let over = tokio::select! {
                    biased;
                    frame = frame => Some(frame?),
                    _ = closed => None,
                };
                match over {
                    Some(frame) => frame,
                    None => {
                        let episode = &recording.in_flight.episode();
                        refuse_closed(episode, &episode.state().stage)?;
                        return Ok(Progress::More);
                    }
                }
            }
        };
        let answer = &mut self.answers[index];
        let cut = BackendError::Unavailable("the engine ended the answer without an end frame".into());
        match frame.unwrap_or(Err(cut))? {
            AnswerEvent::Tokens(tokens) => answer.tokens(tokens)?,
            AnswerEvent::End { finish, receipt } => answer.end(finish, receipt),
        }
        if self.answers.iter().all(|a| a.end.is_some()) {
            self.record()?;
            return Ok(Progress::Done);
        }
        Ok(Progress::More)
    }

    /// Puts all answers into the episode's tree.
    fn record(&mut self) -> Result<(), ApiError> {
        let Some(recording) = &self.recording else { return Ok(()) };
        let episode = &recording.in_flight.episode();
        let now = self.inner.backend.now();
        let mut state = episode.state();
        refuse_closed(episode, &state.stage)?;
        for answer in &mut self.answers {
            let Some(end) = &answer.end else { continue };
            let calls = answer.calls.iter().map(|(_, c)| (c.name.as_str(), c.arguments.as_str()));
            let message = canonical_answer(&answer.content, calls);
            let info = TurnInfo {
                finish: end.finish,
                temperature: self.request.temperature,
                duration_ms: u32::try_from(self.started.elapsed().as_millis()).unwrap_or(u32::MAX),
                receipt: end.receipt.clone(),
            };
            let sampled = std::mem::take(&mut answer.sampled);
            state.tree.end_call(&recording.plan, &recording.new_prompt, sampled, &message, info);
        }
        state.last_activity = now;
        Ok(())
    }
}

/// Refuses a call of an episode that is over, and says what became of it.
pub(crate) fn refuse_closed(episode: &Episode, stage: &Stage) -> Result<(), ApiError> {
    let id = episode.id();
    let conflict = |code, message| Err(ApiError::new(StatusCode::CONFLICT, code, message));
    match stage {
        Stage::Open => Ok(()),
        Stage::Ending | Stage::Ended(_) => conflict("episode_ended", format!("episode {id} has ended")),
        Stage::Aborted(cause) => conflict("episode_aborted", format!("episode {id} was aborted: {cause}")),
    }
}

/// A seed of its own for the `i`-th of something.
fn mix(seed: u64, i: u64) -> u64 {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    bytes[8..].copy_from_slice(&i.to_le_bytes());
    let mut out = [0; 8];
    out.copy_from_slice(&Hash::of(&bytes).0[..8]);
    u64::from_le_bytes(out)
}

/// The next frame of whichever answer has one.
async fn next_frame(answers: &mut [Answer]) -> (usize, Option<Result<AnswerEvent, BackendError>>) {
    poll_fn(|cx| {
        for (i, answer) in answers.iter_mut().enumerate().filter(|(_, a)| a.end.is_none()) {
            if let Poll::Ready(frame) = Pin::new(&mut answer.stream).poll_next(cx) {
                return Poll::Ready((i, frame));
            }
        }
        Poll::Pending
    })
    .await
}

/// How an answer ended.
#[derive(Debug)]
struct AnswerEnd {
    finish: FinishReason,
    receipt: Option<TurnReceipt>,
}

/// One answer of a call.
#[derive(Debug)]
pub(crate) struct Answer {
    stream: GenerateStream,
    format: Arc<ChatFormat>,
    detokenizer: Detokenizer,
    stops: StopScanner,
    parser: Box<dyn ToolCallParser>,
    logprobs: bool,
    one_call: bool,
    /// Set when the answer was stopped here: later tokens do not count.
    stopped: bool,
    sampled: Completion,
    pieces: Vec<Piece>,
    /// All text for the reader.
    pub(crate) content: String,
    /// All tool calls with their ids.
    pub(crate) calls: Vec<(String, ToolCall)>,
    /// Of the tokens so far, or since they were last taken out.
    pub(crate) token_logprobs: Vec<TokenLogprob>,
    /// Text and calls up to here were shown to the reader.
    pub(crate) shown_content: usize,
    pub(crate) shown_calls: usize,
    pub(crate) completion_len: usize,
    /// That sampled the last token.
    pub(crate) version: Option<PolicyVersion>,
    end: Option<AnswerEnd>,
}

impl Answer {
    fn new(stream: GenerateStream, format: Arc<ChatFormat>, options: &Options) -> Self {
        Self {
            stream,
            detokenizer: Detokenizer::new(Arc::clone(&format)),
            stops: StopScanner::new(options.stops.clone()),
            parser: if options.parse_tools { format.tool_parser() } else { Box::new(PlainText) },
            format,
            logprobs: options.logprobs,
            one_call: !options.parallel_tool_calls,
            stopped: false,
            sampled: Completion::default(),
            pieces: Vec::new(),
            content: String::new(),
            calls: Vec::new(),
            token_logprobs: Vec::new(),
            shown_content: 0,
            shown_calls: 0,
            completion_len: 0,
            version: None,
            end: None,
        }
    }

    /// Why it ended, in OpenAI's word.
    pub(crate) fn finish(&self) -> Option<&'static str> {
        self.end.as_ref().map(|end| match end.finish {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::ToolCalls => "tool_calls",
        })
    }

    fn tokens(&mut self, tokens: Vec<TokenFrame>) -> Result<(), ApiError> {
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
            if found || (self.one_call && !self.calls.is_empty()) {
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

    /// Moves the parser's pieces into content and calls.
    fn collect(&mut self) {
        for piece in self.pieces.drain(..) {
            match piece {
                Piece::Content(text) => self.content.push_str(&text),
                Piece::Call(_) if self.one_call && !self.calls.is_empty() => {}
                Piece::Call(call) => {
                    self.calls.push((format!("call_{:024x}", rand::random::<u128>() >> 32), call));
                }
            }
        }
    }

    fn end(&mut self, finish: FinishReason, receipt: Option<TurnReceipt>) {
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
        let finish = match (cut, self.calls.is_empty()) {
            (true, _) => FinishReason::Length,
            (false, false) => FinishReason::ToolCalls,
            (false, true) => FinishReason::Stop,
        };
        self.end = Some(AnswerEnd { finish, receipt });
    }
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
