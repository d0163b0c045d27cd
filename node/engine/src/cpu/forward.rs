//! The forward pass over packed sequences, keeping what the backward pass needs.

use super::CpuModel;
use crate::kernels::attention_grad::packed_forward;
use crate::kernels::logprob::logprob_entropy;
use crate::kernels::matmul::Lhs;
use crate::kernels::{elementwise, norm};
use crate::packing::PackedSequences;
use crate::par;

/// Floats of logits alive per thread: 512 KiB, a quarter of a second-level cache.
const LOGITS_AT_ONCE: usize = 1 << 17;

/// Activations of one pass, kept between passes to spare the allocator.
#[derive(Debug, Default)]
pub(crate) struct Tape {
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
    fn prepare(&mut self, layers: usize) {
        self.x.resize_with(layers + 1, Vec::new);
        for list in [&mut self.qkv, &mut self.mixed, &mut self.middle, &mut self.gate_up] {
            list.resize_with(layers, Vec::new);
        }
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
            self.layer(l, batch, tape);
        }
    }

    fn layer(&self, l: usize, batch: &PackedSequences, tape: &mut Tape) {
        let (layer, tokens, h) = (&self.layers[l], batch.tokens.len(), self.hidden);
        let (before, after) = tape.x.split_at_mut(l + 1);
        let x = &before[l][..tokens * h];
        let normed = sized(&mut tape.h, tokens * h);
        norm::forward(x, &layer.norm1, self.eps, normed);
        let qkv = sized(&mut tape.qkv[l], tokens * self.shape.qkv_len());
        layer.project(normed, h, qkv);
        let mixed = sized(&mut tape.mixed[l], tokens * self.shape.q_len());
        let heads = layer.normed_heads(qkv, self.shape, self.eps, &mut tape.heads);
        packed_forward(heads, &batch.offsets, self.shape, &self.rope, mixed);
        let middle = sized(&mut tape.middle[l], tokens * h);
        middle.copy_from_slice(x);
        layer.output.mul(Lhs::rows(mixed, self.shape.q_len()), middle, true);
        norm::forward(middle, &layer.norm2, self.eps, normed);
        let gate_up = sized(&mut tape.gate_up[l], tokens * 2 * self.inner);
        layer.gate_up.mul(Lhs::rows(normed, h), gate_up, false);
        let inner = sized(&mut tape.inner, tokens * self.inner);
        elementwise::swiglu(gate_up, self.inner, inner);
        let out = sized(&mut after[0], tokens * h);
        out.copy_from_slice(middle);
        layer.down.mul(Lhs::rows(inner, self.inner), out, true);
    }

    /// Output layer, log-softmax and gather; logits exist for a few rows at a time only.
    fn target_logprobs(&self, normed: &[f32], targets: &[u32]) -> Vec<f32> {
        let (h, vocab) = (self.hidden, self.vocab);
        let mut out = vec![0f32; targets.len() * 2];
        let step = logit_rows(vocab).min(par::rows_per_chunk(targets.len()).max(8));
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

/// Rows of logits to hold at a time.
pub(crate) fn logit_rows(vocab: usize) -> usize {
    (LOGITS_AT_ONCE / vocab.max(1)).clamp(8, 1024)
}
