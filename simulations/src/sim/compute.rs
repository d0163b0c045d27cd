//! Modelled devices: engines and trainers whose results are hashes and whose work takes virtual time.
//!
//! What they keep of real ones: tokens follow from weights and prompt; sequences share the device; a step's weights
//! follow from the weights before it and from every sample; the optimizer's state counts the steps that it saw.

use super::recorder::Recorder;
use crate::event::{Event, NodeIx};
use crate::scenario::Device;
use starling_core::compute::{Compute, Engine, StepInput, StepTrainer, Stepped, TrainerStart, TrainingMemory};
use starling_core::runtime::spawn;
use starling_engine::{EngineError, FinishReason, GenerateRequest, SampledToken, StepReport, TokenSink};
use starling_protocol::job::TrainerSpec;
use starling_protocol::{Hash, ModelName, PolicyVersion};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::sleep;

/// Requests that wait or run before new ones are refused, as on a real engine.
const QUEUE_MAX: usize = 1024;
/// Ids of tokens.
const VOCABULARY: u32 = 256;
/// Memory that a trainer is said to take.
const TRAINER_GIB: u64 = 4;
/// Tokens that come together when they come faster than the clock ticks.
const BURST_MAX: u32 = 8;

/// How slow a device is; 1 is as its class says. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Slowness(Arc<AtomicU64>);

impl Slowness {
    pub(crate) fn none() -> Self {
        Self(Arc::new(AtomicU64::new(1.0_f64.to_bits())))
    }
    pub(crate) fn set(&self, factor: f64) {
        self.0.store(factor.to_bits(), Ordering::Relaxed);
    }
    fn stretch(&self, d: Duration) -> Duration {
        d.mul_f64(f64::from_bits(self.0.load(Ordering::Relaxed)))
    }
}

/// A node's device.
#[derive(Clone, Debug)]
pub(crate) struct SimCompute {
    pub(crate) node: NodeIx,
    pub(crate) device: Device,
    pub(crate) slowness: Slowness,
    pub(crate) recorder: Recorder,
}

/// `config.json` of a simulated model: its name, so that events can say which it is.
pub(crate) fn config_of(model: &ModelName) -> Vec<u8> {
    serde_json::json!({ "simulated": model }).to_string().into_bytes()
}

fn model_of(config: &[u8]) -> Result<ModelName, String> {
    let value: serde_json::Value = serde_json::from_slice(config).map_err(|e| format!("config.json: {e}"))?;
    let name = value["simulated"].as_str().ok_or("config.json: field `simulated`: missing")?;
    ModelName::new(name).map_err(|e| e.to_string())
}

impl Compute for SimCompute {
    fn start_engine(&self, config: &[u8], weights: &[u8], version: PolicyVersion) -> Result<Arc<dyn Engine>, String> {
        let engine = SimEngine {
            compute: self.clone(),
            model: model_of(config)?,
            weights: Mutex::new((Hash::of(weights), version)),
            queue: Arc::default(),
        };
        engine.tell();
        Ok(Arc::new(engine))
    }

    fn start_trainer(
        &self,
        config: &[u8],
        start: TrainerStart,
        _spec: &TrainerSpec,
    ) -> Result<Box<dyn StepTrainer>, String> {
        model_of(config)?;
        let TrainerStart { weights, optimizer_state, .. } = start;
        let steps = match optimizer_state.as_deref().map(<[u8; 8]>::try_from) {
            None => 0,
            Some(Ok(bytes)) => u64::from_le_bytes(bytes),
            Some(Err(_)) => return Err("optimizer state: expected 8 bytes".into()),
        };
        let inner = Arc::new(Mutex::new(TrainerState { weights, steps }));
        Ok(Box::new(SimTrainer { compute: self.clone(), inner }))
    }

    fn training_memory(&self, config: &[u8]) -> Result<TrainingMemory, String> {
        model_of(config)?;
        let gib = |n: u64| n << 30;
        Ok(TrainingMemory { needed_bytes: gib(TRAINER_GIB), free_bytes: Some(gib(self.device.memory_gib)) })
    }
}

struct SimEngine {
    compute: SimCompute,
    model: ModelName,
    weights: Mutex<(Hash, PolicyVersion)>,
    queue: Arc<AtomicUsize>,
}

impl SimEngine {
    fn weights(&self) -> (Hash, PolicyVersion) {
        *self.weights.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn tell(&self) {
        let (weights, version) = self.weights();
        let (node, model) = (self.compute.node, self.model.clone());
        self.compute.recorder.record(Event::Served { node, model, version, weights });
    }
}

/// Counts a sequence while it lives.
struct Queued(Arc<AtomicUsize>);

impl Drop for Queued {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Engine for SimEngine {
    fn generate(&self, request: GenerateRequest, mut sink: Box<dyn TokenSink>) -> Result<(), EngineError> {
        if request.prompt.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        let waiting = self.queue.load(Ordering::Relaxed);
        if waiting >= QUEUE_MAX {
            return Err(EngineError::Busy { waiting, limit: QUEUE_MAX });
        }
        self.queue.fetch_add(1, Ordering::Relaxed);
        let queued = Queued(self.queue.clone());
        let (weights, version) = self.weights();
        let (compute, queue) = (self.compute.clone(), self.queue.clone());
        drop(spawn(async move {
            let _queued = queued;
            let mut draws = Draws::new(weights, &request);
            let max = request.sampling.max_tokens;
            let mut n = 0;
            while n < max {
                let share = queue.load(Ordering::Relaxed).max(1) as f64 / f64::from(compute.device.tokens_per_s);
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped")]
                let burst = (0.004 / share).clamp(1.0, f64::from(BURST_MAX)) as u32;
                sleep(compute.slowness.stretch(Duration::from_secs_f64(share * f64::from(burst)))).await;
                for _ in 0..burst.min(max - n) {
                    n += 1;
                    if !sink.token(draws.next(version)) {
                        return;
                    }
                }
            }
            sink.finish(Ok(FinishReason::Length));
        }));
        Ok(())
    }

    fn swap_weights(&self, weights: &[u8], version: PolicyVersion) -> Result<(), String> {
        *self.weights.lock().unwrap_or_else(PoisonError::into_inner) = (Hash::of(weights), version);
        self.tell();
        Ok(())
    }

    fn queue(&self) -> usize {
        self.queue.load(Ordering::Relaxed)
    }
}

/// Tokens that follow from weights, prompt and seed.
struct Draws {
    reader: blake3::OutputReader,
}

impl Draws {
    fn new(weights: Hash, request: &GenerateRequest) -> Self {
        let mut h = blake3::Hasher::new();
        h.update(&weights.0);
        h.update(&request.sampling.seed.to_le_bytes());
        // An answer that goes on here draws what would have come next.
        let drawn = request.sampling.drawn as usize;
        for id in &request.prompt[..request.prompt.len().saturating_sub(drawn)] {
            h.update(&id.to_le_bytes());
        }
        let mut reader = h.finalize_xof();
        reader.set_position(4 * drawn as u64);
        Self { reader }
    }
    fn next(&mut self, version: PolicyVersion) -> SampledToken {
        let mut bytes = [0; 4];
        self.reader.fill(&mut bytes);
        let logprob = -0.05 - f32::from(bytes[3]) / 64.0;
        let id = u32::from(bytes[0]) % VOCABULARY;
        SampledToken { id, logprob, sampling_logprob: logprob, policy_version: version.0, top: Vec::new() }
    }
}

struct TrainerState {
    weights: Vec<u8>,
    steps: u64,
}

struct SimTrainer {
    compute: SimCompute,
    inner: Arc<Mutex<TrainerState>>,
}

impl StepTrainer for SimTrainer {
    fn step(&self, input: StepInput) -> oneshot::Receiver<Result<Stepped, String>> {
        let (answer, done) = oneshot::channel();
        let (compute, inner) = (self.compute.clone(), self.inner.clone());
        drop(spawn(async move {
            sleep(compute.slowness.stretch(Duration::from_millis(compute.device.train_ms))).await;
            let mut state = inner.lock().unwrap_or_else(PoisonError::into_inner);
            state.steps += 1;
            let mut h = blake3::Hasher::new();
            h.update(&state.weights);
            let mut trained = 0;
            for s in &input.samples {
                trained += s.loss_mask.iter().filter(|m| **m).count() as u64;
                h.update(&s.advantage.to_le_bytes());
                for id in &s.tokens {
                    h.update(&id.to_le_bytes());
                }
            }
            // A step changes some of the bytes, as a small update of weights does.
            let len = state.weights.len();
            let mut new = vec![0; len.min(4096)];
            h.finalize_xof().fill(&mut new);
            state.weights[..new.len()].copy_from_slice(&new);
            let stepped = Stepped {
                weights: state.weights.clone(),
                optimizer_state: input.with_optimizer_state.then(|| state.steps.to_le_bytes().to_vec()),
                report: StepReport { trained_tokens: trained, ..StepReport::default() },
            };
            let _gone = answer.send(Ok(stepped));
        }));
        done
    }
}
