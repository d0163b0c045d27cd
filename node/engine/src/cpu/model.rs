//! Weights in the layout of the CPU kernels.

use std::sync::Arc;

use candle_core::{Result, Tensor};

use crate::config::LlamaConfig;
use crate::kernels::attention::AttentionShape;
use crate::kernels::matmul::Packed;
use crate::kernels::rope::RopeTable;
use crate::params::{attention_shape, norm_eps};
use crate::tensors::with_f32;

/// One decoder layer; `qkv` and `gate_up` are the fused matrices.
#[derive(Debug)]
pub(crate) struct CpuLayer {
    pub(crate) norm1: Vec<f32>,
    pub(crate) qkv: Packed,
    pub(crate) output: Packed,
    pub(crate) norm2: Vec<f32>,
    pub(crate) gate_up: Packed,
    pub(crate) down: Packed,
}

/// A model that the CPU kernels can run; generation, scoring and training share it.
#[derive(Debug)]
pub(crate) struct CpuModel {
    pub(crate) shape: AttentionShape,
    pub(crate) rope: Arc<RopeTable>,
    pub(crate) eps: f32,
    pub(crate) hidden: usize,
    pub(crate) inner: usize,
    pub(crate) vocab: usize,
    pub(crate) embed: Vec<f32>,
    pub(crate) layers: Vec<CpuLayer>,
    pub(crate) norm: Vec<f32>,
    pub(crate) head: Packed,
}

/// The matrices once more, packed for products with gradients: `g [rows, out] · W [out, in]`.
#[derive(Debug)]
pub(crate) struct BackwardPacks {
    /// q|k|v, output, gate|up, down per layer.
    pub(crate) layers: Vec<[Packed; 4]>,
    /// The output layer.
    pub(crate) head: Packed,
    /// The output layer is a parameter of its own.
    pub(crate) untied: bool,
}

/// A fused matrix packed for the forward product.
fn forward_pack(t: &Tensor) -> Result<Packed> {
    let (n, k) = t.dims2()?;
    with_f32(t, "weights", |w| Ok(Packed::from_weight(w, n, k)))
}

/// A fused matrix packed for the product with gradients.
fn backward_pack(t: &Tensor) -> Result<Packed> {
    let (n, k) = t.dims2()?;
    with_f32(t, "weights", |w| Ok(Packed::from_rows(w, n, k)))
}

fn vector(t: &Tensor) -> Result<Vec<f32>> {
    with_f32(t, "weights", |w| Ok(w.to_vec()))
}

impl CpuModel {
    /// Packs fused parameters, in the order of [`crate::params::fused_spans`]; about one copy of the model.
    pub(crate) fn new(cfg: &LlamaConfig, params: &[Tensor], rope: Arc<RopeTable>) -> Result<Self> {
        let layers = layer_params(cfg, params)?
            .map(|p| {
                Ok(CpuLayer {
                    norm1: vector(&p[0])?,
                    qkv: forward_pack(&p[1])?,
                    output: forward_pack(&p[2])?,
                    norm2: vector(&p[3])?,
                    gate_up: forward_pack(&p[4])?,
                    down: forward_pack(&p[5])?,
                })
            })
            .collect::<Result<_>>()?;
        Ok(Self {
            shape: attention_shape(cfg),
            rope,
            eps: norm_eps(cfg),
            hidden: cfg.hidden_size,
            inner: cfg.intermediate_size,
            vocab: cfg.vocab_size,
            embed: vector(&params[0])?,
            layers,
            norm: vector(&params[1 + cfg.num_hidden_layers * 6])?,
            head: forward_pack(head_param(cfg, params))?,
        })
    }
}

impl BackwardPacks {
    /// Packs the matrices of fused parameters; another copy of the model.
    pub(crate) fn new(cfg: &LlamaConfig, params: &[Tensor]) -> Result<Self> {
        let layers = layer_params(cfg, params)?
            .map(|p| Ok([backward_pack(&p[1])?, backward_pack(&p[2])?, backward_pack(&p[4])?, backward_pack(&p[5])?]))
            .collect::<Result<_>>()?;
        Ok(Self { layers, head: backward_pack(head_param(cfg, params))?, untied: !cfg.tie_word_embeddings })
    }
}

/// The six parameters of each layer, after a check of their number.
fn layer_params<'a>(cfg: &LlamaConfig, params: &'a [Tensor]) -> Result<std::slice::ChunksExact<'a, Tensor>> {
    let expected = crate::params::fused_spans(cfg).len();
    if params.len() != expected {
        candle_core::bail!("expected {expected} parameters, got {}", params.len());
    }
    Ok(params[1..=cfg.num_hidden_layers * 6].chunks_exact(6))
}

/// The output layer: the embeddings if tied, else the last parameter.
fn head_param<'a>(cfg: &LlamaConfig, params: &'a [Tensor]) -> &'a Tensor {
    if cfg.tie_word_embeddings { &params[0] } else { &params[params.len() - 1] }
}
