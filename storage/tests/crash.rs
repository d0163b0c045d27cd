//! A writer is killed with SIGKILL at random moments; whatever it acknowledged must be there afterwards.
//!
//! The test binary starts itself as the writer. A kill proves that acknowledged writes are in the log before
//! the acknowledgement; that the log is on the disk, only pulled power could prove.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use rand::{RngExt, SeedableRng};
use starling_protocol::{JobId, ModelName, PolicyVersion, RolloutId};
use starling_storage::blobs::{put_blob, put_manifest_bytes, read_manifest};
use starling_storage::consumed::{is_consumed, mark_consumed};
use starling_storage::rollouts::{count, get_rollout, list_all, put_rollouts};
use starling_storage::steps::{put_step, steps};
use starling_storage::suite::{example_step, noise};
use starling_storage::{Batch, Durability, RaftLog, RaftMeta, RocksOptions, RocksStore, SharedStore, audit};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const DIR_VAR: &str = "STARLING_CRASH_TEST_DIR";
const FROM_VAR: &str = "STARLING_CRASH_TEST_FROM";
const SEED_VAR: &str = "STARLING_CRASH_TEST_SEED";
const ROUNDS: usize = 10;
const JOB: JobId = JobId([5; 16]);

fn open(dir: &Path) -> SharedStore {
    // Small buffers, so that kills also hit flushes and changes of the log.
    let options = RocksOptions { write_buffer_bytes: 256 << 10, wal_bytes_max: 1 << 20, ..RocksOptions::default() };
    Arc::new(RocksStore::open(dir, &options).unwrap())
}

fn rollout(i: u64) -> Vec<u8> {
    noise(i, 200 + usize::try_from(i * 37 % 9000).unwrap())
}

fn weights(i: u64) -> Vec<u8> {
    noise(i, 1_500_000)
}

/// The writer: never returns when it is started as one, and passes as an empty test otherwise.
#[test]
fn writes_until_killed() {
    let (Ok(dir), Ok(from)) = (std::env::var(DIR_VAR), std::env::var(FROM_VAR)) else {
        return;
    };
    let store = open(Path::new(&dir));
    let log = RaftLog::new(store.clone(), ModelName::new("m").unwrap());
    let out = std::io::stdout();
    // libtest has begun a line with the name of this test.
    writeln!(out.lock()).unwrap();
    for i in from.parse::<u64>().unwrap().. {
        let bytes = rollout(i);
        let id = RolloutId::of(&bytes);
        put_rollouts(&store, &[(id, &bytes, JOB)], Durability::Synced).unwrap();
        // Unsynced in between, in another family: must not disturb.
        put_blob(&store, &i.to_be_bytes(), Durability::Buffered).unwrap();
        log.append(&[(i, bytes)], Durability::Synced).unwrap();
        let mut batch = Batch::new();
        put_step(&mut batch, log.group(), &example_step(i, vec![id]));
        mark_consumed(&mut batch, [id], PolicyVersion(i));
        log.put_meta_in(&mut batch, RaftMeta::AppliedState, &i.to_be_bytes());
        store.write(batch, Durability::Synced).unwrap();
        if i % 16 == 0 {
            put_manifest_bytes(&store, &weights(i)).unwrap();
        }
        let mut out = out.lock();
        writeln!(out, "acked {i}").unwrap();
        out.flush().unwrap();
    }
}

#[test]
fn nothing_acknowledged_is_lost_by_a_kill() {
    let seed = match std::env::var(SEED_VAR) {
        Ok(seed) => seed.parse().unwrap(),
        Err(_) => u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() % 1_000_000).unwrap(),
    };
    eprintln!("seed {seed}; again with {SEED_VAR}={seed}");
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    let dir = tempfile::tempdir().unwrap();
    let mut acked: Option<u64> = None;
    for round in 0..ROUNDS {
        let next = acked.map_or(0, |a| a + 1);
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["writes_until_killed", "--exact", "--nocapture", "--test-threads=1"])
            .env(DIR_VAR, dir.path())
            .env(FROM_VAR, next.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let pipe = BufReader::new(child.stdout.take().unwrap());
        let reader = std::thread::spawn(move || {
            let acks = pipe.lines().map_while(Result::ok);
            acks.filter_map(|l| l.strip_prefix("acked ").and_then(|n| n.parse::<u64>().ok())).last()
        });
        std::thread::sleep(Duration::from_micros(rng.random_range(30_000..250_000)));
        child.kill().unwrap();
        child.wait().unwrap();
        acked = reader.join().unwrap().or(acked);
        verify(dir.path(), acked, round);
    }
    assert!(acked.is_some(), "the writer never got to its first acknowledgement");
    eprintln!("{} acknowledged rounds of writes survived {ROUNDS} kills", acked.map_or(0, |a| a + 1));
}

fn verify(dir: &Path, acked: Option<u64>, round: usize) {
    let store = open(dir);
    let log = RaftLog::new(store.clone(), ModelName::new("m").unwrap());
    let n = acked.map_or(0, |a| a + 1);
    let by_version: BTreeMap<u64, _> =
        steps(&store, log.group()).unwrap().into_iter().map(|s| (s.version.0, s)).collect();
    for i in 0..n {
        let bytes = rollout(i);
        let id = RolloutId::of(&bytes);
        assert!(get_rollout(&store, id).unwrap().as_ref() == Some(&bytes), "round {round}, rollout {i} of {n}");
        assert_eq!(is_consumed(&store, id).unwrap(), Some(PolicyVersion(i)), "round {round}, consumed {i}");
        assert!(log.read(i, i + 1, 1).unwrap() == [(i, bytes)], "round {round}, log entry {i}");
        assert_eq!(by_version.get(&i), Some(&example_step(i, vec![id])), "round {round}, step {i}");
        if i % 16 == 0 {
            let manifest = starling_protocol::manifest::Manifest::of(&weights(i));
            assert!(read_manifest(&store, &manifest).unwrap().is_some(), "round {round}, weights {i}");
        }
    }
    // What was in flight is there as a whole or not at all.
    let applied = log.meta(RaftMeta::AppliedState).unwrap().map(|b| u64::from_be_bytes(b.try_into().unwrap()));
    assert_eq!(applied, by_version.keys().last().copied(), "round {round}: state and step in one batch");
    assert!(applied >= acked, "round {round}");
    let ids = list_all(&store, JOB, None, usize::MAX).unwrap();
    assert_eq!(ids.len(), count(&store, JOB).unwrap());
    assert!(ids.len() as u64 >= n && ids.len() as u64 <= n + 1, "round {round}: {} for {n}", ids.len());
    let report = audit(&[store], ids).unwrap();
    assert!(report.is_clean() && report.corrupt.is_empty(), "round {round}: {report:?}");
}
