//! What a node writes, as a sequence that follows from a seed: operation `i` depends on the seed, on `i` and on what the
//! store holds, so a writer and its twin do the same without a word between them.
//!
//! Each operation is one batch: there is no moment at which half of one may be seen.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use starling_protocol::{Hash, JobId, ModelName, NodeId, PolicyVersion, RolloutId, Term};
use starling_storage::acknowledged::record_acknowledged;
use starling_storage::blobs::{delete_blobs, put_blob, put_manifest_bytes, put_unsettled_blobs, settle_blobs};
use starling_storage::consumed::mark_consumed;
use starling_storage::rollouts::{list_unconsumed, put_rollouts};
use starling_storage::schema::log_key;
use starling_storage::steps::{put_step, steps};
use starling_storage::suite::{example_step, noise};
use starling_storage::{Acknowledged, Batch, Durability, Family, RaftLog, RaftMeta, SharedStore, Store};

pub(crate) const JOB: JobId = JobId([5; 16]);
/// Length of weights: two chunks, far more than a block of the log.
const WEIGHTS_LEN_BYTES: usize = 1_200_000;

pub(crate) fn log_of(store: &SharedStore) -> RaftLog {
    RaftLog::new(store.clone(), ModelName::new("m").unwrap())
}

/// The vote: a number that only rises.
pub(crate) fn vote(log: &RaftLog) -> u64 {
    log.meta(RaftMeta::Vote).unwrap().map_or(0, |b| u64::from_be_bytes(b.try_into().unwrap()))
}

/// Does operation `i` and returns when it is as durable as the node asks for.
pub(crate) fn perform(store: &SharedStore, seed: u64, i: u64) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed.wrapping_add(i.wrapping_mul(0x9e37_79b9)));
    let log = log_of(store);
    let last = log.last().unwrap().map(|(index, _)| index);
    match rng.random_range(0..100) {
        // A gateway's episodes end: up to three rollouts, some short enough for a table, some for a blob file.
        0..35 => {
            let sealed: Vec<Vec<u8>> =
                (0..rng.random_range(1..=3)).map(|n| noise(i * 4 + n, rng.random_range(100..9000))).collect();
            let rows: Vec<_> = sealed.iter().map(|b| (RolloutId::of(b), b.as_slice(), JOB)).collect();
            put_rollouts(store, &rows, Durability::Synced).unwrap();
        }
        35..45 => {
            let ids = list_unconsumed(store, JOB, None, 3).unwrap();
            let promise = |id| Acknowledged { id, job: JOB, holders: vec![NodeId([1; 32]), NodeId([2; 32])] };
            let promises: Vec<_> = ids.into_iter().map(promise).collect();
            record_acknowledged(store, &promises, Durability::Buffered).unwrap();
        }
        // A step is applied: the step, what it consumed and the state, in one batch.
        45..60 => {
            let ids = list_unconsumed(store, JOB, None, rng.random_range(1..=4)).unwrap();
            let version = steps(store, log.group()).unwrap().last().map_or(1, |s| s.version.0 + 1);
            let mut batch = Batch::new();
            put_step(&mut batch, log.group(), &example_step(version, ids.clone()), Term(1));
            mark_consumed(&mut batch, ids, PolicyVersion(version));
            log.put_meta_in(&mut batch, RaftMeta::AppliedState, &version.to_be_bytes());
            store.write(batch, Durability::Buffered).unwrap();
        }
        // Entries and the vote of a new term, together.
        60..72 => {
            let next = last.map_or(1, |l| l + 1);
            let mut batch = Batch::new();
            for n in 0..rng.random_range(1..=4) {
                let entry = noise(i * 8 + n, rng.random_range(20..3000));
                batch.put(Family::RaftLog, log_key(log.group(), next + n), entry);
            }
            log.put_meta_in(&mut batch, RaftMeta::Vote, &(vote(&log) + 1).to_be_bytes());
            store.write(batch, Durability::Synced).unwrap();
        }
        72..80 => {
            let next = last.map_or(1, |l| l + 1);
            let rows: Vec<_> = (next..next + 3).map(|n| (n, noise(i * 8 + n, 300))).collect();
            log.append(&rows, Durability::Synced).unwrap();
        }
        80..84 => {
            // The first entry stays, else a log that is only truncated would look like one that lost its entries.
            if let Some((first, _)) = log.first().unwrap() {
                log.truncate_from(last.unwrap().saturating_sub(2).max(first + 1), Durability::Synced).unwrap();
            }
        }
        84..88 => {
            if let Some(last) = last.filter(|l| *l > 12) {
                log.purge_to(last - 10, &(last - 10).to_be_bytes(), Durability::Buffered).unwrap();
            }
        }
        88..94 => drop(put_blob(store, &noise(i, rng.random_range(10..60_000)), Durability::Synced).unwrap()),
        94..95 => drop(put_manifest_bytes(store, &noise(i, WEIGHTS_LEN_BYTES)).unwrap()),
        95..97 => {
            // As a transfer does; one that takes the place of a deleted chunk among them.
            let lens = [40_000, 5000, rng.random_range(10..60_000)];
            let chunks: Vec<_> = (0..).zip(lens).map(|(n, len)| noise(i / 4 * 4 + n, len)).collect();
            let rows: Vec<_> = chunks.iter().map(|c| (Hash::of(c), c.len() as u64)).collect();
            let unsettled = chunks.into_iter().zip(&rows).map(|(c, (hash, _))| (*hash, c)).collect();
            put_unsettled_blobs(store, unsettled).unwrap();
            settle_blobs(store, &rows).unwrap();
        }
        _ => {
            let some = store.scan(Family::Blobs, &[rng.random()], None, 2).unwrap();
            delete_blobs(store, some.into_iter().map(|(key, _)| Hash(key.try_into().unwrap()))).unwrap();
        }
    }
}
