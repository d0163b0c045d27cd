//! All groups that this node takes part in.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures::future::BoxFuture;
use openraft::errors::{InitializeError, RaftError};
use starling_protocol::codec::{decode, encode};
use starling_protocol::control::{Applied, ControlEntry, ModelState};
use starling_protocol::record::Fitness;
use starling_protocol::wire::{CALL_LEN_BYTES_MAX, LeaderCall, LeaderReply, Service};
use starling_protocol::{Hash, Line, Lineage, ModelName, NodeId, StoreId};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::config::GroupConfig;
use super::disk::Disk;
use super::errors::{CreateError, GroupError, ProposeError};
use super::group::{Group, Raft};
use super::log_store::LogStore;
use super::network::{Incoming, Network, RaftFrame};
use super::state_machine::StateMachine;
use super::supervise::WITNESS;
use super::type_config::Seat;
use super::view::LeaderView;
use crate::disk_health::WatchedStore;
use crate::membership::Membership;
use crate::runtime::{NodeScope, blocking};
use crate::transport::{InboundError, SharedTransport};
use crate::watch::{Receiver, Sender, channel, lock};

/// Most groups on one node: any node may ask to join one, and an idle group costs some heartbeats a second.
const GROUPS_MAX: usize = 256;

/// The store's id; drawn from `seed` if it is new. A store that cannot say is a new one for this run: this node's seats
/// are then another store's, which costs them and breaks no promise.
fn own_store_id(store: &WatchedStore, node: NodeId, seed: u64) -> StoreId {
    let drawn = Hash::of(&[&b"starling/store/1"[..], &node.0, &seed.to_le_bytes()].concat()).0;
    let mut fresh = [0; 16];
    fresh.copy_from_slice(&drawn[..16]);
    starling_storage::store_id::store_id(store, StoreId(fresh)).unwrap_or_else(|error| {
        tracing::error!(%error, "the store's id can be neither read nor written: this node keeps none of its seats");
        StoreId(fresh)
    })
}

/// All groups that this node takes part in. One for each model.
pub struct Groups {
    pub(super) node: NodeId,
    /// Of this run's store.
    pub(super) store_id: StoreId,
    pub(super) transport: SharedTransport,
    pub(super) store: WatchedStore,
    pub(super) membership: Arc<Membership>,
    pub(super) config: GroupConfig,
    pub(super) scope: NodeScope,
    pub(super) groups: Mutex<BTreeMap<ModelName, Arc<Group>>>,
    /// Voters of each model in its greatest line, as the mesh announces them.
    pub(super) announced: Mutex<BTreeMap<ModelName, (Line, Vec<NodeId>)>>,
    /// What this node's device is worth for training each model.
    pub(super) fitness: Mutex<BTreeMap<ModelName, Fitness>>,
    pub(super) draining: AtomicBool,
    /// Times without a date are counted from here.
    pub(super) started: Instant,
    pub(super) opening: tokio::sync::Mutex<()>,
    pub(super) shutdown: CancellationToken,
}

impl std::fmt::Debug for Groups {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Groups").field("models", &self.models()).finish_non_exhaustive()
    }
}

impl Groups {
    /// No group yet: see [`Groups::open_existing`]. Everything ends with `shutdown`.
    ///
    /// Inside a [`NodeScope`] the scope's generator decides the election timeouts, outside one of `seed`.
    #[must_use]
    pub fn start(
        transport: SharedTransport,
        store: WatchedStore,
        membership: Arc<Membership>,
        config: GroupConfig,
        seed: u64,
        shutdown: CancellationToken,
    ) -> Arc<Self> {
        let node = transport.local();
        let groups = Arc::new(Self {
            node,
            store_id: own_store_id(&store, node, seed),
            transport,
            store,
            membership,
            config,
            scope: NodeScope::current().unwrap_or_else(|| NodeScope::new(seed)),
            groups: Mutex::new(BTreeMap::new()),
            announced: Mutex::new(BTreeMap::new()),
            fitness: Mutex::default(),
            draining: AtomicBool::new(false),
            started: Instant::now(),
            opening: tokio::sync::Mutex::new(()),
            shutdown,
        });
        drop(groups.scope.spawn(groups.clone().probe_disk()));
        groups
    }

    /// Opens every group that the store knows, and returns their models.
    ///
    /// # Errors
    /// [`GroupError`] of the first that does not open; the ones before it are open then.
    pub async fn open_existing(self: &Arc<Self>) -> Result<Vec<ModelName>, GroupError> {
        let store = self.store.clone();
        let models = blocking(move || starling_storage::raft_log::groups(&store))
            .await
            .unwrap_or_else(|_stopped| Ok(Vec::new()));
        let models = models.map_err(GroupError::List)?;
        for model in &models {
            self.open(model, None, &Lineage::default()).await?;
        }
        Ok(models)
    }

    /// Opens the group, in the line that the store has it in, or in `lineage` if this node was not in it yet.
    pub(super) async fn open(
        self: &Arc<Self>,
        model: &ModelName,
        inviter: Option<NodeId>,
        lineage: &Lineage,
    ) -> Result<Arc<Group>, GroupError> {
        let _one_at_a_time = self.opening.lock().await;
        if let Some(group) = self.group(model) {
            return Ok(group);
        }
        if lock(&self.groups).len() >= GROUPS_MAX {
            return Err(GroupError::TooMany { model: model.clone(), max: GROUPS_MAX });
        }
        let disk = Disk::new(Arc::new(self.store.clone()), model.clone());
        let store_failed = |source| GroupError::Store { model: model.clone(), source };
        let lineage = lineage.clone();
        disk.run(move |d| d.seat(inviter, &lineage)).await.map_err(store_failed)?;
        let (leadership, _) = channel(LeaderView::default());
        let (state, _) = channel(Arc::default());
        self.run(model, leadership, state).await
    }

    /// Starts the group over after its run ended with an error; readers keep their feeds.
    ///
    /// Boxed, because the new run is watched over by the same code that calls this.
    pub(super) fn reopen<'a>(self: &'a Arc<Self>, ended: &'a Group) -> BoxFuture<'a, Result<(), GroupError>> {
        Box::pin(async move {
            let _one_at_a_time = self.opening.lock().await;
            if ended.closed.is_cancelled() {
                return Ok(()); // it changed its line meanwhile, and runs
            }
            ended.disk.retire().await;
            self.run(&ended.model, ended.leadership.clone(), ended.state.clone()).await?;
            ended.closed.cancel();
            Ok(())
        })
    }

    /// Boxed: what it starts may start it again, and openraft's start alone is a future of 16 KiB.
    pub(super) fn run<'a>(
        self: &'a Arc<Self>,
        model: &'a ModelName,
        leadership: Sender<LeaderView>,
        state: Sender<Arc<ModelState>>,
    ) -> BoxFuture<'a, Result<Arc<Group>, GroupError>> {
        Box::pin(async move {
            let group = self.scope.run(self.start_group(model, leadership, state)).await?;
            lock(&self.groups).insert(model.clone(), group.clone());
            drop(self.scope.spawn(self.clone().watch_over(group.clone())));
            drop(self.scope.spawn(self.clone().pilot(group.clone())));
            drop(self.scope.spawn(self.clone().tend_line(group.clone())));
            Ok(group)
        })
    }

    async fn start_group(
        &self,
        model: &ModelName,
        leadership: Sender<LeaderView>,
        state: Sender<Arc<ModelState>>,
    ) -> Result<Arc<Group>, GroupError> {
        let refused = |e: &dyn std::fmt::Display| GroupError::Raft { model: model.clone(), reason: e.to_string() };
        let config = Arc::new(self.config.raft(model).validate().map_err(|e| refused(&e))?);
        let disk = Disk::new(Arc::new(self.store.clone()), model.clone());
        let store_failed = |source| GroupError::Store { model: model.clone(), source };
        let (lineage, inviter) = disk.run(|d| Ok((d.lineage()?, d.inviter()?))).await.map_err(store_failed)?;
        let machine = StateMachine::open(disk.clone(), state.clone()).await.map_err(store_failed)?;
        let network = Network {
            transport: self.transport.clone(),
            model: model.clone(),
            line: lineage.line,
            store: self.store_id,
        };
        let raft = Raft::new(self.node, config, network, LogStore::new(disk.clone()), machine)
            .await
            .map_err(|e| refused(&e))?;
        tracing::info!(%model, version = %state.get().version, line = %lineage.line, "group opened");
        Ok(Arc::new(Group {
            raft,
            disk,
            lineage,
            leaderless_since: Mutex::new(Instant::now()),
            outlook: Mutex::new(None),
            incoming: Incoming::default(),
            heard: Mutex::new(None),
            powerless: Mutex::new(None),
            inviter: Mutex::new(inviter),
            unfit: Mutex::new(self.config.witness.then(|| WITNESS.to_owned())),
            stands: AtomicBool::new(!self.config.witness),
            reigns: Mutex::default(),
            sightings: Mutex::default(),
            closed: self.shutdown.child_token(),
            model: model.clone(),
            leadership,
            state,
        }))
    }

    pub(super) fn group(&self, model: &ModelName) -> Option<Arc<Group>> {
        lock(&self.groups).get(model).cloned()
    }

    /// Models in whose groups this node is, ascending.
    #[must_use]
    pub fn models(&self) -> Vec<ModelName> {
        lock(&self.groups).keys().cloned().collect()
    }
    /// The model's state, as it changes.
    #[must_use]
    pub fn state(&self, model: &ModelName) -> Option<Receiver<Arc<ModelState>>> {
        self.group(model).map(|g| g.state.receiver())
    }
    /// Who leads, as it changes.
    #[must_use]
    pub fn leadership(&self, model: &ModelName) -> Option<Receiver<LeaderView>> {
        self.group(model).map(|g| g.leadership.receiver())
    }
    /// The line that this node is in, with those before it.
    #[must_use]
    pub fn lineage(&self, model: &ModelName) -> Option<Lineage> {
        self.group(model).map(|g| g.lineage.clone())
    }
    /// Voters, as this node knows them, ascending.
    #[must_use]
    pub fn voters(&self, model: &ModelName) -> Vec<NodeId> {
        self.group(model).map(|g| g.metrics().membership_config.voter_ids().collect()).unwrap_or_default()
    }
    /// Learners, as this node knows them, ascending.
    #[must_use]
    pub fn learners(&self, model: &ModelName) -> Vec<NodeId> {
        self.group(model)
            .map(|g| g.metrics().membership_config.membership().learner_ids().collect())
            .unwrap_or_default()
    }

    /// The store of this node's seats.
    #[must_use]
    pub fn store_id(&self) -> StoreId {
        self.store_id
    }

    /// Serves a [`Service::Raft`] call.
    ///
    /// # Errors
    /// [`InboundError::Malformed`] when it is none or speaks in another node's name;
    /// [`InboundError::Unavailable`] when this node, or the caller, is not in the group.
    pub async fn on_raft_call(&self, from: NodeId, body: &[u8]) -> Result<Bytes, InboundError> {
        let frame: RaftFrame =
            decode("Raft call", body, CALL_LEN_BYTES_MAX).map_err(|e| InboundError::Malformed(e.to_string()))?;
        let group = self
            .group(&frame.model)
            .ok_or_else(|| InboundError::Unavailable(format!("this node is not in the group of {}", frame.model)))?;
        if frame.line != group.lineage.line {
            let (theirs, ours) = (frame.line, group.lineage.line);
            return Err(InboundError::Unavailable(format!("{} is in {ours} here, not in {theirs}", frame.model)));
        }
        if frame.to != self.store_id {
            return Err(InboundError::Unavailable(format!(
                "this node's store is {}, the seat in the group of {} is that of {}: it must be taken in again",
                self.store_id, frame.model, frame.to
            )));
        }
        self.admit(&group, from, frame.from)?;
        group.serve(from, frame.request).await
    }

    /// Creates the model's group with these voters, this node among them, and logs its first entry. Trying again
    /// after an error is safe. Two nodes must not create the same model with different voters.
    ///
    /// # Errors
    /// [`CreateError`]
    pub async fn create(
        self: &Arc<Self>,
        model: &ModelName,
        voters: &[NodeId],
        first: ControlEntry,
    ) -> Result<(), CreateError> {
        let deadline = Instant::now() + self.config.create_timeout;
        if !voters.contains(&self.node) {
            return Err(CreateError::NotAVoter);
        }
        let group = self.open(model, None, &Lineage::default()).await?;
        let mut seats = BTreeMap::from([(self.node, Seat { store: self.store_id })]);
        for voter in voters.iter().filter(|v| **v != self.node) {
            let seat = self
                .ask_to_join(&group, *voter, deadline)
                .await
                .map_err(|reason| CreateError::Voter { node: *voter, reason })?;
            seats.insert(*voter, seat);
        }
        match group.raft.initialize(seats).await {
            Ok(()) | Err(RaftError::APIError(InitializeError::NotAllowed(_))) => {}
            Err(error) => return Err(CreateError::Initialize { model: model.clone(), reason: error.to_string() }),
        }
        self.propose_anywhere(&group, &first, deadline).await
    }

    /// Calls `node` into the group, and says what its seat is.
    pub(super) async fn ask_to_join(&self, group: &Group, node: NodeId, deadline: Instant) -> Result<Seat, String> {
        let (model, lineage) = (group.model.clone(), group.lineage.clone());
        let body = Bytes::from(encode(&LeaderCall::JoinGroup { model, lineage }));
        loop {
            let reason = match self.leader_call(node, body.clone()).await {
                Ok(LeaderReply::Joined { store }) => return Ok(Seat { store }),
                Ok(LeaderReply::Refused(reason)) => return Err(reason),
                Ok(other) => return Err(format!("unexpected reply {other:?}")),
                Err(reason) => reason,
            };
            if Instant::now() >= deadline {
                return Err(reason);
            }
            sleep(self.config.heartbeat).await;
        }
    }

    pub(super) async fn leader_call(&self, node: NodeId, body: Bytes) -> Result<LeaderReply, String> {
        let limit = self.config.propose_timeout;
        let reply = self.transport.call(node, Service::Leader, body, limit).await.map_err(|e| e.to_string())?;
        decode("leader reply", &reply, CALL_LEN_BYTES_MAX).map_err(|e| e.to_string())
    }

    /// Logs a model's first entry through whoever leads.
    async fn propose_anywhere(
        &self,
        group: &Group,
        entry: &ControlEntry,
        deadline: Instant,
    ) -> Result<(), CreateError> {
        loop {
            let error = match self.write(group, entry.clone()).await {
                Ok(Applied::Yes | Applied::Already) => return Ok(()),
                Ok(Applied::Refused(why)) => return Err(CreateError::Refused(why.to_string())),
                Err(ProposeError::NotLeader(Some(leader))) if leader != self.node => {
                    let call = LeaderCall::Propose { model: group.model.clone(), entry: Box::new(entry.clone()) };
                    match self.leader_call(leader, encode(&call).into()).await {
                        Ok(LeaderReply::Done) => return Ok(()),
                        Ok(LeaderReply::Refused(why)) => return Err(CreateError::Refused(why)),
                        Ok(_) | Err(_) => ProposeError::NotLeader(None),
                    }
                }
                Err(error) => error,
            };
            if Instant::now() >= deadline || matches!(error, ProposeError::TooLong { .. }) {
                return Err(CreateError::Propose(error));
            }
            sleep(self.config.heartbeat / 2).await;
        }
    }

    /// Stops every group and waits until they are idle. The token does the same without waiting.
    pub async fn stop(&self) {
        let groups: Vec<_> = lock(&self.groups).values().cloned().collect();
        for group in groups {
            if let Err(error) = group.raft.shutdown().await {
                tracing::debug!(model = %group.model, %error, "group did not stop in order");
            }
        }
    }
}
