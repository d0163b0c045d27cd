//! How fast a device trains: one short step over a batch that is the same on every node, so that the numbers compare.

use super::{Compute, StepInput, TrainerStart};
use starling_engine::Sample;
use starling_protocol::job::TrainerSpec;
use starling_protocol::record::Fitness;
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// Sequences of the batch.
const SEQUENCES: u32 = 8;
/// Tokens of each: 256 in all are a tenth of a second on a small model and some seconds where a step takes minutes.
const TOKENS: u32 = 32;
/// A device that takes longer for so few tokens is of no use as a trainer: 2 tokens a second.
const LIMIT: Duration = Duration::from_secs(120);

/// Half of the sequences are praised and half are blamed, so that there is a gradient.
fn batch() -> Vec<Sample> {
    let sequence = |i: u32| Sample {
        // The two ids that every vocabulary has.
        tokens: (0..TOKENS).map(|t| (t + i) % 2).collect(),
        loss_mask: (0..TOKENS).map(|t| t > 0).collect(),
        behaviour_logprobs: vec![-1.0; TOKENS as usize],
        advantage: if i.is_multiple_of(2) { 1.0 } else { -1.0 },
        ..Sample::default()
    };
    (0..SEQUENCES).map(sequence).collect()
}

/// What the device is worth for training the model. It holds a trainer for the time of two steps; the first one loads and
/// warms up, the second one counts.
pub(crate) async fn measure(compute: &dyn Compute, config: &[u8], weights: Vec<u8>) -> Fitness {
    match compute.training_memory(config) {
        Ok(memory) if !memory.fits() => {
            tracing::warn!(
                ?memory,
                "the device is too small to train the model: this node does not stand for election"
            );
            return Fitness::TooSmall;
        }
        Ok(_) => {}
        Err(reason) => {
            tracing::warn!(reason, "what a trainer takes is not known");
            return Fitness::Unknown;
        }
    }
    match timeout(LIMIT, time_step(compute, config, weights)).await {
        Ok(Ok(took)) => {
            let tokens_per_s = f64::from(SEQUENCES * TOKENS) / took.as_secs_f64().max(1e-6);
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a cast of floats saturates")]
            let tokens_per_s = (tokens_per_s.round() as u32).max(1);
            Fitness::Trains { tokens_per_s }
        }
        Ok(Err(reason)) => {
            tracing::warn!(reason, "the device's speed in training could not be measured");
            Fitness::Unknown
        }
        Err(_elapsed) => {
            tracing::warn!(limit = ?LIMIT, "the device takes too long for a step of {} tokens", SEQUENCES * TOKENS);
            Fitness::Unknown
        }
    }
}

async fn time_step(compute: &dyn Compute, config: &[u8], weights: Vec<u8>) -> Result<Duration, String> {
    let spec = TrainerSpec::default();
    let start = TrainerStart { weights, ..TrainerStart::default() };
    let trainer = compute.start_trainer(config, start, &spec)?;
    let input = || StepInput { samples: batch(), learning_rate: spec.learning_rate, with_optimizer_state: false };
    let gone = "the trainer ended";
    trainer.step(input()).await.map_err(|_dropped| gone)??;
    let begun = Instant::now();
    trainer.step(input()).await.map_err(|_dropped| gone)??;
    Ok(begun.elapsed())
}
