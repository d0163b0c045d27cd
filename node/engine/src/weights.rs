//! A model's weights: named f32 tensors in a fixed order, cheap to clone, with deterministic bytes.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use crate::config::LlamaConfig;
use crate::error::CheckpointError;
use crate::tensors::with_f32;

/// Ordered Hugging Face-named f32 tensors; clones share them.
#[derive(Clone, Debug)]
pub struct Weights {
    tensors: Arc<Vec<(String, Tensor)>>,
}

impl Weights {
    /// Fresh weights, the same for the same seed on every machine.
    ///
    /// Embeddings from N(0, 0.02²); linear layers from N(0, 2 / (5 · fan_in)) ("small init", arXiv:1910.05895), the two
    /// that write to the residual stream divided by sqrt(2 · layers) (GPT-2); norms are 1, biases 0.
    ///
    /// # Errors
    /// `Field` for an inconsistent configuration, `Tensor` if the device has no room.
    pub fn random(cfg: &LlamaConfig, device: &Device, seed: u64) -> Result<Self, CheckpointError> {
        cfg.validate()?;
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut tensors = Vec::new();
        for (name, shape) in cfg.tensor_shapes() {
            let count = shape.iter().product();
            let data = if shape.len() == 1 {
                vec![if name.ends_with(".bias") { 0.0 } else { 1f32 }; count]
            } else {
                normal(&mut rng, count, init_std(cfg, &name, &shape))
            };
            tensors.push((name, Tensor::from_vec(data, shape, device)?));
        }
        Ok(Self { tensors: Arc::new(tensors) })
    }

    /// Reads one safetensors file with F32, F16 or BF16 tensors; every tensor of the model must be there.
    ///
    /// # Errors
    /// `Safetensors` for broken bytes; `MissingTensor`, `UnexpectedTensor`, `Shape`, `Dtype` for what does not fit.
    pub fn from_safetensors(cfg: &LlamaConfig, bytes: &[u8], device: &Device) -> Result<Self, CheckpointError> {
        Self::from_shards(cfg, &[bytes], device)
    }

    /// Like [`Weights::from_safetensors`] for a model split over several files.
    pub(crate) fn from_shards(cfg: &LlamaConfig, shards: &[&[u8]], device: &Device) -> Result<Self, CheckpointError> {
        cfg.validate()?;
        let parsed = shards.iter().map(|b| SafeTensors::deserialize(b)).collect::<Result<Vec<_>, _>>()?;
        let mut found: BTreeMap<&str, TensorView<'_>> = BTreeMap::new();
        for st in &parsed {
            for name in st.names() {
                found.insert(name, st.tensor(name)?);
            }
        }
        let mut tensors = Vec::new();
        for (name, shape) in cfg.tensor_shapes() {
            let Some(view) = found.remove(name.as_str()) else {
                return Err(CheckpointError::MissingTensor { name, expected: shape });
            };
            if view.shape() != shape.as_slice() {
                return Err(CheckpointError::Shape { name, expected: shape, got: view.shape().to_vec() });
            }
            let tensor = to_f32(&name, &view, device)?;
            tensors.push((name, tensor));
        }
        // Older exports carry the rotary frequencies, and tied models sometimes a copy of the embeddings.
        let known = |n: &str| n.ends_with(".rotary_emb.inv_freq") || (n == "lm_head.weight" && cfg.tie_word_embeddings);
        if let Some(name) = found.keys().find(|n| !known(n)) {
            return Err(CheckpointError::UnexpectedTensor { name: (*name).to_owned() });
        }
        Ok(Self { tensors: Arc::new(tensors) })
    }

    /// Puts tensors that match `cfg.tensor_shapes()` in name and order together.
    pub(crate) fn from_ordered(tensors: Vec<(String, Tensor)>) -> Self {
        Self { tensors: Arc::new(tensors) }
    }

    /// The safetensors file of these weights in F32: equal weights give equal bytes, so equal hashes.
    ///
    /// # Errors
    /// `Tensor` if the values cannot be read from the device.
    pub fn to_safetensors(&self) -> Result<Vec<u8>, CheckpointError> {
        self.serialize(DType::F32)
    }

    /// The safetensors file in F32 or BF16 (rounded to nearest even).
    pub(crate) fn serialize(&self, dtype: DType) -> Result<Vec<u8>, CheckpointError> {
        let mut parts = Vec::with_capacity(self.tensors.len());
        for (name, t) in self.tensors.iter() {
            let flat = t.flatten_all()?.to_device(&Device::Cpu)?;
            let mut bytes = Vec::with_capacity(t.elem_count() * dtype.size_in_bytes());
            let (kind, bytes) = if dtype == DType::BF16 {
                for v in flat.to_vec1::<f32>()? {
                    bytes.extend_from_slice(&bf16_bits(v).to_le_bytes());
                }
                (Dtype::BF16, bytes)
            } else {
                for v in flat.to_vec1::<f32>()? {
                    bytes.extend_from_slice(&v.to_le_bytes());
                }
                (Dtype::F32, bytes)
            };
            parts.push((name.as_str(), kind, t.dims().to_vec(), bytes));
        }
        let views = parts
            .iter()
            .map(|(name, kind, shape, bytes)| Ok((*name, TensorView::new(*kind, shape.clone(), bytes)?)))
            .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?;
        // `transformers` refuses files without this entry. One entry only: the map's order cannot vary.
        let info = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        Ok(safetensors::serialize(views, Some(info))?)
    }

    /// All tensors in the order of the forward pass.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.tensors.iter().map(|(n, t)| (n.as_str(), t))
    }

    /// Refuses weights with a NaN or an infinity.
    ///
    /// # Errors
    /// `NonFinite` naming the first such tensor, `Tensor` if the values cannot be read from the device.
    pub(crate) fn check_finite(&self) -> Result<(), CheckpointError> {
        for (name, t) in self.tensors.iter() {
            let values = t.flatten_all()?.to_device(&Device::Cpu)?;
            if !with_f32(&values, "weights", |v| Ok(v.iter().all(|v| v.is_finite())))? {
                return Err(CheckpointError::NonFinite { name: name.clone() });
            }
        }
        Ok(())
    }

    /// Checks names, order and shapes against a configuration.
    pub(crate) fn check(&self, cfg: &LlamaConfig) -> Result<(), CheckpointError> {
        let shapes = cfg.tensor_shapes();
        for (i, (name, expected)) in shapes.iter().enumerate() {
            match self.tensors.get(i) {
                Some((n, t)) if n == name && t.dims() == expected.as_slice() => {}
                Some((n, t)) if n == name => {
                    return Err(CheckpointError::Shape {
                        name: name.clone(),
                        expected: expected.clone(),
                        got: t.dims().to_vec(),
                    });
                }
                _ => return Err(CheckpointError::MissingTensor { name: name.clone(), expected: expected.clone() }),
            }
        }
        match self.tensors.get(shapes.len()) {
            Some((name, _)) => Err(CheckpointError::UnexpectedTensor { name: name.clone() }),
            None => Ok(()),
        }
    }

    /// The tensor at a place of the fixed order; `check` has run.
    pub(crate) fn at(&self, index: usize) -> Result<&Tensor, CheckpointError> {
        self.tensors
            .get(index)
            .map(|(_, t)| t)
            .ok_or_else(|| CheckpointError::MissingTensor { name: format!("#{index}"), expected: Vec::new() })
    }
}

#[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^52")]
fn init_std(cfg: &LlamaConfig, name: &str, shape: &[usize]) -> f64 {
    if name.ends_with("embed_tokens.weight") || name == "lm_head.weight" {
        return 0.02;
    }
    let small = (0.4 / shape[1] as f64).sqrt();
    let residual = name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight");
    if residual { small / (2.0 * cfg.num_hidden_layers as f64).sqrt() } else { small }
}

/// Box-Muller in f64 over 53-bit uniforms: the same bits wherever `ln`, `sqrt`, `cos` agree.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "f64 to f32 rounding is the purpose; 53 bits fit"
)]
fn normal(rng: &mut ChaCha8Rng, count: usize, std: f64) -> Vec<f32> {
    use rand::Rng as _;
    let mut uniform = || (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
    let mut out = Vec::with_capacity(count + 1);
    while out.len() < count {
        let radius = (-2.0 * (1.0 - uniform()).ln()).sqrt() * std;
        let (sin, cos) = (std::f64::consts::TAU * uniform()).sin_cos();
        out.push((radius * cos) as f32);
        out.push((radius * sin) as f32);
    }
    out.truncate(count);
    out
}

fn to_f32(name: &str, view: &TensorView<'_>, device: &Device) -> Result<Tensor, CheckpointError> {
    let dtype = match view.dtype() {
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        other => return Err(CheckpointError::Dtype { name: name.to_owned(), got: format!("{other:?}") }),
    };
    Ok(Tensor::from_raw_buffer(view.data(), dtype, view.shape(), &Device::Cpu)?
        .to_dtype(DType::F32)?
        .to_device(device)?)
}

/// Rounds to the nearest bfloat16, ties to even; NaN stays NaN.
#[expect(clippy::cast_possible_truncation, reason = "the upper half is what remains after the shift")]
fn bf16_bits(v: f32) -> u16 {
    let bits = v.to_bits();
    if v.is_nan() {
        return ((bits >> 16) | 0x40) as u16;
    }
    let round = 0x7fff + ((bits >> 16) & 1);
    (bits.wrapping_add(round) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::tiny_config;

    #[test]
    fn equal_weights_have_equal_bytes_and_come_back_bit_for_bit() {
        let cfg = tiny_config();
        let a = Weights::random(&cfg, &Device::Cpu, 7).unwrap();
        let bytes = a.to_safetensors().unwrap();
        let b = Weights::from_safetensors(&cfg, &bytes, &Device::Cpu).unwrap();
        assert_eq!(b.to_safetensors().unwrap(), bytes);
        assert_eq!(Weights::random(&cfg, &Device::Cpu, 7).unwrap().to_safetensors().unwrap(), bytes);
        assert_ne!(Weights::random(&cfg, &Device::Cpu, 8).unwrap().to_safetensors().unwrap(), bytes);
    }

    #[test]
    fn bf16_is_rounded_to_nearest_even_as_candle_does() {
        let cfg = tiny_config();
        let w = Weights::random(&cfg, &Device::Cpu, 7).unwrap();
        let back = Weights::from_safetensors(&cfg, &w.serialize(DType::BF16).unwrap(), &Device::Cpu).unwrap();
        for ((_, a), (_, b)) in w.iter().zip(back.iter()) {
            let a = a.to_dtype(DType::BF16).unwrap().to_dtype(DType::F32).unwrap();
            assert_eq!(
                a.flatten_all().unwrap().to_vec1::<f32>().unwrap(),
                b.flatten_all().unwrap().to_vec1::<f32>().unwrap()
            );
        }
    }

    #[test]
    fn missing_unexpected_and_misshapen_tensors_are_refused_by_name() {
        let cfg = tiny_config();
        let w = Weights::random(&cfg, &Device::Cpu, 7).unwrap();
        let bytes = w.to_safetensors().unwrap();
        let mut deeper = cfg.clone();
        deeper.num_hidden_layers += 1;
        let err = Weights::from_safetensors(&deeper, &bytes, &Device::Cpu).unwrap_err();
        assert!(matches!(err, CheckpointError::MissingTensor { ref name, .. } if name.contains("layers.2")), "{err}");
        let mut shallower = cfg.clone();
        shallower.num_hidden_layers -= 1;
        let err = Weights::from_safetensors(&shallower, &bytes, &Device::Cpu).unwrap_err();
        assert!(matches!(err, CheckpointError::UnexpectedTensor { .. }), "{err}");
        let mut wider = cfg;
        wider.intermediate_size += 1;
        let err = Weights::from_safetensors(&wider, &bytes, &Device::Cpu).unwrap_err();
        assert!(matches!(err, CheckpointError::Shape { .. }), "{err}");
        assert!(Weights::from_safetensors(&wider, &bytes[..40], &Device::Cpu).is_err());
    }
}
