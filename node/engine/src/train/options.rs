//! What a trainer can be told.

use starling_protocol::algorithm::{AlgorithmSpec, Preset};
use starling_protocol::lora::LoraSpec;

use crate::error::TrainError;

/// Options of a [`super::Trainer`].
#[derive(Clone, Debug, PartialEq)]
pub struct TrainerConfig {
    /// AdamW's learning rate, above 0. 1e-6 to 1e-5 for pretrained models, 1e-3 for the tiny ones of tests.
    pub learning_rate: f64,
    /// Decay of the first and second moment, each in [0, 1).
    pub betas: (f64, f64),
    /// Added to the root of the second moment, above 0.
    pub eps: f64,
    /// Decoupled weight decay, at least 0; matrices only.
    pub weight_decay: f64,
    /// Gradients are scaled down to this Euclidean norm; 0 = never.
    pub max_grad_norm: f64,
    /// The loss.
    pub algorithm: AlgorithmSpec,
    /// Optimizer updates per `step()`: the batch is cut into this many consecutive parts, between episodes.
    pub minibatches: usize,
    /// Most tokens that one forward and backward pass computes; bounds memory. The gradients of an update's passes are accumulated. A longer sample goes alone. At most 512 on the CPU.
    pub micro_batch_tokens: usize,
    /// Threads of the trainer's own pool.
    pub threads: usize,
    /// Niceness of those threads, 0 to 19; above 0 they yield to the rest of the process.
    pub nice: i32,
    /// Adapters to train in place of the weights, which stay as they are then.
    pub lora: Option<LoraSpec>,
    /// What fresh adapters are drawn from.
    pub seed: u64,
    /// Keep only what lies between layers for the backward pass, which computes the rest again: a third more arithmetic
    /// (no weight gradients: a half), the same bits. CPU only.
    pub gradient_checkpointing: bool,
    /// Compute a prefix that samples of one pass have in common once. The same log-probabilities to the bit, and gradients
    /// within rounding: worth turning off only to compare. CPU only; elsewhere every sample is computed in full.
    pub share_prefixes: bool,
}

impl Default for TrainerConfig {
    /// AdamW as most RL recipes run it, clip-higher 0.2/0.28 (DAPO), one update per step.
    fn default() -> Self {
        Self {
            learning_rate: 1e-5,
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 0.0,
            max_grad_norm: 1.0,
            algorithm: Preset::Dapo.spec(256),
            minibatches: 1,
            micro_batch_tokens: 4096,
            threads: 2,
            nice: 0,
            lora: None,
            seed: 0,
            gradient_checkpointing: false,
            share_prefixes: true,
        }
    }
}

/// Refuses options that cannot be.
pub(super) fn check_options(tc: &TrainerConfig) -> Result<(), TrainError> {
    let positive = |v: f64| v.is_finite() && v > 0.0;
    let not_negative = |v: f64| v.is_finite() && v >= 0.0;
    let unit = |v: f64| (0.0..1.0).contains(&v);
    let checks: [(&'static str, bool, &'static str, String); 7] = [
        ("learning_rate", positive(tc.learning_rate), "a finite value above 0", tc.learning_rate.to_string()),
        ("betas", unit(tc.betas.0) && unit(tc.betas.1), "two values in [0, 1)", format!("{:?}", tc.betas)),
        ("eps", positive(tc.eps), "a finite value above 0", tc.eps.to_string()),
        ("weight_decay", not_negative(tc.weight_decay), "a finite value of at least 0", tc.weight_decay.to_string()),
        ("max_grad_norm", not_negative(tc.max_grad_norm), "a finite value of at least 0", tc.max_grad_norm.to_string()),
        ("minibatches", tc.minibatches >= 1, "at least 1", tc.minibatches.to_string()),
        ("threads", (1..=1024).contains(&tc.threads), "1 to 1024", tc.threads.to_string()),
    ];
    if let Some((field, _, expected, got)) = checks.into_iter().find(|(_, ok, ..)| !ok) {
        return Err(TrainError::InvalidOption { field, expected, got });
    }
    if let Some(lora) = &tc.lora {
        lora.validate()?;
    }
    Ok(tc.algorithm.validate()?)
}
