//! The fused parameters that computing uses, and their split into Hugging Face tensors.

use std::sync::Arc;

use candle_core::{Device, Result, Tensor};

use crate::config::{Architecture, LlamaConfig};
use crate::error::CheckpointError;
use crate::kernels::attention::AttentionShape;
use crate::kernels::rope::RopeTable;
use crate::weights::Weights;

/// How many consecutive Hugging Face tensors make up each parameter: q, k, v and gate, up are one matrix each.
///
/// Embeddings; per layer norm, q|k|v, output, norm, gate|up, down, and the architecture's extra: the bias of q|k|v, or
/// the norms of q's and k's heads; last norm; output layer unless tied.
pub(crate) fn fused_spans(cfg: &LlamaConfig) -> Vec<usize> {
    let mut spans = vec![1];
    for _ in 0..cfg.num_hidden_layers {
        spans.extend([1, 3, 1, 1, 2, 1]);
        match cfg.architecture {
            Architecture::Llama => {}
            Architecture::Qwen2 => spans.push(3),
            Architecture::Qwen3 => spans.push(2),
        }
    }
    spans.push(1);
    if !cfg.tie_word_embeddings {
        spans.push(1);
    }
    spans
}

/// Fused parameters of one layer.
pub(crate) fn params_per_layer(cfg: &LlamaConfig) -> usize {
    if cfg.architecture == Architecture::Llama { 6 } else { 7 }
}

/// Place of the last norm among the fused parameters; an untied output layer comes after it.
pub(crate) fn last_norm_index(cfg: &LlamaConfig) -> usize {
    1 + cfg.num_hidden_layers * params_per_layer(cfg)
}

/// The output layer: the embeddings if tied, else the last parameter.
pub(crate) fn head_index(cfg: &LlamaConfig) -> usize {
    if cfg.tie_word_embeddings { 0 } else { last_norm_index(cfg) + 1 }
}

/// Refuses a list of parameters that is not [`fused_spans`] long.
pub(crate) fn check_count(cfg: &LlamaConfig, params: &[Tensor]) -> Result<()> {
    let expected = fused_spans(cfg).len();
    if params.len() != expected {
        candle_core::bail!("expected {expected} parameters, got {}", params.len());
    }
    Ok(())
}

/// The parameters of each layer; `check_count` has run.
pub(crate) fn layer_params<'a>(cfg: &LlamaConfig, params: &'a [Tensor]) -> std::slice::ChunksExact<'a, Tensor> {
    params[1..last_norm_index(cfg)].chunks_exact(params_per_layer(cfg))
}

/// The fused parameters of checked weights.
///
/// # Errors
/// The weights do not fit `cfg`, or the device has no room.
pub(crate) fn fuse(
    cfg: &LlamaConfig,
    weights: &Weights,
    device: &Device,
) -> std::result::Result<Vec<Tensor>, CheckpointError> {
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
    Arc::new(RopeTable::new(cfg.head_dim, cfg.rope_theta, cfg.rope_scaling.as_ref(), cfg.max_position_embeddings))
}
