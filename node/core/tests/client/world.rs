//! Three servers of one model and a client.

use crate::compute::{Control, FakeCompute};
use starling_core::client::{Client, ClientConfig, Generation, GenerationEvent};
use starling_core::consensus::GroupConfig;
use starling_core::maintenance::MaintenanceConfig;
use starling_core::membership::MembershipConfig;
use starling_core::memory_network::{MemoryConfig, MemoryNetwork};
use starling_core::runtime::NodeScope;
use starling_core::{CoreConfig, Dispatch, NodeCore};
use starling_protocol::assignment::{Assignment, Purpose};
use starling_protocol::job::Sampling;
use starling_protocol::record::{Intake, NodeRecord, Role};
use starling_protocol::rollout::{FinishReason, Rollout, TurnReceipt, verify_rollout};
use starling_protocol::signed::{Signer, Verifier};
use starling_protocol::timeline::{CanonicalMessage, Completion, TimelineTree, TurnInfo};
use starling_protocol::wire::{Generate, TokenFrame};
use starling_protocol::{
    EpisodeId, GroupId, Hash, JobId, ModelName, NodeId, PolicyVersion, StoreId, TaskRef, Term, Timestamp,
};
use starling_storage::MemoryStore;
use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

pub(crate) const SERVERS: [u8; 3] = [1, 2, 3];
pub(crate) const CLIENT: u8 = 9;

pub(crate) fn id(n: u8) -> NodeId {
    NodeId([n; 32])
}

pub(crate) fn model() -> ModelName {
    ModelName::new("tiny").unwrap()
}

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

pub(crate) struct Node {
    pub(crate) scope: NodeScope,
    pub(crate) core: Arc<NodeCore>,
    pub(crate) control: Arc<Control>,
    store: Arc<MemoryStore>,
}

pub(crate) struct World {
    pub(crate) network: Arc<MemoryNetwork>,
    pub(crate) nodes: BTreeMap<u8, Node>,
    pub(crate) client: Client,
    started: Instant,
    runs: u64,
}

impl World {
    /// All nodes run, the model is served by the three servers, and the client knows it.
    pub(crate) async fn start() -> Self {
        let network =
            MemoryNetwork::new(1, MemoryConfig { idle_timeout: Duration::from_secs(10), ..MemoryConfig::default() });
        let started = Instant::now();
        let mut nodes = BTreeMap::new();
        for (run, n) in SERVERS.into_iter().chain([CLIENT]).enumerate() {
            nodes.insert(n, start_node(&network, started, n, run as u64, Arc::default()).await);
        }
        let client = Client::new(nodes[&CLIENT].core.clone(), ClientConfig::default());
        let world = Self { network, nodes, client, started, runs: 10 };
        world.connect();
        world
            .eventually("all know each other", |w| w.nodes.values().all(|n| n.core.membership().live().len() == 4))
            .await;
        let creator = &world.nodes[&1];
        let files = BTreeMap::from([("config.json".to_owned(), b"{}".to_vec())]);
        creator.scope.run(creator.core.create_model(&model(), b"weights".to_vec(), files)).await.unwrap();
        let all_serve = |w: &Self| w.nodes[&CLIENT].core.models().servers_of(&model()).len() == SERVERS.len();
        world.eventually("three servers have the model", all_serve).await;
        world.eventually("its leader is known", |w| w.leader().is_some()).await;
        world
    }

    fn connect(&self) {
        for a in self.nodes.keys() {
            for b in self.nodes.keys().filter(|b| *b > a) {
                self.network.connect(id(*a), id(*b));
            }
        }
    }

    /// The leader that the client knows.
    pub(crate) fn leader(&self) -> Option<u8> {
        let (leader, _) = self.nodes[&CLIENT].core.models().get(&model())?.leader?;
        Some(leader.0[0])
    }

    /// Ends a node's process.
    pub(crate) fn kill(&self, n: u8) {
        self.network.detach(id(n));
        self.nodes[&n].scope.crash();
    }

    /// Starts it again on its old disk.
    pub(crate) async fn restart(&mut self, n: u8) {
        self.runs += 1;
        let node = start_node(&self.network, self.started, n, self.runs, self.nodes[&n].store.clone()).await;
        self.nodes.insert(n, node);
        self.connect();
    }

    pub(crate) async fn eventually(&self, what: &str, condition: impl Fn(&Self) -> bool) {
        let since = Instant::now();
        while !condition(self) {
            assert!(since.elapsed() < Duration::from_secs(60), "not within a minute: {what}");
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Runs as the client's process.
    pub(crate) async fn as_client<T>(&self, future: impl Future<Output = T>) -> T {
        self.nodes[&CLIENT].scope.run(future).await
    }

    pub(crate) async fn generate(&self, request: Generate) -> Answer {
        let generation = self.as_client(self.client.generate(request.clone())).await.unwrap();
        Answer { generation, request, frames: Vec::new(), end: None, longest_pause: Duration::ZERO }
    }

    /// Servers that work on a sequence now or did, ascending.
    pub(crate) fn asked(&self) -> Vec<u8> {
        SERVERS.into_iter().filter(|n| self.nodes[n].control.begun.load(Ordering::Relaxed) > 0).collect()
    }

    pub(crate) fn set_silent(&self, n: u8, silent: bool) {
        self.nodes[&n].control.silent.store(silent, Ordering::Relaxed);
    }
}

async fn start_node(network: &Arc<MemoryNetwork>, started: Instant, n: u8, run: u64, store: Arc<MemoryStore>) -> Node {
    let scope = NodeScope::new(100 + run);
    let control: Arc<Control> = Arc::default();
    let role = if n == CLIENT { Role::Client } else { Role::Server };
    let node = id(n);
    let config = CoreConfig {
        maintenance: MaintenanceConfig::default(),
        roles: vec![role],
        record: NodeRecord {
            node,
            store: StoreId::default(),
            sequence: 0,
            roles: vec![role],
            version: "test".into(),
            addresses: Vec::new(),
            device: "fake".into(),
            memory_bytes: 1 << 30,
            cores: 1,
            models: Vec::new(),
            storage_free_bytes: 1 << 30,
            agent_slots: 0,
            intake: Intake::default(),
        },
        membership: MembershipConfig::default(),
        groups: GroupConfig::default(),
        compute: Arc::new(FakeCompute(control.clone())),
        seed: run,
        clock: Arc::new(move || Timestamp(1_000_000 + run) + started.elapsed()),
    };
    let core = scope
        .run(async {
            let (key, shutdown) = (Arc::new(TestKey(node)), CancellationToken::new());
            let transport = network.transport(node).shared();
            let core = NodeCore::start(config, transport, store.clone(), key.clone(), key, shutdown).await.unwrap();
            network.attach(node, Arc::new(Dispatch(core.clone())));
            core
        })
        .await;
    Node { scope, core, control, store }
}

pub(crate) fn request(seed: u64, max_tokens: u32) -> Generate {
    Generate {
        model: model(),
        prompt: vec![7, 8, 9],
        temperature: 1.0,
        top_p: 1.0,
        top_k: 0,
        seed,
        drawn: 0,
        max_tokens,
        stop_token_ids: Vec::new(),
        top_logprobs: 2,
    }
}

/// An answer as its reader has it.
pub(crate) struct Answer {
    pub(crate) generation: Generation,
    request: Generate,
    pub(crate) frames: Vec<TokenFrame>,
    pub(crate) end: Option<(FinishReason, Option<TurnReceipt>)>,
    /// Between two tokens.
    pub(crate) longest_pause: Duration,
}

impl Answer {
    pub(crate) fn ids(&self) -> Vec<u32> {
        self.frames.iter().map(|t| t.id).collect()
    }

    /// Reads until there are `n` tokens, or the end.
    pub(crate) async fn read(&mut self, world: &World, n: usize) {
        while self.frames.len() < n && self.end.is_none() {
            let asked = Instant::now();
            let event = world.as_client(self.generation.next()).await.unwrap();
            self.longest_pause = self.longest_pause.max(asked.elapsed());
            match event.unwrap() {
                GenerationEvent::Tokens(tokens) => self.frames.extend(tokens),
                GenerationEvent::End { finish, receipt } => self.end = Some((finish, receipt)),
            }
        }
    }

    pub(crate) async fn read_all(&mut self, world: &World) {
        self.read(world, usize::MAX).await;
        assert!(world.as_client(self.generation.next()).await.is_none(), "nothing follows the end");
    }

    /// Tokens without a receipt; checks the receipt by sealing the first `keep` tokens as a rollout.
    pub(crate) fn unreceipted(&self, keep: usize) -> usize {
        let (finish, receipt) = self.end.clone().unwrap();
        let assignment = Assignment {
            job: JobId::default(),
            model: model(),
            episode: EpisodeId([3; 16]),
            group: GroupId::default(),
            attempt: 0,
            task: TaskRef { set: "s".into(), index: 0, id: "t".into() },
            task_line: "{}".into(),
            purpose: Purpose::Train,
            policy_version: PolicyVersion(0),
            term: Term(1),
            seed: 0,
            sampling: Sampling::default(),
            lease_expires: Timestamp(0),
            lease_ttl_ms: 1000,
            replication: 1,
        };
        let kept = &self.frames[..keep];
        let completion = Completion {
            tokens: kept.iter().map(|t| t.id).collect(),
            logprobs: kept.iter().map(|t| t.logprob).collect(),
            versions: kept.iter().map(|t| t.version).collect(),
        };
        let mut tree = TimelineTree::default();
        let message = CanonicalMessage::default();
        let plan = tree.begin_call(Hash::default(), std::slice::from_ref(&message));
        let info = TurnInfo { finish, temperature: 1.0, duration_ms: 1, receipt };
        tree.end_call(&plan, &self.request.prompt, completion, &message, info);
        let mut rollout = Rollout::begin(&assignment, id(CLIENT), "test".into(), Timestamp(0));
        (rollout.timelines, rollout.turns) = tree.timelines();
        let sealed = rollout.seal(&TestKey(id(CLIENT))).unwrap();
        let verified = verify_rollout(sealed.id, &sealed.bytes, &TestKey(id(CLIENT))).unwrap();
        verified.rollout.timelines[0].loss_mask[3..].iter().filter(|trains| !**trains).count()
    }
}
