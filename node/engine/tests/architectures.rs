//! Every architecture against mlx-lm's models (`tests/goldens/make_architectures.py`): log-probabilities, sampled tokens
//! and gradients.
//!
//! Tolerances: both sides compute in f32. Log-probabilities of these two-layer models differ by some 1e-6, gradients by
//! some 1e-6 of a tensor's norm; 2e-5 and 5e-5 leave a margin of ten, and a wrong bias, norm or angle is off by 1e-2.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, helpers included")]

use serde_json::Value;
use starling_engine::{Device, LlamaConfig, Sample, Trainer, TrainerConfig, Weights, sequence_logprobs};

const GOLDENS: &str = include_str!("../../../tests/goldens/architectures.json");

fn floats(v: &Value) -> Vec<f64> {
    v.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

fn ids(v: &Value) -> Vec<u32> {
    v.as_array().unwrap().iter().map(|x| u32::try_from(x.as_u64().unwrap()).unwrap()).collect()
}

/// The same formula as `formula` in the script.
fn formula(name: &str, shape: &[usize]) -> Vec<f32> {
    let phase = 0.37 * f64::from(name.bytes().map(u32::from).sum::<u32>() % 101);
    let wave = (0u32..).take(shape.iter().product()).map(|i| {
        let i = f64::from(i);
        (0.37 * i + 0.0113 * i * i + phase).sin()
    });
    let value = |w: f64| match shape {
        [_, columns] => 1.5 / f64::from(u32::try_from(*columns).unwrap()).sqrt() * w,
        _ if name.ends_with(".bias") => 0.5 * w,
        _ => 1.0 + 0.2 * w,
    };
    #[expect(clippy::cast_possible_truncation, reason = "f32 weights are the purpose")]
    wave.map(|w| value(w) as f32).collect()
}

fn weights(cfg: &LlamaConfig) -> Weights {
    // Names and shapes come from a random model of this configuration; the values are replaced.
    let template = Weights::random(cfg, &Device::Cpu, 0).unwrap();
    let entries: Vec<(&str, Vec<usize>, Vec<u8>)> = template
        .iter()
        .map(|(name, t)| {
            let bytes = formula(name, t.dims()).iter().flat_map(|v| v.to_le_bytes()).collect();
            (name, t.dims().to_vec(), bytes)
        })
        .collect();
    let views: Vec<_> = entries
        .iter()
        .map(|(n, d, b)| (*n, safetensors::tensor::TensorView::new(safetensors::Dtype::F32, d.clone(), b).unwrap()))
        .collect();
    Weights::from_safetensors(cfg, &safetensors::serialize(views, None).unwrap(), &Device::Cpu).unwrap()
}

fn close(what: &str, got: f64, want: f64, tolerance: f64) {
    assert!((got - want).abs() <= tolerance, "{what}: expected {want}, got {got}");
}

#[test]
fn logprobs_match() {
    let root: Value = serde_json::from_str(GOLDENS).unwrap();
    for (name, golden) in root.as_object().unwrap() {
        let cfg = LlamaConfig::from_json(golden["config"].to_string().as_bytes()).unwrap();
        let w = weights(&cfg);
        for s in golden["sequences"].as_array().unwrap() {
            let tokens = ids(&s["tokens"]);
            let got = sequence_logprobs(&cfg, &w, &Device::Cpu, &tokens).unwrap();
            let want = floats(&s["logprobs"]);
            assert_eq!(got.len(), want.len() + 1);
            for (t, (got, want)) in got[1..].iter().zip(want).enumerate() {
                close(&format!("{name}, token {t} of {}", tokens.len()), f64::from(*got), want, 2e-5);
            }
        }
    }
}

#[test]
fn every_parameter_has_the_gradient_of_the_reference() {
    let root: Value = serde_json::from_str(GOLDENS).unwrap();
    for (name, golden) in root.as_object().unwrap() {
        let cfg = LlamaConfig::from_json(golden["config"].to_string().as_bytes()).unwrap();
        let options = TrainerConfig { betas: (0.9, 0.95), max_grad_norm: 0.0, ..TrainerConfig::default() };
        let mut trainer = Trainer::new(cfg.clone(), &weights(&cfg), options, Device::Cpu).unwrap();
        let sample = |s: &Value| {
            let tokens = ids(&s["tokens"]);
            let n = tokens.len();
            Sample {
                loss_mask: (0..n).map(|t| t > 0).collect(),
                behaviour_logprobs: vec![0.0; n],
                advantage: 1.0,
                tokens,
                ..Sample::default()
            }
        };
        let samples: Vec<_> = golden["sequences"].as_array().unwrap().iter().map(sample).collect();
        let report = trainer.supervised_step(&samples).unwrap();
        close(&format!("{name}, loss"), report.loss, golden["loss"].as_f64().unwrap(), 2e-5);
        // After one step the first moment is (1 - beta1) · gradient.
        let state = trainer.optimizer_state().unwrap();
        let state = safetensors::SafeTensors::deserialize(&state).unwrap();
        let gradients = golden["gradients"].as_object().unwrap();
        assert_eq!(gradients.len(), trainer.weights().unwrap().iter().count());
        for (tensor, want) in gradients {
            let m = state.tensor(&format!("m.{tensor}")).unwrap();
            let got: Vec<f64> =
                m.data().chunks_exact(4).map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap())) / 0.1).collect();
            let norm = want["norm"].as_f64().unwrap();
            assert!(norm > 0.0, "{name}, {tensor} has no gradient");
            close(
                &format!("{name}, norm of {tensor}"),
                got.iter().map(|g| g * g).sum::<f64>().sqrt(),
                norm,
                5e-5 * norm,
            );
            for (i, (got, want)) in got.iter().zip(floats(&want["first"])).enumerate() {
                close(&format!("{name}, gradient of {tensor}[{i}]"), *got, want, 5e-5 * norm);
            }
        }
    }
}
