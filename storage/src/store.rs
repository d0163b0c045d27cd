//! The trait: ordered bytes in column families, atomic batches, stated durability.

use crate::error::StoreError;
use std::fmt;
use std::sync::Arc;

/// A column family: one ordered key space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// Chunks of weights and files, by hash.
    Blobs,
    /// Length of each chunk, by hash: whether it is here, without reading it.
    BlobIndex,
    /// Sealed rollouts, by id.
    Rollouts,
    /// Index: job, rollout id.
    RolloutsByJob,
    /// Consumed rollouts, by id.
    Consumed,
    /// Committed steps, by model and version.
    Models,
    /// Raft log entries, by group and index.
    RaftLog,
    /// Raft metadata, by group and name.
    RaftMeta,
    /// Rollouts that this gateway acknowledged, by id.
    Acknowledged,
    /// Values that were found corrupt, by family and key: for people to look at.
    Quarantine,
    /// Known nodes: a cache, free for the node to use.
    Nodes,
    /// Format version and single values of the node.
    Meta,
}

impl Family {
    /// All of them, in the order of their declaration.
    pub const ALL: [Self; 12] = [
        Self::Blobs,
        Self::BlobIndex,
        Self::Rollouts,
        Self::RolloutsByJob,
        Self::Consumed,
        Self::Models,
        Self::RaftLog,
        Self::RaftMeta,
        Self::Acknowledged,
        Self::Quarantine,
        Self::Nodes,
        Self::Meta,
    ];

    /// Its name on disk.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Blobs => "blobs",
            Self::BlobIndex => "blob_index",
            Self::Rollouts => "rollouts",
            Self::RolloutsByJob => "rollouts_by_job",
            Self::Consumed => "consumed",
            Self::Models => "models",
            Self::RaftLog => "raft_log",
            Self::RaftMeta => "raft_meta",
            Self::Acknowledged => "acknowledged",
            Self::Quarantine => "quarantine",
            Self::Nodes => "nodes",
            Self::Meta => "meta",
        }
    }

    /// Whether it holds large values. Bulk data is refused once the disk is down to its reserve, of which the
    /// small families (votes, log, consumed set) may use the most.
    #[must_use]
    pub fn is_bulk(self) -> bool {
        matches!(self, Self::Blobs | Self::Rollouts)
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a write has survived when it returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Durability {
    /// In the log, not synced: survives the death of the process, perhaps not of the machine. After a power
    /// failure a prefix of the buffered writes is left, never a later one without an earlier one.
    Buffered,
    /// In the log and synced: survives both, and so does every write that returned before this one began.
    /// Concurrent callers share one sync.
    Synced,
}

/// One change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// Set a value.
    Put(Family, Vec<u8>, Vec<u8>),
    /// Remove a key; nothing happens if it is not there.
    Delete(Family, Vec<u8>),
    /// Remove the keys from the first up to, without, the second.
    DeleteRange(Family, Vec<u8>, Vec<u8>),
}

/// Changes that happen together or not at all, across families. Later ones win over earlier ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    ops: Vec<Op>,
}

impl Batch {
    /// An empty batch.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
    /// Sets a value.
    pub fn put(&mut self, family: Family, key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) {
        self.ops.push(Op::Put(family, key.into(), value.into()));
    }
    /// Removes a key.
    pub fn delete(&mut self, family: Family, key: impl Into<Vec<u8>>) {
        self.ops.push(Op::Delete(family, key.into()));
    }
    /// Removes the keys `from <= key < to`; none when `to <= from`.
    pub fn delete_range(&mut self, family: Family, from: impl Into<Vec<u8>>, to: impl Into<Vec<u8>>) {
        let (from, to) = (from.into(), to.into());
        if from < to {
            self.ops.push(Op::DeleteRange(family, from, to));
        }
    }
    /// The changes in order.
    #[must_use]
    pub fn ops(&self) -> &[Op] {
        &self.ops
    }
    pub(crate) fn into_ops(self) -> Vec<Op> {
        self.ops
    }
    /// Whether there is nothing to do.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }
    /// Bytes of the keys and values to be put.
    #[must_use]
    pub fn put_bytes(&self) -> u64 {
        let len = |op: &Op| match op {
            Op::Put(_, k, v) => (k.len() + v.len()) as u64,
            Op::Delete(..) | Op::DeleteRange(..) => 0,
        };
        self.ops.iter().map(len).sum()
    }
    /// Whether it puts anything into a bulk family.
    pub(crate) fn puts_bulk(&self) -> bool {
        self.ops.iter().any(|op| matches!(op, Op::Put(f, ..) if f.is_bulk()))
    }
}

/// A key and its value.
pub type KeyValue = (Vec<u8>, Vec<u8>);

/// Ordered bytes in column families. Keys compare as bytes.
///
/// A read sees every write that returned before it began, from any thread, and all of a batch or nothing of it
/// (per call: two calls may see different states).
pub trait Store: fmt::Debug + Send + Sync + 'static {
    /// The value of `key`.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] when the database's own checksum fails, [`StoreError::Database`] otherwise.
    fn get(&self, family: Family, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError>;

    /// Does all of `batch`, or nothing. An empty batch with [`Durability::Synced`] makes the earlier writes
    /// durable.
    ///
    /// # Errors
    /// [`StoreError::DiskFull`], [`StoreError::ReadOnly`], [`StoreError::NeedsReopen`] or [`StoreError::Database`].
    /// Only after the last may the batch be there, as a whole, after a restart.
    fn write(&self, batch: Batch, durability: Durability) -> Result<(), StoreError>;

    /// Puts large values without the log, so that they are written once and not twice: until [`Store::settle`] they may be gone
    /// with the process, each on its own. Nothing may point to them before.
    ///
    /// # Errors
    /// As [`Store::write`].
    fn put_unlogged(&self, family: Family, pairs: Vec<KeyValue>) -> Result<(), StoreError> {
        let mut batch = Batch::new();
        for (key, value) in pairs {
            batch.put(family, key, value);
        }
        self.write(batch, Durability::Buffered)
    }

    /// Makes what was put into `family` by [`Store::put_unlogged`] before durable.
    ///
    /// # Errors
    /// As [`Store::write`].
    fn settle(&self, family: Family) -> Result<(), StoreError> {
        let _all_families_share_one_log = family;
        self.write(Batch::new(), Durability::Synced)
    }

    /// The first `limit` pairs with `from <= key < to`, ascending; `None` means up to the last key.
    ///
    /// # Errors
    /// As [`Store::get`].
    fn scan(&self, family: Family, from: &[u8], to: Option<&[u8]>, limit: usize) -> Result<Vec<KeyValue>, StoreError>;

    /// The pair with the greatest key below `end`.
    ///
    /// # Errors
    /// As [`Store::get`].
    fn last_key_before(&self, family: Family, end: &[u8]) -> Result<Option<KeyValue>, StoreError>;

    /// Bytes that the store takes up, logs included; an estimate good enough for quotas and people.
    ///
    /// # Errors
    /// [`StoreError::Io`] when the directory cannot be read.
    fn size_bytes(&self) -> Result<u64, StoreError>;

    /// Bytes of bulk data that may still be put before one is refused for the quota or the disk's reserve;
    /// `None` when nothing limits them.
    ///
    /// # Errors
    /// [`StoreError::Io`] when the file system does not say.
    fn headroom_bytes(&self) -> Result<Option<u64>, StoreError>;

    /// Gives the space of deleted values back to the file system; that of large ones comes back in no other way. Copies all
    /// large values that are left: worth it after deleting much, not after each delete.
    ///
    /// # Errors
    /// As [`Store::write`].
    fn reclaim(&self) -> Result<(), StoreError>;

    /// Makes every earlier write durable and leaves little to replay at the next start.
    ///
    /// # Errors
    /// As [`Store::write`].
    fn flush(&self) -> Result<(), StoreError>;
}

/// A store shared between threads.
pub type SharedStore = Arc<dyn Store>;

// Lets `&SharedStore` stand where `&dyn Store` is expected.
impl<S: Store + ?Sized> Store for Arc<S> {
    fn get(&self, family: Family, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        (**self).get(family, key)
    }
    fn write(&self, batch: Batch, durability: Durability) -> Result<(), StoreError> {
        (**self).write(batch, durability)
    }
    fn put_unlogged(&self, family: Family, pairs: Vec<KeyValue>) -> Result<(), StoreError> {
        (**self).put_unlogged(family, pairs)
    }
    fn settle(&self, family: Family) -> Result<(), StoreError> {
        (**self).settle(family)
    }
    fn scan(&self, family: Family, from: &[u8], to: Option<&[u8]>, limit: usize) -> Result<Vec<KeyValue>, StoreError> {
        (**self).scan(family, from, to, limit)
    }
    fn last_key_before(&self, family: Family, end: &[u8]) -> Result<Option<KeyValue>, StoreError> {
        (**self).last_key_before(family, end)
    }
    fn size_bytes(&self) -> Result<u64, StoreError> {
        (**self).size_bytes()
    }
    fn headroom_bytes(&self) -> Result<Option<u64>, StoreError> {
        (**self).headroom_bytes()
    }
    fn reclaim(&self) -> Result<(), StoreError> {
        (**self).reclaim()
    }
    fn flush(&self) -> Result<(), StoreError> {
        (**self).flush()
    }
}
