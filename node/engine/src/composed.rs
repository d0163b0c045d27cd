//! The operators as compositions of candle operators that have a backward, for devices without own kernels.
//!
//! candle's fused `softmax_last_dim`, `rms_norm` and `rope` have no backward and cut the gradient silently
//! (huggingface/candle #2168, #3568, #3569); nothing here uses them.

use candle_core::{D, DType, Result, Tensor};

use crate::config::{Architecture, LlamaConfig};
use crate::kernels::attention::AttentionShape;
use crate::kernels::rope::RopeTable;

/// `x / sqrt(mean(x²) + eps) · w` over rows.
pub(crate) fn rms_norm(x: &Tensor, w: &Tensor, eps: f32) -> Result<Tensor> {
    let scale = (x.sqr()?.mean_keepdim(D::Minus1)? + f64::from(eps))?.sqrt()?.recip()?;
    x.broadcast_mul(&scale)?.broadcast_mul(w)
}

/// q, k and v of normed rows `x [tokens, hidden]`, before the rotation: `[tokens, q | k | v]`.
///
/// `p` are the layer's parameters in the order of [`crate::params::fused_spans`].
pub(crate) fn project_qkv(
    cfg: &LlamaConfig,
    shape: AttentionShape,
    eps: f32,
    p: &[Tensor],
    x: &Tensor,
) -> Result<Tensor> {
    let qkv = x.matmul(&p[1].t()?)?;
    match cfg.architecture {
        Architecture::Llama => Ok(qkv),
        Architecture::Qwen2 => qkv.broadcast_add(&p[6]),
        Architecture::Qwen3 => {
            let (tokens, d) = (qkv.dim(0)?, shape.head_dim);
            let heads = |from: usize, n: usize, w: usize| {
                let part = qkv.narrow(1, from, n * d)?.reshape((tokens, n, d))?;
                rms_norm(&part, &p[6].narrow(0, w * d, d)?, eps)?.reshape((tokens, n * d))
            };
            let (q, k) = (heads(0, shape.heads, 0)?, heads(shape.q_len(), shape.kv_heads, 1)?);
            let v = qkv.narrow(1, shape.q_len() + shape.kv_len(), shape.kv_len())?;
            Tensor::cat(&[q, k, v.contiguous()?], 1)
        }
    }
}

/// `silu(gate) · up` of rows `[gate | up]`.
pub(crate) fn swiglu(x: &Tensor) -> Result<Tensor> {
    let inner = x.dim(D::Minus1)? / 2;
    let gate = x.narrow(D::Minus1, 0, inner)?.contiguous()?;
    let up = x.narrow(D::Minus1, inner, inner)?.contiguous()?;
    let sigmoid = (gate.neg()?.exp()? + 1.0)?.recip()?;
    gate.mul(&sigmoid)?.mul(&up)
}

/// Rotates `x [.., length, head_dim]` by `cos`, `sin` `[.., length, head_dim / 2]`, half-split pairing.
pub(crate) fn rotate(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let half = x.dim(D::Minus1)? / 2;
    let lo = x.narrow(D::Minus1, 0, half)?;
    let hi = x.narrow(D::Minus1, half, half)?;
    let a = lo.broadcast_mul(cos)?.sub(&hi.broadcast_mul(sin)?)?;
    let b = hi.broadcast_mul(cos)?.add(&lo.broadcast_mul(sin)?)?;
    Tensor::cat(&[a, b], D::Minus1)
}

/// Softmax over the last dimension; the maximum is a constant for the gradient.
pub(crate) fn softmax(x: &Tensor) -> Result<Tensor> {
    let max = x.max_keepdim(D::Minus1)?.detach();
    let e = x.broadcast_sub(&max)?.exp()?;
    e.broadcast_div(&e.sum_keepdim(D::Minus1)?)
}

/// Cosines and sines of positions `0..length`, `[length, head_dim / 2]` each.
fn rope_rows(rope: &RopeTable, length: usize, half: usize, like: &Tensor) -> Result<(Tensor, Tensor)> {
    let mut tables = (Vec::new(), Vec::new());
    for p in 0..length {
        let (cos, sin) = rope.row(p);
        tables.0.extend_from_slice(cos);
        tables.1.extend_from_slice(sin);
    }
    let device = like.device();
    Ok((Tensor::from_vec(tables.0, (length, half), device)?, Tensor::from_vec(tables.1, (length, half), device)?))
}

/// An additive causal mask `[length, length]`.
fn causal_mask(length: usize, like: &Tensor) -> Result<Tensor> {
    let mask: Vec<f32> = (0..length).flat_map(|q| (0..length).map(move |k| if k <= q { 0.0 } else { -1e30 })).collect();
    Tensor::from_vec(mask, (length, length), like.device())
}

/// Causal self-attention of `qkv [tokens, q | k | v]`, unrotated, to `[tokens, heads · head_dim]`: sequences are padded to the longest, attended, and packed again.
pub(crate) fn self_attention(
    qkv: &Tensor,
    offsets: &[usize],
    shape: AttentionShape,
    rope: &RopeTable,
) -> Result<Tensor> {
    let (tokens, width) = qkv.dims2()?;
    if width != shape.qkv_len() || offsets.last() != Some(&tokens) {
        candle_core::bail!("attention: [{tokens}, {width}] for width {}", shape.qkv_len());
    }
    let batch = offsets.len() - 1;
    let length = offsets.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0);
    if tokens == 0 || length > rope.positions() {
        candle_core::bail!("attention: sequences of {length} tokens for {} positions", rope.positions());
    }
    let mut pad = Vec::with_capacity(batch * length);
    let mut unpad = Vec::with_capacity(tokens);
    for (b, w) in offsets.windows(2).enumerate() {
        for t in 0..length {
            // Padding repeats the first token; causality keeps it out of every real row.
            pad.push(index(if w[0] + t < w[1] { w[0] + t } else { 0 })?);
        }
        for t in 0..w[1] - w[0] {
            unpad.push(index(b * length + t)?);
        }
    }
    let device = qkv.device();
    let padded = qkv.index_select(&Tensor::from_vec(pad, batch * length, device)?, 0)?;
    let d = shape.head_dim;
    let heads = |from: usize, n: usize| {
        padded.narrow(1, from, n * d)?.reshape((batch, length, n, d))?.transpose(1, 2)?.contiguous()
    };
    let (ql, kl) = (shape.q_len(), shape.kv_len());
    let (cos, sin) = rope_rows(rope, length, d / 2, qkv)?;
    let q = rotate(&heads(0, shape.heads)?, &cos, &sin)?;
    let k = repeat_heads(&rotate(&heads(ql, shape.kv_heads)?, &cos, &sin)?, shape)?;
    let v = repeat_heads(&heads(ql + kl, shape.kv_heads)?, shape)?;
    let scores = (q.matmul(&k.t()?)? * f64::from(shape.scale()))?.broadcast_add(&causal_mask(length, qkv)?)?;
    let out = softmax(&scores)?.matmul(&v)?;
    let out = out.transpose(1, 2)?.reshape((batch * length, ql))?;
    out.index_select(&Tensor::from_vec(unpad, tokens, device)?, 0)
}

/// `[batch, kv_heads, length, d]` to `[batch, heads, length, d]`.
pub(crate) fn repeat_heads(x: &Tensor, shape: AttentionShape) -> Result<Tensor> {
    let (b, kv, l, d) = x.dims4()?;
    let group = shape.heads / shape.kv_heads;
    if group == 1 {
        return x.contiguous();
    }
    x.unsqueeze(2)?.broadcast_as((b, kv, group, l, d))?.reshape((b, shape.heads, l, d))
}

/// `[rows, 2]`: log-probability of each target and entropy of `softmax(x · Wᵀ)`, nats.
pub(crate) fn linear_logprob(x: &Tensor, w: &Tensor, targets: &[u32]) -> Result<Tensor> {
    let logits = x.matmul(&w.t()?)?;
    let max = logits.max_keepdim(D::Minus1)?.detach();
    let centred = logits.broadcast_sub(&max)?;
    let exp = centred.exp()?;
    let sum = exp.sum_keepdim(D::Minus1)?;
    let log_sum = sum.log()?;
    let ids = Tensor::from_slice(targets, (targets.len(), 1), x.device())?;
    let logprob = centred.gather(&ids, 1)?.sub(&log_sum)?;
    let mean = exp.mul(&centred)?.sum_keepdim(D::Minus1)?.div(&sum)?;
    Tensor::cat(&[logprob, log_sum.sub(&mean)?], 1)?.to_dtype(DType::F32)
}

/// A row index as candle wants it.
pub(crate) fn index(i: usize) -> Result<u32> {
    u32::try_from(i).map_err(candle_core::Error::wrap)
}
