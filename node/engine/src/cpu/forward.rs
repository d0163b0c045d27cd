//! The forward pass over packed sequences, keeping what the backward pass needs.

use super::CpuModel;
use crate::kernels::attention_grad::packed_forward;
use crate::kernels::logprob::logprob_entropy;
use crate::kernels::matmul::Lhs;
use crate::kernels::{elementwise, norm};
use crate::packing::PackedSequences;
use crate::par;

/// Floats of logits alive at a time: 512 KiB, a quarter of a second-level cache.
const LOGITS_AT_ONCE: usize = 1 << 17;
/// But at least as many rows of them: an output matrix that no cache holds is read once for all of them, and its gradient
/// read and written. 18 MiB a thread for a vocabulary of 49152.
const LOGIT_ROWS_MIN: usize = 96;

/// Activations of one pass, kept between passes to spare the allocator.
///
/// With checkpointing only the residual stream before each layer is kept; the rest is one layer's, which the backward
/// pass computes again (Chen et al., arXiv:1604.06174), by the same kernels and so to the same bits.
#[derive(Debug, Default)]
pub(crate) struct Tape {
    checkpointing: bool,
    /// Per layer: the residual stream before it `[tokens, hidden]`; one more after the last.
    pub(crate) x: Vec<Vec<f32>>,
    /// Per layer `[tokens, q | k | v]`, before norms of heads and rotation.
    pub(crate) qkv: Vec<Vec<f32>>,
    /// Per layer: attention's result `[tokens, heads · head_dim]`.
    pub(crate) mixed: Vec<Vec<f32>>,
    /// Per layer: the residual stream between attention and SwiGLU.
    pub(crate) middle: Vec<Vec<f32>>,
    /// Per layer `[tokens, gate | up]`.
    pub(crate) gate_up: Vec<Vec<f32>>,
    /// The rows that predict a target, before the last norm `[rows, hidden]`.
    pub(crate) picked: Vec<f32>,
    /// The same after it.
    pub(crate) normed: Vec<f32>,
    h: Vec<f32>,
    heads: Vec<f32>,
    inner: Vec<f32>,
}

/// Makes a buffer `len` long; old values stay where they were, as every user overwrites them.
pub(crate) fn sized(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}

impl Tape {
    /// An empty one.
    pub(crate) fn new(checkpointing: bool) -> Self {
        Self { checkpointing, ..Self::default() }
    }

    fn prepare(&mut self, layers: usize) {
        self.x.resize_with(layers + 1, Vec::new);
        let kept = if self.checkpointing { layers.min(1) } else { layers };
        for list in [&mut self.qkv, &mut self.mixed, &mut self.middle, &mut self.gate_up] {
            list.resize_with(kept, Vec::new);
        }
    }

    /// Where a layer's activations lie.
    pub(crate) fn place(&self, layer: usize) -> usize {
        if self.checkpointing { 0 } else { layer }
    }
}

impl CpuModel {
    /// Log-probability of each target and entropy of its distribution, `[rows, 2]`, nats.
    ///
    /// A row with a NaN or infinite logit comes out as NaN.
    pub(crate) fn logprobs(&self, batch: &PackedSequences, tape: &mut Tape) -> Vec<f32> {
        self.hidden(batch, tape);
        let (h, rows) = (self.hidden, batch.rows.len());
        let last = &tape.x[self.layers.len()];
        let picked = sized(&mut tape.picked, rows * h);
        for (out, &row) in picked.chunks_exact_mut(h).zip(&batch.rows) {
            out.copy_from_slice(&last[row as usize * h..(row as usize + 1) * h]);
        }
        let normed = sized(&mut tape.normed, rows * h);
        norm::forward(picked, &self.norm, self.eps, normed);
        self.target_logprobs(normed, &batch.targets)
    }

    /// The residual stream after all layers.
    fn hidden(&self, batch: &PackedSequences, tape: &mut Tape) {
        let (tokens, h) = (batch.tokens.len(), self.hidden);
        tape.prepare(self.layers.len());
        let x = sized(&mut tape.x[0], tokens * h);
        for (row, &id) in x.chunks_exact_mut(h).zip(&batch.tokens) {
            self.embed(id, row);
        }
        for l in 0..self.layers.len() {
            self.activations(l, batch, tape);
            self.layer_output(l, batch, tape);
        }
    }

    /// The activations of a layer again, where they were not kept.
    pub(crate) fn recompute(&self, l: usize, batch: &PackedSequences, tape: &mut Tape) {
        if tape.checkpointing {
            self.activations(l, batch, tape);
        }
    }

    /// A layer up to the input of SwiGLU.
    fn activations(&self, l: usize, batch: &PackedSequences, tape: &mut Tape) {
        let (layer, tokens, h, at) = (&self.layers[l], batch.tokens.len(), self.hidden, tape.place(l));
        let x = &tape.x[l][..tokens * h];
        let normed = sized(&mut tape.h, tokens * h);
        norm::forward(x, &layer.norm1, self.eps, normed);
        let qkv = sized(&mut tape.qkv[at], tokens * self.shape.qkv_len());
        layer.project(normed, h, qkv);
        let mixed = sized(&mut tape.mixed[at], tokens * self.shape.q_len());
        let heads = layer.normed_heads(qkv, self.shape, self.eps, &mut tape.heads);
        packed_forward(heads, &batch.segments, self.shape, &self.rope, mixed);
        let middle = sized(&mut tape.middle[at], tokens * h);
        middle.copy_from_slice(x);
        layer.output.mul(Lhs::rows(mixed, self.shape.q_len()), middle, true);
        norm::forward(middle, &layer.norm2, self.eps, normed);
        let gate_up = sized(&mut tape.gate_up[at], tokens * 2 * self.inner);
        layer.gate_up.mul(Lhs::rows(normed, h), gate_up, false);
    }

    /// The rest of it: the residual stream before the next one.
    fn layer_output(&self, l: usize, batch: &PackedSequences, tape: &mut Tape) {
        let (layer, tokens, h, at) = (&self.layers[l], batch.tokens.len(), self.hidden, tape.place(l));
        let inner = sized(&mut tape.inner, tokens * self.inner);
        elementwise::swiglu(&tape.gate_up[at][..tokens * 2 * self.inner], self.inner, inner);
        let out = sized(&mut tape.x[l + 1], tokens * h);
        out.copy_from_slice(&tape.middle[at][..tokens * h]);
        layer.down.mul(Lhs::rows(inner, self.inner), out, true);
    }

    /// Output layer, log-softmax and gather; logits exist for a few rows at a time only.
    fn target_logprobs(&self, normed: &[f32], targets: &[u32]) -> Vec<f32> {
        let (h, vocab) = (self.hidden, self.vocab);
        let mut out = vec![0f32; targets.len() * 2];
        let step = logit_rows(vocab).min(targets.len().div_ceil(par::workers()).max(8));
        par::chunks_mut(&mut out, step * 2, |i, out| {
            let first = i * step;
            let mut logits = vec![0f32; out.len() / 2 * vocab];
            let part = &normed[first * h..(first + out.len() / 2) * h];
            self.head.mul(Lhs::rows(part, h), &mut logits, false);
            let rows = logits.chunks_exact(vocab).zip(&targets[first..]);
            for ((logits, &target), out) in rows.zip(out.chunks_exact_mut(2)) {
                (out[0], out[1]) = logprob_entropy(logits, target as usize);
            }
        });
        out
    }
}

/// Rows of logits to hold at a time; the same on any number of threads, as sums over rows are cut by it.
pub(crate) fn logit_rows(vocab: usize) -> usize {
    (LOGITS_AT_ONCE / vocab.max(1)).clamp(LOGIT_ROWS_MIN, 1024)
}
