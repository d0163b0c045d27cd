//! Files written here, blocks from ggml's own package, and broken files.

use std::io::Cursor;
use std::path::PathBuf;

use candle_core::quantized::ggml_file::qtensor_from_ggml;
use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use rand::{Rng as _, RngExt as _, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::testing::{scratch_dir, tiny_config, tiny_configs, varied_weights};

const BLOCKS: &str = include_str!("../../../../tests/goldens/gguf_blocks.json");

/// A GGUF in parts, to be changed before it is written.
struct Parts {
    metadata: BTreeMap<String, Value>,
    tensors: BTreeMap<String, QTensor>,
}

fn quantized(t: &Tensor, dtype: GgmlDType) -> QTensor {
    QTensor::quantize(t, dtype).unwrap()
}

/// What llama.cpp's converter does to q and k of Llama: `[heads, 2, half, columns]` to `[heads, half, 2, columns]`.
fn neighbours(t: &Tensor, heads: usize) -> Tensor {
    let (rows, columns) = t.dims2().unwrap();
    let split = t.reshape((heads, 2, rows / heads / 2, columns)).unwrap();
    split.transpose(1, 2).unwrap().contiguous().unwrap().reshape((rows, columns)).unwrap()
}

fn texts(list: &[&str]) -> Value {
    Value::Array(list.iter().map(|s| Value::String((*s).to_owned())).collect())
}

fn parts(cfg: &LlamaConfig, weights: &Weights) -> Parts {
    let arch = cfg.architecture.name();
    let size = |n: usize| Value::U32(u32::try_from(n).unwrap());
    #[expect(clippy::cast_possible_truncation, reason = "GGUF keeps these in f32")]
    let mut metadata = BTreeMap::from([
        ("general.architecture".to_owned(), Value::String(arch.to_owned())),
        (format!("{arch}.block_count"), size(cfg.num_hidden_layers)),
        (format!("{arch}.context_length"), size(cfg.max_position_embeddings)),
        (format!("{arch}.embedding_length"), size(cfg.hidden_size)),
        (format!("{arch}.feed_forward_length"), size(cfg.intermediate_size)),
        (format!("{arch}.attention.head_count"), size(cfg.num_attention_heads)),
        (format!("{arch}.attention.head_count_kv"), size(cfg.num_key_value_heads)),
        (format!("{arch}.attention.key_length"), size(cfg.head_dim)),
        (format!("{arch}.attention.layer_norm_rms_epsilon"), Value::F32(cfg.rms_norm_eps as f32)),
        (format!("{arch}.rope.freq_base"), Value::F32(cfg.rope_theta as f32)),
        ("tokenizer.ggml.bos_token_id".to_owned(), size(1)),
        ("tokenizer.ggml.eos_token_id".to_owned(), size(2)),
        ("tokenizer.ggml.model".to_owned(), Value::String("gpt2".into())),
        ("tokenizer.ggml.pre".to_owned(), Value::String("qwen2".into())),
        ("tokenizer.ggml.tokens".to_owned(), texts(&["a", "<s>", "</s>", "b", "ab", "<think>", "[PAD6]"])),
        ("tokenizer.ggml.merges".to_owned(), texts(&["a b"])),
        (
            "tokenizer.ggml.token_type".to_owned(),
            Value::Array([1, 3, 3, 1, 1, 4, 5].into_iter().map(Value::I32).collect()),
        ),
        ("tokenizer.chat_template".to_owned(), Value::String("{{ messages }}".into())),
    ]);
    if let Some(s) = &cfg.rope_scaling {
        // Not what the file says: `rope_freqs.weight` does.
        assert_eq!(s.original_max_position_embeddings, 8192);
        metadata.insert(format!("{arch}.rope.dimension_count"), size(cfg.head_dim));
    }
    let mut tensors = BTreeMap::new();
    for (name, t) in weights.iter() {
        let t = match (cfg.architecture, name) {
            (Architecture::Llama, n) if n.ends_with("q_proj.weight") => neighbours(t, cfg.num_attention_heads),
            (Architecture::Llama, n) if n.ends_with("k_proj.weight") => neighbours(t, cfg.num_key_value_heads),
            _ => t.clone(),
        };
        tensors.insert(stored_name(name), quantized(&t, GgmlDType::F32));
    }
    Parts { metadata, tensors }
}

impl Parts {
    fn bytes(&self) -> Vec<u8> {
        let metadata: Vec<_> = self.metadata.iter().map(|(k, v)| (k.as_str(), v)).collect();
        let tensors: Vec<_> = self.tensors.iter().map(|(k, v)| (k.as_str(), v)).collect();
        let mut out = Cursor::new(Vec::new());
        gguf_file::write(&mut out, &metadata, &tensors).unwrap();
        out.into_inner()
    }
}

/// A file that goes with the test.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        Self(scratch_dir(name))
    }

    fn load(&self, bytes: &[u8]) -> Result<Checkpoint, CheckpointError> {
        let path = self.0.join("model.gguf");
        std::fs::write(&path, bytes).unwrap();
        Checkpoint::load(&path, &Device::Cpu)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn sample() -> Parts {
    let cfg = tiny_config();
    parts(&cfg, &varied_weights(&cfg, 4))
}

#[test]
fn every_architecture_comes_back_bit_for_bit() {
    let scratch = Scratch::new("gguf-architectures");
    for cfg in tiny_configs().into_iter().filter(|c| c.rope_scaling.is_none()) {
        let weights = varied_weights(&cfg, 4);
        let loaded = scratch.load(&parts(&cfg, &weights).bytes()).unwrap();
        assert_eq!(loaded.config, cfg);
        assert_eq!(loaded.weights.to_safetensors().unwrap(), weights.to_safetensors().unwrap());
    }
}

#[test]
fn llama3_scaling_is_found_in_the_frequency_factors() {
    let scaling = Llama3Scaling {
        factor: 32.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    };
    let cfg = LlamaConfig { rope_theta: 500_000.0, rope_scaling: Some(scaling), head_dim: 64, ..tiny_config() };
    let mut p = parts(&cfg, &varied_weights(&cfg, 4));
    let factors = |s: &Llama3Scaling| {
        let of = |i: u32| {
            let f = 500_000f64.powf(-f64::from(i) / 32.0);
            f / s.scale(f)
        };
        #[expect(clippy::cast_possible_truncation, reason = "GGUF keeps these in f32")]
        let list: Vec<f32> = (0..32).map(|i| of(i) as f32).collect();
        quantized(&Tensor::from_vec(list, 32, &Device::Cpu).unwrap(), GgmlDType::F32)
    };
    p.tensors.insert(ROPE_FACTORS.into(), factors(&scaling));
    let scratch = Scratch::new("gguf-rope");
    assert_eq!(scratch.load(&p.bytes()).unwrap().config, cfg);
    let ones = Tensor::ones(32, candle_core::DType::F32, &Device::Cpu).unwrap();
    p.tensors.insert(ROPE_FACTORS.into(), quantized(&ones, GgmlDType::F32));
    assert_eq!(scratch.load(&p.bytes()).unwrap().config.rope_scaling, None);
    p.tensors.insert(ROPE_FACTORS.into(), factors(&Llama3Scaling { high_freq_factor: 8.0, ..scaling }));
    let e = scratch.load(&p.bytes()).unwrap_err().to_string();
    assert!(e.contains(ROPE_FACTORS), "{e}");
}

/// Against the values of ggml's own Python package. F32 products of at most a nibble, a scale and a half: the order of
/// operations may differ by roundings of some 1e-7 of the largest term.
#[test]
fn blocks_of_every_format_have_ggmls_values() {
    let goldens: serde_json::Value = serde_json::from_str(BLOCKS).unwrap();
    let goldens = goldens.as_object().unwrap();
    assert_eq!(goldens.len(), DTYPES.len());
    for dtype in DTYPES {
        let name = format!("{dtype:?}").replace('K', "_K");
        let golden = &goldens[&name];
        let hex = golden["bytes"].as_str().unwrap();
        let raw: Vec<u8> = (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect();
        let tensor = qtensor_from_ggml(dtype, &raw, vec![2, 256], &Device::Cpu).unwrap();
        let p = Parts { metadata: BTreeMap::new(), tensors: BTreeMap::from([("t".to_owned(), tensor)]) };
        let scratch = Scratch::new(&format!("gguf-blocks-{name}"));
        let path = scratch.0.join("t.gguf");
        std::fs::write(&path, p.bytes()).unwrap();
        let mut reader = BufReader::new(File::open(&path).unwrap());
        let mut content = Content::read(&mut reader).unwrap();
        let info = content.tensor_infos.remove("t").unwrap();
        let got = Source { path: &path, reader, content }.read("t", &info, &[2, 256]).unwrap();
        let want: Vec<f64> = golden["values"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect();
        let largest = want.iter().fold(0f64, |m, v| m.max(v.abs()));
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            assert!((f64::from(*got) - want).abs() <= 1e-6 * largest, "{name}[{i}]: expected {want}, got {got}");
        }
    }
}

#[test]
fn quantized_models_load_within_the_formats_error() {
    let cfg = LlamaConfig { hidden_size: 256, intermediate_size: 256, head_dim: 64, ..tiny_config() };
    let weights = varied_weights(&cfg, 4);
    let scratch = Scratch::new("gguf-quantized");
    // The largest error of a value, as a share of the largest value of its row, that the format's step allows.
    for (dtype, bound) in [
        (GgmlDType::F16, 1e-3),
        (GgmlDType::Q8_0, 0.01),
        (GgmlDType::Q4_1, 0.1),
        (GgmlDType::Q4K, 0.2),
        (GgmlDType::Q6K, 0.05),
    ] {
        let mut p = parts(&cfg, &weights);
        for (name, t) in &mut p.tensors {
            if t.shape().dims().len() > 1 {
                *t = quantized(&t.dequantize(&Device::Cpu).unwrap(), dtype);
            } else {
                assert!(name.ends_with("norm.weight"));
            }
        }
        let loaded = scratch.load(&p.bytes()).unwrap();
        for ((name, a), (_, b)) in weights.iter().zip(loaded.weights.iter()) {
            let off =
                (a - b).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar::<f32>().unwrap();
            let largest = a.abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar::<f32>().unwrap();
            assert!(off <= bound * largest, "{dtype:?}: {name} is off by {off}");
            assert!(a.dims().len() == 1 || off > 0.0, "{dtype:?}: {name} was not quantized");
        }
    }
}

#[test]
fn the_tokenizer_becomes_hugging_face_files() {
    let loaded = Scratch::new("gguf-tokenizer").load(&sample().bytes()).unwrap();
    let json = |name: &str| -> serde_json::Value { serde_json::from_slice(&loaded.files[name]).unwrap() };
    let t = json("tokenizer.json");
    assert_eq!(t["model"]["vocab"], serde_json::json!({"a": 0, "<s>": 1, "</s>": 2, "b": 3, "ab": 4, "<think>": 5}));
    assert_eq!(t["model"]["merges"], serde_json::json!([["a", "b"]]));
    let added: Vec<_> = t["added_tokens"].as_array().unwrap().iter().map(|a| (&a["id"], &a["special"])).collect();
    assert_eq!(format!("{added:?}"), "[(Number(1), Bool(true)), (Number(2), Bool(true)), (Number(5), Bool(false))]");
    let about = json("tokenizer_config.json");
    assert_eq!((&about["bos_token"], &about["eos_token"]), (&"<s>".into(), &"</s>".into()));
    assert_eq!(about["chat_template"], "{{ messages }}");
    assert_eq!(about["add_bos_token"], false);
}

#[test]
fn what_is_not_supported_is_refused_by_key() {
    let scratch = Scratch::new("gguf-keys");
    let text = |s: &str| Value::String(s.to_owned());
    for (key, value) in [
        ("general.architecture", text("gemma3")),
        ("general.type", text("adapter")),
        ("split.count", Value::U16(3)),
        ("llama.expert_count", Value::U32(8)),
        ("llama.attention.sliding_window", Value::U32(512)),
        ("llama.rope.scaling.type", text("yarn")),
        ("llama.attention.scale", Value::F32(0.5)),
        ("llama.attention.value_length", Value::U32(16)),
        ("llama.rope.dimension_count", Value::U32(4)),
        ("llama.attention.head_count_kv", Value::Array(vec![Value::U32(2), Value::U32(4)])),
        ("llama.context_length", text("long")),
        ("llama.rope.freq_base", Value::U32(3)),
        ("tokenizer.ggml.model", text("llama")),
        ("tokenizer.ggml.pre", text("tekken")),
        ("tokenizer.ggml.tokens", Value::U32(7)),
        ("tokenizer.ggml.tokens", Value::Array(vec![text("a"); 65])),
        ("tokenizer.ggml.token_type", Value::Array(vec![Value::I32(1)])),
        ("tokenizer.ggml.merges", texts(&["a  b"])),
        ("tokenizer.ggml.merges", texts(&["ab"])),
        ("tokenizer.ggml.unknown_token_id", Value::U32(7)),
    ] {
        let mut p = sample();
        p.metadata.insert(key.into(), value);
        let e = scratch.load(&p.bytes()).unwrap_err().to_string();
        assert!(e.contains(key), "{key}: {e}");
    }
    for key in ["general.architecture", "llama.block_count", "llama.context_length", "tokenizer.ggml.tokens"] {
        let mut p = sample();
        p.metadata.remove(key);
        let e = scratch.load(&p.bytes()).unwrap_err().to_string();
        assert!(e.contains(key) && e.contains("nothing"), "{e}");
    }
    // A file without a tokenizer is a model all the same.
    let mut p = sample();
    p.metadata.remove("tokenizer.ggml.model");
    assert!(scratch.load(&p.bytes()).unwrap().files.is_empty());
}

#[test]
fn tensors_that_do_not_fit_are_refused_by_name() {
    let scratch = Scratch::new("gguf-tensors");
    let name = "blk.1.attn_k.weight";
    let with = |change: &dyn Fn(&mut Parts)| {
        let mut p = sample();
        change(&mut p);
        scratch.load(&p.bytes()).unwrap_err()
    };
    let e = with(&|p| drop(p.tensors.remove(name)));
    assert!(matches!(e, CheckpointError::MissingTensor { name: ref n, .. } if n == name), "{e}");
    let e = with(&|p| drop(p.tensors.remove("token_embd.weight")));
    assert!(matches!(e, CheckpointError::MissingTensor { .. }), "{e}");
    let e = with(&|p| {
        let t = p.tensors.remove(name).unwrap();
        p.tensors.insert("blk.1.attn_q.bias".into(), quantized(&t.dequantize(&Device::Cpu).unwrap(), GgmlDType::F32));
        p.tensors.insert(name.into(), t);
    });
    assert!(matches!(e, CheckpointError::UnexpectedTensor { ref name } if name == "blk.1.attn_q.bias"), "{e}");
    let replaced = |t: Tensor| with(&move |p| drop(p.tensors.insert(name.into(), quantized(&t, GgmlDType::F32))));
    let e = replaced(Tensor::zeros((32, 32), candle_core::DType::F32, &Device::Cpu).unwrap());
    assert!(matches!(e, CheckpointError::Shape { name: ref n, .. } if n == name), "{e}");
    let e = replaced(Tensor::full(f32::NAN, (16, 32), &Device::Cpu).unwrap());
    assert!(matches!(e, CheckpointError::NonFinite { name: ref n } if n == name), "{e}");
    let e = with(&|p| {
        let t = Tensor::zeros((16, 32), candle_core::DType::F32, &Device::Cpu).unwrap();
        p.tensors.insert(name.into(), quantized(&t, GgmlDType::Q8_1));
    });
    assert!(matches!(e, CheckpointError::Quantization { name: ref n, .. } if n == name), "{e}");
}

#[test]
fn cut_and_scribbled_files_are_errors_and_never_panics() {
    let scratch = Scratch::new("gguf-broken");
    let whole = sample().bytes();
    for len in [0, 3, 4, 8, 30, 200, 1500, whole.len() / 2, whole.len() - 33] {
        let e = scratch.load(&whole[..len]).unwrap_err().to_string();
        assert!(e.contains("model.gguf"), "{len} bytes: {e}");
    }
    let mut zero = sample();
    zero.metadata.insert("general.alignment".into(), Value::U32(0));
    assert!(matches!(scratch.load(&zero.bytes()), Err(CheckpointError::Gguf { .. })));
    // Whatever a changed header says, it is an answer. The tensors' infos end before the last 200 kB.
    let header = whole.len() - (varied_weights(&tiny_config(), 4).to_safetensors().unwrap().len() - 4096);
    let mut rng = ChaCha8Rng::seed_from_u64(11);
    for round in 0..300 {
        let mut bytes = whole.clone();
        for _ in 0..=round % 4 {
            bytes[rng.random_range(0..header)] = rng.next_u32().to_le_bytes()[0];
        }
        let _ = scratch.load(&bytes);
    }
}
