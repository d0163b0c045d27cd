//! The contract suite on both implementations, and what only one of them can do.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use proptest::prelude::*;
use starling_protocol::{Hash, JobId, ModelName, RolloutId};
use starling_storage::blobs::{delete_blobs, get_blob, has_blob, put_blob, put_manifest_bytes, read_manifest};
use starling_storage::rollouts::{get_rollout, put_rollouts};
use starling_storage::suite::{CHECKS, noise};
use starling_storage::{
    Batch, Durability, Family, MemoryStore, RaftLog, RocksOptions, RocksStore, SharedStore, Store, StoreError, audit,
    fsck,
};
use std::path::Path;
use std::sync::Arc;

fn open(path: &Path) -> RocksStore {
    RocksStore::open(path, &RocksOptions::default()).unwrap()
}

fn put(store: &dyn Store, family: Family, key: &[u8], value: &[u8], durability: Durability) {
    let mut batch = Batch::new();
    batch.put(family, key, value);
    store.write(batch, durability).unwrap();
}

fn run_suite(new_store: impl Fn(&str) -> SharedStore) {
    for (name, check) in CHECKS {
        let store = new_store(name);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| check(store)));
        if let Err(cause) = outcome {
            let text = cause.downcast_ref::<String>().map_or("see above", |s| s);
            panic!("{name}: {text}");
        }
    }
}

#[test]
fn memory_store_keeps_the_contract() {
    run_suite(|_| Arc::new(MemoryStore::new()));
}

#[test]
fn rocks_store_keeps_the_contract() {
    let dir = tempfile::tempdir().unwrap();
    run_suite(|name| {
        let mut batch = Batch::new();
        let store = open(&dir.path().join(name));
        // The suite wants to see its own keys only.
        batch.delete(Family::Meta, starling_storage::schema::FORMAT_KEY);
        store.write(batch, Durability::Synced).unwrap();
        Arc::new(store)
    });
}

#[test]
fn a_reopened_store_has_everything_with_and_without_flush() {
    let dir = tempfile::tempdir().unwrap();
    let weights = noise(1, 5 << 20);
    let mut manifests = Vec::new();
    for round in 0..3u8 {
        let store = open(dir.path());
        for earlier in 0..round {
            let value = store.get(Family::Nodes, &[earlier]).unwrap();
            assert_eq!(value.as_deref(), Some(&[earlier, earlier][..]), "round {round}");
        }
        for manifest in &manifests {
            assert!(read_manifest(&store, manifest).unwrap().is_some());
        }
        put(&store, Family::Nodes, &[round], &[round, round], Durability::Buffered);
        manifests.push(put_manifest_bytes(&store, &weights[usize::from(round)..]).unwrap());
        if round == 1 {
            store.flush().unwrap();
        }
    }
}

#[test]
fn a_second_writer_is_locked_out_and_a_reader_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let hash = put_blob(&store, &noise(1, 9000), Durability::Synced).unwrap();
    let err = RocksStore::open(dir.path(), &RocksOptions::default()).unwrap_err();
    assert!(matches!(&err, StoreError::Locked { path } if path == dir.path()), "{err}");
    assert!(err.is_retryable());
    let reader = RocksStore::open_read_only(dir.path()).unwrap();
    assert!(get_blob(&reader, hash).unwrap().is_some());
    let err = put_blob(&reader, b"x", Durability::Synced).unwrap_err();
    assert!(matches!(err, StoreError::ReadOnly { .. }), "{err}");
    drop(store);
    open(dir.path());
}

#[test]
fn reading_a_store_changes_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let id = {
        let store = open(dir.path());
        let bytes = noise(1, 3000);
        put_rollouts(&store, &[(Hash::of(&bytes), &bytes, JobId([1; 16]))], Durability::Synced).unwrap();
        Hash::of(&bytes)
    };
    let listing = || {
        let mut files: Vec<_> = std::fs::read_dir(dir.path())
            .unwrap()
            .map(|e| e.unwrap())
            .map(|e| (e.file_name(), e.metadata().unwrap().len()))
            .filter(|(name, _)| !name.to_string_lossy().starts_with("LOG"))
            .collect();
        files.sort();
        files
    };
    let before = listing();
    let reader: SharedStore = Arc::new(RocksStore::open_read_only(dir.path()).unwrap());
    assert!(get_rollout(&reader, id).unwrap().is_some());
    assert!(audit(&[reader], [id]).unwrap().is_clean());
    assert_eq!(listing(), before);
}

#[test]
fn a_missing_store_is_not_created_by_a_reader() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("nothing");
    let err = RocksStore::open_read_only(&path).unwrap_err();
    assert!(matches!(err, StoreError::Missing { .. }), "{err}");
    assert!(!path.exists());
}

#[test]
fn another_format_is_refused_with_both_versions() {
    let dir = tempfile::tempdir().unwrap();
    {
        let store = open(dir.path());
        put(&store, Family::Meta, b"format_version", &9u32.to_be_bytes(), Durability::Synced);
    }
    let err = RocksStore::open(dir.path(), &RocksOptions::default()).unwrap_err();
    assert!(matches!(err, StoreError::Format { expected: 4, got: 9, .. }), "{err}");
    let err = RocksStore::open_read_only(dir.path()).unwrap_err();
    assert!(matches!(err, StoreError::Format { expected: 4, got: 9, .. }), "{err}");
}

#[test]
fn data_without_a_format_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    {
        let store = open(dir.path());
        let mut batch = Batch::new();
        batch.delete(Family::Meta, *b"format_version");
        batch.put(Family::Nodes, *b"k", *b"v");
        store.write(batch, Durability::Synced).unwrap();
    }
    let err = RocksStore::open(dir.path(), &RocksOptions::default()).unwrap_err();
    assert!(matches!(err, StoreError::Format { got: 0, .. }), "{err}");
}

#[test]
fn a_family_of_a_newer_version_is_named() {
    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path()));
    {
        let options = rocksdb::Options::default();
        let names = rocksdb::DB::list_cf(&options, dir.path()).unwrap();
        let mut db = rocksdb::DB::open_cf(&options, dir.path(), names).unwrap();
        db.create_cf("moods", &options).unwrap();
    }
    let err = RocksStore::open(dir.path(), &RocksOptions::default()).unwrap_err();
    assert!(matches!(&err, StoreError::UnknownFamily { name, .. } if name == "moods"), "{err}");
}

/// Flips one byte in the middle of every file with this ending; returns how many there were.
fn damage(dir: &Path, ending: &str) -> usize {
    let mut n = 0;
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == ending) {
            let mut bytes = std::fs::read(&path).unwrap();
            let at = bytes.len() / 2;
            bytes[at] ^= 0x40;
            std::fs::write(&path, bytes).unwrap();
            n += 1;
        }
    }
    n
}

#[test]
fn a_flipped_bit_in_a_blob_file_is_corruption_and_can_be_healed() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = noise(1, 200_000);
    let hash = {
        let store = open(dir.path());
        let hash = put_blob(&store, &bytes, Durability::Synced).unwrap();
        store.flush().unwrap();
        hash
    };
    assert_eq!(damage(dir.path(), "blob"), 1);
    let store = open(dir.path());
    let err = get_blob(&store, hash).unwrap_err();
    assert!(matches!(&err, StoreError::Corrupt { family: Family::Blobs, .. }), "{err}");
    let shared: SharedStore = Arc::new(store);
    let report = audit(std::slice::from_ref(&shared), []).unwrap();
    assert_eq!(report.corrupt.len(), 1, "{report:?}");
    put_blob(&shared, &bytes, Durability::Synced).unwrap();
    assert_eq!(get_blob(&shared, hash).unwrap(), Some(bytes));
}

#[test]
fn a_vanished_log_of_synced_writes_is_an_error_at_open() {
    let dir = tempfile::tempdir().unwrap();
    {
        let store = open(dir.path());
        // A log is entered in the manifest when it is closed, so write beyond one memtable.
        for i in 0..12 {
            put_blob(&store, &noise(i, 1 << 20), Durability::Synced).unwrap();
            put(&store, Family::Nodes, &i.to_be_bytes(), b"v", Durability::Synced);
        }
    }
    let mut logs: Vec<_> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.extension().is_some_and(|e| e == "log"))
        .collect();
    logs.sort();
    assert!(logs.len() > 1, "{logs:?}");
    std::fs::remove_file(&logs[0]).unwrap();
    let err = RocksStore::open(dir.path(), &RocksOptions::default()).unwrap_err();
    assert!(matches!(err, StoreError::Damaged { .. }), "{err:?}");
}

#[test]
fn down_at_the_reserve_bulk_is_refused_then_every_put_and_never_a_delete() {
    let dir = tempfile::tempdir().unwrap();
    let open = |disk_reserve_bytes| -> SharedStore {
        let options = RocksOptions { disk_reserve_bytes, ..RocksOptions::default() };
        Arc::new(RocksStore::open(dir.path(), &options).unwrap())
    };
    let group = || ModelName::new("m").unwrap();
    drop(open(0));
    let store = open(u64::MAX);
    let err = put_blob(&store, b"bytes", Durability::Synced).unwrap_err();
    let StoreError::DiskFull { free_bytes, reserve_bytes: u64::MAX, .. } = err else { panic!("{err}") };
    assert!(!has_blob(&store, Hash::of(b"bytes")).unwrap());
    let err = RaftLog::new(store.clone(), group()).append(&[(1, vec![1])], Durability::Synced).unwrap_err();
    assert!(err.is_retryable() && matches!(err, StoreError::DiskFull { .. }), "{err}");
    delete_blobs(&store, [Hash::of(b"bytes")]).unwrap();
    drop(store);

    let store = open(2 * free_bytes);
    assert!(matches!(put_blob(&store, b"bytes", Durability::Synced), Err(StoreError::DiskFull { .. })));
    RaftLog::new(store, group()).append(&[(1, vec![1])], Durability::Synced).unwrap();
}

#[test]
fn at_its_quota_a_store_refuses_bulk_and_takes_it_again_when_something_was_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let options = RocksOptions { quota_bytes: Some(24 << 20), ..RocksOptions::default() };
    let store: SharedStore = Arc::new(RocksStore::open(dir.path(), &options).unwrap());
    let mut kept = Vec::new();
    let err = loop {
        match put_blob(&store, &noise(kept.len() as u64, 1 << 20), Durability::Synced) {
            Ok(hash) => kept.push(hash),
            Err(e) => break e,
        }
        assert!(kept.len() < 30, "the quota was never reached");
    };
    assert!(matches!(err, StoreError::QuotaReached { quota_bytes: 25_165_824, .. }), "{err}");
    assert!(err.is_retryable());
    assert!(kept.len() >= 8, "{} MiB fitted into 24", kept.len());
    assert_eq!(store.headroom_bytes().unwrap().map(|b| b < 2 << 20), Some(true));
    // Votes and logs go on, and everything can be read.
    RaftLog::new(store.clone(), ModelName::new("m").unwrap()).append(&[(1, vec![1])], Durability::Synced).unwrap();
    for hash in &kept {
        assert!(get_blob(&store, *hash).unwrap().is_some());
    }
    delete_blobs(&store, kept[1..].to_vec()).unwrap();
    store.reclaim().unwrap();
    assert!(store.headroom_bytes().unwrap().unwrap() > 8 << 20, "{:?}", store.headroom_bytes());
    put_blob(&store, &noise(99, 1 << 20), Durability::Synced).unwrap();
    assert!(get_blob(&store, kept[0]).unwrap().is_some());
}

#[test]
fn fsck_names_a_flipped_bit_on_disk_and_quarantines_it() {
    let dir = tempfile::tempdir().unwrap();
    let (bytes, job) = (noise(1, 200_000), JobId([1; 16]));
    let hash = {
        let store = open(dir.path());
        put_rollouts(&store, &[(Hash::of(&bytes), &bytes, job)], Durability::Synced).unwrap();
        let hash = put_blob(&store, &bytes, Durability::Synced).unwrap();
        store.flush().unwrap();
        hash
    };
    assert_eq!(damage(dir.path(), "blob"), 2);
    let store = open(dir.path());
    let report = fsck(&store, &[]).unwrap();
    let found: Vec<_> = report.findings.iter().map(|f| (f.family, f.quarantined, f.mended)).collect();
    assert_eq!(found, [(Family::Blobs, true, false), (Family::Rollouts, true, false)], "{report:?}");
    assert!(report.is_broken());
    assert_eq!(get_blob(&store, hash).unwrap(), None);
    put_blob(&store, &bytes, Durability::Synced).unwrap();
    put_rollouts(&store, &[(hash, &bytes, job)], Durability::Synced).unwrap();
    let report = fsck(&store, &[]).unwrap();
    // The bytes of the suite are no rollout, which is all that is left to find.
    assert!(report.findings.iter().all(|f| f.family == Family::Rollouts), "{report:?}");
    assert_eq!(get_blob(&store, hash).unwrap(), Some(bytes));
}

#[test]
fn a_full_memory_store_refuses_bulk_and_keeps_what_it_has() {
    let store = MemoryStore::new();
    let kept = put_blob(&store, &noise(1, 900), Durability::Synced).unwrap();
    store.set_capacity_bytes(Some(1000));
    let err = put_blob(&store, &noise(2, 900), Durability::Synced).unwrap_err();
    assert!(matches!(err, StoreError::DiskFull { .. }), "{err}");
    put(&store, Family::RaftMeta, b"vote", &[0; 200], Durability::Synced);
    store.set_capacity_bytes(None);
    put_blob(&store, &noise(2, 900), Durability::Synced).unwrap();
    assert!(get_blob(&store, kept).unwrap().is_some());
}

#[test]
fn a_crash_loses_buffered_writes_and_no_synced_one() {
    let store = MemoryStore::new();
    put(&store, Family::Nodes, b"a", b"1", Durability::Buffered);
    put(&store, Family::Nodes, b"b", b"1", Durability::Synced); // makes "a" durable too
    put(&store, Family::Nodes, b"a", b"2", Durability::Buffered);
    put(&store, Family::Nodes, b"c", b"2", Durability::Buffered);
    let mut batch = Batch::new();
    batch.delete_range(Family::Nodes, *b"a", *b"z");
    store.write(batch, Durability::Buffered).unwrap();
    assert_eq!(store.unsynced_writes(), 3);
    let size = MemoryStore::size_bytes;
    store.crash_keeping(1);
    let rows = store.scan(Family::Nodes, b"", None, 9).unwrap();
    assert_eq!(rows, [(b"a".to_vec(), b"2".to_vec()), (b"b".to_vec(), b"1".to_vec())]);
    assert_eq!(size(&store).unwrap(), 4);
    put(&store, Family::Nodes, b"a", b"3", Durability::Buffered);
    store.crash();
    assert_eq!(store.get(Family::Nodes, b"a").unwrap().as_deref(), Some(&b"2"[..]));
    put(&store, Family::Nodes, b"a", b"4", Durability::Buffered);
    store.write(Batch::new(), Durability::Synced).unwrap();
    store.crash();
    assert_eq!(store.get(Family::Nodes, b"a").unwrap().as_deref(), Some(&b"4"[..]));
}

#[test]
fn putting_a_buffered_rollout_again_makes_it_durable() {
    let store = MemoryStore::new();
    let bytes = noise(1, 50);
    let call = [(RolloutId::of(&bytes), bytes.as_slice(), JobId([1; 16]))];
    assert_eq!(put_rollouts(&store, &call, Durability::Buffered).unwrap(), 1);
    assert_eq!(put_rollouts(&store, &call, Durability::Synced).unwrap(), 0);
    store.crash();
    assert!(get_rollout(&store, call[0].0).unwrap().is_some());
}

#[derive(Clone, Debug)]
enum Action {
    Write(Vec<(u8, u8, u8)>, bool),
    Flush,
}

fn action() -> impl Strategy<Value = Action> {
    let op = (0..3u8, 0..12u8, 0..12u8);
    prop_oneof![
        8 => (proptest::collection::vec(op, 0..5), any::<bool>()).prop_map(|(ops, sync)| Action::Write(ops, sync)),
        1 => Just(Action::Flush),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Whatever is written, both implementations show the same, also after a restart of the one on disk.
    #[test]
    fn both_stores_agree(actions in proptest::collection::vec(action(), 1..30)) {
        let dir = tempfile::tempdir().unwrap();
        let (memory, rocks) = (MemoryStore::new(), open(dir.path()));
        for action in actions {
            match action {
                Action::Flush => rocks.flush().unwrap(),
                Action::Write(ops, sync) => {
                    let mut batch = Batch::new();
                    for (kind, a, b) in ops {
                        match kind {
                            0 => batch.put(Family::RaftLog, [a], [b]),
                            1 => batch.delete(Family::RaftLog, [a]),
                            _ => batch.delete_range(Family::RaftLog, [a], [b]),
                        }
                    }
                    let durability = if sync { Durability::Synced } else { Durability::Buffered };
                    memory.write(batch.clone(), durability).unwrap();
                    rocks.write(batch, durability).unwrap();
                }
            }
            let rows = memory.scan(Family::RaftLog, &[], None, 99).unwrap();
            prop_assert_eq!(&rows, &rocks.scan(Family::RaftLog, &[], None, 99).unwrap());
        }
        drop(rocks);
        let rocks = open(dir.path());
        for end in 0..13u8 {
            let last = memory.last_key_before(Family::RaftLog, &[end]).unwrap();
            prop_assert_eq!(last, rocks.last_key_before(Family::RaftLog, &[end]).unwrap());
        }
    }
}
