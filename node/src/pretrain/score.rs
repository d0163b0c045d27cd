//! Rewards on the held-out tasks, in this process: what reinforcement learning will start from.

use super::data::{Exercise, Exercises, calculate, result_ids};
use serde::Serialize;
use starling_engine::{
    Device, EngineError, FinishReason, GenerateRequest, InferenceEngine, InferenceOptions, LlamaConfig, SampledToken,
    SamplingParams, TokenSink, Weights,
};
use starling_gateway::text::byte_model::{CALL, END};
use std::collections::BTreeMap;
use std::sync::mpsc;

/// Model calls of one episode, as the example agents allow.
const TURNS_MAX: u64 = 4;

/// Mean rewards of one set.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Score {
    sampled: f64,
    greedy: f64,
}

pub(super) fn heldout(
    cfg: &LlamaConfig,
    weights: &Weights,
    exercises: &Exercises,
    threads: usize,
) -> anyhow::Result<BTreeMap<&'static str, Score>> {
    let options =
        InferenceOptions { max_batch: 256, max_batch_tokens: 16384, threads, nice: 0, ..InferenceOptions::default() };
    let engine = InferenceEngine::spawn(cfg.clone(), weights.clone(), 0, options, Device::Cpu)?;
    let mut scores = BTreeMap::new();
    for (name, set) in [("sums", &exercises.heldout_sums), ("calculator", &exercises.heldout_calculator)] {
        let score = Score { sampled: mean_reward(&engine, set, 1.0)?, greedy: mean_reward(&engine, set, 0.0)? };
        scores.insert(name, score);
    }
    Ok(scores)
}

struct Collect {
    at: usize,
    ids: Vec<u32>,
    done: mpsc::Sender<(usize, Vec<u32>, Result<FinishReason, EngineError>)>,
}

impl TokenSink for Collect {
    fn token(&mut self, t: SampledToken) -> bool {
        self.ids.push(t.id);
        true
    }
    fn finish(self: Box<Self>, r: Result<FinishReason, EngineError>) {
        let _ = self.done.send((self.at, self.ids, r));
    }
}

fn mean_reward(engine: &InferenceEngine, set: &[Exercise], temperature: f32) -> anyhow::Result<f64> {
    let mut histories: Vec<Vec<u32>> = set.iter().map(Exercise::prompt).collect();
    let mut open: Vec<usize> = (0..set.len()).collect();
    let mut right = 0u32;
    for turn in 0..TURNS_MAX {
        let (done, answers) = mpsc::channel();
        for at in &open {
            let sampling = SamplingParams {
                temperature,
                seed: *at as u64 * TURNS_MAX + turn,
                max_tokens: 24,
                stop_token_ids: vec![END],
                ..SamplingParams::default()
            };
            let sink = Box::new(Collect { at: *at, ids: Vec::new(), done: done.clone() });
            engine.generate(GenerateRequest { prompt: histories[*at].clone(), sampling }, sink)?;
        }
        drop(done);
        open.clear();
        for (at, ids, finish) in answers {
            finish?;
            let ended = ids.last() == Some(&END);
            let text: String = ids.iter().filter_map(|i| u8::try_from(*i).ok()).map(char::from).collect();
            if ids.first() == Some(&CALL) && ended {
                let x = text.strip_prefix("calc{\"x\":\"").and_then(|t| t.strip_suffix("\"}"));
                let result = x.and_then(calculate).map_or_else(|| "error".to_owned(), |r| r.to_string());
                histories[at].extend(ids);
                histories[at].extend(result_ids(&result));
                open.push(at);
            } else {
                right += u32::from(ended && text == set[at].answer);
            }
        }
        open.sort_unstable();
    }
    Ok(f64::from(right) / set.len().max(1) as f64)
}
