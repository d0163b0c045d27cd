//! A writer is killed with SIGKILL again and again; all that it acknowledged must be there, and of what it was doing
//! all or nothing.
//!
//! The test binary starts itself as the writer. A kill proves that acknowledged writes are in the log before the
//! acknowledgement; that the log is on the disk, only pulled power could prove.

use crate::operations::perform;
use crate::twin::Twin;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use starling_storage::{RocksOptions, RocksStore, SharedStore, StoreError};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

const DIR_VAR: &str = "STARLING_KILL_TEST_DIR";
const SEED_VAR: &str = "STARLING_KILL_TEST_SEED";
const FROM_VAR: &str = "STARLING_KILL_TEST_FROM";
const KILLS: usize = 200;
/// One kill in so many comes at any moment after the start of the process, so that some hit the recovery.
const EARLY_ONE_IN: u32 = 6;

/// Small buffers, so that kills also hit flushes, compactions and changes of the log.
pub(crate) fn open(dir: &Path) -> Result<SharedStore, StoreError> {
    let options = RocksOptions { write_buffer_bytes: 128 << 10, wal_bytes_max: 512 << 10, ..RocksOptions::default() };
    Ok(Arc::new(RocksStore::open(dir, &options)?))
}

/// The seed of `TEST_SEED`, or a new one.
pub(crate) fn draw_seed() -> u64 {
    let given = std::env::var("TEST_SEED").ok().and_then(|s| s.trim().parse().ok());
    let seed = given.unwrap_or_else(|| rand::random::<u64>() % 1_000_000);
    eprintln!("seed {seed}: run this again with TEST_SEED={seed}");
    seed
}

/// The writer: never returns when it is started as one, and passes as an empty test otherwise.
#[test]
fn writes_until_killed() {
    let (Ok(dir), Ok(seed), Ok(from)) = (std::env::var(DIR_VAR), std::env::var(SEED_VAR), std::env::var(FROM_VAR))
    else {
        return;
    };
    let store = open(Path::new(&dir)).unwrap();
    let seed: u64 = seed.parse().unwrap();
    let mut out = std::io::stdout().lock();
    // libtest has begun a line with the name of this test.
    writeln!(out, "\nopen").unwrap();
    for i in from.parse::<u64>().unwrap().. {
        perform(&store, seed, i);
        writeln!(out, "acked {i}").unwrap();
        out.flush().unwrap();
    }
}

/// A writer, and what it says.
pub(crate) struct Writer {
    child: Child,
    opened: mpsc::Receiver<()>,
    reader: std::thread::JoinHandle<Option<u64>>,
}

impl Writer {
    pub(crate) fn start(dir: &Path, seed: u64, from: u64) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["sigkill::writes_until_killed", "--exact", "--nocapture", "--test-threads=1"])
            .env(DIR_VAR, dir)
            .env(SEED_VAR, seed.to_string())
            .env(FROM_VAR, from.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let pipe = BufReader::new(child.stdout.take().unwrap());
        let (open, opened) = mpsc::channel();
        let reader = std::thread::spawn(move || {
            let mut last = None;
            for line in pipe.lines().map_while(Result::ok) {
                if line == "open" {
                    let _ = open.send(());
                }
                // A number that the kill cut off is a smaller one.
                last = last.max(line.strip_prefix("acked ").and_then(|n| n.parse().ok()));
            }
            last
        });
        Self { child, opened, reader }
    }

    /// Waits until it has opened the store.
    pub(crate) fn opened(&self) {
        self.opened.recv_timeout(Duration::from_secs(60)).unwrap();
    }

    /// SIGKILL; returns the last operation acknowledged, of this run.
    pub(crate) fn kill(mut self) -> Option<u64> {
        let ended = self.child.try_wait().unwrap();
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        assert!(ended.is_none(), "the writer ended by itself: {ended:?}, see above");
        self.reader.join().unwrap()
    }
}

#[test]
fn nothing_acknowledged_is_lost_and_nothing_is_seen_by_halves() {
    let (seed, started) = (draw_seed(), Instant::now());
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let dir = tempfile::tempdir().unwrap();
    let mut twin = Twin::new(seed);
    let (mut in_flight, mut early) = (0, 0);
    for kill in 1..=KILLS {
        let writer = Writer::start(dir.path(), seed, twin.done);
        if rng.random_range(0..EARLY_ONE_IN) == 0 {
            early += 1;
            std::thread::sleep(Duration::from_micros(rng.random_range(0..60_000)));
        } else {
            writer.opened();
            std::thread::sleep(Duration::from_micros(rng.random_range(0..40_000)));
        }
        let acked = writer.kill().map_or(twin.done, |last| last + 1);
        twin.perform_up_to(acked);
        twin.compare(&open(dir.path()).unwrap(), &format!("seed {seed}, kill {kill}"));
        in_flight += twin.done - acked;
    }
    assert!(twin.done > KILLS as u64, "the writers got to {} operations only", twin.done);
    assert!(in_flight > 0, "no kill hit a written operation before its acknowledgement");
    eprintln!(
        "{KILLS} kills ({early} at any moment of the start), {} operations, {in_flight} of them done and not yet \
         acknowledged; {:.0} s",
        twin.done,
        started.elapsed().as_secs_f64()
    );
}
