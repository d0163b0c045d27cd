//! Samples, their validation, and their split into minibatches and micro-batches.

use std::ops::Range;

use crate::config::LlamaConfig;
use crate::error::TrainError;
use crate::packing::{PackedSequences, Packer};

use super::loss::TokenTerm;

/// One token sequence to train on: a prompt with its answer, or a timeline of several turns.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    /// Prompt and answer ids, in order.
    pub tokens: Vec<u32>,
    /// Same length as `tokens`; true = this token was sampled and trains. The first token cannot.
    pub loss_mask: Vec<bool>,
    /// Same length as `tokens`: natural-log probability under the sampling policy; 0 where `loss_mask` is false.
    pub behaviour_logprobs: Vec<f32>,
    /// Advantage of every trained token of this sample.
    pub advantage: f32,
    /// Same length as `tokens`: versions between the weights that are trained and those that sampled the token. Empty: 0.
    pub staleness: Vec<u32>,
    /// Samples of one episode have one number and follow one another: what an algorithm does to a sequence, it does to
    /// an episode. `None`: an episode of its own.
    pub episode: Option<u64>,
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
pub(crate) fn check_samples(cfg: &LlamaConfig, batch: &[Sample], has_behaviour: bool) -> Result<(), TrainError> {
    let mut seen = std::collections::BTreeSet::new();
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
        if !s.staleness.is_empty() && s.staleness.len() != len {
            return wrong("staleness", format!("none, or {len} entries"), s.staleness.len().to_string());
        }
        let goes_on = sample > 0 && s.episode.is_some() && batch[sample - 1].episode == s.episode;
        if let Some(episode) = s.episode.filter(|e| !goes_on && !seen.insert(*e)) {
            return wrong("episode", "samples of one episode one after another".into(), episode.to_string());
        }
        if !has_behaviour {
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

/// The episodes of a checked batch, as ranges of samples.
pub(crate) fn episodes(batch: &[Sample]) -> Vec<Range<usize>> {
    let mut out: Vec<Range<usize>> = Vec::new();
    for (i, s) in batch.iter().enumerate() {
        match out.last_mut() {
            Some(last) if s.episode.is_some() && batch[i - 1].episode == s.episode => last.end = i + 1,
            _ => out.push(i..i + 1),
        }
    }
    out
}

/// Cuts a checked batch into at most `parts` consecutive ranges of samples whose numbers of episodes differ by at most
/// one; no episode is split.
pub(crate) fn minibatches(batch: &[Sample], parts: usize) -> Vec<Range<usize>> {
    let episodes = episodes(batch);
    let parts = parts.clamp(1, episodes.len().max(1));
    let start = |episode: usize| episodes.get(episode).map_or(batch.len(), |e| e.start);
    let n = episodes.len();
    (0..parts).map(|i| start(n * i / parts)..start(n * (i + 1) / parts)).collect()
}

/// Cuts a batch into micro-batches of at most `tokens_max` tokens (a longer sample goes alone), in order. `terms` are
/// those of each sample.
///
/// With `share` a prefix that samples of one micro-batch have in common, such as the prompt of a group or what came before
/// a fork, is there once. The cut depends on the batch only, so that sums have one order on any number of threads.
pub(crate) fn micro_batches(
    batch: &[Sample],
    terms: &[Vec<TokenTerm>],
    tokens_max: usize,
    share: bool,
) -> Vec<MicroBatch> {
    let mut out = Vec::new();
    let (mut packer, mut packed_terms) = (Packer::new(share), Vec::new());
    for (s, terms) in batch.iter().zip(terms) {
        if packer.tokens() > 0 && packer.tokens() + packer.cost(&s.tokens, &s.loss_mask) > tokens_max {
            let packed = std::mem::replace(&mut packer, Packer::new(share)).finish();
            out.push(MicroBatch { packed, terms: std::mem::take(&mut packed_terms) });
        }
        packer.push(&s.tokens, &s.loss_mask);
        packed_terms.extend_from_slice(terms);
    }
    if packer.tokens() > 0 {
        out.push(MicroBatch { packed: packer.finish(), terms: packed_terms });
    }
    out
}

/// The terms of each sample's trained tokens, as far as the sample alone says.
#[expect(clippy::cast_precision_loss, reason = "a few versions")]
pub(crate) fn terms(batch: &[Sample]) -> Vec<Vec<TokenTerm>> {
    let of_sample = |s: &Sample| {
        let term = |t: usize| {
            let behind = s.staleness.get(t).copied().unwrap_or(0) as f32;
            TokenTerm {
                behaviour_logprob: s.behaviour_logprobs.get(t).copied().unwrap_or(0.0),
                advantage: s.advantage,
                shortcut: behind / (behind + 1.0),
                ..TokenTerm::default()
            }
        };
        s.loss_mask.iter().enumerate().filter(|(_, m)| **m).map(|(t, _)| term(t)).collect()
    };
    batch.iter().map(of_sample).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minibatches_never_split_an_episode() {
        let sample = |episode| Sample { tokens: vec![1], loss_mask: vec![false], episode, ..Sample::default() };
        let batch: Vec<Sample> =
            [Some(7), Some(7), None, None, Some(1), Some(1), Some(1), Some(2)].map(sample).to_vec();
        assert_eq!(episodes(&batch), [0..2, 2..3, 3..4, 4..7, 7..8]);
        assert_eq!(minibatches(&batch, 2), [0..3, 3..8]);
        assert_eq!(minibatches(&batch, 9), [0..2, 2..3, 3..4, 4..7, 7..8]);
        assert_eq!(minibatches(&batch, 1), std::slice::from_ref(&(0..8)));
    }

    #[test]
    fn micro_batches_hold_so_many_tokens_as_are_computed_and_every_term_once() {
        let sample = |last: u32| Sample {
            tokens: (0..30).chain([last, 40]).collect(),
            loss_mask: (0..32).map(|t| t >= 30).collect(),
            ..Sample::default()
        };
        let batch: Vec<Sample> = (50..58).map(sample).collect();
        let cut = |tokens_max, share| {
            let micro = micro_batches(&batch, &terms(&batch), tokens_max, share);
            assert!(micro.iter().all(|m| m.terms.len() == m.packed.rows.len()));
            assert_eq!(micro.iter().map(|m| m.terms.len()).sum::<usize>(), 16);
            micro.iter().map(|m| (m.packed.tokens.len(), m.packed.shared)).collect::<Vec<_>>()
        };
        assert_eq!(cut(64, false), [(62, 0); 4]);
        assert_eq!(cut(64, true), [(38, 7 * 30)]);
        assert_eq!(cut(34, true), [(34, 3 * 30); 2]);
        assert_eq!(cut(1, true), [(31, 0); 8]);
    }

    /// As it was when a sample was an episode.
    #[test]
    fn single_samples_are_cut_evenly() {
        let batch = vec![Sample::default(); 10];
        assert_eq!(minibatches(&batch, 4), [0..2, 2..5, 5..7, 7..10]);
    }
}
