//! From rollouts to training samples, and to what is said about them.

use starling_engine::{Sample, StepReport};
use starling_protocol::algorithm::{AlgorithmSpec, Objective};

use starling_protocol::PolicyVersion;
use starling_protocol::control::StepMetrics;
use starling_protocol::ledger::{AcceptedRollout, RolloutGroup, TrainingBatch};
use std::collections::BTreeMap;

/// The batch as the engine takes it: one sample per timeline, each with its episode's number and advantage. Groups
/// without advantages and timelines without trained tokens carry no gradient and are left out; so are, for the
/// supervised objective, episodes that are not better than their group.
pub(crate) fn samples_of(batch: &TrainingBatch, algorithm: &AlgorithmSpec) -> Vec<Sample> {
    let version = batch.version.steps();
    let trains = |advantage: f32| algorithm.objective != Objective::Supervised || advantage > 0.0;
    let sample = |episode: u64, advantage: f32, t: &starling_protocol::rollout::Timeline| Sample {
        tokens: t.tokens.clone(),
        loss_mask: t.loss_mask.clone(),
        behaviour_logprobs: t.behaviour_logprobs.clone(),
        advantage,
        staleness: t
            .policy_versions
            .iter()
            .zip(&t.loss_mask)
            .map(|(v, m)| if *m { u32::try_from(version.saturating_sub(v.steps())).unwrap_or(u32::MAX) } else { 0 })
            .collect(),
        episode: Some(episode),
    };
    let mut samples = Vec::new();
    for (episode, (rollout, advantage)) in (0..).zip(scored(batch).filter(|(_, a)| trains(*a))) {
        let timelines = rollout.rollout.timelines.iter().filter(|t| t.loss_mask.contains(&true));
        samples.extend(timelines.map(|t| sample(episode, advantage, t)));
    }
    samples
}

/// The rollouts that have an advantage, with it.
fn scored(batch: &TrainingBatch) -> impl Iterator<Item = (&AcceptedRollout, f32)> {
    let of_group = |g: &'_ RolloutGroup| g.advantages.clone().unwrap_or_default();
    batch.groups.iter().flat_map(move |g| g.rollouts.iter().zip(of_group(g)))
}

/// What the batch and its step were like; the times and the alarm are the caller's.
pub(crate) fn metrics_of(batch: &TrainingBatch, r: &StepReport) -> StepMetrics {
    let mut sums: BTreeMap<String, (f64, u64)> = BTreeMap::new();
    // What the ledger admits is of the history that is trained, so counts of steps compare.
    let steps_since = |v: PolicyVersion| batch.version.steps().saturating_sub(v.steps());
    let (mut staleness_max, mut staleness_sum, mut sampled) = (0, 0, 0u64);
    let (mut tokens, mut alone) = (0u64, 0u64);
    for r in batch.groups.iter().flat_map(|g| &g.rollouts) {
        let e = sums.entry(r.rollout.task.set.clone()).or_default();
        e.0 += f64::from(r.rollout.reward);
        e.1 += 1;
        staleness_max = staleness_max.max(steps_since(r.oldest_version));
        for t in &r.rollout.timelines {
            for (v, _) in t.policy_versions.iter().zip(&t.loss_mask).filter(|(_, m)| **m) {
                staleness_sum += steps_since(*v);
                sampled += 1;
            }
        }
    }
    for (r, _) in scored(batch) {
        tokens += r.rollout.timelines.iter().map(|t| t.tokens.len() as u64).sum::<u64>();
        alone += r.rollout.turns.iter().map(|t| u64::from(t.prompt_len) + u64::from(t.completion_len)).sum::<u64>();
    }
    StepMetrics {
        reward: sums.iter().map(|(k, (s, n))| (k.clone(), s / (*n as f64))).collect(),
        episodes: sums.into_iter().map(|(k, (_, n))| (k, n)).collect(),
        groups_uninformative: batch.groups.iter().filter(|g| g.advantages.is_none()).count() as u64,
        trained_tokens: r.trained_tokens,
        loss: r.loss,
        grad_norm: r.grad_norm,
        learning_rate: r.learning_rate,
        clip_fraction: r.clip_fraction,
        masked_fraction: r.masked_fraction,
        correction_weight: r.correction_weight,
        ratios_out_of_range: r.ratios_out_of_range,
        mismatch_kl: r.approx_kl,
        reference_kl: r.reference_kl,
        entropy: r.entropy,
        staleness_max,
        staleness_mean: staleness_sum as f64 / sampled.max(1) as f64,
        tokens,
        tokens_saved: alone.saturating_sub(tokens),
        tokens_shared: r.tokens_shared,
        mfu: r.mfu,
        ..StepMetrics::default()
    }
}

#[cfg(test)]
#[path = "batch_tests.rs"]
mod tests;
