//! The soak, for a minute: that it runs, sees what it is to see and comes to a verdict. The real one takes hours and is
//! started by hand (docs/testing.md).

use anyhow::{Context, ensure};
use serde_json::Value;
use starling_tests::starling_binary;
use std::process::Command;

/// Its first faults are short ones.
const SEED: &str = "3";

#[test]
fn a_minute_of_it_holds() -> anyhow::Result<()> {
    let parent = tempfile::tempdir()?;
    let folder = parent.path().join("soak");
    let binaries = starling_binary()?.parent().context("a folder")?.to_owned();
    let mut soak = Command::new(env!("CARGO_BIN_EXE_soak"));
    soak.args(["--hours", "0.01", "--calm", "2", "--seed", SEED, "--log"]).arg(&folder);
    let output = soak.env("STARLING_TEST_BIN", binaries).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    let failed = || {
        let kept = folder.display();
        format!("seed {SEED}, in {kept}: {}: {said}", output.status)
    };
    if !output.status.success() {
        let _ = parent.keep();
        anyhow::bail!(failed());
    }
    let summary: Value = serde_json::from_str(&std::fs::read_to_string(folder.join("summary.json"))?)?;
    ensure!(summary["held"] == true, failed());
    ensure!(summary["audit"]["to_the_soak"].as_u64() > Some(0), failed());
    ensure!(summary["audit"]["consumed"].as_u64() > Some(0), failed());
    ensure!(summary["faults"].as_object().is_some_and(|f| !f.is_empty()), failed());
    let statuses = std::fs::read_to_string(folder.join("status.jsonl"))?;
    for node in ["server-1", "server-2", "server-3", "witness", "client-1", "client-2", "volunteer-1", "volunteer-2"] {
        ensure!(statuses.contains(&format!("\"node\":\"{node}\"")), "{node} told nothing: {}", failed());
    }
    ensure!(std::fs::read_to_string(folder.join("chart.svg"))?.contains("</svg>"), failed());
    Ok(())
}
