//! One forward pass over several sequences, on whichever device the engine runs.

use std::sync::Arc;

use candle_core::Device;

use super::cpu::CpuRunner;
use super::device::{DeviceRunner, DeviceWeights};
use crate::config::LlamaConfig;
use crate::cpu::CpuModel;
use crate::error::EngineError;
use crate::infer::WeightFormat;
use crate::params::{fuse, rope_table};
use crate::weights::Weights;

/// The next tokens of one sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment<'a> {
    /// The sequence's slot.
    pub(crate) slot: usize,
    /// Tokens to run, at least one; they follow those that ran before.
    pub(crate) tokens: &'a [u32],
    /// Whether the logits after the last token are asked for.
    pub(crate) wanted: bool,
}

/// Weights in the layout that a runner reads.
#[derive(Clone)]
pub(crate) enum Prepared {
    Cpu(Arc<CpuModel>),
    Device(Arc<DeviceWeights>),
}

impl Prepared {
    /// Checks weights and brings them into the device's layout, on the calling thread.
    pub(crate) fn new(
        cfg: &LlamaConfig,
        weights: &Weights,
        device: &Device,
        format: WeightFormat,
    ) -> Result<Self, EngineError> {
        if device.is_cpu() {
            let params = fuse(cfg, weights, device)?;
            Ok(Self::Cpu(Arc::new(CpuModel::in_format(cfg, &params, rope_table(cfg), format)?)))
        } else if format != WeightFormat::F32 {
            let (field, expected) = ("weight_format", "f32 on any device but the CPU");
            Err(EngineError::InvalidOption { field, expected, got: format.to_string() })
        } else {
            Ok(Self::Device(Arc::new(DeviceWeights::new(cfg, weights, device)?)))
        }
    }
}

/// The forward pass and the caches of all slots.
pub(crate) enum Runner {
    Cpu(CpuRunner),
    Device(DeviceRunner),
}

impl Runner {
    /// A runner for `slots` sequences.
    pub(crate) fn new(cfg: &LlamaConfig, prepared: Prepared, slots: usize) -> Self {
        match prepared {
            Prepared::Cpu(w) => Self::Cpu(CpuRunner::new(cfg, w, slots)),
            Prepared::Device(w) => Self::Device(DeviceRunner::new(cfg, w, rope_table(cfg), slots)),
        }
    }

    /// Takes other weights between two steps.
    pub(crate) fn swap(&mut self, prepared: Prepared) {
        match (self, prepared) {
            (Self::Cpu(r), Prepared::Cpu(w)) => r.swap(w),
            (Self::Device(r), Prepared::Device(w)) => r.swap(w),
            // `Prepared::new` takes the engine's own device, so the kinds agree.
            (Self::Cpu(_), Prepared::Device(_)) | (Self::Device(_), Prepared::Cpu(_)) => {
                tracing::error!("weights were prepared for another device and ignored");
            }
        }
    }

    /// Opens a slot; returns the number of prompt tokens that are known already.
    pub(crate) fn open(&mut self, slot: usize, prompt: &[u32]) -> usize {
        match self {
            Self::Cpu(r) => r.open(slot, prompt),
            Self::Device(r) => r.open(slot),
        }
    }

    /// Prompt tokens that `open` would find.
    pub(crate) fn known(&self, prompt: &[u32]) -> usize {
        match self {
            Self::Cpu(r) => r.known(prompt),
            Self::Device(_) => 0,
        }
    }

    /// Whether a computed prompt helps later requests.
    pub(crate) fn shares_prefixes(&self) -> bool {
        matches!(self, Self::Cpu(_))
    }

    /// Shares a computed prompt with later requests.
    pub(crate) fn remember(&mut self, slot: usize, prompt: &[u32]) {
        if let Self::Cpu(r) = self {
            r.remember(slot, prompt);
        }
    }

    /// Frees a slot.
    pub(crate) fn close(&mut self, slot: usize) {
        match self {
            Self::Cpu(r) => r.close(slot),
            Self::Device(r) => r.close(slot),
        }
    }

    /// Runs the segments; `logits` receives `[wanted segments, vocab]` in segment order.
    pub(crate) fn forward(&mut self, segments: &[Segment<'_>], logits: &mut Vec<f32>) -> Result<(), EngineError> {
        match self {
            Self::Cpu(r) => {
                r.forward(segments, logits);
                Ok(())
            }
            Self::Device(r) => Ok(r.forward(segments, logits)?),
        }
    }
}
