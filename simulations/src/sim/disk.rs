//! A node's disk: memory that loses what was not synced, fills up, fails, and flips bits.

use super::recorder::Recorder;
use crate::event::{Event, NodeIx};
use starling_protocol::codec::decode;
use starling_protocol::{Lineage, PolicyVersion, RolloutId};
use starling_storage::schema::{hash_at_end, split_numbered_key, split_raft_meta_key};
use starling_storage::steps::StoredStep;
use starling_storage::{Batch, Durability, Family, KeyValue, MemoryStore, Op, Store, StoreError};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

/// A line has at most 255 before it, a version each.
const LINEAGE_LEN_BYTES_MAX: usize = 4 << 10;

/// See the module's text. It outlives its node's processes.
pub(crate) struct SimDisk {
    node: NodeIx,
    inner: MemoryStore,
    recorder: Recorder,
    fails: AtomicBool,
}

impl fmt::Debug for SimDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimDisk({})", self.node.0)
    }
}

impl SimDisk {
    pub(crate) fn new(node: NodeIx, recorder: Recorder) -> Self {
        Self { node, inner: MemoryStore::new(), recorder, fails: AtomicBool::new(false) }
    }
    /// The machine loses power: writes after the last sync are gone.
    pub(crate) fn lose_power(&self) {
        self.inner.crash();
    }
    /// Bulk writes fail from now on, or no more.
    pub(crate) fn set_full(&self, full: bool) {
        self.inner.set_capacity_bytes(full.then_some(0));
    }
    /// All writes fail from now on, or no more.
    pub(crate) fn set_failing(&self, fails: bool) {
        self.fails.store(fails, Ordering::Relaxed);
    }
    /// Flips a bit in each of `values` stored rollouts and blobs, chosen by `draw`.
    pub(crate) fn corrupt(&self, values: u32, mut draw: impl FnMut(usize) -> usize) {
        for _ in 0..values {
            let mut all = Vec::new();
            for family in [Family::Blobs, Family::Rollouts] {
                let rows = self.inner.scan(family, &[], None, usize::MAX).unwrap_or_default();
                all.extend(rows.into_iter().filter(|(_, v)| !v.is_empty()).map(|(k, v)| (family, k, v)));
            }
            if all.is_empty() {
                return;
            }
            let (family, key, mut value) = all.swap_remove(draw(all.len()));
            let byte = draw(value.len());
            value[byte] ^= 1 << draw(8);
            if let (Family::Rollouts, Some(rollout)) = (family, hash_at_end(&key)) {
                self.recorder.record(Event::Rotted { node: self.node, rollout });
            }
            let mut batch = Batch::new();
            batch.put(family, key, value);
            // Behind the node's back, and as durable as what was there.
            let _always_fits = self.inner.write(batch, Durability::Synced);
        }
    }
    fn tell(&self, ops: &[Op]) {
        // Steps first: their batch marks what they consumed, and a checker wants the reason before the mark.
        for op in ops {
            if let Op::Put(Family::Models, key, value) = op {
                self.tell_step(key, value);
            }
        }
        for op in ops {
            match op {
                Op::Put(Family::Rollouts, key, _) => {
                    if let Some(rollout) = hash_at_end(key) {
                        self.recorder.record(Event::Stored { node: self.node, rollout });
                    }
                }
                Op::Delete(Family::Rollouts, key) => {
                    if let Some(rollout) = hash_at_end(key) {
                        self.recorder.record(Event::Deleted { node: self.node, rollout });
                    }
                }
                Op::Put(Family::Consumed, key, value) => self.tell_consumed(key, value),
                Op::Delete(Family::Consumed, key) => {
                    if let Some(rollout) = hash_at_end(key) {
                        self.recorder.record(Event::Unmarked { node: self.node, rollout });
                    }
                }
                Op::Put(Family::RaftMeta, key, value) => self.tell_line(key, value),
                _ => {}
            }
        }
    }

    fn tell_step(&self, key: &[u8], value: &[u8]) {
        let (Some((model, _)), Ok(row)) = (split_numbered_key(key), StoredStep::from_row(value)) else { return };
        let StoredStep { step, logged } = row;
        self.recorder.record(Event::Applied {
            node: self.node,
            model,
            parent: step.parent,
            version: step.version,
            term: step.term,
            logged,
            weights: step.weights.hash,
            holders: self.recorder.indices(&step.holders),
            consumed: step.consumed,
        });
    }

    fn tell_line(&self, key: &[u8], value: &[u8]) {
        let Some((model, "lineage")) = split_raft_meta_key(key) else { return };
        if let Ok(lineage) = decode::<Lineage>("lineage", value, LINEAGE_LEN_BYTES_MAX) {
            self.recorder.record(Event::Entered { node: self.node, model, lineage });
        }
    }

    fn tell_consumed(&self, key: &[u8], value: &[u8]) {
        let rollout: Option<RolloutId> = hash_at_end(key);
        let version = value.try_into().map(u64::from_be_bytes).map(PolicyVersion);
        if let (Some(rollout), Ok(version)) = (rollout, version) {
            self.recorder.record(Event::MarkedConsumed { node: self.node, rollout, version });
        }
    }
}

impl Store for SimDisk {
    fn get(&self, family: Family, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        self.inner.get(family, key)
    }
    fn write(&self, batch: Batch, durability: Durability) -> Result<(), StoreError> {
        if self.fails.load(Ordering::Relaxed) {
            return Err(StoreError::Io {
                operation: "write",
                path: format!("disk of node {}", self.node.0).into(),
                source: std::io::Error::other("simulated failure"),
            });
        }
        let ops = batch.ops().to_vec();
        self.inner.write(batch, durability)?;
        self.tell(&ops);
        if durability == Durability::Synced {
            self.recorder.record(Event::Synced { node: self.node });
        }
        Ok(())
    }
    fn scan(&self, family: Family, from: &[u8], to: Option<&[u8]>, limit: usize) -> Result<Vec<KeyValue>, StoreError> {
        self.inner.scan(family, from, to, limit)
    }
    fn last_key_before(&self, family: Family, end: &[u8]) -> Result<Option<KeyValue>, StoreError> {
        self.inner.last_key_before(family, end)
    }
    fn size_bytes(&self) -> Result<u64, StoreError> {
        self.inner.size_bytes()
    }
    fn headroom_bytes(&self) -> Result<Option<u64>, StoreError> {
        self.inner.headroom_bytes()
    }
    fn reclaim(&self) -> Result<(), StoreError> {
        self.inner.reclaim()
    }
    fn flush(&self) -> Result<(), StoreError> {
        self.inner.flush()
    }
}
