//! The composition: every service of a node, and what an incoming message goes to.

use crate::blobs::Blobs;
use crate::compute::Compute;
use crate::consensus::{GroupConfig, Groups};
use crate::disk_health::WatchedStore;
use crate::hosting::Hosting;
use crate::leader::{Clock, Desk, LeaderContext};
use crate::maintenance::{DrainError, DrainReport, Maintenance, MaintenanceConfig};
use crate::membership::{Membership, MembershipConfig};
use crate::models::{LeaderError, Models};
use crate::rollouts::Rollouts;
use crate::runtime::spawn;
use crate::transport::{FrameStream, Inbound, InboundError, SharedTransport, Verdict};
use crate::watch;
use async_trait::async_trait;
use bytes::Bytes;
use starling_protocol::codec::{decode, encode};
use starling_protocol::control::{ControlEntry, ModelFiles, ModelState};
use starling_protocol::ledger::LedgerCounts;
use starling_protocol::manifest::Manifest;
use starling_protocol::planted::{self, Bug};
use starling_protocol::record::{Intake, NodeRecord, Role};
use starling_protocol::signed::{Signer, Verifier};
use starling_protocol::wire::{
    CALL_LEN_BYTES_MAX, GOSSIP_LEN_BYTES_MAX, GenerateFrame, Gossip, LeaderCall, LeaderReply, ModelAnnouncement,
    Service, Topic,
};
use starling_protocol::{ModelName, NodeId};
use starling_storage::SharedStore;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

/// Slow beat of announcements; changes are announced at once.
const ANNOUNCE_BEAT: Duration = Duration::from_secs(2);
/// What members that come and go have this node announce waits so long for more of them: in a crowd that joins each
/// node would else publish at each newcomer, n² messages to n nodes.
const CROWD_PAUSE: Duration = Duration::from_millis(250);
/// Most voters of a group.
const VOTERS_MAX: usize = 5;

/// What a node is made of.
pub struct CoreConfig {
    /// What it does.
    pub roles: Vec<Role>,
    /// Static part of its record: device, memory, cores, version.
    pub record: NodeRecord,
    /// SWIM.
    pub membership: MembershipConfig,
    /// Raft.
    pub groups: GroupConfig,
    /// Copies of what must not get lost, and the deletion of what is no longer of use.
    pub maintenance: MaintenanceConfig,
    /// Engines and trainers.
    pub compute: Arc<dyn Compute>,
    /// Seeds election timeouts and SWIM; from the OS in a node, from the scenario in the simulator.
    pub seed: u64,
    /// Wall clock.
    pub clock: Clock,
}

impl std::fmt::Debug for CoreConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CoreConfig").field("roles", &self.roles).finish_non_exhaustive()
    }
}

/// A node above the wire.
pub struct NodeCore {
    roles: Vec<Role>,
    record: Mutex<NodeRecord>,
    signer: Arc<dyn Signer>,
    verifier: Arc<dyn Verifier>,
    transport: SharedTransport,
    store: SharedStore,
    membership: Arc<Membership>,
    models: Arc<Models>,
    blobs: Blobs,
    rollouts: Arc<Rollouts>,
    groups: Arc<Groups>,
    hosting: Arc<Hosting>,
    maintenance: Arc<Maintenance>,
    context: LeaderContext,
    desks: Mutex<BTreeMap<ModelName, Arc<Desk>>>,
    /// Grows whenever a connection opens or the last one to a peer closes.
    connections: watch::Sender<u64>,
    shutdown: CancellationToken,
}

impl std::fmt::Debug for NodeCore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeCore").field("node", &self.transport.local()).finish_non_exhaustive()
    }
}

impl NodeCore {
    /// Starts every service and reopens the groups that the store knows.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub async fn start(
        config: CoreConfig,
        transport: SharedTransport,
        store: SharedStore,
        signer: Arc<dyn Signer>,
        verifier: Arc<dyn Verifier>,
        shutdown: CancellationToken,
    ) -> Result<Arc<Self>, crate::consensus::GroupError> {
        let watched = WatchedStore::new(store);
        let store: SharedStore = Arc::new(watched.clone());
        let membership = Membership::start(
            transport.clone(),
            verifier.clone(),
            config.membership,
            config.seed,
            (config.clock)(),
            shutdown.clone(),
        );
        let models = Models::new(transport.clone(), membership.clone());
        let blobs = Blobs::new(store.clone(), transport.clone());
        let rollouts =
            Rollouts::start(store.clone(), transport.clone(), membership.clone(), verifier.clone(), shutdown.clone());
        let groups =
            Groups::start(transport.clone(), watched, membership.clone(), config.groups, config.seed, shutdown.clone());
        let hosting = Hosting::new(blobs.clone(), signer.clone(), config.compute.clone());
        let parts = crate::maintenance::Parts {
            store: store.clone(),
            membership: membership.clone(),
            groups: groups.clone(),
            models: models.clone(),
            rollouts: rollouts.clone(),
            blobs: blobs.clone(),
            clock: config.clock.clone(),
            node: transport.local(),
        };
        let maintenance = Maintenance::start(parts, config.maintenance, shutdown.clone());
        let context = LeaderContext {
            transport: transport.clone(),
            membership: membership.clone(),
            groups: groups.clone(),
            rollouts: rollouts.clone(),
            blobs: blobs.clone(),
            models: models.clone(),
            compute: config.compute,
            clock: config.clock,
            shutdown: shutdown.clone(),
        };
        let core = Arc::new(Self {
            roles: config.roles,
            record: Mutex::new(config.record),
            signer,
            verifier,
            transport,
            store,
            membership,
            models,
            blobs,
            rollouts,
            groups,
            hosting,
            maintenance,
            context,
            desks: Mutex::new(BTreeMap::new()),
            connections: watch::channel(0).0,
            shutdown,
        });
        core.transport.subscribe(Topic::Nodes);
        core.transport.subscribe(Topic::Models);
        for model in core.groups.open_existing().await? {
            core.adopt_group(&model);
        }
        spawn(core.clone().announce());
        Ok(core)
    }

    /// This node.
    #[must_use]
    pub fn node(&self) -> NodeId {
        self.transport.local()
    }
    /// Verifies any node's signature.
    #[must_use]
    pub fn verifier(&self) -> &Arc<dyn Verifier> {
        &self.verifier
    }
    /// Signals when a connection opened or the last one to a peer closed; see [`crate::transport::Transport::connected`].
    #[must_use]
    pub fn connections(&self) -> watch::Receiver<u64> {
        self.connections.receiver()
    }
    /// The network.
    #[must_use]
    pub fn transport(&self) -> &SharedTransport {
        &self.transport
    }
    /// The disk.
    #[must_use]
    pub fn store(&self) -> &SharedStore {
        &self.store
    }
    /// Signs as this node.
    #[must_use]
    pub fn signer(&self) -> &Arc<dyn Signer> {
        &self.signer
    }
    /// Who lives.
    #[must_use]
    pub fn membership(&self) -> &Arc<Membership> {
        &self.membership
    }
    /// The directory of models.
    #[must_use]
    pub fn models(&self) -> &Arc<Models> {
        &self.models
    }
    /// Weights, files, tasks.
    #[must_use]
    pub fn blobs(&self) -> &Blobs {
        &self.blobs
    }
    /// Rollouts.
    #[must_use]
    pub fn rollouts(&self) -> &Arc<Rollouts> {
        &self.rollouts
    }
    /// Raft groups.
    #[must_use]
    pub fn groups(&self) -> &Arc<Groups> {
        &self.groups
    }
    /// Models served here.
    #[must_use]
    pub fn hosting(&self) -> &Arc<Hosting> {
        &self.hosting
    }
    /// Copies and deletions.
    #[must_use]
    pub fn maintenance(&self) -> &Arc<Maintenance> {
        &self.maintenance
    }

    /// Begins to leave the mesh in order: nothing new is taken, and what others need is handed to them. See
    /// [`NodeCore::drain_report`].
    ///
    /// # Errors
    /// [`DrainError`] when nobody is left to hand things to.
    pub fn drain(&self) -> Result<(), DrainError> {
        self.maintenance.begin_drain()?;
        self.publish_record();
        Ok(())
    }

    /// How far a drain is. `busy` is what the caller knows this node to be still doing, in words.
    #[must_use]
    pub fn drain_report(&self, mut busy: Vec<String>) -> DrainReport {
        for hosted in self.hosting.list().into_iter().filter(|h| h.queue > 0) {
            busy.push(format!("model {}: {} generations run here", hosted.model, hosted.queue));
        }
        self.maintenance.drain_report(busy)
    }

    /// Wall clock.
    #[must_use]
    pub fn clock(&self) -> &Clock {
        &self.context.clock
    }
    /// Whether this node has `role`.
    #[must_use]
    pub fn has(&self, role: Role) -> bool {
        self.roles.contains(&role)
    }

    /// The desk of a model whose group this node is in.
    #[must_use]
    pub fn desk(&self, model: &ModelName) -> Option<Arc<Desk>> {
        self.desks.lock().unwrap_or_else(PoisonError::into_inner).get(model).cloned()
    }

    /// Creates a model on this node and the other live servers: base weights and files first on a second holder,
    /// then the group, then its first entry. Creating a model that exists is refused.
    ///
    /// # Errors
    /// In words, with the cause.
    pub async fn create_model(
        self: &Arc<Self>,
        model: &ModelName,
        weights: Vec<u8>,
        files: BTreeMap<String, Vec<u8>>,
    ) -> Result<(), String> {
        if !self.has(Role::Server) {
            return Err("this node is not a server: create the model on one that is".into());
        }
        if self.models.get(model).is_some() || self.groups.state(model).is_some() {
            return Err(format!("model {model} exists already"));
        }
        let weights = self.blobs.put(weights).await.map_err(|e| e.to_string())?;
        let mut manifests: ModelFiles = BTreeMap::new();
        for (name, bytes) in files {
            manifests.insert(name, self.blobs.put(bytes).await.map_err(|e| e.to_string())?);
        }
        self.place_on_second(weights.hash, std::iter::once(&weights).chain(manifests.values()).cloned().collect())
            .await?;
        let voters = self.voters();
        let entry = ControlEntry::ModelCreated { model: model.clone(), weights, files: manifests };
        self.groups.create(model, &voters, entry).await.map_err(|e| e.to_string())?;
        self.adopt_group(model);
        Ok(())
    }

    /// Servers first, this one among them, then witnesses up to an odd number.
    fn voters(&self) -> Vec<NodeId> {
        let live = self.membership.live();
        let has = |n: &NodeId, role| self.membership.of_record(*n, |r| r.has(role)) == Some(true);
        let mut voters = vec![self.node()];
        voters.extend(live.iter().copied().filter(|n| *n != self.node() && has(n, Role::Server)));
        voters.truncate(VOTERS_MAX);
        if voters.len() % 2 == 0 {
            voters.extend(live.iter().copied().find(|n| !voters.contains(n) && has(n, Role::Witness)));
        }
        voters.sort_unstable();
        voters
    }

    /// Places manifests on the best live holder other than this node, if there is one.
    ///
    /// # Errors
    /// When there are other holders and none takes them.
    pub async fn place_on_second(
        &self,
        key: starling_protocol::Hash,
        manifests: Vec<Manifest>,
    ) -> Result<Vec<NodeId>, String> {
        let others = self.membership.live_takers().into_iter().filter(|n| *n != self.node());
        let order = starling_protocol::placement::holders(key, others, usize::MAX);
        let mut tried = String::new();
        for peer in &order {
            match self.blobs.place(*peer, manifests.clone(), None).await {
                Ok(()) => return Ok(vec![self.node(), *peer]),
                Err(why) => tried.push_str(&format!("[{}: {why}] ", peer.short())),
            }
        }
        if order.is_empty() { Ok(vec![self.node()]) } else { Err(format!("no second holder: {tried}")) }
    }

    /// Starts what a member of `model`'s group does: the leader's desk, and serving on a server.
    fn adopt_group(self: &Arc<Self>, model: &ModelName) {
        let mut desks = self.desks.lock().unwrap_or_else(PoisonError::into_inner);
        if desks.contains_key(model) {
            return;
        }
        self.transport.subscribe(Topic::Rollouts(model.clone()));
        desks.insert(model.clone(), Desk::start(model.clone(), self.context.clone()));
        spawn(self.clone().announce_changes(model.clone()));
        if self.has(Role::Server)
            && let Some(state) = self.groups.state(model)
        {
            let (models, name) = (self.models.clone(), model.clone());
            let sources = move || models.sources_of(&name);
            let follow = self.hosting.clone().follow(model.clone(), state, sources);
            let shutdown = self.shutdown.clone();
            spawn(async move {
                tokio::select! { biased; () = shutdown.cancelled() => {}, () = follow => {} }
            });
        }
    }

    /// Node record and models, on change and at a slow beat.
    async fn announce(self: Arc<Self>) {
        let mut beat = tokio::time::interval(ANNOUNCE_BEAT);
        beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut hosted = self.hosting.watch();
        let mut members = self.membership.watch();
        loop {
            self.publish_record();
            self.models.ask_if_quiet();
            tokio::select! {
                biased;
                () = self.shutdown.cancelled() => return,
                _ = beat.tick() => self.publish_models(),
                r = hosted.changed() => if r.is_err() { return },
                r = crowd_changed(&mut members) => if r.is_err() { return },
            }
        }
    }

    fn publish_record(&self) {
        let record = {
            let mut record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
            record.intake = self.maintenance.intake();
            if let Some(bytes) = self.maintenance.headroom_bytes() {
                record.storage_free_bytes = bytes;
            }
            let hosted = self.hosting.list();
            hosted.iter().for_each(|h| self.groups.set_fitness(&h.model, h.fitness));
            // Gateways send turns to whom says that it serves.
            let draining = record.intake == Intake::Draining;
            record.models = if draining { Vec::new() } else { hosted };
            record.addresses = self.transport.addresses();
            record.store = self.groups.store_id();
            record.sequence = record.sequence.max((self.context.clock)().0) + 1;
            record.clone()
        };
        self.membership.publish_record(record, &*self.signer);
    }

    fn publish_models(&self) {
        let desks: Vec<ModelName> = self.desks.lock().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect();
        for a in desks.iter().filter_map(|model| self.announcement(model)) {
            self.publish_model(a);
        }
    }

    /// What this member of `model`'s group knows of it; nothing while the group is being made and has no voters.
    fn announcement(&self, model: &ModelName) -> Option<ModelAnnouncement> {
        let (view, state) = (self.groups.leadership(model)?.get(), self.groups.state(model)?.get());
        let voters = self.groups.voters(model);
        if voters.is_empty() {
            return None;
        }
        Some(ModelAnnouncement {
            model: model.clone(),
            line: self.groups.lineage(model)?.line,
            voters,
            leader: view.leader.map(|n| (n, view.term)),
            version: state.version,
            running_job: state.running_job().map(|j| j.job),
        })
    }

    /// Tells the mesh of a model if that is this node's to do: it leads, or nobody does.
    fn publish_model(&self, a: ModelAnnouncement) {
        let publishes = a.leader.is_none_or(|(leader, _)| leader == self.node());
        let gossip = publishes.then(|| encode(&Gossip::Model(a.clone())));
        self.models.on_announcement(a);
        if let Some(gossip) = gossip {
            self.transport.publish(Topic::Models, gossip);
        }
    }

    /// Announces a model as soon as its leader, version or job changes: who waits for a job's first episode should not
    /// wait for the beat too.
    async fn announce_changes(self: Arc<Self>, model: ModelName) {
        let (Some(mut leadership), Some(mut state)) = (self.groups.leadership(&model), self.groups.state(&model))
        else {
            return;
        };
        let mut last = None;
        loop {
            let now = self.announcement(&model);
            if now != last {
                last.clone_from(&now);
                now.into_iter().for_each(|a| self.publish_model(a));
            }
            tokio::select! {
                biased;
                () = self.shutdown.cancelled() => return,
                r = leadership.changed() => if r.is_err() { return },
                r = state.changed() => if r.is_err() { return },
            }
        }
    }

    /// Sets how many agents this node runs at once, for its record.
    pub fn set_agent_slots(&self, slots: u32) {
        self.record.lock().unwrap_or_else(PoisonError::into_inner).agent_slots = slots;
    }

    async fn on_leader_call(self: &Arc<Self>, from: NodeId, body: &[u8]) -> Result<LeaderReply, InboundError> {
        let call: LeaderCall =
            decode("leader call", body, CALL_LEN_BYTES_MAX).map_err(|e| InboundError::Malformed(e.to_string()))?;
        let model = match &call {
            LeaderCall::Models => return Ok(LeaderReply::Models(self.models.list())),
            LeaderCall::Claim { model, .. }
            | LeaderCall::Abort { model, .. }
            | LeaderCall::Propose { model, .. }
            | LeaderCall::Status { model }
            | LeaderCall::Survey { model }
            | LeaderCall::JoinGroup { model, .. } => model.clone(),
        };
        if let LeaderCall::Survey { .. } = &call {
            return Ok(LeaderReply::Standing(self.groups.on_survey(from, &model).await));
        }
        if let LeaderCall::JoinGroup { lineage, .. } = &call {
            if !self.has(Role::Server) && !self.has(Role::Witness) {
                return Ok(LeaderReply::Refused("this node is neither server nor witness".into()));
            }
            return Ok(match self.groups.on_join(from, &model, lineage).await {
                Ok(()) => {
                    self.adopt_group(&model);
                    LeaderReply::Joined { store: self.groups.store_id() }
                }
                Err(e) if e.is_retryable() => return Err(InboundError::Unavailable(e.to_string())),
                Err(e) => LeaderReply::Refused(e.to_string()),
            });
        }
        let Some(desk) = self.desk(&model) else { return Ok(LeaderReply::NotLeader(None)) };
        match call {
            LeaderCall::Status { .. } => Ok(LeaderReply::Status(self.model_status(&model).to_string())),
            LeaderCall::Propose { entry, .. } => {
                use crate::consensus::ProposeError;
                use starling_protocol::control::Applied;
                // A step is its leader's own; jobs may come from anywhere, and so may the first entry of a group whose
                // creator lost its first election.
                let foreign = matches!(
                    *entry,
                    ControlEntry::ModelCreated { .. }
                        | ControlEntry::JobSubmitted { .. }
                        | ControlEntry::JobEnded { .. }
                );
                if !foreign && !planted::has(Bug::SkipFencing) {
                    return Ok(LeaderReply::Refused("only a leader proposes steps and evaluations".into()));
                }
                Ok(match self.groups.propose(&model, *entry).await {
                    Ok(Applied::Yes | Applied::Already) => LeaderReply::Done,
                    Ok(Applied::Refused(why)) => LeaderReply::Refused(why.to_string()),
                    Err(ProposeError::NotLeader(hint)) => LeaderReply::NotLeader(hint),
                    Err(e) => LeaderReply::Refused(e.to_string()),
                })
            }
            call => Ok(desk.on_call(from, &call).unwrap_or_else(|| {
                let leader = self.groups.leadership(&model).and_then(|v| v.borrow().leader);
                LeaderReply::NotLeader(leader.filter(|n| *n != self.node()))
            })),
        }
    }

    /// A model's state for people and tools: version, term, leader, jobs with their steps and evaluations.
    #[must_use]
    pub fn model_status(&self, model: &ModelName) -> serde_json::Value {
        let (Some(view), Some(state)) = (self.groups.leadership(model), self.groups.state(model)) else {
            let known = self.models.get(model);
            let (leader, term) = known.as_ref().and_then(|a| a.leader).unzip();
            return serde_json::json!({
                "model": model, "member": false, "version": known.map(|a| a.version), "term": term, "leader": leader,
            });
        };
        let (view, state): (_, Arc<ModelState>) = (view.borrow().clone(), state.borrow().clone());
        let desk = self.desk(model);
        let counts = desk.as_ref().and_then(|d| {
            d.with_ledger(|l| {
                let c: LedgerCounts = l.counts().clone();
                serde_json::json!({
                    "running": l.running(), "accepted": l.accepted(), "whole_groups": l.whole_groups(),
                    "quota": l.quota(), "adopted": l.adopted_groups() * u64::from(l.job().spec.group_size),
                    "assigned": c.assigned, "rollouts_accepted": c.accepted,
                    "rollouts_ignored": c.ignored, "rollouts_invalid": c.invalid, "aborted": c.aborted,
                    "leases_adopted": c.adopted, "leases_expired": c.expired, "stale_dropped": c.stale_dropped,
                })
            })
        });
        let jobs: Vec<serde_json::Value> = state
            .jobs
            .iter()
            .map(|j| {
                serde_json::json!({
                    "job": j.job, "name": j.spec.name, "steps": j.steps, "of": j.spec.steps,
                    "end": j.end, "evaluations": j.evaluations,
                })
            })
            .collect();
        serde_json::json!({
            "model": model,
            "member": true,
            "version": state.version,
            "line": self.groups.lineage(model).map(|l| l.line),
            "forks": self.groups.lineage(model).map(|l| l.forks),
            "term": view.term,
            "leader": view.leader,
            "is_leader": view.is_self,
            "fitness": self.groups.fitness(model),
            "wait": view.wait,
            "voters": self.groups.voters(model),
            "weights": state.weights,
            "optimizer_state": state.optimizer_state,
            "files": state.files,
            "consumed": state.consumed.len(),
            "terms": state.terms,
            "activity": desk.map(|d| d.activity()),
            "ledger": counts,
            "jobs": jobs,
        })
    }

    /// Asks a model's leader, wherever it is; a leader here is asked without the network.
    ///
    /// # Errors
    /// [`LeaderError`].
    pub async fn ask_leader(&self, model: &ModelName, call: &LeaderCall) -> Result<LeaderReply, LeaderError> {
        self.models.ask_leader(model, call).await
    }
}

/// Returns some time after a member came or went.
async fn crowd_changed(members: &mut watch::Receiver<u64>) -> Result<(), watch::Closed> {
    members.changed().await?;
    tokio::time::sleep(CROWD_PAUSE).await;
    Ok(())
}

/// The [`Inbound`] of a core: the transport calls it.
#[derive(Debug)]
pub struct Dispatch(pub Arc<NodeCore>);

#[async_trait]
impl Inbound for Dispatch {
    async fn on_call(&self, from: NodeId, service: Service, body: Bytes) -> Result<Bytes, InboundError> {
        let core = &self.0;
        match service {
            Service::Swim => core.membership.on_packet(from, &body).await,
            Service::Raft => core.groups.on_raft_call(from, &body).await,
            Service::Rollouts => core.rollouts.on_call(from, &body).await,
            Service::Blobs => core.blobs.on_call(&body).await,
            Service::Leader => core.on_leader_call(from, &body).await.map(|r| encode(&r).into()),
        }
    }

    async fn on_generate(&self, _from: NodeId, mut stream: FrameStream) {
        if self.0.maintenance.is_draining() {
            let failed = GenerateFrame::Failed { retryable: true, reason: "this node is draining".into() };
            let _ = stream.send.send(encode(&failed).into()).await;
            return;
        }
        self.0.hosting.on_generate(stream).await;
    }

    fn on_gossip(&self, _from: NodeId, topic: &Topic, body: &[u8]) -> Verdict {
        let core = &self.0;
        match (topic, decode::<Gossip>("gossip", body, GOSSIP_LEN_BYTES_MAX)) {
            (Topic::Nodes, Ok(Gossip::Node(signed))) => core.membership.on_record(&signed, &*core.verifier),
            (Topic::Rollouts(model), Ok(Gossip::Rollouts(list))) => {
                if let Some(desk) = core.desk(model) {
                    desk.on_announced(list);
                }
                Verdict::Accept
            }
            (Topic::Weights(m), Ok(Gossip::Committed { model, .. })) if *m == model => Verdict::Accept,
            (Topic::Models, Ok(Gossip::Model(a))) => {
                let verdict = core.models.on_announcement(a.clone());
                if verdict == Verdict::Accept {
                    core.groups.on_announcement(&a);
                }
                verdict
            }
            (_, Ok(_)) => Verdict::Reject, // a valid message on the wrong topic
            (_, Err(e)) => {
                tracing::warn!(topic = %topic.name(), error = %e, "gossip refused");
                Verdict::Reject
            }
        }
    }

    fn on_connection(&self, peer: NodeId, connected: bool) {
        self.0.membership.on_connection(peer, connected);
        self.0.connections.modify(|n| {
            *n += 1;
            true
        });
    }
}
