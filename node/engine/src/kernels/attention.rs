//! Causal attention of one query token over keys and values stored in blocks of sixteen tokens.
//!
//! Training and decoding call the same function on the same layout, so that a token's log-probability in the
//! trainer has the bits it had when it was sampled, as long as the weights are equal.

use super::math::{LANES, exp, fma, lane_sum, max_or_nan};
use super::simd_fn;

/// Tokens of one block.
pub(crate) const BLOCK: usize = LANES;

/// Head counts and width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AttentionShape {
    /// Query heads.
    pub(crate) heads: usize,
    /// Key and value heads; a divisor of `heads`.
    pub(crate) kv_heads: usize,
    /// Width of each head.
    pub(crate) head_dim: usize,
}

impl AttentionShape {
    /// Floats of the keys (or of the values) of one block.
    pub(crate) fn block_len(&self) -> usize {
        self.kv_heads * self.head_dim * BLOCK
    }

    /// Width of a query row.
    pub(crate) fn q_len(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of a key (or value) row.
    pub(crate) fn kv_len(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Width of a fused `q | k | v` row.
    pub(crate) fn qkv_len(&self) -> usize {
        self.q_len() + 2 * self.kv_len()
    }

    /// `1 / sqrt(head_dim)`.
    #[expect(clippy::cast_precision_loss, reason = "a head is narrower than 2^24")]
    pub(crate) fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }
}

/// Stores a row `[kv_heads, head_dim]` as token `slot` of a block laid out `[kv_heads][head_dim][16]`.
#[inline(always)]
pub(crate) fn store_transposed(row: &[f32], slot: usize, block: &mut [f32]) {
    for (lane, &v) in block.chunks_exact_mut(BLOCK).zip(row) {
        lane[slot] = v;
    }
}

/// Stores a row `[kv_heads, head_dim]` as token `slot` of a block laid out `[kv_heads][16][head_dim]`.
#[inline(always)]
pub(crate) fn store_rows(row: &[f32], slot: usize, head_dim: usize, block: &mut [f32]) {
    for (head, v) in block.chunks_exact_mut(BLOCK * head_dim).zip(row.chunks_exact(head_dim)) {
        head[slot * head_dim..(slot + 1) * head_dim].copy_from_slice(v);
    }
}

/// `scores[j] = scale · q · K[j]` for one head; `scores` is padded to whole blocks.
#[inline(always)]
pub(crate) fn block_dots<const FMA: bool>(q: &[f32], blocks: &[&[f32]], at: usize, scale: f32, scores: &mut [f32]) {
    let width = q.len() * BLOCK;
    for (block, out) in blocks.iter().zip(scores.chunks_exact_mut(BLOCK)) {
        let keys = &block[at..at + width];
        let mut sums = [[0f32; BLOCK]; 2];
        let mut pairs = keys.chunks_exact(2 * BLOCK);
        for (two, q) in (&mut pairs).zip(q.chunks_exact(2)) {
            for l in 0..BLOCK {
                sums[0][l] = fma::<FMA>(q[0], two[l], sums[0][l]);
                sums[1][l] = fma::<FMA>(q[1], two[BLOCK + l], sums[1][l]);
            }
        }
        if q.len() % 2 == 1 {
            let last = q[q.len() - 1];
            for (s, &k) in sums[0].iter_mut().zip(pairs.remainder()) {
                *s = fma::<FMA>(last, k, *s);
            }
        }
        for l in 0..BLOCK {
            out[l] = (sums[0][l] + sums[1][l]) * scale;
        }
    }
}

/// Turns `scores[..len]` into unnormalised probabilities, zeroes the padding, returns the sum.
#[inline(always)]
pub(crate) fn softmax_in_place<const FMA: bool>(scores: &mut [f32], len: usize) -> f32 {
    let max = max_or_nan(&scores[..len]);
    let mut lanes = [0f32; LANES];
    for s in &mut scores[len..] {
        *s = max;
    }
    for c in scores.chunks_exact_mut(LANES) {
        for s in c.iter_mut() {
            *s = exp::<FMA>(*s - max);
        }
    }
    for s in &mut scores[len..] {
        *s = 0.0;
    }
    for c in scores.chunks_exact(LANES) {
        for l in 0..LANES {
            lanes[l] += c[l];
        }
    }
    lane_sum(lanes)
}

/// `out = Σ_j p[j] · V[j] · factor` for one head.
#[inline(always)]
pub(crate) fn weighted_sum<const FMA: bool>(
    p: &[f32],
    blocks: &[&[f32]],
    at: usize,
    head_dim: usize,
    len: usize,
    factor: f32,
    out: &mut [f32],
) {
    let mut d = 0;
    while d + LANES <= head_dim {
        let mut sums = [0f32; LANES];
        for (b, block) in blocks.iter().enumerate() {
            let first = b * BLOCK;
            let tokens = BLOCK.min(len - first);
            let values = &block[at..at + BLOCK * head_dim];
            for (row, &p) in values.chunks_exact(head_dim).zip(&p[first..first + tokens]) {
                let v = &row[d..d + LANES];
                for l in 0..LANES {
                    sums[l] = fma::<FMA>(p, v[l], sums[l]);
                }
            }
        }
        for (o, s) in out[d..d + LANES].iter_mut().zip(sums) {
            *o = s * factor;
        }
        d += LANES;
    }
    if d < head_dim {
        let tail = &mut out[d..head_dim];
        tail.fill(0.0);
        for (b, block) in blocks.iter().enumerate() {
            let first = b * BLOCK;
            let tokens = BLOCK.min(len - first);
            let values = &block[at..at + BLOCK * head_dim];
            for (row, &p) in values.chunks_exact(head_dim).zip(&p[first..first + tokens]) {
                super::math::axpy::<FMA>(p, &row[d..head_dim], tail);
            }
        }
        for o in tail {
            *o *= factor;
        }
    }
}

simd_fn! {
    /// Attention of one rotated query row `[heads, head_dim]` over the first `len` tokens of the blocks.
    ///
    /// `keys`: blocks `[kv_heads][head_dim][16]`; `values`: blocks `[kv_heads][16][head_dim]`;
    /// exactly `ceil(len / 16)` of each; `scores`: scratch of 16 floats per block.
    pub(crate) fn attend(q: &[f32], keys: &[&[f32]], values: &[&[f32]], len: usize, shape: AttentionShape, scores: &mut [f32], out: &mut [f32]) = attend_body
}

#[inline(always)]
fn attend_body<const FMA: bool>(
    q: &[f32],
    keys: &[&[f32]],
    values: &[&[f32]],
    len: usize,
    shape: AttentionShape,
    scores: &mut [f32],
    out: &mut [f32],
) {
    let d = shape.head_dim;
    let group = shape.heads / shape.kv_heads;
    let scores = &mut scores[..keys.len() * BLOCK];
    for (h, (q, out)) in q.chunks_exact(d).zip(out.chunks_exact_mut(d)).enumerate() {
        let at = h / group * d * BLOCK;
        block_dots::<FMA>(q, keys, at, shape.scale(), scores);
        let sum = softmax_in_place::<FMA>(scores, len);
        weighted_sum::<FMA>(scores, values, at, d, len, 1.0 / sum, out);
    }
}
