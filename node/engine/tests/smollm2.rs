//! A real checkpoint: SmolLM2-135M-Instruct from its GGUF (Q4_1), against numbers that torch, mlx and llama.cpp agree on, and
//! against 64 greedy tokens of mlx-lm after each of ten prompts (`tests/goldens/make_smollm2.py`).
//!
//! The file comes from a package registry by `scripts/fetch_models.sh` and is not in the repository. Tolerance: the
//! references are given with four digits, and f32 sums over 30 layers differ by some 1e-4 between implementations.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, helpers included")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;

use serde_json::Value;
use sha2::{Digest, Sha256};
use starling_engine::{
    Architecture, Checkpoint, Device, EngineError, FinishReason, GenerateRequest, InferenceEngine, InferenceOptions,
    SampledToken, SamplingParams, SaveDtype, TokenSink, sequence_logprobs,
};

/// `The capital of France is`.
const CAPITAL: [u32; 5] = [504, 3575, 282, 4649, 314];
/// Chat transcripts with their ids.
const CHATS: &str = include_str!("../../../tests/goldens/chat.json");
/// Continuations by mlx-lm, and the hashes of the folder that it read.
const GOLDENS: &str = include_str!("../../../tests/goldens/smollm2.json");
/// Between mlx-lm's log-probabilities and ours: both f32.
const TOLERANCE: f64 = 1e-3;
/// A reference's token stands if the second likeliest is further behind than both may be off: twice the tolerance.
const MARGIN: f64 = 2.0 * TOLERANCE;

/// The folder with the file; `None`, said loudly, when it cannot be had.
fn models() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    // target/release/deps/this
    let dir = std::env::current_exe().unwrap().ancestors().nth(3).unwrap().join("models");
    match Command::new(root.join("scripts/fetch_models.sh")).arg(&dir).arg("smollm2").output() {
        Ok(out) if out.status.success() => Some(dir),
        other => {
            eprintln!("SKIPPED: the real models cannot be fetched: {other:?}");
            None
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

fn start(engine: &InferenceEngine, prompt: &[u32], max_tokens: u32, stop: &[u32]) -> mpsc::Receiver<SampledToken> {
    let (tx, rx) = mpsc::channel();
    let sampling = SamplingParams {
        temperature: 0.0,
        max_tokens,
        stop_token_ids: stop.to_vec(),
        top_logprobs: 8,
        ..SamplingParams::default()
    };
    engine.generate(GenerateRequest { prompt: prompt.to_vec(), sampling }, Box::new(Collect(tx))).unwrap();
    rx
}

fn greedy(engine: &InferenceEngine, prompt: &[u32], max_tokens: u32) -> Vec<SampledToken> {
    start(engine, prompt, max_tokens, &[2]).iter().collect()
}

fn check_top(got: &SampledToken, want: &[(u32, f32)]) {
    for (id, logprob) in want {
        let found = got.top.iter().find(|(i, _)| i == id).map(|t| t.1);
        assert!(found.is_some_and(|l| (l - logprob).abs() < 1e-3), "token {id}: expected {logprob}, got {:?}", got.top);
    }
}

#[test]
fn the_real_model_has_the_known_logprobs_and_answers() {
    let Some(models) = models() else { return };
    let checkpoint = Checkpoint::load(&models.join("smollm2.gguf"), &Device::Cpu).unwrap();
    let cfg = checkpoint.config.clone();
    assert_eq!((cfg.architecture, cfg.parameter_count()), (Architecture::Llama, 134_515_008));
    assert_eq!((cfg.bos_token_id, cfg.eos_token_ids.as_slice()), (Some(1), [2].as_slice()));
    assert!((cfg.rms_norm_eps - 1e-5).abs() < f64::EPSILON && (cfg.rope_theta - 1e5).abs() < f64::EPSILON);
    let engine =
        InferenceEngine::spawn(cfg.clone(), checkpoint.weights.clone(), 0, InferenceOptions::default(), Device::Cpu)
            .unwrap();
    let first = greedy(&engine, &CAPITAL, 1);
    check_top(&first[0], &[(7042, -0.2581), (260, -2.7407), (4528, -4.3844), (2250, -4.6199)]);

    let chats: Value = serde_json::from_str(CHATS).unwrap();
    let mut chat = chats["real"]["smollm2"].as_array().unwrap().iter();
    let chat = chat.find(|c| c["conversation"] == "question" && c["prompt"] == true).unwrap();
    let prompt: Vec<u32> = serde_json::from_value(chat["ids"].clone()).unwrap();
    assert_eq!(prompt.len(), 37);
    let answer = greedy(&engine, &prompt, 16);
    check_top(&answer[0], &[(504, -1.8827), (60, -1.9648), (15319, -2.2657), (2219, -2.8064)]);
    // `The capital of France is Paris` and the end of the turn.
    let ids: Vec<u32> = answer.iter().map(|t| t.id).collect();
    assert!(ids.starts_with(&[504, 3575, 282, 4649, 314, 7042]) && ids.ends_with(&[2]), "{ids:?}");
    drop(engine);

    // Saved as a folder and read again: the same bits, and companions for other libraries.
    let dir = models.join(format!("saved-{}", std::process::id()));
    checkpoint.save(&dir, SaveDtype::F32).unwrap();
    let again = Checkpoint::load(&dir, &Device::Cpu).unwrap();
    // The same folder, byte for byte, that mlx-lm and transformers load: with the logits of the GGUF's weights.
    let goldens: Value = serde_json::from_str(GOLDENS).unwrap();
    for (name, hash) in goldens["folder_sha256"].as_object().unwrap() {
        let file = std::fs::read(dir.join(name)).unwrap();
        let got: String = Sha256::digest(file).iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(got, hash.as_str().unwrap(), "{name} is not the file that other libraries were shown to read");
    }
    std::fs::remove_dir_all(&dir).unwrap();
    assert_eq!((&again.config, &again.files), (&cfg, &checkpoint.files));
    let score = |c: &Checkpoint| sequence_logprobs(&c.config, &c.weights, &Device::Cpu, &CAPITAL).unwrap();
    assert_eq!(score(&again), score(&checkpoint));
}

#[test]
fn greedy_text_is_that_of_mlx_lm() {
    let Some(models) = models() else { return };
    let checkpoint = Checkpoint::load(&models.join("smollm2.gguf"), &Device::Cpu).unwrap();
    let (cfg, weights) = (checkpoint.config, checkpoint.weights);
    let engine =
        InferenceEngine::spawn(cfg.clone(), weights.clone(), 0, InferenceOptions::default(), Device::Cpu).unwrap();
    let goldens: Value = serde_json::from_str(GOLDENS).unwrap();
    let ids = |v: &Value| -> Vec<u32> { serde_json::from_value(v.clone()).unwrap() };
    let floats = |v: &Value| -> Vec<f64> { serde_json::from_value(v.clone()).unwrap() };
    let all = goldens["continuations"].as_array().unwrap();
    // All at once, so that they are each other's neighbours in the batch. Past the end of a turn, too.
    let running: Vec<_> = all.iter().map(|c| start(&engine, &ids(&c["prompt"]), 64, &[])).collect();
    let (mut whole, mut worst) = (0, 0f64);
    for (n, (golden, tokens)) in all.iter().zip(running).enumerate() {
        let got: Vec<SampledToken> = tokens.iter().collect();
        let (want, logprobs) = (ids(&golden["tokens"]), floats(&golden["logprobs"]));
        assert_eq!((got.len(), want.len()), (64, 64));
        // Behind a near tie the texts may part: up to there they have to agree.
        let certain = floats(&golden["margins"]).iter().position(|m| *m <= MARGIN).unwrap_or(64);
        let text: Vec<u32> = got.iter().map(|t| t.id).collect();
        assert_eq!(text[..certain], want[..certain], "prompt {n}");
        whole += usize::from(certain == 64);
        // Given the reference's tokens, all 64 have its log-probabilities, near ties included.
        let prompt = ids(&golden["prompt"]);
        let scored = sequence_logprobs(&cfg, &weights, &Device::Cpu, &[prompt.clone(), want].concat()).unwrap();
        for (at, (got, want)) in scored[prompt.len()..].iter().zip(&logprobs).enumerate() {
            let off = (f64::from(*got) - want).abs();
            assert!(off < TOLERANCE, "prompt {n}, token {at}: expected {want}, got {got}");
            worst = worst.max(off);
        }
        // What was sampled has the scorer's bits, as far as the texts are one.
        for (token, scored) in got[..certain].iter().zip(&scored[prompt.len()..]) {
            assert_eq!(token.logprob.to_bits(), scored.to_bits(), "prompt {n}");
        }
    }
    eprintln!("largest difference of a log-probability: {worst:e}");
    assert_eq!(whole, 8, "eight of the references have no near tie in 64 tokens");
}
