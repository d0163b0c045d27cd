//! Log and metadata of one Raft group, as bytes: the caller encodes openraft's types.

use crate::error::StoreError;
use crate::schema::{log_key, model_prefix, prefix_end, raft_meta_key, split_numbered_key};
use crate::store::{Batch, Durability, Family, KeyValue, SharedStore, Store};
use starling_protocol::ModelName;

/// What a group keeps beside its log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RaftMeta {
    /// The vote; must be synced before it is answered.
    Vote,
    /// The last log id known as committed; a hint, may be buffered.
    Committed,
    /// The last log id that was purged; written by [`RaftLog::purge_to`].
    LastPurged,
    /// Last applied log id, membership and the state machine's state.
    AppliedState,
    /// The newest snapshot.
    Snapshot,
    /// The line of the group that this node is in, with those before it; absent in generation 0.
    Lineage,
}

impl RaftMeta {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Vote, Self::Committed, Self::LastPurged, Self::AppliedState, Self::Snapshot, Self::Lineage];

    /// Its name in the key.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Vote => "vote",
            Self::Committed => "committed",
            Self::LastPurged => "last_purged",
            Self::AppliedState => "applied_state",
            Self::Snapshot => "snapshot",
            Self::Lineage => "lineage",
        }
    }
}

/// The log of one group in a shared store. Handles are cheap; a group has one writer at a time.
#[derive(Clone, Debug)]
pub struct RaftLog {
    store: SharedStore,
    group: ModelName,
}

impl RaftLog {
    /// The log of `group` in `store`; empty if nothing was written yet.
    #[must_use]
    pub fn new(store: SharedStore, group: ModelName) -> Self {
        Self { store, group }
    }

    /// The group.
    #[must_use]
    pub fn group(&self) -> &ModelName {
        &self.group
    }

    /// The store, for batches that also change other families.
    #[must_use]
    pub fn store(&self) -> &SharedStore {
        &self.store
    }

    /// Appends entries, or replaces those of the same index. Raft needs [`Durability::Synced`].
    ///
    /// # Errors
    /// [`StoreError::LogGap`] when the indices do not follow each other; else as [`Store::write`]. Nothing is
    /// appended then.
    pub fn append(&self, entries: &[(u64, Vec<u8>)], durability: Durability) -> Result<(), StoreError> {
        for pair in entries.windows(2) {
            let (before, got) = (pair[0].0, pair[1].0);
            if before.checked_add(1) != Some(got) {
                return Err(StoreError::LogGap { before, expected: before.saturating_add(1), got });
            }
        }
        let mut batch = Batch::new();
        for (index, entry) in entries {
            batch.put(Family::RaftLog, log_key(&self.group, *index), entry.as_slice());
        }
        self.store.write(batch, durability)
    }

    /// Entries `from <= index < to`, ascending, at most `limit`.
    ///
    /// # Errors
    /// As [`Store::get`].
    pub fn read(&self, from: u64, to: u64, limit: usize) -> Result<Vec<(u64, Vec<u8>)>, StoreError> {
        let (from, to) = (log_key(&self.group, from), log_key(&self.group, to));
        self.store.scan(Family::RaftLog, &from, Some(&to), limit)?.into_iter().map(indexed).collect()
    }

    /// The entry with the smallest index.
    ///
    /// # Errors
    /// As [`Store::get`].
    pub fn first(&self) -> Result<Option<(u64, Vec<u8>)>, StoreError> {
        let from = log_key(&self.group, 0);
        let first = self.store.scan(Family::RaftLog, &from, Some(&self.end()), 1)?;
        first.into_iter().next().map(indexed).transpose()
    }

    /// The entry with the greatest index.
    ///
    /// # Errors
    /// As [`Store::get`].
    pub fn last(&self) -> Result<Option<(u64, Vec<u8>)>, StoreError> {
        let prefix = model_prefix(&self.group);
        let last = self.store.last_key_before(Family::RaftLog, &self.end())?;
        last.filter(|(key, _)| key.starts_with(&prefix)).map(indexed).transpose()
    }

    /// Removes the entries from `index` on, `index` included.
    ///
    /// # Errors
    /// As [`Store::write`].
    pub fn truncate_from(&self, index: u64, durability: Durability) -> Result<(), StoreError> {
        let mut batch = Batch::new();
        batch.delete_range(Family::RaftLog, log_key(&self.group, index), self.end());
        self.store.write(batch, durability)
    }

    /// Removes the entries up to `index`, `index` included, and sets [`RaftMeta::LastPurged`], together.
    ///
    /// # Errors
    /// As [`Store::write`].
    pub fn purge_to(&self, index: u64, last_purged: &[u8], durability: Durability) -> Result<(), StoreError> {
        let end = index.checked_add(1).map_or_else(|| self.end(), |next| log_key(&self.group, next));
        let mut batch = Batch::new();
        batch.delete_range(Family::RaftLog, log_key(&self.group, 0), end);
        self.put_meta_in(&mut batch, RaftMeta::LastPurged, last_purged);
        self.store.write(batch, durability)
    }

    /// Metadata.
    ///
    /// # Errors
    /// As [`Store::get`].
    pub fn meta(&self, name: RaftMeta) -> Result<Option<Vec<u8>>, StoreError> {
        self.store.get(Family::RaftMeta, &raft_meta_key(&self.group, name.name()))
    }

    /// Sets metadata.
    ///
    /// # Errors
    /// As [`Store::write`].
    pub fn put_meta(&self, name: RaftMeta, bytes: &[u8], durability: Durability) -> Result<(), StoreError> {
        let mut batch = Batch::new();
        self.put_meta_in(&mut batch, name, bytes);
        self.store.write(batch, durability)
    }

    /// Adds metadata to a batch, so that it changes together with what else is in there: applied state with
    /// the consumed set and the step.
    pub fn put_meta_in(&self, batch: &mut Batch, name: RaftMeta, bytes: &[u8]) {
        batch.put(Family::RaftMeta, raft_meta_key(&self.group, name.name()), bytes);
    }

    /// Removes log and metadata of the group, as a node does that left it for good.
    ///
    /// # Errors
    /// As [`Store::write`].
    pub fn delete_all(&self, durability: Durability) -> Result<(), StoreError> {
        let mut batch = Batch::new();
        self.delete_all_in(&mut batch);
        self.store.write(batch, durability)
    }

    /// Adds the removal of log and metadata to a batch that puts another line's in their place.
    pub fn delete_all_in(&self, batch: &mut Batch) {
        self.delete_log_in(batch);
        batch.delete_range(Family::RaftMeta, model_prefix(&self.group), self.end());
    }

    /// Adds the removal of all entries to a batch.
    pub fn delete_log_in(&self, batch: &mut Batch) {
        batch.delete_range(Family::RaftLog, model_prefix(&self.group), self.end());
    }

    fn end(&self) -> Vec<u8> {
        // No prefix is all 0xff: a name is text.
        prefix_end(&model_prefix(&self.group)).unwrap_or_default()
    }
}

/// Groups of which `store` has metadata or a log, ascending by name.
///
/// # Errors
/// As [`Store::get`]; [`StoreError::Corrupt`] for a key that names no group.
pub fn groups(store: &dyn Store) -> Result<Vec<ModelName>, StoreError> {
    let mut groups = std::collections::BTreeSet::new();
    for family in [Family::RaftMeta, Family::RaftLog] {
        let mut from = Vec::new();
        while let Some((key, _)) = store.scan(family, &from, None, 1)?.pop() {
            let group = group_of(&key).ok_or_else(|| StoreError::corrupt(family, &key, "no group"))?;
            let Some(next) = prefix_end(&model_prefix(&group)) else {
                break;
            };
            from = next;
            groups.insert(group);
        }
    }
    Ok(groups.into_iter().collect())
}

fn group_of(key: &[u8]) -> Option<ModelName> {
    let (len, rest) = key.split_first()?;
    let name = rest.get(..usize::from(*len))?;
    ModelName::new(std::str::from_utf8(name).ok()?).ok()
}

fn indexed((key, value): KeyValue) -> Result<(u64, Vec<u8>), StoreError> {
    match split_numbered_key(&key) {
        Some((_, index)) => Ok((index, value)),
        None => Err(StoreError::corrupt(Family::RaftLog, &key, "not a group and an index")),
    }
}
