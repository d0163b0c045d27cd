//! Output layer, log-softmax and gather in one operator: logits exist for a few rows at a time only.

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};

use super::{Backend, composed, cpu_tensor, f32_slice, with_f32};
use crate::kernels::logprob::{logprob_entropy, logprob_entropy_grad};
use crate::kernels::matmul::{Lhs, Packed};
use crate::par;

/// Floats of logits alive per thread: 1 MiB, half of a second-level cache.
const LOGITS_AT_ONCE: usize = 1 << 18;

/// `[rows, 2]`: log-probability of `targets[row]` and entropy (nats) of `softmax(x [rows, k] · W [vocab, k]ᵀ)`, f32.
///
/// Both columns are differentiable in `x` and `W`. A row with a NaN or infinite logit comes out as NaN.
pub(crate) fn linear_logprob(x: &Tensor, w: &Tensor, targets: &Arc<Vec<u32>>, backend: Backend) -> Result<Tensor> {
    match backend {
        Backend::Fused => x.apply_op2(w, LinearLogprob { targets: Arc::clone(targets) }),
        Backend::Composed => composed::linear_logprob(x, w, targets),
    }
}

struct LinearLogprob {
    targets: Arc<Vec<u32>>,
}

impl LinearLogprob {
    fn dims(&self, x: &[usize], w: &[usize]) -> Result<(usize, usize, usize)> {
        match (x, w) {
            (&[rows, k], &[vocab, wk]) if k == wk && rows == self.targets.len() => {
                if let Some(t) = self.targets.iter().find(|&&t| t as usize >= vocab) {
                    candle_core::bail!("target {t} is outside the vocabulary of {vocab}");
                }
                Ok((rows, vocab, k))
            }
            _ => candle_core::bail!("linear-logprob: {x:?} times {w:?} for {} targets", self.targets.len()),
        }
    }
}

/// Rows per pass for a vocabulary.
fn rows_at_once(vocab: usize, rows: usize) -> usize {
    (LOGITS_AT_ONCE / vocab.max(1)).clamp(8, 1024).min(par::rows_per_chunk(rows).max(8))
}

impl CustomOp2 for LinearLogprob {
    fn name(&self) -> &'static str {
        "starling-linear-logprob"
    }

    fn cpu_fwd(&self, s1: &CpuStorage, l1: &Layout, s2: &CpuStorage, l2: &Layout) -> Result<(CpuStorage, Shape)> {
        let (x, w) = (f32_slice(s1, l1, self.name())?, f32_slice(s2, l2, self.name())?);
        let (rows, vocab, k) = self.dims(l1.dims(), l2.dims())?;
        let packed = Packed::from_weight(w, vocab, k);
        let mut out = vec![0f32; rows * 2];
        let step = rows_at_once(vocab, rows);
        par::chunks_mut(&mut out, step * 2, |i, out| {
            let first = i * step;
            let here = out.len() / 2;
            let mut logits = vec![0f32; here * vocab];
            packed.mul(Lhs::rows(&x[first * k..], k), &mut logits, false);
            let rows = logits.chunks_exact(vocab).zip(&self.targets[first..]);
            for ((logits, &target), out) in rows.zip(out.chunks_exact_mut(2)) {
                let (logprob, entropy) = logprob_entropy(logits, target as usize);
                out[0] = logprob;
                out[1] = entropy;
            }
        });
        Ok((CpuStorage::F32(out), (rows, 2).into()))
    }

    /// Recomputes the logits: a sixth more work in this layer, and memory of one pass instead of all rows.
    fn bwd(&self, x: &Tensor, w: &Tensor, _res: &Tensor, g: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (rows, vocab, k) = self.dims(x.dims(), w.dims())?;
        let name = self.name();
        with_f32(x, name, |xs| {
            with_f32(w, name, |ws| {
                with_f32(g, name, |gs| {
                    let forward = Packed::from_weight(ws, vocab, k);
                    let backward = Packed::from_rows(ws, vocab, k);
                    let mut dx = vec![0f32; rows * k];
                    let mut dw = vec![0f32; vocab * k];
                    let step = (LOGITS_AT_ONCE * par::workers() / vocab.max(1)).clamp(8, 1024);
                    let mut logits = vec![0f32; step.min(rows) * vocab];
                    for first in (0..rows).step_by(step) {
                        let here = step.min(rows - first);
                        let logits = &mut logits[..here * vocab];
                        let part = &xs[first * k..(first + here) * k];
                        forward.mul(Lhs::rows(part, k), logits, false);
                        par::chunks_mut(logits, vocab, |i, row| {
                            let at = (first + i) * 2;
                            logprob_entropy_grad(row, self.targets[first + i] as usize, gs[at], gs[at + 1]);
                        });
                        backward.mul(Lhs::rows(logits, vocab), &mut dx[first * k..(first + here) * k], false);
                        Packed::from_rows(part, here, k).mul(Lhs::transposed(logits, vocab), &mut dw, true);
                    }
                    Ok((Some(cpu_tensor(dx, x.dims())?), Some(cpu_tensor(dw, w.dims())?)))
                })
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{close, finite_differences, wave};
    use super::*;

    #[test]
    fn gradients_match_finite_differences_and_both_backends_agree() {
        let inputs = [wave(&[9, 5], 0.2), wave(&[21, 5], 0.7)];
        let targets = Arc::new(vec![0, 3, 20, 7, 7, 1, 0, 11, 2]);
        finite_differences(&inputs, |t| linear_logprob(&t[0], &t[1], &targets, Backend::Fused));
        let both = [Backend::Fused, Backend::Composed].map(|b| linear_logprob(&inputs[0], &inputs[1], &targets, b).unwrap());
        close(&both[0], &both[1], 1e-6);
    }

    #[test]
    fn a_target_outside_the_vocabulary_is_an_error() {
        let (x, w) = (wave(&[1, 5], 0.2), wave(&[21, 5], 0.7));
        assert!(linear_logprob(&x, &w, &Arc::new(vec![21]), Backend::Fused).is_err());
    }
}
