//! The whole loop on problems that have to be solved within seconds: supervised copying, and a bandit by GRPO.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, helpers included")]

use std::sync::mpsc;

use starling_engine::{
    Architecture, Device, EngineError, FinishReason, GenerateRequest, InferenceEngine, InferenceOptions, LlamaConfig,
    Sample, SampledToken, SamplingParams, TokenSink, TrainError, Trainer, TrainerConfig, Weights,
};

fn config(layers: usize) -> LlamaConfig {
    LlamaConfig {
        architecture: Architecture::Llama,
        vocab_size: 40,
        hidden_size: 64,
        intermediate_size: 128,
        num_hidden_layers: layers,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 16,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: None,
        max_position_embeddings: 64,
        tie_word_embeddings: true,
        bos_token_id: None,
        eos_token_ids: vec![],
    }
}

fn trainer(cfg: &LlamaConfig, learning_rate: f64, minibatches: usize) -> Trainer {
    let weights = Weights::random(cfg, &Device::Cpu, 1).unwrap();
    let tc = TrainerConfig { learning_rate, minibatches, ..TrainerConfig::default() };
    Trainer::new(cfg.clone(), &weights, tc, Device::Cpu).unwrap()
}

/// Copy eight symbols behind a separator: chance is ln 32 = 3.47 nats.
fn copy_batch(seed: u32) -> Vec<Sample> {
    let mut state = seed.wrapping_mul(747_796_405).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 16) % 32
    };
    (0..64)
        .map(|_| {
            let symbols: Vec<u32> = (0..8).map(|_| next()).collect();
            let tokens: Vec<u32> = symbols.iter().copied().chain([39]).chain(symbols.iter().copied()).collect();
            let loss_mask = (0..tokens.len()).map(|t| t > 8).collect();
            Sample { behaviour_logprobs: vec![0.0; tokens.len()], tokens, loss_mask, ..Sample::default() }
        })
        .collect()
}

#[test]
fn supervised_steps_learn_to_copy() {
    let mut trainer = trainer(&config(2), 3e-3, 1);
    let mut loss = f64::INFINITY;
    for step in 0..600 {
        loss = trainer.supervised_step(&copy_batch(step)).unwrap().loss;
        if loss < 0.1 {
            break;
        }
    }
    assert!(loss < 0.1, "loss stays at {loss}");
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

/// Answers of two tokens to one of four prompts.
fn rollouts(engine: &InferenceEngine, round: u64) -> Vec<(Vec<u32>, Vec<SampledToken>)> {
    let (done, results) = mpsc::channel();
    let prompt = |i: usize| vec![39, u32::try_from(i % 4).unwrap()];
    for index in 0..64 {
        let sampling = SamplingParams { max_tokens: 2, seed: round * 64 + index as u64, ..SamplingParams::default() };
        let sink = Collect { tokens: Vec::new(), done: done.clone(), index };
        engine.generate(GenerateRequest { prompt: prompt(index), sampling }, Box::new(sink)).unwrap();
    }
    let mut out: Vec<_> = (0..64).map(|_| results.recv().unwrap()).collect();
    out.sort_by_key(|(i, _)| *i);
    out.into_iter().map(|(i, t)| (prompt(i), t)).collect()
}

/// Prompt p pays a token in [8 p, 8 p + 8): chance is 8 / 40.
fn reward(prompt: &[u32], tokens: &[SampledToken]) -> f32 {
    let paid = tokens.iter().filter(|t| t.id / 8 == prompt[1]).count();
    f32::from(u8::try_from(paid).unwrap()) / 2.0
}

#[test]
fn grpo_steps_raise_the_reward_of_a_bandit_and_start_on_policy() {
    let cfg = config(1);
    let mut trainer = trainer(&cfg, 2e-3, 1);
    let engine =
        InferenceEngine::spawn(cfg, trainer.weights().unwrap(), 0, InferenceOptions::default(), Device::Cpu).unwrap();
    let mut means = Vec::new();
    for round in 0..80u64 {
        let rollouts = rollouts(&engine, round);
        let rewards: Vec<f32> = rollouts.iter().map(|(p, t)| reward(p, t)).collect();
        means.push(rewards.iter().sum::<f32>() / 64.0);
        let batch: Vec<Sample> = rollouts
            .iter()
            .zip(&rewards)
            .enumerate()
            .map(|(i, ((prompt, answer), r))| {
                let group: f32 = rewards.iter().skip(i % 4).step_by(4).sum::<f32>() / 16.0;
                let tokens = prompt.iter().copied().chain(answer.iter().map(|t| t.id)).collect();
                let logprobs = answer.iter().map(|t| t.logprob);
                Sample {
                    tokens,
                    loss_mask: vec![false, false, true, true],
                    behaviour_logprobs: [0.0, 0.0].into_iter().chain(logprobs).collect(),
                    advantage: r - group,
                    ..Sample::default()
                }
            })
            .collect();
        let report = trainer.step(&batch).unwrap();
        // Sampler and trainer run the same kernels on the same weights: every ratio is exactly 1.
        assert!(report.approx_kl.abs() < 1e-12, "mismatch {} in round {round}", report.approx_kl);
        assert!(report.clip_fraction.abs() < 1e-12);
        engine.swap_weights(trainer.weights().unwrap(), round + 1).unwrap();
    }
    let (first, last) = (means[0], means[means.len() - 1]);
    assert!(first < 0.4 && last > 0.9, "reward went from {first} to {last}: {means:?}");
}

#[test]
fn training_is_reproducible_and_resumes_bit_for_bit() {
    let cfg = config(2);
    let mut a = trainer(&cfg, 1e-3, 2);
    let mut b = trainer(&cfg, 1e-3, 2);
    for step in 0..2 {
        a.supervised_step(&copy_batch(step)).unwrap();
        b.supervised_step(&copy_batch(step)).unwrap();
    }
    let snapshot = a.weights().unwrap();
    let bytes = snapshot.to_safetensors().unwrap();
    assert_eq!(bytes, b.weights().unwrap().to_safetensors().unwrap());
    let state = a.optimizer_state().unwrap();
    assert_eq!(state, b.optimizer_state().unwrap());
    a.supervised_step(&copy_batch(9)).unwrap();
    assert_eq!(snapshot.to_safetensors().unwrap(), bytes, "a snapshot must not change");
    let tc = TrainerConfig { learning_rate: 1e-3, minibatches: 2, threads: 1, ..TrainerConfig::default() };
    let mut resumed = Trainer::new(cfg, &snapshot, tc, Device::Cpu).unwrap();
    resumed.load_optimizer_state(&state).unwrap();
    resumed.supervised_step(&copy_batch(9)).unwrap();
    assert_eq!(resumed.weights().unwrap().to_safetensors().unwrap(), a.weights().unwrap().to_safetensors().unwrap());
    assert_eq!(resumed.optimizer_state().unwrap(), a.optimizer_state().unwrap());
}

#[test]
fn broken_input_changes_nothing() {
    let cfg = config(1);
    let mut t = trainer(&cfg, 1e-3, 2);
    let before = (t.weights().unwrap().to_safetensors().unwrap(), t.optimizer_state().unwrap());
    let good = copy_batch(1);
    let with = |change: &dyn Fn(&mut Sample)| {
        let mut batch = good.clone();
        change(&mut batch[63]);
        batch
    };
    let broken: [&dyn Fn(&mut Sample); 8] = [
        &|s| s.advantage = f32::NAN,
        &|s| s.behaviour_logprobs[12] = f32::NEG_INFINITY,
        &|s| s.tokens[3] = 40,
        &|s| s.loss_mask[0] = true,
        &|s| s.tokens.clear(),
        &|s| s.loss_mask.truncate(3),
        &|s| s.behaviour_logprobs.truncate(3),
        &|s| s.tokens = vec![1; 65],
    ];
    for change in broken {
        assert!(t.step(&with(change)).is_err());
    }
    assert!(t.step(&[]).is_err());
    // A loss that overflows fails in the second minibatch, after the first was computed.
    let overflow = |s: &mut Sample| (s.advantage, s.behaviour_logprobs[12]) = (f32::MAX, -20.0);
    assert!(matches!(t.step(&with(&overflow)), Err(TrainError::NonFinite { .. })));
    assert!(t.load_optimizer_state(b"nonsense").is_err());
    assert_eq!(before, (t.weights().unwrap().to_safetensors().unwrap(), t.optimizer_state().unwrap()));
}
