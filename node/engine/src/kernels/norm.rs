//! RMSNorm, forward and backward, over rows.

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
    /// `dx` of one block of rows, and its addition to `dw`.
    fn backward_rows(x: &[f32], w: &[f32], g: &[f32], eps: f32, dx: &mut [f32], dw: &mut [f32]) = backward_body
}

#[inline(always)]
#[expect(clippy::cast_precision_loss, reason = "a row is far shorter than 2^24")]
fn backward_body<const FMA: bool>(x: &[f32], w: &[f32], g: &[f32], eps: f32, dx: &mut [f32], dw: &mut [f32]) {
    let n = w.len();
    let mut gw = vec![0f32; n];
    for ((x, g), dx) in x.chunks_exact(n).zip(g.chunks_exact(n)).zip(dx.chunks_exact_mut(n)) {
        let r = inv_rms(x, eps);
        for i in 0..n {
            gw[i] = g[i] * w[i];
        }
        let c = dot::<FMA>(&gw, x) * r * r * r / n as f32;
        for i in 0..n {
            dx[i] = fma::<FMA>(gw[i], r, -x[i] * c);
        }
        for i in 0..n {
            dw[i] = fma::<FMA>(g[i] * x[i], r, dw[i]);
        }
    }
}

/// Gradients of [`forward`]: fills `dx`, returns `dw` (summed over rows in a fixed order).
pub(crate) fn backward(x: &[f32], w: &[f32], g: &[f32], eps: f32, dx: &mut [f32]) -> Vec<f32> {
    let n = w.len();
    let mut dw = vec![0f32; n];
    if n > 0 {
        backward_rows(x, w, g, eps, dx, &mut dw);
    }
    dw
}
