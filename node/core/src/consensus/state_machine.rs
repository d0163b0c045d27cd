//! The replicated state of one model. Entries are applied in log order by one task; readers get the state as an
//! `Arc` that is replaced, never changed.

use std::io;
use std::sync::{Arc, Mutex};

use futures::{Stream, TryStreamExt};
use openraft::storage::{ApplyResponder, EntryResponder, RaftStateMachine};
use openraft::{EntryPayload, OptionalSend, RaftSnapshotBuilder};
use starling_protocol::Term;
use starling_protocol::codec::{decode, encode};
use starling_protocol::control::{Applied, ControlEntry, ModelState, StepCommitted};

use super::disk::{AppliedState, Disk, VALUE_LEN_BYTES_MAX};
use super::type_config::{LogId, Snapshot, SnapshotMeta, StoredMembership, TypeConfig};
use crate::watch::{Sender, lock};

/// Entries applied between two writes of the state.
const BATCH_ENTRIES_MAX: usize = 64;

/// State machine of one group.
#[derive(Debug)]
pub(super) struct StateMachine {
    disk: Disk,
    last_applied: Option<LogId>,
    membership: StoredMembership,
    state: Arc<ModelState>,
    feed: Sender<Arc<ModelState>>,
    snapshot: Arc<Mutex<Option<Snapshot>>>,
}

impl StateMachine {
    /// The state machine as the store has it; `feed` gets the state, now and after each batch of entries.
    pub(super) async fn open(disk: Disk, feed: Sender<Arc<ModelState>>) -> io::Result<Self> {
        let applied = disk
            .run(|d| {
                d.create()?;
                d.applied()
            })
            .await?;
        let state = Arc::new(applied.state);
        // A node that changed its line has no state before the snapshot comes: readers keep the old one so long.
        if applied.last_applied.is_some() || feed.get().model.is_none() {
            feed.replace(state.clone());
        }
        let (last_applied, membership) = (applied.last_applied, applied.membership);
        Ok(Self { disk, last_applied, membership, state, feed, snapshot: Arc::default() })
    }

    fn applied(&self) -> AppliedState {
        let (last_applied, membership) = (self.last_applied, self.membership.clone());
        AppliedState { last_applied, membership, state: (*self.state).clone() }
    }

    /// Persists and publishes what a batch changed, then answers its proposers.
    async fn finish(
        &mut self,
        batch: &mut Vec<(ApplyResponder<TypeConfig>, Applied)>,
        steps: &mut Vec<(StepCommitted, Term)>,
    ) -> io::Result<()> {
        let (applied, steps) = (self.applied(), std::mem::take(steps));
        self.disk.run(move |d| d.save_applied(applied, &steps)).await?;
        if !Arc::ptr_eq(&self.state, &self.feed.get()) {
            self.feed.replace(self.state.clone());
        }
        for (responder, answer) in batch.drain(..) {
            responder.send(answer);
        }
        Ok(())
    }
}

impl RaftStateMachine<TypeConfig> for StateMachine {
    type SnapshotData = Vec<u8>;
    type SnapshotBuilder = SnapshotBuilder;

    async fn applied_state(&mut self) -> io::Result<(Option<LogId>, StoredMembership)> {
        Ok((self.last_applied, self.membership.clone()))
    }

    async fn apply<S>(&mut self, mut entries: S) -> io::Result<()>
    where
        S: Stream<Item = Result<EntryResponder<TypeConfig>, io::Error>> + Unpin + OptionalSend,
    {
        let (mut answers, mut steps) = (Vec::new(), Vec::new());
        let mut unsaved = 0;
        while let Some((entry, responder)) = entries.try_next().await? {
            let answer = match entry.payload {
                EntryPayload::Blank => Applied::Yes,
                EntryPayload::Membership(membership) => {
                    self.membership = StoredMembership::new(Some(entry.log_id), membership);
                    Applied::Yes
                }
                EntryPayload::Normal(payload) => {
                    let term = Term(entry.log_id.committed_leader_id().term);
                    // Copies the state once a batch, and of the consumed rollouts only the list of runs.
                    let answer = Arc::make_mut(&mut self.state).apply(term, &payload.0);
                    if let (Applied::Yes, ControlEntry::StepCommitted(step)) = (&answer, payload.0) {
                        steps.push((*step, term));
                    }
                    answer
                }
            };
            self.last_applied = Some(entry.log_id);
            unsaved += 1;
            if let Some(responder) = responder {
                answers.push((responder, answer));
            }
            if unsaved >= BATCH_ENTRIES_MAX {
                self.finish(&mut answers, &mut steps).await?;
                unsaved = 0;
            }
        }
        if unsaved > 0 {
            self.finish(&mut answers, &mut steps).await?;
        }
        Ok(())
    }

    async fn get_snapshot_builder(&mut self) -> SnapshotBuilder {
        let meta = SnapshotMeta { last_log_id: self.last_applied, last_membership: self.membership.clone() };
        SnapshotBuilder { meta, state: self.state.clone(), newest: self.snapshot.clone() }
    }

    async fn install_snapshot(&mut self, meta: &SnapshotMeta, snapshot: Vec<u8>) -> io::Result<()> {
        let state: ModelState = decode("snapshot", &snapshot, VALUE_LEN_BYTES_MAX)
            .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
        let applied = AppliedState {
            last_applied: meta.last_log_id,
            membership: meta.last_membership.clone(),
            state: state.clone(),
        };
        self.disk.run(move |d| d.install(applied)).await?;
        self.last_applied = meta.last_log_id;
        self.membership = meta.last_membership.clone();
        self.state = Arc::new(state);
        *lock(&self.snapshot) = Some(Snapshot { meta: meta.clone(), snapshot });
        self.feed.replace(self.state.clone());
        Ok(())
    }

    async fn get_current_snapshot(&mut self) -> io::Result<Option<Snapshot>> {
        Ok(lock(&self.snapshot).clone())
    }
}

/// A snapshot to be: what the state was when the builder was made.
#[derive(Debug)]
pub(super) struct SnapshotBuilder {
    meta: SnapshotMeta,
    state: Arc<ModelState>,
    newest: Arc<Mutex<Option<Snapshot>>>,
}

impl RaftSnapshotBuilder<TypeConfig> for SnapshotBuilder {
    type SnapshotData = Vec<u8>;

    async fn build_snapshot(&mut self) -> io::Result<Snapshot> {
        let snapshot = Snapshot { meta: self.meta.clone(), snapshot: encode(&*self.state) };
        let mut newest = lock(&self.newest);
        // A snapshot from the leader may have come meanwhile.
        if newest.as_ref().is_none_or(|n| n.meta.last_log_id <= snapshot.meta.last_log_id) {
            *newest = Some(snapshot.clone());
        }
        Ok(snapshot)
    }
}
