//! The engine against an independent implementation in JAX float64 (`tests/goldens/make_goldens.py`).
//!
//! Tolerances: the engine computes in f32 (relative rounding 6e-8). A log-probability is a sum over two layers of
//! dot products of 16 to 24 terms, so errors of some 1e-6 are expected, and 2e-5 is a margin of ten; gradients are
//! compared with 5e-5 of the parameter's largest one for the same reason. AdamW's first step divides a gradient by
//! its own size: there the same relative error moves an update by that share of the learning rate.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, helpers included")]

use std::sync::mpsc;

use serde_json::Value;
use starling_engine::{
    Device, EngineError, FinishReason, GenerateRequest, InferenceEngine, InferenceOptions, LlamaConfig, Sample,
    SampledToken, SamplingParams, TokenSink, Trainer, TrainerConfig, Weights, sequence_logprobs,
};
use starling_protocol::algorithm::{AlgorithmSpec, Objective};

const GOLDENS: &str = include_str!("../../../tests/goldens/engine.json");

struct Golden {
    root: Value,
    cfg: LlamaConfig,
    weights: Weights,
}

fn floats(v: &Value) -> Vec<f64> {
    v.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

fn ids(v: &Value) -> Vec<u32> {
    v.as_array().unwrap().iter().map(|x| u32::try_from(x.as_u64().unwrap()).unwrap()).collect()
}

/// The same formula as `formula` in the script.
fn formula(tensor: f64, rows: usize, cols: Option<usize>) -> Vec<f32> {
    let wave = (0u32..).take(rows * cols.unwrap_or(1)).map(|i| {
        let i = f64::from(i);
        (0.37 * i + 0.0113 * i * i + 1.7 * tensor).sin()
    });
    let scale = cols.map(|c| 1.5 / f64::from(u32::try_from(c).unwrap()).sqrt());
    #[expect(clippy::cast_possible_truncation, reason = "f32 weights are the purpose")]
    wave.map(|w| scale.map_or(1.0 + 0.2 * w, |s| s * w) as f32).collect()
}

fn golden() -> Golden {
    let root: Value = serde_json::from_str(GOLDENS).unwrap();
    let cfg = LlamaConfig::from_json(root["config"].to_string().as_bytes()).unwrap();
    // Names and shapes come from a random model of this configuration; the values are replaced.
    let template = Weights::random(&cfg, &Device::Cpu, 0).unwrap();
    let mut entries = Vec::new();
    for (t, (name, tensor)) in template.iter().enumerate() {
        let dims = tensor.dims().to_vec();
        let values = formula(f64::from(u32::try_from(t).unwrap()), dims[0], dims.get(1).copied());
        entries.push((name.to_owned(), dims, values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>()));
    }
    let views: Vec<_> = entries
        .iter()
        .map(|(n, d, b)| {
            (n.as_str(), safetensors::tensor::TensorView::new(safetensors::Dtype::F32, d.clone(), b).unwrap())
        })
        .collect();
    let bytes = safetensors::serialize(views, None).unwrap();
    let weights = Weights::from_safetensors(&cfg, &bytes, &Device::Cpu).unwrap();
    Golden { root, cfg, weights }
}

fn samples(g: &Golden) -> Vec<Sample> {
    #[expect(clippy::cast_possible_truncation, reason = "the script rounded these to f32")]
    let sample = |s: &Value| Sample {
        tokens: ids(&s["tokens"]),
        loss_mask: s["loss_mask"].as_array().unwrap().iter().map(|b| b.as_bool().unwrap()).collect(),
        behaviour_logprobs: floats(&s["behaviour_logprobs"]).iter().map(|&x| x as f32).collect(),
        advantage: s["advantage"].as_f64().unwrap() as f32,
        ..Sample::default()
    };
    g.root["samples"].as_array().unwrap().iter().map(sample).collect()
}

fn trainer_config(g: &Golden) -> TrainerConfig {
    let a = &g.root["adamw"];
    let f = |name: &str| a[name].as_f64().unwrap();
    #[expect(clippy::cast_possible_truncation, reason = "clips are f32")]
    TrainerConfig {
        learning_rate: f("learning_rate"),
        betas: (f("beta1"), f("beta2")),
        eps: f("eps"),
        weight_decay: f("weight_decay"),
        max_grad_norm: f("max_grad_norm"),
        algorithm: AlgorithmSpec {
            objective: Objective::Clip {
                low: g.root["clip_low"].as_f64().unwrap() as f32,
                high: g.root["clip_high"].as_f64().unwrap() as f32,
                ratio_max: None,
            },
            ..AlgorithmSpec::default()
        },
        // Small enough that the five samples go through three micro-batches.
        micro_batch_tokens: 40,
        ..TrainerConfig::default()
    }
}

fn close(what: &str, got: f64, want: f64, tolerance: f64) {
    assert!((got - want).abs() <= tolerance, "{what}: expected {want}, got {got}");
}

#[test]
fn logprobs_of_every_token_match() {
    let g = golden();
    for s in g.root["sequences"].as_array().unwrap() {
        let got = sequence_logprobs(&g.cfg, &g.weights, &Device::Cpu, &ids(&s["tokens"])).unwrap();
        for (t, (got, want)) in got.iter().zip(floats(&s["logprobs"])).enumerate() {
            close(&format!("token {t}"), f64::from(*got), want, 2e-5);
        }
    }
}

struct Collect(mpsc::Sender<SampledToken>);

impl TokenSink for Collect {
    fn token(&mut self, t: SampledToken) -> bool {
        self.0.send(t).is_ok()
    }

    fn finish(self: Box<Self>, r: Result<FinishReason, EngineError>) {
        r.unwrap();
    }
}

#[test]
fn the_generator_sees_the_same_distribution_after_each_prompt() {
    let g = golden();
    let engine =
        InferenceEngine::spawn(g.cfg.clone(), g.weights.clone(), 0, InferenceOptions::default(), Device::Cpu).unwrap();
    for s in g.root["sequences"].as_array().unwrap() {
        let (tx, rx) = mpsc::channel();
        let sampling = SamplingParams { max_tokens: 1, top_logprobs: 32, ..SamplingParams::default() };
        engine.generate(GenerateRequest { prompt: ids(&s["tokens"]), sampling }, Box::new(Collect(tx))).unwrap();
        let want = floats(&s["last_log_softmax"]);
        let got = rx.recv().unwrap().top;
        assert_eq!(got.len(), 32);
        for (id, logprob) in got {
            close(&format!("token id {id}"), f64::from(logprob), want[id as usize], 2e-5);
        }
    }
}

#[test]
fn grpo_loss_gradients_and_adamw_step_match() {
    let g = golden();
    let mut trainer = Trainer::new(g.cfg.clone(), &g.weights, trainer_config(&g), Device::Cpu).unwrap();
    let report = trainer.step(&samples(&g)).unwrap();
    let want = |name: &str| g.root[name].as_f64().unwrap();
    close("loss", report.loss, want("loss"), 1e-5);
    close("clip_fraction", report.clip_fraction, want("clip_fraction"), 1e-9);
    close("approx_kl", report.approx_kl, want("approx_kl"), 1e-5);
    close("entropy", report.entropy, want("entropy"), 1e-5);
    close("grad_norm", report.grad_norm, want("grad_norm"), 1e-5 * want("grad_norm"));
    close("trained tokens", f64::from(u32::try_from(report.trained_tokens).unwrap()), want("trained_tokens"), 0.0);

    // After one step the first moment is (1 - beta1) · scale · gradient.
    let state = trainer.optimizer_state().unwrap();
    let state = safetensors::SafeTensors::deserialize(&state).unwrap();
    let factor = 0.1 * want("grad_scale");
    for (name, want) in g.root["gradients"].as_object().unwrap() {
        let m = state.tensor(&format!("m.{name}")).unwrap();
        let got = m.data().chunks_exact(4).map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap())) / factor);
        let want = floats(want);
        let largest = want.iter().fold(0f64, |a, x| a.max(x.abs()));
        assert!(largest > 0.0, "{name} has no gradient");
        for (i, (got, want)) in got.zip(want).enumerate() {
            close(&format!("gradient of {name}[{i}]"), got, want, 5e-5 * largest);
        }
    }
    let lr = trainer_config(&g).learning_rate;
    for (name, got) in trainer.weights().unwrap().iter() {
        let got = got.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let gradients = floats(&g.root["gradients"][name]);
        let largest = gradients.iter().fold(0f64, |a, x| a.max(x.abs()));
        for (i, (&got, want)) in got.iter().zip(floats(&g.root["updated"][name])).enumerate() {
            // A gradient g known to 5e-5 of the largest one fixes g / (|g| + eps) to this share of the learning rate.
            let share = (5e-5 * largest / (gradients[i].abs() + 1e-9)).min(2.0);
            close(&format!("{name}[{i}] after the step"), f64::from(got), want, 1e-6 + lr * share);
        }
    }
    let again = trainer.step(&samples(&g)).unwrap();
    close("loss after the update", again.loss, want("loss_after_update"), 2e-4);
}

#[test]
fn cross_entropy_matches() {
    let g = golden();
    let mut trainer = Trainer::new(g.cfg.clone(), &g.weights, trainer_config(&g), Device::Cpu).unwrap();
    close("loss", trainer.supervised_step(&samples(&g)).unwrap().loss, g.root["cross_entropy"].as_f64().unwrap(), 1e-5);
}
