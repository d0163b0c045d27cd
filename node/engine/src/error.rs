//! Errors of the engine: one enum per operation, each variant with the field, what was expected, and what came.

use std::path::PathBuf;

/// Reading, checking or writing a model's configuration and weights failed. Nothing was changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// A file of the folder could not be read or written. Retry once the cause is gone.
    #[error("{path}: file operation failed")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A JSON file does not parse. The file is at fault.
    #[error("{file}: not valid JSON")]
    Json {
        /// The file's name.
        file: &'static str,
        /// Where and why.
        #[source]
        source: serde_json::Error,
    },
    /// A configuration field is missing, has the wrong kind, or names something that this engine does not do.
    #[error("config field `{field}`: expected {expected}, got {got}")]
    Field {
        /// The field.
        field: &'static str,
        /// What is accepted.
        expected: String,
        /// What was found.
        got: String,
    },
    /// A tensor that the configuration asks for is absent.
    #[error("tensor `{name}`: expected shape {expected:?}, got none")]
    MissingTensor {
        /// The tensor's Hugging Face name.
        name: String,
        /// Its shape by the configuration.
        expected: Vec<usize>,
    },
    /// A tensor is present that the configuration does not know.
    #[error("tensor `{name}`: not part of this model")]
    UnexpectedTensor {
        /// Its name.
        name: String,
    },
    /// A tensor has another shape than the configuration says.
    #[error("tensor `{name}`: expected shape {expected:?}, got {got:?}")]
    Shape {
        /// The tensor's name.
        name: String,
        /// The shape by the configuration.
        expected: Vec<usize>,
        /// The shape found.
        got: Vec<usize>,
    },
    /// A tensor is stored in a type other than F32, F16 or BF16.
    #[error("tensor `{name}`: expected F32, F16 or BF16, got {got}")]
    Dtype {
        /// The tensor's name.
        name: String,
        /// The type found.
        got: String,
    },
    /// A tensor of a GGUF is stored in a block format that is not read.
    #[error("tensor `{name}`: expected F32, F16, BF16, Q4_0 to Q8_0 or Q2_K to Q6_K, got {got}")]
    Quantization {
        /// The tensor's name in the file.
        name: String,
        /// The format found.
        got: String,
    },
    /// A tensor holds NaN or infinity. The file is at fault.
    #[error("tensor `{name}`: expected finite values, got NaN or infinity")]
    NonFinite {
        /// The tensor's name.
        name: String,
    },
    /// The bytes are not a safetensors file.
    #[error("not a valid safetensors file")]
    Safetensors(#[from] safetensors::SafeTensorError),
    /// A file is not a GGUF, or ends too early.
    #[error("{path}: not a valid GGUF file: {reason}")]
    Gguf {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A key of a GGUF is missing, has the wrong kind, or names something that this engine does not do.
    #[error("GGUF key `{key}`: expected {expected}, got {got}")]
    Metadata {
        /// The key.
        key: String,
        /// What is accepted.
        expected: String,
        /// What was found.
        got: String,
    },
    /// A tensor operation failed on the device, mostly for want of memory.
    #[error("tensor operation failed")]
    Tensor(#[from] candle_core::Error),
}

/// Generating or scoring failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The waiting queue is full. Retry later or elsewhere; nothing was queued.
    #[error("waiting queue: expected fewer than {limit} requests, got {waiting}")]
    Busy {
        /// Requests that wait.
        waiting: usize,
        /// The bound.
        limit: usize,
    },
    /// The request has no prompt token. The caller's fault.
    #[error("field `prompt`: expected at least one token, got none")]
    EmptyPrompt,
    /// A token id is outside the vocabulary. The caller's fault.
    #[error("field `{field}`: expected ids below {vocab_size}, got {got} at index {index}")]
    TokenOutOfRange {
        /// `prompt` or `tokens`.
        field: &'static str,
        /// Where.
        index: usize,
        /// The id.
        got: u32,
        /// The vocabulary's size.
        vocab_size: usize,
    },
    /// The prompt leaves no room for one new token. The caller's fault.
    #[error("field `{field}`: expected at most {limit} tokens, got {got}")]
    TooLong {
        /// `prompt` or `tokens`.
        field: &'static str,
        /// Its length.
        got: usize,
        /// The longest that fits.
        limit: usize,
    },
    /// A sampling or engine option is out of range. The caller's fault.
    #[error("field `{field}`: expected {expected}, got {got}")]
    InvalidOption {
        /// The option.
        field: &'static str,
        /// What is accepted.
        expected: &'static str,
        /// What was given.
        got: String,
    },
    /// The model produced NaN or infinite logits: its weights are broken. The sequence ends; the engine goes on.
    #[error("logits of policy version {policy_version}: expected finite values, got NaN or infinity")]
    NonFiniteLogits {
        /// The weights that produced them.
        policy_version: u64,
    },
    /// The engine has ended, or ended while this sequence ran.
    #[error("the inference engine has stopped")]
    Stopped,
    /// The engine's own invariant broke during a forward pass; the affected sequences were dropped.
    #[error("the forward pass failed: {what}")]
    Internal {
        /// The panic's message.
        what: String,
    },
    /// Threads could not be started.
    #[error("worker threads could not be started: {what}")]
    Threads {
        /// The system's reason.
        what: String,
    },
    /// The weights do not fit the configuration.
    #[error("weights were refused")]
    Weights(#[from] CheckpointError),
    /// A tensor operation failed on the device.
    #[error("tensor operation failed")]
    Tensor(#[from] candle_core::Error),
}

/// A training call failed. Weights and optimizer state are as before the call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// A field of a sample is invalid. The caller's fault.
    #[error("sample {sample}, field `{field}`: expected {expected}, got {got}")]
    Sample {
        /// Index in the batch.
        sample: usize,
        /// The field.
        field: &'static str,
        /// What is accepted.
        expected: String,
        /// What was given.
        got: String,
    },
    /// No token of the batch trains. The caller's fault.
    #[error("batch of {samples} samples: expected at least one trained token, got none")]
    NothingToTrain {
        /// Samples given.
        samples: usize,
    },
    /// An option is out of range. The caller's fault.
    #[error("trainer option `{field}`: expected {expected}, got {got}")]
    InvalidOption {
        /// The option.
        field: &'static str,
        /// What is accepted.
        expected: &'static str,
        /// What was given.
        got: String,
    },
    /// The algorithm's parts do not go together. The caller's fault.
    #[error(transparent)]
    Algorithm(#[from] starling_protocol::job::JobError),
    /// The loss, a log-probability or a gradient is NaN or infinite.
    #[error("{what}: expected a finite value, got {got}")]
    NonFinite {
        /// `loss`, `gradient norm`, …
        what: &'static str,
        /// The value.
        got: f64,
    },
    /// Optimizer state does not belong to this model.
    #[error("optimizer state `{field}`: expected {expected}, got {got}")]
    OptimizerState {
        /// The tensor or entry.
        field: String,
        /// What this model needs.
        expected: String,
        /// What was found.
        got: String,
    },
    /// Threads could not be started.
    #[error("worker threads could not be started: {what}")]
    Threads {
        /// The system's reason.
        what: String,
    },
    /// Optimizer state is not a safetensors file.
    #[error("not a valid safetensors file")]
    Safetensors(#[from] safetensors::SafeTensorError),
    /// The weights do not fit the configuration.
    #[error("weights were refused")]
    Weights(#[from] CheckpointError),
    /// A tensor operation failed on the device.
    #[error("tensor operation failed")]
    Tensor(#[from] candle_core::Error),
}
