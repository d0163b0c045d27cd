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
    // Head widths are even, so that dimensions pair up; two chains of additions hide half of the latency.
    let pairs = q.as_chunks::<2>().0;
    for (block, out) in blocks.iter().zip(scores.as_chunks_mut::<BLOCK>().0) {
        let keys = block[at..at + width].as_chunks::<{ 2 * BLOCK }>().0;
        let mut sums = [[0f32; BLOCK]; 2];
        for (key, q) in keys.iter().zip(pairs) {
            for l in 0..BLOCK {
                sums[0][l] = fma::<FMA>(q[0], key[l], sums[0][l]);
                sums[1][l] = fma::<FMA>(q[1], key[BLOCK + l], sums[1][l]);
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
    // The padding repeats a real score, so that the maximum needs no tail.
    let first = scores[0];
    scores[len..].fill(first);
    let max = max_or_nan(scores);
    let mut lanes = [0f32; LANES];
    for c in scores.as_chunks_mut::<LANES>().0 {
        for s in c.iter_mut() {
            *s = exp::<FMA>(*s - max);
        }
    }
    scores[len..].fill(0.0);
    for c in scores.as_chunks::<LANES>().0 {
        for l in 0..LANES {
            lanes[l] += c[l];
        }
    }
    lane_sum(lanes)
}

/// `out = Σ_j p[j] · V[j] · factor` for one head; `p` is zero behind the last token, up to a whole block.
#[inline(always)]
pub(crate) fn weighted_sum<const FMA: bool>(
    p: &[f32],
    blocks: &[&[f32]],
    at: usize,
    head_dim: usize,
    factor: f32,
    out: &mut [f32],
) {
    let mut d = 0;
    while d + 2 * LANES <= head_dim {
        weighted_columns::<FMA, { 2 * LANES }>(p, blocks, at, head_dim, d, factor, out);
        d += 2 * LANES;
    }
    while d + 8 <= head_dim {
        weighted_columns::<FMA, 8>(p, blocks, at, head_dim, d, factor, out);
        d += 8;
    }
    while d < head_dim {
        weighted_columns::<FMA, 2>(p, blocks, at, head_dim, d, factor, out);
        d += 2;
    }
}

/// Columns `d .. d + W` of [`weighted_sum`]; even and odd tokens are summed apart, which hides the latency.
#[inline(always)]
fn weighted_columns<const FMA: bool, const W: usize>(
    p: &[f32],
    blocks: &[&[f32]],
    at: usize,
    head_dim: usize,
    d: usize,
    factor: f32,
    out: &mut [f32],
) {
    let mut sums = [[0f32; W]; 2];
    for (block, p) in blocks.iter().zip(p.as_chunks::<BLOCK>().0) {
        let values = &block[at..at + BLOCK * head_dim];
        for (two, p) in values.chunks_exact(2 * head_dim).zip(p.as_chunks::<2>().0) {
            let (even, odd) = (&two[d..d + W], &two[head_dim + d..head_dim + d + W]);
            for l in 0..W {
                sums[0][l] = fma::<FMA>(p[0], even[l], sums[0][l]);
                sums[1][l] = fma::<FMA>(p[1], odd[l], sums[1][l]);
            }
        }
    }
    for (l, o) in out[d..d + W].iter_mut().enumerate() {
        *o = (sums[0][l] + sums[1][l]) * factor;
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
    let (group, scale) = (shape.heads / shape.kv_heads, shape.scale());
    let scores = &mut scores[..keys.len() * BLOCK];
    let heads = q.chunks_exact(d * group).zip(out.chunks_exact_mut(d * group));
    for (kv, (q, out)) in heads.enumerate() {
        let at = kv * d * BLOCK;
        for (q, out) in q.chunks_exact(d).zip(out.chunks_exact_mut(d)) {
            block_dots::<FMA>(q, keys, at, scale, scores);
            let sum = softmax_in_place::<FMA>(scores, len);
            weighted_sum::<FMA>(scores, values, at, d, 1.0 / sum, out);
        }
    }
}
