//! Causal self-attention of packed sequences, with rotation inside, forward and backward.
//!
//! Sequences may share prefixes ([`Segment`]): each token is there once, and sees its own way from the root. Keys and
//! values are gathered along that way into blocks by position, so a token's sums are those of its sequence alone.

use std::sync::{Mutex, PoisonError};

use super::attention::{
    AttentionShape, BLOCK, attend, block_dots, softmax_in_place, store_rows, store_transposed, weighted_sum,
};
use super::math::axpy;
use super::rope::{RopeTable, rotate};
use super::simd_fn;
use crate::packing::Segment;
use crate::par;

/// Scratch of one segment: its rotated queries, and blocked keys and values from position 0.
struct Blocked {
    q: Vec<f32>,
    k_t: Vec<f32>,
    v: Vec<f32>,
    block_len: usize,
}

impl Blocked {
    /// Rotates and stores rows of `qkv [tokens, q | k | v]` by their positions.
    fn new(qkv: &[f32], segment: &Segment, shape: AttentionShape, rope: &RopeTable) -> Self {
        let (ql, kl, width) = (shape.q_len(), shape.kv_len(), shape.qkv_len());
        let start = segment.start();
        let len = start + segment.rows.len();
        let block_len = shape.block_len();
        let blocks = len.div_ceil(BLOCK);
        let mut q = vec![0f32; segment.rows.len() * ql];
        let mut k_t = vec![0f32; blocks * block_len];
        let mut v = vec![0f32; blocks * block_len];
        let mut k_row = vec![0f32; kl];
        for (t, row) in segment.path().enumerate() {
            let row = &qkv[row * width..(row + 1) * width];
            let (cos, sin) = rope.row(t);
            let (b, slot) = (t / BLOCK * block_len, t % BLOCK);
            if let Some(own) = t.checked_sub(start) {
                let q_row = &mut q[own * ql..(own + 1) * ql];
                q_row.copy_from_slice(&row[..ql]);
                rotate(q_row, shape.head_dim, cos, sin, false);
            }
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

/// Self-attention of one segment: `qkv [tokens, q | k | v]` of the batch, unrotated; `out [own, heads · head_dim]`.
fn segment_forward(qkv: &[f32], segment: &Segment, shape: AttentionShape, rope: &RopeTable, out: &mut [f32]) {
    let blocked = Blocked::new(qkv, segment, shape, rope);
    let (keys, values) = (blocked.blocks(&blocked.k_t), blocked.blocks(&blocked.v));
    let mut scores = vec![0f32; keys.len() * BLOCK];
    let ql = shape.q_len();
    let rows = blocked.q.chunks_exact(ql).zip(out.chunks_exact_mut(ql));
    for (seen, (q, out)) in (segment.start() + 1..).zip(rows) {
        let n = seen.div_ceil(BLOCK);
        attend(q, &keys[..n], &values[..n], seen, shape, &mut scores, out);
    }
}

/// The segment's tensors that the backward pass of one head reads.
#[derive(Clone, Copy)]
struct HeadInputs<'a> {
    q: &'a [f32],
    g: &'a [f32],
    keys_t: &'a [&'a [f32]],
    values_t: &'a [&'a [f32]],
    keys: &'a [&'a [f32]],
    shape: AttentionShape,
    head: usize,
    /// Position of the first query.
    start: usize,
}

simd_fn! {
    /// Adds one query head's gradients: `dq [own, heads·d]`, `dk` and `dv [positions, d]` of its key head.
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
        let seen = inp.start + t + 1;
        let n = seen.div_ceil(BLOCK);
        let (p, dp) = (&mut p[..n * BLOCK], &mut dp[..n * BLOCK]);
        let q = &inp.q[t * ql + col..t * ql + col + d];
        let g = &inp.g[t * ql + col..t * ql + col + d];
        block_dots::<FMA>(q, &inp.keys_t[..n], at, scale, p);
        let inv = 1.0 / softmax_in_place::<FMA>(p, seen);
        for p in p.iter_mut() {
            *p *= inv;
        }
        block_dots::<FMA>(g, &inp.values_t[..n], at, 1.0, dp);
        let delta = super::math::dot::<FMA>(p, dp);
        for (dp, &p) in dp.iter_mut().zip(p.iter()) {
            *dp = p * (*dp - delta) * scale;
        }
        weighted_sum::<FMA>(dp, &inp.keys[..n], at, d, 1.0, &mut dq[t * ql + col..t * ql + col + d]);
        for (j, (dk, dv)) in dk.chunks_exact_mut(d).zip(dv.chunks_exact_mut(d)).take(seen).enumerate() {
            axpy::<FMA>(dp[j], q, dk);
            axpy::<FMA>(p[j], g, dv);
        }
    }
}

/// Gradient of [`segment_forward`] from `g [tokens, heads · head_dim]` of the batch: fills `dqkv [own, q | k | v]`, and
/// returns what the keys and values of the prefix get, `[prefix, k | v]`.
fn segment_backward(
    qkv: &[f32],
    g: &[f32],
    segment: &Segment,
    shape: AttentionShape,
    rope: &RopeTable,
    dqkv: &mut [f32],
) -> Vec<f32> {
    let (ql, kl, width, d) = (shape.q_len(), shape.kv_len(), shape.qkv_len(), shape.head_dim);
    let (start, own) = (segment.start(), segment.rows.len());
    let len = start + own;
    let blocked = Blocked::new(qkv, segment, shape, rope);
    let mut v_t = vec![0f32; blocked.v.len()];
    let mut k = vec![0f32; blocked.v.len()];
    let mut k_row = vec![0f32; kl];
    for (t, row) in segment.path().enumerate() {
        let row = &qkv[row * width..(row + 1) * width];
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
    let mut dq = vec![0f32; own * ql];
    let mut dk = vec![0f32; len * kl];
    let mut dv = vec![0f32; len * kl];
    let group = shape.heads / shape.kv_heads;
    let g = &g[segment.rows.start * ql..segment.rows.end * ql];
    for head in 0..shape.heads {
        let of = head / group * len * d..(head / group + 1) * len * d;
        let (keys_t, values_t, keys) = (&keys_t[..], &values_t[..], &keys[..]);
        let inputs = HeadInputs { q: &blocked.q, g, keys_t, values_t, keys, shape, head, start };
        head_backward(inputs, p, dp, &mut dq, &mut dk[of.clone()], &mut dv[of]);
    }
    // From heads to rows, and back from the rotation.
    let keys_and_values = |t: usize, row: &mut [f32]| {
        let (cos, sin) = rope.row(t);
        for h in 0..shape.kv_heads {
            let from = (h * len + t) * d;
            row[h * d..(h + 1) * d].copy_from_slice(&dk[from..from + d]);
            row[kl + h * d..kl + (h + 1) * d].copy_from_slice(&dv[from..from + d]);
        }
        rotate(&mut row[..kl], d, cos, sin, true);
    };
    for (t, row) in dqkv.chunks_exact_mut(width).enumerate() {
        let (cos, sin) = rope.row(start + t);
        row[..ql].copy_from_slice(&dq[t * ql..(t + 1) * ql]);
        rotate(&mut row[..ql], d, cos, sin, true);
        keys_and_values(start + t, &mut row[ql..]);
    }
    let mut of_prefix = vec![0f32; start * 2 * kl];
    for (t, row) in of_prefix.chunks_exact_mut(2 * kl).enumerate() {
        keys_and_values(t, row);
    }
    of_prefix
}

/// Calls `f(index, rows of this segment)` for each segment of a packed `[tokens, width]`, in parallel.
fn each_segment(segments: &[Segment], width: usize, out: &mut [f32], f: impl Fn(usize, &mut [f32]) + Sync + Send) {
    let mut parts = Vec::with_capacity(segments.len());
    let mut rest = out;
    for s in segments {
        let (part, tail) = rest.split_at_mut(s.rows.len() * width);
        parts.push(Mutex::new(part));
        rest = tail;
    }
    par::for_each(parts.len(), |i| f(i, &mut parts[i].lock().unwrap_or_else(PoisonError::into_inner)));
}

/// Self-attention of packed sequences: `qkv [tokens, q | k | v]` unrotated, to `out [tokens, heads · head_dim]`.
pub(crate) fn packed_forward(
    qkv: &[f32],
    segments: &[Segment],
    shape: AttentionShape,
    rope: &RopeTable,
    out: &mut [f32],
) {
    each_segment(segments, shape.q_len(), out, |i, out| segment_forward(qkv, &segments[i], shape, rope, out));
}

/// Gradient of [`packed_forward`]: `dqkv [tokens, q | k | v]` from `g [tokens, heads · head_dim]`.
///
/// What segments add to their prefixes is summed in their order, whatever the number of threads.
pub(crate) fn packed_backward(
    qkv: &[f32],
    g: &[f32],
    segments: &[Segment],
    shape: AttentionShape,
    rope: &RopeTable,
    dqkv: &mut [f32],
) {
    let (ql, kl, width) = (shape.q_len(), shape.kv_len(), shape.qkv_len());
    let of_prefixes: Vec<Mutex<Vec<f32>>> = segments.iter().map(|_| Mutex::default()).collect();
    each_segment(segments, width, dqkv, |i, dqkv| {
        let of_prefix = segment_backward(qkv, g, &segments[i], shape, rope, dqkv);
        *of_prefixes[i].lock().unwrap_or_else(PoisonError::into_inner) = of_prefix;
    });
    for (segment, of_prefix) in segments.iter().zip(of_prefixes) {
        let of_prefix = of_prefix.into_inner().unwrap_or_else(PoisonError::into_inner);
        for (row, add) in segment.path().zip(of_prefix.chunks_exact(2 * kl)) {
            let row = &mut dqkv[row * width + ql..(row + 1) * width];
            row.iter_mut().zip(add).for_each(|(r, &a)| *r += a);
        }
    }
}
