//! From rollouts to training samples.

use starling_engine::Sample;
use starling_protocol::ledger::{RolloutGroup, TrainingBatch};

/// The batch as the engine takes it: one sample per timeline, each with its episode's advantage. Groups without
/// advantages and timelines without trained tokens carry no gradient and are left out.
pub(crate) fn samples_of(batch: &TrainingBatch) -> Vec<Sample> {
    let of_group = |g: &RolloutGroup| {
        let advantages = g.advantages.clone().unwrap_or_default();
        g.rollouts
            .iter()
            .zip(advantages)
            .flat_map(|(r, advantage)| {
                let trains = r.rollout.timelines.iter().filter(|t| t.loss_mask.contains(&true));
                trains.map(move |t| Sample {
                    tokens: t.tokens.clone(),
                    loss_mask: t.loss_mask.clone(),
                    behaviour_logprobs: t.behaviour_logprobs.clone(),
                    advantage,
                })
            })
            .collect::<Vec<_>>()
    };
    batch.groups.iter().flat_map(of_group).collect()
}
