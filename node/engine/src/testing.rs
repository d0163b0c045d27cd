//! Shared helpers of the crate's own tests.

use candle_core::{Device, Tensor};

use crate::config::{Architecture, Llama3Scaling, LlamaConfig};
use crate::weights::Weights;

/// A model small enough for finite differences.
pub(crate) fn tiny_config() -> LlamaConfig {
    LlamaConfig {
        architecture: Architecture::Llama,
        vocab_size: 64,
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 8,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: None,
        max_position_embeddings: 128,
        tie_word_embeddings: true,
        bos_token_id: Some(1),
        eos_token_ids: vec![2],
    }
}

/// A fresh folder for one test.
pub(crate) fn scratch_dir(name: &str) -> std::path::PathBuf {
    let dir = std::env::temp_dir().join(format!("starling-engine-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    dir
}

/// [`tiny_config`] in every architecture, with and without tied embeddings; one with scaled rotary positions.
pub(crate) fn tiny_configs() -> Vec<LlamaConfig> {
    let mut out = Vec::new();
    for architecture in Architecture::ALL {
        for tie_word_embeddings in [true, false] {
            out.push(LlamaConfig { architecture, tie_word_embeddings, ..tiny_config() });
        }
    }
    let rope_scaling = Some(Llama3Scaling {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 32,
    });
    out.push(LlamaConfig { rope_scaling, ..tiny_config() });
    out
}

/// Random weights whose norms and biases are random too: at ones and zeros they would hide.
pub(crate) fn varied_weights(cfg: &LlamaConfig, seed: u64) -> Weights {
    let random = Weights::random(cfg, &Device::Cpu, seed).unwrap();
    let vary = |(t, (name, tensor)): (usize, (&str, &Tensor))| {
        let dims = tensor.dims();
        if dims.len() > 1 {
            return (name.to_owned(), tensor.clone());
        }
        let base = if name.ends_with(".bias") { 0.0 } else { 1.0 };
        let phase = f32::from(u8::try_from(t % 200).unwrap());
        let wave = (0u16..).take(dims[0]).map(|i| base + 0.3 * (f32::from(i) * 0.7 + phase).sin());
        (name.to_owned(), Tensor::from_vec(wave.collect(), dims, &Device::Cpu).unwrap())
    };
    Weights::from_ordered(random.iter().enumerate().map(vary).collect())
}
