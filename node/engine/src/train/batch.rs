//! Samples, their validation, and their split into micro-batches.

use crate::config::LlamaConfig;
use crate::error::TrainError;
use crate::packing::PackedSequences;

use super::loss::TokenTerm;

/// One token sequence to train on: a prompt with its answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Prompt and answer ids, in order.
    pub tokens: Vec<u32>,
    /// Same length as `tokens`; true = this token was sampled and trains. The first token cannot.
    pub loss_mask: Vec<bool>,
    /// Same length as `tokens`: natural-log probability under the sampling policy; 0 where `loss_mask` is false.
    pub behaviour_logprobs: Vec<f32>,
    /// Advantage of every trained token of this sample.
    pub advantage: f32,
}

/// Samples that go through one forward and backward pass together.
#[derive(Clone, Debug)]
pub(crate) struct MicroBatch {
    /// Packed tokens.
    pub(crate) packed: PackedSequences,
    /// One term per row of `packed`.
    pub(crate) terms: Vec<TokenTerm>,
}

/// Refuses samples that a step could not use.
pub(crate) fn check_samples(cfg: &LlamaConfig, batch: &[Sample], policy_gradient: bool) -> Result<(), TrainError> {
    for (sample, s) in batch.iter().enumerate() {
        let wrong = |field, expected: String, got: String| Err(TrainError::Sample { sample, field, expected, got });
        let len = s.tokens.len();
        if len == 0 || len > cfg.max_position_embeddings {
            return wrong("tokens", format!("1 to {} tokens", cfg.max_position_embeddings), len.to_string());
        }
        if s.loss_mask.len() != len {
            return wrong("loss_mask", format!("{len} entries"), s.loss_mask.len().to_string());
        }
        if let Some(t) = s.tokens.iter().find(|&&t| t as usize >= cfg.vocab_size) {
            return wrong("tokens", format!("ids below {}", cfg.vocab_size), t.to_string());
        }
        if s.loss_mask[0] {
            return wrong("loss_mask", "false for the first token, which nothing predicts".into(), "true".into());
        }
        if !policy_gradient {
            continue;
        }
        if s.behaviour_logprobs.len() != len {
            return wrong("behaviour_logprobs", format!("{len} entries"), s.behaviour_logprobs.len().to_string());
        }
        let trained = s.behaviour_logprobs.iter().zip(&s.loss_mask).filter(|(_, m)| **m);
        if let Some((l, _)) = trained.clone().find(|(l, _)| !l.is_finite()) {
            return wrong("behaviour_logprobs", "finite values".into(), l.to_string());
        }
        if !s.advantage.is_finite() {
            return wrong("advantage", "a finite value".into(), s.advantage.to_string());
        }
    }
    Ok(())
}

/// Cuts a batch into micro-batches of at most `tokens_max` tokens (a longer sample goes alone), in order.
///
/// The cut depends on the batch only, so that sums have one order on any number of threads.
pub(crate) fn micro_batches(batch: &[Sample], tokens_max: usize) -> Vec<MicroBatch> {
    let mut out = Vec::new();
    let mut first = 0;
    while first < batch.len() {
        let mut tokens = batch[first].tokens.len();
        let mut end = first + 1;
        while end < batch.len() && tokens + batch[end].tokens.len() <= tokens_max {
            tokens += batch[end].tokens.len();
            end += 1;
        }
        let part = &batch[first..end];
        let packed = PackedSequences::new(part.iter().map(|s| (s.tokens.as_slice(), s.loss_mask.as_slice())));
        if !packed.rows.is_empty() {
            out.push(MicroBatch { packed, terms: part.iter().flat_map(terms).collect() });
        }
        first = end;
    }
    out
}

fn terms(s: &Sample) -> impl Iterator<Item = TokenTerm> + '_ {
    s.loss_mask.iter().enumerate().filter(|(_, m)| **m).map(|(t, _)| TokenTerm {
        behaviour_logprob: s.behaviour_logprobs.get(t).copied().unwrap_or(0.0),
        advantage: s.advantage,
    })
}
