//! The contract of [`Store`] and of the layers above it as checks that any implementation must pass.
//!
//! Each check takes an empty store and panics with the values at fault. `tests/contract.rs` runs all of them
//! on both implementations; what only one can do (reopen, crash) is tested there and in `tests/crash.rs`.
#![expect(clippy::unwrap_used, reason = "a failed check panics, here as in a test")]
#![allow(missing_docs, clippy::missing_panics_doc, reason = "the names are the claims")]

use crate::acknowledged::{Acknowledged, acknowledged, all_acknowledged, record_acknowledged};
use crate::blobs::{
    delete_blobs, get_blob, has_blob, list_blobs, missing_chunks, put_blob, put_manifest_bytes, put_new_blobs,
    put_unsettled_blobs, read_manifest, settle_blobs,
};
use crate::consumed::{all_consumed, is_consumed, mark_consumed, unmark_consumed};
use crate::quarantine::{quarantine_blob, quarantine_rollout, quarantined};
use crate::raft_log::{RaftLog, RaftMeta, groups};
use crate::rollouts::{
    count, delete_rollouts, get_rollout, has_rollout, list_all, list_unconsumed, page, put_rollouts,
};
use crate::steps::{all_steps, delete_step, newest, put_step, step, steps};
use crate::store::{Batch, Durability, Family, SharedStore, Store};
use crate::{StoreError, audit};
use starling_protocol::control::{StepCommitted, StepMetrics};
use starling_protocol::manifest::{CHUNK_LEN_BYTES, Manifest, ManifestError};
use starling_protocol::{Hash, JobId, Lineage, ModelName, NodeId, PolicyVersion, RolloutId, Term, Timestamp};

use Durability::{Buffered, Synced};

/// A named check.
pub type Check = (&'static str, fn(SharedStore));

/// All checks; each wants an empty store of its own.
pub const CHECKS: &[Check] = &[
    ("keys_come_in_byte_order", keys_come_in_byte_order),
    ("scans_respect_bounds_and_limit", scans_respect_bounds_and_limit),
    ("last_key_before_is_strict", last_key_before_is_strict),
    ("families_are_apart", families_are_apart),
    ("later_changes_in_a_batch_win", later_changes_in_a_batch_win),
    ("an_inverted_range_deletes_nothing", an_inverted_range_deletes_nothing),
    ("batches_are_atomic_for_readers", batches_are_atomic_for_readers),
    ("an_empty_batch_may_be_written", an_empty_batch_may_be_written),
    ("size_grows_with_data", size_grows_with_data),
    ("a_blob_is_read_as_written", a_blob_is_read_as_written),
    ("a_corrupt_blob_is_never_returned", a_corrupt_blob_is_never_returned),
    ("manifests_round_trip_and_name_what_is_missing", manifests_round_trip_and_name_what_is_missing),
    ("a_lying_manifest_is_refused", a_lying_manifest_is_refused),
    ("rollouts_are_idempotent_and_indexed", rollouts_are_idempotent_and_indexed),
    ("a_rollout_under_a_wrong_id_stores_nothing", a_rollout_under_a_wrong_id_stores_nothing),
    ("a_corrupt_rollout_is_detected_and_healed", a_corrupt_rollout_is_detected_and_healed),
    ("unconsumed_lists_page_through", unconsumed_lists_page_through),
    (
        "the_index_pages_over_all_jobs_and_forgets_what_was_deleted",
        the_index_pages_over_all_jobs_and_forgets_what_was_deleted,
    ),
    ("a_consumed_and_deleted_rollout_is_not_lost", a_consumed_and_deleted_rollout_is_not_lost),
    ("the_blob_index_follows_the_blobs", the_blob_index_follows_the_blobs),
    ("a_quarantined_value_is_missing_and_can_be_put_again", a_quarantined_value_is_missing_and_can_be_put_again),
    ("acknowledgements_are_listed", acknowledgements_are_listed),
    ("steps_are_ordered_by_version_and_model", steps_are_ordered_by_version_and_model),
    ("a_corrupt_step_is_an_error", a_corrupt_step_is_an_error),
    ("raft_logs_append_truncate_and_purge", raft_logs_append_truncate_and_purge),
    ("raft_groups_do_not_touch_each_other", raft_groups_do_not_touch_each_other),
    ("audit_finds_each_planted_fault", audit_finds_each_planted_fault),
    ("audit_of_a_healthy_store_is_clean", audit_of_a_healthy_store_is_clean),
    ("lines_that_went_apart_may_each_consume_a_rollout", lines_that_went_apart_may_each_consume_a_rollout),
];

fn put(store: &dyn Store, family: Family, key: &[u8], value: &[u8]) {
    let mut batch = Batch::new();
    batch.put(family, key, value);
    store.write(batch, Buffered).unwrap();
}

fn keys(store: &dyn Store, family: Family, from: &[u8], to: Option<&[u8]>, limit: usize) -> Vec<Vec<u8>> {
    store.scan(family, from, to, limit).unwrap().into_iter().map(|(k, _)| k).collect()
}

fn name(s: &str) -> ModelName {
    ModelName::new(s).unwrap()
}

/// `len` bytes that depend on `seed` and compress badly.
#[must_use]
pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x.to_le_bytes()[3]
    };
    (0..len).map(|_| next()).collect()
}

/// A step to `version` that consumed `consumed`.
#[must_use]
pub fn example_step(version: u64, consumed: Vec<RolloutId>) -> StepCommitted {
    StepCommitted {
        job: JobId([7; 16]),
        term: Term(1),
        parent: PolicyVersion(version.saturating_sub(1)),
        version: PolicyVersion(version),
        weights: Manifest::of(&noise(version, 100)),
        weights_delta: None,
        optimizer_state: None,
        holders: vec![NodeId([1; 32])],
        consumed,
        groups_opened: vec![version],
        at: Timestamp::default(),
        metrics: StepMetrics::default(),
    }
}

fn keys_come_in_byte_order(store: SharedStore) {
    for key in [&b"b"[..], b"", b"\xff\xff", b"a", b"a\0", b"\x00", b"ab"] {
        put(&store, Family::Nodes, key, key);
    }
    let expected = [&b""[..], b"\x00", b"a", b"a\0", b"ab", b"b", b"\xff\xff"];
    assert_eq!(keys(&store, Family::Nodes, b"", None, 100), expected);
    // And the same after everything lies in files.
    store.flush().unwrap();
    assert_eq!(keys(&store, Family::Nodes, b"", None, 100), expected);
}

fn scans_respect_bounds_and_limit(store: SharedStore) {
    for key in 0..10u8 {
        put(&store, Family::Nodes, &[key], &[key, key]);
    }
    let scan = |from: &[u8], to: Option<&[u8]>, limit| keys(&store, Family::Nodes, from, to, limit).concat();
    assert_eq!(scan(&[3], Some(&[6]), 100), [3, 4, 5]);
    assert_eq!(scan(&[3], Some(&[6]), 2), [3, 4]);
    assert_eq!(scan(&[8], None, 100), [8, 9]);
    assert_eq!(scan(&[3], Some(&[3]), 100), [0u8; 0]);
    assert_eq!(scan(&[6], Some(&[3]), 100), [0u8; 0]);
    assert_eq!(scan(&[0], None, 0), [0u8; 0]);
    assert_eq!(scan(&[10], None, 100), [0u8; 0]);
    assert_eq!(store.scan(Family::Nodes, &[9], None, 1).unwrap(), [(vec![9], vec![9, 9])]);
}

fn last_key_before_is_strict(store: SharedStore) {
    let last = |end: &[u8]| store.last_key_before(Family::Nodes, end).unwrap().map(|(k, _)| k);
    assert_eq!(last(&[9]), None);
    for key in [2u8, 4] {
        put(&store, Family::Nodes, &[key], &[key]);
    }
    assert_eq!(last(&[2]), None);
    assert_eq!(last(&[2, 0]), Some(vec![2]));
    assert_eq!(last(&[4]), Some(vec![2]));
    assert_eq!(last(&[255]), Some(vec![4]));
    assert_eq!(last(&[]), None);
}

fn families_are_apart(store: SharedStore) {
    for (i, family) in Family::ALL.iter().enumerate() {
        put(&store, *family, b"key", &noise(i as u64, 8));
    }
    for (i, family) in Family::ALL.iter().enumerate() {
        assert_eq!(store.get(*family, b"key").unwrap(), Some(noise(i as u64, 8)), "{family}");
        assert_eq!(store.get(*family, b"other").unwrap(), None, "{family}");
    }
    let mut batch = Batch::new();
    batch.delete(Family::Nodes, b"key".as_slice());
    store.write(batch, Buffered).unwrap();
    assert_eq!(store.get(Family::Nodes, b"key").unwrap(), None);
    assert!(store.get(Family::Models, b"key").unwrap().is_some());
}

fn later_changes_in_a_batch_win(store: SharedStore) {
    put(&store, Family::RaftLog, &[1], b"old");
    let mut batch = Batch::new();
    batch.put(Family::RaftLog, [2], *b"gone");
    batch.delete_range(Family::RaftLog, [0], [3]);
    batch.put(Family::RaftLog, [1], *b"first");
    batch.put(Family::RaftLog, [1], *b"new");
    batch.put(Family::RaftLog, [3], *b"x");
    batch.delete(Family::RaftLog, [3]);
    batch.delete(Family::RaftLog, [9]);
    store.write(batch, Synced).unwrap();
    for _ in 0..2 {
        assert_eq!(store.scan(Family::RaftLog, &[], None, 9).unwrap(), [(vec![1], b"new".to_vec())]);
        store.flush().unwrap();
    }
}

fn an_inverted_range_deletes_nothing(store: SharedStore) {
    put(&store, Family::RaftLog, &[5], b"kept");
    let mut batch = Batch::new();
    batch.delete_range(Family::RaftLog, [9], [1]);
    batch.delete_range(Family::RaftLog, [5], [5]);
    assert!(batch.is_empty());
    store.write(batch, Buffered).unwrap();
    assert_eq!(keys(&store, Family::RaftLog, &[], None, 9), [[5]]);
}

fn batches_are_atomic_for_readers(store: SharedStore) {
    const ROUNDS: u32 = 300;
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for round in 0..ROUNDS {
                let mut batch = Batch::new();
                for key in 0..8u8 {
                    batch.put(Family::Nodes, [key], round.to_be_bytes());
                }
                store.write(batch, Buffered).unwrap();
            }
        });
        while !writer.is_finished() {
            let rows = store.scan(Family::Nodes, &[], None, 9).unwrap();
            assert!(rows.is_empty() || rows.len() == 8, "{} of 8 rows", rows.len());
            assert!(rows.windows(2).all(|w| w[0].1 == w[1].1), "a torn batch: {rows:?}");
        }
    });
    let rows = store.scan(Family::Nodes, &[], None, 9).unwrap();
    assert!(rows.iter().all(|(_, v)| v == &(ROUNDS - 1).to_be_bytes()));
}

fn an_empty_batch_may_be_written(store: SharedStore) {
    store.write(Batch::new(), Buffered).unwrap();
    store.write(Batch::new(), Synced).unwrap();
    assert!(keys(&store, Family::Nodes, &[], None, 9).is_empty());
}

fn size_grows_with_data(store: SharedStore) {
    let before = store.size_bytes().unwrap();
    put_blob(&store, &noise(1, 300_000), Synced).unwrap();
    let after = store.size_bytes().unwrap();
    assert!(after >= before + 300_000, "{before} then {after} bytes");
}

fn a_blob_is_read_as_written(store: SharedStore) {
    // Around the length from which values lie in blob files, empty and a whole chunk.
    for len in [0, 1, 4095, 4096, 4097, CHUNK_LEN_BYTES] {
        let bytes = noise(len as u64, len);
        let hash = Hash::of(&bytes);
        assert!(!has_blob(&store, hash).unwrap());
        assert_eq!(get_blob(&store, hash).unwrap(), None);
        assert_eq!(put_blob(&store, &bytes, Synced).unwrap(), hash);
        assert_eq!(put_blob(&store, &bytes, Buffered).unwrap(), hash);
        assert_eq!(get_blob(&store, hash).unwrap(), Some(bytes.clone()), "{len} bytes");
        store.flush().unwrap();
        assert_eq!(get_blob(&store, hash).unwrap(), Some(bytes), "{len} bytes, flushed");
    }
}

fn a_corrupt_blob_is_never_returned(store: SharedStore) {
    let good = noise(1, 5000);
    let hash = Hash::of(&good);
    let mut bad = good.clone();
    bad[1234] ^= 1;
    put(&store, Family::Blobs, &hash.0, &bad);
    let err = get_blob(&store, hash).unwrap_err();
    assert!(
        matches!(&err, StoreError::Corrupt { family: Family::Blobs, key, .. } if *key == hash.to_string()),
        "{err}"
    );
    let manifest = Manifest::of(&good);
    assert!(matches!(read_manifest(&store, &manifest), Err(StoreError::Corrupt { .. })));
    // Putting the good bytes again replaces the bad copy.
    put_blob(&store, &good, Synced).unwrap();
    assert_eq!(get_blob(&store, hash).unwrap(), Some(good));
}

fn manifests_round_trip_and_name_what_is_missing(store: SharedStore) {
    let bytes = noise(3, 5 * CHUNK_LEN_BYTES + 77);
    let manifest = Manifest::of(&bytes);
    assert_eq!(missing_chunks(&store, &manifest).unwrap(), manifest.chunks);
    assert_eq!(read_manifest(&store, &manifest).unwrap(), None);
    assert_eq!(put_manifest_bytes(&store, &bytes).unwrap(), manifest);
    assert!(missing_chunks(&store, &manifest).unwrap().is_empty());
    assert_eq!(read_manifest(&store, &manifest).unwrap(), Some(bytes.clone()));
    assert_eq!(put_manifest_bytes(&store, &bytes).unwrap(), manifest);
    delete_blobs(&store, [manifest.chunks[2]]).unwrap();
    assert_eq!(missing_chunks(&store, &manifest).unwrap(), [manifest.chunks[2]]);
    assert_eq!(read_manifest(&store, &manifest).unwrap(), None);

    let empty = put_manifest_bytes(&store, &[]).unwrap();
    assert_eq!(read_manifest(&store, &empty).unwrap(), Some(Vec::new()));
    // Equal chunks are stored once and asked for once.
    let zeros = Manifest::of(&vec![0; 3 * CHUNK_LEN_BYTES]);
    assert_eq!(missing_chunks(&store, &zeros).unwrap(), [zeros.chunks[0]]);
}

fn a_lying_manifest_is_refused(store: SharedStore) {
    let mut manifest = put_manifest_bytes(&store, &noise(4, 10)).unwrap();
    manifest.hash = Hash::of(b"something else");
    let refused = read_manifest(&store, &manifest);
    assert!(matches!(refused, Err(StoreError::Manifest(ManifestError::WrongHash { len_bytes: 10, .. }))));
    manifest.len_bytes = u64::MAX;
    let refused = read_manifest(&store, &manifest);
    assert!(matches!(refused, Err(StoreError::Manifest(ManifestError::ChunkCount { got: 1, .. }))));
}

fn rollouts(seed: u64, n: u64) -> Vec<(RolloutId, Vec<u8>)> {
    let mut all: Vec<_> = (0..n)
        .map(|i| noise(seed + i, 100 + 700 * usize::try_from(i % 10).unwrap()))
        .map(|bytes| (RolloutId::of(&bytes), bytes))
        .collect();
    all.sort();
    all
}

fn borrowed(all: &[(RolloutId, Vec<u8>)], job: JobId) -> Vec<(RolloutId, &[u8], JobId)> {
    all.iter().map(|(id, bytes)| (*id, bytes.as_slice(), job)).collect()
}

fn rollouts_are_idempotent_and_indexed(store: SharedStore) {
    let (job, other) = (JobId([255; 16]), JobId([1; 16]));
    let all = rollouts(1, 20);
    let ids: Vec<RolloutId> = all.iter().map(|(id, _)| *id).collect();
    assert_eq!(put_rollouts(&store, &borrowed(&all, job), Synced).unwrap(), 20);
    assert_eq!(put_rollouts(&store, &borrowed(&all[..7], job), Synced).unwrap(), 0);
    assert_eq!(put_rollouts(&store, &borrowed(&rollouts(500, 3), other), Buffered).unwrap(), 3);
    for (id, bytes) in &all {
        assert_eq!(get_rollout(&store, *id).unwrap().as_ref(), Some(bytes));
        assert!(has_rollout(&store, *id).unwrap());
    }
    assert_eq!(list_all(&store, job, None, 100).unwrap(), ids);
    assert_eq!(list_all(&store, job, Some(ids[4]), 3).unwrap(), ids[5..8]);
    assert_eq!(list_all(&store, job, Some(ids[19]), 3).unwrap(), []);
    assert_eq!((count(&store, job).unwrap(), count(&store, other).unwrap()), (20, 3));
    assert_eq!(count(&store, JobId([0; 16])).unwrap(), 0);
    assert_eq!(get_rollout(&store, Hash([0; 32])).unwrap(), None);
    put_rollouts(&store, &[], Synced).unwrap();
}

fn a_rollout_under_a_wrong_id_stores_nothing(store: SharedStore) {
    let all = rollouts(1, 2);
    let wrong = Hash([9; 32]);
    let calls = [(all[0].0, all[0].1.as_slice(), JobId([1; 16])), (wrong, all[1].1.as_slice(), JobId([1; 16]))];
    let err = put_rollouts(&store, &calls, Synced).unwrap_err();
    assert!(matches!(err, StoreError::WrongId { expected, got } if expected == wrong && got == all[1].0), "{err}");
    assert!(!has_rollout(&store, all[0].0).unwrap());
    assert_eq!(count(&store, JobId([1; 16])).unwrap(), 0);
}

fn a_corrupt_rollout_is_detected_and_healed(store: SharedStore) {
    let (job, all) = (JobId([1; 16]), rollouts(1, 1));
    let (id, bytes) = &all[0];
    put(&store, Family::Rollouts, &id.0, b"not it");
    let err = get_rollout(&store, *id).unwrap_err();
    assert!(matches!(err, StoreError::Corrupt { family: Family::Rollouts, .. }), "{err}");
    assert_eq!(put_rollouts(&store, &borrowed(&all, job), Synced).unwrap(), 1);
    assert_eq!(get_rollout(&store, *id).unwrap().as_ref(), Some(bytes));
}

fn unconsumed_lists_page_through(store: SharedStore) {
    // More than the pages of the implementation.
    let (job, all) = (JobId([3; 16]), rollouts(1, 1300));
    put_rollouts(&store, &borrowed(&all, job), Buffered).unwrap();
    let used: Vec<RolloutId> = all.iter().take(1100).map(|(id, _)| *id).collect();
    let mut batch = Batch::new();
    mark_consumed(&mut batch, used.iter().copied(), PolicyVersion(5));
    store.write(batch, Synced).unwrap();
    let left: Vec<RolloutId> = all[1100..].iter().map(|(id, _)| *id).collect();
    assert_eq!(list_unconsumed(&store, job, None, usize::MAX).unwrap(), left);
    assert_eq!(list_unconsumed(&store, job, None, 2).unwrap(), left[..2]);
    assert_eq!(list_unconsumed(&store, job, Some(left[1]), 2).unwrap(), left[2..4]);
    assert_eq!(list_unconsumed(&store, job, None, 0).unwrap(), []);
    assert_eq!(is_consumed(&store, used[0]).unwrap(), Some(PolicyVersion(5)));
    assert_eq!(is_consumed(&store, left[0]).unwrap(), None);
    let mut batch = Batch::new();
    unmark_consumed(&mut batch, used[..2].iter().copied());
    store.write(batch, Synced).unwrap();
    assert_eq!(is_consumed(&store, used[0]).unwrap(), None);
    assert_eq!(list_unconsumed(&store, job, None, usize::MAX).unwrap().len(), left.len() + 2);
    let mut batch = Batch::new();
    mark_consumed(&mut batch, used[..2].iter().copied(), PolicyVersion(5));
    store.write(batch, Synced).unwrap();
    let marked: Vec<_> = used.iter().map(|id| (*id, PolicyVersion(5))).collect();
    assert_eq!(all_consumed(&store).unwrap(), marked);
    assert_eq!(count(&store, job).unwrap(), 1300);
}

/// Ten rollouts of two jobs, of which the steps to versions 1 and 2 consumed the first two of each job.
fn some_rollouts(store: &dyn Store) -> Vec<(JobId, RolloutId)> {
    let mut all = Vec::new();
    for i in 0..10u8 {
        let bytes = noise(u64::from(i) + 40, 64);
        let (id, job) = (Hash::of(&bytes), JobId([i % 2; 16]));
        put_rollouts(store, &[(id, &bytes, job)], Synced).unwrap();
        all.push((job, id));
    }
    all.sort_unstable();
    let mut batch = Batch::new();
    for (version, at) in [(1, 0), (2, 5)] {
        let consumed = vec![all[at].1, all[at + 1].1];
        mark_consumed(&mut batch, consumed.clone(), PolicyVersion(version));
        put_step(&mut batch, &name("m"), &example_step(version, consumed), Term(1));
    }
    store.write(batch, Synced).unwrap();
    all
}

fn the_index_pages_over_all_jobs_and_forgets_what_was_deleted(store: SharedStore) {
    let all = some_rollouts(&store);
    let mut rows = Vec::new();
    while let Ok(next) = page(&store, rows.last().map(|(job, id, _)| (*job, *id)), 3) {
        if next.is_empty() {
            break;
        }
        rows.extend(next);
    }
    assert_eq!(rows.iter().map(|(job, id, _)| (*job, *id)).collect::<Vec<_>>(), all);
    let consumed: Vec<_> = rows.iter().map(|(_, _, by)| by.map(|v| v.0)).collect();
    assert_eq!(consumed[..6], [Some(1), Some(1), None, None, None, Some(2)]);
    delete_rollouts(&store, &all[..2]).unwrap();
    assert_eq!(page(&store, None, 100).unwrap().len(), 8);
    assert!(!has_rollout(&store, all[0].1).unwrap() && has_rollout(&store, all[2].1).unwrap());
    assert!(is_consumed(&store, all[0].1).unwrap().is_some(), "it must never be taken for a new one");
}

fn a_consumed_and_deleted_rollout_is_not_lost(store: SharedStore) {
    let all = some_rollouts(&store);
    let promised: Vec<RolloutId> = all.iter().map(|(_, id)| *id).collect();
    delete_rollouts(&store, &[all[0], all[5]]).unwrap();
    let report = audit(std::slice::from_ref(&store), promised.clone()).unwrap();
    assert!(report.is_clean(), "{report:?}");
    assert_eq!((report.acknowledged, report.consumed_and_deleted, report.held), (10, 2, 8));
    // One that no step consumed is lost, whatever a consumed set says.
    delete_rollouts(&store, &[all[2]]).unwrap();
    let mut batch = Batch::new();
    mark_consumed(&mut batch, [all[2].1], PolicyVersion(9));
    store.write(batch, Synced).unwrap();
    assert_eq!(audit(std::slice::from_ref(&store), promised).unwrap().lost, [all[2].1]);
}

fn the_blob_index_follows_the_blobs(store: SharedStore) {
    let m = put_manifest_bytes(&store, &noise(9, 2 * CHUNK_LEN_BYTES + 5)).unwrap();
    let one = put_blob(&store, b"one", Synced).unwrap();
    put_new_blobs(&store, vec![(Hash::of(b"three"), b"three".to_vec())], Synced).unwrap();
    delete_blobs(&store, [Hash::of(b"three")]).unwrap();
    put_unsettled_blobs(&store, vec![(Hash::of(b"two"), b"two".to_vec())]).unwrap();
    assert!(!has_blob(&store, Hash::of(b"two")).unwrap(), "a crash may still take it away");
    settle_blobs(&store, &[(Hash::of(b"two"), 3)]).unwrap();
    let mut expected: Vec<(Hash, u64)> = vec![(one, 3), (Hash::of(b"two"), 3), (m.chunks[2], 5)];
    expected.extend(m.chunks[..2].iter().map(|c| (*c, CHUNK_LEN_BYTES as u64)));
    expected.sort_unstable();
    let first = list_blobs(&store, None, 2).unwrap();
    let rest = list_blobs(&store, Some(first[1].0), 100).unwrap();
    assert_eq!([first, rest].concat(), expected);
    delete_blobs(&store, [one]).unwrap();
    assert!(!has_blob(&store, one).unwrap());
    assert_eq!(list_blobs(&store, None, 100).unwrap().len(), 4);
}

fn a_quarantined_value_is_missing_and_can_be_put_again(store: SharedStore) {
    let bytes = noise(3, 5000);
    let (id, job) = (Hash::of(&bytes), JobId([1; 16]));
    put_blob(&store, &bytes, Synced).unwrap();
    put_rollouts(&store, &[(id, &bytes, job)], Synced).unwrap();
    put(&store, Family::Blobs, &id.0, b"bad");
    put(&store, Family::Rollouts, &id.0, b"worse");
    quarantine_blob(&store, id).unwrap();
    quarantine_rollout(&store, Some(job), id).unwrap();
    assert_eq!((get_blob(&store, id).unwrap(), get_rollout(&store, id).unwrap()), (None, None));
    assert!(!has_blob(&store, id).unwrap() && page(&store, None, 9).unwrap().is_empty());
    let kept = quarantined(&store).unwrap();
    assert_eq!(kept, [(format!("blobs/{id}"), 3), (format!("rollouts/{id}"), 5)]);
    put_blob(&store, &bytes, Synced).unwrap();
    put_rollouts(&store, &[(id, &bytes, job)], Synced).unwrap();
    assert_eq!((get_blob(&store, id).unwrap(), get_rollout(&store, id).unwrap()), (Some(bytes.clone()), Some(bytes)));
    crate::quarantine::empty(&store).unwrap();
    assert_eq!(quarantined(&store).unwrap(), []);
}

fn acknowledgements_are_listed(store: SharedStore) {
    let mut all: Vec<Acknowledged> = (0..1500u64)
        .map(|i| Acknowledged {
            id: Hash::of(&i.to_be_bytes()),
            job: JobId([2; 16]),
            holders: vec![NodeId([i.to_be_bytes()[7]; 32]); usize::try_from(i % 3).unwrap()],
        })
        .collect();
    record_acknowledged(&store, &all, Synced).unwrap();
    record_acknowledged(&store, &all[..5], Synced).unwrap();
    all.sort_by_key(|a| a.id);
    assert_eq!(all_acknowledged(&store).unwrap(), all);
    assert_eq!(acknowledged(&store, Some(all[2].id), 2).unwrap(), all[3..5]);
    put(&store, Family::Acknowledged, &[0; 32], b"\xff");
    assert!(matches!(all_acknowledged(&store), Err(StoreError::Corrupt { family: Family::Acknowledged, .. })));
}

fn steps_are_ordered_by_version_and_model(store: SharedStore) {
    let (a, ab) = (name("a"), name("ab"));
    assert_eq!(newest(&store, &a).unwrap(), None);
    let mut batch = Batch::new();
    for version in [300, 1, 2, 256] {
        put_step(&mut batch, &a, &example_step(version, vec![]), Term(1));
    }
    put_step(&mut batch, &ab, &example_step(999, vec![Hash([1; 32])]), Term(1));
    store.write(batch, Synced).unwrap();
    let versions = |m| steps(&store, m).unwrap().iter().map(|s| s.version.0).collect::<Vec<_>>();
    assert_eq!(versions(&a), [1, 2, 256, 300]);
    assert_eq!(versions(&ab), [999]);
    assert_eq!(newest(&store, &a).unwrap(), Some(example_step(300, vec![])));
    assert_eq!(newest(&store, &ab).unwrap().map(|s| s.version.0), Some(999));
    assert_eq!(newest(&store, &name("aa")).unwrap(), None);
    assert_eq!(step(&store, &a, PolicyVersion(2)).unwrap(), Some(example_step(2, vec![])));
    assert_eq!(step(&store, &a, PolicyVersion(3)).unwrap(), None);
    assert_eq!(all_steps(&store).unwrap().len(), 5);
    let mut batch = Batch::new();
    delete_step(&mut batch, &a, PolicyVersion(256));
    store.write(batch, Synced).unwrap();
    assert_eq!(versions(&a), [1, 2, 300]);
}

fn a_corrupt_step_is_an_error(store: SharedStore) {
    put(&store, Family::Models, &crate::schema::step_key(&name("m"), PolicyVersion(1)), b"\x01");
    assert!(matches!(steps(&store, &name("m")), Err(StoreError::Corrupt { family: Family::Models, .. })));
    assert!(matches!(newest(&store, &name("m")), Err(StoreError::Corrupt { .. })));
}

fn entries(from: u64, to: u64) -> Vec<(u64, Vec<u8>)> {
    (from..to).map(|i| (i, noise(i, 20))).collect()
}

fn raft_logs_append_truncate_and_purge(store: SharedStore) {
    let log = RaftLog::new(store, name("m"));
    assert_eq!((log.first().unwrap(), log.last().unwrap()), (None, None));
    log.append(&[], Synced).unwrap();
    log.append(&entries(0, 300), Synced).unwrap();
    assert_eq!(log.read(250, u64::MAX, usize::MAX).unwrap(), entries(250, 300));
    assert_eq!(log.read(10, 20, 5).unwrap(), entries(10, 15));
    assert_eq!(log.read(20, 10, 5).unwrap(), []);
    log.truncate_from(290, Synced).unwrap();
    assert_eq!(log.last().unwrap(), entries(289, 290).pop());
    log.append(&[(290, b"other".to_vec())], Synced).unwrap();
    assert_eq!(log.last().unwrap(), Some((290, b"other".to_vec())));
    assert_eq!(log.meta(RaftMeta::LastPurged).unwrap(), None);
    log.purge_to(99, b"id of 99", Synced).unwrap();
    assert_eq!(log.first().unwrap(), entries(100, 101).pop());
    assert_eq!(log.meta(RaftMeta::LastPurged).unwrap().as_deref(), Some(b"id of 99".as_slice()));
    log.truncate_from(0, Synced).unwrap();
    assert_eq!((log.first().unwrap(), log.last().unwrap()), (None, None));
    let err = log.append(&[(5, vec![]), (7, vec![])], Synced).unwrap_err();
    assert!(matches!(err, StoreError::LogGap { before: 5, expected: 6, got: 7 }), "{err}");
    assert_eq!(log.last().unwrap(), None);
    log.append(&[(u64::MAX, vec![1])], Synced).unwrap();
    log.purge_to(u64::MAX, b"end", Synced).unwrap();
    assert_eq!(log.last().unwrap(), None);
}

fn raft_groups_do_not_touch_each_other(store: SharedStore) {
    let logs: Vec<RaftLog> = ["a", "ab", "b"].map(|g| RaftLog::new(store.clone(), name(g))).into();
    for (log, i) in logs.iter().zip(1..) {
        log.append(&entries(i, i + 10), Synced).unwrap();
        for meta in RaftMeta::ALL {
            log.put_meta(meta, format!("{} {}", log.group(), meta.name()).as_bytes(), Synced).unwrap();
        }
    }
    assert_eq!(groups(&store).unwrap(), [name("a"), name("ab"), name("b")]);
    logs[0].truncate_from(0, Synced).unwrap();
    logs[1].purge_to(5, b"5", Synced).unwrap();
    assert_eq!(logs[0].read(0, 99, 99).unwrap(), []);
    assert_eq!(logs[1].read(0, 99, 99).unwrap(), entries(6, 12));
    assert_eq!(logs[2].read(0, 99, 99).unwrap(), entries(3, 13));
    assert_eq!(logs[0].meta(RaftMeta::Vote).unwrap().as_deref(), Some(b"a vote".as_slice()));
    logs[1].delete_all(Synced).unwrap();
    assert_eq!(logs[1].meta(RaftMeta::Vote).unwrap(), None);
    assert_eq!(logs[1].last().unwrap(), None);
    assert_eq!(logs[2].meta(RaftMeta::Snapshot).unwrap().as_deref(), Some(b"b snapshot".as_slice()));
    assert_eq!(groups(&store).unwrap(), [name("a"), name("b")]);
}

fn acknowledge(store: &dyn Store, ids: &[RolloutId]) {
    let rows: Vec<_> = ids.iter().map(|id| Acknowledged { id: *id, job: JobId([1; 16]), holders: vec![] }).collect();
    record_acknowledged(store, &rows, Synced).unwrap();
}

fn audit_finds_each_planted_fault(store: SharedStore) {
    let second: SharedStore = std::sync::Arc::new(crate::MemoryStore::new());
    let (job, all) = (JobId([1; 16]), rollouts(1, 12));
    let ids: Vec<RolloutId> = all.iter().map(|(id, _)| *id).collect();
    // 0..8 here, 8..10 on the second store, 10 corrupt here and nowhere else, 11 nowhere.
    put_rollouts(&store, &borrowed(&all[..8], job), Synced).unwrap();
    put_rollouts(&second, &borrowed(&all[8..10], job), Synced).unwrap();
    put(&store, Family::Rollouts, &ids[10].0, b"bad");
    // Corrupt here, intact there: found, not lost.
    put(&store, Family::Rollouts, &ids[9].0, b"bad");
    acknowledge(&store, &ids[..11]);

    let (m, n) = (name("m"), name("n"));
    let mut batch = Batch::new();
    put_step(&mut batch, &m, &example_step(1, ids[0..3].to_vec()), Term(1));
    put_step(&mut batch, &m, &example_step(2, vec![ids[3], ids[4], ids[3]]), Term(1));
    store.write(batch, Synced).unwrap();
    let mut batch = Batch::new();
    put_step(&mut batch, &m, &example_step(1, ids[0..3].to_vec()), Term(1));
    put_step(&mut batch, &m, &example_step(2, vec![ids[4], ids[5]]), Term(1));
    // A step of term 1 in an entry of term 2.
    put_step(&mut batch, &n, &example_step(1, vec![ids[0]]), Term(2));
    second.write(batch, Synced).unwrap();

    let report = audit(&[store.clone(), second], [ids[11], ids[0]]).unwrap();
    assert_eq!(report.acknowledged, 12);
    assert_eq!(report.lost, [ids[10], ids[11]]);
    assert_eq!(report.held, 10);
    assert_eq!((report.steps, report.consumed), (3, 6));
    let v = |model: &ModelName, version| (model.clone(), PolicyVersion(version));
    assert_eq!(report.consumed_twice, [(ids[0], vec![v(&m, 1), v(&n, 1)]), (ids[3], vec![v(&m, 2), v(&m, 2)])]);
    assert_eq!(report.forked_versions, [audit::ModelVersion { model: m, version: PolicyVersion(2) }]);
    assert_eq!(report.deposed, [audit::ModelVersion { model: n, version: PolicyVersion(1) }]);
    let corrupt: Vec<_> = report.corrupt.iter().map(|c| (c.store, c.family, c.key.clone())).collect();
    assert_eq!(corrupt, [9, 10].map(|i| (0, Family::Rollouts, ids[i].to_string())));
    assert!(!report.is_clean());
}

fn lines_that_went_apart_may_each_consume_a_rollout(store: SharedStore) {
    let m = name("m");
    let ids: Vec<RolloutId> = (0..3).map(|n| Hash([n; 32])).collect();
    let line = |n: u8| Lineage::default().opened(PolicyVersion(1), 0, 1, NodeId([n; 32])).unwrap();
    let step = |line: &Lineage, parent: PolicyVersion, consumed: &[RolloutId]| {
        let version = line.next(parent);
        StepCommitted { parent, version, ..example_step(version.0, consumed.to_vec()) }
    };
    let (a, b) = (line(1), line(2));
    let mut batch = Batch::new();
    put_step(&mut batch, &m, &example_step(1, vec![ids[0]]), Term(1));
    // Beyond the fork, and in two lines from it.
    put_step(&mut batch, &m, &example_step(2, vec![ids[1]]), Term(1));
    put_step(&mut batch, &m, &step(&a, PolicyVersion(1), &[ids[1]]), Term(1));
    put_step(&mut batch, &m, &step(&b, PolicyVersion(1), &[ids[1], ids[2]]), Term(1));
    store.write(batch, Synced).unwrap();
    let report = audit(&[store.clone()], []).unwrap();
    assert!(report.is_clean(), "{report:?}");
    assert_eq!((report.steps, report.consumed), (4, 3));
    // Twice in one history: before the fork and after it.
    let again = step(&b, b.line.version(2), &[ids[0]]);
    let mut batch = Batch::new();
    put_step(&mut batch, &m, &again, Term(1));
    store.write(batch, Synced).unwrap();
    let report = audit(&[store], []).unwrap();
    let by = [PolicyVersion(1), again.version].map(|v| (m.clone(), v)).to_vec();
    assert_eq!(report.consumed_twice, [(ids[0], by)]);
}

fn audit_of_a_healthy_store_is_clean(store: SharedStore) {
    let (job, all) = (JobId([1; 16]), rollouts(1, 40));
    let ids: Vec<RolloutId> = all.iter().map(|(id, _)| *id).collect();
    put_rollouts(&store, &borrowed(&all, job), Synced).unwrap();
    put_manifest_bytes(&store, &noise(1, 3_000_000)).unwrap();
    acknowledge(&store, &ids);
    for (chunk, version) in ids.chunks(8).zip(1..) {
        let mut batch = Batch::new();
        put_step(&mut batch, &name("m"), &example_step(version, chunk.to_vec()), Term(1));
        mark_consumed(&mut batch, chunk.iter().copied(), PolicyVersion(version));
        store.write(batch, Synced).unwrap();
    }
    // Twice the same store: replicas agree.
    let report = audit(&[store.clone(), store], []).unwrap();
    assert!(report.is_clean(), "{report:?}");
    assert!(report.corrupt.is_empty());
    assert_eq!((report.acknowledged, report.held, report.consumed, report.steps), (40, 40, 40, 5));
}
