//! Generation with a real model, beside llama.cpp on the same weights: `starling bench generate`.

use super::llama::{Ask, Llama};
use super::machine::cores;
use super::report::{Better, Row};
use crate::BadInput;
use crate::cli::BenchArgs;
use anyhow::{Context, anyhow};
use starling_engine::{
    Checkpoint, Device, EngineError, FinishReason, GenerateRequest, InferenceEngine, InferenceOptions, SampledToken,
    SamplingParams, TokenSink,
};
use std::sync::mpsc;
use std::time::Instant;

/// Tokens of the prompt that prefill is measured on, and that sixteen sequences share.
const PROMPT: usize = 512;
/// Tokens of a short question with its chat template.
const QUESTION: usize = 40;
const NEW: u32 = 64;
const BATCH: usize = 16;
const PEER: &str = "llama.cpp";

/// Hands each token's sequence and moment on.
struct Clock {
    tx: mpsc::Sender<Result<Instant, EngineError>>,
}

impl TokenSink for Clock {
    fn token(&mut self, _t: SampledToken) -> bool {
        self.tx.send(Ok(Instant::now())).is_ok()
    }

    fn finish(self: Box<Self>, r: Result<FinishReason, EngineError>) {
        if let Err(e) = r {
            // The receiver is there until all senders are gone.
            let _ = self.tx.send(Err(e));
        }
    }
}

/// Seconds of one measurement.
struct Times {
    all: f64,
    first: f64,
    tokens: u64,
    /// Processor time of all threads.
    cpu: f64,
}

/// A prompt that no other run has: nothing of it is known from before.
fn prompt(vocab: usize, len: usize, run: usize) -> Vec<u32> {
    (0..len).map(|i| u32::try_from((1000 + i * 31 + run * 7919 + i * i * (run + 1)) % vocab).unwrap_or(0)).collect()
}

/// All prompts at once, `new` greedy tokens after each.
fn complete(engine: &InferenceEngine, prompts: &[Vec<u32>], new: u32) -> anyhow::Result<Times> {
    let (tx, rx) = mpsc::channel();
    let (start, cpu) = (Instant::now(), cpu_seconds());
    for prompt in prompts {
        let sampling = SamplingParams { temperature: 0.0, max_tokens: new, ..SamplingParams::default() };
        engine.generate(GenerateRequest { prompt: prompt.clone(), sampling }, Box::new(Clock { tx: tx.clone() }))?;
    }
    drop(tx);
    let at = rx.iter().collect::<Result<Vec<Instant>, _>>()?;
    let (first, last) = (at.first().context("no token came")?, at.last().context("no token came")?);
    let tokens = at.len() as u64;
    let cpu = cpu_seconds() - cpu;
    Ok(Times { all: (*last - start).as_secs_f64(), first: (*first - start).as_secs_f64(), tokens, cpu })
}

/// What each run of ours, or of the peer, gives.
#[derive(Default)]
struct Values {
    decode_one: Vec<f64>,
    decode_many: Vec<f64>,
    prefill: Vec<f64>,
    first_ms: Vec<f64>,
    cpu_one: Vec<f64>,
    cpu_many: Vec<f64>,
    cpu_prefill: Vec<f64>,
    peak_mib: Vec<f64>,
}

#[expect(clippy::cast_precision_loss, reason = "counts are below 2^53")]
fn float(count: u64) -> f64 {
    count as f64
}

/// Processor time of this process, where `/proc` tells it, to 10 ms.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // Behind the name in brackets, which may hold anything: the state is field 3, user and system time are 14 and 15.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace().skip(11).take(2);
    // Linux counts in hundredths of a second for all programs.
    fields.map(|ticks| float(ticks.parse().unwrap_or(0))).sum::<f64>() / 100.0
}

/// Resident memory of this process at most, or what is known of it.
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap_or_default();
    line.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) << 10
}

/// The engine's turn.
fn ours(engine: &InferenceEngine, vocab: usize, run: usize, values: &mut Values) -> anyhow::Result<()> {
    let long = [prompt(vocab, PROMPT, 2 * run)];
    let prefill = complete(engine, &long, 1)?;
    values.prefill.push(float(PROMPT as u64) / prefill.first);
    values.cpu_prefill.push(prefill.cpu * 1e3);
    let short = [prompt(vocab, QUESTION, 2 * run)];
    let one = complete(engine, &short, NEW)?;
    values.first_ms.push(one.first * 1e3);
    values.decode_one.push(float(one.tokens - 1) / (one.all - one.first));
    values.cpu_one.push(one.cpu * 1e3);
    let many = vec![prompt(vocab, PROMPT, 2 * run + 1); BATCH];
    let many = complete(engine, &many, NEW)?;
    values.decode_many.push(float(many.tokens) / many.all);
    values.cpu_many.push(many.cpu * 1e3);
    values.peak_mib.push(float(peak_bytes() >> 20));
    Ok(())
}

/// llama.cpp's turn with the same prompts.
fn theirs(llama: &mut Llama, vocab: usize, run: usize, values: &mut Values) -> anyhow::Result<()> {
    let long = [prompt(vocab, PROMPT, 2 * run)];
    let answer = llama.complete(&Ask { prompts: &long, new: 1, cache: false })?;
    values.prefill.push(float(PROMPT as u64) / answer.prompt_seconds);
    values.cpu_prefill.push(answer.cpu_seconds * 1e3);
    let short = [prompt(vocab, QUESTION, 2 * run)];
    let answer = llama.complete(&Ask { prompts: &short, new: NEW, cache: false })?;
    values.first_ms.push(answer.prompt_seconds * 1e3);
    values.decode_one.push(float(u64::from(NEW) - 1) / answer.decode_seconds);
    values.cpu_one.push(answer.cpu_seconds * 1e3);
    let many = vec![prompt(vocab, PROMPT, 2 * run + 1); BATCH];
    let answer = llama.complete(&Ask { prompts: &many, new: NEW, cache: true })?;
    values.decode_many.push(float(answer.tokens) / answer.seconds);
    values.cpu_many.push(answer.cpu_seconds * 1e3);
    values.peak_mib.push(float(answer.peak_bytes >> 20));
    Ok(())
}

/// The rows of `generate`.
///
/// # Errors
/// A model that cannot be read, and whatever the engine refuses or the peer fails at.
pub(super) fn measure(args: &BenchArgs) -> anyhow::Result<Vec<Row>> {
    let path = args.model.as_ref().ok_or_else(|| BadInput::wrap(anyhow!("bench generate: --model PATH is missing")))?;
    let checkpoint = Checkpoint::load(path, &Device::Cpu)
        .with_context(|| format!("--model {}", path.display()))
        .map_err(BadInput::wrap)?;
    let (cfg, weights) = (checkpoint.config, checkpoint.weights);
    if cfg.max_position_embeddings < PROMPT + NEW as usize {
        let (got, least) = (cfg.max_position_embeddings, PROMPT + NEW as usize);
        return Err(BadInput::wrap(anyhow!(
            "--model {}: expected at least {least} positions, got {got}",
            path.display()
        )));
    }
    let threads = args.threads.unwrap_or_else(cores).clamp(1, 256);
    let weight_format = args.weight_format.parse().context("--weight-format").map_err(BadInput::wrap)?;
    let options = InferenceOptions { threads, weight_format, ..InferenceOptions::default() };
    let engine = InferenceEngine::spawn(cfg.clone(), weights, 0, options, Device::Cpu)?;
    let mut llama = match &args.llama_cpp {
        Some(command) => Some(Llama::start(command)?),
        None => {
            eprintln!("starling bench: no llama.cpp to compare with; --llama-cpp names it, see docs/benchmarks.md");
            None
        }
    };
    let (mut mine, mut peers) = (Values::default(), Values::default());
    // The first of each does not count.
    for run in 0..=args.runs {
        let (mut a, mut b) = (Values::default(), Values::default());
        if run % 2 == 0 {
            ours(&engine, cfg.vocab_size, run, &mut a)?;
        }
        if let Some(llama) = &mut llama {
            theirs(llama, cfg.vocab_size, run, &mut b)?;
        }
        if run % 2 == 1 {
            ours(&engine, cfg.vocab_size, run, &mut a)?;
        }
        if run > 0 {
            mine.append(a);
            peers.append(b);
        }
    }
    let row = |what: String, unit, better, ours: &[f64], theirs: &[f64]| {
        Row::new(what, unit, better, ours, (!theirs.is_empty()).then_some((PEER, theirs)))
    };
    let cpu = |what: &str| format!("processor time, {what}");
    Ok(vec![
        row("decode batch 1".into(), "tokens/s", Better::More, &mine.decode_one, &peers.decode_one),
        row(
            format!("decode batch {BATCH}, one prompt of {PROMPT}, {NEW} new, prefill included"),
            "tokens/s",
            Better::More,
            &mine.decode_many,
            &peers.decode_many,
        ),
        row(format!("prefill, {PROMPT} tokens"), "tokens/s", Better::More, &mine.prefill, &peers.prefill),
        row(format!("time to first token, {QUESTION} tokens"), "ms", Better::Less, &mine.first_ms, &peers.first_ms),
        row(cpu(&format!("{QUESTION} + {NEW} tokens")), "ms", Better::Less, &mine.cpu_one, &peers.cpu_one),
        row(cpu(&format!("batch {BATCH}")), "ms", Better::Less, &mine.cpu_many, &peers.cpu_many),
        row(cpu(&format!("prefill, {PROMPT} tokens")), "ms", Better::Less, &mine.cpu_prefill, &peers.cpu_prefill),
        row("peak memory of the process".into(), "MiB", Better::Less, &mine.peak_mib, &peers.peak_mib),
    ])
}

impl Values {
    fn append(&mut self, run: Self) {
        self.decode_one.extend(run.decode_one);
        self.decode_many.extend(run.decode_many);
        self.prefill.extend(run.prefill);
        self.first_ms.extend(run.first_ms);
        self.cpu_one.extend(run.cpu_one);
        self.cpu_many.extend(run.cpu_many);
        self.cpu_prefill.extend(run.cpu_prefill);
        self.peak_mib.extend(run.peak_mib);
    }
}
