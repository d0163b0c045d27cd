//! Differentiable operators: fused kernels on the CPU, compositions of candle's own operators elsewhere.
//!
//! candle's fused `softmax_last_dim`, `rms_norm` and `rope` have no backward and cut the gradient silently
//! (huggingface/candle #2168, #3568, #3569); nothing here uses them.

pub(crate) mod attention;
pub(crate) mod composed;
pub(crate) mod linear;
pub(crate) mod logprob;
pub(crate) mod norm;
pub(crate) mod swiglu;

use candle_core::{CpuStorage, Device, Layout, Result, Storage, Tensor};

/// Which implementation of the operators to take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backend {
    /// Own kernels with own backward; CPU only.
    Fused,
    /// Compositions of candle operators that have a backward; any device.
    Composed,
}

impl Backend {
    /// The fast one for a device.
    pub(crate) fn for_device(device: &Device) -> Self {
        if device.is_cpu() { Self::Fused } else { Self::Composed }
    }
}

/// The contiguous f32 values behind a storage.
pub(crate) fn f32_slice<'a>(storage: &'a CpuStorage, layout: &Layout, op: &str) -> Result<&'a [f32]> {
    let CpuStorage::F32(data) = storage else { candle_core::bail!("{op}: expected f32 values") };
    match layout.contiguous_offsets() {
        Some((from, to)) => Ok(&data[from..to]),
        None => candle_core::bail!("{op}: expected contiguous values, got strides {:?}", layout.stride()),
    }
}

/// Calls `f` with a CPU tensor's values, without a copy if they are contiguous.
pub(crate) fn with_f32<R>(t: &Tensor, op: &str, f: impl FnOnce(&[f32]) -> Result<R>) -> Result<R> {
    let t = t.contiguous()?;
    let (storage, layout) = t.storage_and_layout();
    match &*storage {
        Storage::Cpu(cpu) => f(f32_slice(cpu, layout, op)?),
        Storage::Cuda(_) | Storage::Metal(_) => candle_core::bail!("{op}: expected a CPU tensor"),
    }
}

/// A CPU tensor that takes over `data`.
pub(crate) fn cpu_tensor(data: Vec<f32>, dims: &[usize]) -> Result<Tensor> {
    Tensor::from_vec(data, dims, &Device::Cpu)
}

#[cfg(test)]
pub(crate) mod check {
    //! Finite differences for operators.

    use candle_core::{Device, Result, Tensor, Var};

    /// A smooth, varied input.
    pub(crate) fn wave(dims: &[usize], phase: f64) -> Tensor {
        let n: usize = dims.iter().product();
        #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "test input")]
        let data: Vec<f32> = (0..n).map(|i| ((i as f64 * 0.731 + phase).sin() * 0.8) as f32).collect();
        Tensor::from_vec(data, dims, &Device::Cpu).unwrap()
    }

    /// Compares `f`'s gradient, contracted with a fixed direction, with central differences.
    ///
    /// Step 1e-2 in f32: the truncation error is of order 1e-4, the rounding error of order 1e-5;
    /// 3e-3 of the largest gradient leaves a margin above both.
    pub(crate) fn finite_differences(inputs: &[Tensor], f: impl Fn(&[Tensor]) -> Result<Tensor>) {
        let vars: Vec<Var> = inputs.iter().map(|t| Var::from_tensor(t).unwrap()).collect();
        let tensors: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
        let out = f(&tensors).unwrap();
        let weights = wave(out.dims(), 0.4);
        let grads = out.mul(&weights).unwrap().sum_all().unwrap().backward().unwrap();
        let value = |ts: &[Tensor]| -> f64 {
            let flat = f(ts).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let w = weights.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            flat.iter().zip(&w).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
        };
        for (i, input) in inputs.iter().enumerate() {
            let grad = grads.get(&vars[i]).unwrap_or_else(|| panic!("input {i} has no gradient"));
            let grad = grad.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let base = input.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let largest = grad.iter().fold(1e-3f32, |a, g| a.max(g.abs()));
            for j in 0..base.len() {
                let at = |step: f32| {
                    let mut moved = base.clone();
                    moved[j] += step;
                    let mut ts = inputs.to_vec();
                    ts[i] = Tensor::from_vec(moved, input.dims(), &Device::Cpu).unwrap();
                    value(&ts)
                };
                let want = (at(1e-2) - at(-1e-2)) / 2e-2;
                let got = f64::from(grad[j]);
                assert!((got - want).abs() < 3e-3 * f64::from(largest), "input {i}[{j}]: expected {want}, got {got}");
            }
        }
    }

    /// Asserts that two tensors agree within `tolerance` of the larger's largest element.
    pub(crate) fn close(a: &Tensor, b: &Tensor, tolerance: f32) {
        let a = a.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let b = b.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(a.len(), b.len());
        let scale = b.iter().fold(1e-6f32, |m, v| m.max(v.abs()));
        for (i, (a, b)) in a.iter().zip(&b).enumerate() {
            assert!((a - b).abs() <= tolerance * scale, "element {i}: {a} against {b}");
        }
    }
}
