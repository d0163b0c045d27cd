//! One group's part of the store, and on which thread it is used.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex};

use openraft::EntryPayload;
use serde::{Serialize, de::DeserializeOwned};
use starling_protocol::codec::{decode, encode};
use starling_protocol::control::{Applied, ControlEntry, ModelState, StepCommitted};
use starling_protocol::planted::{self, Bug};
use starling_protocol::{Lineage, ModelName, NodeId, PolicyVersion, RolloutId, Term};
use starling_storage::schema::raft_meta_key;
use starling_storage::{Batch, Durability, Family, RaftLog, RaftMeta, SharedStore, StoreError, consumed, steps};

use crate::runtime::blocking;
use crate::watch::lock;

use super::type_config::{Entry, LogId, Seat, StoredMembership, Vote};

/// Longest value read back: a snapshot of some ten million consumed rollouts.
pub(super) const VALUE_LEN_BYTES_MAX: usize = 512 << 20;
/// Rows read in one go.
const PAGE: usize = 1024;

/// The store of one group, as one run of it sees it. Clones are of the same run.
#[derive(Clone, Debug)]
pub(super) struct Disk {
    log: RaftLog,
    /// Set once the run must write no more: what comes after it starts from what is there then.
    retired: Arc<Mutex<bool>>,
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
        Self { log: RaftLog::new(store, group), retired: Arc::default() }
    }

    /// Lets no write of this run through any more; one that is under way is waited for.
    pub(super) async fn retire(&self) {
        let retired = self.run(|d| {
            *lock(&d.retired) = true;
            Ok(())
        });
        if let Err(error) = retired.await {
            tracing::debug!(group = %self.group(), %error, "the node ends");
        }
    }

    /// Writes, unless the run is over.
    fn write(&self, write: impl FnOnce(&RaftLog) -> Result<(), StoreError>) -> io::Result<()> {
        let retired = lock(&self.retired);
        if *retired {
            return Err(io::Error::other(format!("this run of the group of {} is over", self.group())));
        }
        write(&self.log).map_err(failed)
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
        self.write(|log| log.put_meta(RaftMeta::Vote, &encode(vote), Durability::Synced))
    }
    pub(super) fn committed(&self) -> io::Result<Option<LogId>> {
        self.meta::<Option<LogId>>(RaftMeta::Committed).map(Option::flatten)
    }
    pub(super) fn save_committed(&self, committed: Option<LogId>) -> io::Result<()> {
        self.write(|log| log.put_meta(RaftMeta::Committed, &encode(&committed), Durability::Buffered))
    }
    pub(super) fn last_purged(&self) -> io::Result<Option<LogId>> {
        self.meta(RaftMeta::LastPurged)
    }
    pub(super) fn last_log_id(&self) -> io::Result<Option<LogId>> {
        let last = self.log.last().map_err(failed)?;
        last.map(|(_, bytes)| read::<Entry>("log entry", &bytes).map(|e| e.log_id)).transpose()
    }
    pub(super) fn append(&self, entries: &[(u64, Vec<u8>)]) -> io::Result<()> {
        let durability = if planted::has(Bug::LoseLogTail) { Durability::Buffered } else { Durability::Synced };
        self.write(|log| log.append(entries, durability))
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
        self.write(|log| log.truncate_from(index, Durability::Synced))
    }
    pub(super) fn purge_to(&self, last_purged: LogId) -> io::Result<()> {
        self.write(|log| log.purge_to(last_purged.index, &encode(&last_purged), Durability::Buffered))
    }

    /// Who called this node into the group, as stored.
    pub(super) fn inviter(&self) -> io::Result<Option<NodeId>> {
        let bytes = self.log.store().get(Family::RaftMeta, &self.inviter_key()).map_err(failed)?;
        bytes.map_or(Ok(None), |b| read("inviter", &b))
    }

    /// Takes a seat in a group that this node is not in yet: who called it, and into which line. Synced with the first
    /// vote or entry at the latest, which is the first thing that the line must not forget.
    pub(super) fn seat(&self, inviter: Option<NodeId>, lineage: &Lineage) -> io::Result<()> {
        if self.log.store().get(Family::RaftMeta, &self.inviter_key()).map_err(failed)?.is_some() {
            return Ok(());
        }
        let mut batch = Batch::new();
        batch.put(Family::RaftMeta, self.inviter_key(), encode(&inviter));
        self.put_lineage(&mut batch, lineage);
        self.write(|log| log.store().write(batch, Durability::Buffered))
    }

    fn inviter_key(&self) -> Vec<u8> {
        raft_meta_key(self.group(), "inviter")
    }

    // --- lines ---

    /// The line that this node is in.
    pub(super) fn lineage(&self) -> io::Result<Lineage> {
        self.meta(RaftMeta::Lineage).map(Option::unwrap_or_default)
    }

    fn put_lineage(&self, batch: &mut Batch, lineage: &Lineage) {
        self.log.put_meta_in(batch, RaftMeta::Lineage, &encode(lineage));
    }

    /// Opens a new line from the applied state and the log behind it, with `opener` as its only member: all of it, or nothing. `known` is
    /// the greatest generation that it heard of. Log ids go on
    /// growing, so that whoever joins gets a snapshot.
    ///
    /// Entries that were not applied may have been committed: only the lost majority knew. They are taken over, under the
    /// new line's numbers.
    pub(super) fn open_line(&self, (opener, seat): (NodeId, Seat), known: u8, survivors: usize) -> io::Result<Lineage> {
        let mut applied = self.applied()?;
        let from = applied.last_applied.map_or(0, |id| id.index + 1);
        let tail = self.entries(from, u64::MAX, usize::MAX)?;
        let lineage = self.lineage()?.opened(applied.state.version, known, survivors, opener);
        let (before, mut lineage) = (self.lineage()?.line, lineage.map_err(io::Error::other)?);
        let fork = applied.state.version;
        let members = applied.membership.membership().nodes().map(|(n, _)| *n);
        applied.state.kin.extend(members);
        applied.state.lineage = lineage.clone();
        let mut batch = Batch::new();
        for entry in tail {
            applied.last_applied = Some(entry.log_id);
            match entry.payload {
                EntryPayload::Blank => {}
                EntryPayload::Membership(m) => applied.state.kin.extend(m.nodes().map(|(n, _)| *n)),
                EntryPayload::Normal(payload) => {
                    let entry_term = Term(entry.log_id.committed_leader_id().term);
                    let taken = payload.0.taken_over(fork, &before, &lineage.line);
                    let answer = applied.state.apply(entry_term, &taken);
                    if let (Applied::Yes, ControlEntry::StepCommitted(step)) = (answer, taken) {
                        steps::put_step(&mut batch, self.group(), &step, entry_term);
                        self.put_consumed(&mut batch, step.version, &step.consumed);
                    }
                }
            }
        }
        let Some(last) = applied.last_applied.filter(|_| applied.state.model.is_some()) else {
            return Err(io::Error::other("the log has no model that a new line could go on with"));
        };
        lineage.line.steps = applied.state.version.steps();
        let term = lineage.line.first_term().0 + 1;
        let nodes = BTreeMap::from([(opener, seat)]);
        let members = openraft::Membership::new(vec![BTreeSet::from([opener])], nodes);
        applied.membership = StoredMembership::new(Some(last), members.map_err(io::Error::other)?);
        applied.state.lineage = lineage.clone();
        applied.state.consumed = Default::default();
        self.log.delete_log_in(&mut batch);
        self.log.put_meta_in(&mut batch, RaftMeta::Vote, &encode(&Vote::new(term, opener)));
        self.log.put_meta_in(&mut batch, RaftMeta::LastPurged, &encode(&last));
        self.log.put_meta_in(&mut batch, RaftMeta::Committed, &encode(&Some(last)));
        self.log.put_meta_in(&mut batch, RaftMeta::AppliedState, &encode(&applied));
        batch.put(Family::RaftMeta, self.inviter_key(), encode(&None::<NodeId>));
        self.put_lineage(&mut batch, &lineage);
        self.write(|log| log.store().write(batch, Durability::Synced))?;
        Ok(lineage)
    }

    /// Leaves the line for `lineage`, whose leader brings the state: all of it, or nothing. Log, vote and state go, and
    /// of steps and consumed rollouts those that the new line does not have.
    pub(super) fn join_line(&self, lineage: &Lineage, inviter: NodeId) -> io::Result<()> {
        let mut batch = Batch::new();
        self.log.delete_all_in(&mut batch);
        if !planted::has(Bug::KeepOldMarks) {
            let all = self.applied()?.state.consumed.to_sorted();
            let given_up = all.into_iter().filter(|(_, version)| !lineage.contains(*version));
            consumed::unmark_consumed(&mut batch, given_up.map(|(id, _)| id));
        }
        for step in steps::steps(self.log.store(), self.group()).map_err(failed)? {
            if !lineage.contains(step.version) {
                steps::delete_step(&mut batch, self.group(), step.version);
            }
        }
        self.log.put_meta_in(&mut batch, RaftMeta::AppliedState, &encode(&AppliedState::default()));
        batch.put(Family::RaftMeta, self.inviter_key(), encode(&Some(inviter)));
        self.put_lineage(&mut batch, lineage);
        self.write(|log| log.store().write(batch, Durability::Synced))
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
            self.write(|log| log.put_meta(RaftMeta::AppliedState, &empty, Durability::Synced))?;
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
        self.write(|log| log.store().write(batch, Durability::Buffered))
    }

    /// Replaces the whole state by a leader's snapshot.
    pub(super) fn install(&self, mut applied: AppliedState) -> io::Result<()> {
        let consumed = std::mem::take(&mut applied.state.consumed);
        let mut by_version = BTreeMap::<_, Vec<_>>::new();
        for (id, version) in consumed.to_sorted() {
            by_version.entry(version).or_default().push(id);
        }
        let mut batch = Batch::new();
        batch.delete_range(Family::RaftMeta, self.consumed_key("consumed/"), self.consumed_key("consumed0"));
        for (version, ids) in by_version {
            self.put_consumed(&mut batch, version, &ids);
        }
        self.log.put_meta_in(&mut batch, RaftMeta::AppliedState, &encode(&applied));
        self.write(|log| log.store().write(batch, Durability::Synced))
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
