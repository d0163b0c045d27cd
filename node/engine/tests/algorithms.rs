//! Every algorithm through a whole model: gradients against numpy in float64
//! (`tests/goldens/make_algorithm_goldens.py`), and learning.
//!
//! Tolerances as in `goldens.rs`, and for its reasons; a tensor's gradient is compared by its sums along `sin(1), sin(2), …`
//! and `cos(1), cos(2), …`, which every element moves.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, helpers included")]

use std::sync::mpsc;

use serde_json::Value;
use starling_engine::{
    Device, EngineError, FinishReason, GenerateRequest, InferenceEngine, InferenceOptions, LlamaConfig, Sample,
    SampledToken, SamplingParams, StepReport, TokenSink, TrainError, Trainer, TrainerConfig, Weights,
};
use starling_protocol::advantage::batch_advantages;
use starling_protocol::algorithm::{
    AlgorithmSpec, Bounds, Correction, Level, Objective, OldPolicy, Preset, ReferenceKl,
};

const GOLDENS: &str = include_str!("../../../tests/goldens/algorithms.json");
const TREE: &str = include_str!("../../../tests/goldens/tree.json");

fn floats(v: &Value) -> Vec<f64> {
    v.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

/// The same formula as `formula` in `make_goldens.py`; `shift` is added to every tensor's number.
fn weights(cfg: &LlamaConfig, shift: f64) -> Weights {
    let template = Weights::random(cfg, &Device::Cpu, 0).unwrap();
    let mut entries = Vec::new();
    for (t, (name, tensor)) in template.iter().enumerate() {
        let dims = tensor.dims().to_vec();
        let scale = dims.get(1).map(|c| 1.5 / f64::from(u32::try_from(*c).unwrap()).sqrt());
        let number = f64::from(u32::try_from(t).unwrap()) + shift;
        let value = |i: u32| {
            let i = f64::from(i);
            let wave = (0.37 * i + 0.0113 * i * i + 1.7 * number).sin();
            #[expect(clippy::cast_possible_truncation, reason = "f32 weights are the purpose")]
            let value = scale.map_or(1.0 + 0.2 * wave, |s| s * wave) as f32;
            value
        };
        let bytes: Vec<u8> = (0..).take(dims.iter().product()).flat_map(|i| value(i).to_le_bytes()).collect();
        entries.push((name.to_owned(), dims, bytes));
    }
    let views: Vec<_> = entries
        .iter()
        .map(|(n, d, b)| {
            (n.as_str(), safetensors::tensor::TensorView::new(safetensors::Dtype::F32, d.clone(), b).unwrap())
        })
        .collect();
    let bytes = safetensors::serialize(views, None).unwrap();
    Weights::from_safetensors(cfg, &bytes, &Device::Cpu).unwrap()
}

#[expect(clippy::cast_possible_truncation, reason = "the script rounded these to f32")]
fn samples(root: &Value) -> Vec<Sample> {
    let sample = |s: &Value| Sample {
        tokens: serde_json::from_value(s["tokens"].clone()).unwrap(),
        loss_mask: serde_json::from_value(s["loss_mask"].clone()).unwrap(),
        behaviour_logprobs: floats(&s["behaviour_logprobs"]).iter().map(|&x| x as f32).collect(),
        advantage: s["advantage"].as_f64().unwrap() as f32,
        staleness: serde_json::from_value(s["staleness"].clone()).unwrap(),
        episode: s["episode"].as_u64(),
    };
    root["samples"].as_array().unwrap().iter().map(sample).collect()
}

fn close(what: &str, got: f64, want: f64, tolerance: f64) {
    assert!((got - want).abs() <= tolerance, "{what}: expected {want}, got {got}");
}

fn trainer(cfg: &LlamaConfig, start: &Weights, reference: &Weights, tc: TrainerConfig) -> Trainer {
    let mut trainer = Trainer::new(cfg.clone(), start, tc, Device::Cpu).unwrap();
    trainer.set_reference(reference).unwrap();
    trainer
}

#[test]
fn loss_and_model_gradients_of_every_algorithm_match() {
    let root: Value = serde_json::from_str(GOLDENS).unwrap();
    check_cases(&root["model"], 30, 0);
}

/// Two episodes of one prompt, one of them forked twice (`make_tree_goldens.py`): the reference computes each sequence on
/// its own, the trainer each prefix once.
#[test]
fn loss_and_model_gradients_of_forked_timelines_match() {
    let root: Value = serde_json::from_str(TREE).unwrap();
    // What was there already: up to two forks, the prompt of the other episode, and all of its second timeline.
    check_cases(&root, 512, 15 + 12 + 9 + 14);
}

fn check_cases(root: &Value, micro_batch_tokens: usize, shared: u64) {
    let cfg = LlamaConfig::from_json(root["config"].to_string().as_bytes()).unwrap();
    let (start, reference, samples) = (weights(&cfg, 0.0), weights(&cfg, 0.05), samples(root));
    for (name, case) in root["cases"].as_object().unwrap() {
        let algorithm: AlgorithmSpec = serde_json::from_value(case["spec"].clone()).unwrap();
        // No clipping of the gradient; where micro-batches are small, episodes lie in several.
        let tc = TrainerConfig { algorithm, max_grad_norm: 0.0, micro_batch_tokens, ..TrainerConfig::default() };
        let mut trainer = trainer(&cfg, &start, &reference, tc);
        let report = trainer.step(&samples).unwrap();
        assert_eq!(report.tokens_shared, shared);
        let want = |field: &str| case[field].as_f64().unwrap();
        close(&format!("{name}: loss"), report.loss, want("loss"), 2e-5 * want("loss").abs().max(1.0));
        close(&format!("{name}: masked"), report.masked_fraction, want("masked"), 1e-6);
        // After one step the first moment is (1 - beta1) · gradient.
        let state = trainer.optimizer_state().unwrap();
        let state = safetensors::SafeTensors::deserialize(&state).unwrap();
        let tensors = case["tensors"].as_object().unwrap();
        for (tensor, want) in tensors {
            let m = state.tensor(&format!("m.{tensor}")).unwrap();
            let values = m.data().chunks_exact(4).map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap())) / 0.1);
            let (mut square, mut along_sin, mut along_cos) = (0.0, 0.0, 0.0);
            for (i, g) in (1u32..).zip(values) {
                square += g * g;
                along_sin += g * f64::from(i).sin();
                along_cos += g * f64::from(i).cos();
            }
            // A direction adds up to a thousand errors of 5e-5 of the largest element with random signs.
            let tolerance = 2e-4 * square.sqrt().max(0.02 * report.grad_norm).max(1e-3);
            close(&format!("{name}: {tensor} along sin"), along_sin, want[0].as_f64().unwrap(), tolerance);
            close(&format!("{name}: {tensor} along cos"), along_cos, want[1].as_f64().unwrap(), tolerance);
        }
    }
}

fn bytes(t: &Trainer) -> Vec<u8> {
    t.weights().unwrap().to_safetensors().unwrap()
}

/// The default is PPO-clip against the sampler over the mean of tokens. On fresh data of one update it does not matter
/// where the old policy comes from, down to the last bit.
#[test]
fn with_one_update_the_recomputed_policy_is_the_current_one() {
    let root: Value = serde_json::from_str(GOLDENS).unwrap();
    let cfg = LlamaConfig::from_json(root["model"]["config"].to_string().as_bytes()).unwrap();
    let start = weights(&cfg, 0.0);
    let mut fresh = samples(&root["model"]);
    for s in &mut fresh {
        s.behaviour_logprobs = starling_engine::sequence_logprobs(&cfg, &start, &Device::Cpu, &s.tokens).unwrap();
    }
    let run = |old_policy, guard| {
        let algorithm = AlgorithmSpec { old_policy, outlier_guard: guard, ..AlgorithmSpec::default() };
        let tc = TrainerConfig { algorithm, learning_rate: 1e-2, ..TrainerConfig::default() };
        let mut t = trainer(&cfg, &start, &start, tc);
        let report = t.step(&fresh).unwrap();
        assert!(report.approx_kl.abs() < 1e-12 && report.ratios_out_of_range == 0, "{report:?}");
        bytes(&t)
    };
    let sampler = run(OldPolicy::Sampler, None);
    assert_ne!(sampler, start.to_safetensors().unwrap());
    assert_eq!(sampler, run(OldPolicy::Recomputed, None));
    assert_eq!(sampler, run(OldPolicy::Recomputed, Some(Bounds { low: 0.5, high: 2.0 })));
}

/// From the second update on, the recomputed policy is that of the step's start: the ratio to it moves away from 1.
#[test]
fn later_minibatches_see_the_policy_of_the_steps_start() {
    let root: Value = serde_json::from_str(GOLDENS).unwrap();
    let cfg = LlamaConfig::from_json(root["model"]["config"].to_string().as_bytes()).unwrap();
    let start = weights(&cfg, 0.0);
    let batch = samples(&root["model"]);
    let run = |objective, correction, minibatches| {
        let algorithm =
            AlgorithmSpec { objective, correction, old_policy: OldPolicy::Recomputed, ..AlgorithmSpec::default() };
        let tc = TrainerConfig { algorithm, learning_rate: 3e-2, minibatches, ..TrainerConfig::default() };
        trainer(&cfg, &start, &start, tc).step(&batch).unwrap()
    };
    for objective in
        [Objective::Clip { low: 0.01, high: 0.01, ratio_max: None }, Objective::Gspo { low: 1e-3, high: 1e-3 }]
    {
        assert!(run(objective, Correction::None, 1).clip_fraction.abs() < 1e-12, "{objective:?}");
        assert!(run(objective, Correction::None, 2).clip_fraction > 0.0, "{objective:?}");
        let weighed = run(objective, Correction::Tis { cap: 1.1, level: Level::Sequence }, 2);
        assert!((weighed.correction_weight - 1.0).abs() > 1e-3, "{weighed:?}");
    }
}

#[test]
fn a_kl_without_a_reference_is_refused_and_a_guard_that_drops_everything_moves_nothing() {
    let root: Value = serde_json::from_str(GOLDENS).unwrap();
    let cfg = LlamaConfig::from_json(root["model"]["config"].to_string().as_bytes()).unwrap();
    let (start, batch) = (weights(&cfg, 0.0), samples(&root["model"]));
    let kl = ReferenceKl { coefficient: 0.1, ..ReferenceKl::default() };
    let tc = TrainerConfig { algorithm: AlgorithmSpec { kl, ..AlgorithmSpec::default() }, ..TrainerConfig::default() };
    let mut t = Trainer::new(cfg.clone(), &start, tc, Device::Cpu).unwrap();
    assert!(matches!(t.step(&batch), Err(TrainError::InvalidOption { field: "algorithm.kl", .. })));
    let guard = Some(Bounds { low: 0.999, high: 1.001 });
    let algorithm = AlgorithmSpec { outlier_guard: guard, ..AlgorithmSpec::default() };
    let mut t = trainer(&cfg, &start, &start, TrainerConfig { algorithm, ..TrainerConfig::default() });
    let report = t.step(&batch).unwrap();
    close("masked", report.masked_fraction, 1.0, 0.0);
    close("norm", report.grad_norm, 0.0, 0.0);
    assert_eq!(bytes(&t), start.to_safetensors().unwrap());
    let wrong = AlgorithmSpec { entropy_bonus: -1.0, ..AlgorithmSpec::default() };
    let tc = TrainerConfig { algorithm: wrong, ..TrainerConfig::default() };
    let refused = Trainer::new(cfg, &start, tc, Device::Cpu).unwrap_err().to_string();
    assert!(refused.contains("algorithm.entropy_bonus"), "{refused}");
}

#[test]
fn an_episode_that_comes_back_after_another_is_refused() {
    let root: Value = serde_json::from_str(GOLDENS).unwrap();
    let cfg = LlamaConfig::from_json(root["model"]["config"].to_string().as_bytes()).unwrap();
    let (start, mut batch) = (weights(&cfg, 0.0), samples(&root["model"]));
    batch[4].episode = batch[0].episode;
    let mut t = trainer(&cfg, &start, &start, TrainerConfig::default());
    assert!(matches!(t.step(&batch), Err(TrainError::Sample { sample: 4, field: "episode", .. })));
}

/// The bandit of `learning.rs`: prompt p pays a token in [8 p, 8 p + 8), chance is 0.2.
const PROMPTS: usize = 4;
const EPISODES: usize = 48;

fn bandit_config() -> LlamaConfig {
    LlamaConfig {
        vocab_size: 40,
        hidden_size: 32,
        intermediate_size: 64,
        num_hidden_layers: 1,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 8,
        max_position_embeddings: 64,
        tie_word_embeddings: true,
        ..LlamaConfig::from_json(
            serde_json::from_str::<Value>(GOLDENS).unwrap()["model"]["config"].to_string().as_bytes(),
        )
        .unwrap()
    }
}

struct Collect {
    tokens: Vec<SampledToken>,
    done: mpsc::Sender<(usize, Vec<SampledToken>)>,
    index: usize,
}

impl TokenSink for Collect {
    fn token(&mut self, t: SampledToken) -> bool {
        self.tokens.push(t);
        true
    }

    fn finish(self: Box<Self>, r: Result<FinishReason, EngineError>) {
        r.unwrap();
        self.done.send((self.index, self.tokens)).unwrap();
    }
}

fn round(engine: &InferenceEngine, algorithm: &AlgorithmSpec, round: u64, versions_behind: u32) -> (f32, Vec<Sample>) {
    let (done, results) = mpsc::channel();
    for index in 0..EPISODES {
        let prompt = vec![39, u32::try_from(index % PROMPTS).unwrap()];
        let seed = round * EPISODES as u64 + index as u64;
        let sampling = SamplingParams { max_tokens: 2, seed, ..SamplingParams::default() };
        let sink = Collect { tokens: Vec::new(), done: done.clone(), index };
        engine.generate(GenerateRequest { prompt, sampling }, Box::new(sink)).unwrap();
    }
    let mut answers: Vec<_> = (0..EPISODES).map(|_| results.recv().unwrap()).collect();
    answers.sort_by_key(|(i, _)| (i % PROMPTS, *i));
    let reward = |(i, answer): &(usize, Vec<SampledToken>)| {
        let paid = answer.iter().filter(|t| t.id as usize / 8 == i % PROMPTS).count();
        f32::from(u8::try_from(paid).unwrap()) / 2.0
    };
    let groups: Vec<Vec<f32>> = answers.chunks(EPISODES / PROMPTS).map(|g| g.iter().map(reward).collect()).collect();
    let mean = groups.iter().flatten().sum::<f32>() / 48.0;
    let advantages = batch_advantages(algorithm.advantage, &groups);
    let advantages = groups.iter().zip(advantages).flat_map(|(g, a)| a.unwrap_or_else(|| vec![0.0; g.len()]));
    let trains = |a: f32| a != 0.0 && (algorithm.objective != Objective::Supervised || a > 0.0);
    let sample = |((i, answer), advantage): ((usize, Vec<SampledToken>), f32)| Sample {
        tokens: [39, u32::try_from(i % PROMPTS).unwrap()].into_iter().chain(answer.iter().map(|t| t.id)).collect(),
        loss_mask: vec![false, false, true, true],
        behaviour_logprobs: [0.0, 0.0].into_iter().chain(answer.iter().map(|t| t.logprob)).collect(),
        advantage,
        staleness: vec![versions_behind; 4],
        episode: Some(i as u64),
    };
    let samples = answers.into_iter().zip(advantages).filter(|(_, a)| trains(*a)).map(sample).collect();
    (mean, samples)
}

/// Mean reward of the first and the last five of `rounds`; the sampler has the weights of `lag` rounds before.
fn learn(algorithm: AlgorithmSpec, rounds: u64, lag: usize) -> (f32, f32, Vec<StepReport>) {
    let cfg = bandit_config();
    let start = Weights::random(&cfg, &Device::Cpu, 1).unwrap();
    // Two updates a step, so that the old policy is not always the current one.
    let tc = TrainerConfig {
        algorithm: algorithm.clone(),
        learning_rate: 4e-3,
        betas: (0.9, 0.95),
        minibatches: 2,
        ..TrainerConfig::default()
    };
    let mut t = trainer(&cfg, &start, &start, tc);
    let options = InferenceOptions::default();
    let engine = InferenceEngine::spawn(cfg, start.clone(), 0, options, Device::Cpu).unwrap();
    let mut history = std::collections::VecDeque::from([start]);
    let (mut means, mut reports) = (Vec::new(), Vec::new());
    for r in 0..rounds {
        let behind = u32::try_from(history.len() - 1).unwrap();
        let (mean, samples) = round(&engine, &algorithm, r, behind);
        means.push(mean);
        if !samples.is_empty() {
            reports.push(t.step(&samples).unwrap());
        }
        history.push_back(t.weights().unwrap());
        if history.len() > lag + 1 {
            history.pop_front();
        }
        engine.swap_weights(history[0].clone(), r + 1).unwrap();
    }
    let of = |part: &[f32]| part.iter().sum::<f32>() / 5.0;
    (of(&means[..5]), of(&means[means.len() - 5..]), reports)
}

/// 240 episodes of two tokens at chance 0.2 have a standard error of 0.018; twice the reward is eleven of those.
#[test]
fn every_preset_learns_the_bandit() {
    for preset in Preset::ALL {
        let (first, last, reports) = learn(preset.spec(2), 60, 0);
        assert!(last > 2.0 * first && last > 0.5, "{preset:?} (seed 1): reward went from {first} to {last}");
        assert!(reports.iter().all(|r| r.loss.is_finite() && r.entropy >= 0.0 && r.ratios_out_of_range == 0));
    }
}

/// With a sampler that is two versions behind, the corrections see ratios away from 1, and learning goes on.
#[test]
fn corrections_learn_from_stale_data() {
    let recomputed =
        |correction| AlgorithmSpec { correction, old_policy: OldPolicy::Recomputed, ..Preset::Grpo.spec(2) };
    let shortcut = |correction| AlgorithmSpec { correction, old_policy: OldPolicy::Shortcut, ..Preset::Grpo.spec(2) };
    let guard = Some(Bounds { low: 1e-4, high: 100.0 });
    for algorithm in [
        recomputed(Correction::Tis { cap: 2.0, level: Level::Token }),
        recomputed(Correction::IcePop { low: 0.5, high: 5.0 }),
        shortcut(Correction::Decoupled { cap: 5.0 }),
        AlgorithmSpec { outlier_guard: guard, ..Preset::Dppo.spec(2) },
    ] {
        let (first, last, reports) = learn(algorithm.clone(), 60, 2);
        assert!(last > 2.0 * first && last > 0.5, "{algorithm:?} (seed 1): reward went from {first} to {last}");
        assert!(reports.iter().any(|r| r.approx_kl > 1e-4), "the data is stale");
        let weighs = !matches!(algorithm.correction, Correction::DppoMask { .. });
        assert!(!weighs || reports.iter().any(|r| (r.correction_weight - 1.0).abs() > 1e-3), "{algorithm:?}");
    }
}
