//! What computes on a node: engines that sample and trainers that step.
//!
//! The node's logic sees these traits. [`LocalCompute`] implements them with `starling-engine`; the simulator brings
//! one whose work takes virtual time.

mod local;
mod measure;

use starling_engine::{EngineError, GenerateRequest, Sample, StepReport, TokenSink};
use starling_protocol::PolicyVersion;
use starling_protocol::job::TrainerSpec;
use std::sync::Arc;
use tokio::sync::oneshot;

pub use local::{LocalCompute, TrainerOptions};
pub(crate) use measure::measure;

/// A node's devices.
pub trait Compute: Send + Sync + 'static {
    /// Starts an engine for a model: its `config.json`, and weights as safetensors. Computes for a while: call it
    /// through [`crate::runtime::blocking`].
    ///
    /// # Errors
    /// In words: what does not fit.
    fn start_engine(&self, config: &[u8], weights: &[u8], version: PolicyVersion) -> Result<Arc<dyn Engine>, String>;

    /// Starts a trainer. Returns at once; what is wrong with the weights may come with the first step.
    ///
    /// # Errors
    /// In words: what does not fit.
    fn start_trainer(
        &self,
        config: &[u8],
        start: TrainerStart,
        spec: &TrainerSpec,
    ) -> Result<Box<dyn StepTrainer>, String>;

    /// What a trainer of this model would take of the device's memory, and what there was when the node started. Cheap.
    ///
    /// # Errors
    /// In words: what is wrong with the configuration.
    fn training_memory(&self, config: &[u8]) -> Result<TrainingMemory, String>;
}

/// Memory of a device against what a trainer takes of it, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrainingMemory {
    /// Weights, gradients and moments, activations of one pass, and the copy that is served meanwhile.
    pub needed_bytes: u64,
    /// Free when the node started; `None` when that is not known, or nothing limits it.
    pub free_bytes: Option<u64>,
}

impl TrainingMemory {
    /// Whether the device holds it.
    #[must_use]
    pub fn fits(&self) -> bool {
        self.free_bytes.is_none_or(|free| self.needed_bytes <= free)
    }
}

/// Where a trainer starts from; safetensors all.
#[derive(Clone, Debug, Default)]
pub struct TrainerStart {
    /// The current weights.
    pub weights: Vec<u8>,
    /// The optimizer's moments, if there are any; with adapters, these too.
    pub optimizer_state: Option<Vec<u8>>,
    /// The weights that the job started from, where its algorithm compares with them or its adapters lie on them.
    pub reference: Option<Vec<u8>>,
    /// What fresh adapters are drawn from.
    pub seed: u64,
}

/// What one step is made of.
#[derive(Clone, Debug, Default)]
pub struct StepInput {
    /// An empty batch leaves the weights as they are.
    pub samples: Vec<Sample>,
    /// The schedule's value for this step.
    pub learning_rate: f64,
    /// Whether the moments after the step are asked for.
    pub with_optimizer_state: bool,
}

/// Samples from one model. It stops when the last handle drops; what runs then ends with an error.
pub trait Engine: Send + Sync {
    /// Queues a request; its tokens reach `sink` as they are drawn.
    ///
    /// # Errors
    /// [`EngineError`]; the sink is dropped without a call then.
    fn generate(&self, request: GenerateRequest, sink: Box<dyn TokenSink>) -> Result<(), EngineError>;
    /// Replaces the weights (safetensors) between two steps. Computes for a while.
    ///
    /// # Errors
    /// In words; nothing changes then.
    fn swap_weights(&self, weights: &[u8], version: PolicyVersion) -> Result<(), String>;
    /// Sequences that run or wait.
    fn queue(&self) -> usize;
}

/// Takes one optimizer step at a time. It ends when the handle drops.
pub trait StepTrainer: Send + Sync {
    /// Begins a step.
    fn step(&self, input: StepInput) -> oneshot::Receiver<Result<Stepped, String>>;
}

/// What a step brought.
#[derive(Clone, Debug)]
pub struct Stepped {
    /// The new weights, as safetensors.
    pub weights: Vec<u8>,
    /// The optimizer's moments as safetensors, if asked for.
    pub optimizer_state: Option<Vec<u8>>,
    /// Loss and its like.
    pub report: StepReport,
}
