//! The Llama forward pass over packed sequences, differentiable, on any device.

use std::sync::Arc;

use candle_core::{Device, Result, Tensor, Var};

use crate::config::LlamaConfig;
use crate::error::CheckpointError;
use crate::kernels::attention::AttentionShape;
use crate::kernels::rope::RopeTable;
use crate::ops::linear::LinearWeight;
use crate::ops::{Backend, attention, logprob, norm, swiglu};
use crate::packing::PackedSequences;
use crate::weights::Weights;

/// Parameters per layer: norm, q|k|v, output, norm, gate|up, down.
const PER_LAYER: usize = 6;

/// How many consecutive Hugging Face tensors make up each parameter: q, k, v and gate, up are one matrix each.
pub(crate) fn fused_spans(cfg: &LlamaConfig) -> Vec<usize> {
    let mut spans = vec![1];
    for _ in 0..cfg.num_hidden_layers {
        spans.extend([1, 3, 1, 1, 2, 1]);
    }
    spans.push(1);
    if !cfg.tie_word_embeddings {
        spans.push(1);
    }
    spans
}

/// The fused parameters of checked weights.
///
/// # Errors
/// The weights do not fit `cfg`, or the device has no room.
pub(crate) fn fuse(cfg: &LlamaConfig, weights: &Weights, device: &Device) -> std::result::Result<Vec<Tensor>, CheckpointError> {
    weights.check(cfg)?;
    let mut at = 0;
    let mut out = Vec::new();
    for span in fused_spans(cfg) {
        let parts = (at..at + span).map(|i| weights.at(i)).collect::<std::result::Result<Vec<_>, _>>()?;
        let fused = if span == 1 { parts[0].clone() } else { Tensor::cat(&parts, 0)? };
        out.push(fused.detach().to_device(device)?.contiguous()?);
        at += span;
    }
    Ok(out)
}

/// Splits fused tensors (parameters, or moments of the same shapes) into Hugging Face tensors.
pub(crate) fn split(cfg: &LlamaConfig, fused: &[Tensor]) -> Result<Vec<(String, Tensor)>> {
    let mut shapes = cfg.tensor_shapes().into_iter();
    let mut out = Vec::new();
    for (tensor, span) in fused.iter().zip(fused_spans(cfg)) {
        let mut row = 0;
        for (name, shape) in shapes.by_ref().take(span) {
            let part = if span == 1 { tensor.detach() } else { tensor.detach().narrow(0, row, shape[0])?.copy()? };
            row += shape[0];
            out.push((name, part));
        }
    }
    Ok(out)
}

struct Layer {
    norm1: Tensor,
    qkv: LinearWeight,
    output: LinearWeight,
    norm2: Tensor,
    gate_up: LinearWeight,
    down: LinearWeight,
}

/// A decoder whose parameters may be variables (training) or plain tensors (scoring).
pub(crate) struct Llama {
    shape: AttentionShape,
    eps: f32,
    rope: Arc<RopeTable>,
    backend: Backend,
    embed: Tensor,
    layers: Vec<Layer>,
    norm: Tensor,
    head: Tensor,
}

impl Llama {
    /// Assembles a model from fused parameters in the order of [`fused_spans`].
    pub(crate) fn new(cfg: &LlamaConfig, params: &[Tensor], rope: Arc<RopeTable>, backend: Backend) -> Result<Self> {
        let expected = fused_spans(cfg).len();
        if params.len() != expected {
            candle_core::bail!("expected {expected} parameters, got {}", params.len());
        }
        let layers = params[1..=cfg.num_hidden_layers * PER_LAYER]
            .chunks_exact(PER_LAYER)
            .map(|p| Layer {
                norm1: p[0].clone(),
                qkv: LinearWeight::new(p[1].clone()),
                output: LinearWeight::new(p[2].clone()),
                norm2: p[3].clone(),
                gate_up: LinearWeight::new(p[4].clone()),
                down: LinearWeight::new(p[5].clone()),
            })
            .collect();
        let norm = params[1 + cfg.num_hidden_layers * PER_LAYER].clone();
        let head = if cfg.tie_word_embeddings { params[0].clone() } else { params[expected - 1].clone() };
        Ok(Self {
            shape: attention_shape(cfg),
            eps: norm_eps(cfg),
            rope,
            backend,
            embed: params[0].clone(),
            layers,
            norm,
            head,
        })
    }

    /// Final hidden states `[tokens, hidden]`, after the last norm.
    pub(crate) fn hidden(&self, batch: &PackedSequences) -> Result<Tensor> {
        let ids = Tensor::from_slice(&batch.tokens, batch.tokens.len(), self.embed.device())?;
        let mut x = self.embed.index_select(&ids, 0)?;
        for layer in &self.layers {
            x = self.layer(layer, &x, &batch.offsets)?;
        }
        Ok(x)
    }

    fn layer(&self, layer: &Layer, x: &Tensor, offsets: &Arc<Vec<usize>>) -> Result<Tensor> {
        let b = self.backend;
        let h = norm::rms_norm(x, &layer.norm1, self.eps, b)?;
        let qkv = layer.qkv.forward(&h, b)?;
        let mixed = attention::self_attention(&qkv, offsets, self.shape, &self.rope, b)?;
        let x = layer.output.forward_add(x, &mixed, b)?;
        let h = norm::rms_norm(&x, &layer.norm2, self.eps, b)?;
        let inner = swiglu::swiglu(&layer.gate_up.forward(&h, b)?, b)?;
        layer.down.forward_add(&x, &inner, b)
    }

    /// `[rows, 2]`: log-probability of each target and entropy of its distribution.
    pub(crate) fn logprobs(&self, batch: &PackedSequences) -> Result<Tensor> {
        let hidden = self.hidden(batch)?;
        let rows = Tensor::from_slice(&batch.rows, batch.rows.len(), hidden.device())?;
        let picked = norm::rms_norm(&hidden.index_select(&rows, 0)?, &self.norm, self.eps, self.backend)?;
        logprob::linear_logprob(&picked, &self.head, &batch.targets, self.backend)
    }

    /// Logits `[tokens, vocab]` of every token.
    pub(crate) fn logits(&self, batch: &PackedSequences) -> Result<Tensor> {
        let hidden = norm::rms_norm(&self.hidden(batch)?, &self.norm, self.eps, self.backend)?;
        LinearWeight::new(self.head.clone()).forward(&hidden, self.backend)
    }
}

/// Head counts and width of a configuration.
pub(crate) fn attention_shape(cfg: &LlamaConfig) -> AttentionShape {
    AttentionShape { heads: cfg.num_attention_heads, kv_heads: cfg.num_key_value_heads, head_dim: cfg.head_dim }
}

/// RMSNorm's epsilon in the arithmetic's precision.
#[expect(clippy::cast_possible_truncation, reason = "f32 is the arithmetic's precision")]
pub(crate) fn norm_eps(cfg: &LlamaConfig) -> f32 {
    cfg.rms_norm_eps as f32
}

/// The rotary table of a configuration.
pub(crate) fn rope_table(cfg: &LlamaConfig) -> Arc<RopeTable> {
    Arc::new(RopeTable::new(cfg.head_dim, cfg.rope_theta, cfg.max_position_embeddings))
}

/// Fresh variables with these values.
pub(crate) fn variables(params: &[Tensor]) -> Result<Vec<Var>> {
    params.iter().map(Var::from_tensor).collect()
}
