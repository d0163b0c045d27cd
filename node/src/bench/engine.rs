//! Tokens per second of the demo's model, generated and trained, beside what the arithmetic alone would allow: the
//! products that no implementation can leave out, at the rate that `gemm` reaches here on a product of its choice.

use super::machine::cores;
use super::report::{Better, Row};
use crate::pretrain::config;
use candle_core::Tensor;
use starling_engine::bench::{generation_tokens_per_s, training_tokens_per_s};
use starling_engine::{Device, InferenceOptions, LlamaConfig, TrainerConfig, Weights};
use std::time::{Duration, Instant};

const PROMPT: u32 = 20;
const NEW: u32 = 24;
/// Sequences of a run of generation, by batch. Below 264, where the engine's bench repeats its prompts.
const GENERATIONS: [(usize, usize); 2] = [(64, 256), (1, 32)];
const SAMPLES: usize = 256;
const SAMPLE: u32 = 40;
/// Side of the square product whose rate is taken for the machine's peak.
const GEMM: usize = 1024;
const GEMM_TIME: Duration = Duration::from_millis(250);
const PEER: &str = "arithmetic at measured gemm peak";

/// The rows of `generation`.
///
/// # Errors
/// Whatever the engine refuses.
pub(super) fn generation(runs: usize) -> anyhow::Result<Vec<Row>> {
    let cfg = config();
    let weights = Weights::random(&cfg, &Device::Cpu, 1)?;
    let flop = generation_flop(&cfg);
    let mut rows = Vec::new();
    for (batch, requests) in GENERATIONS {
        let options = InferenceOptions {
            max_batch: batch,
            max_batch_tokens: 8192,
            threads: cores(),
            nice: 0,
            ..InferenceOptions::default()
        };
        let ours = || -> anyhow::Result<f64> {
            let prompt = PROMPT as usize;
            Ok(generation_tokens_per_s(&cfg, &weights, &Device::Cpu, &options, requests, prompt, NEW)?)
        };
        let (ours, limit) = beside_gemm(runs, flop, ours)?;
        let what = format!("batch {batch}, prompt {PROMPT}, {NEW} new");
        rows.push(Row::new(what, "tokens/s", Better::More, &ours, Some((PEER, &limit))));
    }
    Ok(rows)
}

/// The rows of `training`.
///
/// # Errors
/// Whatever the trainer refuses.
pub(super) fn training(runs: usize) -> anyhow::Result<Vec<Row>> {
    let cfg = config();
    let weights = Weights::random(&cfg, &Device::Cpu, 1)?;
    let options = TrainerConfig { micro_batch_tokens: 8192, threads: cores(), ..TrainerConfig::default() };
    let ours = || -> anyhow::Result<f64> {
        Ok(training_tokens_per_s(&cfg, &weights, &Device::Cpu, &options, SAMPLES, SAMPLE as usize, 1)?)
    };
    let (ours, limit) = beside_gemm(runs, training_flop(&cfg), ours)?;
    let what = format!("{SAMPLES} samples of {SAMPLE} tokens, half of them trained");
    Ok(vec![Row::new(what, "tokens/s", Better::More, &ours, Some((PEER, &limit)))])
}

/// Runs in turn ours and the product whose rate bounds it, at `flop` a token; the first of each does not count.
fn beside_gemm(
    runs: usize,
    flop: f64,
    mut ours: impl FnMut() -> anyhow::Result<f64>,
) -> anyhow::Result<(Vec<f64>, Vec<f64>)> {
    let (mut values, mut limits) = (Vec::with_capacity(runs), Vec::with_capacity(runs));
    ours()?;
    gemm_flops()?;
    for _ in 0..runs {
        values.push(ours()?);
        limits.push(gemm_flops()? / flop);
    }
    Ok((values, limits))
}

/// Floating-point operations per second of the fastest of many large products, on all cores.
fn gemm_flops() -> anyhow::Result<f64> {
    let a = Tensor::randn(0_f32, 1.0, (GEMM, GEMM), &Device::Cpu)?;
    let b = Tensor::randn(0_f32, 1.0, (GEMM, GEMM), &Device::Cpu)?;
    let begin = Instant::now();
    let mut best = f64::INFINITY;
    while begin.elapsed() < GEMM_TIME || best.is_infinite() {
        let start = Instant::now();
        std::hint::black_box(a.matmul(&b)?);
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(2.0 * float(GEMM).powi(3) / best)
}

/// Parameters of the layers and of the output matrix, each of which a token meets in one multiply-add.
fn parameters(cfg: &LlamaConfig) -> (f64, f64) {
    let head = float(cfg.vocab_size * cfg.hidden_size);
    let all = float(usize::try_from(cfg.parameter_count()).unwrap_or(usize::MAX));
    let embeddings = if cfg.tie_word_embeddings { head } else { 2.0 * head };
    (all - embeddings, head)
}

/// Operations of attention when a sequence of `len` is computed: scores and sums over what came before, in all layers.
fn attention_flop(cfg: &LlamaConfig, len: f64) -> f64 {
    let width = float(cfg.num_hidden_layers * cfg.num_attention_heads * cfg.head_dim);
    4.0 * width * len * (len + 1.0) / 2.0
}

/// Operations per generated token, prefill included: each token but the last goes through the layers once, and the
/// output matrix is needed for new tokens only.
fn generation_flop(cfg: &LlamaConfig) -> f64 {
    let (layers, head) = parameters(cfg);
    let passed = f64::from(PROMPT + NEW - 1);
    (2.0 * layers * passed + 2.0 * head * f64::from(NEW) + attention_flop(cfg, passed)) / f64::from(NEW)
}

/// Operations per token of a training step: 6 a parameter, forward and backward. Half the tokens train, and only these
/// need the output matrix.
fn training_flop(cfg: &LlamaConfig) -> f64 {
    let (layers, head) = parameters(cfg);
    6.0 * layers + 6.0 * head / 2.0 + 3.0 * attention_flop(cfg, f64::from(SAMPLE)) / f64::from(SAMPLE)
}

#[expect(clippy::cast_precision_loss, reason = "counts are below 2^53")]
fn float(count: usize) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arithmetic_of_the_demo_model_is_that_of_its_matrices() {
        let cfg = config();
        let (layers, head) = parameters(&cfg);
        // Four layers of q, k, v, o and gate, up, down; norms are the rest.
        let matrices = f64::from(4 * (4 * 128 * 128 + 3 * 128 * 384));
        assert!(layers >= matrices && layers < matrices * 1.01, "{layers}");
        assert!((head - f64::from(264 * 128)).abs() < 0.5, "{head}");
        let training = training_flop(&cfg) / (layers + head);
        assert!((5.5..6.5).contains(&training), "{training} operations a parameter");
        let generation = generation_flop(&cfg) / (layers + head) * 24.0 / 43.0;
        assert!((1.9..2.2).contains(&generation), "{generation} operations a parameter");
    }
}
