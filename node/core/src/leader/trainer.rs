//! The trainer's own thread: optimizer steps never run on the async runtime.

use starling_engine::{LlamaConfig, Sample, StepReport, Trainer, TrainerConfig, Weights};
use starling_protocol::job::TrainerSpec;
use starling_protocol::ledger::{RolloutGroup, TrainingBatch};
use std::sync::mpsc as std_mpsc;
use tokio::sync::oneshot;

/// Device and threads of the trainer.
#[derive(Clone, Debug)]
pub struct TrainerOptions {
    /// Where it computes.
    pub device: candle_core::Device,
    /// Threads of its own pool.
    pub threads: usize,
    /// Niceness of those threads, so that heartbeats come first.
    pub nice: i32,
    /// Tokens of one forward and backward pass: bounds memory.
    pub micro_batch_tokens: usize,
}

/// What a step brought.
pub(crate) struct Stepped {
    /// safetensors.
    pub(crate) weights: Vec<u8>,
    /// safetensors, if asked for.
    pub(crate) optimizer_state: Option<Vec<u8>>,
    pub(crate) report: StepReport,
}

struct Work {
    samples: Vec<Sample>,
    with_optimizer_state: bool,
    answer: oneshot::Sender<Result<Stepped, String>>,
}

/// Handle of the thread; it ends when the handle drops.
pub(crate) struct TrainerThread {
    work: std_mpsc::SyncSender<Work>,
}

impl TrainerThread {
    /// Loads the model on the new thread; errors come with the first step.
    pub(crate) fn spawn(
        config: LlamaConfig,
        weights: Vec<u8>,
        optimizer_state: Option<Vec<u8>>,
        spec: &TrainerSpec,
        options: TrainerOptions,
    ) -> Result<Self, String> {
        let tc = TrainerConfig {
            learning_rate: spec.learning_rate,
            betas: spec.betas,
            eps: 1e-8,
            weight_decay: spec.weight_decay,
            max_grad_norm: spec.max_grad_norm,
            clip_low: spec.clip_low,
            clip_high: spec.clip_high,
            minibatches: spec.minibatches as usize,
            micro_batch_tokens: options.micro_batch_tokens,
            threads: options.threads,
            nice: options.nice,
        };
        let (work, queue) = std_mpsc::sync_channel::<Work>(1);
        std::thread::Builder::new()
            .name("starling-trainer".into())
            .spawn(move || {
                let mut trainer = build(&config, &weights, optimizer_state.as_deref(), tc, options.device);
                drop((weights, optimizer_state));
                while let Ok(w) = queue.recv() {
                    let out = match &mut trainer {
                        Ok(t) => step(t, &w.samples, w.with_optimizer_state),
                        Err(e) => Err(e.clone()),
                    };
                    let _ = w.answer.send(out);
                }
            })
            .map_err(|e| format!("cannot start the trainer's thread: {e}"))?;
        Ok(Self { work })
    }

    /// Runs one step; the receiver resolves when it is done.
    pub(crate) fn step(
        &self,
        samples: Vec<Sample>,
        with_optimizer_state: bool,
    ) -> oneshot::Receiver<Result<Stepped, String>> {
        let (answer, done) = oneshot::channel();
        if let Err(e) = self.work.try_send(Work { samples, with_optimizer_state, answer }) {
            let (std_mpsc::TrySendError::Full(w) | std_mpsc::TrySendError::Disconnected(w)) = e;
            let _ = w.answer.send(Err("the trainer's thread is busy or gone".into()));
        }
        done
    }
}

fn build(
    config: &LlamaConfig,
    weights: &[u8],
    optimizer_state: Option<&[u8]>,
    tc: TrainerConfig,
    device: candle_core::Device,
) -> Result<Trainer, String> {
    let w = Weights::from_safetensors(config, weights, &device).map_err(|e| format!("weights: {e}"))?;
    let mut trainer = Trainer::new(config.clone(), &w, tc, device).map_err(|e| format!("trainer: {e}"))?;
    if let Some(state) = optimizer_state {
        trainer.load_optimizer_state(state).map_err(|e| format!("optimizer state: {e}"))?;
    }
    Ok(trainer)
}

fn step(trainer: &mut Trainer, samples: &[Sample], with_optimizer_state: bool) -> Result<Stepped, String> {
    // A batch whose groups all have equal rewards teaches nothing: it is used up, and the weights stay as they are.
    let report = if samples.is_empty() {
        StepReport::default()
    } else {
        trainer.step(samples).map_err(|e| format!("step: {e}"))?
    };
    let weights = trainer.weights().map_err(|e| format!("weights: {e}"))?;
    let weights = weights.to_safetensors().map_err(|e| format!("weights: {e}"))?;
    let optimizer_state = if with_optimizer_state {
        Some(trainer.optimizer_state().map_err(|e| format!("optimizer state: {e}"))?)
    } else {
        None
    };
    Ok(Stepped { weights, optimizer_state, report })
}

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
