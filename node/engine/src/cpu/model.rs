//! Weights in the layout of the CPU kernels.

use std::sync::Arc;

use candle_core::{Result, Tensor};

use super::forward::sized;
use crate::config::{Architecture, LlamaConfig};
use crate::infer::WeightFormat;
use crate::kernels::attention::AttentionShape;
use crate::kernels::matmul::{Lhs, Packed};
use crate::kernels::q8::PackedQ8;
use crate::kernels::rope::RopeTable;
use crate::kernels::{elementwise, norm};
use crate::params::{attention_shape, check_count, head_index, last_norm_index, layer_params, norm_eps};
use crate::tensors::with_f32;

/// What the q, k and v projections have besides their matrix.
#[derive(Debug)]
pub(crate) enum QkvExtra {
    /// Nothing (Llama).
    None,
    /// A bias `[q | k | v]` (Qwen2).
    Bias(Vec<f32>),
    /// RMSNorm weights of q's heads and of k's, `head_dim` each (Qwen3).
    HeadNorms(Vec<f32>),
}

/// A weight matrix `W [n, k]`, packed for products with rows `[m, k]`.
#[derive(Debug)]
pub(crate) enum Matrix {
    /// As it is.
    F32(Packed),
    /// Rounded; for generation only.
    Q8(Arc<PackedQ8>),
}

impl Matrix {
    /// `out [m, n] = lhs [m, k] · W^T`, or `out += …` if `accumulate`.
    pub(crate) fn mul(&self, lhs: Lhs<'_>, out: &mut [f32], accumulate: bool) {
        match self {
            Self::F32(w) => w.mul(lhs, out, accumulate),
            Self::Q8(w) => w.mul(lhs, out, accumulate),
        }
    }
}

/// The rows that tokens begin with.
#[derive(Debug)]
pub(crate) enum Embeddings {
    /// `[vocab, hidden]`.
    F32(Vec<f32>),
    /// Rounded; shared with the output layer where the model ties them.
    Q8(Arc<PackedQ8>),
}

/// One decoder layer; `qkv` and `gate_up` are the fused matrices.
#[derive(Debug)]
pub(crate) struct CpuLayer {
    pub(crate) norm1: Vec<f32>,
    pub(crate) qkv: Matrix,
    pub(crate) output: Matrix,
    pub(crate) norm2: Vec<f32>,
    pub(crate) gate_up: Matrix,
    pub(crate) down: Matrix,
    pub(crate) extra: QkvExtra,
}

impl CpuLayer {
    /// The projection of normed rows `[tokens, hidden]` to `qkv [tokens, q | k | v]`, bias included.
    pub(crate) fn project(&self, normed: &[f32], hidden: usize, qkv: &mut [f32]) {
        let bias = if let QkvExtra::Bias(bias) = &self.extra { Some(bias) } else { None };
        if let Some(bias) = bias {
            elementwise::fill_rows(bias, qkv);
        }
        self.qkv.mul(Lhs::rows(normed, hidden), qkv, bias.is_some());
    }

    /// Applies the norms of heads to projected rows in place, where the layer has them.
    pub(crate) fn norm_heads(&self, qkv: &mut [f32], shape: AttentionShape, eps: f32) {
        if let QkvExtra::HeadNorms(w) = &self.extra {
            norm::heads_forward(qkv, w, eps, shape);
        }
    }

    /// What attention reads: `qkv` itself, or its normed copy in `buffer`.
    pub(crate) fn normed_heads<'a>(
        &self,
        qkv: &'a [f32],
        shape: AttentionShape,
        eps: f32,
        buffer: &'a mut Vec<f32>,
    ) -> &'a [f32] {
        if !matches!(self.extra, QkvExtra::HeadNorms(_)) {
            return qkv;
        }
        let copy = sized(buffer, qkv.len());
        copy.copy_from_slice(qkv);
        self.norm_heads(copy, shape, eps);
        copy
    }
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
    pub(crate) embeddings: Embeddings,
    pub(crate) layers: Vec<CpuLayer>,
    pub(crate) norm: Vec<f32>,
    pub(crate) head: Matrix,
}

/// The matrices once more, packed for products with gradients: `g [rows, out] · W [out, in]`.
#[derive(Debug)]
pub(crate) struct BackwardPacks {
    /// q|k|v, output, gate|up, down per layer.
    pub(crate) layers: Vec<[Packed; 4]>,
    /// The output layer.
    pub(crate) head: Packed,
    /// Place of the last norm among the parameters.
    pub(crate) last_norm_index: usize,
    /// Place of the output layer among them: 0, the embeddings, if tied.
    pub(crate) head_index: usize,
}

/// A fused matrix packed for the forward product. Rows are rounded one by one, so fusing changes nothing.
fn forward_pack(t: &Tensor, format: WeightFormat) -> Result<Matrix> {
    let (n, k) = t.dims2()?;
    with_f32(t, "weights", |w| {
        Ok(match format {
            WeightFormat::F32 => Matrix::F32(Packed::from_weight(w, n, k)),
            WeightFormat::Q8_0 => Matrix::Q8(PackedQ8::from_weight(w, n, k).into()),
        })
    })
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
        Self::in_format(cfg, params, rope, WeightFormat::F32)
    }

    /// The same with matrices and embeddings in `format`; in Q8_0 a bit more than a quarter of a copy.
    pub(crate) fn in_format(
        cfg: &LlamaConfig,
        params: &[Tensor],
        rope: Arc<RopeTable>,
        format: WeightFormat,
    ) -> Result<Self> {
        check_count(cfg, params)?;
        let layers = layer_params(cfg, params)
            .map(|p| {
                Ok(CpuLayer {
                    norm1: vector(&p[0])?,
                    qkv: forward_pack(&p[1], format)?,
                    output: forward_pack(&p[2], format)?,
                    norm2: vector(&p[3])?,
                    gate_up: forward_pack(&p[4], format)?,
                    down: forward_pack(&p[5], format)?,
                    extra: match cfg.architecture {
                        Architecture::Llama => QkvExtra::None,
                        Architecture::Qwen2 => QkvExtra::Bias(vector(&p[6])?),
                        Architecture::Qwen3 => QkvExtra::HeadNorms(vector(&p[6])?),
                    },
                })
            })
            .collect::<Result<_>>()?;
        let head = forward_pack(&params[head_index(cfg)], format)?;
        let embeddings = match (format, &head) {
            (WeightFormat::F32, _) => Embeddings::F32(vector(&params[0])?),
            (WeightFormat::Q8_0, Matrix::Q8(head)) if head_index(cfg) == 0 => Embeddings::Q8(Arc::clone(head)),
            (WeightFormat::Q8_0, _) => {
                let (n, k) = params[0].dims2()?;
                Embeddings::Q8(with_f32(&params[0], "weights", |w| Ok(PackedQ8::from_weight(w, n, k).into()))?)
            }
        };
        Ok(Self {
            shape: attention_shape(cfg),
            rope,
            eps: norm_eps(cfg),
            hidden: cfg.hidden_size,
            inner: cfg.intermediate_size,
            vocab: cfg.vocab_size,
            embeddings,
            layers,
            norm: vector(&params[last_norm_index(cfg)])?,
            head,
        })
    }
}

impl CpuModel {
    /// The embedding of a token into `out [hidden]`.
    pub(crate) fn embed(&self, token: u32, out: &mut [f32]) {
        let row = token as usize;
        match &self.embeddings {
            Embeddings::F32(rows) => out.copy_from_slice(&rows[row * self.hidden..(row + 1) * self.hidden]),
            Embeddings::Q8(rows) => rows.row(row, out),
        }
    }
}

impl BackwardPacks {
    /// Packs the matrices of fused parameters; another copy of the model.
    pub(crate) fn new(cfg: &LlamaConfig, params: &[Tensor]) -> Result<Self> {
        check_count(cfg, params)?;
        let layers = layer_params(cfg, params)
            .map(|p| Ok([backward_pack(&p[1])?, backward_pack(&p[2])?, backward_pack(&p[4])?, backward_pack(&p[5])?]))
            .collect::<Result<_>>()?;
        let (last_norm, head) = (last_norm_index(cfg), head_index(cfg));
        Ok(Self { layers, head: backward_pack(&params[head])?, last_norm_index: last_norm, head_index: head })
    }
}
