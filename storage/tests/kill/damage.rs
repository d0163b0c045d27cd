//! Files that lost their end, and files with a flipped bit: what is read is what was written, or an error.

use crate::sigkill::{Writer, draw_seed, open};
use crate::twin::{Content, Twin, content, settled_content};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use starling_storage::{Family, SharedStore, Store, StoreError};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const CUTS: usize = 8;
const FLIPS: usize = 24;
const ATTEMPTS: usize = 20;
/// Records of a log are laid out in blocks of this length.
const LOG_BLOCK_BYTES: u64 = 32 << 10;

/// A store whose writer was killed, and what it holds.
struct Killed {
    dir: tempfile::TempDir,
    seed: u64,
    twin: Twin,
}

/// Written for at least that long; the newest log has at least `log_len_bytes_min`.
fn killed(seed: u64, write_for: Duration, log_len_bytes_min: u64) -> Killed {
    // A log begins anew with each flush, also between the look at its length and the kill: then once more from the start.
    for _ in 0..ATTEMPTS {
        let dir = tempfile::tempdir().unwrap();
        let mut twin = Twin::new(seed);
        let writer = Writer::start(dir.path(), seed, 0);
        writer.opened();
        let begun = Instant::now();
        while begun.elapsed() < write_for || newest_log(dir.path()).1 < log_len_bytes_min {
            assert!(begun.elapsed() < Duration::from_secs(60), "no log of {log_len_bytes_min} bytes");
            std::thread::sleep(Duration::from_millis(2));
        }
        twin.perform_up_to(writer.kill().map_or(0, |last| last + 1));
        if newest_log(dir.path()).1 >= log_len_bytes_min {
            return Killed { dir, seed, twin };
        }
    }
    panic!("the newest log was shorter than {log_len_bytes_min} bytes after each of {ATTEMPTS} kills");
}

/// The log that is written now, and its length.
fn newest_log(dir: &Path) -> (PathBuf, u64) {
    let log = files(dir, "log").pop().unwrap();
    let len = std::fs::metadata(&log).map_or(0, |m| m.len());
    (log, len)
}

/// Files with this ending, oldest first: RocksDB numbers them.
fn files(dir: &Path, ending: &str) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.extension().is_some_and(|e| e == ending))
        .collect();
    found.sort();
    found
}

fn copy(from: &Path) -> tempfile::TempDir {
    let to = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.path().join(entry.file_name())).unwrap();
    }
    to
}

fn flip(file: &Path, rng: &mut ChaCha8Rng) -> usize {
    let mut bytes = std::fs::read(file).unwrap();
    let at = rng.random_range(0..bytes.len());
    bytes[at] ^= 1 << rng.random_range(0..8);
    std::fs::write(file, bytes).unwrap();
    at
}

/// An error with all its causes.
fn told(error: &StoreError) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(e) = cause {
        text = format!("{text}: {e}");
        cause = e.source();
    }
    text
}

/// How many of the first operations made `found`; `None` when no number of them did.
fn prefix(seed: u64, done: u64, found: &Content) -> Option<u64> {
    let mut twin = Twin::new(seed);
    (0..=done).find(|i| {
        twin.perform_up_to(*i);
        twin.content() == *found
    })
}

/// A log that was cut is a crash in the middle of a write, if what is missing was not synced: RocksDB cannot know.
/// What is left is a prefix of what was written, whole batches only, and the store works on.
#[test]
fn a_log_without_its_end_gives_a_prefix_of_whole_batches() {
    let seed = draw_seed();
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    // A transfer that settles begins a new log: one with something in it is wanted.
    let mut whole = (0..50)
        .map(|i| killed(seed.wrapping_add(i), Duration::from_millis(200), 40_000))
        .find(|killed| newest_log(killed.dir.path()).1 >= 4000)
        .expect("one of fifty logs is longer than a few batches");
    let mut shorter = 0;
    for cut in 1..=CUTS {
        let dir = copy(whole.dir.path());
        let (log, len) = newest_log(dir.path());
        // Half of them within the last batches, where a real crash would cut.
        let most = if cut % 2 == 0 { len } else { len.min(4000) };
        let missing = rng.random_range(1..=most.max(1));
        std::fs::File::options().write(true).open(&log).unwrap().set_len(len - missing).unwrap();
        let store = open(dir.path()).unwrap();
        let found = settled_content(&store);
        // One more than acknowledged may have been written.
        let kept = prefix(whole.seed, whole.twin.done + 1, &found);
        let kept = kept.unwrap_or_else(|| panic!("seed {seed}, {missing} of {len} bytes missing: no prefix"));
        shorter += u64::from(kept < whole.twin.done);
        let mut twin = Twin::new(whole.seed);
        twin.perform_up_to(kept);
        twin.compare(&store, "cut");
        drop(store);
        // And it goes on from there.
        let writer = Writer::start(dir.path(), whole.seed, kept);
        writer.opened();
        std::thread::sleep(Duration::from_millis(30));
        twin.perform_up_to(writer.kill().map_or(kept, |last| last + 1));
        twin.compare(&open(dir.path()).unwrap(), &format!("seed {seed}, cut {cut}"));
    }
    assert!(shorter > 0, "no cut took an operation away");
    let store = open(whole.dir.path()).unwrap();
    whole.twin.compare(&store, "the store that was copied");
}

/// Every family and key by itself, so that one error does not hide the rest. Counts the errors that name a file.
fn read_all(store: &SharedStore, expected: &Content, what: &str) -> usize {
    let mut errors = 0;
    for ((family, key), hash) in expected {
        match store.get(*family, key) {
            Ok(Some(value)) => {
                assert!(starling_protocol::Hash::of(&value) == *hash, "{what}: wrong bytes of a key in {family}");
            }
            // Tables are checked block by block: no block may be missing without a word.
            Ok(None) => panic!("{what}: a key in {family} vanished without an error"),
            Err(e @ (StoreError::Corrupt { .. } | StoreError::Database { .. })) => {
                // RocksDB names a table, but no blob file; then the key says which value to fetch from another holder.
                let named = told(&e).contains(".sst") || matches!(e, StoreError::Corrupt { .. });
                assert!(named, "{what}: neither file nor key in {}", told(&e));
                errors += 1;
            }
            Err(e) => panic!("{what}: {}", told(&e)),
        }
    }
    for family in Family::ALL {
        if let Ok(rows) = store.scan(family, &[], None, usize::MAX) {
            for (key, value) in rows {
                let expected = expected.get(&(family, key.clone()));
                let format = family == Family::Meta;
                assert!(format || expected == Some(&starling_protocol::Hash::of(&value)), "{what}: {family} scanned");
            }
        }
    }
    errors
}

#[test]
fn a_flipped_bit_in_a_table_or_blob_file_gives_an_error_and_never_wrong_bytes() {
    let seed = draw_seed();
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut whole = killed(seed, Duration::from_millis(1200), 0);
    // All in files, none in the log.
    let store = open(whole.dir.path()).unwrap();
    whole.twin.compare(&store, "before");
    store.flush().unwrap();
    drop(store);
    let expected = whole.twin.content();
    let (mut refused, mut detected) = (0, 0);
    for n in 0..FLIPS {
        let dir = copy(whole.dir.path());
        let ending = if n % 3 == 0 { "blob" } else { "sst" };
        let mut all = files(dir.path(), ending);
        // The kill may have come before the first byte.
        all.retain(|f| std::fs::metadata(f).unwrap().len() > 0);
        let file = &all[rng.random_range(0..all.len())];
        let at = flip(file, &mut rng);
        let what = format!("seed {seed}, bit flipped at {at} of {}", file.display());
        match open(dir.path()) {
            Ok(store) => detected += usize::from(read_all(&store, &expected, &what) > 0),
            Err(e) => {
                // RocksDB names the table in most of its words; the store is always named.
                let corrupt = matches!(e, StoreError::Corrupt { .. }) && told(&e).contains(ending);
                let damaged = matches!(&e, StoreError::Damaged { path, .. } if path == dir.path());
                assert!(corrupt || damaged, "{what}: {}", told(&e));
                refused += 1;
            }
        }
    }
    // The others hit what no value depends on: filters, properties, padding.
    assert!(refused + detected > FLIPS / 2, "{refused} refused, {detected} detected of {FLIPS}");
    eprintln!("{FLIPS} flipped bits: {refused} stores refused, {detected} with errors, no wrong byte");
}

/// A bit in the middle of a log is no torn write: what comes after it was synced, and may be a vote. RocksDB's default
/// would go on without all that; this store refuses. Only in the last block may a bit, that of a length, look like the
/// end of a torn write.
#[test]
fn a_flipped_bit_inside_a_log_is_refused() {
    let seed = draw_seed();
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut whole = killed(seed, Duration::from_millis(200), 100_000);
    // The last acknowledged operations with the one in flight.
    let dir = copy(whole.dir.path());
    let store = open(dir.path()).unwrap();
    whole.twin.compare(&store, "before");
    let expected = whole.twin.content();
    let mut refused = 0;
    for n in 0..CUTS {
        let dir = copy(whole.dir.path());
        let (log, len) = newest_log(dir.path());
        let at = flip(&log, &mut rng);
        let what = format!("seed {seed}, flip {n} at {at} of {len} bytes");
        match open(dir.path()) {
            Err(e) => {
                assert!(matches!(&e, StoreError::Damaged { path, .. } if path == dir.path()), "{what}: {}", told(&e));
                refused += 1;
            }
            Ok(store) => {
                let found = content(&store).unwrap();
                if found != expected {
                    let kept = prefix(whole.seed, whole.twin.done, &found);
                    let last_block = at as u64 >= (len - 1) / LOG_BLOCK_BYTES * LOG_BLOCK_BYTES;
                    assert!(
                        last_block && kept.is_some(),
                        "{what}: opened with {kept:?} of {} operations",
                        whole.twin.done
                    );
                }
            }
        }
    }
    assert!(refused >= CUTS / 2, "{refused} of {CUTS}");
}
