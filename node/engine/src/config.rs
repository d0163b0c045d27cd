//! The shape of a Llama model, read from and written as a Hugging Face `config.json`.

use serde_json::{Map, Value, json};

use crate::error::CheckpointError;

/// Architecture of a Llama-family decoder (SmolLM2 too): RMSNorm, rotary positions, grouped queries, SwiGLU, no biases.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// Token ids are below this.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the SwiGLU layer.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; a divisor of `num_attention_heads`.
    pub num_key_value_heads: usize,
    /// Width of a head; even.
    pub head_dim: usize,
    /// Added to the mean square in RMSNorm.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Longest sequence, prompt and answer together, in tokens.
    pub max_position_embeddings: usize,
    /// The output layer is the embedding matrix.
    pub tie_word_embeddings: bool,
    /// Token that starts a text, if the model has one.
    pub bos_token_id: Option<u32>,
    /// Tokens that end an answer.
    pub eos_token_ids: Vec<u32>,
}

/// Largest accepted value of a size field: keeps products of two sizes far from overflow.
const SIZE_MAX: u64 = 1 << 24;

/// Longest accepted sequence: the rotary table of a 128-wide head is then 512 MiB.
const POSITIONS_MAX: usize = 1 << 20;

impl LlamaConfig {
    /// Reads a Hugging Face `config.json`; absent optional fields take `LlamaConfig`'s defaults in `transformers`.
    ///
    /// # Errors
    /// `Json` if it does not parse, `Field` for a missing or unsupported field (biases, scaled rotary positions,
    /// activations other than SiLU, other model types).
    pub fn from_json(bytes: &[u8]) -> Result<Self, CheckpointError> {
        let root: Map<String, Value> =
            serde_json::from_slice(bytes).map_err(|source| CheckpointError::Json { file: "config.json", source })?;
        refuse_unsupported(&root)?;
        let heads = size(&root, "num_attention_heads", None)?;
        let hidden = size(&root, "hidden_size", None)?;
        let config = Self {
            vocab_size: size(&root, "vocab_size", None)?,
            hidden_size: hidden,
            intermediate_size: size(&root, "intermediate_size", None)?,
            num_hidden_layers: size(&root, "num_hidden_layers", None)?,
            num_attention_heads: heads,
            num_key_value_heads: size(&root, "num_key_value_heads", Some(heads))?,
            head_dim: size(&root, "head_dim", Some(hidden / heads.max(1)))?,
            rms_norm_eps: number(&root, "rms_norm_eps", 1e-6)?,
            rope_theta: rope_theta(&root)?,
            max_position_embeddings: size(&root, "max_position_embeddings", Some(2048))?,
            tie_word_embeddings: flag(&root, "tie_word_embeddings", false)?,
            bos_token_id: token_ids(&root, "bos_token_id")?.first().copied(),
            eos_token_ids: token_ids(&root, "eos_token_id")?,
        };
        config.validate()?;
        Ok(config)
    }

    /// The Hugging Face `config.json` of this model; `transformers` loads it as `LlamaForCausalLM`.
    #[must_use]
    pub fn to_json(&self) -> String {
        let eos = match self.eos_token_ids.as_slice() {
            [] => Value::Null,
            [one] => json!(one),
            many => json!(many),
        };
        let value = json!({
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": false,
            "attention_dropout": 0.0,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
            "mlp_bias": false,
            "model_type": "llama",
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_scaling": null,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tie_word_embeddings,
            "torch_dtype": "float32",
            "use_cache": true,
            "vocab_size": self.vocab_size,
        });
        format!("{value:#}\n")
    }

    /// Trainable parameters; tied embeddings count once.
    #[must_use]
    pub fn parameter_count(&self) -> u64 {
        self.tensor_shapes().iter().map(|(_, shape)| shape.iter().map(|&d| d as u64).product::<u64>()).sum()
    }

    /// Checks that the sizes fit together.
    ///
    /// # Errors
    /// `Field` names the first field that does not fit.
    pub fn validate(&self) -> Result<(), CheckpointError> {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        for (name, v) in sizes {
            if v == 0 || v as u64 > SIZE_MAX {
                return Err(field(name, format!("a number from 1 to {SIZE_MAX}"), v));
            }
        }
        if self.max_position_embeddings > POSITIONS_MAX {
            return Err(field(
                "max_position_embeddings",
                format!("at most {POSITIONS_MAX}"),
                self.max_position_embeddings,
            ));
        }
        if !self.num_attention_heads.is_multiple_of(self.num_key_value_heads) {
            let expected = format!("a divisor of num_attention_heads = {}", self.num_attention_heads);
            return Err(field("num_key_value_heads", expected, self.num_key_value_heads));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(field("head_dim", "an even number".into(), self.head_dim));
        }
        if !(self.rms_norm_eps.is_finite() && self.rms_norm_eps >= 0.0) {
            return Err(field("rms_norm_eps", "a number of at least 0".into(), self.rms_norm_eps));
        }
        if !(self.rope_theta.is_finite() && self.rope_theta > 0.0) {
            return Err(field("rope_theta", "a number above 0".into(), self.rope_theta));
        }
        for &id in self.eos_token_ids.iter().chain(&self.bos_token_id) {
            if id as usize >= self.vocab_size {
                return Err(field("eos_token_id", format!("ids below vocab_size = {}", self.vocab_size), id));
            }
        }
        Ok(())
    }

    /// Hugging Face names and shapes of all tensors, in the order of the forward pass.
    pub(crate) fn tensor_shapes(&self) -> Vec<(String, Vec<usize>)> {
        let (h, i, v) = (self.hidden_size, self.intermediate_size, self.vocab_size);
        let (q, kv) = (self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim);
        let mut out = vec![("model.embed_tokens.weight".to_owned(), vec![v, h])];
        for l in 0..self.num_hidden_layers {
            let p = format!("model.layers.{l}");
            out.push((format!("{p}.input_layernorm.weight"), vec![h]));
            out.push((format!("{p}.self_attn.q_proj.weight"), vec![q, h]));
            out.push((format!("{p}.self_attn.k_proj.weight"), vec![kv, h]));
            out.push((format!("{p}.self_attn.v_proj.weight"), vec![kv, h]));
            out.push((format!("{p}.self_attn.o_proj.weight"), vec![h, q]));
            out.push((format!("{p}.post_attention_layernorm.weight"), vec![h]));
            out.push((format!("{p}.mlp.gate_proj.weight"), vec![i, h]));
            out.push((format!("{p}.mlp.up_proj.weight"), vec![i, h]));
            out.push((format!("{p}.mlp.down_proj.weight"), vec![h, i]));
        }
        out.push(("model.norm.weight".to_owned(), vec![h]));
        if !self.tie_word_embeddings {
            out.push(("lm_head.weight".to_owned(), vec![v, h]));
        }
        out
    }
}

fn field(field: &'static str, expected: String, got: impl std::fmt::Display) -> CheckpointError {
    CheckpointError::Field { field, expected, got: got.to_string() }
}

fn present<'a>(root: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    root.get(name).filter(|v| !v.is_null())
}

fn size(root: &Map<String, Value>, name: &'static str, default: Option<usize>) -> Result<usize, CheckpointError> {
    let expected = || format!("a number from 1 to {SIZE_MAX}");
    let Some(v) = present(root, name) else {
        return default.ok_or_else(|| field(name, expected(), "nothing"));
    };
    v.as_u64()
        .filter(|&n| n <= SIZE_MAX)
        .and_then(|n| usize::try_from(n).ok())
        .ok_or_else(|| field(name, expected(), v))
}

fn number(root: &Map<String, Value>, name: &'static str, default: f64) -> Result<f64, CheckpointError> {
    let Some(v) = present(root, name) else { return Ok(default) };
    v.as_f64().ok_or_else(|| field(name, "a number".into(), v))
}

fn flag(root: &Map<String, Value>, name: &'static str, default: bool) -> Result<bool, CheckpointError> {
    let Some(v) = present(root, name) else { return Ok(default) };
    v.as_bool().ok_or_else(|| field(name, "true or false".into(), v))
}

/// One id, a list of ids, or nothing.
fn token_ids(root: &Map<String, Value>, name: &'static str) -> Result<Vec<u32>, CheckpointError> {
    let Some(v) = present(root, name) else { return Ok(Vec::new()) };
    let id = |v: &Value| {
        let id = v.as_u64().and_then(|n| u32::try_from(n).ok());
        id.ok_or_else(|| field(name, "a token id or a list of them".into(), v))
    };
    v.as_array().map_or_else(|| Ok(vec![id(v)?]), |list| list.iter().map(id).collect())
}

/// `rope_theta` at the top (transformers 4) or inside `rope_parameters` (transformers 5).
fn rope_theta(root: &Map<String, Value>) -> Result<f64, CheckpointError> {
    match present(root, "rope_parameters").and_then(Value::as_object) {
        Some(inner) if present(inner, "rope_theta").is_some() => number(inner, "rope_theta", 10_000.0),
        _ => number(root, "rope_theta", 10_000.0),
    }
}

fn refuse_unsupported(root: &Map<String, Value>) -> Result<(), CheckpointError> {
    let text = |name: &'static str, accepted: &[&str]| match present(root, name) {
        Some(v) if !v.as_str().is_some_and(|s| accepted.contains(&s)) => Err(field(name, accepted.join(" or "), v)),
        _ => Ok(()),
    };
    text("model_type", &["llama"])?;
    text("hidden_act", &["silu", "swish"])?;
    for name in ["attention_bias", "mlp_bias"] {
        if flag(root, name, false)? {
            return Err(field(name, "false".into(), true));
        }
    }
    for name in ["rope_scaling", "rope_parameters"] {
        let Some(v) = present(root, name) else { continue };
        let kind = v.get("rope_type").or_else(|| v.get("type")).unwrap_or(&Value::Null);
        if !kind.is_null() && kind.as_str() != Some("default") {
            return Err(field(name, "no scaling of rotary positions".into(), kind));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn smol() -> LlamaConfig {
        LlamaConfig {
            vocab_size: 49152,
            hidden_size: 576,
            intermediate_size: 1536,
            num_hidden_layers: 30,
            num_attention_heads: 9,
            num_key_value_heads: 3,
            head_dim: 64,
            rms_norm_eps: 1e-5,
            rope_theta: 100_000.0,
            max_position_embeddings: 8192,
            tie_word_embeddings: true,
            bos_token_id: Some(1),
            eos_token_ids: vec![2, 0],
        }
    }

    #[test]
    fn config_survives_a_round_trip_and_counts_smollm2_parameters() {
        let c = smol();
        assert_eq!(LlamaConfig::from_json(c.to_json().as_bytes()).unwrap(), c);
        assert_eq!(c.parameter_count(), 134_515_008);
    }

    #[test]
    fn unsupported_or_broken_fields_are_refused_by_name() {
        for (name, value) in [
            ("model_type", json!("mamba")),
            ("attention_bias", json!(true)),
            ("hidden_act", json!("gelu")),
            ("rope_scaling", json!({"rope_type": "llama3", "factor": 8.0})),
            ("hidden_size", json!(-3)),
            ("num_key_value_heads", json!(4)),
            ("head_dim", json!(63)),
            ("vocab_size", json!(1u64 << 60)),
        ] {
            let mut v: Map<String, Value> = serde_json::from_str(&smol().to_json()).unwrap();
            v.insert(name.into(), value);
            let err = LlamaConfig::from_json(&serde_json::to_vec(&v).unwrap()).unwrap_err();
            assert!(err.to_string().contains(name), "{err}");
        }
        assert!(LlamaConfig::from_json(b"[]").is_err());
        assert!(LlamaConfig::from_json(b"{}").is_err());
    }
}
