//! The trainer: batches of samples in, AdamW updates of the weights out.

mod adapter_file;
pub(crate) mod batch;
pub(crate) mod gradients;
pub(crate) mod lora;
pub(crate) mod loss;
pub(crate) mod optim;
mod options;
mod peak;
mod state;

use std::sync::Arc;
use std::time::Instant;

use candle_core::{Device, Tensor};

pub use adapter_file::{PeftAdapter, has_adapters, peft_adapter};
pub use batch::Sample;
use gradients::{GradientPlan, Trained, global_norm};
use lora::LoraLayout;
use loss::{Loss, LossSums, TokenTerm};
use optim::{AdamW, Slot};
pub use options::TrainerConfig;
use options::check_options;

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

/// What one call of [`Trainer::step`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepReport {
    /// Mean loss per trained token, each minibatch under the weights it met.
    pub loss: f64,
    /// Euclidean norm of the gradient before clipping, averaged over the updates.
    pub grad_norm: f64,
    /// Tokens of all samples.
    pub tokens: u64,
    /// Of these, those that were not computed, as a sample before has the same prefix.
    pub tokens_shared: u64,
    /// Tokens that trained.
    pub trained_tokens: u64,
    /// Share of trained tokens whose gradient a clip cut off or down.
    pub clip_fraction: f64,
    /// Share of trained tokens that a correction or the outlier guard dropped.
    pub masked_fraction: f64,
    /// Mean weight of the correction over trained tokens; 1 without one.
    pub correction_weight: f64,
    /// Trained tokens with a log-ratio beyond ±20, which was cut there.
    pub ratios_out_of_range: u64,
    /// Mean of `k - 1 - ln k`, `k = π/μ`: mismatch of the trainer with the behaviour policy, in nats.
    pub approx_kl: f64,
    /// Mean of the algorithm's own estimate of the divergence from the reference weights, in nats; 0 without one.
    pub reference_kl: f64,
    /// Mean entropy of the distributions that trained tokens were drawn from, in nats.
    pub entropy: f64,
    /// Learning rate of the updates.
    pub learning_rate: f64,
    /// Arithmetic of the updates, `6 · parameters · tokens` of forward and backward (recomputing and adapters not counted;
    /// 4 with frozen weights; shared prefixes once), over
    /// wall-clock time, as a share of what the same threads reached in a large product; 0 where it was not measured.
    pub mfu: f64,
    /// Wall-clock time in milliseconds.
    pub step_ms: f64,
}

/// What one optimizer update takes.
struct Gradients {
    grads: Vec<Tensor>,
    sums: LossSums,
    /// Before clipping.
    norm: f64,
    /// Of clipping.
    scale: f64,
    /// Tokens that were not computed.
    shared: u64,
}

/// The frozen side of adapters.
struct Adapters {
    layout: LoraLayout,
    /// Fused parameters.
    base: Vec<Tensor>,
}

/// Holds f32 master weights and AdamW's moments, and updates them batch by batch.
///
/// Equal weights, state and batches give equal bits: every sum has one order, whatever the number of threads.
pub struct Trainer {
    cfg: LlamaConfig,
    options: TrainerConfig,
    device: Device,
    rope: Arc<RopeTable>,
    /// What is trained: the fused parameters, or the adapters.
    slots: Vec<Slot>,
    adapters: Option<Adapters>,
    /// Fused parameters of the reference policy, if the algorithm has one.
    reference: Option<Vec<Tensor>>,
    updates: u64,
    pool: rayon::ThreadPool,
    /// Floating-point operations a second of the pool in a large product; 0 = not measured.
    peak_flops: f64,
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
        if tc.gradient_checkpointing && !device.is_cpu() {
            let (field, expected) = ("gradient_checkpointing", "false on other devices than the CPU");
            return Err(TrainError::InvalidOption { field, expected, got: "true".into() });
        }
        let mut values = fuse(&cfg, weights, &device)?;
        let mut adapters = None;
        if let Some(spec) = &tc.lora {
            let layout = LoraLayout::new(&cfg, spec);
            let base = std::mem::replace(&mut values, layout.start(tc.seed, &device)?);
            adapters = Some(Adapters { layout, base });
        }
        let slots = values
            .into_iter()
            .map(|value| Ok(Slot { m: value.zeros_like()?, v: value.zeros_like()?, value }))
            .collect::<candle_core::Result<Vec<_>>>()?;
        let pool = par::pool(tc.threads, tc.nice, "starling-train")
            .map_err(|e| TrainError::Threads { what: e.to_string() })?;
        let rope = rope_table(&cfg);
        Ok(Self { rope, cfg, options: tc, device, slots, adapters, reference: None, updates: 0, pool, peak_flops: 0.0 })
    }

    /// Sets the weights that [`AlgorithmSpec::kl`](starling_protocol::algorithm::AlgorithmSpec::kl) compares with; they take as much memory as the model again.
    ///
    /// # Errors
    /// `Weights` if they do not fit the configuration, `Tensor` for want of memory; nothing has changed then.
    pub fn set_reference(&mut self, weights: &Weights) -> Result<(), TrainError> {
        self.reference = Some(fuse(&self.cfg, weights, &self.device)?);
        Ok(())
    }

    /// Measures what the trainer's threads reach in a large product, for [`StepReport::mfu`]: some tens of
    /// milliseconds. On the CPU only.
    pub fn measure_peak(&mut self) {
        if self.device.is_cpu() {
            self.peak_flops = self.pool.install(peak::flops_per_s);
        }
    }

    /// One step of the configured algorithm with the given advantages: `minibatches` updates, one after another.
    ///
    /// # Errors
    /// `Sample` or `NothingToTrain` for the batch, `NonFinite` for a broken loss or gradient, `InvalidOption` when the
    /// algorithm has a KL and no reference was set: nothing has changed then.
    pub fn step(&mut self, batch: &[Sample]) -> Result<StepReport, TrainError> {
        let loss = Loss { spec: self.options.algorithm.clone(), has_behaviour: true };
        self.run(batch, &loss)
    }

    /// One step of cross-entropy on the trained tokens; advantages and behaviour log-probabilities are not read.
    ///
    /// # Errors
    /// As [`Trainer::step`].
    pub fn supervised_step(&mut self, batch: &[Sample]) -> Result<StepReport, TrainError> {
        self.run(batch, &Loss::cross_entropy())
    }

    /// Learning rate of later updates. A value that is not finite and above 0 is ignored with a warning.
    pub fn set_learning_rate(&mut self, lr: f64) {
        if lr.is_finite() && lr > 0.0 {
            self.options.learning_rate = lr;
        } else {
            tracing::warn!(lr, "learning rate not changed: expected a finite value above 0");
        }
    }

    /// The current weights, adapters merged into them: f32 tensors that later training does not change.
    ///
    /// # Errors
    /// `Tensor` if the device has no room for the split matrices.
    pub fn weights(&self) -> Result<Weights, TrainError> {
        let params = self.pool.install(|| self.trained(&values(&self.slots)).params())?;
        Ok(Weights::from_ordered(split(&self.cfg, &params)?))
    }

    /// Optimizer updates so far.
    #[must_use]
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Runs all minibatches and commits only when every one succeeded.
    fn run(&mut self, batch: &[Sample], loss: &Loss) -> Result<StepReport, TrainError> {
        let start = Instant::now();
        batch::check_samples(&self.cfg, batch, loss.has_behaviour)?;
        let parts = batch::minibatches(batch, self.options.minibatches);
        let mut terms = batch::terms(batch);
        self.pool.install(|| self.look_back(batch, loss, parts.len(), &mut terms))?;
        // Behind its check a single update on the CPU cannot fail: the former state is let go piece by piece. Else it is kept
        // until all parts have succeeded.
        let sole = parts.len() == 1 && self.device.is_cpu();
        let mut moved: Option<Vec<Slot>> = None;
        let mut updates = self.updates;
        let mut total = LossSums::default();
        let (mut norms, mut tokens_shared) = (0.0, 0);
        for part in parts {
            let (samples, terms) = (&batch[part.clone()], &mut terms[part]);
            let found = {
                let slots = moved.as_ref().unwrap_or(&self.slots);
                self.pool.install(|| self.gradients(slots, samples, terms, loss, updates + 1, moved.is_some()))?
            };
            let Some(found) = found else { continue };
            updates += 1;
            total.add(&found.sums);
            norms += found.norm;
            tokens_shared += found.shared;
            let former = match moved.take() {
                Some(slots) => slots,
                None if sole => std::mem::take(&mut self.slots),
                None => self.slots.clone(),
            };
            let optimizer = self.optimizer();
            moved = Some(self.pool.install(|| optimizer.update(former, found.grads, updates, found.scale))?);
        }
        let Some(slots) = moved else { return Err(TrainError::NothingToTrain { samples: batch.len() }) };
        let made = to_f64(updates - self.updates);
        self.slots = slots;
        self.updates = updates;
        let trained = to_f64(total.tokens);
        let tokens: u64 = batch.iter().map(|s| s.tokens.len() as u64).sum();
        let seconds = start.elapsed().as_secs_f64();
        let per_parameter = if self.adapters.is_some() { 4.0 } else { 6.0 };
        let flops = per_parameter * to_f64(self.cfg.parameter_count()) * to_f64(tokens - tokens_shared);
        Ok(StepReport {
            loss: total.loss / trained,
            grad_norm: norms / made,
            tokens,
            tokens_shared,
            trained_tokens: total.tokens,
            clip_fraction: to_f64(total.clipped) / trained,
            masked_fraction: to_f64(total.masked) / trained,
            correction_weight: total.correction / trained,
            ratios_out_of_range: total.out_of_range,
            approx_kl: total.kl / trained,
            reference_kl: total.reference_kl / trained,
            entropy: total.entropy / trained,
            learning_rate: self.options.learning_rate,
            mfu: if self.peak_flops > 0.0 { flops / (seconds * self.peak_flops) } else { 0.0 },
            step_ms: seconds * 1e3,
        })
    }

    /// What a loss has to know before the first update: log-probabilities under the reference and under the weights of
    /// the step's start.
    fn look_back(
        &self,
        batch: &[Sample],
        loss: &Loss,
        minibatches: usize,
        terms: &mut [Vec<TokenTerm>],
    ) -> Result<(), TrainError> {
        if loss.spec.needs_reference() {
            let Some(reference) = &self.reference else {
                let (field, expected) = ("algorithm.kl", "reference weights set beforehand");
                return Err(TrainError::InvalidOption { field, expected, got: "none".into() });
            };
            let logprobs = self.logprobs(reference, batch, terms)?;
            for (t, l) in terms.iter_mut().flatten().zip(logprobs.into_iter().flatten()) {
                t.reference_logprob = l;
            }
        }
        if loss.needs_old_pass(minibatches) {
            let params = self.trained(&values(&self.slots)).params()?;
            let logprobs = self.logprobs(&params, batch, terms)?;
            for (t, l) in terms.iter_mut().flatten().zip(logprobs.into_iter().flatten()) {
                t.old_logprob = Some(l);
            }
            loss.weigh_sequences(&batch::episodes(batch), terms);
        }
        Ok(())
    }

    /// Log-probability of each sample's trained tokens under `params`.
    fn logprobs(
        &self,
        params: &[Tensor],
        batch: &[Sample],
        terms: &[Vec<TokenTerm>],
    ) -> Result<Vec<Vec<f32>>, TrainError> {
        let micro = batch::micro_batches(batch, terms, self.micro_batch_tokens(), self.shares_prefixes());
        let mut flat = self.plan().logprobs(params, &micro)?.into_iter();
        Ok(terms.iter().map(|t| flat.by_ref().take(t.len()).collect()).collect())
    }

    /// Other devices compute every sample in full.
    fn shares_prefixes(&self) -> bool {
        self.options.share_prefixes && self.device.is_cpu()
    }

    fn micro_batch_tokens(&self) -> usize {
        let most = if self.device.is_cpu() { CPU_MICRO_BATCH_TOKENS } else { usize::MAX };
        self.options.micro_batch_tokens.min(most)
    }

    /// What update number `update` takes, checked; `None` if no token of `part` trains. `moved`: not the step's first.
    fn gradients(
        &self,
        slots: &[Slot],
        part: &[Sample],
        terms: &mut [Vec<TokenTerm>],
        loss: &Loss,
        update: u64,
        moved: bool,
    ) -> Result<Option<Gradients>, TrainError> {
        let params = values(slots);
        let episodes = batch::episodes(part);
        if loss.needs_current_pass(moved) {
            let current = self.logprobs(&self.trained(&params).params()?, part, terms)?;
            loss.rate_sequences(&episodes, terms, &current);
        }
        loss.aggregate(&episodes, terms);
        let micro = batch::micro_batches(part, terms, self.micro_batch_tokens(), self.shares_prefixes());
        let shared = micro.iter().map(|m| m.packed.shared as u64).sum();
        if micro.is_empty() {
            return Ok(None);
        }
        let result = self.plan().compute(self.trained(&params), &micro, loss)?;
        let norm = global_norm(&result.grads)?;
        if !norm.is_finite() {
            return Err(TrainError::NonFinite { what: "gradient norm", got: norm });
        }
        let limit = self.options.max_grad_norm;
        let scale = if limit > 0.0 && norm > limit { limit / norm } else { 1.0 };
        self.optimizer().check(slots, &result.grads, update, scale)?;
        Ok(Some(Gradients { grads: result.grads, sums: result.sums, norm, scale, shared }))
    }

    fn optimizer(&self) -> AdamW {
        let o = &self.options;
        AdamW { learning_rate: o.learning_rate, betas: o.betas, eps: o.eps, weight_decay: o.weight_decay }
    }

    fn trained<'a>(&'a self, values: &'a [Tensor]) -> Trained<'a> {
        match &self.adapters {
            None => Trained::Full(values),
            Some(Adapters { layout, base }) => Trained::Adapters { layout, base, values },
        }
    }

    fn plan(&self) -> GradientPlan<'_> {
        let small = self.cfg.parameter_count() <= PARALLEL_BATCH_PARAMETERS;
        let checkpointing = self.options.gradient_checkpointing;
        GradientPlan { cfg: &self.cfg, rope: &self.rope, lanes: if small { LANES } else { 1 }, checkpointing }
    }
}

fn values(slots: &[Slot]) -> Vec<Tensor> {
    slots.iter().map(|s| s.value.clone()).collect()
}

#[expect(clippy::cast_precision_loss, reason = "counts are below 2^53")]
fn to_f64(n: u64) -> f64 {
    n as f64
}
