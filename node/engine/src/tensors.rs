//! Access to the values behind candle tensors on the host.

use candle_core::{CpuStorage, Result, Storage, Tensor};

/// Calls `f` with a CPU tensor's f32 values, without a copy if they are contiguous.
pub(crate) fn with_f32<R>(t: &Tensor, what: &str, f: impl FnOnce(&[f32]) -> Result<R>) -> Result<R> {
    let t = t.contiguous()?;
    let (storage, layout) = t.storage_and_layout();
    let Storage::Cpu(CpuStorage::F32(data)) = &*storage else {
        candle_core::bail!("{what}: expected f32 values on the CPU");
    };
    match layout.contiguous_offsets() {
        Some((from, to)) => f(&data[from..to]),
        None => candle_core::bail!("{what}: expected contiguous values, got strides {:?}", layout.stride()),
    }
}

/// A copy of a tensor's values, from whatever device.
pub(crate) fn to_host(t: &Tensor, what: &str) -> Result<Vec<f32>> {
    with_f32(&t.to_device(&candle_core::Device::Cpu)?, what, |x| Ok(x.to_vec()))
}
