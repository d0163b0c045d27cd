//! SWIM and node records over the memory network, in virtual time; and the memory network itself.
#![expect(clippy::unwrap_used, reason = "a test's helper fails its test by panicking")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use starling_core::membership::{MemberEvent, Membership, MembershipConfig};
use starling_core::memory_network::{MemoryConfig, MemoryNetwork};
use starling_core::runtime::NodeScope;
use starling_core::transport::{CallError, FrameStream, Inbound, InboundError, Verdict};
use starling_protocol::codec::decode;
use starling_protocol::record::{Intake, NodeRecord, Role, SignedRecord};
use starling_protocol::signed::{Signer, Verifier};
use starling_protocol::wire::{GOSSIP_LEN_BYTES_MAX, Gossip, Service, Topic};
use starling_protocol::{Hash, NodeId, StoreId, Timestamp};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

fn id(n: u16) -> NodeId {
    let mut bytes = [0; 32];
    bytes[..2].copy_from_slice(&n.to_be_bytes());
    NodeId(bytes)
}

/// Signs by hashing: no test here is about cryptography.
#[derive(Clone, Copy)]
struct TestKey(NodeId);

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

fn record(node: NodeId) -> NodeRecord {
    NodeRecord {
        node,
        store: StoreId::default(),
        sequence: 0,
        roles: vec![Role::Server],
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

struct Dispatch(Arc<Membership>, TestKey);

#[async_trait]
impl Inbound for Dispatch {
    async fn on_call(&self, from: NodeId, service: Service, body: Bytes) -> Result<Bytes, InboundError> {
        match service {
            Service::Swim => self.0.on_packet(from, &body).await,
            // Echo, for the tests of the network.
            _ => Ok(body),
        }
    }
    async fn on_generate(&self, _from: NodeId, mut stream: FrameStream) {
        while let Ok(Some(frame)) = stream.recv.recv().await {
            if stream.send.send(frame).await.is_err() {
                return;
            }
        }
    }
    fn on_gossip(&self, _from: NodeId, _topic: &Topic, body: &[u8]) -> Verdict {
        match decode::<Gossip>("gossip", body, GOSSIP_LEN_BYTES_MAX) {
            Ok(Gossip::Node(record)) => self.0.on_record(&record, &self.1),
            _ => Verdict::Reject,
        }
    }
    fn on_connection(&self, peer: NodeId, connected: bool) {
        self.0.on_connection(peer, connected);
    }
}

struct World {
    network: Arc<MemoryNetwork>,
    started: Instant,
    nodes: BTreeMap<NodeId, (NodeScope, Arc<Membership>, CancellationToken)>,
    runs: u64,
    seed: u64,
}

impl World {
    fn new(seed: u64) -> Self {
        let network = MemoryNetwork::new(seed, MemoryConfig::default());
        Self { network, started: Instant::now(), nodes: BTreeMap::new(), runs: 0, seed }
    }

    /// Starts a node that knows only `peer`.
    async fn start(&mut self, node: NodeId, peer: Option<NodeId>) {
        self.runs += 1;
        let seed = self.seed * 1000 + self.runs;
        let scope = NodeScope::new(seed);
        let now = Timestamp(1_000_000 + self.runs) + self.started.elapsed();
        let token = CancellationToken::new();
        let membership = scope
            .run(async {
                let transport = self.network.transport(node).shared();
                let (key, config) = (TestKey(node), MembershipConfig::default());
                let membership = Membership::start(transport, Arc::new(key), config, seed, now, token.clone());
                self.network.attach(node, Arc::new(Dispatch(membership.clone(), key)));
                membership.publish_record(record(node), &key);
                membership
            })
            .await;
        self.nodes.insert(node, (scope, membership, token));
        if let Some(peer) = peer {
            self.network.connect(node, peer);
        }
    }

    async fn star(seed: u64, n: u16) -> Self {
        let mut world = Self::new(seed);
        world.start(id(1), None).await;
        for i in 2..=n {
            world.start(id(i), Some(id(1))).await;
        }
        world
    }

    fn crash(&mut self, node: NodeId) {
        let (scope, ..) = self.nodes.remove(&node).unwrap();
        self.network.detach(node);
        assert!(scope.crash() > 0);
    }

    fn get(&self, node: NodeId) -> &Arc<Membership> {
        &self.nodes[&node].1
    }

    async fn until(&self, what: &str, limit: Duration, mut done: impl FnMut(&Self) -> bool) -> Duration {
        let start = Instant::now();
        while !done(self) {
            assert!(start.elapsed() < limit, "seed {}: not within {limit:?}: {what}", self.seed);
            sleep(Duration::from_millis(10)).await;
        }
        start.elapsed()
    }

    async fn all_know_all(&self, limit: Duration) -> Duration {
        let all: Vec<_> = self.nodes.keys().copied().collect();
        self.until("all know all, with their records", limit, |w| {
            w.nodes.values().all(|(_, m, _)| m.live() == all && m.live_servers() == all)
        })
        .await
    }
}

#[tokio::test(start_paused = true)]
async fn all_find_each_other_through_one_node_and_records_spread() {
    for seed in 0..5 {
        let world = World::star(seed, 8).await;
        let took = world.all_know_all(Duration::from_secs(10)).await;
        assert!(took < Duration::from_secs(5), "seed {seed}: {took:?}");
        let record = world.get(id(3)).record(id(7)).unwrap();
        assert_eq!((record.node, record.cores), (id(7), 1));
        assert_eq!(world.get(id(3)).live_holders().len(), 8);
    }
}

#[tokio::test(start_paused = true)]
async fn a_killed_node_is_known_dead_soon_and_comes_back_after_a_restart() {
    for seed in 0..10 {
        let mut world = World::star(seed, 4).await;
        world.all_know_all(Duration::from_secs(10)).await;
        let mut events = world.get(id(1)).events();
        world.crash(id(3));
        let took = world
            .until("it is known dead", Duration::from_secs(6), |w| w.nodes.values().all(|(_, m, _)| !m.is_live(id(3))))
            .await;
        assert!(took <= Duration::from_millis(3500), "seed {seed}: {took:?}");
        assert_eq!(events.try_recv(), Ok(MemberEvent::Left(id(3))));
        let kept = world.get(id(1)).record(id(3)).expect("records of the dead are kept");
        assert!(!world.get(id(1)).live_servers().contains(&id(3)));

        world.start(id(3), Some(id(2))).await;
        world.all_know_all(Duration::from_secs(5)).await;
        let renewed = |w: &World| w.get(id(1)).record(id(3)).unwrap().sequence > kept.sequence;
        world.until("its new record is known", Duration::from_secs(2), renewed).await;
        assert_eq!(events.try_recv(), Ok(MemberEvent::Joined(id(3))));
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_that_restarts_before_anyone_noticed_learns_everything_again() {
    let mut world = World::star(3, 4).await;
    world.all_know_all(Duration::from_secs(10)).await;
    world.crash(id(3));
    sleep(Duration::from_millis(200)).await;
    world.start(id(3), Some(id(1))).await;
    world.all_know_all(Duration::from_secs(5)).await;
    sleep(Duration::from_secs(10)).await;
    world.all_know_all(Duration::from_millis(1)).await;
}

#[tokio::test(start_paused = true)]
async fn nobody_is_suspected_wrongly_on_a_lossy_network() {
    let world = World::star(4, 8).await;
    world.all_know_all(Duration::from_secs(10)).await;
    world.network.configure(|c| {
        c.link.loss = 0.02;
        c.link.latency = Duration::from_millis(1)..=Duration::from_millis(40);
    });
    let mut events: Vec<_> = world.nodes.values().map(|(_, m, _)| m.events()).collect();
    sleep(Duration::from_secs(300)).await;
    let false_alarms: usize = events.iter_mut().map(|e| std::iter::from_fn(|| e.try_recv().ok()).count()).sum();
    assert_eq!(false_alarms, 0);
}

#[tokio::test(start_paused = true)]
async fn both_sides_of_a_partition_find_each_other_again() {
    let world = World::star(5, 6).await;
    world.all_know_all(Duration::from_secs(10)).await;
    world.network.partition(&[id(5), id(6)]);
    world
        .until("each side sees itself", Duration::from_secs(10), |w| {
            w.get(id(5)).live() == [id(5), id(6)] && w.get(id(1)).live().len() == 4
        })
        .await;
    sleep(Duration::from_secs(60)).await;
    world.network.heal_all();
    let took = world.all_know_all(Duration::from_secs(30)).await;
    assert!(took < Duration::from_secs(15), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn a_node_that_leaves_is_gone_at_once() {
    let mut world = World::star(6, 4).await;
    world.all_know_all(Duration::from_secs(10)).await;
    let (_, _, token) = world.nodes.remove(&id(2)).unwrap();
    token.cancel();
    let took = world
        .until("it is gone", Duration::from_secs(2), |w| w.nodes.values().all(|(_, m, _)| !m.is_live(id(2))))
        .await;
    assert!(took < Duration::from_millis(1000), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn records_are_judged() {
    let world = World::star(7, 2).await;
    world.all_know_all(Duration::from_secs(10)).await;
    let key = TestKey(id(9));
    let seal = |sequence| SignedRecord::seal(&NodeRecord { sequence, ..record(id(9)) }, &key);
    let members = world.get(id(1));
    assert_eq!(members.on_record(&seal(5), &key), Verdict::Accept);
    assert_eq!(members.on_record(&seal(5), &key), Verdict::Ignore, "known");
    assert_eq!(members.on_record(&seal(4), &key), Verdict::Ignore, "old");
    let forged = SignedRecord::seal(&NodeRecord { sequence: 6, ..record(id(9)) }, &TestKey(id(8)));
    assert_eq!(members.on_record(&forged, &key), Verdict::Reject, "signed by another");
    let mut tampered = seal(7);
    tampered.body[40] ^= 1;
    assert_eq!(members.on_record(&tampered, &key), Verdict::Reject);
    assert_eq!(members.record(id(9)).unwrap().sequence, 5);
    assert!(!members.is_live(id(9)), "a record does not make a node live");
}

#[tokio::test(start_paused = true)]
async fn the_same_seed_gives_the_same_traffic() {
    async fn run(seed: u64) -> (u64, Vec<Duration>) {
        let mut world = World::star(seed, 6).await;
        world.network.configure(|c| c.link.loss = 0.02);
        let mut took = vec![world.all_know_all(Duration::from_secs(20)).await];
        world.crash(id(4));
        took.push(
            world
                .until("it is known dead", Duration::from_secs(10), |w| {
                    w.nodes.values().all(|(_, m, _)| !m.is_live(id(4)))
                })
                .await,
        );
        (world.network.calls(), took)
    }
    assert_eq!(run(8).await, run(8).await);
    assert_ne!(run(8).await, run(9).await);
}

#[tokio::test(start_paused = true)]
async fn calls_are_late_silent_or_refused_as_on_a_real_network() {
    let mut world = World::star(10, 3).await;
    let transport = world.network.transport(id(1)).shared();
    let second = Duration::from_secs(1);
    let call = |to, body: &'static [u8]| transport.call(to, Service::Blobs, Bytes::from_static(body), second);
    assert_eq!(call(id(2), b"a").await, Ok(Bytes::from_static(b"a")));
    assert_eq!(call(id(1), b"to myself").await, Ok(Bytes::from_static(b"to myself")));
    assert!(matches!(call(id(99), b"x").await, Err(CallError::NotConnected { .. })));

    let start = Instant::now();
    world.network.cut_one_way(id(2), id(1)); // only the answer is lost
    assert_eq!(call(id(2), b"b").await, Err(CallError::Timeout { peer: id(2), after: second }));
    assert_eq!(start.elapsed(), second);
    world.network.heal_all();
    assert!(call(id(2), b"c").await.is_ok());

    assert!(transport.connected().contains(&id(2)));
    world.network.cut(id(1), id(2));
    sleep(Duration::from_secs(6)).await;
    assert!(!transport.connected().contains(&id(2)), "an idle connection over a cut link is given up");
    world.network.heal_all();
    assert!(call(id(2), b"d").await.is_ok(), "and dialled again");

    world.crash(id(3));
    assert!(matches!(call(id(3), b"e").await, Err(CallError::NotConnected { .. })));
}

#[tokio::test(start_paused = true)]
async fn streams_keep_their_order_and_break_with_their_peer() {
    let mut world = World::star(11, 2).await;
    let transport = world.network.transport(id(1)).shared();
    let mut stream = transport.open_generate(id(2), Duration::from_secs(1)).await.unwrap();
    for i in 0..10_u8 {
        stream.send.send(Bytes::copy_from_slice(&[i])).await.unwrap();
    }
    for i in 0..10_u8 {
        assert_eq!(stream.recv.recv().await, Ok(Some(Bytes::copy_from_slice(&[i]))));
    }
    // Closed in order: the peer's loop ends and closes its half too.
    drop(stream.send);
    assert_eq!(stream.recv.recv().await, Ok(None));

    let mut stream = transport.open_generate(id(2), Duration::from_secs(1)).await.unwrap();
    stream.send.send(Bytes::from_static(b"x")).await.unwrap();
    assert!(stream.recv.recv().await.is_ok());
    world.crash(id(2));
    assert!(matches!(stream.recv.recv().await, Err(CallError::Failed { .. })));
}
