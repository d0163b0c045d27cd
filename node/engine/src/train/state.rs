//! Optimizer state as bytes, so that another node continues with the same moments.

use candle_core::{DType, Device, Tensor};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use super::Trainer;
use super::optim::Slot;
use crate::error::TrainError;
use crate::params::{fused_spans, split};
use crate::tensors::{to_host, with_f32};

/// Name of the update counter.
const STEP: &str = "step";

impl Trainer {
    /// AdamW's moments and update count as safetensors: `m.<tensor>`, `v.<tensor>` (F32) and `step` (U64).
    ///
    /// Together with [`Trainer::weights`] this resumes training bit for bit. Equal states give equal bytes.
    ///
    /// # Errors
    /// `Tensor` if the values cannot be read from the device.
    pub fn optimizer_state(&self) -> Result<Vec<u8>, TrainError> {
        let mut entries = vec![(STEP.to_owned(), Dtype::U64, vec![1], self.updates.to_le_bytes().to_vec())];
        for (prefix, pick) in [("m", (|s: &Slot| s.m.clone()) as fn(&Slot) -> Tensor), ("v", |s| s.v.clone())] {
            let moments: Vec<Tensor> = self.slots.iter().map(pick).collect();
            for (name, t) in split(&self.cfg, &moments)? {
                let bytes = to_host(&t, "state")?.iter().flat_map(|v| v.to_le_bytes()).collect();
                entries.push((format!("{prefix}.{name}"), Dtype::F32, t.dims().to_vec(), bytes));
            }
        }
        let views = entries
            .iter()
            .map(|(name, dtype, shape, bytes)| Ok((name.as_str(), TensorView::new(*dtype, shape.clone(), bytes)?)))
            .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?;
        Ok(safetensors::serialize(views, None)?)
    }

    /// Takes over state that [`Trainer::optimizer_state`] wrote for a model of this shape.
    ///
    /// # Errors
    /// `Safetensors` or `OptimizerState`; nothing has changed then.
    pub fn load_optimizer_state(&mut self, bytes: &[u8]) -> Result<(), TrainError> {
        let file = SafeTensors::deserialize(bytes)?;
        let step = file.tensor(STEP).ok().and_then(|t| t.data().try_into().ok()).map(u64::from_le_bytes);
        let Some(updates) = step else {
            return Err(TrainError::OptimizerState {
                field: STEP.into(),
                expected: "one U64".into(),
                got: "none".into(),
            });
        };
        let m = self.moments(&file, "m")?;
        let v = self.moments(&file, "v")?;
        for (slot, (m, v)) in self.slots.iter_mut().zip(m.into_iter().zip(v)) {
            slot.m = m;
            slot.v = v;
        }
        self.updates = updates;
        Ok(())
    }

    /// The fused moments of one kind, checked.
    fn moments(&self, file: &SafeTensors<'_>, prefix: &str) -> Result<Vec<Tensor>, TrainError> {
        let mut shapes = self.cfg.tensor_shapes().into_iter();
        let mut out = Vec::new();
        for span in fused_spans(&self.cfg) {
            let mut parts = Vec::with_capacity(span);
            for (name, shape) in shapes.by_ref().take(span) {
                let field = format!("{prefix}.{name}");
                let expected = format!("F32 {shape:?}");
                let view = file.tensor(&field).ok();
                let found = view.as_ref().map_or_else(|| "none".into(), |t| format!("{:?} {:?}", t.dtype(), t.shape()));
                match view.filter(|t| t.dtype() == Dtype::F32 && t.shape() == shape.as_slice()) {
                    Some(t) => parts.push(Tensor::from_raw_buffer(t.data(), DType::F32, &shape, &Device::Cpu)?),
                    None => return Err(TrainError::OptimizerState { field, expected, got: found }),
                }
            }
            let fused = if span == 1 { parts[0].clone() } else { Tensor::cat(&parts, 0)? };
            if !with_f32(&fused, "state", |x| Ok(x.iter().all(|v| v.is_finite())))? {
                let (expected, got) = ("finite values".into(), "NaN or infinity".into());
                return Err(TrainError::OptimizerState { field: prefix.into(), expected, got });
            }
            out.push(fused.to_device(&self.device)?);
        }
        Ok(out)
    }
}
