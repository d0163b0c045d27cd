//! The Llama forward pass over packed sequences by candle operators: differentiable, on any device.

use std::sync::Arc;

use candle_core::{Result, Tensor};

use crate::composed::{linear_logprob, rms_norm, self_attention, swiglu};
use crate::config::LlamaConfig;
use crate::kernels::attention::AttentionShape;
use crate::kernels::rope::RopeTable;
use crate::packing::PackedSequences;
use crate::params::{attention_shape, fused_spans, norm_eps};

/// A decoder whose fused parameters may be variables (training) or plain tensors (scoring).
pub(crate) struct DeviceModel {
    shape: AttentionShape,
    eps: f32,
    rope: Arc<RopeTable>,
    layers: usize,
    tied: bool,
    params: Vec<Tensor>,
}

impl DeviceModel {
    /// A model of fused parameters in the order of [`fused_spans`].
    pub(crate) fn new(cfg: &LlamaConfig, params: Vec<Tensor>, rope: Arc<RopeTable>) -> Result<Self> {
        let expected = fused_spans(cfg).len();
        if params.len() != expected {
            candle_core::bail!("expected {expected} parameters, got {}", params.len());
        }
        let (layers, tied) = (cfg.num_hidden_layers, cfg.tie_word_embeddings);
        Ok(Self { shape: attention_shape(cfg), eps: norm_eps(cfg), rope, layers, tied, params })
    }

    /// `[rows, 2]`: log-probability of each target and entropy of its distribution, nats.
    pub(crate) fn logprobs(&self, batch: &PackedSequences) -> Result<Tensor> {
        let device = self.params[0].device();
        let ids = Tensor::from_slice(&batch.tokens, batch.tokens.len(), device)?;
        let mut x = self.params[0].index_select(&ids, 0)?;
        for p in self.params[1..=self.layers * 6].chunks_exact(6) {
            x = self.layer(p, &x, &batch.offsets)?;
        }
        let rows = Tensor::from_slice(&batch.rows, batch.rows.len(), device)?;
        let picked = rms_norm(&x.index_select(&rows, 0)?, &self.params[1 + self.layers * 6], self.eps)?;
        let head = if self.tied { &self.params[0] } else { &self.params[2 + self.layers * 6] };
        linear_logprob(&picked, head, &batch.targets)
    }

    fn layer(&self, p: &[Tensor], x: &Tensor, offsets: &[usize]) -> Result<Tensor> {
        let qkv = rms_norm(x, &p[0], self.eps)?.matmul(&p[1].t()?)?;
        let mixed = self_attention(&qkv, offsets, self.shape, &self.rope)?;
        let x = x.add(&mixed.matmul(&p[2].t()?)?)?;
        let gate_up = rms_norm(&x, &p[3], self.eps)?.matmul(&p[4].t()?)?;
        x.add(&swiglu(&gate_up)?.matmul(&p[5].t()?)?)
    }
}
