//! RMSNorm as one operator.

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};

use super::{Backend, composed, cpu_tensor, f32_slice, with_f32};
use crate::kernels::norm;

/// `x / sqrt(mean(x²) + eps) · w` over rows: `x [rows, n]`, `w [n]`, f32.
pub(crate) fn rms_norm(x: &Tensor, w: &Tensor, eps: f32, backend: Backend) -> Result<Tensor> {
    match backend {
        Backend::Fused => x.apply_op2(w, RmsNorm { eps }),
        Backend::Composed => composed::rms_norm(x, w, eps),
    }
}

struct RmsNorm {
    eps: f32,
}

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        "starling-rms-norm"
    }

    fn cpu_fwd(&self, s1: &CpuStorage, l1: &Layout, s2: &CpuStorage, l2: &Layout) -> Result<(CpuStorage, Shape)> {
        let (x, w) = (f32_slice(s1, l1, self.name())?, f32_slice(s2, l2, self.name())?);
        if w.is_empty() || l1.dims().last() != Some(&w.len()) {
            candle_core::bail!("{}: rows of {:?} for {} weights", self.name(), l1.dims(), w.len());
        }
        let mut out = vec![0f32; x.len()];
        norm::forward(x, w, self.eps, &mut out);
        Ok((CpuStorage::F32(out), l1.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, w: &Tensor, _res: &Tensor, g: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let name = self.name();
        with_f32(x, name, |xs| {
            with_f32(w, name, |ws| {
                with_f32(g, name, |gs| {
                    let mut dx = vec![0f32; xs.len()];
                    let dw = norm::backward(xs, ws, gs, self.eps, &mut dx);
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
        let inputs = [wave(&[3, 19], 0.1), wave(&[19], 1.3)];
        finite_differences(&inputs, |t| rms_norm(&t[0], &t[1], 1e-5, Backend::Fused));
        let fused = rms_norm(&inputs[0], &inputs[1], 1e-5, Backend::Fused).unwrap();
        close(&fused, &rms_norm(&inputs[0], &inputs[1], 1e-5, Backend::Composed).unwrap(), 1e-6);
    }
}
