//! One group's part of the store, and on which thread it is used.

use std::io;

use serde::{Serialize, de::DeserializeOwned};
use starling_protocol::codec::{decode, encode};
use starling_protocol::control::{ModelState, StepCommitted};
use starling_protocol::planted::{self, Bug};
use starling_protocol::{ModelName, NodeId, PolicyVersion, RolloutId, Term};
use starling_storage::schema::raft_meta_key;
use starling_storage::{Batch, Durability, Family, RaftLog, RaftMeta, SharedStore, StoreError, consumed, steps};

use crate::runtime::blocking;

use super::type_config::{Entry, LogId, StoredMembership, Vote};

/// Longest value read back: a snapshot of some ten million consumed rollouts.
pub(super) const VALUE_LEN_BYTES_MAX: usize = 512 << 20;
/// Rows read in one go.
const PAGE: usize = 1024;

/// The store of one group.
#[derive(Clone, Debug)]
pub(super) struct Disk {
    log: RaftLog,
}

/// What the state machine is after the entry `last_applied`, without the consumed rollouts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, serde::Deserialize)]
pub(super) struct AppliedState {
    pub(super) last_applied: Option<LogId>,
    pub(super) membership: StoredMembership,
    /// Its `consumed` is empty: a row for each step keeps those, so that a step does not rewrite them all.
    pub(super) state: ModelState,
}

fn corrupt(what: &'static str, reason: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{what}: {reason}"))
}

fn read<T: DeserializeOwned>(what: &'static str, bytes: &[u8]) -> io::Result<T> {
    decode(what, bytes, VALUE_LEN_BYTES_MAX).map_err(|e| corrupt(what, e))
}

impl Disk {
    pub(super) fn new(store: SharedStore, group: ModelName) -> Self {
        Self { log: RaftLog::new(store, group) }
    }

    pub(super) fn group(&self) -> &ModelName {
        self.log.group()
    }

    /// Runs `work` where blocking is allowed.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Self) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let disk = self.clone();
        blocking(move || work(&disk)).await.map_err(io::Error::other)?
    }

    fn meta<T: DeserializeOwned>(&self, name: RaftMeta) -> io::Result<Option<T>> {
        let bytes = self.log.meta(name).map_err(failed)?;
        bytes.map(|b| read(name.name(), &b)).transpose()
    }

    // --- log ---

    pub(super) fn vote(&self) -> io::Result<Option<Vote>> {
        if planted::has(Bug::ForgetVote) {
            return Ok(None);
        }
        self.meta(RaftMeta::Vote)
    }
    pub(super) fn save_vote(&self, vote: &Vote) -> io::Result<()> {
        self.log.put_meta(RaftMeta::Vote, &encode(vote), Durability::Synced).map_err(failed)
    }
    pub(super) fn committed(&self) -> io::Result<Option<LogId>> {
        self.meta::<Option<LogId>>(RaftMeta::Committed).map(Option::flatten)
    }
    pub(super) fn save_committed(&self, committed: Option<LogId>) -> io::Result<()> {
        self.log.put_meta(RaftMeta::Committed, &encode(&committed), Durability::Buffered).map_err(failed)
    }
    pub(super) fn last_purged(&self) -> io::Result<Option<LogId>> {
        self.meta(RaftMeta::LastPurged)
    }
    pub(super) fn last_log_id(&self) -> io::Result<Option<LogId>> {
        let last = self.log.last().map_err(failed)?;
        last.map(|(_, bytes)| read::<Entry>("log entry", &bytes).map(|e| e.log_id)).transpose()
    }
    pub(super) fn append(&self, entries: &[(u64, Vec<u8>)]) -> io::Result<()> {
        self.log
            .append(entries, if planted::has(Bug::LoseLogTail) { Durability::Buffered } else { Durability::Synced })
            .map_err(failed)
    }
    /// Entries `from <= index < to`; after the first, only while their bytes stay below `max_bytes`.
    pub(super) fn entries(&self, from: u64, to: u64, max_bytes: usize) -> io::Result<Vec<Entry>> {
        let mut entries = Vec::new();
        let (mut next, mut bytes) = (from, 0_usize);
        // A page of large entries would be read in vain; they are read one by one when there is a limit.
        let page = if max_bytes == usize::MAX { PAGE } else { 16 };
        while next < to {
            let rows = self.log.read(next, to, page).map_err(failed)?;
            let Some((last, _)) = rows.last() else { break };
            next = last + 1;
            for (_, row) in rows {
                bytes = bytes.saturating_add(row.len());
                if bytes > max_bytes && !entries.is_empty() {
                    return Ok(entries);
                }
                entries.push(read::<Entry>("log entry", &row)?);
            }
        }
        Ok(entries)
    }
    pub(super) fn truncate_from(&self, index: u64) -> io::Result<()> {
        self.log.truncate_from(index, Durability::Synced).map_err(failed)
    }
    pub(super) fn purge_to(&self, last_purged: LogId) -> io::Result<()> {
        self.log.purge_to(last_purged.index, &encode(&last_purged), Durability::Buffered).map_err(failed)
    }

    /// Who called this node into the group: as stored, or `inviter`, which is stored then.
    pub(super) fn seat(&self, inviter: Option<NodeId>) -> io::Result<Option<NodeId>> {
        let key = raft_meta_key(self.group(), "inviter");
        if let Some(bytes) = self.log.store().get(Family::RaftMeta, &key).map_err(failed)? {
            return read("inviter", &bytes);
        }
        let mut batch = Batch::new();
        batch.put(Family::RaftMeta, key, encode(&inviter));
        self.log.store().write(batch, Durability::Buffered).map_err(failed)?;
        Ok(inviter)
    }

    // --- state machine ---

    /// The state as last applied; the initial one if nothing was.
    pub(super) fn applied(&self) -> io::Result<AppliedState> {
        let mut applied: AppliedState = self.meta(RaftMeta::AppliedState)?.unwrap_or_default();
        let mut from = self.consumed_key("consumed/");
        let to = self.consumed_key("consumed0"); // the character after '/'
        let mut all = Vec::new();
        loop {
            let rows = self.log.store().scan(Family::RaftMeta, &from, Some(&to), PAGE).map_err(failed)?;
            let Some((last, _)) = rows.last() else { break };
            from = starling_storage::schema::successor(last);
            for (_, row) in rows {
                let (version, ids): (PolicyVersion, Vec<RolloutId>) = read("consumed rollouts", &row)?;
                all.extend(ids.into_iter().map(|id| (id, version)));
            }
        }
        applied.state.consumed = all.into_iter().collect();
        Ok(applied)
    }

    /// Makes sure that a restart finds the group, even if nothing was voted or logged yet.
    pub(super) fn create(&self) -> io::Result<()> {
        if self.log.meta(RaftMeta::AppliedState).map_err(failed)?.is_none() {
            let empty = encode(&AppliedState::default());
            self.log.put_meta(RaftMeta::AppliedState, &empty, Durability::Synced).map_err(failed)?;
        }
        Ok(())
    }

    /// Writes the state and what the applied `steps`, each with its entry's term, add to it, together. Not synced: after a power failure the
    /// entries are in the log and are applied again.
    pub(super) fn save_applied(&self, mut applied: AppliedState, steps: &[(StepCommitted, Term)]) -> io::Result<()> {
        let mut batch = Batch::new();
        for (step, logged) in steps {
            steps::put_step(&mut batch, self.group(), step, *logged);
            self.put_consumed(&mut batch, step.version, &step.consumed);
        }
        applied.state.consumed = Default::default();
        self.log.put_meta_in(&mut batch, RaftMeta::AppliedState, &encode(&applied));
        self.log.store().write(batch, Durability::Buffered).map_err(failed)
    }

    /// Replaces the whole state by a leader's snapshot.
    pub(super) fn install(&self, mut applied: AppliedState) -> io::Result<()> {
        let consumed = std::mem::take(&mut applied.state.consumed);
        let mut by_version = std::collections::BTreeMap::<_, Vec<_>>::new();
        for (id, version) in consumed.to_sorted() {
            by_version.entry(version).or_default().push(id);
        }
        let mut batch = Batch::new();
        batch.delete_range(Family::RaftMeta, self.consumed_key("consumed/"), self.consumed_key("consumed0"));
        for (version, ids) in by_version {
            self.put_consumed(&mut batch, version, &ids);
        }
        self.log.put_meta_in(&mut batch, RaftMeta::AppliedState, &encode(&applied));
        self.log.store().write(batch, Durability::Synced).map_err(failed)
    }

    fn put_consumed(&self, batch: &mut Batch, version: PolicyVersion, ids: &[RolloutId]) {
        consumed::mark_consumed(batch, ids.iter().copied(), version);
        let key = self.consumed_key(&format!("consumed/{:020}", version.0));
        batch.put(Family::RaftMeta, key, encode(&(version, ids)));
    }

    fn consumed_key(&self, name: &str) -> Vec<u8> {
        raft_meta_key(self.group(), name)
    }
}

fn failed(error: StoreError) -> io::Error {
    io::Error::other(error)
}

/// The applied state of every group that `store` knows, without taking part in them: for tools on a stopped node.
///
/// # Errors
/// When the store cannot be read or a state not be decoded.
pub fn stored_states(store: &SharedStore) -> io::Result<Vec<(ModelName, ModelState)>> {
    let models = starling_storage::raft_log::groups(&**store).map_err(failed)?;
    models
        .into_iter()
        .map(|model| {
            let applied = Disk::new(store.clone(), model.clone()).applied()?;
            Ok((model, applied.state))
        })
        .collect()
}
