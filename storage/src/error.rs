//! Why a store could not do what it was asked.

use crate::store::Family;
use starling_protocol::RolloutId;
use starling_protocol::manifest::ManifestError;
use std::path::PathBuf;

/// Why a store could not do what it was asked. A write that failed changed nothing that a later read shows,
/// except where a variant says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another process, or another handle in this one, has the store open. Nothing changed. Retryable once
    /// the other is gone; the operator's fault.
    #[error("store {path} is open elsewhere")]
    Locked {
        /// The store's directory.
        path: PathBuf,
    },
    /// There is no store at the path, and the caller did not ask to create one. Permanent.
    #[error("there is no store at {path}")]
    Missing {
        /// The path asked for.
        path: PathBuf,
    },
    /// The disk has no room left beyond its reserve. Nothing changed, reads still work, and so do deletes as
    /// long as any space is left. Retryable once room was made; nobody's fault.
    #[error("disk full at {path}: {free_bytes} bytes free, {reserve_bytes} are kept in reserve")]
    DiskFull {
        /// The store's directory.
        path: PathBuf,
        /// Free now, as far as known.
        free_bytes: u64,
        /// What this kind of data must leave free.
        reserve_bytes: u64,
    },
    /// The store holds as many bytes as it was allowed to. Nothing changed, reads and deletes work. Retryable once
    /// something was deleted or the quota raised; nobody's fault.
    #[error("quota of store {path} reached: {used_bytes} bytes used, {quota_bytes} allowed")]
    QuotaReached {
        /// The store's directory.
        path: PathBuf,
        /// Taken up now.
        used_bytes: u64,
        /// The most it may take up.
        quota_bytes: u64,
    },
    /// A stored value is not what was written, by the database's checksum or by its hash. Nothing changed and
    /// nothing wrong was returned. Not retryable here: fetch the value from another holder and put it again,
    /// which replaces the bad copy.
    #[error("corrupt value in {family}, key {key}: {reason}")]
    Corrupt {
        /// Where.
        family: Family,
        /// The key in hexadecimal.
        key: String,
        /// What does not fit.
        reason: String,
    },
    /// The database's own files do not fit together. Nothing changed. Permanent: move the directory away and
    /// let the node fetch its data again.
    #[error("store {path} is damaged")]
    Damaged {
        /// The store's directory.
        path: PathBuf,
        /// The database's own words.
        source: rocksdb::Error,
    },
    /// The store was written by another version of Starling. Nothing changed. Permanent for this binary.
    #[error("store {path}: format {got}, this binary knows {expected}")]
    Format {
        /// The store's directory.
        path: PathBuf,
        /// What this binary writes.
        expected: u32,
        /// What the store says; 0 when it says nothing although it holds data.
        got: u32,
    },
    /// The store has a column family that this binary does not know: it is newer. Nothing changed. Permanent
    /// for this binary.
    #[error("store {path} has the column family {name:?}, which this binary does not know")]
    UnknownFamily {
        /// The store's directory.
        path: PathBuf,
        /// The family.
        name: String,
    },
    /// The store was opened for reading. Nothing changed. Permanent; the caller's fault.
    #[error("store {path} is open for reading only")]
    ReadOnly {
        /// The store's directory.
        path: PathBuf,
    },
    /// The bytes to be stored under a rollout's id are not that rollout. Nothing changed, not even the rest of
    /// the same call. Permanent; whoever sent the bytes is at fault.
    #[error("rollout {expected}: the bytes to store have hash {got}")]
    WrongId {
        /// The id given.
        expected: RolloutId,
        /// blake3 of the bytes given.
        got: RolloutId,
    },
    /// A manifest does not describe what its chunks add up to. Nothing changed. Permanent; whoever made the
    /// manifest is at fault.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// Log entries to append do not follow each other. Nothing changed. Permanent; the caller's fault.
    #[error("log entry {got} after {before}, expected {expected}")]
    LogGap {
        /// Index of the entry before.
        before: u64,
        /// The index that must follow.
        expected: u64,
        /// The index given.
        got: u64,
    },
    /// An earlier write failed half-way (the disk was full to the last byte, or failed), and this handle takes
    /// no more writes. Nothing changed, reads work. Not retryable here: drop the handle and open the store again.
    #[error("store {path} must be opened again before it takes writes")]
    NeedsReopen {
        /// The store's directory.
        path: PathBuf,
        /// The database's own words.
        source: rocksdb::Error,
    },
    /// The database failed in another way. A write may or may not be there after a restart. Retry once, then
    /// stop the node: the cause is most often a failing disk.
    #[error("{operation} in store {path}")]
    Database {
        /// What was tried.
        operation: &'static str,
        /// The store's directory.
        path: PathBuf,
        /// The database's own words.
        source: rocksdb::Error,
    },
    /// The operating system refused something outside the database. Nothing changed. Retryable if the cause is.
    #[error("{operation} {path}")]
    Io {
        /// What was tried.
        operation: &'static str,
        /// On which path.
        path: PathBuf,
        /// The system's own words.
        source: std::io::Error,
    },
}

impl StoreError {
    /// Whether the same call may succeed later without repair of the store.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            Self::Locked { .. }
                | Self::DiskFull { .. }
                | Self::QuotaReached { .. }
                | Self::Database { .. }
                | Self::Io { .. }
        )
    }

    pub(crate) fn corrupt(family: Family, key: &[u8], reason: impl Into<String>) -> Self {
        Self::Corrupt { family, key: crate::schema::hex(key), reason: reason.into() }
    }
}
