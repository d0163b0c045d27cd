//! Optimizer state as bytes, so that another node continues with the same moments, and with the same adapters.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use super::Trainer;
use super::adapter_file::{LORA, spec_of};
use super::optim::Slot;
use crate::error::TrainError;
use crate::params::{fused_spans, split};
use crate::tensors::{to_host, with_f32};

/// Name of the update counter.
const STEP: &str = "step";

impl Trainer {
    /// AdamW's moments and update count as safetensors: `m.<tensor>`, `v.<tensor>` (F32) and `step` (U64). With adapters
    /// the tensors are theirs, by PEFT's names, and stand there too; the entry `lora` of the metadata says what they are.
    ///
    /// Together with [`Trainer::weights`], or with the weights under the adapters, this resumes training bit for bit.
    /// Equal states give equal bytes.
    ///
    /// # Errors
    /// `Tensor` if the values cannot be read from the device.
    pub fn optimizer_state(&self) -> Result<Vec<u8>, TrainError> {
        let mut entries = vec![(STEP.to_owned(), Dtype::U64, vec![1], self.updates.to_le_bytes().to_vec())];
        let mut add = |prefix: &str, tensors: Vec<(String, Tensor)>| -> Result<(), TrainError> {
            for (name, t) in tensors {
                let bytes = to_host(&t, "state")?.iter().flat_map(|v| v.to_le_bytes()).collect();
                entries.push((format!("{prefix}{name}"), Dtype::F32, t.dims().to_vec(), bytes));
            }
            Ok(())
        };
        for (prefix, pick) in [("m.", (|s: &Slot| s.m.clone()) as fn(&Slot) -> Tensor), ("v.", |s| s.v.clone())] {
            add(prefix, self.named(&self.slots.iter().map(pick).collect::<Vec<_>>())?)?;
        }
        let mut info = None;
        if let Some(adapters) = &self.adapters {
            add("", self.named(&super::values(&self.slots))?)?;
            // One entry only: the map's order cannot vary.
            let spec = serde_json::to_string(&adapters.layout.spec).map_err(|e| TrainError::OptimizerState {
                field: LORA.into(),
                expected: "a description that JSON can hold".into(),
                got: e.to_string(),
            })?;
            info = Some(HashMap::from([(LORA.to_owned(), spec)]));
        }
        let views = entries
            .iter()
            .map(|(name, dtype, shape, bytes)| Ok((name.as_str(), TensorView::new(*dtype, shape.clone(), bytes)?)))
            .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?;
        Ok(safetensors::serialize(views, info)?)
    }

    /// Takes over state that [`Trainer::optimizer_state`] wrote for a model of this shape, with the same adapters or none.
    ///
    /// # Errors
    /// `Safetensors` or `OptimizerState`; nothing has changed then.
    pub fn load_optimizer_state(&mut self, bytes: &[u8]) -> Result<(), TrainError> {
        let file = SafeTensors::deserialize(bytes)?;
        let (expected, got) = (self.adapters.as_ref().map(|a| &a.layout.spec), spec_of(bytes)?);
        if expected != got.as_ref() {
            let text = |spec| serde_json::to_string(&spec).unwrap_or_default();
            let (expected, got) = (text(expected.cloned()), text(got));
            return Err(TrainError::OptimizerState { field: LORA.into(), expected, got });
        }
        let step = file.tensor(STEP).ok().and_then(|t| t.data().try_into().ok()).map(u64::from_le_bytes);
        let Some(updates) = step else {
            return Err(TrainError::OptimizerState {
                field: STEP.into(),
                expected: "one U64".into(),
                got: "none".into(),
            });
        };
        let m = self.tensors(&file, "m.")?;
        let v = self.tensors(&file, "v.")?;
        let values = if self.adapters.is_some() { self.tensors(&file, "")? } else { super::values(&self.slots) };
        self.slots = values.into_iter().zip(m.into_iter().zip(v)).map(|(value, (m, v))| Slot { value, m, v }).collect();
        self.updates = updates;
        Ok(())
    }

    /// Tensors of the slots' shapes by the names that files have.
    fn named(&self, tensors: &[Tensor]) -> Result<Vec<(String, Tensor)>, TrainError> {
        match &self.adapters {
            None => Ok(split(&self.cfg, tensors)?),
            Some(a) => Ok(a.layout.tensors().into_iter().map(|(name, _)| name).zip(tensors.iter().cloned()).collect()),
        }
    }

    /// The tensors of one kind, one a slot, checked.
    fn tensors(&self, file: &SafeTensors<'_>, prefix: &str) -> Result<Vec<Tensor>, TrainError> {
        let (mut shapes, spans) = match &self.adapters {
            None => (self.cfg.tensor_shapes(), fused_spans(&self.cfg)),
            Some(a) => {
                let shapes: Vec<_> = a.layout.tensors().into_iter().map(|(n, s)| (n, s.to_vec())).collect();
                let spans = vec![1; shapes.len()];
                (shapes, spans)
            }
        };
        let mut shapes = shapes.drain(..);
        let mut out = Vec::new();
        for span in spans {
            let mut parts = Vec::with_capacity(span);
            for (name, shape) in shapes.by_ref().take(span) {
                let field = format!("{prefix}{name}");
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
                let field = if prefix.is_empty() { LORA } else { prefix.trim_end_matches('.') };
                let (expected, got) = ("finite values".into(), "NaN or infinity".into());
                return Err(TrainError::OptimizerState { field: field.into(), expected, got });
            }
            out.push(fused.to_device(&self.device)?);
        }
        Ok(out)
    }
}
