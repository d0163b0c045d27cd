//! GGUF files, llama.cpp's format: configuration, weights as f32, and the tokenizer as the files of a Hugging Face folder.
//!
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>. Header and blocks are read by candle.

mod metadata;
mod tokenizer;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufReader;
use std::panic::AssertUnwindSafe;
use std::path::Path;

use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::{Content, TensorInfo};
use candle_core::{Device, Tensor};

use crate::checkpoint::Checkpoint;
use crate::config::{Architecture, Llama3Scaling, LlamaConfig};
use crate::error::CheckpointError;
use crate::weights::Weights;
use metadata::Metadata;

/// Block formats that are dequantized.
const DTYPES: [GgmlDType; 13] = [
    GgmlDType::F32,
    GgmlDType::F16,
    GgmlDType::BF16,
    GgmlDType::Q8_0,
    GgmlDType::Q4_0,
    GgmlDType::Q4_1,
    GgmlDType::Q5_0,
    GgmlDType::Q5_1,
    GgmlDType::Q2K,
    GgmlDType::Q3K,
    GgmlDType::Q4K,
    GgmlDType::Q5K,
    GgmlDType::Q6K,
];

/// Llama 3's frequency factors, the only tensor that is not a parameter.
const ROPE_FACTORS: &str = "rope_freqs.weight";

/// Reads a whole model from one file.
///
/// # Errors
/// `Io` and `Gguf` with the path; `Metadata` naming a key that is missing or asks for what this engine does not do;
/// `MissingTensor`, `UnexpectedTensor`, `Shape`, `Quantization`, `NonFinite` naming a tensor, by its name in the file.
pub(crate) fn load(path: &Path, device: &Device) -> Result<Checkpoint, CheckpointError> {
    let file = File::open(path).map_err(|source| CheckpointError::Io { path: path.to_owned(), source })?;
    let mut reader = BufReader::new(file);
    let broken = |reason: String| CheckpointError::Gguf { path: path.to_owned(), reason };
    // candle divides by the file's `general.alignment` unchecked, so that a 0 there panics.
    let content = std::panic::catch_unwind(AssertUnwindSafe(|| Content::read(&mut reader)))
        .map_err(|_| broken("its header makes no sense".into()))?
        .map_err(|e| broken(e.to_string()))?;
    let mut source = Source { path, reader, content };
    let config = source.config()?;
    let files = tokenizer::files(&Metadata::new(&source.content.metadata), &config)?;
    let weights = source.weights(&config, device)?;
    Ok(Checkpoint { config, weights, files })
}

/// An open file with its header.
struct Source<'a> {
    path: &'a Path,
    reader: BufReader<File>,
    content: Content,
}

impl Source<'_> {
    fn config(&mut self) -> Result<LlamaConfig, CheckpointError> {
        let meta = Metadata::new(&self.content.metadata);
        let architecture = meta.architecture()?;
        let key = |name: &str| format!("{}.{name}", architecture.name());
        refuse_unsupported(&meta, architecture)?;
        let hidden = meta.required(&key("embedding_length"))?;
        let heads = meta.required(&key("attention.head_count"))?;
        let head_dim = match meta.size(&key("attention.key_length"))? {
            Some(d) => d,
            None => hidden / heads.max(1),
        };
        for other in ["attention.value_length", "rope.dimension_count"] {
            if let Some(d) = meta.size(&key(other))?
                && d != head_dim
            {
                return Err(metadata::refused(key(other), format!("{head_dim}, the width of a head"), d));
            }
        }
        let Some(embeddings) = self.content.tensor_infos.get("token_embd.weight") else {
            return Err(CheckpointError::MissingTensor { name: "token_embd.weight".into(), expected: vec![0, hidden] });
        };
        let vocab_size = embeddings.shape.dims().first().copied().unwrap_or(0);
        let rope_theta = meta.float(&key("rope.freq_base"))?.unwrap_or(10_000.0);
        let mut config = LlamaConfig {
            architecture,
            vocab_size,
            hidden_size: hidden,
            intermediate_size: meta.required(&key("feed_forward_length"))?,
            num_hidden_layers: meta.required(&key("block_count"))?,
            num_attention_heads: heads,
            num_key_value_heads: meta.size(&key("attention.head_count_kv"))?.unwrap_or(heads),
            head_dim,
            rms_norm_eps: meta.float(&key("attention.layer_norm_rms_epsilon"))?.unwrap_or(1e-6),
            rope_theta,
            rope_scaling: None,
            max_position_embeddings: meta.required(&key("context_length"))?,
            tie_word_embeddings: !self.content.tensor_infos.contains_key("output.weight"),
            bos_token_id: meta.token_id("tokenizer.ggml.bos_token_id")?,
            eos_token_ids: meta.end_token_ids()?,
        };
        config.validate()?;
        config.rope_scaling = self.rope_scaling(&config)?;
        config.validate()?;
        Ok(config)
    }

    /// Llama 3's scaling, of which the file holds only the resulting factor of each frequency.
    fn rope_scaling(&mut self, config: &LlamaConfig) -> Result<Option<Llama3Scaling>, CheckpointError> {
        let Some(info) = self.content.tensor_infos.remove(ROPE_FACTORS) else { return Ok(None) };
        let factors = self.read(ROPE_FACTORS, &info, &[config.head_dim / 2])?;
        scaling_of(&factors, config.head_dim, config.rope_theta).ok_or_else(|| {
            let expected = "factors of rope_type \"llama3\" with low 1, high 4, original length 8192";
            metadata::refused(ROPE_FACTORS, expected, format!("{factors:?}"))
        })
    }

    fn weights(&mut self, config: &LlamaConfig, device: &Device) -> Result<Weights, CheckpointError> {
        let mut tensors = Vec::new();
        for (name, shape) in config.tensor_shapes() {
            let stored = stored_name(&name);
            let Some(info) = self.content.tensor_infos.remove(&stored) else {
                return Err(CheckpointError::MissingTensor { name: stored, expected: shape });
            };
            let mut values = self.read(&stored, &info, &shape)?;
            if config.architecture == Architecture::Llama {
                if name.ends_with("q_proj.weight") {
                    values = half_split(&values, config.num_attention_heads, config.head_dim);
                } else if name.ends_with("k_proj.weight") {
                    values = half_split(&values, config.num_key_value_heads, config.head_dim);
                }
            }
            tensors.push((name, Tensor::from_vec(values, shape, device)?));
        }
        match self.content.tensor_infos.keys().min() {
            Some(name) => Err(CheckpointError::UnexpectedTensor { name: name.clone() }),
            None => Ok(Weights::from_ordered(tensors)),
        }
    }

    /// A tensor's values as f32, checked.
    fn read(&mut self, name: &str, info: &TensorInfo, expected: &[usize]) -> Result<Vec<f32>, CheckpointError> {
        // Before anything is allocated: a file may claim any shape.
        if info.shape.dims() != expected {
            let (expected, got) = (expected.to_vec(), info.shape.dims().to_vec());
            return Err(CheckpointError::Shape { name: name.to_owned(), expected, got });
        }
        if !DTYPES.contains(&info.ggml_dtype) {
            let got = format!("{:?}", info.ggml_dtype);
            return Err(CheckpointError::Quantization { name: name.to_owned(), got });
        }
        let block = info.ggml_dtype.block_size();
        if !expected.last().is_some_and(|columns| columns.is_multiple_of(block)) {
            let got = format!("{:?} in rows of {:?} values, no multiple of {block}", info.ggml_dtype, expected.last());
            return Err(CheckpointError::Quantization { name: name.to_owned(), got });
        }
        let broken = |e: candle_core::Error| CheckpointError::Gguf {
            path: self.path.to_owned(),
            reason: format!("{name}: {e}"),
        };
        let values = info
            .read(&mut self.reader, self.content.tensor_data_offset, &Device::Cpu)
            .and_then(|t| t.dequantize(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>())
            .map_err(broken)?;
        if values.iter().all(|v| v.is_finite()) {
            Ok(values)
        } else {
            Err(CheckpointError::NonFinite { name: name.to_owned() })
        }
    }
}

/// Keys that change the arithmetic in ways that this engine does not have.
fn refuse_unsupported(meta: &Metadata<'_>, architecture: Architecture) -> Result<(), CheckpointError> {
    let key = |name: &str| format!("{}.{name}", architecture.name());
    if let Some(kind) = meta.text("general.type")
        && kind != "model"
    {
        return Err(metadata::refused("general.type", "\"model\"", kind));
    }
    if let Some(parts) = meta.size("split.count")?
        && parts > 1
    {
        return Err(metadata::refused("split.count", "1: one file", parts));
    }
    for name in ["expert_count", "attention.sliding_window"] {
        if let Some(n) = meta.size(&key(name))?
            && n > 0
        {
            return Err(metadata::refused(key(name), "0 or nothing", n));
        }
    }
    if let Some(kind) = meta.text(&key("rope.scaling.type"))
        && kind != "none"
    {
        return Err(metadata::refused(key("rope.scaling.type"), "\"none\"", kind));
    }
    for name in ["attention.scale", "logit_scale", "embedding_scale", "residual_scale"] {
        if let Some(v) = meta.float(&key(name))? {
            return Err(metadata::refused(key(name), "nothing", v));
        }
    }
    Ok(())
}

/// The name in a GGUF of a tensor with a Hugging Face name of this engine's models.
fn stored_name(name: &str) -> String {
    const PARTS: [(&str, &str); 11] = [
        ("input_layernorm", "attn_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ];
    let renamed = match name.strip_prefix("model.layers.") {
        Some(rest) => PARTS.iter().find_map(|(part, stored)| {
            let (layer, rest) = rest.split_once('.')?;
            let kind = rest.strip_prefix(part)?;
            Some(format!("blk.{layer}.{stored}{kind}"))
        }),
        None => match name {
            "model.embed_tokens.weight" => Some("token_embd.weight".to_owned()),
            "model.norm.weight" => Some("output_norm.weight".to_owned()),
            "lm_head.weight" => Some("output.weight".to_owned()),
            _ => None,
        },
    };
    renamed.unwrap_or_else(|| name.to_owned())
}

/// Rows of a q or k matrix `[heads · head_dim, columns]` from the pairing of neighbours, which llama.cpp's converter
/// gives them for Llama, back to Hugging Face's pairing of halves: within a head, row `2i + s` becomes row
/// `i + s · head_dim / 2`.
fn half_split(values: &[f32], heads: usize, head_dim: usize) -> Vec<f32> {
    let columns = values.len() / (heads * head_dim).max(1);
    let mut out = Vec::with_capacity(values.len());
    for head in values.chunks_exact((head_dim * columns).max(1)) {
        for s in 0..2 {
            for i in 0..head_dim / 2 {
                out.extend_from_slice(&head[(2 * i + s) * columns..(2 * i + s + 1) * columns]);
            }
        }
    }
    out
}

/// The scaling whose frequency factors these are, if it is one that Meta published: the low, high and original values
/// are the same in Llama 3.1, 3.2 and 3.3, and `factor` is the largest of the factors.
///
/// `Some(None)`: all factors are 1. `None`: some other scaling.
fn scaling_of(factors: &[f32], head_dim: usize, theta: f64) -> Option<Option<Llama3Scaling>> {
    let close = |a: f64, b: f64| (a - b).abs() <= 1e-4 * b;
    let factor = f64::from(factors.iter().copied().fold(1.0, f32::max));
    if factors.iter().all(|&f| close(f64::from(f), 1.0)) {
        return Some(None);
    }
    let scaling =
        Llama3Scaling { factor, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position_embeddings: 8192 };
    #[expect(clippy::cast_precision_loss, reason = "a head is narrower than 2^24")]
    let frequency = |i: usize| theta.powf(-2.0 * i as f64 / head_dim as f64);
    let fits =
        factors.iter().enumerate().all(|(i, &f)| close(f64::from(f), frequency(i) / scaling.scale(frequency(i))));
    fits.then_some(Some(scaling))
}

/// Files by name, as [`Checkpoint::files`] has them.
type Files = BTreeMap<String, Vec<u8>>;

#[cfg(test)]
mod tests;
