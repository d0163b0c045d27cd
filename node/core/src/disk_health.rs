//! Whether this node's disk takes writes: noticed where they fail, so that no part of the node has to report it.
//!
//! A leader whose disk is full can store no new weights, and one whose disk fails cannot even log: it must not keep the
//! leadership that another could use. `consensus` asks here before it stands, and when it leads.

use starling_storage::{Batch, Durability, Family, SharedStore, Store, StoreError, blobs};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Length of a probe: what fits must be more than a few bytes, or a leader would stand again for a disk with room for
/// nothing else.
const PROBE_LEN_BYTES: usize = 256 << 10;

/// A store that remembers that a write failed until [`WatchedStore::probe`] has succeeded.
#[derive(Clone, Debug)]
pub struct WatchedStore {
    inner: SharedStore,
    failing: Arc<Mutex<Option<String>>>,
}

impl WatchedStore {
    /// Watches over `store`.
    #[must_use]
    pub fn new(store: SharedStore) -> Self {
        Self { inner: store, failing: Arc::default() }
    }
    /// Why the last write failed that did, unless a probe has succeeded since.
    #[must_use]
    pub fn failing(&self) -> Option<String> {
        self.lock().clone()
    }
    /// Writes as much as a chunk of weights, synced, and removes it again. Blocks.
    ///
    /// # Errors
    /// As [`Store::write`].
    pub fn probe(&self) -> Result<(), StoreError> {
        let probe = vec![0xA5; PROBE_LEN_BYTES];
        let hash = blobs::put_blob(&self.inner, &probe, Durability::Synced);
        hash.and_then(|hash| blobs::delete_blobs(&self.inner, [hash]))?;
        *self.lock() = None;
        Ok(())
    }
    /// Notes a write that failed for the disk's sake.
    fn watched(&self, written: Result<(), StoreError>) -> Result<(), StoreError> {
        if let Err(
            error @ (StoreError::DiskFull { .. }
            | StoreError::NeedsReopen { .. }
            | StoreError::Database { .. }
            | StoreError::Io { .. }),
        ) = &written
        {
            let text = in_words(error);
            let mut failing = self.lock();
            if failing.as_ref() != Some(&text) {
                tracing::warn!(error = text, "the store does not take writes");
                *failing = Some(text);
            }
        }
        written
    }
    fn lock(&self) -> MutexGuard<'_, Option<String>> {
        self.failing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An error with its causes, on one line.
fn in_words(error: &StoreError) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(c) = cause {
        text = format!("{text}: {c}");
        cause = c.source();
    }
    text
}

impl Store for WatchedStore {
    fn get(&self, family: Family, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        self.inner.get(family, key)
    }
    fn write(&self, batch: Batch, durability: Durability) -> Result<(), StoreError> {
        self.watched(self.inner.write(batch, durability))
    }
    fn put_unlogged(&self, family: Family, pairs: Vec<(Vec<u8>, Vec<u8>)>) -> Result<(), StoreError> {
        self.watched(self.inner.put_unlogged(family, pairs))
    }
    fn settle(&self, family: Family) -> Result<(), StoreError> {
        self.watched(self.inner.settle(family))
    }
    fn scan(
        &self,
        family: Family,
        from: &[u8],
        to: Option<&[u8]>,
        limit: usize,
    ) -> Result<Vec<(Vec<u8>, Vec<u8>)>, StoreError> {
        self.inner.scan(family, from, to, limit)
    }
    fn last_key_before(&self, family: Family, end: &[u8]) -> Result<Option<(Vec<u8>, Vec<u8>)>, StoreError> {
        self.inner.last_key_before(family, end)
    }
    fn size_bytes(&self) -> Result<u64, StoreError> {
        self.inner.size_bytes()
    }
    fn flush(&self) -> Result<(), StoreError> {
        self.inner.flush()
    }
    fn headroom_bytes(&self) -> Result<Option<u64>, StoreError> {
        self.inner.headroom_bytes()
    }
    fn reclaim(&self) -> Result<(), StoreError> {
        self.inner.reclaim()
    }
}
