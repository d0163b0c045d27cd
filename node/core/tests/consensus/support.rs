//! A world of nodes with groups only: no training, no rollouts.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use starling_core::consensus::{GroupConfig, Groups, LeaderView, ProposeError};
use starling_core::disk_health::WatchedStore;
use starling_core::membership::{Membership, MembershipConfig};
use starling_core::memory_network::{MemoryConfig, MemoryNetwork};
use starling_core::runtime::NodeScope;
use starling_core::transport::{FrameStream, Inbound, InboundError, Verdict};
use starling_protocol::codec::{decode, encode};
use starling_protocol::control::{Applied, ControlEntry, ModelState, StepCommitted, StepMetrics};
use starling_protocol::job::{CollectionRule, EvaluateSpec, JobSpec, Sampling, TaskSetSpec, TrainerSpec};
use starling_protocol::manifest::Manifest;
use starling_protocol::record::{Intake, NodeRecord, Role};
use starling_protocol::signed::{Signer, Verifier};
use starling_protocol::wire::{
    CALL_LEN_BYTES_MAX, GOSSIP_LEN_BYTES_MAX, Gossip, LeaderCall, LeaderReply, Service, Topic,
};
use starling_protocol::{Hash, JobId, ModelName, NodeId, PolicyVersion, StoreId, Term, Timestamp};
use starling_storage::{Batch, Durability, Family, KeyValue, MemoryStore, Op, SharedStore, Store, StoreError};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

pub(crate) fn id(n: u8) -> NodeId {
    NodeId([n; 32])
}

pub(crate) fn model() -> ModelName {
    ModelName::new("tiny").unwrap()
}

/// Signs by hashing: no test here is about cryptography.
#[derive(Clone, Copy)]
pub(crate) struct TestKey(NodeId);

impl Signer for TestKey {
    fn node_id(&self) -> NodeId {
        self.0
    }
    fn sign(&self, message: &[u8]) -> Vec<u8> {
        Hash::of(&[&self.0.0[..], message].concat()).0.to_vec()
    }
}

impl Verifier for TestKey {
    fn verify(&self, node: NodeId, message: &[u8], signature: &[u8]) -> bool {
        TestKey(node).sign(message) == signature
    }
}

pub(crate) fn record(node: NodeId, role: Role) -> NodeRecord {
    NodeRecord {
        node,
        store: StoreId::default(),
        sequence: 0,
        roles: vec![role],
        version: "test".into(),
        addresses: Vec::new(),
        device: "cpu".into(),
        memory_bytes: 1 << 30,
        cores: 1,
        models: Vec::new(),
        storage_free_bytes: 1 << 30,
        agent_slots: 0,
        intake: Intake::Open,
    }
}

/// What the lead's dispatcher does, for the three services that matter here.
pub(crate) struct Dispatch {
    pub(crate) groups: Arc<Groups>,
    pub(crate) membership: Arc<Membership>,
    pub(crate) key: TestKey,
}

#[async_trait]
impl Inbound for Dispatch {
    async fn on_call(&self, from: NodeId, service: Service, body: Bytes) -> Result<Bytes, InboundError> {
        match service {
            Service::Swim => self.membership.on_packet(from, &body).await,
            Service::Raft => self.groups.on_raft_call(from, &body).await,
            Service::Leader => {
                let reply = match decode::<LeaderCall>("call", &body, CALL_LEN_BYTES_MAX).unwrap() {
                    LeaderCall::Survey { model } => LeaderReply::Standing(self.groups.on_survey(from, &model).await),
                    LeaderCall::JoinGroup { model, lineage } => match self.groups.on_join(from, &model, &lineage).await
                    {
                        Ok(()) => LeaderReply::Joined { store: self.groups.store_id() },
                        Err(e) if e.is_retryable() => return Err(InboundError::Unavailable(e.to_string())),
                        Err(e) => LeaderReply::Refused(e.to_string()),
                    },
                    LeaderCall::Propose { model, entry } => match self.groups.propose(&model, *entry).await {
                        Ok(Applied::Yes | Applied::Already) => LeaderReply::Done,
                        Err(ProposeError::NotLeader(hint)) => LeaderReply::NotLeader(hint),
                        other => LeaderReply::Refused(format!("{other:?}")),
                    },
                    other => panic!("unexpected {other:?}"),
                };
                Ok(encode(&reply).into())
            }
            Service::Rollouts | Service::Blobs => Err(InboundError::Unavailable("not here".into())),
        }
    }
    async fn on_generate(&self, _from: NodeId, _stream: FrameStream) {}
    fn on_gossip(&self, _from: NodeId, _topic: &Topic, body: &[u8]) -> Verdict {
        match decode::<Gossip>("gossip", body, GOSSIP_LEN_BYTES_MAX) {
            Ok(Gossip::Node(record)) => self.membership.on_record(&record, &self.key),
            _ => Verdict::Reject,
        }
    }
    fn on_connection(&self, peer: NodeId, connected: bool) {
        self.membership.on_connection(peer, connected);
    }
}

pub(crate) struct Running {
    /// As the node's own parts see it.
    pub(crate) store: WatchedStore,
    pub(crate) scope: NodeScope,
    pub(crate) groups: Arc<Groups>,
    pub(crate) membership: Arc<Membership>,
}

/// A store whose writes can be made to fail, all of them or those of bulk data.
#[derive(Debug)]
pub(crate) struct FaultyDisk {
    inner: Arc<MemoryStore>,
    /// 0: works, 1: bulk data is refused, 2: everything is.
    fault: AtomicU8,
    /// Writes that still succeed before everything is refused.
    left: AtomicU64,
}

impl FaultyDisk {
    fn over(inner: Arc<MemoryStore>) -> Arc<Self> {
        Arc::new(Self { inner, fault: AtomicU8::new(0), left: AtomicU64::new(u64::MAX) })
    }
    pub(crate) fn works(&self) {
        self.left.store(u64::MAX, Ordering::Relaxed);
        self.fault.store(0, Ordering::Relaxed);
    }
    /// Everything is refused after so many writes.
    pub(crate) fn fails_after(&self, writes: u64) {
        self.left.store(writes, Ordering::Relaxed);
    }
    pub(crate) fn has_failed(&self) -> bool {
        self.fault.load(Ordering::Relaxed) == 2
    }
    pub(crate) fn is_full(&self) {
        self.fault.store(1, Ordering::Relaxed);
    }
    pub(crate) fn fails(&self) {
        self.fault.store(2, Ordering::Relaxed);
    }
}

impl Store for FaultyDisk {
    fn get(&self, family: Family, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        self.inner.get(family, key)
    }
    fn write(&self, batch: Batch, durability: Durability) -> Result<(), StoreError> {
        let left = self.left.load(Ordering::Relaxed);
        if left == 0 {
            self.fails();
        } else if left != u64::MAX {
            self.left.store(left - 1, Ordering::Relaxed);
        }
        let bulk = batch.ops().iter().any(|op| matches!(op, Op::Put(f, ..) if f.is_bulk()));
        match self.fault.load(Ordering::Relaxed) {
            2 => Err(StoreError::Io {
                operation: "write",
                path: "memory".into(),
                source: std::io::Error::other("the disk is gone"),
            }),
            1 if bulk => Err(StoreError::DiskFull { path: "memory".into(), free_bytes: 0, reserve_bytes: 0 }),
            _ => self.inner.write(batch, durability),
        }
    }
    fn scan(&self, family: Family, from: &[u8], to: Option<&[u8]>, limit: usize) -> Result<Vec<KeyValue>, StoreError> {
        self.inner.scan(family, from, to, limit)
    }
    fn last_key_before(&self, family: Family, end: &[u8]) -> Result<Option<KeyValue>, StoreError> {
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

pub(crate) struct World {
    pub(crate) seed: u64,
    pub(crate) started: Instant,
    pub(crate) network: Arc<MemoryNetwork>,
    pub(crate) stores: BTreeMap<NodeId, Arc<MemoryStore>>,
    pub(crate) disks: BTreeMap<NodeId, Arc<FaultyDisk>>,
    pub(crate) roles: BTreeMap<NodeId, Role>,
    pub(crate) nodes: BTreeMap<NodeId, Running>,
    pub(crate) config: GroupConfig,
    pub(crate) runs: u64,
}

impl World {
    pub(crate) fn new(seed: u64) -> Self {
        let config = GroupConfig::default();
        Self {
            seed,
            started: Instant::now(),
            network: MemoryNetwork::new(seed, MemoryConfig::default()),
            stores: BTreeMap::new(),
            disks: BTreeMap::new(),
            roles: BTreeMap::new(),
            nodes: BTreeMap::new(),
            config,
            runs: 0,
        }
    }

    /// A world of servers that know each other, with the group of [`model`] among them.
    pub(crate) async fn with_group(seed: u64, servers: u8) -> Self {
        let mut world = Self::new(seed);
        world.grow(servers).await;
        world
    }

    /// Starts the servers and makes the group of [`model`] among them.
    pub(crate) async fn grow(&mut self, servers: u8) {
        for n in 1..=servers {
            self.start(id(n), Role::Server).await;
        }
        self.settle().await;
        let voters: Vec<_> = self.nodes.keys().copied().collect();
        let first =
            ControlEntry::ModelCreated { model: model(), weights: Manifest::of(b"version 0"), files: BTreeMap::new() };
        self.groups(id(1)).create(&model(), &voters, first).await.unwrap();
    }

    pub(crate) async fn start(&mut self, node: NodeId, role: Role) {
        self.runs += 1;
        self.roles.insert(node, role);
        let seed = self.seed * 1000 + self.runs;
        let scope = NodeScope::new(seed);
        let store: SharedStore = self
            .disks
            .entry(node)
            .or_insert_with(|| FaultyDisk::over(self.stores.entry(node).or_default().clone()))
            .clone();
        let transport = self.network.transport(node);
        let now = Timestamp(1_000_000) + self.started.elapsed() + Duration::from_millis(self.runs);
        let config = GroupConfig { witness: role == Role::Witness, ..self.config.clone() };
        let running = scope
            .run(async {
                let token = CancellationToken::new();
                let (shared, key) = (transport.shared(), TestKey(node));
                let membership = Membership::start(
                    shared.clone(),
                    Arc::new(key),
                    MembershipConfig::default(),
                    seed,
                    now,
                    token.clone(),
                );
                let store = WatchedStore::new(store);
                let groups = Groups::start(shared, store.clone(), membership.clone(), config, seed, token);
                let dispatch = Dispatch { groups: groups.clone(), membership: membership.clone(), key };
                self.network.attach(node, Arc::new(dispatch));
                groups.open_existing().await.unwrap();
                let record = NodeRecord { store: groups.store_id(), ..record(node, role) };
                membership.publish_record(record, &key);
                Running { store, scope: scope.clone(), groups, membership }
            })
            .await;
        self.nodes.insert(node, running);
        for other in self.nodes.keys().filter(|o| **o != node) {
            self.network.connect(node, *other);
        }
    }

    /// The process dies; with `power` the machine too, and what was not synced.
    pub(crate) fn crash(&mut self, node: NodeId, power: bool) {
        let running = self.nodes.remove(&node).unwrap();
        self.network.detach(node);
        assert!(running.scope.crash() > 0);
        if power {
            self.stores[&node].crash();
        }
    }

    /// A dead node's store is gone; its key is not.
    pub(crate) fn lose_store(&mut self, node: NodeId) {
        self.stores.remove(&node);
        self.disks.remove(&node);
    }

    pub(crate) fn groups(&self, node: NodeId) -> Arc<Groups> {
        self.nodes[&node].groups.clone()
    }
    pub(crate) fn view(&self, node: NodeId) -> LeaderView {
        self.groups(node).leadership(&model()).map(|v| v.get()).unwrap_or_default()
    }
    pub(crate) fn state(&self, node: NodeId) -> Arc<ModelState> {
        self.groups(node).state(&model()).unwrap().get()
    }
    pub(crate) fn leaders(&self) -> Vec<(NodeId, Term)> {
        let views = self.nodes.keys().map(|n| (*n, self.view(*n)));
        views.filter(|(_, v)| v.is_self).map(|(n, v)| (n, v.term)).collect()
    }

    pub(crate) async fn until(&self, what: &str, limit: Duration, mut done: impl FnMut(&Self) -> bool) -> Duration {
        let start = Instant::now();
        while !done(self) {
            let said = || self.nodes.keys().map(|n| self.said(*n)).collect::<Vec<_>>().join("\n");
            assert!(start.elapsed() < limit, "seed {}: not within {limit:?}: {what}\n{}", self.seed, said());
            sleep(Duration::from_millis(10)).await;
        }
        start.elapsed()
    }
    /// What a node says of itself.
    fn said(&self, node: NodeId) -> String {
        let Some(lineage) = self.groups(node).lineage(&model()) else { return format!("{node} is in no group") };
        let (view, state) = (self.view(node), self.state(node));
        let voters: Vec<_> = self.groups(node).voters(&model()).iter().map(NodeId::short).collect();
        format!("{} in {}: version {}, voters {voters:?}, {view:?}", node.short(), lineage.line, state.version)
    }
    pub(crate) async fn settle(&self) {
        let n = self.nodes.len();
        self.until("all know all", Duration::from_secs(10), |w| {
            w.nodes.values().all(|r| r.membership.live_records().len() == n)
        })
        .await;
    }
    pub(crate) async fn leader(&self) -> (NodeId, Term) {
        self.leader_among(&self.nodes.keys().copied().collect::<Vec<_>>()).await
    }
    pub(crate) async fn leader_among(&self, nodes: &[NodeId]) -> (NodeId, Term) {
        let among = |w: &Self| w.leaders().into_iter().find(|(n, _)| nodes.contains(n));
        self.until("a leader", Duration::from_secs(10), |w| among(w).is_some()).await;
        among(self).unwrap()
    }
}

pub(crate) fn job_spec() -> JobSpec {
    JobSpec {
        name: "test".into(),
        model: model(),
        seed: 0,
        steps: 1000,
        groups_per_step: 1,
        group_size: 2,
        collection: CollectionRule::Groups,
        staleness_max: 1,
        replication: 2,
        lease_ttl_ms: 60_000,
        optimizer_state_every: 0,
        sampling: Sampling::default(),
        trainer: TrainerSpec::default(),
        tasks: vec![TaskSetSpec { name: "a".into(), weight: 1.0, train: Manifest::of(b"{}"), heldout: None }],
        evaluate: EvaluateSpec::default(),
    }
}

/// The next step of `state`'s line.
pub(crate) fn next_step(state: &ModelState, term: Term, consumed: &[u64]) -> ControlEntry {
    let mut entry = step(term, state.version.steps() + 1, consumed);
    if let ControlEntry::StepCommitted(step) = &mut entry {
        (step.parent, step.version) = (state.version, state.lineage.next(state.version));
        // Different in each line.
        step.weights = Manifest::of(&step.version.0.to_be_bytes());
    }
    entry
}

pub(crate) const JOB: JobId = JobId([7; 16]);

pub(crate) fn submit() -> ControlEntry {
    ControlEntry::JobSubmitted { job: JOB, spec: Box::new(job_spec()), at: Timestamp(1) }
}

pub(crate) fn rollout(n: u64) -> Hash {
    Hash::of(&n.to_be_bytes())
}

pub(crate) fn step(term: Term, version: u64, consumed: &[u64]) -> ControlEntry {
    ControlEntry::StepCommitted(Box::new(StepCommitted {
        job: JOB,
        term,
        parent: PolicyVersion(version.saturating_sub(1)),
        version: PolicyVersion(version),
        weights: Manifest::of(&version.to_be_bytes()),
        weights_delta: None,
        optimizer_state: None,
        holders: vec![id(1)],
        consumed: consumed.iter().map(|n| rollout(*n)).collect(),
        groups_opened: vec![version],
        at: Timestamp(version),
        metrics: StepMetrics::default(),
    }))
}
