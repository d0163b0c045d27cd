//! Generation with continuous batching on a thread of its own.

mod cpu;
mod device;
mod kv;
mod runner;
mod scheduler;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use candle_core::Device;

use crate::config::LlamaConfig;
use crate::error::EngineError;
use crate::sampling::SamplingParams;
use crate::score::check_tokens;
use crate::weights::Weights;
use runner::{Prepared, Runner};
use scheduler::{Job, Scheduler, Shared};

/// Waiting requests per running one before new ones are refused as busy.
///
/// At `max_batch` 64 that is 1024 requests; a prompt of 2048 tokens is 8 KiB, so the queue stays below 8 MiB.
const WAITING_PER_SLOT: usize = 16;

/// In which format an engine holds matrices and embeddings; norms and biases are f32 in each.
///
/// Computing is in f32 all the same: tokens and log-probabilities are those, bit for bit, that the rounded weights have in f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightFormat {
    /// As they were trained: scorer and trainer reproduce what was sampled.
    #[default]
    F32,
    /// ggml's Q8_0, 9 bits a weight: blocks of 32 along a row, each of 8-bit integers and a scale rounded to f16. CPU only.
    /// The trainer, which knows the unrounded weights, finds another log-probability than the sampled one.
    Q8_0,
}

impl std::fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Q8_0 => "q8_0",
        })
    }
}

impl std::str::FromStr for WeightFormat {
    type Err = EngineError;

    fn from_str(s: &str) -> Result<Self, EngineError> {
        match s {
            "f32" => Ok(Self::F32),
            "q8_0" => Ok(Self::Q8_0),
            _ => Err(EngineError::InvalidOption { field: "weight_format", expected: "f32 or q8_0", got: s.to_owned() }),
        }
    }
}

/// Bounds and threads of an [`InferenceEngine`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InferenceOptions {
    /// Most sequences that run together. 16 waiting ones per slot are queued.
    pub max_batch: usize,
    /// Most tokens in one forward pass; longer prompts are computed in several. At least `max_batch`.
    pub max_batch_tokens: usize,
    /// Threads of the engine's own pool.
    pub threads: usize,
    /// Niceness of those threads, 0 to 19; above 0 they yield to the rest of the process.
    pub nice: i32,
    /// How the weights are held.
    pub weight_format: WeightFormat,
}

impl Default for InferenceOptions {
    /// 64 sequences, 1024 tokens per pass, 2 threads, no niceness, weights in f32.
    fn default() -> Self {
        Self { max_batch: 64, max_batch_tokens: 1024, threads: 2, nice: 0, weight_format: WeightFormat::F32 }
    }
}

/// A prompt and how to continue it.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateRequest {
    /// Token ids, at least one, each below the vocabulary's size.
    pub prompt: Vec<u32>,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
}

/// One generated token.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledToken {
    /// Its id.
    pub id: u32,
    /// Natural-log probability under the model's unmodified distribution (temperature 1, nothing truncated).
    pub logprob: f32,
    /// Natural-log probability under the tempered, truncated distribution it was drawn from; 0 if greedy.
    pub sampling_logprob: f32,
    /// Version of the weights that produced it.
    pub policy_version: u64,
    /// The most likely tokens with their unmodified log-probabilities, best first; `top_logprobs` of them.
    pub top: Vec<(u32, f32)>,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token was drawn; it was emitted as the last token.
    Stop,
    /// `max_tokens`, or the model's longest sequence, was reached.
    Length,
}

/// Receives the tokens of one sequence on the engine's thread; must not block.
pub trait TokenSink: Send {
    /// Takes a token. False = the caller is gone: the sequence is dropped before the next step, without `finish`.
    fn token(&mut self, t: SampledToken) -> bool;
    /// Takes the end of the sequence; nothing follows.
    fn finish(self: Box<Self>, r: Result<FinishReason, EngineError>);
}

/// A snapshot of the engine's counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InferenceStats {
    /// Sequences in the current batch.
    pub running: usize,
    /// Requests in the queue.
    pub waiting: usize,
    /// Tokens drawn since the start.
    pub generated_tokens: u64,
    /// Prompt tokens computed since the start; those found in the prefix cache do not count.
    pub prompt_tokens: u64,
    /// Version of the weights in use.
    pub policy_version: u64,
}

/// Handle of a running engine; clones share it, and the thread ends when the last one is dropped.
///
/// Sequences that still run then end with [`EngineError::Stopped`].
#[derive(Clone)]
pub struct InferenceEngine {
    handle: Arc<Handle>,
}

struct Handle {
    shared: Arc<Shared>,
    cfg: LlamaConfig,
    device: Device,
    format: WeightFormat,
    waiting_max: usize,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl std::fmt::Debug for InferenceEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InferenceEngine").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl InferenceEngine {
    /// Starts an engine: one scheduling thread and a pool of `opts.threads`.
    ///
    /// # Errors
    /// `InvalidOption`, `Weights` if they do not fit `cfg`, `Threads`, `Tensor`.
    pub fn spawn(
        cfg: LlamaConfig,
        weights: Weights,
        policy_version: u64,
        opts: InferenceOptions,
        device: Device,
    ) -> Result<Self, EngineError> {
        check_options(&opts)?;
        cfg.validate()?;
        let runner = Runner::new(&cfg, Prepared::new(&cfg, &weights, &device, opts.weight_format)?, opts.max_batch);
        let shared = Arc::new(Shared::new(policy_version));
        let format = opts.weight_format;
        let waiting_max = opts.max_batch.saturating_mul(WAITING_PER_SLOT);
        let scheduler = Scheduler::new(Arc::clone(&shared), runner, cfg.vocab_size, opts, policy_version)?;
        std::thread::Builder::new()
            .name("starling-infer".into())
            .spawn(move || scheduler.run())
            .map_err(|e| EngineError::Threads { what: e.to_string() })?;
        Ok(Self { handle: Arc::new(Handle { shared, cfg, device, format, waiting_max }) })
    }

    /// Queues a request and returns at once; tokens arrive at `sink` as they are drawn.
    ///
    /// `max_tokens` is cut down to what fits behind the prompt.
    ///
    /// # Errors
    /// `EmptyPrompt`, `TokenOutOfRange`, `TooLong`, `InvalidOption` for the request, `Busy` if the queue is full,
    /// `Stopped`. The sink is dropped without a call then.
    pub fn generate(&self, req: GenerateRequest, sink: Box<dyn TokenSink>) -> Result<(), EngineError> {
        let cfg = &self.handle.cfg;
        req.sampling.validate()?;
        check_tokens(cfg, "prompt", &req.prompt, cfg.max_position_embeddings - 1)?;
        let room = cfg.max_position_embeddings - req.prompt.len();
        let max_tokens = (req.sampling.max_tokens as usize).min(room);
        self.handle
            .shared
            .push(Job { prompt: req.prompt, sampling: req.sampling, max_tokens, sink }, self.handle.waiting_max)
    }

    /// Replaces the weights between two decoding steps; running sequences go on with the keys and values they have.
    ///
    /// The copy into the kernels' layout happens on the calling thread (about 1 ms per million parameters), the
    /// exchange before the engine's next step; requests queued after this call run under the new weights only.
    ///
    /// # Errors
    /// `Weights` if they do not fit the configuration (nothing changes), `Tensor`, `Stopped`.
    pub fn swap_weights(&self, weights: Weights, policy_version: u64) -> Result<(), EngineError> {
        let Handle { cfg, device, format, .. } = &*self.handle;
        let prepared = Prepared::new(cfg, &weights, device, *format)?;
        self.handle.shared.swap(prepared, policy_version)
    }

    /// Counters of this moment.
    #[must_use]
    pub fn stats(&self) -> InferenceStats {
        self.handle.shared.stats()
    }

    /// The model's shape.
    #[must_use]
    pub fn config(&self) -> &LlamaConfig {
        &self.handle.cfg
    }
}

fn check_options(opts: &InferenceOptions) -> Result<(), EngineError> {
    let wrong = |field, expected, got: usize| Err(EngineError::InvalidOption { field, expected, got: got.to_string() });
    if !(1..=65_536).contains(&opts.max_batch) {
        return wrong("max_batch", "1 to 65536", opts.max_batch);
    }
    if opts.max_batch_tokens < opts.max_batch {
        return wrong("max_batch_tokens", "at least max_batch", opts.max_batch_tokens);
    }
    if !(1..=1024).contains(&opts.threads) {
        return wrong("threads", "1 to 1024", opts.threads);
    }
    Ok(())
}
