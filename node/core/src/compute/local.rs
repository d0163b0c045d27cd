//! The node's own device, through `starling-engine`. Optimizer steps run on a thread of their own, never on the async
//! runtime.

use super::{Compute, Engine, StepInput, StepTrainer, Stepped, TrainerStart, TrainingMemory};
use candle_core::Device;
use starling_engine::{
    EngineError, GenerateRequest, InferenceEngine, InferenceOptions, LlamaConfig, StepReport, TokenSink, Trainer,
    TrainerConfig, Weights, lora,
};
use starling_protocol::PolicyVersion;
use starling_protocol::job::TrainerSpec;
use std::sync::Arc;
use std::sync::mpsc as std_mpsc;
use tokio::sync::oneshot;

/// Computes with `starling-engine`.
#[derive(Clone, Debug)]
pub struct LocalCompute {
    /// Where.
    pub device: Device,
    /// Engines.
    pub inference: InferenceOptions,
    /// Trainers.
    pub trainer: TrainerOptions,
    /// Memory of the device that was free when the node started, in bytes; `None` when it is not known.
    pub memory_free_bytes: Option<u64>,
}

/// Threads and memory of the trainer.
#[derive(Clone, Debug)]
pub struct TrainerOptions {
    /// Threads of its own pool.
    pub threads: usize,
    /// Niceness of those threads, so that heartbeats come first.
    pub nice: i32,
    /// Tokens of one forward and backward pass: bounds memory.
    pub micro_batch_tokens: usize,
}

impl Compute for LocalCompute {
    fn start_engine(&self, config: &[u8], weights: &[u8], version: PolicyVersion) -> Result<Arc<dyn Engine>, String> {
        let config = LlamaConfig::from_json(config).map_err(|e| format!("config.json: {e}"))?;
        let weights = Weights::from_safetensors(&config, weights, &self.device).map_err(|e| format!("weights: {e}"))?;
        let (options, device) = (self.inference.clone(), self.device.clone());
        let engine = InferenceEngine::spawn(config, weights, version.0, options, device).map_err(|e| e.to_string())?;
        Ok(Arc::new(LocalEngine { engine, device: self.device.clone() }))
    }

    fn start_trainer(
        &self,
        config: &[u8],
        start: TrainerStart,
        spec: &TrainerSpec,
    ) -> Result<Box<dyn StepTrainer>, String> {
        let config = LlamaConfig::from_json(config).map_err(|e| format!("config.json: {e}"))?;
        let options = self.trainer.clone();
        let thread = TrainerThread::spawn(config, start, spec, options, self.device.clone())?;
        Ok(Box::new(thread))
    }

    fn training_memory(&self, config: &[u8]) -> Result<TrainingMemory, String> {
        let config = LlamaConfig::from_json(config).map_err(|e| format!("config.json: {e}"))?;
        let needed_bytes = trainer_bytes(&config, self.trainer.micro_batch_tokens, !self.device.is_cpu());
        Ok(TrainingMemory { needed_bytes, free_bytes: self.memory_free_bytes })
    }
}

/// Bytes that a trainer takes beside a serving engine, all in f32: weights, gradients and two moments for each parameter,
/// the new weights on their way out, and the engine's own copy; and of one pass of `tokens` what a layer keeps for its
/// backward (its input, normed, queries, keys, values, attention's output, and three of the feed-forward's width) and,
/// where they are not computed a few rows at a time, the logits with their gradient.
fn trainer_bytes(config: &LlamaConfig, tokens: usize, whole_logits: bool) -> u64 {
    let per_layer = 6 * config.hidden_size + 3 * config.intermediate_size;
    let logits = if whole_logits { 2 * config.vocab_size } else { 0 };
    let activations = tokens as u64 * (config.num_hidden_layers * per_layer + logits) as u64;
    4 * (6 * config.parameter_count() + activations)
}

struct LocalEngine {
    engine: InferenceEngine,
    device: Device,
}

impl Engine for LocalEngine {
    fn generate(&self, request: GenerateRequest, sink: Box<dyn TokenSink>) -> Result<(), EngineError> {
        self.engine.generate(request, sink)
    }
    fn swap_weights(&self, weights: &[u8], version: PolicyVersion) -> Result<(), String> {
        let weights = Weights::from_safetensors(self.engine.config(), weights, &self.device);
        self.engine.swap_weights(weights.map_err(|e| format!("weights: {e}"))?, version.0).map_err(|e| e.to_string())
    }
    fn queue(&self) -> usize {
        let stats = self.engine.stats();
        stats.running + stats.waiting
    }
}

struct Work {
    input: StepInput,
    answer: oneshot::Sender<Result<Stepped, String>>,
}

/// Handle of the thread; it ends when the handle drops.
struct TrainerThread {
    work: std_mpsc::SyncSender<Work>,
}

impl TrainerThread {
    /// Loads the model on the new thread; errors come with the first step.
    fn spawn(
        config: LlamaConfig,
        start: TrainerStart,
        spec: &TrainerSpec,
        options: TrainerOptions,
        device: Device,
    ) -> Result<Self, String> {
        let tc = TrainerConfig {
            learning_rate: spec.learning_rate,
            betas: spec.betas,
            eps: 1e-8,
            weight_decay: spec.weight_decay,
            max_grad_norm: spec.max_grad_norm,
            algorithm: spec.algorithm.clone(),
            minibatches: spec.minibatches as usize,
            micro_batch_tokens: options.micro_batch_tokens,
            threads: options.threads,
            nice: options.nice,
            lora: spec.lora.clone(),
            seed: start.seed,
            gradient_checkpointing: spec.gradient_checkpointing,
            share_prefixes: true,
        };
        let (work, queue) = std_mpsc::sync_channel::<Work>(1);
        std::thread::Builder::new()
            .name("starling-trainer".into())
            .spawn(move || {
                let mut trainer = build(&config, &start, tc, device);
                drop(start);
                while let Ok(w) = queue.recv() {
                    let out = match &mut trainer {
                        Ok(t) => step(t, &w.input),
                        Err(e) => Err(e.clone()),
                    };
                    let _ = w.answer.send(out);
                }
            })
            .map_err(|e| format!("cannot start the trainer's thread: {e}"))?;
        Ok(Self { work })
    }
}

impl StepTrainer for TrainerThread {
    fn step(&self, input: StepInput) -> oneshot::Receiver<Result<Stepped, String>> {
        let (answer, done) = oneshot::channel();
        if let Err(e) = self.work.try_send(Work { input, answer }) {
            let (std_mpsc::TrySendError::Full(w) | std_mpsc::TrySendError::Disconnected(w)) = e;
            let _ = w.answer.send(Err("the trainer's thread is busy or gone".into()));
        }
        done
    }
}

fn build(config: &LlamaConfig, start: &TrainerStart, tc: TrainerConfig, device: Device) -> Result<Trainer, String> {
    let weights = |what: &str, bytes: &[u8]| {
        Weights::from_safetensors(config, bytes, &device).map_err(|e| format!("{what}: {e}"))
    };
    let has_adapters = tc.lora.is_some();
    let needs_reference = tc.algorithm.needs_reference();
    let first = if has_adapters { start.reference.as_ref() } else { None };
    let current = weights("weights", first.unwrap_or(&start.weights))?;
    let mut trainer =
        Trainer::new(config.clone(), &current, tc, device.clone()).map_err(|e| format!("trainer: {e}"))?;
    drop(current);
    match &start.optimizer_state {
        Some(state) if !has_adapters && lora::has_adapters(state) => {
            tracing::info!("optimizer starts without moments: those at hand belong to a former job's adapters");
        }
        Some(state) => trainer.load_optimizer_state(state).map_err(|e| format!("optimizer state: {e}"))?,
        None => {}
    }
    if let Some(bytes) = start.reference.as_ref().filter(|_| needs_reference) {
        let reference = weights("reference weights", bytes)?;
        trainer.set_reference(&reference).map_err(|e| format!("reference weights: {e}"))?;
    }
    trainer.measure_peak();
    Ok(trainer)
}

fn step(trainer: &mut Trainer, input: &StepInput) -> Result<Stepped, String> {
    trainer.set_learning_rate(input.learning_rate);
    // A batch whose groups all have equal rewards teaches nothing: it is used up, and the weights stay as they are.
    let report = if input.samples.is_empty() {
        StepReport::default()
    } else {
        trainer.step(&input.samples).map_err(|e| format!("step: {e}"))?
    };
    let weights = trainer.weights().map_err(|e| format!("weights: {e}"))?;
    let weights = weights.to_safetensors().map_err(|e| format!("weights: {e}"))?;
    let optimizer_state = if input.with_optimizer_state {
        Some(trainer.optimizer_state().map_err(|e| format!("optimizer state: {e}"))?)
    } else {
        None
    };
    Ok(Stepped { weights, optimizer_state, report })
}
