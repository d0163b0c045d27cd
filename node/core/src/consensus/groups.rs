//! All groups that this node takes part in.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use openraft::errors::{ClientWriteError, InitializeError, LinearizableReadError, RaftError};
use openraft::impls::ProgressResponder;
use openraft::{ChangeMembers, EmptyNode, Instant as _, RaftMetrics, ReadPolicy, ServerState, SnapshotPolicy};
use starling_protocol::codec::{decode, encode};
use starling_protocol::control::{Applied, ControlEntry, ModelState};
use starling_protocol::record::Role;
use starling_protocol::wire::{CALL_LEN_BYTES_MAX, LeaderCall, LeaderReply, Service};
use starling_protocol::{ModelName, NodeId, Term};
use starling_storage::{SharedStore, StoreError};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::autopilot::{Change, LAG_ENTRIES_MAX, Situation, plan};
use super::disk::Disk;
use super::log_store::LogStore;
use super::network::{Incoming, Network, RaftFrame};
use super::state_machine::StateMachine;
use super::type_config::{LogPayload, TypeConfig};
use super::view::LeaderView;
use crate::membership::Membership;
use crate::runtime::{NodeScope, blocking};
use crate::transport::{InboundError, SharedTransport};
use crate::watch::{Receiver, Sender, channel, lock};

/// Longest entry: with the log's frame it must fit a call. A manifest of 64 Ki chunks takes 2 MiB.
const ENTRY_LEN_BYTES_MAX: usize = 4 << 20;
/// Entries kept behind a snapshot, so that a node that was away for a moment needs none.
const ENTRIES_KEPT: u64 = 200;
/// Most groups on one node: any node may ask to join one, and an idle group costs some heartbeats a second.
const GROUPS_MAX: usize = 256;
/// Entries sent at once, if they are small.
const APPEND_ENTRIES_MAX: u64 = 64;

type Raft = openraft::Raft<TypeConfig, StateMachine>;

/// How the groups behave. Heartbeat and the longest election timeout must be equal on all nodes.
#[derive(Clone, Debug)]
pub struct GroupConfig {
    /// How often a leader without entries to send shows that it is there. A message must be answered within three
    /// quarters of it. Default 250 ms.
    pub heartbeat: Duration,
    /// Shortest election timeout. A node with the better device gets a shorter one. Default 1 s.
    pub election_timeout_min: Duration,
    /// Longest election timeout; also how long a leader may act without its quorum. Default 2 s.
    pub election_timeout_max: Duration,
    /// Entries between two snapshots. Default 500.
    pub snapshot_after_entries: u64,
    /// How long a proposal may take before its outcome is given up as unknown. Default 5 s.
    pub propose_timeout: Duration,
    /// How long creating a group may take. Default 15 s.
    pub create_timeout: Duration,
    /// Most voters. Default 5.
    pub voters_max: usize,
    /// How often a leader looks for members to add. Default 1 s.
    pub autopilot_every: Duration,
    /// Whether this node votes but never leads.
    pub witness: bool,
}

impl Default for GroupConfig {
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_millis(250),
            election_timeout_min: Duration::from_secs(1),
            election_timeout_max: Duration::from_secs(2),
            snapshot_after_entries: 500,
            propose_timeout: Duration::from_secs(5),
            create_timeout: Duration::from_secs(15),
            voters_max: 5,
            autopilot_every: Duration::from_secs(1),
            witness: false,
        }
    }
}

impl GroupConfig {
    fn raft(&self, model: &ModelName) -> openraft::Config {
        let ms = |d: Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
        openraft::Config {
            cluster_name: model.to_string(),
            heartbeat_interval: ms(self.heartbeat),
            election_timeout_min: ms(self.election_timeout_min),
            election_timeout_max: ms(self.election_timeout_max),
            // Per part of a snapshot.
            install_snapshot_timeout: 10_000,
            max_payload_entries: APPEND_ENTRIES_MAX,
            snapshot_policy: SnapshotPolicy::LogsSinceLast(self.snapshot_after_entries),
            max_in_snapshot_log_to_keep: ENTRIES_KEPT,
            enable_elect: !self.witness,
            enable_pre_vote: Some(true),
            ..openraft::Config::default()
        }
    }
    /// How long nothing may be heard before it is worth a word: a usual election is over by then.
    fn patience(&self) -> Duration {
        2 * self.election_timeout_max
    }
}

/// A group could not be opened. Nothing was started.
#[derive(Debug, thiserror::Error)]
pub enum GroupError {
    /// The list of groups cannot be read. Retryable if the store's error is.
    #[error("read the list of groups")]
    List(#[source] StoreError),
    /// The group's log or state cannot be read.
    #[error("read the log of {model}")]
    Store {
        /// Which group.
        model: ModelName,
        /// Why.
        source: io::Error,
    },
    /// There are as many groups on this node as there may be.
    #[error("group of {model}: this node is in {max} groups already")]
    TooMany {
        /// Which group.
        model: ModelName,
        /// The limit.
        max: usize,
    },
    /// openraft refused: the settings or the log make no sense to it.
    #[error("start the group of {model}: {reason}")]
    Raft {
        /// Which group.
        model: ModelName,
        /// openraft's own words.
        reason: String,
    },
}

/// An entry was not proposed, or its outcome is not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProposeError {
    /// This node does not lead, or not in the given term. Nothing was logged; ask the named node, which is this one
    /// if it leads again in a later term.
    #[error("not the leader; {}", .0.map_or_else(|| "none is known".to_owned(), |n| format!("ask {n}")))]
    NotLeader(Option<NodeId>),
    /// There is no leader because too few voters answer. Nothing was logged; retryable, the text says what is missing.
    #[error("no quorum: {0}")]
    NoQuorum(String),
    /// The entry may be in the log or may come into it later, or not. Read the state before trying again.
    #[error("outcome unknown after {after:?}: {reason}")]
    Unknown {
        /// How long it was waited for.
        after: Duration,
        /// In words.
        reason: String,
    },
    /// This node is not in the group. Nothing was logged.
    #[error("this node is not in the group of {0}")]
    NoGroup(ModelName),
    /// The entry is too long. Nothing was logged; permanent.
    #[error("entry of {got} bytes, at most {max} are allowed")]
    TooLong {
        /// Its length.
        got: usize,
        /// The limit.
        max: usize,
    },
}

/// A barrier was not reached. Nothing was changed; retryable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// Ask the named node.
    #[error("not the leader; {}", .0.map_or_else(|| "none is known".to_owned(), |n| format!("ask {n}")))]
    NotLeader(Option<NodeId>),
    /// Too few voters answer.
    #[error("no quorum: {0}")]
    NoQuorum(String),
    /// This node is not in the group, or the group stopped.
    #[error("this node is not in the group of {0}")]
    NoGroup(ModelName),
}

/// A group was not created, or not completely. Trying again is safe.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// This node must be one of the voters.
    #[error("the creating node is not among the voters")]
    NotAVoter,
    /// The own part of the group does not open.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// A voter does not take part.
    #[error("voter {node} does not join: {reason}")]
    Voter {
        /// Which.
        node: NodeId,
        /// Its words, or the network's.
        reason: String,
    },
    /// openraft refused the first membership.
    #[error("initialize the group of {model}: {reason}")]
    Initialize {
        /// Which group.
        model: ModelName,
        /// openraft's own words.
        reason: String,
    },
    /// The group exists now, but its first entry is not known to be in.
    #[error("log the model's first entry")]
    Propose(#[source] ProposeError),
    /// The model exists with another first entry, or the leader refused it.
    #[error("the model's first entry was refused: {0}")]
    Refused(String),
}

/// One group on this node.
pub(super) struct Group {
    pub(super) raft: Raft,
    pub(super) incoming: Incoming,
    /// When a leader was last heard.
    pub(super) heard: Mutex<Option<Instant>>,
    pub(super) witness: bool,
    model: ModelName,
    leadership: Sender<LeaderView>,
    state: Sender<Arc<ModelState>>,
}

/// All groups that this node takes part in. One for each model.
pub struct Groups {
    node: NodeId,
    transport: SharedTransport,
    store: SharedStore,
    membership: Arc<Membership>,
    config: GroupConfig,
    scope: NodeScope,
    groups: Mutex<BTreeMap<ModelName, Arc<Group>>>,
    opening: tokio::sync::Mutex<()>,
    shutdown: CancellationToken,
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
        store: SharedStore,
        membership: Arc<Membership>,
        config: GroupConfig,
        seed: u64,
        shutdown: CancellationToken,
    ) -> Arc<Self> {
        Arc::new(Self {
            node: transport.local(),
            transport,
            store,
            membership,
            config,
            scope: NodeScope::current().unwrap_or_else(|| NodeScope::new(seed)),
            groups: Mutex::new(BTreeMap::new()),
            opening: tokio::sync::Mutex::new(()),
            shutdown,
        })
    }

    /// Opens every group that the store knows, and returns their models.
    ///
    /// # Errors
    /// [`GroupError`] of the first that does not open; the ones before it are open then.
    pub async fn open_existing(self: &Arc<Self>) -> Result<Vec<ModelName>, GroupError> {
        let store = self.store.clone();
        let models = blocking(move || starling_storage::raft_log::groups(&*store))
            .await
            .unwrap_or_else(|_stopped| Ok(Vec::new()));
        let models = models.map_err(GroupError::List)?;
        for model in &models {
            self.open(model).await?;
        }
        Ok(models)
    }

    /// Takes part in `model`'s group from now on, without a vote of its own accord: its leader brings the log.
    ///
    /// # Errors
    /// [`GroupError`]
    pub async fn on_join(self: &Arc<Self>, model: &ModelName) -> Result<(), GroupError> {
        self.open(model).await.map(drop)
    }

    async fn open(self: &Arc<Self>, model: &ModelName) -> Result<Arc<Group>, GroupError> {
        let _one_at_a_time = self.opening.lock().await;
        if let Some(group) = self.group(model) {
            return Ok(group);
        }
        if lock(&self.groups).len() >= GROUPS_MAX {
            return Err(GroupError::TooMany { model: model.clone(), max: GROUPS_MAX });
        }
        // openraft's start alone is a future of 16 KiB.
        let group = self.scope.run(Box::pin(self.start_group(model))).await?;
        lock(&self.groups).insert(model.clone(), group.clone());
        drop(self.scope.spawn(self.clone().watch_over(group.clone())));
        drop(self.scope.spawn(self.clone().pilot(group.clone())));
        Ok(group)
    }

    async fn start_group(&self, model: &ModelName) -> Result<Arc<Group>, GroupError> {
        let refused = |e: &dyn std::fmt::Display| GroupError::Raft { model: model.clone(), reason: e.to_string() };
        let config = Arc::new(self.config.raft(model).validate().map_err(|e| refused(&e))?);
        let disk = Disk::new(self.store.clone(), model.clone());
        let machine = StateMachine::open(disk.clone())
            .await
            .map_err(|source| GroupError::Store { model: model.clone(), source })?;
        let state = machine.feed();
        let network = Network { transport: self.transport.clone(), model: model.clone() };
        let raft =
            Raft::new(self.node, config, network, LogStore::new(disk), machine).await.map_err(|e| refused(&e))?;
        tracing::info!(%model, version = %state.get().version, "group opened");
        Ok(Arc::new(Group {
            raft,
            incoming: Incoming::default(),
            heard: Mutex::new(None),
            witness: self.config.witness,
            model: model.clone(),
            leadership: channel(LeaderView::default()).0,
            state,
        }))
    }

    fn group(&self, model: &ModelName) -> Option<Arc<Group>> {
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

    /// Serves a [`Service::Raft`] call.
    ///
    /// # Errors
    /// [`InboundError::Malformed`] when it is none or speaks in another node's name;
    /// [`InboundError::Unavailable`] when this node is not in the group.
    pub async fn on_raft_call(&self, from: NodeId, body: &[u8]) -> Result<Bytes, InboundError> {
        let frame: RaftFrame =
            decode("Raft call", body, CALL_LEN_BYTES_MAX).map_err(|e| InboundError::Malformed(e.to_string()))?;
        let group = self
            .group(&frame.model)
            .ok_or_else(|| InboundError::Unavailable(format!("this node is not in the group of {}", frame.model)))?;
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
        let voters: BTreeMap<_, _> = voters.iter().map(|v| (*v, EmptyNode {})).collect();
        if !voters.contains_key(&self.node) {
            return Err(CreateError::NotAVoter);
        }
        let group = self.open(model).await?;
        for voter in voters.keys().filter(|v| **v != self.node) {
            self.ask_to_join(model, *voter, deadline)
                .await
                .map_err(|reason| CreateError::Voter { node: *voter, reason })?;
        }
        match group.raft.initialize(voters).await {
            Ok(()) | Err(RaftError::APIError(InitializeError::NotAllowed(_))) => {}
            Err(error) => return Err(CreateError::Initialize { model: model.clone(), reason: error.to_string() }),
        }
        self.propose_anywhere(&group, &first, deadline).await
    }

    async fn ask_to_join(&self, model: &ModelName, node: NodeId, deadline: Instant) -> Result<(), String> {
        let body = Bytes::from(encode(&LeaderCall::JoinGroup { model: model.clone() }));
        loop {
            let reason = match self.leader_call(node, body.clone()).await {
                Ok(LeaderReply::Done) => return Ok(()),
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

    async fn leader_call(&self, node: NodeId, body: Bytes) -> Result<LeaderReply, String> {
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
            let error = match self.write(group, None, entry.clone()).await {
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

    /// Logs `entry` if this node leads, and returns what the state machine made of it.
    ///
    /// Not cancel-safe: dropped, its outcome is unknown.
    ///
    /// # Errors
    /// [`ProposeError`]
    pub async fn propose(&self, model: &ModelName, entry: ControlEntry) -> Result<Applied, ProposeError> {
        let group = self.group(model).ok_or_else(|| ProposeError::NoGroup(model.clone()))?;
        self.write(&group, None, entry).await
    }

    /// As [`Groups::propose`], but only while this node is the leader of `term`: the check and the append are one
    /// step, so an entry of an earlier term is never logged in a later one.
    ///
    /// # Errors
    /// [`ProposeError`]
    pub async fn propose_as(
        &self,
        model: &ModelName,
        term: Term,
        entry: ControlEntry,
    ) -> Result<Applied, ProposeError> {
        let group = self.group(model).ok_or_else(|| ProposeError::NoGroup(model.clone()))?;
        self.write(&group, Some(term), entry).await
    }

    async fn write(&self, group: &Group, term: Option<Term>, entry: ControlEntry) -> Result<Applied, ProposeError> {
        let got = encode(&entry).len();
        if got > ENTRY_LEN_BYTES_MAX {
            return Err(ProposeError::TooLong { got, max: ENTRY_LEN_BYTES_MAX });
        }
        let after = self.config.propose_timeout;
        let unknown = |reason: String| ProposeError::Unknown { after, reason };
        let (responder, done) = ProgressResponder::complete_only();
        let mut request = group.raft.write(LogPayload(entry)).responder(responder);
        if let Some(term) = term {
            request = request.with_leader(term.0);
        }
        let result = timeout(after, async {
            request.await.map_err(|fatal| unknown(fatal.to_string()))?;
            done.await.map_err(|_dropped| unknown("the group stopped".into()))
        });
        match result.await {
            Err(_elapsed) => Err(unknown(self.why_no_quorum(group))),
            Ok(Err(error)) => Err(error),
            Ok(Ok(Ok(response))) => Ok(response.data),
            Ok(Ok(Err(ClientWriteError::ForwardToLeader(forward)))) => match forward.leader_id {
                None if group.leadership.get().wait.is_some() => Err(ProposeError::NoQuorum(self.why_no_quorum(group))),
                leader => Err(ProposeError::NotLeader(leader)),
            },
            Ok(Ok(Err(error @ ClientWriteError::LogEntryDiscarded(_)))) => Err(unknown(error.to_string())),
            // Only changes of membership can fail so.
            Ok(Ok(Err(error))) => Err(unknown(error.to_string())),
        }
    }

    /// Waits until this node has applied everything that was committed before the call, and knows by a quorum's
    /// word that it still leads.
    ///
    /// # Errors
    /// [`ReadError`]
    pub async fn linearizable_barrier(&self, model: &ModelName) -> Result<(), ReadError> {
        let group = self.group(model).ok_or_else(|| ReadError::NoGroup(model.clone()))?;
        match timeout(self.config.propose_timeout, group.raft.ensure_linearizable(ReadPolicy::ReadIndex)).await {
            Ok(Ok(_)) => Ok(()),
            Err(_elapsed) => Err(ReadError::NoQuorum(self.why_no_quorum(&group))),
            Ok(Err(RaftError::APIError(LinearizableReadError::ForwardToLeader(f)))) => {
                Err(ReadError::NotLeader(f.leader_id))
            }
            Ok(Err(RaftError::APIError(LinearizableReadError::QuorumNotEnough(_)))) => {
                Err(ReadError::NoQuorum(self.why_no_quorum(&group)))
            }
            Ok(Err(RaftError::Fatal(_))) => Err(ReadError::NoGroup(model.clone())),
        }
    }

    /// Asks `to` to lead instead of this node. It does when its log is complete; look at [`Groups::leadership`].
    ///
    /// # Errors
    /// [`ReadError`] when this node does not lead.
    pub async fn transfer(&self, model: &ModelName, to: NodeId) -> Result<(), ReadError> {
        let group = self.group(model).ok_or_else(|| ReadError::NoGroup(model.clone()))?;
        let view = group.leadership.get();
        if !view.is_self {
            return Err(ReadError::NotLeader(view.leader));
        }
        group.raft.trigger().transfer_leader(to).await.map_err(|_stopped| ReadError::NoGroup(model.clone()))
    }

    fn why_no_quorum(&self, group: &Group) -> String {
        let metrics = group.metrics();
        let voters: BTreeSet<_> = metrics.membership_config.voter_ids().collect();
        if voters.is_empty() {
            return format!("waiting for the leader of {} to bring its log", group.model);
        }
        let live: BTreeSet<_> = self.membership.live().into_iter().collect();
        let missing: Vec<_> = voters.difference(&live).map(NodeId::short).collect();
        let (alive, needed) = (voters.len() - missing.len(), voters.len() / 2 + 1);
        let missing = if missing.is_empty() { String::new() } else { format!("; missing: {}", missing.join(", ")) };
        format!("group of {}: {alive} of {} voters are alive, {needed} must answer{missing}", group.model, voters.len())
    }

    /// Keeps [`LeaderView`] up to date for as long as the group runs.
    async fn watch_over(self: Arc<Self>, group: Arc<Group>) {
        let mut metrics = group.raft.metrics();
        let mut leaderless_since = Instant::now();
        // Often enough that `is_self` falls well before another node can have been elected.
        let tick = self.config.heartbeat.min(self.config.election_timeout_min / 4);
        let mut nudged = Instant::now();
        loop {
            let alive = tokio::select! {
                biased;
                () = self.shutdown.cancelled() => break,
                changed = metrics.changed() => changed.is_ok(),
                () = sleep(tick) => true,
            };
            let now = Instant::now();
            let mut view = self.look(&group, now);
            if view.leader.is_some() {
                leaderless_since = now;
            } else if now - leaderless_since >= self.config.patience() {
                view.wait = Some(self.why_no_quorum(&group));
            }
            let m = group.metrics();
            if !alive || m.running_state.is_err() {
                let why = m.running_state.err().map_or_else(|| "it was shut down".to_owned(), |e| e.to_string());
                view = LeaderView { wait: Some(format!("the group of {} stopped: {why}", group.model)), ..view };
                view.is_self = false;
                view.leader = None;
            }
            let stopped = !alive;
            group.publish(view);
            if stopped {
                break;
            }
            if self.config.witness && now - nudged >= self.config.election_timeout_max {
                nudged = now;
                self.serve_as_witness(&group, now - leaderless_since).await;
            }
        }
        if let Err(error) = group.raft.shutdown().await {
            tracing::debug!(model = %group.model, %error, "group did not stop in order");
        }
    }

    /// What can be said now, without memory.
    fn look(&self, group: &Group, now: Instant) -> LeaderView {
        let m = group.metrics();
        let lease = self.config.election_timeout_max;
        let term = Term(m.current_term);
        if m.state == ServerState::Leader && m.current_leader == Some(self.node) {
            // A sole voter is its own quorum; openraft notes that only when it has something to send.
            let alone = m.membership_config.voter_ids().eq([self.node]);
            let age = if alone { Some(Duration::ZERO) } else { m.last_quorum_acked.map(|at| at.elapsed()) };
            let is_self = !self.config.witness && age.is_some_and(|a| a < lease);
            let leader = age.is_some_and(|a| a < lease).then_some(self.node);
            return LeaderView {
                leader,
                term,
                is_self,
                quorum_acked_at: age.and_then(|a| now.checked_sub(a)),
                wait: None,
            };
        }
        let heard = lock(&group.heard).is_some_and(|at| now - at < lease);
        let leader = m.current_leader.filter(|l| heard && *l != self.node);
        LeaderView { leader, term, is_self: false, quorum_acked_at: None, wait: None }
    }

    /// A witness that holds the newest log must lead for a moment: no other can be elected while it refuses its
    /// vote to older logs. It hands over at once.
    async fn serve_as_witness(&self, group: &Group, leaderless: Duration) {
        let m = group.metrics();
        if m.state == ServerState::Leader {
            let best = m.replication.iter().flatten().filter(|(n, _)| {
                let witness = self.membership.record(**n).is_some_and(|r| !r.has(Role::Server));
                !witness && self.membership.is_live(**n) && m.membership_config.voter_ids().any(|v| v == **n)
            });
            if let Some((to, _)) = best.max_by_key(|(_, matched)| **matched) {
                tracing::info!(model = %group.model, to = %to.short(), "witness hands leadership over");
                let _stopped = group.raft.trigger().transfer_leader(*to).await;
            }
            return;
        }
        let live: BTreeSet<_> = self.membership.live().into_iter().collect();
        let voters: BTreeSet<_> = m.membership_config.voter_ids().collect();
        let quorum = voters.intersection(&live).count() > voters.len() / 2;
        if voters.contains(&self.node) && quorum && leaderless >= 2 * self.config.patience() {
            tracing::info!(model = %group.model, "no server can be elected: the witness stands, to hand over");
            let _stopped = group.raft.trigger().elect(false).await;
        }
    }

    /// While this node leads: takes live servers into the group, one change at a time.
    async fn pilot(self: Arc<Self>, group: Arc<Group>) {
        loop {
            tokio::select! {
                biased;
                () = self.shutdown.cancelled() => return,
                () = sleep(self.config.autopilot_every) => {}
            }
            if !group.leadership.get().is_self {
                continue;
            }
            let Some(change) = self.situation(&group).and_then(|s| plan(&s)) else { continue };
            let limit = self.config.create_timeout;
            let done = tokio::select! {
                biased;
                () = self.shutdown.cancelled() => return,
                done = timeout(limit, self.carry_out(&group, change)) => done,
            };
            match done {
                Ok(Ok(())) => tracing::info!(model = %group.model, ?change, "membership changed"),
                Ok(Err(reason)) => tracing::warn!(model = %group.model, ?change, reason, "membership not changed"),
                Err(_elapsed) => tracing::warn!(model = %group.model, ?change, "membership change takes long"),
            }
        }
    }

    /// `None` while another change is under way.
    fn situation(&self, group: &Group) -> Option<Situation> {
        let m = group.metrics();
        let membership = m.membership_config.membership();
        if membership.get_joint_config().len() != 1 || m.membership_config != m.committed_membership_config {
            return None;
        }
        let voters: BTreeSet<_> = membership.voter_ids().collect();
        let is_witness = |n: &&NodeId| self.membership.record(**n).is_some_and(|r| !r.has(Role::Server));
        let last = m.last_log_index.unwrap_or_default();
        let near = |matched: &u64| matched.saturating_add(LAG_ENTRIES_MAX) >= last;
        let caught_up = m.replication.iter().flatten();
        let caught_up = caught_up.filter(|(_, id)| id.as_ref().is_some_and(|id| near(&id.index)));
        let of_role = |role| self.membership.live_with(role).into_iter().collect::<BTreeSet<_>>();
        let live_servers = of_role(Role::Server);
        Some(Situation {
            witness_voters: voters.iter().filter(is_witness).count(),
            learners: membership.learner_ids().collect(),
            live: self.membership.live().into_iter().collect(),
            live_witnesses: of_role(Role::Witness).difference(&live_servers).copied().collect(),
            caught_up: caught_up.map(|(n, _)| *n).collect(),
            voters_max: self.config.voters_max,
            live_servers,
            voters,
        })
    }

    async fn carry_out(&self, group: &Group, change: Change) -> Result<(), String> {
        match change {
            Change::AddLearner(node) => {
                self.ask_to_join(&group.model, node, Instant::now()).await?;
                let added = group.raft.add_learner(node, EmptyNode {}, false).await;
                added.map(drop).map_err(|e| e.to_string())
            }
            Change::Promote(node) => {
                let members = ChangeMembers::AddVoterIds(BTreeSet::from([node]));
                let promoted = group.raft.change_membership(members, true).await;
                promoted.map(drop).map_err(|e| e.to_string())
            }
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

impl Group {
    fn metrics(&self) -> RaftMetrics<TypeConfig> {
        self.raft.metrics().get()
    }

    fn publish(&self, view: LeaderView) {
        self.leadership.modify(|old| {
            let changed = !view.says_the_same_as(old);
            match (&old.wait, &view.wait) {
                (None, Some(wait)) => tracing::warn!(model = %self.model, %wait, "the group waits"),
                (Some(_), None) => tracing::info!(model = %self.model, leader = ?view.leader, "the group goes on"),
                (Some(_), Some(_)) | (None, None) => {}
            }
            if view.is_self != old.is_self {
                tracing::info!(model = %self.model, term = view.term.0, leads = view.is_self, "leadership of this node");
            }
            *old = view;
            changed
        });
    }
}
