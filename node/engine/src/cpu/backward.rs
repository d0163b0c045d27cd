//! The backward pass: gradients of all fused parameters, from the loss's derivatives by the rows'
//! log-probabilities and entropies.

use super::CpuModel;
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
}

/// `dW [n, k] += gᵀ · x` for `g [rows, n]`, `x [rows, k]`.
fn add_weight_gradient(g: &[f32], n: usize, x: &[f32], k: usize, pack: &mut Packed, dw: &mut [f32]) {
    pack.repack_rows(x, x.len() / k, k);
    pack.mul(Lhs::transposed(g, n), dw, true);
}

impl CpuModel {
    /// Adds the gradients to `grads`, one per fused parameter; `g [rows, 2]` are the loss's derivatives by each row's
    /// log-probability and entropy.
    ///
    /// `tape` comes from [`CpuModel::logprobs`] on the same batch.
    pub(crate) fn gradients(
        &self,
        packs: &BackwardPacks,
        batch: &PackedSequences,
        tape: &Tape,
        g: &[f32],
        s: &mut BackwardScratch,
        grads: &mut [Vec<f32>],
    ) {
        let (h, layers) = (self.hidden, self.layers.len());
        let (tokens, rows) = (batch.tokens.len(), batch.rows.len());
        self.head_gradients(packs, batch, tape, g, s, &mut grads[packs.head_index]);
        // The rows' gradients pass the last norm and go to their tokens.
        let d_rows = sized(&mut s.dh, rows * h);
        d_rows.fill(0.0);
        let (picked, d_picked) = (&tape.picked[..rows * h], &s.d_picked[..rows * h]);
        let normed = sized(&mut s.h, rows * h);
        norm::backward(picked, &self.norm, d_picked, self.eps, d_rows, &mut grads[packs.last_norm_index], normed);
        let dx = sized(&mut s.dx, tokens * h);
        dx.fill(0.0);
        for (d, &row) in d_rows.chunks_exact(h).zip(&batch.rows) {
            let target = &mut dx[row as usize * h..(row as usize + 1) * h];
            target.iter_mut().zip(d).for_each(|(t, &v)| *t += v);
        }
        let per_layer = (packs.last_norm_index - 1) / layers;
        for (l, grads) in grads[1..packs.last_norm_index].chunks_exact_mut(per_layer).enumerate().rev() {
            self.layer_gradients(l, packs, batch, tape, s, grads);
        }
        for (d, &id) in s.dx[..tokens * h].chunks_exact(h).zip(&batch.tokens) {
            let row = &mut grads[0][id as usize * h..(id as usize + 1) * h];
            row.iter_mut().zip(d).for_each(|(t, &v)| *t += v);
        }
    }

    /// Adds the output layer's gradient to `d_head`; leaves that of its input rows in `s.d_picked`.
    ///
    /// The logits are computed again, a few rows at a time, instead of being kept.
    fn head_gradients(
        &self,
        packs: &BackwardPacks,
        batch: &PackedSequences,
        tape: &Tape,
        g: &[f32],
        s: &mut BackwardScratch,
        d_head: &mut [f32],
    ) {
        let (h, vocab, rows) = (self.hidden, self.vocab, batch.rows.len());
        let d_picked = sized(&mut s.d_picked, rows * h);
        let step = (logit_rows(vocab) * par::workers()).min(1024);
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
            add_weight_gradient(logits, vocab, part, h, &mut s.pack, d_head);
        }
    }

    /// One layer: adds to the gradients of its parameters; `s.dx` goes from the gradient after the layer to the one before it.
    fn layer_gradients(
        &self,
        l: usize,
        packs: &BackwardPacks,
        batch: &PackedSequences,
        tape: &Tape,
        s: &mut BackwardScratch,
        grads: &mut [Vec<f32>],
    ) {
        let [d_norm1, d_qkv, d_output, d_norm2, d_gate_up, d_down, d_extra @ ..] = grads else { return };
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
        elementwise::swiglu_grad(&tape.gate_up[l][..tokens * 2 * inner], dinner, inner, dgate_up, activated);
        add_weight_gradient(dx, h, activated, inner, &mut s.pack, d_down);
        gate_up_back.mul(Lhs::rows(dgate_up, 2 * inner), dh, false);
        norm::backward(&tape.middle[l][..tokens * h], &layer.norm2, dh, self.eps, dx, d_norm2, normed);
        add_weight_gradient(dgate_up, 2 * inner, normed, h, &mut s.pack, d_gate_up);

        let dmixed = sized(&mut s.dmixed, tokens * ql);
        output_back.mul(Lhs::rows(dx, h), dmixed, false);
        add_weight_gradient(dx, h, &tape.mixed[l][..tokens * ql], ql, &mut s.pack, d_output);
        let dqkv = sized(&mut s.dqkv, tokens * width);
        let projected = &tape.qkv[l][..tokens * width];
        let heads = layer.normed_heads(projected, self.shape, self.eps, &mut s.heads);
        packed_backward(heads, dmixed, &batch.offsets, self.shape, &self.rope, dqkv);
        match (&layer.extra, d_extra) {
            (QkvExtra::HeadNorms(w), [dw]) => norm::heads_backward(projected, w, self.eps, self.shape, dqkv, dw),
            (QkvExtra::Bias(_), [db]) => elementwise::add_column_sums(dqkv, width, db),
            _ => {}
        }
        qkv_back.mul(Lhs::rows(dqkv, width), dh, false);
        norm::backward(&tape.x[l][..tokens * h], &layer.norm1, dh, self.eps, dx, d_norm1, normed);
        add_weight_gradient(dqkv, width, normed, h, &mut s.pack, d_qkv);
    }
}
