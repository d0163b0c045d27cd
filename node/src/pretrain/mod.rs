//! `starling pretrain`: the embedded byte-level model, trained by supervision on its two task sets.
//!
//! Seeded and reproducible: the same seed, steps and number of threads give the same bytes. The teacher is careless
//! on purpose (see `SLIPS`): the model imitates slips as well, about as often as they were shown, and that is what
//! reinforcement learning can then teach it to leave. The reward itself is exact equality of the answer.

mod data;
mod score;

use crate::cli::PretrainArgs;
use crate::print;
use anyhow::{Context, bail};
use data::Exercises;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde_json::json;
use starling_engine::{
    Architecture, Checkpoint, Device, LlamaConfig, Sample, SaveDtype, Trainer, TrainerConfig, Weights,
};
use starling_gateway::text::byte_model;
use std::collections::BTreeMap;
use std::time::Instant;

/// Optimizer steps when none are asked for.
const STEPS: u64 = 1500;
/// Transcripts in a step.
const BATCH: usize = 128;
/// Peak learning rate, reached after [`WARMUP`] steps and lowered along a cosine to a tenth.
const LEARNING_RATE: f64 = 3e-3;
const WARMUP: f64 = 100.0;
/// Share of calculator transcripts; the rest are sums, which take longer to learn.
const CALCULATOR_SHARE: f64 = 0.3;

/// Share of transcripts in which the teacher slips, once it does: first the model learns how it is done, then it
/// sees how people do it.
const SLIPS: f64 = 0.35;
/// The teacher is careful for this share of the steps.
const CAREFUL: f64 = 0.84;

/// About 0.9 million parameters.
#[must_use]
pub fn config() -> LlamaConfig {
    LlamaConfig {
        architecture: Architecture::Llama,
        vocab_size: byte_model::VOCAB_SIZE as usize,
        hidden_size: 128,
        intermediate_size: 384,
        num_hidden_layers: 4,
        num_attention_heads: 4,
        num_key_value_heads: 4,
        head_dim: 32,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: None,
        max_position_embeddings: 512,
        tie_word_embeddings: true,
        bos_token_id: None,
        eos_token_ids: vec![byte_model::END],
    }
}

/// Trains and writes the folder.
///
/// # Errors
/// Names the task file at fault, or what the engine refuses.
pub fn pretrain(args: &PretrainArgs, json: bool) -> anyhow::Result<()> {
    let steps = args.steps.unwrap_or(STEPS);
    if steps == 0 || steps > 1_000_000 {
        return Err(crate::BadInput::wrap(anyhow::anyhow!("--steps: expected 1 to 1000000, got {steps}")));
    }
    if args.out.join("model.safetensors").exists() && !args.out.join("tokenizer.json").exists() {
        bail!("{}: holds a model that is not of this kind", args.out.display());
    }
    let exercises = Exercises::load(&args.tasks).map_err(crate::BadInput::wrap)?;
    let device = Device::Cpu;
    let cfg = config();
    let tc = TrainerConfig {
        learning_rate: LEARNING_RATE,
        betas: (0.9, 0.98),
        weight_decay: 0.01,
        micro_batch_tokens: 8192,
        threads: args.threads.clamp(1, 64),
        ..TrainerConfig::default()
    };
    let mut trainer = Trainer::new(cfg.clone(), &Weights::random(&cfg, &device, args.seed)?, tc, device.clone())?;
    let mut rng = ChaCha8Rng::seed_from_u64(args.seed);
    let started = Instant::now();
    let mut loss = 0.0;
    for step in 0..steps {
        trainer.set_learning_rate(LEARNING_RATE * schedule(step, steps));
        let slips = if (step as f64) < CAREFUL * steps as f64 { 0.0 } else { SLIPS };
        let batch: Vec<Sample> =
            (0..BATCH).map(|_| exercises.draw(&mut rng, CALCULATOR_SHARE, slips).sample()).collect();
        loss = trainer.supervised_step(&batch)?.loss;
        if (step + 1) % 100 == 0 {
            tracing::info!(step = step + 1, of = steps, loss, seconds = started.elapsed().as_secs(), "pretraining");
        }
    }
    let weights = trainer.weights()?;
    let rewards =
        if args.evaluate { score::heldout(&cfg, &weights, &exercises, args.threads)? } else { BTreeMap::new() };
    let parameters = cfg.parameter_count();
    std::fs::create_dir_all(&args.out).with_context(|| format!("cannot make {}", args.out.display()))?;
    Checkpoint { config: cfg, weights, files: files() }.save(&args.out, SaveDtype::F32)?;
    let facts = json!({
        "out": args.out, "seed": args.seed, "steps": steps, "parameters": parameters, "loss": loss,
        "seconds": started.elapsed().as_secs(), "heldout": rewards,
    });
    print(json, &facts, || format!("{facts:#}"))
}

/// Linear warm-up, then a cosine down to a tenth.
#[expect(clippy::cast_precision_loss, reason = "steps are below 2^53")]
fn schedule(step: u64, steps: u64) -> f64 {
    let warm = ((step + 1) as f64 / WARMUP).min(1.0);
    let cosine = 0.5 * (1.0 + (std::f64::consts::PI * step as f64 / steps as f64).cos());
    warm * (0.1 + 0.9 * cosine)
}

fn files() -> BTreeMap<String, Vec<u8>> {
    let generation = json!({ "eos_token_id": byte_model::END, "pad_token_id": byte_model::PAD });
    [
        ("tokenizer.json", byte_model::tokenizer_json()),
        ("tokenizer_config.json", byte_model::tokenizer_config_json()),
        ("chat_template.jinja", byte_model::chat_template().to_owned()),
        ("generation_config.json", format!("{generation:#}\n")),
    ]
    .into_iter()
    .map(|(n, t)| (n.to_owned(), t.into_bytes()))
    .collect()
}

#[cfg(test)]
mod tests {
    use super::data::Exercise;
    use super::*;
    use starling_gateway::text::{ChatFormat, ModelFiles};

    /// What the model learns from is, id for id, what the gateway will show it.
    #[test]
    fn transcripts_are_rendered_as_the_gateway_renders_them() {
        let tokenizer = byte_model::tokenizer_json();
        let tokenizer_config = byte_model::tokenizer_config_json();
        let config = config().to_json();
        let template = byte_model::chat_template();
        let format = ChatFormat::new(&ModelFiles {
            tokenizer: tokenizer.as_bytes(),
            tokenizer_config: Some(tokenizer_config.as_bytes()),
            chat_template: Some(template.as_bytes()),
            config: config.as_bytes(),
            ..ModelFiles::default()
        })
        .unwrap();
        let exercise = Exercise::calculator("12 + 34 * 56").unwrap();
        let text = "<|tools|>calc(x)<|end|><|user|>12+34*56<|end|><|assistant|><|call|>calc{\"x\":\"34*56\"}<|end|>\
                    <|tool|>1904<|end|><|assistant|><|call|>calc{\"x\":\"12+1904\"}<|end|><|tool|>1916<|end|>\
                    <|assistant|>1916<|end|>";
        assert_eq!(format.encode(text).unwrap(), exercise.sample().tokens);
    }
}
