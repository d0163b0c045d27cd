//! SwiGLU over fused gate|up activations as one operator.

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};

use super::{Backend, composed, cpu_tensor, f32_slice, with_f32};
use crate::kernels::elementwise;

/// `silu(gate) · up`: `x [rows, gate | up]` to `[rows, inner]`, f32.
pub(crate) fn swiglu(x: &Tensor, backend: Backend) -> Result<Tensor> {
    match backend {
        Backend::Fused => x.apply_op1(SwiGlu),
        Backend::Composed => composed::swiglu(x),
    }
}

struct SwiGlu;

impl CustomOp1 for SwiGlu {
    fn name(&self) -> &'static str {
        "starling-swiglu"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = f32_slice(storage, layout, self.name())?;
        let (rows, width) = layout.shape().dims2()?;
        let mut out = vec![0f32; rows * (width / 2)];
        elementwise::swiglu(x, width / 2, &mut out);
        Ok((CpuStorage::F32(out), (rows, width / 2).into()))
    }

    fn bwd(&self, x: &Tensor, _res: &Tensor, g: &Tensor) -> Result<Option<Tensor>> {
        let (_, width) = x.dims2()?;
        with_f32(x, self.name(), |xs| {
            with_f32(g, self.name(), |gs| {
                let mut dx = vec![0f32; xs.len()];
                elementwise::swiglu_grad(xs, gs, width / 2, &mut dx);
                Ok(Some(cpu_tensor(dx, x.dims())?))
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
        let x = wave(&[3, 38], 0.2);
        finite_differences(std::slice::from_ref(&x), |t| swiglu(&t[0], Backend::Fused));
        close(&swiglu(&x, Backend::Fused).unwrap(), &swiglu(&x, Backend::Composed).unwrap(), 1e-6);
    }
}
