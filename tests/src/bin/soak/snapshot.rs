//! The stores of all nodes at one moment, as after a power failure of all of them, without ending any.

use anyhow::Context;
use starling_protocol::RolloutId;
use starling_tests::StoresReport;
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
pub(crate) fn audit(copies: &[PathBuf], acknowledged: &[RolloutId], folder: &Path) -> anyhow::Result<StoresReport> {
    let report = StoresReport::read(copies, acknowledged);
    // What was found stays for a look.
    if report.as_ref().is_ok_and(|r| r.ensure_clean().is_ok()) {
        std::fs::remove_dir_all(folder)?;
    }
    report
}
