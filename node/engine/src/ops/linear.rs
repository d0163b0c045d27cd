//! Linear layers without bias, optionally added to a residual, as one operator with one backward.

use std::sync::{Arc, OnceLock};

use candle_core::{CpuStorage, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor};

use super::{Backend, cpu_tensor, f32_slice, with_f32};
use crate::kernels::matmul::{Lhs, Packed};

/// A weight `[out, in]` with the packed forms that the CPU kernels read, made once per weight value.
#[derive(Clone, Debug)]
pub(crate) struct LinearWeight {
    tensor: Tensor,
    packs: Arc<Packs>,
}

#[derive(Debug, Default)]
struct Packs {
    forward: OnceLock<Packed>,
    backward: OnceLock<Packed>,
}

impl Packs {
    fn forward(&self, w: &[f32], n: usize, k: usize) -> &Packed {
        self.forward.get_or_init(|| Packed::from_weight(w, n, k))
    }

    fn backward(&self, w: &[f32], n: usize, k: usize) -> &Packed {
        self.backward.get_or_init(|| Packed::from_rows(w, n, k))
    }
}

impl LinearWeight {
    /// Wraps a weight; nothing is packed yet.
    pub(crate) fn new(tensor: Tensor) -> Self {
        Self { tensor, packs: Arc::default() }
    }

    /// The weight `[out, in]`.
    pub(crate) fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// `x [rows, in] · Wᵀ`, f32.
    pub(crate) fn forward(&self, x: &Tensor, backend: Backend) -> Result<Tensor> {
        match backend {
            Backend::Fused => x.apply_op2(&self.tensor, Linear { packs: Arc::clone(&self.packs) }),
            Backend::Composed => x.matmul(&self.tensor.t()?),
        }
    }

    /// `residual [rows, out] + x [rows, in] · Wᵀ`, f32.
    pub(crate) fn forward_add(&self, residual: &Tensor, x: &Tensor, backend: Backend) -> Result<Tensor> {
        match backend {
            Backend::Fused => residual.apply_op3(x, &self.tensor, LinearAdd(Linear { packs: Arc::clone(&self.packs) })),
            Backend::Composed => residual.add(&x.matmul(&self.tensor.t()?)?),
        }
    }
}

struct Linear {
    packs: Arc<Packs>,
}

impl Linear {
    fn forward(&self, x: &[f32], xl: &Layout, w: &[f32], wl: &Layout, mut out: Vec<f32>, add: bool) -> Result<(CpuStorage, Shape)> {
        let ((rows, k), (n, wk)) = (xl.shape().dims2()?, wl.shape().dims2()?);
        if wk != k || (add && out.len() != rows * n) {
            candle_core::bail!("linear: [{rows}, {k}] times [{n}, {wk}] into {} values", out.len());
        }
        if !add {
            out = vec![0f32; rows * n];
        }
        self.packs.forward(w, n, k).mul(Lhs::rows(x, k), &mut out, add);
        Ok((CpuStorage::F32(out), (rows, n).into()))
    }

    fn backward(&self, x: &Tensor, w: &Tensor, g: &Tensor) -> Result<(Tensor, Tensor)> {
        let ((rows, k), (n, _)) = (x.dims2()?, w.dims2()?);
        let dx = with_f32(w, "linear", |ws| {
            with_f32(g, "linear", |gs| {
                let mut dx = vec![0f32; rows * k];
                self.packs.backward(ws, n, k).mul(Lhs::rows(gs, n), &mut dx, false);
                cpu_tensor(dx, &[rows, k])
            })
        })?;
        let dw = with_f32(x, "linear", |xs| {
            with_f32(g, "linear", |gs| {
                let mut dw = vec![0f32; n * k];
                Packed::from_rows(xs, rows, k).mul(Lhs::transposed(gs, n), &mut dw, false);
                cpu_tensor(dw, &[n, k])
            })
        })?;
        Ok((dx, dw))
    }
}

impl CustomOp2 for Linear {
    fn name(&self) -> &'static str {
        "starling-linear"
    }

    fn cpu_fwd(&self, s1: &CpuStorage, l1: &Layout, s2: &CpuStorage, l2: &Layout) -> Result<(CpuStorage, Shape)> {
        let (x, w) = (f32_slice(s1, l1, self.name())?, f32_slice(s2, l2, self.name())?);
        self.forward(x, l1, w, l2, Vec::new(), false)
    }

    fn bwd(&self, x: &Tensor, w: &Tensor, _res: &Tensor, g: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (dx, dw) = self.backward(x, w, g)?;
        Ok((Some(dx), Some(dw)))
    }
}

struct LinearAdd(Linear);

impl CustomOp3 for LinearAdd {
    fn name(&self) -> &'static str {
        "starling-linear-add"
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
        s3: &CpuStorage,
        l3: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let residual = f32_slice(s1, l1, self.name())?.to_vec();
        let (x, w) = (f32_slice(s2, l2, self.name())?, f32_slice(s3, l3, self.name())?);
        self.0.forward(x, l2, w, l3, residual, true)
    }

    fn bwd(
        &self,
        _residual: &Tensor,
        x: &Tensor,
        w: &Tensor,
        _res: &Tensor,
        g: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let (dx, dw) = self.0.backward(x, w, g)?;
        Ok((Some(g.clone()), Some(dx), Some(dw)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{close, finite_differences, wave};
    use super::*;

    #[test]
    fn gradients_match_finite_differences_and_both_backends_agree() {
        let inputs = [wave(&[5, 7], 0.2), wave(&[9, 7], 0.9), wave(&[5, 9], 2.0)];
        finite_differences(&inputs[..2], |t| LinearWeight::new(t[1].clone()).forward(&t[0], Backend::Fused));
        let add = |t: &[Tensor], b| LinearWeight::new(t[1].clone()).forward_add(&t[2], &t[0], b);
        finite_differences(&inputs, |t| add(t, Backend::Fused));
        close(&add(&inputs, Backend::Fused).unwrap(), &add(&inputs, Backend::Composed).unwrap(), 1e-6);
    }
}
