//! A mesh of whole nodes over the memory network and memory stores, in virtual time.
#![allow(dead_code, reason = "each test file uses a part")]
#![allow(clippy::large_futures, reason = "a test runs one node a task; the stack is large enough")]

use starling_core::compute::{Compute, Engine, StepTrainer, TrainerStart, TrainingMemory};
use starling_core::consensus::GroupConfig;
use starling_core::maintenance::MaintenanceConfig;
use starling_core::membership::MembershipConfig;
use starling_core::memory_network::{MemoryConfig, MemoryNetwork};
use starling_core::runtime::NodeScope;
use starling_core::{CoreConfig, Dispatch, NodeCore};
use starling_protocol::assignment::Purpose;
use starling_protocol::job::TrainerSpec;
use starling_protocol::record::{Intake, NodeRecord, Role};
use starling_protocol::rollout::{
    FinishReason, Receipt, Rollout, SealedRollout, Timeline, Turn, TurnReceipt, receipt_body,
};
use starling_protocol::signed::{Domain, Signature, Signer, Verifier};
use starling_protocol::{
    EpisodeId, GroupId, Hash, JobId, ModelName, NodeId, PolicyVersion, RolloutId, StoreId, TaskRef, Term, Timestamp,
};
use starling_storage::rollouts::get_rollout;
use starling_storage::{AuditReport, MemoryStore, SharedStore, audit};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

pub(crate) fn id(n: u8) -> NodeId {
    NodeId([n; 32])
}

pub(crate) fn model() -> ModelName {
    ModelName::new("tiny").unwrap()
}

pub(crate) const JOB: JobId = JobId([7; 16]);

/// Signs by hashing: no test here is about cryptography.
#[derive(Clone, Copy)]
pub(crate) struct TestKey(pub(crate) NodeId);

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

/// A node without a device: it holds, votes and does not serve.
struct NoCompute;

impl Compute for NoCompute {
    fn start_engine(&self, _: &[u8], _: &[u8], _: PolicyVersion) -> Result<Arc<dyn Engine>, String> {
        Err("no device in this test".into())
    }
    fn start_trainer(&self, _: &[u8], _: TrainerStart, _: &TrainerSpec) -> Result<Box<dyn StepTrainer>, String> {
        Err("no device in this test".into())
    }
    fn training_memory(&self, _: &[u8]) -> Result<TrainingMemory, String> {
        Err("no device in this test".into())
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

/// A valid rollout of one turn, different for each `n`, sealed by `key`'s node.
pub(crate) fn seal(n: u32, key: TestKey) -> SealedRollout {
    let timeline = Timeline {
        tokens: vec![1, 2, n, 3],
        loss_mask: vec![false, false, true, true],
        behaviour_logprobs: vec![0.0, 0.0, -0.5, -0.5],
        policy_versions: vec![PolicyVersion(0), PolicyVersion(0), PolicyVersion(1), PolicyVersion(1)],
    };
    let (t, versions) = (&timeline, &timeline.policy_versions[2..]);
    let body = receipt_body(&model(), &t.tokens[..2], &t.tokens[2..], &t.behaviour_logprobs[2..], versions);
    let mut episode = [0; 16];
    episode[..4].copy_from_slice(&n.to_be_bytes());
    let turn = Turn {
        timeline: 0,
        prompt_len: 2,
        completion_len: 2,
        finish: FinishReason::Length,
        temperature: 1.0,
        duration_ms: 1,
        receipt: Some(TurnReceipt {
            unreceipted_len: 0,
            receipt: Receipt { signature: Signature::new(&key, Domain::Receipt, &body) },
        }),
        fork_cause: None,
    };
    let rollout = Rollout {
        job: JOB,
        model: model(),
        episode: EpisodeId(episode),
        group: GroupId { term: Term(1), seq: u64::from(n / 8) },
        task: TaskRef { set: "sums".into(), index: 0, id: "1".into() },
        purpose: Purpose::Train,
        lease_term: Term(1),
        gateway: key.0,
        agent: "test".into(),
        timelines: vec![timeline],
        turns: vec![turn],
        reward: 1.0,
        metrics: BTreeMap::new(),
        started: Timestamp(1),
        ended: Timestamp(2),
    };
    rollout.seal(&key).unwrap()
}

struct Running {
    scope: NodeScope,
    core: Arc<NodeCore>,
}

pub(crate) struct World {
    pub(crate) network: Arc<MemoryNetwork>,
    pub(crate) stores: BTreeMap<NodeId, Arc<MemoryStore>>,
    pub(crate) config: MaintenanceConfig,
    nodes: BTreeMap<NodeId, Running>,
    started: Instant,
    runs: u64,
}

impl World {
    pub(crate) fn new() -> Self {
        Self {
            network: MemoryNetwork::new(1, MemoryConfig::default()),
            stores: BTreeMap::new(),
            config: MaintenanceConfig::default(),
            nodes: BTreeMap::new(),
            started: Instant::now(),
            runs: 0,
        }
    }

    /// Holders 1 to `holders`, and node 99, a client that is the gateway.
    pub(crate) async fn with_holders(holders: u8, role: Role) -> Self {
        let mut world = Self::new();
        for n in 1..=holders {
            world.start(id(n), role).await;
        }
        world.start(id(99), Role::Client).await;
        world.settle().await;
        world
    }

    pub(crate) async fn start(&mut self, node: NodeId, role: Role) {
        self.start_with(node, role, Arc::new(NoCompute)).await;
    }

    /// Starts a node with a device of the test's own.
    pub(crate) async fn start_with(&mut self, node: NodeId, role: Role, compute: Arc<dyn Compute>) {
        self.runs += 1;
        let scope = NodeScope::new(self.runs);
        let store: SharedStore = self.stores.entry(node).or_default().clone();
        let transport = self.network.transport(node).shared();
        let (started, run) = (self.started, self.runs);
        let config = CoreConfig {
            roles: vec![role],
            record: record(node, role),
            membership: MembershipConfig::default(),
            groups: GroupConfig { witness: role == Role::Witness, ..GroupConfig::default() },
            maintenance: self.config.clone(),
            compute,
            seed: self.runs,
            clock: Arc::new(move || Timestamp(1_000_000 + run) + started.elapsed()),
        };
        let key = Arc::new(TestKey(node));
        let core = scope
            .run(async {
                let core = NodeCore::start(config, transport, store, key.clone(), key, CancellationToken::new()).await;
                let core = core.unwrap();
                self.network.attach(node, Arc::new(Dispatch(core.clone())));
                core
            })
            .await;
        self.nodes.insert(node, Running { scope, core });
        for other in self.nodes.keys().filter(|o| **o != node) {
            self.network.connect(node, *other);
        }
    }

    /// The process dies.
    pub(crate) fn kill(&mut self, node: NodeId) {
        let running = self.nodes.remove(&node).unwrap();
        self.network.detach(node);
        assert!(running.scope.crash() > 0);
    }

    pub(crate) fn core(&self, node: NodeId) -> Arc<NodeCore> {
        self.nodes[&node].core.clone()
    }

    pub(crate) fn is_running(&self, node: NodeId) -> bool {
        self.nodes.contains_key(&node)
    }

    /// Runs `work` as node `node`.
    pub(crate) async fn as_node<T>(&self, node: NodeId, work: impl Future<Output = T>) -> T {
        self.nodes[&node].scope.clone().run(work).await
    }

    pub(crate) async fn until(&self, what: &str, limit: Duration, mut done: impl FnMut(&Self) -> bool) -> Duration {
        let start = Instant::now();
        while !done(self) {
            assert!(start.elapsed() < limit, "not within {limit:?}: {what}");
            sleep(Duration::from_millis(50)).await;
        }
        start.elapsed()
    }

    pub(crate) async fn settle(&self) {
        let n = self.nodes.len();
        self.until("all know all", Duration::from_secs(20), |w| {
            w.nodes.values().all(|r| r.core.membership().live_records().len() == n)
        })
        .await;
    }

    /// Rollouts `from..to`, acknowledged by node 99.
    pub(crate) async fn acknowledge(&self, rollouts: std::ops::Range<u32>) -> Vec<RolloutId> {
        let gateway = self.core(id(99));
        let mut ids = Vec::new();
        for n in rollouts {
            let sealed = seal(n, TestKey(id(99)));
            ids.push(sealed.id);
            self.as_node(id(99), gateway.rollouts().replicate(&model(), JOB, sealed, 2)).await.unwrap();
        }
        ids
    }

    /// Live nodes whose store has an intact copy.
    pub(crate) fn holders_of(&self, rollout: RolloutId) -> Vec<NodeId> {
        let has = |n: &&NodeId| matches!(get_rollout(&*self.stores[*n], rollout), Ok(Some(_)));
        self.nodes.keys().filter(has).copied().collect()
    }

    pub(crate) fn fewest_copies(&self, rollouts: &[RolloutId]) -> usize {
        rollouts.iter().map(|r| self.holders_of(*r).len()).min().unwrap_or_default()
    }

    /// Audits the stores of the live nodes alone.
    pub(crate) fn audit(&self, acknowledged: &[RolloutId]) -> AuditReport {
        let stores: Vec<SharedStore> = self.nodes.keys().map(|n| self.stores[n].clone() as SharedStore).collect();
        audit(&stores, acknowledged.iter().copied()).unwrap()
    }
}
