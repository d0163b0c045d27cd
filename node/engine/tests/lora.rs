//! Low-rank adapters: gradients and log-probabilities against numpy in float64 (`tests/goldens/make_lora_goldens.py`),
//! where they are never merged; what is saved, resumed and refused; and learning.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, helpers included")]

use std::collections::{BTreeMap, HashMap};

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;
use starling_engine::{
    Device, LlamaConfig, Sample, TrainError, Trainer, TrainerConfig, Weights, lora, sequence_logprobs,
};
use starling_protocol::algorithm::AlgorithmSpec;
use starling_protocol::lora::{LoraSpec, LoraTarget};

const GOLDENS: &str = include_str!("../../../tests/goldens/lora.json");
const MODEL: &str = include_str!("../../../tests/goldens/algorithms.json");

type Entries = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// The same formula as `formula` in `make_goldens.py`.
fn formula(number: f64, dims: &[usize]) -> Vec<f32> {
    let scale = dims.get(1).map(|c| 1.5 / f64::from(u32::try_from(*c).unwrap()).sqrt());
    let value = |i: u32| {
        let i = f64::from(i);
        let wave = (0.37 * i + 0.0113 * i * i + 1.7 * number).sin();
        #[expect(clippy::cast_possible_truncation, reason = "f32 weights are the purpose")]
        let value = scale.map_or(1.0 + 0.2 * wave, |s| s * wave) as f32;
        value
    };
    (0..).take(dims.iter().product()).map(value).collect()
}

fn file(entries: &Entries, info: Option<HashMap<String, String>>) -> Vec<u8> {
    let bytes = |v: &[f32]| v.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let parts: Vec<_> = entries.iter().map(|(n, (d, v))| (n.as_str(), Dtype::F32, d.clone(), bytes(v))).collect();
    let step = 0u64.to_le_bytes();
    let mut views: Vec<_> = parts.iter().map(|(n, t, d, b)| (*n, TensorView::new(*t, d.clone(), b).unwrap())).collect();
    if info.is_some() {
        views.push(("step", TensorView::new(Dtype::U64, vec![1], &step).unwrap()));
    }
    safetensors::serialize(views, info).unwrap()
}

fn weights(cfg: &LlamaConfig, shift: f64) -> Weights {
    let template = Weights::random(cfg, &Device::Cpu, 0).unwrap();
    let numbers = (0u32..).map(|t| f64::from(t) + shift);
    let entry = |((name, tensor), number): ((&str, &candle_core::Tensor), f64)| {
        (name.to_owned(), (tensor.dims().to_vec(), formula(number, tensor.dims())))
    };
    let entries = template.iter().zip(numbers).map(entry).collect();
    Weights::from_safetensors(cfg, &file(&entries, None), &Device::Cpu).unwrap()
}

#[expect(clippy::cast_possible_truncation, reason = "the script rounded these to f32")]
fn samples(root: &Value) -> Vec<Sample> {
    let sample = |s: &Value| Sample {
        tokens: serde_json::from_value(s["tokens"].clone()).unwrap(),
        loss_mask: serde_json::from_value(s["loss_mask"].clone()).unwrap(),
        behaviour_logprobs: s["behaviour_logprobs"]
            .as_array()
            .unwrap()
            .iter()
            .map(|x| x.as_f64().unwrap() as f32)
            .collect(),
        advantage: s["advantage"].as_f64().unwrap() as f32,
        staleness: serde_json::from_value(s["staleness"].clone()).unwrap(),
        episode: s["episode"].as_u64(),
    };
    root["samples"].as_array().unwrap().iter().map(sample).collect()
}

fn entries(state: &[u8]) -> Entries {
    let file = SafeTensors::deserialize(state).unwrap();
    let floats = |b: &[u8]| b.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    let f32s = file.tensors().into_iter().filter(|(_, t)| t.dtype() == Dtype::F32);
    f32s.map(|(n, t)| (n, (t.shape().to_vec(), floats(t.data())))).collect()
}

fn info(spec: &LoraSpec) -> Option<HashMap<String, String>> {
    Some(HashMap::from([("lora".to_owned(), serde_json::to_string(spec).unwrap())]))
}

/// The golden's adapters as state before the first update. PEFT's names come from the golden, shapes from the trainer.
fn golden_state(fresh: &[u8], names: &[&String], spec: &LoraSpec) -> Vec<u8> {
    let mut all = entries(fresh);
    let mut number = 100.0;
    // In the order of the model's tensors, as the script numbers them.
    let place = |name: &str| {
        let layer: usize = name.split('.').nth(4).unwrap().parse().unwrap();
        let target = LoraTarget::ALL.iter().position(|t| name.contains(t.name())).unwrap();
        (layer, target, name.contains("lora_B"))
    };
    let mut names: Vec<&&String> = names.iter().collect();
    names.sort_by_key(|n| place(n));
    for name in names {
        let (dims, values) = all.get_mut(name.as_str()).unwrap();
        *values = formula(number, dims);
        if name.contains("lora_B") {
            values.iter_mut().for_each(|v| *v *= 0.25);
        }
        number += 1.0;
    }
    file(&all, info(spec))
}

fn close(what: &str, got: f64, want: f64, tolerance: f64) {
    assert!((got - want).abs() <= tolerance, "{what}: expected {want}, got {got}");
}

/// Tolerances as in `algorithms.rs`, whose forward and backward passes these are. For log-probabilities: merging rounds
/// each weight once more, by half of 2^-24 of it, which is less than the products' own rounding: 2e-5 as in `goldens.rs`.
#[test]
fn gradients_and_merged_logprobs_match_adapters_that_were_never_merged() {
    let (goldens, model): (Value, Value) =
        (serde_json::from_str(GOLDENS).unwrap(), serde_json::from_str(MODEL).unwrap());
    let model = &model["model"];
    let cfg = LlamaConfig::from_json(model["config"].to_string().as_bytes()).unwrap();
    let (base, reference, samples) = (weights(&cfg, 0.0), weights(&cfg, 0.05), samples(model));
    for golden in goldens.as_array().unwrap() {
        let spec: LoraSpec = serde_json::from_value(golden["lora"].clone()).unwrap();
        for (name, case) in golden["cases"].as_object().unwrap() {
            let algorithm: AlgorithmSpec = serde_json::from_value(model["cases"][name]["spec"].clone()).unwrap();
            let tc = TrainerConfig {
                algorithm,
                max_grad_norm: 0.0,
                micro_batch_tokens: 30,
                lora: Some(spec.clone()),
                ..TrainerConfig::default()
            };
            let mut trainer = Trainer::new(cfg.clone(), &base, tc, Device::Cpu).unwrap();
            trainer.set_reference(&reference).unwrap();
            let tensors = case["tensors"].as_object().unwrap();
            let fresh = trainer.optimizer_state().unwrap();
            assert_eq!(entries(&fresh).len(), 3 * tensors.len(), "moments of adapters only");
            let names: Vec<&String> = tensors.keys().collect();
            trainer.load_optimizer_state(&golden_state(&fresh, &names, &spec)).unwrap();
            let merged = trainer.weights().unwrap();
            for (s, want) in samples.iter().zip(golden["logprobs"].as_array().unwrap()) {
                let got = sequence_logprobs(&cfg, &merged, &Device::Cpu, &s.tokens).unwrap();
                for (got, want) in got[1..].iter().zip(want.as_array().unwrap()) {
                    close("log-probability", f64::from(*got), want.as_f64().unwrap(), 2e-5);
                }
            }
            let report = trainer.step(&samples).unwrap();
            let want = case["loss"].as_f64().unwrap();
            close(&format!("{name}: loss"), report.loss, want, 2e-5 * want.abs().max(1.0));
            // After one step the first moment is (1 - beta1) · gradient.
            let state = entries(&trainer.optimizer_state().unwrap());
            for (tensor, want) in tensors {
                let (mut square, mut along_sin, mut along_cos) = (0.0, 0.0, 0.0);
                for (i, m) in (1u32..).zip(&state[&format!("m.{tensor}")].1) {
                    let g = f64::from(*m) / 0.1;
                    square += g * g;
                    along_sin += g * f64::from(i).sin();
                    along_cos += g * f64::from(i).cos();
                }
                assert!(square > 0.0, "{tensor} has no gradient");
                let tolerance = 2e-4 * square.sqrt().max(0.02 * report.grad_norm).max(1e-3);
                close(&format!("{name}: {tensor} along sin"), along_sin, want[0].as_f64().unwrap(), tolerance);
                close(&format!("{name}: {tensor} along cos"), along_cos, want[1].as_f64().unwrap(), tolerance);
            }
        }
    }
}

fn all(rank: u32) -> LoraSpec {
    LoraSpec { rank, alpha: 2.0 * f64::from(rank), targets: LoraTarget::ALL.to_vec() }
}

fn trainer(lora: Option<LoraSpec>, seed: u64, threads: usize) -> (LlamaConfig, Weights, Vec<Sample>, Trainer) {
    let model: Value = serde_json::from_str(MODEL).unwrap();
    let cfg = LlamaConfig::from_json(model["model"]["config"].to_string().as_bytes()).unwrap();
    let base = weights(&cfg, 0.0);
    let tc = TrainerConfig { learning_rate: 1e-2, minibatches: 2, lora, seed, threads, ..TrainerConfig::default() };
    let trainer = Trainer::new(cfg.clone(), &base, tc, Device::Cpu).unwrap();
    (cfg, base, samples(&model["model"]), trainer)
}

fn bytes(t: &Trainer) -> Vec<u8> {
    t.weights().unwrap().to_safetensors().unwrap()
}

/// Another leader has the weights from before the job's first step and the newest optimizer state.
#[test]
fn another_leader_continues_bit_for_bit_from_the_first_weights_and_the_state() {
    let (_, base, samples, mut a) = trainer(Some(all(3)), 7, 2);
    assert_eq!(bytes(&a), base.to_safetensors().unwrap(), "fresh adapters change nothing");
    for _ in 0..3 {
        a.step(&samples).unwrap();
    }
    let (saved, published) = (a.optimizer_state().unwrap(), bytes(&a));
    assert_ne!(published, base.to_safetensors().unwrap());
    let (_, _, _, mut b) = trainer(Some(all(3)), 8, 1);
    b.load_optimizer_state(&saved).unwrap();
    assert_eq!(bytes(&b), published);
    a.step(&samples).unwrap();
    b.step(&samples).unwrap();
    assert_eq!((bytes(&a), a.optimizer_state().unwrap()), (bytes(&b), b.optimizer_state().unwrap()));
    let (_, _, _, mut other_seed) = trainer(Some(all(3)), 9, 2);
    for _ in 0..3 {
        other_seed.step(&samples).unwrap();
    }
    assert_ne!(bytes(&other_seed), published);
}

#[test]
fn only_adapted_matrices_change_and_the_loss_falls() {
    let spec = LoraSpec { targets: vec![LoraTarget::QProj, LoraTarget::DownProj], ..all(4) };
    let (_, base, samples, mut t) = trainer(Some(spec), 1, 2);
    let first = t.supervised_step(&samples).unwrap().loss;
    let last = (0..40).map(|_| t.supervised_step(&samples).unwrap().loss).last().unwrap();
    assert!(last < 0.6 * first, "the loss went from {first} to {last}");
    for ((name, new), (_, old)) in t.weights().unwrap().iter().zip(base.iter()) {
        let host = |t: &candle_core::Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let adapted = name.contains("q_proj") || name.contains("down_proj");
        assert_eq!(adapted, host(new) != host(old), "{name}");
    }
}

#[test]
fn state_of_other_adapters_or_of_none_is_refused_by_name_and_changes_nothing() {
    let (_, _, samples, mut adapters) = trainer(Some(all(3)), 1, 1);
    let (_, _, _, mut other) = trainer(Some(all(2)), 1, 1);
    let (_, _, _, mut full) = trainer(None, 1, 1);
    adapters.step(&samples).unwrap();
    let state = adapters.optimizer_state().unwrap();
    assert!(lora::has_adapters(&state) && !lora::has_adapters(&full.optimizer_state().unwrap()));
    assert!(!lora::has_adapters(b"nonsense"));
    let refused = |t: &mut Trainer, state: &[u8], wanted: &[&str]| {
        let before = (bytes(t), t.optimizer_state().unwrap());
        let err = t.load_optimizer_state(state).unwrap_err();
        assert!(matches!(err, TrainError::OptimizerState { .. }), "{err}");
        assert!(wanted.iter().all(|w| err.to_string().contains(w)), "{err}");
        assert_eq!(before, (bytes(t), t.optimizer_state().unwrap()));
    };
    refused(&mut other, &state, &["lora", "\"rank\":2", "\"rank\":3"]);
    refused(&mut full, &state, &["lora", "null", "\"rank\":3"]);
    let none = full.optimizer_state().unwrap();
    refused(&mut other, &none, &["lora", "\"rank\":2", "null"]);
    let mut broken = entries(&state);
    let name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight";
    broken.get_mut(name).unwrap().1[3] = f32::NAN;
    refused(&mut adapters, &file(&broken, info(&all(3))), &["lora", "finite"]);
    broken.remove(name);
    refused(&mut adapters, &file(&broken, info(&all(3))), &[name, "none"]);
    let wrong = LoraSpec { rank: 0, ..all(3) };
    refused(&mut adapters, &file(&broken, info(&wrong)), &["trainer.lora.rank", "1 to 512"]);
    let (cfg, base, ..) = trainer(None, 1, 1);
    let tc = TrainerConfig { lora: Some(wrong), ..TrainerConfig::default() };
    let err = Trainer::new(cfg, &base, tc, Device::Cpu).unwrap_err().to_string();
    assert!(err.contains("trainer.lora.rank") && err.contains("got 0"), "{err}");
}

/// The weights that PEFT would compute with are those that are published: base + scale · B · A. Sums of three products
/// below 1 and one rounding of the weight: 1e-6.
#[test]
fn the_exported_adapter_on_its_base_makes_the_published_weights() {
    let (_, base, samples, mut t) = trainer(Some(all(3)), 1, 1);
    for _ in 0..4 {
        t.step(&samples).unwrap();
    }
    let adapter = lora::peft_adapter(&t.optimizer_state().unwrap(), "base/model").unwrap().unwrap();
    let config: Value = serde_json::from_str(&adapter.config).unwrap();
    assert_eq!((config["peft_type"].as_str(), config["task_type"].as_str()), (Some("LORA"), Some("CAUSAL_LM")));
    assert_eq!((config["r"].as_u64(), config["lora_alpha"].as_f64()), (Some(3), Some(6.0)));
    assert_eq!(config["target_modules"].as_array().unwrap().len(), 7);
    assert_eq!(config["base_model_name_or_path"], "base/model");
    let factors = entries(&adapter.weights);
    assert_eq!(factors.len(), 2 * 7 * 2);
    let (old, new) = (entries(&base.to_safetensors().unwrap()), entries(&bytes(&t)));
    for (name, (dims, values)) in &new {
        let key = format!("base_model.model.{}", name.trim_end_matches(".weight"));
        let factor = |f: &str| factors.get(&format!("{key}.lora_{f}.weight"));
        let (Some((_, a)), Some((_, b))) = (factor("A"), factor("B")) else { continue };
        for (i, value) in values.iter().enumerate() {
            let (r, c) = (i / dims[1], i % dims[1]);
            let product: f32 = (0..3).map(|p| b[r * 3 + p] * a[p * dims[1] + c]).sum();
            assert!((old[name].1[i] + 2.0 * product - value).abs() < 1e-6, "{name} [{r}, {c}]");
        }
    }
    let (_, _, _, full) = trainer(None, 1, 1);
    assert_eq!(lora::peft_adapter(&full.optimizer_state().unwrap(), "base").unwrap(), None);
    assert!(lora::peft_adapter(b"nonsense", "base").is_err());
}
