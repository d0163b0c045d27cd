//! Models, sampling, KV cache, losses and optimizers of Starling; knows nothing of networks, text or templates.
//!
//! Data flows one way: a [`Checkpoint`] gives [`LlamaConfig`] and [`Weights`]; an [`InferenceEngine`] turns prompts
//! into [`SampledToken`]s; a [`Trainer`] turns [`Sample`]s into new [`Weights`], which the engine takes between two
//! decoding steps. Everything takes a `candle_core::Device`. See `docs/engine.md`.

pub mod bench;
pub mod checkpoint;
mod composed;
pub mod config;
mod cpu;
mod device_model;
pub mod error;
mod gguf;
pub mod infer;
mod kernels;
mod packing;
mod par;
mod params;
pub mod sampling;
pub mod score;
mod tensors;
#[cfg(test)]
mod testing;
pub mod train;
pub mod weights;

pub use candle_core::Device;
pub use checkpoint::{Checkpoint, SaveDtype};
pub use config::{Architecture, Llama3Scaling, LlamaConfig};
pub use error::{CheckpointError, EngineError, TrainError};
pub use infer::{
    FinishReason, GenerateRequest, InferenceEngine, InferenceOptions, InferenceStats, SampledToken, TokenSink,
    WeightFormat,
};
pub use sampling::SamplingParams;
pub use score::sequence_logprobs;
pub use train::{PeftAdapter, Sample, StepReport, Trainer, TrainerConfig};
pub use weights::Weights;

/// What optimizer state says of adapters.
pub mod lora {
    pub use crate::train::{has_adapters, peft_adapter};
}
