//! `starling bench`.

use crate::cli::BenchArgs;

/// Runs a benchmark.
///
/// # Errors
/// When what it measures fails.
pub async fn bench(_args: &BenchArgs, _json: bool) -> anyhow::Result<()> {
    Ok(())
}
