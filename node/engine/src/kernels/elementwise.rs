//! SwiGLU over fused gate|up rows, and vector helpers.

use std::sync::{Mutex, PoisonError};

use super::math::{exp, fma};
use super::simd_fn;
use crate::par;

simd_fn! {
    /// `out = silu(gate) * up` for rows `[gate | up]`, each half `inner` long.
    fn swiglu_rows(x: &[f32], inner: usize, out: &mut [f32]) = swiglu_body
}

#[inline(always)]
fn swiglu_body<const FMA: bool>(x: &[f32], inner: usize, out: &mut [f32]) {
    for (row, out) in x.chunks_exact(2 * inner).zip(out.chunks_exact_mut(inner)) {
        let (gate, up) = row.split_at(inner);
        for ((o, &g), &u) in out.iter_mut().zip(gate).zip(up) {
            *o = g / (1.0 + exp::<FMA>(-g)) * u;
        }
    }
}

/// SwiGLU (arXiv:2002.05202) of `x [rows, 2·inner]` into `out [rows, inner]`.
pub(crate) fn swiglu(x: &[f32], inner: usize, out: &mut [f32]) {
    if inner == 0 {
        return;
    }
    let rows = par::rows_per_chunk(out.len() / inner);
    par::chunks_mut(out, rows * inner, |i, out| {
        let from = i * rows * 2 * inner;
        swiglu_rows(&x[from..from + 2 * out.len()], inner, out);
    });
}

simd_fn! {
    fn swiglu_grad_rows(x: &[f32], g: &[f32], inner: usize, dx: &mut [f32], y: &mut [f32]) = swiglu_grad_body
}

#[inline(always)]
fn swiglu_grad_body<const FMA: bool>(x: &[f32], g: &[f32], inner: usize, dx: &mut [f32], y: &mut [f32]) {
    let rows = x.chunks_exact(2 * inner).zip(dx.chunks_exact_mut(2 * inner)).zip(g.chunks_exact(inner));
    for (((row, dx), g), y) in rows.zip(y.chunks_exact_mut(inner)) {
        let (gate, up) = row.split_at(inner);
        let (dgate, dup) = dx.split_at_mut(inner);
        let inputs = gate.iter().zip(up).zip(g);
        let outputs = dgate.iter_mut().zip(dup).zip(y);
        for (((&gate, &up), &g), ((dgate, dup), y)) in inputs.zip(outputs) {
            let s = 1.0 / (1.0 + exp::<FMA>(-gate));
            let silu = gate * s;
            *y = silu * up;
            *dup = g * silu;
            *dgate = g * up * fma::<FMA>(silu, 1.0 - s, s);
        }
    }
}

/// Gradient of [`swiglu`]: fills `dx [rows, 2·inner]` from `g [rows, inner]`, and `y` with the forward result.
pub(crate) fn swiglu_grad(x: &[f32], g: &[f32], inner: usize, dx: &mut [f32], y: &mut [f32]) {
    if inner == 0 {
        return;
    }
    let rows = par::rows_per_chunk(g.len() / inner);
    let chunk = rows * inner;
    let parts: Vec<_> = dx.chunks_mut(2 * chunk).zip(y.chunks_mut(chunk)).map(Mutex::new).collect();
    par::for_each(parts.len(), |i| {
        let mut part = parts[i].lock().unwrap_or_else(PoisonError::into_inner);
        let (dx, y) = &mut *part;
        let from = i * chunk;
        swiglu_grad_rows(&x[2 * from..2 * from + dx.len()], &g[from..from + y.len()], inner, dx, y);
    });
}

/// `y += x`, in parallel for long vectors.
pub(crate) fn add_assign(y: &mut [f32], x: &[f32]) {
    const CHUNK: usize = 1 << 16;
    par::chunks_mut(y, CHUNK, |i, y| {
        let from = i * CHUNK;
        for (y, &x) in y.iter_mut().zip(&x[from..]) {
            *y += x;
        }
    });
}

/// Every row of `y` becomes `row`.
pub(crate) fn fill_rows(row: &[f32], y: &mut [f32]) {
    y.chunks_exact_mut(row.len().max(1)).for_each(|y| y.copy_from_slice(row));
}

/// `sums[c] += Σ_r x[r, c]` for `x [rows, width]`; each sum walks the rows in order, whatever the number of threads.
pub(crate) fn add_column_sums(x: &[f32], width: usize, sums: &mut [f32]) {
    const COLUMNS: usize = 64;
    par::chunks_mut(sums, COLUMNS, |i, sums| {
        for row in x.chunks_exact(width) {
            let row = &row[i * COLUMNS..i * COLUMNS + sums.len()];
            sums.iter_mut().zip(row).for_each(|(s, &v)| *s += v);
        }
    });
}

/// Sum of squares in f64, in a fixed order.
pub(crate) fn sum_squares(x: &[f32]) -> f64 {
    let mut lanes = [0f64; 8];
    let mut chunks = x.chunks_exact(8);
    for c in &mut chunks {
        for l in 0..8 {
            lanes[l] += f64::from(c[l]) * f64::from(c[l]);
        }
    }
    let tail: f64 = chunks.remainder().iter().map(|&v| f64::from(v) * f64::from(v)).sum();
    lanes.iter().sum::<f64>() + tail
}
