//! What the stores prove: copies of them at one moment, as after SIGKILL of all nodes but without ending any, and the
//! stores themselves at the end.

use crate::faults::{self, NODES};
use crate::read::Run;
use anyhow::{Context, ensure};
use serde_json::{Value, json};
use starling_protocol::RolloutId;
use starling_tests::StoresReport;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Copies the stores of paused nodes: finished files by a link, as nobody writes them again, the others by their bytes.
///
/// # Errors
/// When a file cannot be copied.
pub(crate) fn copy(stores: &[(String, PathBuf)], to: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut copies = Vec::new();
    for (name, store) in stores.iter().filter(|(_, s)| s.join("CURRENT").exists()) {
        let copy = to.join(name);
        copy_folder(store, &copy)?;
        copies.push(copy);
    }
    Ok(copies)
}

fn copy_folder(from: &Path, to: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from).with_context(|| from.display().to_string())? {
        let path = entry?.path();
        let copy = to.join(path.file_name().context("a file has a name")?);
        let finished = path.extension().is_some_and(|e| e == "sst" || e == "blob");
        let done = if path.is_dir() {
            copy_folder(&path, &copy)
        } else if finished {
            std::fs::hard_link(&path, &copy).map_err(Into::into)
        } else {
            std::fs::copy(&path, &copy).map(drop).map_err(Into::into)
        };
        done.with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// Audits copies, and deletes them.
///
/// # Errors
/// When one cannot be read.
pub(crate) fn of_copies(copies: &[PathBuf], acknowledged: &[RolloutId], folder: &Path) -> anyhow::Result<StoresReport> {
    let report = StoresReport::read(copies, acknowledged);
    // What was found stays for a look.
    if report.as_ref().is_ok_and(|r| r.ensure_clean().is_ok()) {
        std::fs::remove_dir_all(folder)?;
    }
    report
}

/// Audits the stores of ended nodes, whose folders lie in `root`.
///
/// # Errors
/// When one cannot be read.
pub(crate) fn of_nodes(root: &Path, acknowledged: &[RolloutId]) -> anyhow::Result<StoresReport> {
    let stores = (0..NODES).map(|i| root.join(faults::name(i)).join("store"));
    let stores: Vec<PathBuf> = stores.filter(|s| s.join("CURRENT").exists()).collect();
    ensure!(!stores.is_empty(), "no stores are in {}", root.display());
    StoresReport::read(&stores, acknowledged)
}

/// The line of the run's events.
pub(crate) fn facts(report: &StoresReport, to_the_soak: usize) -> Value {
    let a = &report.audit;
    json!({
        "acknowledged": a.acknowledged, "to_the_soak": to_the_soak, "lost": a.lost, "held": a.held,
        "consumed": a.consumed, "consumed_twice": a.consumed_twice.len(), "consumed_and_deleted": a.consumed_and_deleted,
        "forked_versions": a.forked_versions.len(), "corrupt": a.corrupt.len(), "steps": report.steps.len(),
        "newest": report.steps.keys().next_back(), "broken": report.ensure_clean().err().map(|e| format!("{e:#}")),
    })
}

/// Audits what a run left that was killed with all its nodes, and adds the result to its events.
///
/// # Errors
/// When the run goes on or was audited, or a store cannot be read.
pub(crate) fn of_killed_run(folder: &Path) -> anyhow::Result<()> {
    let run = Run::read(folder)?;
    ensure!(run.named("audit").next().is_none(), "the run in {} has been audited", folder.display());
    let mut roots = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.starts_with("starling-soak-")) {
            roots.push(path);
        }
    }
    let [root] = roots.as_slice() else {
        anyhow::bail!("expected one folder starling-soak-* in {}, got {}", folder.display(), roots.len());
    };
    let name = root.display().to_string();
    for process in std::fs::read_dir("/proc")?.flatten() {
        let arguments = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
        let uses = String::from_utf8_lossy(&arguments).contains(&name);
        ensure!(!uses, "process {} works in {name}", process.file_name().to_string_lossy());
    }
    let acknowledged: Vec<RolloutId> = run.acknowledged.iter().map(|a| a.rollout).collect();
    let mut line = facts(&of_nodes(root, &acknowledged)?, acknowledged.len());
    line["t"] = json!(run.length_s());
    line["event"] = json!("audit");
    let path = folder.join("events.jsonl");
    let mut events =
        std::fs::OpenOptions::new().append(true).open(&path).with_context(|| path.display().to_string())?;
    writeln!(events, "{line}")?;
    Ok(())
}
