//! Log-probabilities of given tokens: what a trainer or a verifier compares with the sampled ones.

use candle_core::Device;

use crate::config::LlamaConfig;
use crate::cpu::CpuModel;
use crate::cpu::forward::Tape;
use crate::device_model::DeviceModel;
use crate::error::EngineError;
use crate::packing::PackedSequences;
use crate::params::{fuse, rope_table};
use crate::tensors::to_host;
use crate::weights::Weights;

/// Natural-log probability of each token given those before it; index 0 is 0.0. Runs on the calling thread.
///
/// On the CPU these are the same bits as `SampledToken::logprob` under the same weights.
///
/// # Errors
/// `EmptyPrompt`, `TokenOutOfRange`, `TooLong` for the tokens; `Weights` if they do not fit `cfg`;
/// `NonFiniteLogits` if the model is broken.
pub fn sequence_logprobs(
    cfg: &LlamaConfig,
    weights: &Weights,
    device: &Device,
    tokens: &[u32],
) -> Result<Vec<f32>, EngineError> {
    check_tokens(cfg, "tokens", tokens, cfg.max_position_embeddings)?;
    let params = fuse(cfg, weights, device)?;
    if tokens.len() == 1 {
        return Ok(vec![0.0]);
    }
    let batch = PackedSequences::new([(tokens, vec![true; tokens.len()].as_slice())]);
    let rows = if device.is_cpu() {
        CpuModel::new(cfg, &params, rope_table(cfg))?.logprobs(&batch, &mut Tape::new(true))
    } else {
        to_host(&DeviceModel::new(cfg, params, rope_table(cfg))?.logprobs(&batch)?, "score")?
    };
    let logprobs: Vec<f32> = std::iter::once(0.0).chain(rows.chunks_exact(2).map(|r| r[0])).collect();
    if logprobs.iter().all(|l| l.is_finite()) {
        Ok(logprobs)
    } else {
        Err(EngineError::NonFiniteLogits { policy_version: 0 })
    }
}

/// Checks a token sequence against a model.
pub(crate) fn check_tokens(
    cfg: &LlamaConfig,
    field: &'static str,
    tokens: &[u32],
    limit: usize,
) -> Result<(), EngineError> {
    if tokens.is_empty() {
        return Err(EngineError::EmptyPrompt);
    }
    if tokens.len() > limit {
        return Err(EngineError::TooLong { field, got: tokens.len(), limit });
    }
    match tokens.iter().enumerate().find(|(_, t)| **t as usize >= cfg.vocab_size) {
        Some((index, &got)) => Err(EngineError::TokenOutOfRange { field, index, got, vocab_size: cfg.vocab_size }),
        None => Ok(()),
    }
}
