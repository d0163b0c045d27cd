//! Transcripts for supervision: sums of two terms, and calculator dialogues.

use anyhow::{Context, bail};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use serde_json::Value;
use starling_engine::Sample;
use starling_gateway::text::byte_model::{ASSISTANT, CALL, END, TOOL, TOOLS, USER};
use std::collections::BTreeSet;
use std::path::Path;

/// A problem with the turns that solve it.
#[derive(Clone, Debug)]
pub(super) struct Exercise {
    /// What the user says, without blanks.
    pub(super) question: String,
    pub(super) answer: String,
    /// Calls to the calculator in order, with their results; empty for sums.
    pub(super) calls: Vec<(String, i64)>,
}

/// `a op b` of integers as the calculator computes it; `None` when it is not that, or overflows.
pub(super) fn calculate(expression: &str) -> Option<i64> {
    // The first character may be the sign of the first number.
    let at = expression.char_indices().skip(1).find(|(_, c)| "+-*".contains(*c))?.0;
    let a: i64 = expression[..at].parse().ok()?;
    let b: i64 = expression[at + 1..].parse().ok()?;
    match &expression[at..=at] {
        "+" => a.checked_add(b),
        "-" => a.checked_sub(b),
        _ => a.checked_mul(b),
    }
}

impl Exercise {
    /// Two terms, answered at once.
    pub(super) fn sum(expression: &str) -> Option<Self> {
        let question: String = expression.split_whitespace().collect();
        let answer = calculate(&question)?.to_string();
        Some(Self { question, answer, calls: Vec::new() })
    }

    /// Three terms in two calls, products first.
    pub(super) fn calculator(expression: &str) -> Option<Self> {
        let parts: Vec<&str> = expression.split_whitespace().collect();
        let [a, p, b, q, c] = parts[..] else { return None };
        let (first, second): (String, Box<dyn Fn(i64) -> String>) = if q == "*" && p != "*" {
            (format!("{b}{q}{c}"), Box::new(move |r| format!("{a}{p}{r}")))
        } else {
            (format!("{a}{p}{b}"), Box::new(move |r| format!("{r}{q}{c}")))
        };
        let r1 = calculate(&first)?;
        let second = second(r1);
        let r2 = calculate(&second)?;
        Some(Self { question: parts.concat(), answer: r2.to_string(), calls: vec![(first, r1), (second, r2)] })
    }

    /// Ids of the first prompt, up to where the model speaks.
    pub(super) fn prompt(&self) -> Vec<u32> {
        let mut ids = Vec::new();
        if !self.calls.is_empty() {
            ids.push(TOOLS);
            push_text(&mut ids, "calc(x)");
            ids.push(END);
        }
        ids.push(USER);
        push_text(&mut ids, &self.question);
        ids.extend([END, ASSISTANT]);
        ids
    }

    /// The whole transcript; what the assistant says trains.
    pub(super) fn sample(&self) -> Sample {
        let mut tokens = self.prompt();
        let mut loss_mask = vec![false; tokens.len()];
        let mut say = |ids: Vec<u32>, trains: bool| {
            loss_mask.extend(std::iter::repeat_n(trains, ids.len()));
            tokens.extend(ids);
        };
        for (call, result) in &self.calls {
            say(call_ids(call), true);
            say(result_ids(&result.to_string()), false);
        }
        let mut answer = Vec::new();
        push_text(&mut answer, &self.answer);
        answer.push(END);
        say(answer, true);
        let n = tokens.len();
        Sample { tokens, loss_mask, behaviour_logprobs: vec![0.0; n], advantage: 1.0 }
    }
}

fn push_text(ids: &mut Vec<u32>, text: &str) {
    ids.extend(text.bytes().map(u32::from));
}

fn call_ids(expression: &str) -> Vec<u32> {
    let mut ids = vec![CALL];
    push_text(&mut ids, &format!("calc{{\"x\":\"{expression}\"}}"));
    ids.push(END);
    ids
}

/// A tool's answer, up to where the model speaks again.
pub(super) fn result_ids(result: &str) -> Vec<u32> {
    let mut ids = vec![TOOL];
    push_text(&mut ids, result);
    ids.extend([END, ASSISTANT]);
    ids
}

/// All problems of the task sets.
#[derive(Debug)]
pub(super) struct Exercises {
    pub(super) heldout_sums: Vec<Exercise>,
    pub(super) heldout_calculator: Vec<Exercise>,
    calculator: Vec<Exercise>,
    heldout_questions: BTreeSet<String>,
}

impl Exercises {
    pub(super) fn load(tasks: &Path) -> anyhow::Result<Self> {
        let read = |file: &str, make: fn(&str) -> Option<Exercise>| read_set(&tasks.join(file), make);
        let heldout_sums = read("sums/heldout.jsonl", Exercise::sum)?;
        let heldout_calculator = read("calculator/heldout.jsonl", Exercise::calculator)?;
        let calculator = read("calculator/train.jsonl", Exercise::calculator)?;
        let heldout_questions =
            heldout_sums.iter().chain(&heldout_calculator).map(|e| e.question.clone()).collect();
        Ok(Self { heldout_sums, heldout_calculator, calculator, heldout_questions })
    }

    /// A training transcript: any sum that is not held out, or a calculator task of the training set.
    pub(super) fn draw(&self, rng: &mut ChaCha8Rng, calculator_share: f64) -> Exercise {
        if rng.random_bool(calculator_share) {
            return self.calculator[rng.random_range(0..self.calculator.len())].clone();
        }
        loop {
            let (a, b) = (rng.random_range(10..100), rng.random_range(10..100));
            let op = if rng.random_bool(0.5) { '+' } else { '-' };
            if let Some(e) = Exercise::sum(&format!("{a}{op}{b}"))
                && !self.heldout_questions.contains(&e.question)
            {
                return e;
            }
        }
    }
}

fn read_set(path: &Path, make: fn(&str) -> Option<Exercise>) -> anyhow::Result<Vec<Exercise>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut out = Vec::new();
    for (i, line) in text.lines().enumerate() {
        let at = || format!("{}: line {}", path.display(), i + 1);
        let v: Value = serde_json::from_str(line).with_context(at)?;
        let expression = v["expression"].as_str().with_context(|| format!("{}: field `expression`: missing", at()))?;
        let e = make(expression).with_context(|| format!("{}: cannot solve {expression:?}", at()))?;
        if v["answer"].as_str() != Some(&e.answer) {
            bail!("{}: field `answer`: expected {:?}, got {}", at(), e.answer, v["answer"]);
        }
        out.push(e);
    }
    if out.is_empty() {
        bail!("{}: no tasks in it", path.display());
    }
    Ok(out)
}
