//! Speed of generation and training on this machine, for `starling bench`.

use std::sync::mpsc;
use std::time::Instant;

use candle_core::Device;

use crate::config::LlamaConfig;
use crate::error::{EngineError, TrainError};
use crate::infer::{FinishReason, GenerateRequest, InferenceEngine, InferenceOptions, SampledToken, TokenSink};
use crate::sampling::SamplingParams;
use crate::train::{Sample, Trainer, TrainerConfig};
use crate::weights::Weights;

struct Counter {
    tokens: u64,
    done: mpsc::Sender<u64>,
}

impl TokenSink for Counter {
    fn token(&mut self, _t: SampledToken) -> bool {
        self.tokens += 1;
        true
    }

    fn finish(self: Box<Self>, _r: Result<FinishReason, EngineError>) {
        let _ = self.done.send(self.tokens);
    }
}

/// A varied but fixed token sequence.
fn tokens(vocab: usize, len: usize, salt: usize) -> Vec<u32> {
    (0..len).map(|i| u32::try_from((i * 31 + salt * 17 + i * i * salt) % vocab).unwrap_or(0)).collect()
}

/// Generated tokens per second: `requests` different prompts of `prompt_len`, `new_tokens` each, prefill included.
///
/// # Errors
/// Whatever [`InferenceEngine::spawn`] and `generate` refuse.
pub fn generation_tokens_per_s(
    cfg: &LlamaConfig,
    weights: &Weights,
    device: &Device,
    opts: &InferenceOptions,
    requests: usize,
    prompt_len: usize,
    new_tokens: u32,
) -> Result<f64, EngineError> {
    let engine = InferenceEngine::spawn(cfg.clone(), weights.clone(), 0, opts.clone(), device.clone())?;
    let start = Instant::now();
    let mut total = 0u64;
    let mut sent = 0;
    let (tx, rx) = mpsc::channel();
    let mut open = 0usize;
    while sent < requests || open > 0 {
        while sent < requests && open < opts.max_batch * 2 {
            let sampling = SamplingParams { max_tokens: new_tokens, seed: sent as u64, ..SamplingParams::default() };
            let request = GenerateRequest { prompt: tokens(cfg.vocab_size, prompt_len, sent + 1), sampling };
            engine.generate(request, Box::new(Counter { tokens: 0, done: tx.clone() }))?;
            sent += 1;
            open += 1;
        }
        total += rx.recv().map_err(|mpsc::RecvError| EngineError::Stopped)?;
        open -= 1;
    }
    Ok(per_second(total, start))
}

/// Trained-on tokens per second of GRPO steps: `samples` sequences of `len` tokens, half of each trained.
///
/// One step warms up, `steps` are timed.
///
/// # Errors
/// Whatever [`Trainer::new`] and `step` refuse.
pub fn training_tokens_per_s(
    cfg: &LlamaConfig,
    weights: &Weights,
    device: &Device,
    tc: &TrainerConfig,
    samples: usize,
    len: usize,
    steps: usize,
) -> Result<f64, TrainError> {
    let mut trainer = Trainer::new(cfg.clone(), weights, tc.clone(), device.clone())?;
    let batch: Vec<Sample> = (0..samples)
        .map(|i| Sample {
            tokens: tokens(cfg.vocab_size, len, i),
            loss_mask: (0..len).map(|t| t >= len.div_ceil(2)).collect(),
            behaviour_logprobs: vec![-5.5; len],
            advantage: if i % 2 == 0 { 1.0 } else { -1.0 },
            ..Sample::default()
        })
        .collect();
    trainer.step(&batch)?;
    let start = Instant::now();
    let mut total = 0;
    for _ in 0..steps {
        total += trainer.step(&batch)?.tokens;
    }
    Ok(per_second(total, start))
}

/// `samples` sequences of `len` tokens as one GRPO group makes them: the first `prompt` tokens are the same, the rest is
/// their own and trains.
#[must_use]
pub fn grpo_group(vocab: usize, samples: usize, len: usize, prompt: usize) -> Vec<Sample> {
    let shared = tokens(vocab, prompt, 1);
    let sample = |i: usize| Sample {
        tokens: shared.iter().copied().chain(tokens(vocab, len - prompt, i + 2)).collect(),
        loss_mask: (0..len).map(|t| t >= prompt).collect(),
        behaviour_logprobs: vec![-5.5; len],
        advantage: if i.is_multiple_of(2) { 1.0 } else { -1.0 },
        ..Sample::default()
    };
    (0..samples).map(sample).collect()
}

/// Seconds of each of `steps` optimizer steps on one batch, behind one that warms up. The weights are not kept beside the
/// trainer's.
///
/// # Errors
/// Whatever [`Trainer::new`] and `step` refuse.
pub fn step_seconds(
    cfg: &LlamaConfig,
    weights: Weights,
    tc: &TrainerConfig,
    batch: &[Sample],
    steps: usize,
) -> Result<Vec<f64>, TrainError> {
    let mut trainer = Trainer::new(cfg.clone(), &weights, tc.clone(), Device::Cpu)?;
    drop(weights);
    trainer.step(batch)?;
    (0..steps).map(|_| Ok(trainer.step(batch)?.step_ms / 1e3)).collect()
}

#[expect(clippy::cast_precision_loss, reason = "counts are below 2^53")]
fn per_second(count: u64, start: Instant) -> f64 {
    count as f64 / start.elapsed().as_secs_f64().max(1e-9)
}
