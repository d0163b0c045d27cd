//! Load that is bounded in count and in time, and the order of runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// How much to do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    /// Jobs at once.
    pub(super) at_once: usize,
    /// No job begins after so long.
    pub(super) time_max: Duration,
    /// Most jobs.
    pub(super) count_max: u64,
}

/// What was done.
#[derive(Clone, Copy, Debug)]
pub(super) struct Done {
    pub(super) count: u64,
    pub(super) took: Duration,
}

impl Done {
    #[expect(clippy::cast_precision_loss, reason = "counts are below 2^53")]
    pub(super) fn per_second(self) -> f64 {
        self.count as f64 / self.took.as_secs_f64().max(1e-9)
    }
}

impl Load {
    /// Runs `job(0)`, `job(1)`, … and waits for all that began.
    ///
    /// # Errors
    /// The first job's that failed; the others are dropped.
    pub(super) async fn run<F, R>(self, job: F) -> anyhow::Result<Done>
    where
        F: Fn(u64) -> R + Send + Sync + 'static,
        R: Future<Output = anyhow::Result<()>> + Send + 'static,
    {
        let (job, next) = (Arc::new(job), Arc::new(AtomicU64::new(0)));
        let begin = Instant::now();
        let mut workers = JoinSet::new();
        for _ in 0..self.at_once {
            let (job, next) = (job.clone(), next.clone());
            workers.spawn(async move {
                let mut count = 0;
                while begin.elapsed() < self.time_max {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    if i >= self.count_max {
                        break;
                    }
                    job(i).await?;
                    count += 1;
                }
                anyhow::Ok(count)
            });
        }
        let mut count = 0;
        while let Some(worker) = workers.join_next().await {
            count += worker??;
        }
        Ok(Done { count, took: begin.elapsed() })
    }
}

/// One value a run of ours and of the peer's, in turn, after one of each that does not count. Who goes first alternates
/// too: whatever the machine does beside falls on both.
///
/// # Errors
/// The first run's that failed.
pub(super) async fn alternate(
    runs: usize,
    mut ours: impl AsyncFnMut() -> anyhow::Result<f64>,
    mut peer: impl AsyncFnMut() -> anyhow::Result<f64>,
) -> anyhow::Result<(Vec<f64>, Vec<f64>)> {
    ours().await?;
    peer().await?;
    let (mut a, mut b) = (Vec::with_capacity(runs), Vec::with_capacity(runs));
    for run in 0..runs {
        if run % 2 == 0 {
            a.push(ours().await?);
            b.push(peer().await?);
        } else {
            b.push(peer().await?);
            a.push(ours().await?);
        }
    }
    Ok((a, b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_load_ends_at_its_count_and_at_its_time() {
        let load = Load { at_once: 3, time_max: Duration::from_secs(60), count_max: 10 };
        assert_eq!(load.run(|_| async { Ok(()) }).await.unwrap().count, 10);
        let none = Load { time_max: Duration::ZERO, ..load };
        assert_eq!(none.run(|_| async { Ok(()) }).await.unwrap().count, 0);
        assert!(
            load.run(|i| async move {
                anyhow::ensure!(i != 5);
                Ok(())
            })
            .await
            .is_err()
        );
    }

    #[tokio::test]
    async fn runs_alternate_and_the_first_of_each_does_not_count() {
        let order = std::cell::RefCell::new(String::new());
        let go = |who: char| {
            order.borrow_mut().push(who);
            f64::from(u32::try_from(order.borrow().len()).unwrap())
        };
        let (ours, peer) = alternate(3, async || Ok(go('o')), async || Ok(go('p'))).await.unwrap();
        assert_eq!(order.borrow().as_str(), "opoppoop");
        assert_eq!((ours, peer), (vec![3.0, 6.0, 7.0], vec![4.0, 5.0, 8.0]));
    }
}
