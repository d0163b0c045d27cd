//! Waiting with a deadline.

use anyhow::bail;
use std::time::{Duration, Instant};

const POLL: Duration = Duration::from_millis(50);

/// `limit` times `STARLING_TEST_PATIENCE`.
#[must_use]
pub fn patience(limit: Duration) -> Duration {
    let factor = std::env::var("STARLING_TEST_PATIENCE").ok().and_then(|f| f.parse::<f64>().ok());
    limit.mul_f64(factor.filter(|f| (0.1..=100.0).contains(f)).unwrap_or(1.0))
}

/// Asks `check` until it gives a value. Until then it says what it sees, which is what the failure shows.
///
/// # Errors
/// When `limit` (see [`patience`]) is over.
pub async fn until<T>(
    what: &str,
    limit: Duration,
    mut check: impl AsyncFnMut() -> Result<T, String>,
) -> anyhow::Result<T> {
    let (started, limit) = (Instant::now(), patience(limit));
    loop {
        let seen = match check().await {
            Ok(value) => return Ok(value),
            Err(seen) => seen,
        };
        if started.elapsed() > limit {
            bail!("{what}: not within {limit:?}. Last seen: {seen}");
        }
        tokio::time::sleep(POLL).await;
    }
}
