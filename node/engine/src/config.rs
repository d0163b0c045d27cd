//! The shape of a model, read from and written as a Hugging Face `config.json`.

use serde_json::{Map, Value, json};

use crate::error::CheckpointError;

/// Which decoder of the Llama family; they differ in what the q, k and v projections have besides their matrices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Architecture {
    /// Nothing more. SmolLM2 too.
    #[default]
    Llama,
    /// A bias on q, k and v.
    Qwen2,
    /// An RMSNorm over each head of q and of k, before the rotation.
    Qwen3,
}

impl Architecture {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Llama, Self::Qwen2, Self::Qwen3];

    /// `model_type` in `config.json`, `general.architecture` in a GGUF.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }

    /// The class in `transformers`.
    fn class(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
        }
    }
}

/// Rotary frequencies stretched for longer texts as Llama 3.1 does it (`rope_type` `llama3`).
///
/// Waves longer than `original / low_freq_factor` positions are slowed by `factor`, those shorter than
/// `original / high_freq_factor` stay, those between are blended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Llama3Scaling {
    /// How much slower the slowest waves turn; at least 1.
    pub factor: f64,
    /// Above 0.
    pub low_freq_factor: f64,
    /// Above `low_freq_factor`.
    pub high_freq_factor: f64,
    /// Positions that the model was first trained on.
    pub original_max_position_embeddings: usize,
}

impl Llama3Scaling {
    /// The scaled frequency for an unscaled one, in radians per position.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "positions are below 2^24")]
    pub fn scale(&self, frequency: f64) -> f64 {
        let waves = self.original_max_position_embeddings as f64 * frequency / std::f64::consts::TAU;
        let kept = (waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor);
        let kept = kept.clamp(0.0, 1.0);
        kept * frequency + (1.0 - kept) * frequency / self.factor
    }

    fn validate(&self) -> Result<(), CheckpointError> {
        let refuse = |key: &str, expected: &str, got: f64| {
            Err(field("rope_scaling", format!("{key} {expected}"), format!("{key} = {got}")))
        };
        if !(self.factor.is_finite() && self.factor >= 1.0) {
            return refuse("factor", "of at least 1", self.factor);
        }
        if !(self.low_freq_factor.is_finite() && self.low_freq_factor > 0.0) {
            return refuse("low_freq_factor", "above 0", self.low_freq_factor);
        }
        if !(self.high_freq_factor.is_finite() && self.high_freq_factor > self.low_freq_factor) {
            return refuse("high_freq_factor", "above low_freq_factor", self.high_freq_factor);
        }
        if !(1..=POSITIONS_MAX).contains(&self.original_max_position_embeddings) {
            let expected = format!("original_max_position_embeddings from 1 to {POSITIONS_MAX}");
            return Err(field("rope_scaling", expected, self.original_max_position_embeddings));
        }
        Ok(())
    }
}

/// Shape of a Llama-family decoder: RMSNorm, rotary positions, grouped queries, SwiGLU, and an [`Architecture`]'s extras.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// The family member.
    pub architecture: Architecture,
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
    /// How the frequencies are stretched, if they are.
    pub rope_scaling: Option<Llama3Scaling>,
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
    /// Reads a Hugging Face `config.json`; absent optional fields take the architecture's defaults in `transformers`.
    ///
    /// # Errors
    /// `Json` if it does not parse, `Field` for a missing or unsupported field (other model types, activations other
    /// than SiLU, biases where the architecture has none, sliding windows, experts, quantized weights, rotary positions
    /// other than `default` and `llama3`).
    pub fn from_json(bytes: &[u8]) -> Result<Self, CheckpointError> {
        let root: Map<String, Value> =
            serde_json::from_slice(bytes).map_err(|source| CheckpointError::Json { file: "config.json", source })?;
        let architecture = architecture(&root)?;
        refuse_unsupported(&root, architecture)?;
        let qwen = architecture != Architecture::Llama;
        let heads = size(&root, "num_attention_heads", None)?;
        let hidden = size(&root, "hidden_size", None)?;
        let head_dim = if architecture == Architecture::Qwen3 { 128 } else { hidden / heads.max(1) };
        let config = Self {
            architecture,
            vocab_size: size(&root, "vocab_size", None)?,
            hidden_size: hidden,
            intermediate_size: size(&root, "intermediate_size", None)?,
            num_hidden_layers: size(&root, "num_hidden_layers", None)?,
            num_attention_heads: heads,
            num_key_value_heads: size(&root, "num_key_value_heads", Some(if qwen { 32 } else { heads }))?,
            head_dim: size(&root, "head_dim", Some(head_dim))?,
            rms_norm_eps: number(&root, "rms_norm_eps", 1e-6)?,
            rope_theta: rope_theta(&root)?,
            rope_scaling: rope_scaling(&root)?,
            max_position_embeddings: size(&root, "max_position_embeddings", Some(if qwen { 32_768 } else { 2048 }))?,
            tie_word_embeddings: flag(&root, "tie_word_embeddings", false)?,
            bos_token_id: token_ids(&root, "bos_token_id")?.first().copied(),
            eos_token_ids: token_ids(&root, "eos_token_id")?,
        };
        config.validate()?;
        Ok(config)
    }

    /// The Hugging Face `config.json` of this model; `transformers` loads it as the architecture's class.
    #[must_use]
    pub fn to_json(&self) -> String {
        let eos = match self.eos_token_ids.as_slice() {
            [] => Value::Null,
            [one] => json!(one),
            many => json!(many),
        };
        let scaling = self.rope_scaling.map(|s| {
            json!({
                "rope_type": "llama3",
                "factor": s.factor,
                "low_freq_factor": s.low_freq_factor,
                "high_freq_factor": s.high_freq_factor,
                "original_max_position_embeddings": s.original_max_position_embeddings,
            })
        });
        let mut value = json!({
            "architectures": [self.architecture.class()],
            "attention_dropout": 0.0,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
            "model_type": self.architecture.name(),
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_scaling": scaling,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tie_word_embeddings,
            "torch_dtype": "float32",
            "use_cache": true,
            "vocab_size": self.vocab_size,
        });
        // Only the keys that the class knows.
        match self.architecture {
            Architecture::Llama => {
                value["attention_bias"] = json!(false);
                value["mlp_bias"] = json!(false);
            }
            Architecture::Qwen2 => value["use_sliding_window"] = json!(false),
            Architecture::Qwen3 => {
                value["attention_bias"] = json!(false);
                value["use_sliding_window"] = json!(false);
            }
        }
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
        if let Some(scaling) = &self.rope_scaling {
            scaling.validate()?;
        }
        for &id in self.eos_token_ids.iter().chain(&self.bos_token_id) {
            if id as usize >= self.vocab_size {
                return Err(field("eos_token_id", format!("ids below vocab_size = {}", self.vocab_size), id));
            }
        }
        Ok(())
    }

    /// Hugging Face names and shapes of all tensors, layer by layer; an architecture's extras end the layer.
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
            match self.architecture {
                Architecture::Llama => {}
                Architecture::Qwen2 => {
                    for (name, rows) in [("q", q), ("k", kv), ("v", kv)] {
                        out.push((format!("{p}.self_attn.{name}_proj.bias"), vec![rows]));
                    }
                }
                Architecture::Qwen3 => {
                    for name in ["q", "k"] {
                        out.push((format!("{p}.self_attn.{name}_norm.weight"), vec![self.head_dim]));
                    }
                }
            }
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

/// `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5).
fn rope_scaling(root: &Map<String, Value>) -> Result<Option<Llama3Scaling>, CheckpointError> {
    for name in ["rope_scaling", "rope_parameters"] {
        let Some(v) = present(root, name) else { continue };
        let Some(v) = v.as_object() else { return Err(field(name, "an object".into(), v)) };
        let kind = present(v, "rope_type").or_else(|| present(v, "type"));
        match kind.map(|k| k.as_str().unwrap_or_default()) {
            None | Some("default") => {}
            Some("llama3") => {
                let missing = |key: &str| field(name, format!("{key}, a number"), v.get(key).unwrap_or(&Value::Null));
                let get = |key: &str| v.get(key).and_then(Value::as_f64).ok_or_else(|| missing(key));
                let original = "original_max_position_embeddings";
                let positions = v.get(original).and_then(Value::as_u64).and_then(|n| usize::try_from(n).ok());
                return Ok(Some(Llama3Scaling {
                    factor: get("factor")?,
                    low_freq_factor: get("low_freq_factor")?,
                    high_freq_factor: get("high_freq_factor")?,
                    original_max_position_embeddings: positions.ok_or_else(|| missing(original))?,
                }));
            }
            Some(_) => {
                return Err(field(name, "rope_type \"default\" or \"llama3\"".into(), kind.unwrap_or(&Value::Null)));
            }
        }
    }
    Ok(None)
}

/// `model_type`; without one, the model counts as Llama.
fn architecture(root: &Map<String, Value>) -> Result<Architecture, CheckpointError> {
    let Some(v) = present(root, "model_type") else { return Ok(Architecture::Llama) };
    let known = Architecture::ALL.into_iter().find(|a| v.as_str() == Some(a.name()));
    known.ok_or_else(|| field("model_type", Architecture::ALL.map(Architecture::name).join(" or "), v))
}

fn refuse_unsupported(root: &Map<String, Value>, architecture: Architecture) -> Result<(), CheckpointError> {
    if let Some(v) = present(root, "hidden_act")
        && !v.as_str().is_some_and(|s| ["silu", "swish"].contains(&s))
    {
        return Err(field("hidden_act", "silu or swish".into(), v));
    }
    // `transformers` does not read `attention_bias` for Qwen2, whose q, k and v always have one.
    let flags: &[&'static str] = match architecture {
        Architecture::Llama => &["attention_bias", "mlp_bias"],
        Architecture::Qwen2 => &["use_sliding_window", "use_mrope"],
        Architecture::Qwen3 => &["attention_bias", "use_sliding_window"],
    };
    for name in flags {
        if flag(root, name, false)? {
            return Err(field(name, "false".into(), true));
        }
    }
    if let Some(v) = present(root, "layer_types") {
        let full = |t: &Value| t.as_str() == Some("full_attention");
        if !v.as_array().is_some_and(|list| list.iter().all(full)) {
            return Err(field("layer_types", "\"full_attention\" in every layer".into(), v));
        }
    }
    if let Some(v) = present(root, "partial_rotary_factor")
        && v.as_f64() != Some(1.0)
    {
        return Err(field("partial_rotary_factor", "1, rotation of whole heads".into(), v));
    }
    for name in ["num_experts", "num_local_experts"] {
        if let Some(v) = present(root, name)
            && v.as_u64() != Some(0)
        {
            return Err(field(name, "nothing: dense models only".into(), v));
        }
    }
    if let Some(v) = present(root, "quantization_config") {
        return Err(field("quantization_config", "nothing: F32, F16 or BF16 weights".into(), v));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn smol() -> LlamaConfig {
        LlamaConfig {
            architecture: Architecture::Llama,
            vocab_size: 49152,
            hidden_size: 576,
            intermediate_size: 1536,
            num_hidden_layers: 30,
            num_attention_heads: 9,
            num_key_value_heads: 3,
            head_dim: 64,
            rms_norm_eps: 1e-5,
            rope_theta: 100_000.0,
            rope_scaling: None,
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
        for c in crate::testing::tiny_configs() {
            assert_eq!(LlamaConfig::from_json(c.to_json().as_bytes()).unwrap(), c);
        }
    }

    /// The keys of Qwen's published `config.json` files, and of `transformers` 5.
    #[test]
    fn qwen_configs_as_published_are_read() {
        let qwen2 = br#"{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
            "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
            "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2",
            "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
            "use_cache": true, "use_sliding_window": false, "vocab_size": 151936}"#;
        let c = LlamaConfig::from_json(qwen2).unwrap();
        assert_eq!((c.architecture, c.head_dim, c.parameter_count()), (Architecture::Qwen2, 64, 494_032_768));
        let qwen3 = br#"{"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "dtype": "bfloat16",
            "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
            "layer_types": ["full_attention", "full_attention"], "max_position_embeddings": 40960, "max_window_layers": 28,
            "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
            "sliding_window": null, "tie_word_embeddings": true, "use_sliding_window": false, "vocab_size": 151936}"#;
        let c = LlamaConfig::from_json(qwen3).unwrap();
        assert_eq!((c.architecture, c.head_dim, c.parameter_count()), (Architecture::Qwen3, 128, 596_049_920));
        assert!((c.rope_theta - 1e6).abs() < f64::EPSILON);
        let window = String::from_utf8_lossy(qwen2).replace("window\": false", "window\": true");
        let e = LlamaConfig::from_json(window.as_bytes()).unwrap_err().to_string();
        assert!(e.contains("use_sliding_window"), "{e}");
    }

    /// Llama 3.1's numbers: waves shorter than 2048 positions stay, those longer than 8192 are eight times slower.
    #[test]
    fn llama3_scaling_keeps_fast_waves_and_slows_slow_ones() {
        let scaling = Llama3Scaling {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        };
        let wave = |positions: f64| std::f64::consts::TAU / positions;
        let close = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-12, "{a} against {b}");
        close(scaling.scale(wave(100.0)), wave(100.0));
        close(scaling.scale(wave(2048.0)), wave(2048.0));
        close(scaling.scale(wave(8192.0)), wave(8192.0 * 8.0));
        close(scaling.scale(wave(1e5)), wave(8e5));
        // Half way in waves per original length: (2.5 - 1) / 3 = 0.5.
        let middle = wave(8192.0 / 2.5);
        close(scaling.scale(middle), 0.5 * middle + 0.5 * middle / 8.0);
    }

    #[test]
    fn unsupported_or_broken_fields_are_refused_by_name() {
        for (name, value) in [
            ("model_type", json!("mamba")),
            ("attention_bias", json!(true)),
            ("hidden_act", json!("gelu")),
            ("rope_scaling", json!({"rope_type": "yarn", "factor": 8.0})),
            ("rope_scaling", json!({"rope_type": "llama3", "factor": 8.0})),
            ("rope_parameters", json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})),
            ("layer_types", json!(["full_attention", "sliding_attention"])),
            ("partial_rotary_factor", json!(0.5)),
            ("num_local_experts", json!(8)),
            ("quantization_config", json!({"quant_method": "gptq"})),
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
