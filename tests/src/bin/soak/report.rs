//! Summary, figures and picture of a run, beside its files.

use crate::chart;
use crate::read::Run;
use crate::verdict::Verdict;
use anyhow::Context;
use std::path::Path;

/// Writes `summary.txt`, `summary.json` and `chart.svg` into a run's folder and prints the first; whether every promise held.
///
/// # Errors
/// When the run's files cannot be read, or these not be written.
pub(crate) fn write(folder: &Path) -> anyhow::Result<bool> {
    let run = Run::read(folder)?;
    let verdict = Verdict::of(&run);
    let text = verdict.text();
    let put = |name: &str, content: &str| {
        let path = folder.join(name);
        std::fs::write(&path, content).with_context(|| path.display().to_string())
    };
    put("summary.txt", &text)?;
    put("summary.json", &format!("{:#}\n", verdict.figures))?;
    put("chart.svg", &chart::svg(&run))?;
    eprintln!("\n{text}\nall of it: {}", folder.display());
    Ok(verdict.held())
}
