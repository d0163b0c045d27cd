//! AdamW with f32 master weights; every update yields new tensors, so that old snapshots never change.

use std::sync::{Mutex, PoisonError};

use candle_core::{Device, Result, Tensor};

use crate::kernels::simd_fn;
use crate::par;
use crate::tensors::with_f32;

/// Hyper-parameters of one update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct AdamW {
    /// Learning rate.
    pub(crate) learning_rate: f64,
    /// Decay of the first and the second moment.
    pub(crate) betas: (f64, f64),
    /// Added to the root of the second moment.
    pub(crate) eps: f64,
    /// Decoupled decay per unit of learning rate, for matrices only.
    pub(crate) weight_decay: f64,
}

/// A parameter with its moments, all of one shape.
#[derive(Clone, Debug)]
pub(crate) struct Slot {
    /// Value.
    pub(crate) value: Tensor,
    /// First moment.
    pub(crate) m: Tensor,
    /// Second moment.
    pub(crate) v: Tensor,
}

/// The scalars of one update, folded in f64.
#[derive(Clone, Copy, Debug)]
struct Scalars {
    grad_scale: f32,
    keep: f32,
    b1: f32,
    b2: f32,
    step: f32,
    inv_root_bc2: f32,
    eps: f32,
}

simd_fn! {
    fn update_slice(s: Scalars, g: &[f32], p: &mut [f32], m: &mut [f32], v: &mut [f32]) = update_body
}

#[inline(always)]
fn update_body<const FMA: bool>(s: Scalars, g: &[f32], p: &mut [f32], m: &mut [f32], v: &mut [f32]) {
    for (((p, m), v), &g) in p.iter_mut().zip(m.iter_mut()).zip(v.iter_mut()).zip(g) {
        let g = g * s.grad_scale;
        *m = s.b1 * *m + (1.0 - s.b1) * g;
        *v = s.b2 * *v + (1.0 - s.b2) * g * g;
        *p = s.keep * *p - s.step * *m / (v.sqrt() * s.inv_root_bc2 + s.eps);
    }
}

simd_fn! {
    /// Whether [`update_slice`] would leave finite numbers only.
    fn stays_finite(s: Scalars, g: &[f32], p: &[f32], m: &[f32], v: &[f32]) -> bool = stays_finite_body
}

#[inline(always)]
fn stays_finite_body<const FMA: bool>(s: Scalars, g: &[f32], p: &[f32], m: &[f32], v: &[f32]) -> bool {
    const CHUNK: usize = 256;
    let mut buffers = [[0f32; CHUNK]; 3];
    let chunks = g.chunks(CHUNK).zip(p.chunks(CHUNK)).zip(m.chunks(CHUNK)).zip(v.chunks(CHUNK));
    chunks.fold(true, |all, (((g, p), m), v)| {
        let [bp, bm, bv] = &mut buffers;
        let (bp, bm, bv) = (&mut bp[..p.len()], &mut bm[..p.len()], &mut bv[..p.len()]);
        bp.copy_from_slice(p);
        bm.copy_from_slice(m);
        bv.copy_from_slice(v);
        update_body::<FMA>(s, g, bp, bm, bv);
        let finite = |x: &[f32]| x.iter().fold(true, |all, v| all & v.is_finite());
        all & finite(bp) & finite(bm) & finite(bv)
    })
}

impl AdamW {
    #[expect(clippy::cast_possible_truncation, reason = "f32 is the arithmetic's precision")]
    fn scalars(&self, update: u64, grad_scale: f64, decay: bool) -> Scalars {
        let power = |b: f64| 1.0 - b.powf(u64_to_f64(update));
        let keep = if decay { 1.0 - self.learning_rate * self.weight_decay } else { 1.0 };
        Scalars {
            grad_scale: grad_scale as f32,
            keep: keep as f32,
            b1: self.betas.0 as f32,
            b2: self.betas.1 as f32,
            step: (self.learning_rate / power(self.betas.0)) as f32,
            inv_root_bc2: (1.0 / power(self.betas.1).sqrt()) as f32,
            eps: self.eps as f32,
        }
    }

    /// The state after update number `update` (from 1) with gradients scaled by `grad_scale`.
    ///
    /// Loshchilov and Hutter, arXiv:1711.05101, with bias correction as in `torch.optim.AdamW`; vectors (norms)
    /// do not decay. Tensors are not changed in place, since snapshots share them; but each slot and gradient is dropped
    /// once its successor is there, so that no second copy of everything lives for those who hold none.
    ///
    /// # Errors
    /// The device's. On the CPU there is none behind [`AdamW::check`].
    pub(crate) fn update(
        &self,
        slots: Vec<Slot>,
        grads: Vec<Tensor>,
        update: u64,
        grad_scale: f64,
    ) -> Result<Vec<Slot>> {
        let inputs: Vec<_> = slots.into_iter().zip(grads).map(|pair| Mutex::new(Some(pair))).collect();
        let results: Vec<Mutex<Option<Result<Slot>>>> = inputs.iter().map(|_| Mutex::new(None)).collect();
        par::for_each(inputs.len(), |i| {
            let Some((slot, grad)) = inputs[i].lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
            let s = self.scalars(update, grad_scale, slot.value.rank() > 1);
            let result =
                if slot.value.device().is_cpu() { update_cpu(s, slot, &grad) } else { update_device(s, &slot, &grad) };
            *results[i].lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        });
        results
            .into_iter()
            .map(|r| match r.into_inner().unwrap_or_else(PoisonError::into_inner) {
                Some(result) => result,
                None => candle_core::bail!("optimizer update did not run"),
            })
            .collect()
    }

    /// Refuses an update that would overflow. CPU tensors only; others are not looked at.
    ///
    /// # Errors
    /// As said.
    pub(crate) fn check(&self, slots: &[Slot], grads: &[Tensor], update: u64, grad_scale: f64) -> Result<()> {
        let finite = std::sync::atomic::AtomicBool::new(true);
        let results: Vec<Mutex<Result<()>>> = slots.iter().map(|_| Mutex::new(Ok(()))).collect();
        par::for_each(slots.len(), |i| {
            let (slot, s) = (&slots[i], self.scalars(update, grad_scale, slots[i].value.rank() > 1));
            if !slot.value.device().is_cpu() {
                return;
            }
            let read = |t: &Tensor, f: &mut dyn FnMut(&[f32]) -> Result<()>| with_f32(t, "adamw", f);
            let result = read(&grads[i], &mut |g| {
                read(&slot.value, &mut |p| {
                    read(&slot.m, &mut |m| {
                        read(&slot.v, &mut |v| {
                            if !stays_finite(s, g, p, m, v) {
                                finite.store(false, std::sync::atomic::Ordering::Relaxed);
                            }
                            Ok(())
                        })
                    })
                })
            });
            *results[i].lock().unwrap_or_else(PoisonError::into_inner) = result;
        });
        for result in results {
            result.into_inner().unwrap_or_else(PoisonError::into_inner)?;
        }
        if !finite.into_inner() {
            candle_core::bail!("AdamW's update overflowed: expected finite weights and moments");
        }
        Ok(())
    }
}

/// Update counts are exact in f64 up to 2^53.
#[expect(clippy::cast_precision_loss, reason = "2^53 updates are out of reach")]
fn u64_to_f64(n: u64) -> f64 {
    n as f64
}

fn update_cpu(s: Scalars, slot: Slot, grad: &Tensor) -> Result<Slot> {
    let copy = |t: Tensor| with_f32(&t, "adamw", |x| Ok(x.to_vec()));
    let dims = slot.value.dims().to_vec();
    let (mut p, mut m, mut v) = (copy(slot.value)?, copy(slot.m)?, copy(slot.v)?);
    with_f32(grad, "adamw", |g| {
        update_slice(s, g, &mut p, &mut m, &mut v);
        Ok(())
    })?;
    let tensor = |data| Tensor::from_vec(data, dims.as_slice(), &Device::Cpu);
    Ok(Slot { value: tensor(p)?, m: tensor(m)?, v: tensor(v)? })
}

fn update_device(s: Scalars, slot: &Slot, grad: &Tensor) -> Result<Slot> {
    let g = (grad * f64::from(s.grad_scale))?;
    let m = ((&slot.m * f64::from(s.b1))? + (&g * f64::from(1.0 - s.b1))?)?;
    let v = ((&slot.v * f64::from(s.b2))? + (g.sqr()? * f64::from(1.0 - s.b2))?)?;
    let denominator = ((v.sqrt()? * f64::from(s.inv_root_bc2))? + f64::from(s.eps))?;
    let value = ((&slot.value * f64::from(s.keep))? - ((&m / denominator)? * f64::from(s.step))?)?;
    Ok(Slot { value, m, v })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Python: torch.optim.AdamW([p], lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.5), p = [[1, -2]],
    /// grads [[0.5, 0.1]] then [[-0.25, 0.3]]; each step by hand in f64:
    /// step 1: p = 0.95 p - 0.1 sign(g) = [0.85, -2.0]
    #[test]
    fn two_updates_match_hand_computed_values_on_both_paths() {
        let t = |x: [f32; 2]| Tensor::from_vec(x.to_vec(), (1, 2), &Device::Cpu).unwrap();
        let opt = AdamW { learning_rate: 0.1, betas: (0.9, 0.99), eps: 1e-8, weight_decay: 0.5 };
        let start = Slot { value: t([1.0, -2.0]), m: t([0.0; 2]), v: t([0.0; 2]) };
        let one = opt.update(vec![start], vec![t([0.5, 0.1])], 1, 1.0).unwrap();
        let got = one[0].value.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert!((got[0] - 0.85).abs() < 1e-6 && (got[1] + 2.0).abs() < 1e-6, "{got:?}");
        let two = opt.update(one.clone(), vec![t([-0.5, 0.6])], 2, 0.5).unwrap();
        let got = two[0].value.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for (i, (g1, g2)) in [(0.5f64, -0.25f64), (0.1, 0.3)].into_iter().enumerate() {
            let m = 0.9 * 0.1 * g1 + 0.1 * g2;
            let v = 0.99 * 0.01 * g1 * g1 + 0.01 * g2 * g2;
            let p1 = [0.85, -2.0][i];
            let want = 0.95 * p1 - 0.1 * (m / (1.0 - 0.81)) / ((v / (1.0 - 0.9801)).sqrt() + 1e-8);
            assert!((f64::from(got[i]) - want).abs() < 1e-6, "{} against {want}", got[i]);
        }
        let s = opt.scalars(2, 0.5, true);
        let device = update_device(s, &one[0], &t([-0.5, 0.6])).unwrap().value;
        let device = device.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert!(device.iter().zip(&got).all(|(a, b)| (a - b).abs() < 1e-6), "{device:?} against {got:?}");
    }

    #[test]
    fn an_update_that_overflows_is_refused_before_anything_moves() {
        let t = |x: f32| Tensor::from_vec(vec![1.0, x], (1, 2), &Device::Cpu).unwrap();
        let opt = AdamW { learning_rate: 0.1, betas: (0.9, 0.99), eps: 1e-8, weight_decay: 0.0 };
        let slots = [Slot { value: t(1.0), m: t(0.0), v: t(0.0) }, Slot { value: t(1.0), m: t(0.0), v: t(0.0) }];
        opt.check(&slots, &[t(1.0), t(1e18)], 1, 1.0).unwrap();
        let err = opt.check(&slots, &[t(1.0), t(1e30)], 1, 1.0).unwrap_err().to_string();
        assert!(err.contains("overflowed"), "{err}");
        opt.check(&slots, &[t(1.0), t(1e30)], 1, 1e-20).unwrap();
    }

    #[test]
    fn vectors_do_not_decay() {
        let t = |x: f32| Tensor::from_vec(vec![x; 2], 2, &Device::Cpu).unwrap();
        let opt = AdamW { learning_rate: 0.1, betas: (0.9, 0.99), eps: 1e-8, weight_decay: 0.5 };
        let slot = Slot { value: t(1.0), m: t(0.0), v: t(0.0) };
        let out = opt.update(vec![slot], vec![t(0.0)], 1, 1.0).unwrap();
        assert_eq!(out[0].value.to_vec1::<f32>().unwrap(), [1.0, 1.0]);
    }
}
