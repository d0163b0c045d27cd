//! The trainer: batches of samples in, AdamW updates of the weights out.

pub(crate) mod batch;
pub(crate) mod gradients;
pub(crate) mod loss;
pub(crate) mod optim;
mod state;

use std::sync::Arc;
use std::time::Instant;

use candle_core::{Device, Tensor};

pub use batch::Sample;
use gradients::{GradientPlan, global_norm};
use loss::{LossSums, Objective};
use optim::{AdamW, Slot};

use crate::config::LlamaConfig;
use crate::error::TrainError;
use crate::kernels::rope::RopeTable;
use crate::par;
use crate::params::{fuse, rope_table, split};
use crate::weights::Weights;

/// Parameters up to which each thread works on micro-batches of its own; above, all threads share one.
///
/// The partial sums of 8 lanes of 16 Mi parameters take 512 MiB.
const PARALLEL_BATCH_PARAMETERS: u64 = 16 << 20;
/// Partial sums of a batch: enough to keep a few threads evenly busy.
const LANES: usize = 8;
/// Micro-batches on the CPU stay below this: one layer's activations then stay in the second-level cache, and the
/// products have rows enough.
const CPU_MICRO_BATCH_TOKENS: usize = 512;

/// Options of a [`Trainer`].
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
    /// The ratio counts down to `1 - clip_low`; in [0, 1].
    pub clip_low: f32,
    /// The ratio counts up to `1 + clip_high`; at least 0.
    pub clip_high: f32,
    /// Optimizer updates per `step()`: the batch is cut into this many consecutive parts.
    pub minibatches: usize,
    /// Most tokens in one forward and backward pass; bounds memory. A longer sample goes alone. At most 512 on the CPU.
    pub micro_batch_tokens: usize,
    /// Threads of the trainer's own pool.
    pub threads: usize,
    /// Niceness of those threads, 0 to 19; above 0 they yield to the rest of the process.
    pub nice: i32,
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
            clip_low: 0.2,
            clip_high: 0.28,
            minibatches: 1,
            micro_batch_tokens: 4096,
            threads: 2,
            nice: 0,
        }
    }
}

/// What one call of [`Trainer::step`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepReport {
    /// Mean loss per trained token, each minibatch under the weights it met.
    pub loss: f64,
    /// Euclidean norm of the gradient before clipping, averaged over the updates.
    pub grad_norm: f64,
    /// Tokens of all samples.
    pub tokens: u64,
    /// Tokens that trained.
    pub trained_tokens: u64,
    /// Share of trained tokens whose gradient the ratio clip cut off.
    pub clip_fraction: f64,
    /// Mean of `k - 1 - ln k`, `k = π/μ`: mismatch of the trainer with the behaviour policy, in nats.
    pub approx_kl: f64,
    /// Mean entropy of the distributions that trained tokens were drawn from, in nats.
    pub entropy: f64,
    /// Wall-clock time in milliseconds.
    pub step_ms: f64,
}

/// Holds f32 master weights and AdamW's moments, and updates them batch by batch.
///
/// Equal weights, state and batches give equal bits: every sum has one order, whatever the number of threads.
pub struct Trainer {
    cfg: LlamaConfig,
    options: TrainerConfig,
    device: Device,
    rope: Arc<RopeTable>,
    slots: Vec<Slot>,
    updates: u64,
    pool: rayon::ThreadPool,
}

impl std::fmt::Debug for Trainer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trainer")
            .field("cfg", &self.cfg)
            .field("options", &self.options)
            .field("updates", &self.updates)
            .finish_non_exhaustive()
    }
}

impl Trainer {
    /// A trainer that starts from `weights` with empty moments.
    ///
    /// # Errors
    /// `InvalidOption`, `Weights` if they do not fit `cfg`, `Threads`, `Tensor` for want of memory.
    pub fn new(cfg: LlamaConfig, weights: &Weights, tc: TrainerConfig, device: Device) -> Result<Self, TrainError> {
        check_options(&tc)?;
        cfg.validate()?;
        let slots = fuse(&cfg, weights, &device)?
            .into_iter()
            .map(|value| Ok(Slot { m: value.zeros_like()?, v: value.zeros_like()?, value }))
            .collect::<candle_core::Result<Vec<_>>>()?;
        let pool = par::pool(tc.threads, tc.nice, "starling-train")
            .map_err(|e| TrainError::Threads { what: e.to_string() })?;
        Ok(Self { rope: rope_table(&cfg), cfg, options: tc, device, slots, updates: 0, pool })
    }

    /// One GRPO step: PPO-clip loss, mean over all trained tokens of each minibatch, with the given advantages.
    ///
    /// The ratio is taken against `behaviour_logprobs`. `minibatches` updates follow one another.
    ///
    /// # Errors
    /// `Sample` or `NothingToTrain` for the batch, `NonFinite` for a broken loss or gradient: nothing has changed then.
    pub fn step(&mut self, batch: &[Sample]) -> Result<StepReport, TrainError> {
        let objective =
            Objective::PolicyGradient { clip_low: self.options.clip_low, clip_high: self.options.clip_high };
        self.run(batch, objective)
    }

    /// One step of cross-entropy on the trained tokens; advantages and behaviour log-probabilities are not read.
    ///
    /// # Errors
    /// As [`Trainer::step`].
    pub fn supervised_step(&mut self, batch: &[Sample]) -> Result<StepReport, TrainError> {
        self.run(batch, Objective::CrossEntropy)
    }

    /// Learning rate of later updates. A value that is not finite and above 0 is ignored with a warning.
    pub fn set_learning_rate(&mut self, lr: f64) {
        if lr.is_finite() && lr > 0.0 {
            self.options.learning_rate = lr;
        } else {
            tracing::warn!(lr, "learning rate not changed: expected a finite value above 0");
        }
    }

    /// The current weights: f32 tensors that later training does not change.
    ///
    /// # Errors
    /// `Tensor` if the device has no room for the split matrices.
    pub fn weights(&self) -> Result<Weights, TrainError> {
        let values: Vec<Tensor> = self.slots.iter().map(|s| s.value.clone()).collect();
        Ok(Weights::from_ordered(split(&self.cfg, &values)?))
    }

    /// Optimizer updates so far.
    #[must_use]
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Runs all minibatches and commits only when every one succeeded.
    fn run(&mut self, batch: &[Sample], objective: Objective) -> Result<StepReport, TrainError> {
        let start = Instant::now();
        batch::check_samples(&self.cfg, batch, objective != Objective::CrossEntropy)?;
        let mut slots = self.slots.clone();
        let mut updates = self.updates;
        let mut total = LossSums::default();
        let mut norms = 0.0;
        for part in minibatches(batch, self.options.minibatches) {
            if let Some((next, sums, norm)) = self.pool.install(|| self.update(&slots, part, objective, updates + 1))? {
                slots = next;
                updates += 1;
                total.add(&sums);
                norms += norm;
            }
        }
        if total.tokens == 0 {
            return Err(TrainError::NothingToTrain { samples: batch.len() });
        }
        let made = to_f64(updates - self.updates);
        self.slots = slots;
        self.updates = updates;
        let trained = to_f64(total.tokens);
        Ok(StepReport {
            loss: total.loss / trained,
            grad_norm: norms / made,
            tokens: batch.iter().map(|s| s.tokens.len() as u64).sum(),
            trained_tokens: total.tokens,
            clip_fraction: to_f64(total.clipped) / trained,
            approx_kl: total.kl / trained,
            entropy: total.entropy / trained,
            step_ms: start.elapsed().as_secs_f64() * 1e3,
        })
    }

    /// One optimizer update; `None` if no token of `part` trains.
    fn update(
        &self,
        slots: &[Slot],
        part: &[Sample],
        objective: Objective,
        update: u64,
    ) -> Result<Option<(Vec<Slot>, LossSums, f64)>, TrainError> {
        let most = if self.device.is_cpu() { CPU_MICRO_BATCH_TOKENS } else { usize::MAX };
        let micro = batch::micro_batches(part, self.options.micro_batch_tokens.min(most));
        if micro.is_empty() {
            return Ok(None);
        }
        let params: Vec<Tensor> = slots.iter().map(|s| s.value.clone()).collect();
        let result = self.plan().compute(&params, &micro, objective)?;
        let norm = global_norm(&result.grads)?;
        if !norm.is_finite() {
            return Err(TrainError::NonFinite { what: "gradient norm", got: norm });
        }
        let limit = self.options.max_grad_norm;
        let scale = if limit > 0.0 && norm > limit { limit / norm } else { 1.0 };
        let o = &self.options;
        let opt = AdamW { learning_rate: o.learning_rate, betas: o.betas, eps: o.eps, weight_decay: o.weight_decay };
        Ok(Some((opt.update(slots, &result.grads, update, scale)?, result.sums, norm)))
    }

    fn plan(&self) -> GradientPlan<'_> {
        let small = self.cfg.parameter_count() <= PARALLEL_BATCH_PARAMETERS;
        GradientPlan { cfg: &self.cfg, rope: &self.rope, lanes: if small { LANES } else { 1 } }
    }
}

/// Cuts `batch` into `parts` consecutive pieces whose sizes differ by at most one.
fn minibatches(batch: &[Sample], parts: usize) -> impl Iterator<Item = &[Sample]> {
    let parts = parts.clamp(1, batch.len().max(1));
    (0..parts).map(move |i| &batch[batch.len() * i / parts..batch.len() * (i + 1) / parts])
}

#[expect(clippy::cast_precision_loss, reason = "counts are below 2^53")]
fn to_f64(n: u64) -> f64 {
    n as f64
}

fn check_options(tc: &TrainerConfig) -> Result<(), TrainError> {
    let positive = |v: f64| v.is_finite() && v > 0.0;
    let not_negative = |v: f64| v.is_finite() && v >= 0.0;
    let unit = |v: f64| (0.0..1.0).contains(&v);
    let checks: [(&'static str, bool, &'static str, String); 9] = [
        ("learning_rate", positive(tc.learning_rate), "a finite value above 0", tc.learning_rate.to_string()),
        ("betas", unit(tc.betas.0) && unit(tc.betas.1), "two values in [0, 1)", format!("{:?}", tc.betas)),
        ("eps", positive(tc.eps), "a finite value above 0", tc.eps.to_string()),
        ("weight_decay", not_negative(tc.weight_decay), "a finite value of at least 0", tc.weight_decay.to_string()),
        ("max_grad_norm", not_negative(tc.max_grad_norm), "a finite value of at least 0", tc.max_grad_norm.to_string()),
        ("clip_low", (0.0..=1.0).contains(&tc.clip_low), "a value in [0, 1]", tc.clip_low.to_string()),
        ("clip_high", not_negative(f64::from(tc.clip_high)), "a finite value of at least 0", tc.clip_high.to_string()),
        ("minibatches", tc.minibatches >= 1, "at least 1", tc.minibatches.to_string()),
        ("threads", (1..=1024).contains(&tc.threads), "1 to 1024", tc.threads.to_string()),
    ];
    match checks.into_iter().find(|(_, ok, ..)| !ok) {
        Some((field, _, expected, got)) => Err(TrainError::InvalidOption { field, expected, got }),
        None => Ok(()),
    }
}
