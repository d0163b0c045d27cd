//! The backward pass: gradients of what is trained, from the loss's derivatives by the rows'
//! log-probabilities and entropies.

use super::CpuModel;
use super::adapters::{AdapterScratch, GradientSink};
use super::forward::{Tape, logit_rows, sized};
use super::model::{BackwardPacks, QkvExtra};
use crate::kernels::attention_grad::packed_backward;
use crate::kernels::logprob::logprob_entropy_grad;
use crate::kernels::matmul::{Lhs, Packed};
use crate::kernels::{elementwise, norm};
use crate::packing::PackedSequences;
use crate::par;

/// Gradient buffers of one pass, kept between passes.
#[derive(Debug, Default)]
pub(crate) struct BackwardScratch {
    dx: Vec<f32>,
    dh: Vec<f32>,
    h: Vec<f32>,
    inner: Vec<f32>,
    dinner: Vec<f32>,
    dgate_up: Vec<f32>,
    dmixed: Vec<f32>,
    dqkv: Vec<f32>,
    heads: Vec<f32>,
    logits: Vec<f32>,
    d_picked: Vec<f32>,
    pack: Packed,
    adapters: AdapterScratch,
}

/// `dW [n, k] += gᵀ · x` for `g [rows, n]`, `x [rows, k]`.
fn add_weight_gradient(g: &[f32], n: usize, x: &[f32], k: usize, pack: &mut Packed, dw: &mut [f32]) {
    pack.repack_rows(x, x.len() / k, k);
    pack.mul(Lhs::transposed(g, n), dw, true);
}

impl CpuModel {
    /// Adds the gradients to `sink`; `g [rows, 2]` are the loss's derivatives by each row's
    /// log-probability and entropy.
    ///
    /// `tape` comes from [`CpuModel::logprobs`] on the same batch.
    pub(crate) fn gradients(
        &self,
        packs: &BackwardPacks,
        batch: &PackedSequences,
        tape: &mut Tape,
        g: &[f32],
        s: &mut BackwardScratch,
        sink: &mut GradientSink<'_>,
    ) {
        let (h, layers) = (self.hidden, self.layers.len());
        let (tokens, rows) = (batch.tokens.len(), batch.rows.len());
        self.head_gradients(packs, batch, tape, g, s, sink.vocabulary(packs.head_index));
        // The rows' gradients pass the last norm and go to their tokens.
        let d_rows = sized(&mut s.dh, rows * h);
        d_rows.fill(0.0);
        let (picked, d_picked) = (&tape.picked[..rows * h], &s.d_picked[..rows * h]);
        let normed = sized(&mut s.h, rows * h);
        let d_norm = sink.vector(packs.last_norm_index, h, &mut s.adapters);
        norm::backward(picked, &self.norm, d_picked, self.eps, d_rows, d_norm, normed);
        let dx = sized(&mut s.dx, tokens * h);
        dx.fill(0.0);
        for (d, &row) in d_rows.chunks_exact(h).zip(&batch.rows) {
            let target = &mut dx[row as usize * h..(row as usize + 1) * h];
            target.iter_mut().zip(d).for_each(|(t, &v)| *t += v);
        }
        let per_layer = (packs.last_norm_index - 1) / layers;
        for l in (0..layers).rev() {
            self.recompute(l, batch, tape);
            self.layer_gradients(l, packs, batch, tape, s, (1 + l * per_layer, sink));
        }
        let Some(d_embed) = sink.vocabulary(0) else { return };
        for (d, &id) in s.dx[..tokens * h].chunks_exact(h).zip(&batch.tokens) {
            let row = &mut d_embed[id as usize * h..(id as usize + 1) * h];
            row.iter_mut().zip(d).for_each(|(t, &v)| *t += v);
        }
    }

    /// Adds the output layer's gradient to `d_head`, if it is trained; leaves that of its input rows in `s.d_picked`.
    ///
    /// The logits are computed again, a few rows at a time, instead of being kept.
    fn head_gradients(
        &self,
        packs: &BackwardPacks,
        batch: &PackedSequences,
        tape: &Tape,
        g: &[f32],
        s: &mut BackwardScratch,
        mut d_head: Option<&mut [f32]>,
    ) {
        let (h, vocab, rows) = (self.hidden, self.vocab, batch.rows.len());
        let d_picked = sized(&mut s.d_picked, rows * h);
        let step = logit_rows(vocab);
        for first in (0..rows).step_by(step) {
            let here = step.min(rows - first);
            let logits = sized(&mut s.logits, here * vocab);
            let part = &tape.normed[first * h..(first + here) * h];
            self.head.mul(Lhs::rows(part, h), logits, false);
            par::chunks_mut(logits, vocab, |i, row| {
                let g = &g[2 * (first + i)..2 * (first + i) + 2];
                logprob_entropy_grad(row, batch.targets[first + i] as usize, g[0], g[1]);
            });
            packs.head.mul(Lhs::rows(logits, vocab), &mut d_picked[first * h..(first + here) * h], false);
            if let Some(d_head) = &mut d_head {
                add_weight_gradient(logits, vocab, part, h, &mut s.pack, d_head);
            }
        }
    }

    /// One layer, whose parameters begin at `first`: adds to their gradients; `s.dx` goes from the gradient after the layer to the one before it.
    fn layer_gradients(
        &self,
        l: usize,
        packs: &BackwardPacks,
        batch: &PackedSequences,
        tape: &Tape,
        s: &mut BackwardScratch,
        (first, sink): (usize, &mut GradientSink<'_>),
    ) {
        let at = tape.place(l);
        let [norm1, qkv, output, norm2, gate_up, down, extra] = std::array::from_fn(|i| first + i);
        let (layer, tokens, h, inner) = (&self.layers[l], batch.tokens.len(), self.hidden, self.inner);
        let (ql, width) = (self.shape.q_len(), self.shape.qkv_len());
        let [qkv_back, output_back, gate_up_back, down_back] = &packs.layers[l];
        let dx = &mut s.dx[..tokens * h];
        let dh = sized(&mut s.dh, tokens * h);
        let normed = sized(&mut s.h, tokens * h);

        let dinner = sized(&mut s.dinner, tokens * inner);
        down_back.mul(Lhs::rows(dx, h), dinner, false);
        let dgate_up = sized(&mut s.dgate_up, tokens * 2 * inner);
        let activated = sized(&mut s.inner, tokens * inner);
        elementwise::swiglu_grad(&tape.gate_up[at][..tokens * 2 * inner], dinner, inner, dgate_up, activated);
        sink.matrix(down, (dx, h), (activated, inner), &mut s.pack, &mut s.adapters);
        gate_up_back.mul(Lhs::rows(dgate_up, 2 * inner), dh, false);
        let d_norm2 = sink.vector(norm2, h, &mut s.adapters);
        norm::backward(&tape.middle[at][..tokens * h], &layer.norm2, dh, self.eps, dx, d_norm2, normed);
        sink.matrix(gate_up, (dgate_up, 2 * inner), (normed, h), &mut s.pack, &mut s.adapters);

        let dmixed = sized(&mut s.dmixed, tokens * ql);
        output_back.mul(Lhs::rows(dx, h), dmixed, false);
        sink.matrix(output, (dx, h), (&tape.mixed[at][..tokens * ql], ql), &mut s.pack, &mut s.adapters);
        let dqkv = sized(&mut s.dqkv, tokens * width);
        let projected = &tape.qkv[at][..tokens * width];
        let heads = layer.normed_heads(projected, self.shape, self.eps, &mut s.heads);
        packed_backward(heads, dmixed, &batch.segments, self.shape, &self.rope, dqkv);
        match &layer.extra {
            QkvExtra::HeadNorms(w) => {
                let dw = sink.vector(extra, w.len(), &mut s.adapters);
                norm::heads_backward(projected, w, self.eps, self.shape, dqkv, dw);
            }
            QkvExtra::Bias(b) => {
                elementwise::add_column_sums(dqkv, width, sink.vector(extra, b.len(), &mut s.adapters))
            }
            QkvExtra::None => {}
        }
        qkv_back.mul(Lhs::rows(dqkv, width), dh, false);
        let d_norm1 = sink.vector(norm1, h, &mut s.adapters);
        norm::backward(&tape.x[l][..tokens * h], &layer.norm1, dh, self.eps, dx, d_norm1, normed);
        sink.matrix(qkv, (dqkv, width), (normed, h), &mut s.pack, &mut s.adapters);
    }
}
