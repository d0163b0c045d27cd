//! One model call: from a prompt to ids, from sampled tokens to text, and into the episode's tree.
//!
//! [`Calls`] are driven by whoever awaits them, without a task of their own: when the HTTP connection goes away they
//! are dropped, and with them every [`crate::backend::GenerateStream`]. They reach the tree only when all their answers
//! are complete, together.

use crate::answer::Answer;
use crate::api::ApiError;
use crate::backend::{AnswerEvent, BackendError};
use crate::episode::{Episode, InFlight, Stage};
use crate::gateway::Inner;
use crate::request::{Chat, Conversation, Prompt, Request, Settings};
use crate::text::ChatFormat;
use axum::http::StatusCode;
use futures::{FutureExt, Stream};
use starling_protocol::assignment::Purpose;
use starling_protocol::job::Sampling;
use starling_protocol::rollout::TIMELINES_MAX;
use starling_protocol::timeline::{CallPlan, CanonicalMessage, TurnInfo};
use starling_protocol::wire::Generate;
use starling_protocol::{Hash, ModelName};
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

/// Root of the timelines of prompts that are no conversation.
const RAW_ROOT: &[u8] = b"starling: a prompt without a chat template";

/// Where a call comes from.
#[derive(Clone, Debug)]
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

/// Whom a request asks: a model that the caller may use, and what the job says of sampling.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    caller: Caller,
    model: ModelName,
    pub(crate) format: Arc<ChatFormat>,
    defaults: Sampling,
    greedy: bool,
}

impl Target {
    /// The model called `name`, which must be the episode's where the caller has one.
    pub(crate) async fn find(inner: &Inner, caller: Caller, name: &str) -> Result<Self, ApiError> {
        if let Caller::Episode(e) = &caller {
            let a = &e.assignment;
            if name != a.model.as_str() {
                let message = format!("`model`: this episode's model is {:?}, got {name:?}", a.model.as_str());
                let error = ApiError::field("model_not_found", "model", message);
                return Err(ApiError { status: StatusCode::NOT_FOUND, ..error });
            }
            let greedy = matches!(a.purpose, Purpose::Eval { greedy: true, .. });
            let (model, format, defaults) = (a.model.clone(), Arc::clone(&e.format), a.sampling);
            return Ok(Self { caller, model, format, defaults, greedy });
        }
        let model = ModelName::new(name).map_err(|e| ApiError::invalid("model", e.expected))?;
        let format = inner.backend.chat_format(&model).await?;
        Ok(Self { caller, model, format, defaults: Sampling::default(), greedy: false })
    }

    /// The exact ids of a prompt, history as it was sampled.
    fn prepare(&self, inner: &Inner, prompt: Prompt<'_>) -> Result<(Vec<u32>, Option<Recording>), ApiError> {
        let Caller::Episode(episode) = &self.caller else {
            return Ok((self.encode(prompt)?, None));
        };
        let begin = |root, messages: &[CanonicalMessage<'_>]| {
            let mut state = episode.state();
            refuse_closed(episode, &state.stage)?;
            state.last_activity = inner.backend.now();
            Ok::<_, ApiError>(state.tree.begin_call(root, messages))
        };
        let (mut plan, new_prompt) = match prompt {
            Prompt::Chat(chat) => {
                let conversation = chat.conversation(&self.format);
                let mut plan = begin(conversation.tools_hash, &conversation.canonical)?;
                let new_prompt = self.new_ids(&mut plan, &conversation)?;
                (plan, new_prompt)
            }
            raw => {
                let ids = self.encode(raw)?;
                let text: String = ids.iter().map(|id| format!("{id} ")).collect();
                let message = CanonicalMessage { role: "prompt".into(), text: text.into(), ..Default::default() };
                let mut plan = begin(Hash::of(RAW_ROOT), &[message])?;
                if plan.prompt_is_complete() {
                    (plan, Vec::new())
                } else {
                    plan.fork_cause = plan.fork_cause.map(|_| "another prompt".to_owned());
                    (plan, ids)
                }
            }
        };
        let mut prompt = std::mem::take(&mut plan.history_tokens);
        prompt.extend_from_slice(&new_prompt);
        let closed = episode.closed.subscribe();
        let in_flight = InFlight::new(Arc::clone(episode));
        Ok((prompt, Some(Recording { in_flight, plan, new_prompt, closed })))
    }

    /// The ids of a conversation that the plan does not know yet.
    fn new_ids(&self, plan: &mut CallPlan, conversation: &Conversation<'_>) -> Result<Vec<u32>, ApiError> {
        if plan.prompt_is_complete() {
            return Ok(Vec::new());
        }
        let format = &self.format;
        let Conversation { messages, tools, .. } = conversation;
        let last = plan.history_tokens.last().copied();
        let suffix = match plan.known_messages {
            0 => None,
            known => format.render_suffix(messages, tools, known, last)?,
        };
        if let Some(text) = suffix {
            return Ok(format.encode(&text)?);
        }
        plan.discard_history("template rewrites history");
        Ok(format.encode(&format.render_full(messages, tools, true)?)?)
    }

    fn encode(&self, prompt: Prompt<'_>) -> Result<Vec<u32>, ApiError> {
        match prompt {
            Prompt::Chat(chat) => {
                let all = chat.conversation(&self.format);
                Ok(self.format.encode(&self.format.render_full(&all.messages, &all.tools, true)?)?)
            }
            Prompt::Text(text) => Ok(self.format.encode(&text)?),
            Prompt::Tokens(ids) => {
                let unknown = ids.iter().enumerate().find(|(_, id)| !self.format.has_token(**id));
                match unknown {
                    None => Ok(ids),
                    Some((i, id)) => {
                        let expected = format!("ids of the model's vocabulary; {id} at place {i} is none");
                        Err(ApiError::invalid("prompt", &expected))
                    }
                }
            }
        }
    }

    /// How many tokens the engine would be sent for a conversation. Nothing is sampled or recorded.
    pub(crate) fn count(&self, inner: &Inner, chat: Chat<'_>) -> Result<usize, ApiError> {
        Ok(self.prepare(inner, Prompt::Chat(chat))?.0.len())
    }
}

/// A call under way.
pub(crate) struct Call {
    inner: Arc<Inner>,
    recording: Option<Recording>,
    pub(crate) created: u64,
    pub(crate) model: ModelName,
    pub(crate) settings: Settings,
    pub(crate) sampling: Sampling,
    pub(crate) prompt_len: usize,
    pub(crate) answers: Vec<Answer>,
    /// Whether the context or the episode has less room than the caller asked for.
    pub(crate) shortened: bool,
    request: Generate,
    started: Instant,
    /// When the engine was last heard of.
    heard: tokio::time::Instant,
}

/// What [`Calls::advance`] brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Some answer may have new pieces.
    More,
    /// All answers are complete, and recorded if they are an episode's.
    Done,
}

/// The calls of one request, one for each of its prompts; at least one.
pub(crate) struct Calls {
    pub(crate) list: Vec<Call>,
    _permit: OwnedSemaphorePermit,
}

impl Calls {
    /// Starts the only call of a request.
    pub(crate) async fn one(
        inner: Arc<Inner>,
        caller: Caller,
        request: Request<'_>,
        permit: OwnedSemaphorePermit,
    ) -> Result<Self, ApiError> {
        let target = Target::find(&inner, caller, &request.model).await?;
        let call = Call::begin(inner, &target, request.prompt, request.settings).await?;
        Ok(Self { list: vec![call], _permit: permit })
    }

    /// Starts a call for each prompt, all with the same settings.
    pub(crate) async fn of_prompts(
        inner: Arc<Inner>,
        caller: Caller,
        model: &str,
        prompts: Vec<Prompt<'_>>,
        settings: Settings,
        permit: OwnedSemaphorePermit,
    ) -> Result<Self, ApiError> {
        let target = Target::find(&inner, caller, model).await?;
        let mut list = Vec::with_capacity(prompts.len());
        for (i, prompt) in prompts.into_iter().enumerate() {
            let mut settings = settings.clone();
            // A seed is of the request; its prompts draw apart from each other.
            settings.seed = settings.seed.map(|seed| if i == 0 { seed } else { mix(!seed, i as u64) });
            list.push(Call::begin(Arc::clone(&inner), &target, prompt, settings).await?);
        }
        Ok(Self { list, _permit: permit })
    }

    /// Waits for the next frame of any answer and takes it in. After the last answer's end, records them all.
    ///
    /// Cancel-safe: a frame is taken in as soon as it is there.
    pub(crate) async fn advance(&mut self) -> Result<Progress, ApiError> {
        if let [call] = &mut self.list[..] {
            call.advance().await?;
        } else {
            let going = self.list.iter_mut().filter(|c| !c.is_complete());
            let any: Vec<_> = going.map(|call| call.advance().boxed()).collect();
            if !any.is_empty() {
                futures::future::select_all(any).await.0?;
            }
        }
        if !self.list.iter().all(Call::is_complete) {
            return Ok(Progress::More);
        }
        for call in &mut self.list {
            call.record()?;
        }
        Ok(Progress::Done)
    }

    /// Waits for all answers.
    pub(crate) async fn finish(&mut self) -> Result<(), ApiError> {
        while self.advance().await? == Progress::More {}
        Ok(())
    }

    /// Tokens of all prompts, and of all answers so far.
    pub(crate) fn usage(&self) -> (usize, usize) {
        let prompts = self.list.iter().map(|c| c.prompt_len).sum();
        let answers = self.list.iter().flat_map(|c| &c.answers);
        (prompts, answers.map(|a| a.completion_len).sum())
    }

    /// Names the weights that answered: `starling-v<version>`.
    pub(crate) fn fingerprint(&self) -> Option<String> {
        let answers = self.list.iter().flat_map(|c| &c.answers);
        answers.filter_map(|a| a.version).max().map(|v| format!("starling-v{v}"))
    }

    /// The call of an API that has one prompt and one answer a request, and that answer.
    pub(crate) fn single(&self) -> (&Call, &Answer) {
        let call = &self.list[0];
        (call, &call.answers[0])
    }
}

impl Call {
    /// Finds what is known of the prompt, and starts its answers.
    async fn begin(
        inner: Arc<Inner>,
        target: &Target,
        prompt: Prompt<'_>,
        settings: Settings,
    ) -> Result<Self, ApiError> {
        let started = Instant::now();
        let (prompt, recording) = target.prepare(&inner, prompt)?;
        let sampling = settings.sampling(&target.defaults, target.greedy);
        let mut call = Self {
            created: inner.backend.now().0 / 1000,
            model: target.model.clone(),
            prompt_len: prompt.len(),
            answers: Vec::with_capacity(settings.choices as usize),
            shortened: false,
            request: Generate {
                model: target.model.clone(),
                prompt,
                temperature: sampling.temperature,
                top_p: sampling.top_p,
                top_k: sampling.top_k,
                seed: 0,
                drawn: 0,
                max_tokens: 0,
                stop_token_ids: target.format.stop_ids().to_vec(),
                top_logprobs: settings.top_logprobs,
            },
            inner,
            recording,
            sampling,
            settings,
            started,
            heard: tokio::time::Instant::now(),
        };
        call.limit(&target.format)?;
        call.start(&target.format).await?;
        call.heard = tokio::time::Instant::now();
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
        let asked = match (&self.recording, self.settings.max_tokens) {
            // Outside an episode there is no job whose default counts.
            (None, None) => self.settings.open_max_tokens.unwrap_or(room),
            _ => self.sampling.max_tokens,
        };
        let max_tokens = asked.min(room);
        self.request.max_tokens = match &mut self.recording {
            None => max_tokens,
            Some(recording) => recording.reserve(self.settings.choices, self.prompt_len, max_tokens)?,
        };
        self.shortened = self.request.max_tokens < asked;
        Ok(())
    }

    async fn start(&mut self, format: &Arc<ChatFormat>) -> Result<(), ApiError> {
        let base = match (self.settings.seed, &self.recording) {
            (Some(seed), _) => seed,
            (None, Some(recording)) => {
                let episode = &recording.in_flight.episode();
                let call = episode.calls.fetch_add(1, Ordering::Relaxed);
                mix(episode.assignment.seed, call)
            }
            (None, None) => rand::random(),
        };
        let backend = &self.inner.backend;
        let seeds = (0..u64::from(self.settings.choices)).map(|i| if i == 0 { base } else { mix(base, i) });
        let seeds: Vec<u64> = seeds.collect();
        let streams = if let [seed] = seeds[..] {
            vec![backend.generate(Generate { seed, ..self.request.clone() }).await?]
        } else {
            let all = seeds.iter().map(|&seed| backend.generate(Generate { seed, ..self.request.clone() }));
            futures::future::try_join_all(all).await?
        };
        let answers = streams.into_iter().map(|stream| Answer::new(stream, Arc::clone(format), &self.settings));
        self.answers.extend(answers);
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.answers.iter().all(|a| a.end.is_some())
    }

    /// Waits for the next frame of any answer and takes it in.
    async fn advance(&mut self) -> Result<(), ApiError> {
        let frame = next_frame(&mut self.answers);
        let timeout = self.inner.config.frame_timeout;
        // Counted from the last frame, not from now: whoever waits may wait in slices.
        let until = self.heard + timeout;
        let frame = async {
            tokio::time::timeout_at(until, frame).await.map_err(|_elapsed| {
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
                        return refuse_closed(episode, &episode.state().stage);
                    }
                }
            }
        };
        self.heard = tokio::time::Instant::now();
        let answer = &mut self.answers[index];
        let cut = BackendError::Unavailable("the engine ended the answer without an end frame".into());
        match frame.unwrap_or(Err(cut))? {
            AnswerEvent::Tokens(tokens) => answer.tokens(tokens)?,
            AnswerEvent::End { finish, receipt } => answer.end(finish, receipt),
        }
        Ok(())
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
            let info = TurnInfo {
                finish: end.finish,
                temperature: self.request.temperature,
                duration_ms: u32::try_from(self.started.elapsed().as_millis()).unwrap_or(u32::MAX),
                receipt: end.receipt.clone(),
            };
            let sampled = std::mem::take(&mut answer.sampled);
            let message = answer.canonical();
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
