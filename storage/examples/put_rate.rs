//! How many rollouts a second this machine stores with a sync each, from one thread and from many.
//!
//! `cargo run --release -p starling-storage --example put_rate [directory]`
#![expect(clippy::print_stdout, reason = "a program for people")]

use starling_protocol::{JobId, RolloutId};
use starling_storage::rollouts::put_rollouts;
use starling_storage::suite::noise;
use starling_storage::{Durability, RocksOptions, RocksStore, SharedStore, StoreError};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const VALUE_BYTES: usize = 2048;
const DURATION: Duration = Duration::from_secs(3);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let parent = std::env::args().nth(1).map_or_else(std::env::temp_dir, Into::into);
    let dir = tempfile::tempdir_in(parent)?;
    for durability in [Durability::Synced, Durability::Buffered] {
        for threads in [1, 16] {
            let path = dir.path().join(format!("{durability:?}-{threads}"));
            let store: SharedStore = Arc::new(RocksStore::open(path, &RocksOptions::default())?);
            let (rate, slowest) = measure(&store, threads, durability)?;
            println!(
                "{durability:?}, {threads:2} threads: {rate:.0} puts/s of {VALUE_BYTES} bytes, slowest {slowest:?}"
            );
        }
    }
    Ok(())
}

fn measure(store: &SharedStore, threads: u64, durability: Durability) -> Result<(f64, Duration), StoreError> {
    let puts = AtomicU64::new(0);
    let started = Instant::now();
    let slowest = std::thread::scope(|scope| {
        let puts = &puts;
        let workers: Vec<_> = (0..threads)
            .map(|thread| {
                scope.spawn(move || {
                    let mut slowest = Duration::ZERO;
                    let mut n = thread << 32;
                    while started.elapsed() < DURATION {
                        n += 1;
                        let bytes = noise(n, VALUE_BYTES);
                        let before = Instant::now();
                        put_rollouts(store, &[(RolloutId::of(&bytes), &bytes, JobId([1; 16]))], durability)?;
                        slowest = slowest.max(before.elapsed());
                        puts.fetch_add(1, Ordering::Relaxed);
                    }
                    Ok(slowest)
                })
            })
            .collect();
        let times = workers.into_iter().map(|w| w.join().unwrap_or_else(|cause| std::panic::resume_unwind(cause)));
        times.collect::<Result<Vec<_>, StoreError>>()
    })?;
    #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
    let rate = puts.load(Ordering::Relaxed) as f64 / started.elapsed().as_secs_f64();
    Ok((rate, slowest.into_iter().max().unwrap_or_default()))
}
