//! The twin of [`RocksStore`](crate::RocksStore) without a disk: for tests and for the simulator.

use crate::error::StoreError;
use crate::store::{Batch, Durability, Family, KeyValue, Op, Store};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::sync::{Mutex, MutexGuard, PoisonError};

type Table = BTreeMap<Vec<u8>, Vec<u8>>;

/// What a key held before an unsynced write.
#[derive(Debug)]
struct Before {
    family: Family,
    key: Vec<u8>,
    value: Option<Vec<u8>>,
}

#[derive(Debug, Default)]
struct Inner {
    tables: BTreeMap<Family, Table>,
    /// One list for each write since the last synced one, oldest first; undone from the back.
    unsynced: VecDeque<Vec<Before>>,
    used_bytes: u64,
    capacity_bytes: Option<u64>,
}

/// A store in memory that can lose what was not synced, as a machine does that loses power.
#[derive(Debug, Default)]
pub struct MemoryStore {
    inner: Mutex<Inner>,
}

impl MemoryStore {
    /// An empty store without a limit.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Loses power: all writes since the last synced one are gone.
    pub fn crash(&self) {
        self.crash_keeping(0);
    }

    /// Loses power after the disk got hold of the first `writes` of the unsynced writes, as may happen; the
    /// rest is gone.
    pub fn crash_keeping(&self, writes: usize) {
        let mut inner = self.lock();
        while inner.unsynced.len() > writes {
            let Some(undo) = inner.unsynced.pop_back() else {
                break;
            };
            for before in undo.into_iter().rev() {
                inner.set(before.family, before.key, before.value);
            }
        }
        inner.unsynced.clear();
    }

    /// How many writes a power failure could undo.
    #[must_use]
    pub fn unsynced_writes(&self) -> usize {
        self.lock().unsynced.len()
    }

    /// From now on, bulk writes beyond this size fail with [`StoreError::DiskFull`]; `None` lifts the limit.
    pub fn set_capacity_bytes(&self, capacity_bytes: Option<u64>) {
        self.lock().capacity_bytes = capacity_bytes;
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // No code under the lock leaves a half-done change behind when it panics.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Sets or removes a value and returns the one before.
    fn set(&mut self, family: Family, key: Vec<u8>, value: Option<Vec<u8>>) -> Option<Vec<u8>> {
        let key_bytes = key.len() as u64;
        let table = self.tables.entry(family).or_default();
        let (new_bytes, old) = match value {
            Some(v) => (key_bytes + v.len() as u64, table.insert(key, v)),
            None => (0, table.remove(&key)),
        };
        let old_bytes = old.as_ref().map_or(0, |v| key_bytes + v.len() as u64);
        self.used_bytes = (self.used_bytes + new_bytes).saturating_sub(old_bytes);
        old
    }

    fn apply(&mut self, batch: Batch) -> Vec<Before> {
        let mut undo = Vec::new();
        for op in batch.into_ops() {
            match op {
                Op::Put(family, key, value) => {
                    let old = self.set(family, key.clone(), Some(value));
                    undo.push(Before { family, key, value: old });
                }
                Op::Delete(family, key) => {
                    let old = self.set(family, key.clone(), None);
                    undo.push(Before { family, key, value: old });
                }
                Op::DeleteRange(family, from, to) => {
                    let table = self.tables.entry(family).or_default();
                    let keys: Vec<Vec<u8>> = table.range(from..to).map(|(k, _)| k.clone()).collect();
                    for key in keys {
                        let old = self.set(family, key.clone(), None);
                        undo.push(Before { family, key, value: old });
                    }
                }
            }
        }
        undo
    }
}

impl Store for MemoryStore {
    fn get(&self, family: Family, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        Ok(self.lock().tables.get(&family).and_then(|t| t.get(key)).cloned())
    }

    fn write(&self, batch: Batch, durability: Durability) -> Result<(), StoreError> {
        let mut inner = self.lock();
        if let Some(capacity) = inner.capacity_bytes
            && batch.puts_bulk()
            && inner.used_bytes + batch.put_bytes() > capacity
        {
            let free_bytes = capacity.saturating_sub(inner.used_bytes);
            return Err(StoreError::DiskFull { path: "memory".into(), free_bytes, reserve_bytes: 0 });
        }
        let undo = inner.apply(batch);
        match durability {
            Durability::Synced => inner.unsynced.clear(),
            Durability::Buffered => inner.unsynced.push_back(undo),
        }
        Ok(())
    }

    fn scan(&self, family: Family, from: &[u8], to: Option<&[u8]>, limit: usize) -> Result<Vec<KeyValue>, StoreError> {
        if to.is_some_and(|to| to <= from) {
            return Ok(Vec::new());
        }
        let upper = to.map_or(Bound::Unbounded, Bound::Excluded);
        let inner = self.lock();
        let Some(table) = inner.tables.get(&family) else {
            return Ok(Vec::new());
        };
        let pairs = table.range::<[u8], _>((Bound::Included(from), upper));
        Ok(pairs.take(limit).map(|(k, v)| (k.clone(), v.clone())).collect())
    }

    fn last_key_before(&self, family: Family, end: &[u8]) -> Result<Option<KeyValue>, StoreError> {
        let inner = self.lock();
        let Some(table) = inner.tables.get(&family) else {
            return Ok(None);
        };
        let below = (Bound::Unbounded, Bound::Excluded(end));
        Ok(table.range::<[u8], _>(below).next_back().map(|(k, v)| (k.clone(), v.clone())))
    }

    fn size_bytes(&self) -> Result<u64, StoreError> {
        Ok(self.lock().used_bytes)
    }

    fn headroom_bytes(&self) -> Result<Option<u64>, StoreError> {
        let inner = self.lock();
        Ok(inner.capacity_bytes.map(|capacity| capacity.saturating_sub(inner.used_bytes)))
    }

    fn reclaim(&self) -> Result<(), StoreError> {
        Ok(())
    }

    fn flush(&self) -> Result<(), StoreError> {
        self.lock().unsynced.clear();
        Ok(())
    }
}
