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

    /// The same problem as a careless teacher does it. Sums: a carry is forgotten, or the last digit is one off.
    /// Calculator: products do not go first, or a digit of the second call is mistyped; what follows is
    /// consistent with the slip.
    pub(super) fn with_slip(&self, rng: &mut ChaCha8Rng) -> Self {
        if self.calls.is_empty() { self.careless_sum(rng) } else { self.careless_calls(rng) }
    }

    fn careless_sum(&self, rng: &mut ChaCha8Rng) -> Self {
        let off = match digits_carry(&self.question) {
            Some(off) => off,
            None if rng.random_bool(0.5) => 1,
            None => -1,
        };
        let answer = calculate(&self.question).unwrap_or_default() + off;
        Self { answer: answer.to_string(), ..self.clone() }
    }

    fn careless_calls(&self, rng: &mut ChaCha8Rng) -> Self {
        let (first, r1) = &self.calls[0];
        let mut slip = self.clone();
        if let Some(rest) = self.question.strip_suffix(first.as_str()) {
            // a+b*c, read from the left: (a+b), then *c.
            let at = first.find('*').unwrap_or(0);
            let left = format!("{rest}{}", &first[..at]);
            if let Some(l) = calculate(&left) {
                let second = format!("{l}{}", &first[at..]);
                let r2 = calculate(&second).unwrap_or_default();
                slip.calls = vec![(left, l), (second, r2)];
                slip.answer = r2.to_string();
                return slip;
            }
        }
        let (second, _) = &self.calls[1];
        let places: Vec<usize> = second.char_indices().filter(|(_, c)| c.is_ascii_digit()).map(|(i, _)| i).collect();
        let at = places[rng.random_range(0..places.len())];
        let digit = char::from(b"123456789"[rng.random_range(0..9)]);
        let mistyped = format!("{}{digit}{}", &second[..at], &second[at + 1..]);
        let r2 = calculate(&mistyped).unwrap_or_default();
        slip.calls = vec![(first.clone(), *r1), (mistyped, r2)];
        slip.answer = r2.to_string();
        slip
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
        Sample { tokens, loss_mask, behaviour_logprobs: vec![0.0; n], ..Sample::default() }
    }
}

/// What is lost by forgetting the carry of `a+b` or the borrow of `a-b`; `None` when there is none.
fn digits_carry(question: &str) -> Option<i64> {
    let at = question.find(['+', '-'])?;
    let (a, b): (i64, i64) = (question[..at].parse().ok()?, question[at + 1..].parse().ok()?);
    if question[at..].starts_with('+') {
        (a % 10 + b % 10 >= 10).then_some(-10)
    } else {
        (a % 10 < b % 10).then_some(10)
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
        let heldout_questions = heldout_sums.iter().chain(&heldout_calculator).map(|e| e.question.clone()).collect();
        Ok(Self { heldout_sums, heldout_calculator, calculator, heldout_questions })
    }

    /// A training transcript: any sum that is not held out, or a calculator task of the training set; with
    /// probability `slips` as a careless teacher does it.
    pub(super) fn draw(&self, rng: &mut ChaCha8Rng, calculator_share: f64, slips: f64) -> Exercise {
        let right = loop {
            let e = self.draw_any(rng, calculator_share);
            if !self.heldout_questions.contains(&e.question) {
                break e;
            }
        };
        if slips > 0.0 && rng.random_bool(slips) { right.with_slip(rng) } else { right }
    }

    fn draw_any(&self, rng: &mut ChaCha8Rng, calculator_share: f64) -> Exercise {
        if rng.random_bool(calculator_share) {
            return self.calculator[rng.random_range(0..self.calculator.len())].clone();
        }
        let (a, b) = (rng.random_range(10..100i64), rng.random_range(10..100i64));
        let (op, answer) = if rng.random_bool(0.5) { ('+', a + b) } else { ('-', a - b) };
        Exercise { question: format!("{a}{op}{b}"), answer: answer.to_string(), calls: Vec::new() }
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
