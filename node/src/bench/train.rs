//! One GRPO step on a real model, SmolLM2-135M, in full, by adapters and with a shared prompt, beside torch on as many
//! threads (`tests/peers/torch_train.py`).

use super::machine::cores;
use super::report::{Better, Row};
use super::torch::Torch;
use anyhow::{Context, bail};
use starling_engine::bench::{grpo_group, step_seconds};
use starling_engine::{Checkpoint, Device, Sample, TrainerConfig};
use starling_protocol::lora::{LoraSpec, LoraTarget};
use std::path::{Path, PathBuf};

const TOKENS: usize = 256;
const RANK: u32 = 16;
const GIB: f64 = (1u64 << 30) as f64;

/// The rows of `train`.
///
/// # Errors
/// Without the model's file; whatever the trainer refuses; when a peer that was asked for does not run.
pub(super) async fn measure(runs: usize, torch: Option<&Path>) -> anyhow::Result<Vec<Row>> {
    let path = model_file()?;
    let load = || Checkpoint::load(&path, &Device::Cpu).with_context(|| path.display().to_string());
    let vocab = load()?.config.vocab_size;
    let mut torch = match torch {
        Some(python) => Some(Torch::start(python).await?),
        None => None,
    };
    let full = TrainerConfig { micro_batch_tokens: 8192, threads: cores(), ..TrainerConfig::default() };
    let spec = LoraSpec { rank: RANK, alpha: 2.0 * f64::from(RANK), targets: LoraTarget::ALL.to_vec() };
    let lora = TrainerConfig { lora: Some(spec), ..full.clone() };
    let checkpointed = TrainerConfig { gradient_checkpointing: true, ..full.clone() };
    let flat = TrainerConfig { share_prefixes: false, ..full.clone() };
    let eight = grpo_group(vocab, 8, TOKENS, TOKENS / 2);
    let four = grpo_group(vocab, 4, TOKENS, TOKENS * 3 / 4);
    // A shared prompt would be computed once; torch and the rows `full` and `lora` are without.
    let apart = |tc: &TrainerConfig| TrainerConfig { share_prefixes: false, ..tc.clone() };
    let ours = |tc: &TrainerConfig, batch: &[Sample]| -> anyhow::Result<(Vec<f64>, Option<f64>)> {
        tokio::task::block_in_place(|| {
            let model = load()?;
            let counted = reset_peak();
            let seconds = step_seconds(&model.config, model.weights, tc, batch, runs)?;
            Ok((seconds, peak_gib().filter(|_| counted)))
        })
    };
    let mut rows = Vec::new();
    for (name, tc, kind) in [("full", apart(&full), "full"), ("lora", apart(&lora), "lora")] {
        let (seconds, memory) = ours(&tc, &eight)?;
        let peer = peer(&mut torch, kind, runs).await?;
        let what = format!("{name}, 8 x {TOKENS} tokens, half of them trained");
        rows.push(Row::new(what, "s", Better::Less, &seconds, peer.as_deref().map(|p| ("torch", p))));
        rows.extend(memory.map(|m| Row::new(format!("{name}, peak memory"), "GiB", Better::Less, &[m], None)));
    }
    let (_, memory) = ours(&apart(&checkpointed), &eight)?;
    let what = "full with gradient checkpointing, peak memory";
    rows.extend(memory.map(|m| Row::new(what, "GiB", Better::Less, &[m], None)));
    let ((tree, _), (flat, _)) = (ours(&full, &four)?, ours(&flat, &four)?);
    let what = format!("tree, 4 x {TOKENS} tokens, 3/4 of them shared");
    rows.push(Row::new(what, "s", Better::Less, &tree, Some(("each sequence on its own", &flat))));
    if let Some(theirs) = peer(&mut torch, "flat", runs).await? {
        rows.push(Row::new("tree, beside torch without sharing", "s", Better::Less, &tree, Some(("torch", &theirs))));
    }
    Ok(rows)
}

async fn peer(torch: &mut Option<Torch>, kind: &str, runs: usize) -> anyhow::Result<Option<Vec<f64>>> {
    let Some(torch) = torch else { return Ok(None) };
    let mut seconds = Vec::with_capacity(runs);
    for _ in 0..runs {
        seconds.push(torch.step(kind).await?);
    }
    Ok(Some(seconds))
}

/// Where `scripts/fetch_models.sh` puts it for tests: beside the folder of this program.
fn model_file() -> anyhow::Result<PathBuf> {
    let exe = std::env::current_exe()?;
    let dir = exe.ancestors().nth(2).context("the program lies in a folder")?.join("models");
    let path = dir.join("smollm2.gguf");
    if !path.is_file() {
        bail!("{}: expected SmolLM2; `scripts/fetch_models.sh {} smollm2` fetches it", path.display(), dir.display());
    }
    Ok(path)
}

/// Has the kernel count this process's peak of resident memory anew; false where it cannot.
fn reset_peak() -> bool {
    std::fs::write("/proc/self/clear_refs", "5").is_ok()
}

/// That peak.
fn peak_gib() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    let kib: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024.0 / GIB)
}
