//! The Llama forward pass over packed sequences by candle operators: differentiable, on any device.

use std::sync::Arc;

use candle_core::{Result, Tensor};

use crate::composed::{linear_logprob, project_qkv, rms_norm, self_attention, swiglu};
use crate::config::LlamaConfig;
use crate::kernels::attention::AttentionShape;
use crate::kernels::rope::RopeTable;
use crate::packing::PackedSequences;
use crate::params::{attention_shape, check_count, head_index, last_norm_index, layer_params, norm_eps};

/// A decoder whose fused parameters may be variables (training) or plain tensors (scoring).
pub(crate) struct DeviceModel {
    shape: AttentionShape,
    eps: f32,
    rope: Arc<RopeTable>,
    cfg: LlamaConfig,
    params: Vec<Tensor>,
}

impl DeviceModel {
    /// A model of fused parameters in the order of [`crate::params::fused_spans`].
    pub(crate) fn new(cfg: &LlamaConfig, params: Vec<Tensor>, rope: Arc<RopeTable>) -> Result<Self> {
        check_count(cfg, &params)?;
        Ok(Self { shape: attention_shape(cfg), eps: norm_eps(cfg), rope, cfg: cfg.clone(), params })
    }

    /// `[rows, 2]`: log-probability of each target and entropy of its distribution, nats.
    pub(crate) fn logprobs(&self, batch: &PackedSequences) -> Result<Tensor> {
        let device = self.params[0].device();
        let ids = Tensor::from_slice(&batch.tokens, batch.tokens.len(), device)?;
        let Some(offsets) = batch.offsets() else {
            candle_core::bail!("sequences that share prefixes are for the CPU's kernels");
        };
        let mut x = self.params[0].index_select(&ids, 0)?;
        for p in layer_params(&self.cfg, &self.params) {
            x = self.layer(p, &x, &offsets)?;
        }
        let rows = Tensor::from_slice(&batch.rows, batch.rows.len(), device)?;
        let picked = rms_norm(&x.index_select(&rows, 0)?, &self.params[last_norm_index(&self.cfg)], self.eps)?;
        linear_logprob(&picked, &self.params[head_index(&self.cfg)], &batch.targets)
    }

    fn layer(&self, p: &[Tensor], x: &Tensor, offsets: &[usize]) -> Result<Tensor> {
        let qkv = project_qkv(&self.cfg, self.shape, self.eps, p, &rms_norm(x, &p[0], self.eps)?)?;
        let mixed = self_attention(&qkv, offsets, self.shape, &self.rope)?;
        let x = x.add(&mixed.matmul(&p[2].t()?)?)?;
        let gate_up = rms_norm(&x, &p[3], self.eps)?.matmul(&p[4].t()?)?;
        x.add(&swiglu(&gate_up)?.matmul(&p[5].t()?)?)
    }
}
