//! RMSNorm, forward and backward, over rows.

use std::sync::{Mutex, PoisonError};

use super::attention::AttentionShape;
use super::math::{dot, fma, sum_map};
use super::simd_fn;
use crate::par;

simd_fn! {
    /// One block of rows: `out = x / sqrt(mean(x²) + eps) * w`; `w.len()` is the row length.
    fn forward_rows(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) = forward_body
}

/// `1 / sqrt(mean(x²) + eps)` of a row.
#[inline(always)]
#[expect(clippy::cast_precision_loss, reason = "a row is far shorter than 2^24")]
fn inv_rms(row: &[f32], eps: f32) -> f32 {
    1.0 / (sum_map(row, |v| v * v) / row.len() as f32 + eps).sqrt()
}

#[inline(always)]
fn forward_body<const FMA: bool>(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    let n = w.len();
    for (row, out) in x.chunks_exact(n).zip(out.chunks_exact_mut(n)) {
        let r = inv_rms(row, eps);
        for ((o, &v), &w) in out.iter_mut().zip(row).zip(w) {
            *o = v * r * w;
        }
    }
}

/// RMSNorm of the rows of `x [rows, w.len()]`.
///
/// Zhang and Sennrich, arXiv:1910.07467; `x · r · w` in this order, in f32, as Llama does it.
pub(crate) fn forward(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    let n = w.len();
    if n == 0 {
        return;
    }
    let rows = par::rows_per_chunk(x.len() / n);
    par::chunks_mut(out, rows * n, |i, out| {
        let from = i * rows * n;
        forward_rows(&x[from..from + out.len()], w, eps, out);
    });
}

simd_fn! {
    /// Adds one block of rows to `dx` and `dw`, and fills `y` with the forward result.
    fn backward_rows(x: &[f32], w: &[f32], g: &[f32], eps: f32, dx: &mut [f32], dw: &mut [f32], y: &mut [f32]) = backward_body
}

#[inline(always)]
#[expect(clippy::cast_precision_loss, reason = "a row is far shorter than 2^24")]
fn backward_body<const FMA: bool>(
    x: &[f32],
    w: &[f32],
    g: &[f32],
    eps: f32,
    dx: &mut [f32],
    dw: &mut [f32],
    y: &mut [f32],
) {
    let n = w.len();
    let rows = x.chunks_exact(n).zip(g.chunks_exact(n)).zip(dx.chunks_exact_mut(n)).zip(y.chunks_exact_mut(n));
    for (((x, g), dx), y) in rows {
        let r = inv_rms(x, eps);
        for ((y, &x), &w) in y.iter_mut().zip(x).zip(w) {
            *y = x * r * w;
        }
        // Σ g·w·x / r = Σ g·y / r²; the factor of x in dx is then r² · Σ g·y / n.
        let c = dot::<FMA>(g, y) * r * r / n as f32;
        for (((dx, &x), &g), &w) in dx.iter_mut().zip(x).zip(g).zip(w) {
            *dx += fma::<FMA>(g * w, r, -x * c);
        }
        for ((dw, &x), &g) in dw.iter_mut().zip(x).zip(g) {
            *dw = fma::<FMA>(g * x, r, *dw);
        }
    }
}

/// Rows whose share of `dw` is summed together.
const ROWS_PER_SUM: usize = 64;

/// Gradients of [`forward`]: adds to `dx [rows, n]` and to `dw [n]`, and fills `y` with the forward result.
///
/// `dw` is summed over blocks of 64 rows, in order, whatever the number of threads.
pub(crate) fn backward(x: &[f32], w: &[f32], g: &[f32], eps: f32, dx: &mut [f32], dw: &mut [f32], y: &mut [f32]) {
    let n = w.len();
    if n == 0 {
        return;
    }
    let block = ROWS_PER_SUM * n;
    let blocks = x.len().div_ceil(block);
    let mut partial = vec![0f32; blocks * n];
    let parts: Vec<_> =
        dx.chunks_mut(block).zip(y.chunks_mut(block)).zip(partial.chunks_mut(n)).map(Mutex::new).collect();
    par::for_each(blocks, |i| {
        let mut part = parts[i].lock().unwrap_or_else(PoisonError::into_inner);
        let ((dx, y), dw) = &mut *part;
        let at = i * block..i * block + dx.len();
        backward_rows(&x[at.clone()], w, &g[at], eps, dx, dw, y);
    });
    for part in partial.chunks_exact(n) {
        dw.iter_mut().zip(part).for_each(|(d, &p)| *d += p);
    }
}

simd_fn! {
    /// [`forward_rows`] in place.
    fn forward_rows_in_place(x: &mut [f32], w: &[f32], eps: f32) = in_place_body
}

#[inline(always)]
fn in_place_body<const FMA: bool>(x: &mut [f32], w: &[f32], eps: f32) {
    for row in x.chunks_exact_mut(w.len()) {
        let r = inv_rms(row, eps);
        for (v, &w) in row.iter_mut().zip(w) {
            *v = *v * r * w;
        }
    }
}

/// RMSNorm of each head of q and of k in rows `x [tokens, q | k | v]`, in place, as Qwen3 does it before the rotation.
///
/// `w` is q's weight and k's, `head_dim` each, shared by all heads.
pub(crate) fn heads_forward(x: &mut [f32], w: &[f32], eps: f32, shape: AttentionShape) {
    let (ql, kl, width) = (shape.q_len(), shape.kv_len(), shape.qkv_len());
    let (wq, wk) = w.split_at(shape.head_dim);
    let rows = par::rows_per_chunk(x.len() / width);
    par::chunks_mut(x, rows * width, |_, x| {
        for row in x.chunks_exact_mut(width) {
            forward_rows_in_place(&mut row[..ql], wq, eps);
            forward_rows_in_place(&mut row[ql..ql + kl], wk, eps);
        }
    });
}

/// Gradients of [`heads_forward`]: turns `g [tokens, q | k | v]` from the gradient of its result into that of its input
/// `x`, and adds to `dw [2 · head_dim]`.
///
/// `dw` is summed over blocks of 64 tokens, in order, whatever the number of threads.
pub(crate) fn heads_backward(x: &[f32], w: &[f32], eps: f32, shape: AttentionShape, g: &mut [f32], dw: &mut [f32]) {
    let (ql, qk, width) = (shape.q_len(), shape.q_len() + shape.kv_len(), shape.qkv_len());
    let (wq, wk) = w.split_at(shape.head_dim);
    let block = ROWS_PER_SUM * width;
    let mut partial = vec![0f32; x.len().div_ceil(block) * w.len()];
    let parts: Vec<_> = g.chunks_mut(block).zip(partial.chunks_mut(w.len())).map(Mutex::new).collect();
    par::for_each(parts.len(), |i| {
        let mut part = parts[i].lock().unwrap_or_else(PoisonError::into_inner);
        let (g, dw) = &mut *part;
        let (dwq, dwk) = dw.split_at_mut(shape.head_dim);
        let (mut dx, mut y) = (vec![0f32; qk], vec![0f32; qk]);
        for (x, g) in x[i * block..].chunks_exact(width).zip(g.chunks_exact_mut(width)) {
            dx.fill(0.0);
            backward_rows(&x[..ql], wq, &g[..ql], eps, &mut dx[..ql], dwq, &mut y[..ql]);
            backward_rows(&x[ql..qk], wk, &g[ql..qk], eps, &mut dx[ql..], dwk, &mut y[ql..]);
            g[..qk].copy_from_slice(&dx);
        }
    });
    for part in partial.chunks_exact(w.len()) {
        dw.iter_mut().zip(part).for_each(|(d, &p)| *d += p);
    }
}
