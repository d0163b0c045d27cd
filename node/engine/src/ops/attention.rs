//! Causal grouped-query self-attention over packed sequences, rotation included, as one operator.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};

use super::{Backend, composed, cpu_tensor, f32_slice, with_f32};
use crate::kernels::attention::AttentionShape;
use crate::kernels::attention_grad::{sequence_backward, sequence_forward};
use crate::kernels::rope::RopeTable;
use crate::par;

/// Self-attention of each sequence: `qkv [tokens, q | k | v]` unrotated, to `[tokens, heads · head_dim]`, f32.
///
/// `offsets` are the sequences' bounds: 0 first, the token count last. Positions start at 0 in each sequence.
pub(crate) fn self_attention(
    qkv: &Tensor,
    offsets: &Arc<Vec<usize>>,
    shape: AttentionShape,
    rope: &Arc<RopeTable>,
    backend: Backend,
) -> Result<Tensor> {
    match backend {
        Backend::Fused => {
            qkv.apply_op1(SelfAttention { offsets: Arc::clone(offsets), shape, rope: Arc::clone(rope) })
        }
        Backend::Composed => composed::self_attention(qkv, offsets, shape, rope),
    }
}

struct SelfAttention {
    offsets: Arc<Vec<usize>>,
    shape: AttentionShape,
    rope: Arc<RopeTable>,
}

impl SelfAttention {
    /// Calls `f(from, to, out_of_this_sequence)` for each sequence, in parallel.
    fn each_sequence(&self, out: &mut [f32], width: usize, f: impl Fn(usize, usize, &mut [f32]) + Sync + Send) {
        let mut parts = Vec::with_capacity(self.offsets.len());
        let mut rest = out;
        for w in self.offsets.windows(2) {
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

    fn check(&self, tokens: usize, width: usize) -> Result<()> {
        let ordered = self.offsets.first() == Some(&0) && self.offsets.is_sorted() && self.offsets.last() == Some(&tokens);
        let longest = self.offsets.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0);
        if !ordered || width != self.shape.qkv_len() || longest > self.rope.positions() {
            candle_core::bail!(
                "attention: [{tokens}, {width}] for width {}, sequences up to {longest} of {} positions",
                self.shape.qkv_len(),
                self.rope.positions()
            );
        }
        Ok(())
    }
}

impl CustomOp1 for SelfAttention {
    fn name(&self) -> &'static str {
        "starling-self-attention"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let qkv = f32_slice(storage, layout, self.name())?;
        let (tokens, width) = layout.shape().dims2()?;
        self.check(tokens, width)?;
        let ql = self.shape.q_len();
        let mut out = vec![0f32; tokens * ql];
        self.each_sequence(&mut out, ql, |from, to, out| {
            sequence_forward(&qkv[from * width..to * width], self.shape, &self.rope, out);
        });
        Ok((CpuStorage::F32(out), (tokens, ql).into()))
    }

    fn bwd(&self, qkv: &Tensor, _res: &Tensor, g: &Tensor) -> Result<Option<Tensor>> {
        let (tokens, width) = qkv.dims2()?;
        let ql = self.shape.q_len();
        with_f32(qkv, self.name(), |x| {
            with_f32(g, self.name(), |g| {
                let mut dqkv = vec![0f32; tokens * width];
                self.each_sequence(&mut dqkv, width, |from, to, out| {
                    let (x, g) = (&x[from * width..to * width], &g[from * ql..to * ql]);
                    sequence_backward(x, g, self.shape, &self.rope, out);
                });
                Ok(Some(cpu_tensor(dqkv, qkv.dims())?))
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{close, finite_differences, wave};
    use super::*;

    fn run(qkv: &Tensor, shape: AttentionShape, offsets: &[usize], backend: Backend) -> Result<Tensor> {
        let rope = Arc::new(RopeTable::new(shape.head_dim, 10_000.0, 64));
        self_attention(qkv, &Arc::new(offsets.to_vec()), shape, &rope, backend)
    }

    #[test]
    fn gradients_match_finite_differences_over_packed_sequences() {
        let shape = AttentionShape { heads: 4, kv_heads: 2, head_dim: 6 };
        let qkv = wave(&[26, shape.qkv_len()], 0.3);
        // Lengths 1, 18 (crosses a block of 16) and 7.
        finite_differences(&[qkv], |t| run(&t[0], shape, &[0, 1, 19, 26], Backend::Fused));
    }

    #[test]
    fn both_backends_agree_in_value_and_gradient() {
        for shape in [
            AttentionShape { heads: 4, kv_heads: 2, head_dim: 6 },
            AttentionShape { heads: 2, kv_heads: 2, head_dim: 32 },
            AttentionShape { heads: 3, kv_heads: 1, head_dim: 18 },
        ] {
            let var = candle_core::Var::from_tensor(&wave(&[40, shape.qkv_len()], 0.3)).unwrap();
            let mut results = Vec::new();
            for backend in [Backend::Fused, Backend::Composed] {
                let out = run(var.as_tensor(), shape, &[0, 3, 36, 40], backend).unwrap();
                let g = out.mul(&wave(out.dims(), 1.0)).unwrap().sum_all().unwrap().backward().unwrap();
                results.push((out, g.get(&var).unwrap().clone()));
            }
            close(&results[0].0, &results[1].0, 2e-6);
            close(&results[0].1, &results[1].1, 5e-6);
        }
    }
}
