//! Causal self-attention of whole packed sequences, with rotation inside, forward and backward.

use std::sync::{Mutex, PoisonError};

use super::attention::{
    AttentionShape, BLOCK, attend, block_dots, softmax_in_place, store_rows, store_transposed, weighted_sum,
};
use super::math::axpy;
use super::rope::{RopeTable, rotate};
use super::simd_fn;
use crate::par;

/// Scratch of one sequence: rotated queries and blocked keys and values.
struct Blocked {
    q: Vec<f32>,
    k_t: Vec<f32>,
    v: Vec<f32>,
    block_len: usize,
}

impl Blocked {
    /// Rotates and stores the rows of `qkv [len, q | k | v]`, positions from 0.
    fn new(qkv: &[f32], shape: AttentionShape, rope: &RopeTable) -> Self {
        let (ql, kl, width) = (shape.q_len(), shape.kv_len(), shape.qkv_len());
        let len = qkv.len() / width;
        let block_len = shape.block_len();
        let blocks = len.div_ceil(BLOCK);
        let mut q = vec![0f32; len * ql];
        let mut k_t = vec![0f32; blocks * block_len];
        let mut v = vec![0f32; blocks * block_len];
        let mut k_row = vec![0f32; kl];
        for (t, row) in qkv.chunks_exact(width).enumerate() {
            let (cos, sin) = rope.row(t);
            let (b, slot) = (t / BLOCK * block_len, t % BLOCK);
            let q_row = &mut q[t * ql..(t + 1) * ql];
            q_row.copy_from_slice(&row[..ql]);
            rotate(q_row, shape.head_dim, cos, sin, false);
            k_row.copy_from_slice(&row[ql..ql + kl]);
            rotate(&mut k_row, shape.head_dim, cos, sin, false);
            store_transposed(&k_row, slot, &mut k_t[b..b + block_len]);
            store_rows(&row[ql + kl..], slot, shape.head_dim, &mut v[b..b + block_len]);
        }
        Self { q, k_t, v, block_len }
    }

    fn blocks<'a>(&self, of: &'a [f32]) -> Vec<&'a [f32]> {
        of.chunks_exact(self.block_len.max(1)).collect()
    }
}

/// Self-attention of one sequence: `qkv [len, q | k | v]` unrotated, `out [len, heads · head_dim]`.
fn sequence_forward(qkv: &[f32], shape: AttentionShape, rope: &RopeTable, out: &mut [f32]) {
    let blocked = Blocked::new(qkv, shape, rope);
    let (keys, values) = (blocked.blocks(&blocked.k_t), blocked.blocks(&blocked.v));
    let mut scores = vec![0f32; keys.len() * BLOCK];
    let ql = shape.q_len();
    for (t, (q, out)) in blocked.q.chunks_exact(ql).zip(out.chunks_exact_mut(ql)).enumerate() {
        let n = (t + 1).div_ceil(BLOCK);
        attend(q, &keys[..n], &values[..n], t + 1, shape, &mut scores, out);
    }
}

/// The sequence's tensors that the backward pass of one head reads.
#[derive(Clone, Copy)]
struct HeadInputs<'a> {
    q: &'a [f32],
    g: &'a [f32],
    keys_t: &'a [&'a [f32]],
    values_t: &'a [&'a [f32]],
    keys: &'a [&'a [f32]],
    shape: AttentionShape,
    head: usize,
}

simd_fn! {
    /// Adds one query head's gradients: `dq [len, heads·d]`, `dk` and `dv [kv_heads][len][d]`.
    fn head_backward(inp: HeadInputs<'_>, p: &mut [f32], dp: &mut [f32], dq: &mut [f32], dk: &mut [f32], dv: &mut [f32]) = head_backward_body
}

#[inline(always)]
fn head_backward_body<const FMA: bool>(
    inp: HeadInputs<'_>,
    p: &mut [f32],
    dp: &mut [f32],
    dq: &mut [f32],
    dk: &mut [f32],
    dv: &mut [f32],
) {
    let (d, ql) = (inp.shape.head_dim, inp.shape.q_len());
    let at = inp.head / (inp.shape.heads / inp.shape.kv_heads) * d * BLOCK;
    let scale = inp.shape.scale();
    let col = inp.head * d;
    let len = inp.q.len() / ql;
    for t in 0..len {
        let n = (t + 1).div_ceil(BLOCK);
        let (p, dp) = (&mut p[..n * BLOCK], &mut dp[..n * BLOCK]);
        let q = &inp.q[t * ql + col..t * ql + col + d];
        let g = &inp.g[t * ql + col..t * ql + col + d];
        block_dots::<FMA>(q, &inp.keys_t[..n], at, scale, p);
        let inv = 1.0 / softmax_in_place::<FMA>(p, t + 1);
        for p in p.iter_mut() {
            *p *= inv;
        }
        block_dots::<FMA>(g, &inp.values_t[..n], at, 1.0, dp);
        let delta = super::math::dot::<FMA>(p, dp);
        for (dp, &p) in dp.iter_mut().zip(p.iter()) {
            *dp = p * (*dp - delta) * scale;
        }
        weighted_sum::<FMA>(dp, &inp.keys[..n], at, d, 1.0, &mut dq[t * ql + col..t * ql + col + d]);
        for (j, (dk, dv)) in dk.chunks_exact_mut(d).zip(dv.chunks_exact_mut(d)).take(t + 1).enumerate() {
            axpy::<FMA>(dp[j], q, dk);
            axpy::<FMA>(p[j], g, dv);
        }
    }
}

/// Gradient of [`sequence_forward`]: `dqkv [len, q | k | v]` from `g [len, heads · head_dim]`.
fn sequence_backward(qkv: &[f32], g: &[f32], shape: AttentionShape, rope: &RopeTable, dqkv: &mut [f32]) {
    let (ql, kl, width, d) = (shape.q_len(), shape.kv_len(), shape.qkv_len(), shape.head_dim);
    let len = qkv.len() / width;
    let blocked = Blocked::new(qkv, shape, rope);
    let mut v_t = vec![0f32; blocked.v.len()];
    let mut k = vec![0f32; blocked.v.len()];
    let mut k_row = vec![0f32; kl];
    for (t, row) in qkv.chunks_exact(width).enumerate() {
        let (b, slot) = (t / BLOCK * blocked.block_len, t % BLOCK);
        store_transposed(&row[ql + kl..], slot, &mut v_t[b..b + blocked.block_len]);
        let (cos, sin) = rope.row(t);
        k_row.copy_from_slice(&row[ql..ql + kl]);
        rotate(&mut k_row, d, cos, sin, false);
        store_rows(&k_row, slot, d, &mut k[b..b + blocked.block_len]);
    }
    let (keys_t, values_t, keys) = (blocked.blocks(&blocked.k_t), blocked.blocks(&v_t), blocked.blocks(&k));
    let mut scratch = [vec![0f32; keys.len() * BLOCK], vec![0f32; keys.len() * BLOCK]];
    let [p, dp] = &mut scratch;
    let mut dq = vec![0f32; len * ql];
    let mut dk = vec![0f32; len * kl];
    let mut dv = vec![0f32; len * kl];
    let group = shape.heads / shape.kv_heads;
    for head in 0..shape.heads {
        let of = head / group * len * d..(head / group + 1) * len * d;
        let inputs = HeadInputs { q: &blocked.q, g, keys_t: &keys_t, values_t: &values_t, keys: &keys, shape, head };
        head_backward(inputs, p, dp, &mut dq, &mut dk[of.clone()], &mut dv[of]);
    }
    for (t, row) in dqkv.chunks_exact_mut(width).enumerate() {
        let (cos, sin) = rope.row(t);
        row[..ql].copy_from_slice(&dq[t * ql..(t + 1) * ql]);
        rotate(&mut row[..ql], d, cos, sin, true);
        for h in 0..shape.kv_heads {
            let from = (h * len + t) * d;
            row[ql + h * d..ql + (h + 1) * d].copy_from_slice(&dk[from..from + d]);
            row[ql + kl + h * d..ql + kl + (h + 1) * d].copy_from_slice(&dv[from..from + d]);
        }
        rotate(&mut row[ql..ql + kl], d, cos, sin, true);
    }
}

/// Calls `f(from, to, rows of this sequence)` for each sequence of a packed `[tokens, width]`, in parallel.
fn each_sequence(offsets: &[usize], width: usize, out: &mut [f32], f: impl Fn(usize, usize, &mut [f32]) + Sync + Send) {
    let mut parts = Vec::with_capacity(offsets.len());
    let mut rest = out;
    for w in offsets.windows(2) {
        let (part, tail) = rest.split_at_mut((w[1] - w[0]) * width);
        parts.push(Mutex::new((w[0], w[1], part)));
        rest = tail;
    }
    par::for_each(parts.len(), |i| {
        let mut part = parts[i].lock().unwrap_or_else(PoisonError::into_inner);
        let (from, to, out) = &mut *part;
        f(*from, *to, out);
    });
}

/// Self-attention of packed sequences: `qkv [tokens, q | k | v]` unrotated, to `out [tokens, heads · head_dim]`.
///
/// `offsets` are the sequences' bounds, 0 first and the token count last; positions start at 0 in each.
pub(crate) fn packed_forward(qkv: &[f32], offsets: &[usize], shape: AttentionShape, rope: &RopeTable, out: &mut [f32]) {
    let width = shape.qkv_len();
    each_sequence(offsets, shape.q_len(), out, |from, to, out| {
        sequence_forward(&qkv[from * width..to * width], shape, rope, out);
    });
}

/// Gradient of [`packed_forward`]: `dqkv [tokens, q | k | v]` from `g [tokens, heads · head_dim]`.
pub(crate) fn packed_backward(
    qkv: &[f32],
    g: &[f32],
    offsets: &[usize],
    shape: AttentionShape,
    rope: &RopeTable,
    dqkv: &mut [f32],
) {
    let (width, ql) = (shape.qkv_len(), shape.q_len());
    each_sequence(offsets, width, dqkv, |from, to, dqkv| {
        sequence_backward(&qkv[from * width..to * width], &g[from * ql..to * ql], shape, rope, dqkv);
    });
}
