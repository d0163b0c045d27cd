//! How long the delta of one step of reinforcement learning is: the embedded model answers its sums, its answers are
//! rewarded and trained on, and the old and new weights are compared as a node does that publishes a step.

use super::report::{Better, Row};
use crate::embedded;
use anyhow::{Context, ensure};
use serde_json::Value;
use starling_engine::{
    Device, EngineError, FinishReason, GenerateRequest, InferenceEngine, InferenceOptions, LlamaConfig, Sample,
    SampledToken, SamplingParams, TokenSink, Trainer, TrainerConfig, Weights,
};
use starling_gateway::text::byte_model::{ASSISTANT, END, USER};
use starling_protocol::advantage::{AdvantageRule, batch_advantages};
use starling_storage::delta;
use std::sync::mpsc;

const TASKS: &str = include_str!("../../../tasks/sums/train.jsonl");
/// Groups and episodes of a group, as many as in a step of `starling demo`.
const GROUPS: usize = 48;
const GROUP: usize = 8;
/// Learning rates: of `starling demo`, and of a large model.
const RATES: [(&str, f64); 2] = [("delta", 2e-4), ("delta, learning rate 1e-6", 1e-6)];

/// The rows of `weights` about deltas.
///
/// # Errors
/// Whatever the engine refuses.
pub(super) fn measure() -> anyhow::Result<Vec<Row>> {
    let files = embedded::files();
    let file = |name: &str| files.get(name).with_context(|| format!("the embedded model has no {name}"));
    let cfg = LlamaConfig::from_json(file("config.json")?)?;
    let weights = Weights::from_safetensors(&cfg, file("model.safetensors")?, &Device::Cpu)?;
    let samples = play(&cfg, &weights)?;
    let old = weights.to_safetensors()?;
    let bf16_len = 2 * usize::try_from(cfg.parameter_count())?;
    let mut rows = Vec::new();
    for (what, learning_rate) in RATES {
        let options = TrainerConfig { learning_rate, threads: super::machine::cores(), ..TrainerConfig::default() };
        let mut trainer = Trainer::new(cfg.clone(), &weights, options, Device::Cpu)?;
        trainer.step(&samples)?;
        let new = trainer.weights()?.to_safetensors()?;
        let patch = delta::encode(&old, &new)?;
        #[expect(clippy::cast_precision_loss, reason = "lengths are far below 2^53")]
        let percent = 100.0 * patch.len() as f64 / bf16_len as f64;
        rows.push(Row::new(what, "% of bf16", Better::Less, &[percent], None));
    }
    Ok(rows)
}

struct Answer {
    at: usize,
    tokens: Vec<SampledToken>,
    done: mpsc::Sender<(usize, Vec<SampledToken>, Result<FinishReason, EngineError>)>,
}

impl TokenSink for Answer {
    fn token(&mut self, token: SampledToken) -> bool {
        self.tokens.push(token);
        true
    }
    fn finish(self: Box<Self>, result: Result<FinishReason, EngineError>) {
        let _ = self.done.send((self.at, self.tokens, result));
    }
}

/// Episodes of the first tasks with their advantages: those of groups that differ in reward.
fn play(cfg: &LlamaConfig, weights: &Weights) -> anyhow::Result<Vec<Sample>> {
    let tasks: Vec<(Vec<u32>, String)> = TASKS.lines().take(GROUPS).map(read_task).collect::<anyhow::Result<_>>()?;
    let options = InferenceOptions::default();
    let engine = InferenceEngine::spawn(cfg.clone(), weights.clone(), 0, options, Device::Cpu)?;
    let (done, answers) = mpsc::channel();
    for at in 0..tasks.len() * GROUP {
        let sampling = SamplingParams {
            temperature: 1.0,
            seed: at as u64,
            max_tokens: 24,
            stop_token_ids: vec![END],
            ..SamplingParams::default()
        };
        let sink = Box::new(Answer { at, tokens: Vec::new(), done: done.clone() });
        engine.generate(GenerateRequest { prompt: tasks[at / GROUP].0.clone(), sampling }, sink)?;
    }
    drop(done);
    let mut said: Vec<Vec<SampledToken>> = vec![Vec::new(); tasks.len() * GROUP];
    for (at, tokens, result) in answers {
        result?;
        said[at] = tokens;
    }
    let mut samples = Vec::new();
    for ((prompt, answer), group) in tasks.iter().zip(said.chunks(GROUP)) {
        let rewards: Vec<f32> = group.iter().map(|t| f32::from(u8::from(is_right(t, answer)))).collect();
        let Some(Some(advantages)) = batch_advantages(AdvantageRule::Grpo, &[rewards]).pop() else { continue };
        samples.extend(group.iter().zip(advantages).map(|(tokens, advantage)| sample(prompt, tokens, advantage)));
    }
    ensure!(!samples.is_empty(), "every group got equal rewards: nothing to learn from");
    Ok(samples)
}

/// The prompt as the gateway renders it, and the right answer.
fn read_task(line: &str) -> anyhow::Result<(Vec<u32>, String)> {
    let task: Value = serde_json::from_str(line)?;
    let text = |field: &str| task[field].as_str().with_context(|| format!("field `{field}`: missing in {line}"));
    let question = text("expression")?.bytes().filter(|b| *b != b' ').map(u32::from);
    let prompt = std::iter::once(USER).chain(question).chain([END, ASSISTANT]).collect();
    Ok((prompt, text("answer")?.to_owned()))
}

fn is_right(tokens: &[SampledToken], answer: &str) -> bool {
    let ids: Vec<u32> = answer.bytes().map(u32::from).chain([END]).collect();
    tokens.iter().map(|t| t.id).eq(ids)
}

fn sample(prompt: &[u32], said: &[SampledToken], advantage: f32) -> Sample {
    let trains = |t: usize| t >= prompt.len();
    let len = prompt.len() + said.len();
    Sample {
        tokens: prompt.iter().copied().chain(said.iter().map(|t| t.id)).collect(),
        loss_mask: (0..len).map(trains).collect(),
        behaviour_logprobs: std::iter::repeat_n(0.0, prompt.len()).chain(said.iter().map(|t| t.logprob)).collect(),
        advantage,
        ..Sample::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_step_changes_some_of_the_weights() {
        let rows = measure().unwrap();
        assert_eq!(rows.len(), RATES.len());
        // A smaller step changes fewer bits, and none would be no step.
        assert!(rows[0].ours > rows[1].ours && rows[1].ours > 0.0, "{rows:?}");
    }
}
