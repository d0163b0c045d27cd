//! The engine's loop: admit, run one forward pass, draw, hand out; and what it shares with the handles.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::runner::{Prepared, Runner, Segment};
use super::{FinishReason, InferenceOptions, InferenceStats, SampledToken, TokenSink};
use crate::error::EngineError;
use crate::kernels::attention::BLOCK;
use crate::par;
use crate::sampling::{Draw, Sampler, SamplingParams};

/// A request in the queue.
pub(crate) struct Job {
    pub(crate) prompt: Vec<u32>,
    pub(crate) sampling: SamplingParams,
    pub(crate) max_tokens: usize,
    pub(crate) sink: Box<dyn TokenSink>,
}

#[derive(Default)]
struct Inbox {
    waiting: VecDeque<Job>,
    swap: Option<(Prepared, u64)>,
    closed: bool,
}

/// What handles and the loop share.
pub(crate) struct Shared {
    inbox: Mutex<Inbox>,
    wake: Condvar,
    running: AtomicUsize,
    generated_tokens: AtomicU64,
    prompt_tokens: AtomicU64,
    policy_version: AtomicU64,
}

impl Shared {
    /// An empty inbox.
    pub(crate) fn new(policy_version: u64) -> Self {
        Self {
            inbox: Mutex::default(),
            wake: Condvar::new(),
            running: AtomicUsize::new(0),
            generated_tokens: AtomicU64::new(0),
            prompt_tokens: AtomicU64::new(0),
            policy_version: AtomicU64::new(policy_version),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a job unless `limit` wait already.
    pub(crate) fn push(&self, job: Job, limit: usize) -> Result<(), EngineError> {
        let mut inbox = self.lock();
        if inbox.closed {
            return Err(EngineError::Stopped);
        }
        if inbox.waiting.len() >= limit {
            return Err(EngineError::Busy { waiting: inbox.waiting.len(), limit });
        }
        inbox.waiting.push_back(job);
        drop(inbox);
        self.wake.notify_one();
        Ok(())
    }

    /// Offers new weights; a later offer replaces one that has not been taken yet.
    pub(crate) fn swap(&self, prepared: Prepared, policy_version: u64) -> Result<(), EngineError> {
        let mut inbox = self.lock();
        if inbox.closed {
            return Err(EngineError::Stopped);
        }
        inbox.swap = Some((prepared, policy_version));
        drop(inbox);
        self.wake.notify_one();
        Ok(())
    }

    /// Ends the loop before its next step.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.wake.notify_one();
    }

    /// Counters of this moment.
    pub(crate) fn stats(&self) -> InferenceStats {
        let waiting = self.lock().waiting.len();
        InferenceStats {
            running: self.running.load(Ordering::Relaxed),
            waiting,
            generated_tokens: self.generated_tokens.load(Ordering::Relaxed),
            prompt_tokens: self.prompt_tokens.load(Ordering::Relaxed),
            policy_version: self.policy_version.load(Ordering::Relaxed),
        }
    }
}

/// A sequence in the batch.
struct Running {
    slot: usize,
    prompt: Vec<u32>,
    /// Prompt tokens whose keys and values exist.
    computed: usize,
    /// Tokens of the coming pass.
    planned: usize,
    /// The token drawn last, which the next pass takes in.
    last: u32,
    generated: usize,
    max_tokens: usize,
    opened_at_version: u64,
    sampler: Sampler,
    sink: Box<dyn TokenSink>,
}

impl Running {
    fn in_prompt(&self) -> bool {
        self.computed < self.prompt.len()
    }

    /// Whether the coming pass yields a token.
    fn wanted(&self) -> bool {
        self.planned > 0 && (!self.in_prompt() || self.computed + self.planned == self.prompt.len())
    }

    fn segment(&self) -> Segment<'_> {
        let tokens = if self.in_prompt() {
            &self.prompt[self.computed..self.computed + self.planned]
        } else {
            std::slice::from_ref(&self.last)
        };
        Segment { slot: self.slot, tokens, wanted: self.wanted() }
    }
}

/// The loop's own state.
pub(crate) struct Scheduler {
    shared: Arc<Shared>,
    runner: Runner,
    pool: rayon::ThreadPool,
    opts: InferenceOptions,
    vocab: usize,
    policy_version: u64,
    running: Vec<Running>,
    free_slots: Vec<usize>,
    logits: Vec<f32>,
}

/// What became of a sequence after a step.
enum Fate {
    Goes,
    Gone,
    Ends(Result<FinishReason, EngineError>),
}

impl Scheduler {
    /// A scheduler with an empty batch.
    pub(crate) fn new(
        shared: Arc<Shared>,
        runner: Runner,
        vocab: usize,
        opts: InferenceOptions,
        policy_version: u64,
    ) -> Result<Self, EngineError> {
        let pool = par::pool(opts.threads, opts.nice, "starling-infer")
            .map_err(|e| EngineError::Threads { what: e.to_string() })?;
        let free_slots = (0..opts.max_batch).rev().collect();
        Ok(Self {
            shared,
            runner,
            pool,
            opts,
            vocab,
            policy_version,
            running: Vec::new(),
            free_slots,
            logits: Vec::new(),
        })
    }

    /// Runs until the last handle is gone.
    pub(crate) fn run(mut self) {
        par::set_nice(self.opts.nice);
        while self.collect() {
            self.plan();
            let outcome = catch_unwind(AssertUnwindSafe(|| self.step()));
            match outcome {
                Ok(Ok(draws)) => self.deliver(draws),
                Ok(Err(e)) => self.fail_all(&e.to_string()),
                Err(panic) => {
                    let what = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
                    let what = what.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
                    self.fail_all(&what);
                }
            }
            self.shared.running.store(self.running.len(), Ordering::Relaxed);
        }
        let waiting = std::mem::take(&mut self.shared.lock().waiting);
        let sinks = waiting.into_iter().map(|j| j.sink).chain(self.running.drain(..).map(|r| r.sink));
        for sink in sinks {
            finish(sink, Err(EngineError::Stopped));
        }
    }

    /// Waits for work, takes new weights and new sequences in. False = the engine ends.
    fn collect(&mut self) -> bool {
        let shared = Arc::clone(&self.shared);
        let mut inbox = shared.lock();
        loop {
            if inbox.closed {
                return false;
            }
            if let Some((prepared, version)) = inbox.swap.take() {
                self.runner.swap(prepared);
                self.policy_version = version;
                shared.policy_version.store(version, Ordering::Relaxed);
            }
            self.admit(&mut inbox.waiting);
            if !self.running.is_empty() {
                shared.running.store(self.running.len(), Ordering::Relaxed);
                return true;
            }
            inbox = shared.wake.wait(inbox).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Opens sequences while there are slots. One whose prefix another sequence is computing waits for it.
    fn admit(&mut self, waiting: &mut VecDeque<Job>) {
        let mut at = 0;
        while at < waiting.len() && !self.free_slots.is_empty() {
            if self.prefix_is_coming(&waiting[at].prompt) {
                at += 1;
                continue;
            }
            let (Some(job), Some(slot)) = (waiting.remove(at), self.free_slots.pop()) else { break };
            let computed = self.runner.open(slot, &job.prompt);
            self.running.push(Running {
                slot,
                prompt: job.prompt,
                computed,
                planned: 0,
                last: 0,
                generated: 0,
                max_tokens: job.max_tokens,
                opened_at_version: self.policy_version,
                sampler: Sampler::new(job.sampling),
                sink: job.sink,
            });
        }
    }

    /// Whether a running prompt will soon hold a longer prefix of `prompt` than is known now.
    fn prefix_is_coming(&self, prompt: &[u32]) -> bool {
        if !self.runner.shares_prefixes() || prompt.len() <= BLOCK {
            return false;
        }
        let end = self.runner.known(prompt) + BLOCK;
        end < prompt.len()
            && self.running.iter().any(|r| {
                r.in_prompt()
                    && r.opened_at_version == self.policy_version
                    && r.prompt.len() > end
                    && r.prompt[..end] == prompt[..end]
            })
    }

    /// Shares the pass's tokens out: one for each decoding sequence, the rest to prompts in order of arrival.
    fn plan(&mut self) {
        let decoding = self.running.iter().filter(|r| !r.in_prompt()).count();
        let mut room = self.opts.max_batch_tokens.saturating_sub(decoding).max(1);
        for r in &mut self.running {
            if r.in_prompt() {
                r.planned = room.min(r.prompt.len() - r.computed);
                room -= r.planned;
            } else {
                r.planned = 1;
            }
        }
    }

    /// One forward pass and one draw per sequence that is due.
    fn step(&mut self) -> Result<Vec<Option<Draw>>, EngineError> {
        let Self { runner, pool, running, logits, vocab, .. } = self;
        let vocab = *vocab;
        pool.install(|| {
            let segments: Vec<Segment<'_>> = running.iter().filter(|r| r.planned > 0).map(Running::segment).collect();
            runner.forward(&segments, logits)?;
            let due = running.iter_mut().filter(|r| r.wanted());
            let mut draws: Vec<_> = due.map(|r| (&mut r.sampler, None)).collect();
            let per_task = par::rows_per_chunk(draws.len());
            par::chunks_mut(&mut draws, per_task, |i, chunk| {
                for (j, (sampler, draw)) in chunk.iter_mut().enumerate() {
                    let row = (i * per_task + j) * vocab;
                    *draw = sampler.draw(&logits[row..row + vocab]);
                }
            });
            Ok(draws.into_iter().map(|(_, draw)| draw).collect())
        })
    }

    /// Books the pass, hands tokens out, and removes sequences that ended.
    fn deliver(&mut self, draws: Vec<Option<Draw>>) {
        let mut draws = draws.into_iter();
        let (mut prompt_tokens, mut generated) = (0u64, 0u64);
        let mut kept = Vec::with_capacity(self.running.len());
        for mut r in std::mem::take(&mut self.running) {
            let wanted = r.wanted();
            if r.in_prompt() {
                r.computed += r.planned;
                prompt_tokens += r.planned as u64;
                if !r.in_prompt() && r.opened_at_version == self.policy_version {
                    self.runner.remember(r.slot, &r.prompt);
                }
            }
            let fate = if wanted {
                generated += 1;
                hand_out(&mut r, draws.next().flatten(), self.policy_version)
            } else {
                Fate::Goes
            };
            if !matches!(fate, Fate::Goes) {
                self.runner.close(r.slot);
                self.free_slots.push(r.slot);
            }
            match fate {
                Fate::Goes => kept.push(r),
                Fate::Gone => {}
                Fate::Ends(result) => finish(r.sink, result),
            }
        }
        self.running = kept;
        self.shared.prompt_tokens.fetch_add(prompt_tokens, Ordering::Relaxed);
        self.shared.generated_tokens.fetch_add(generated, Ordering::Relaxed);
    }

    /// Drops the whole batch after a failed pass.
    fn fail_all(&mut self, what: &str) {
        tracing::error!(what, sequences = self.running.len(), "forward pass failed");
        for r in std::mem::take(&mut self.running) {
            self.runner.close(r.slot);
            self.free_slots.push(r.slot);
            finish(r.sink, Err(EngineError::Internal { what: what.to_owned() }));
        }
    }
}

/// Gives a drawn token to its sink and says what becomes of the sequence.
fn hand_out(r: &mut Running, draw: Option<Draw>, policy_version: u64) -> Fate {
    let Some(draw) = draw else { return Fate::Ends(Err(EngineError::NonFiniteLogits { policy_version })) };
    r.last = draw.id;
    r.generated += 1;
    let stop = r.sampler.params().stop_token_ids.contains(&draw.id);
    let Draw { id, logprob, sampling_logprob, top } = draw;
    let token = SampledToken { id, logprob, sampling_logprob, policy_version, top };
    // A sink that panics is a caller that is gone; the engine serves the others.
    let listening = catch_unwind(AssertUnwindSafe(|| r.sink.token(token))).unwrap_or(false);
    if !listening {
        Fate::Gone
    } else if stop {
        Fate::Ends(Ok(FinishReason::Stop))
    } else if r.generated >= r.max_tokens {
        Fate::Ends(Ok(FinishReason::Length))
    } else {
        Fate::Goes
    }
}

/// Tells a sink the end, whatever it does with it.
fn finish(sink: Box<dyn TokenSink>, result: Result<FinishReason, EngineError>) {
    if catch_unwind(AssertUnwindSafe(|| sink.finish(result))).is_err() {
        tracing::warn!("a token sink panicked in finish");
    }
}
