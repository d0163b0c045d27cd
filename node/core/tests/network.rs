//! The memory network: what links do to messages, whom gossip reaches, and that a run follows from its seed.
#![expect(clippy::unwrap_used, reason = "a test's helper fails its test by panicking")]

mod mesh;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use mesh::{Mesh, id};
use starling_core::memory_network::{
    Fate, LinkProfile, MemoryConfig, MemoryNetwork, MessageKind, NetworkObserver, NodeCounters,
};
use starling_core::transport::{CallError, FrameStream, Inbound, InboundError, SharedTransport, Verdict};
use starling_protocol::NodeId;
use starling_protocol::wire::{Service, Topic};
use tokio::time::{Instant, sleep};

/// Echoes calls and streams, and keeps what it saw.
#[derive(Default)]
struct Probe {
    calls: Mutex<Vec<Bytes>>,
    gossip: AtomicUsize,
}

#[async_trait]
impl Inbound for Probe {
    async fn on_call(&self, _from: NodeId, _service: Service, body: Bytes) -> Result<Bytes, InboundError> {
        self.calls.lock().unwrap().push(body.clone());
        Ok(body)
    }
    async fn on_generate(&self, _from: NodeId, mut stream: FrameStream) {
        while let Ok(Some(frame)) = stream.recv.recv().await {
            if stream.send.send(frame).await.is_err() {
                return;
            }
        }
    }
    fn on_gossip(&self, _from: NodeId, _topic: &Topic, _body: &[u8]) -> Verdict {
        self.gossip.fetch_add(1, Ordering::Relaxed);
        Verdict::Accept
    }
    fn on_connection(&self, _peer: NodeId, _connected: bool) {}
}

const LIMIT: Duration = Duration::from_secs(10);

fn profile() -> LinkProfile {
    let latency = Duration::from_millis(10);
    LinkProfile { latency: latency..=latency, ..LinkProfile::default() }
}

fn nodes(seed: u64, n: u16, config: MemoryConfig) -> (Arc<MemoryNetwork>, Vec<Arc<Probe>>, Vec<SharedTransport>) {
    let network = MemoryNetwork::new(seed, config);
    let probes: Vec<Arc<Probe>> = (0..n).map(|_| Arc::default()).collect();
    for (i, probe) in (1..).zip(&probes) {
        network.attach(id(i), probe.clone());
    }
    let transports = (1..=n).map(|i| network.transport(id(i)).shared()).collect();
    (network, probes, transports)
}

#[tokio::test(start_paused = true)]
async fn a_doubled_call_is_served_twice_and_answered_once() {
    let (network, probes, transports) = nodes(1, 2, MemoryConfig::default());
    network.set_link(id(1), id(2), LinkProfile { duplication: 1.0, ..profile() });
    let body = Bytes::from_static(b"once");
    assert_eq!(transports[0].call(id(2), Service::Blobs, body.clone(), LIMIT).await, Ok(body));
    sleep(Duration::from_secs(1)).await;
    assert_eq!(probes[1].calls.lock().unwrap().len(), 2);
    let sent = network.counters(id(1)).of(MessageKind::Call(Service::Blobs));
    assert_eq!((sent.messages_sent, sent.messages_received), (2, 2), "both copies and both answers cross the link");
    // The other direction has no such profile.
    transports[1].call(id(1), Service::Blobs, Bytes::new(), LIMIT).await.unwrap();
    assert_eq!(probes[0].calls.lock().unwrap().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn calls_overtake_each_other_only_on_a_link_that_reorders() {
    for (reordering, overtaken) in [(0.0, false), (0.5, true)] {
        let (network, probes, transports) = nodes(2, 2, MemoryConfig::default());
        network.configure(|c| c.link = LinkProfile { reordering, ..profile() });
        network.connect(id(1), id(2));
        let calls = (0..20_u8).map(|i| transports[0].call(id(2), Service::Blobs, Bytes::from(vec![i]), LIMIT));
        futures::future::join_all(calls).await;
        let seen: Vec<_> = probes[1].calls.lock().unwrap().iter().map(|b| b[0]).collect();
        assert_eq!(seen.len(), 20);
        assert_eq!(!seen.is_sorted(), overtaken, "{seen:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn messages_queue_for_the_bandwidth_and_are_dropped_beyond_the_queue() {
    let (network, probes, transports) = nodes(3, 3, MemoryConfig::default());
    let narrow = LinkProfile { bandwidth: Some(1000), queue_bytes_max: 3000, ..profile() };
    network.set_link(id(1), id(2), narrow.clone());
    network.set_link(id(2), id(1), profile());
    network.connect(id(1), id(2));
    network.connect(id(1), id(3));
    let start = Instant::now();
    let kilobyte = Bytes::from(vec![0; 1000]);
    let call = |to, limit| transports[0].call(to, Service::Blobs, kilobyte.clone(), limit);
    let (one, two, three, four) =
        tokio::join!(call(id(2), LIMIT), call(id(2), LIMIT), call(id(2), LIMIT), call(id(2), Duration::from_secs(5)));
    assert!(one.is_ok() && two.is_ok() && three.is_ok());
    assert!(matches!(four, Err(CallError::Timeout { .. })), "the fourth found three seconds of queue: {four:?}");
    assert_eq!(start.elapsed(), Duration::from_secs(5));
    assert_eq!(probes[1].calls.lock().unwrap().len(), 3);

    // A node's profile is that of its access line: what it sends to different nodes shares it.
    network.set_node_profile(id(1), LinkProfile { bandwidth: Some(1000), ..profile() });
    let start = Instant::now();
    network.connect(id(2), id(3));
    let (a, b) = tokio::join!(call(id(3), LIMIT), call(id(3), LIMIT));
    assert!(a.is_ok() && b.is_ok());
    // Each crosses the line twice, there and back.
    assert!(start.elapsed() >= Duration::from_secs(3), "{:?}", start.elapsed());
    let start = Instant::now();
    transports[1].call(id(3), Service::Blobs, kilobyte.clone(), LIMIT).await.unwrap();
    assert!(start.elapsed() < Duration::from_millis(100), "others are not slowed");
}

#[tokio::test(start_paused = true)]
async fn a_lossy_stream_is_late_and_whole() {
    let mut took = Vec::new();
    for loss in [0.0, 0.3] {
        let (network, _probes, transports) = nodes(4, 2, MemoryConfig::default());
        network.configure(|c| c.link = LinkProfile { loss, ..profile() });
        let start = Instant::now();
        let mut stream = transports[0].open_generate(id(2), LIMIT).await.unwrap();
        for i in 0..50_u8 {
            stream.send.send(Bytes::from(vec![i; 3000])).await.unwrap();
            assert_eq!(stream.recv.recv().await, Ok(Some(Bytes::from(vec![i; 3000]))));
        }
        took.push(start.elapsed());
    }
    assert!(took[1] > took[0] * 3 / 2, "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn gossip_reaches_everybody_over_a_few_neighbours() {
    let n = 200;
    let (network, probes, transports) = nodes(5, n, MemoryConfig::default());
    for transport in &transports {
        transport.subscribe(Topic::Nodes);
    }
    for i in 2..=n {
        network.connect(id(1), id(i)); // the bootstrap node
        for k in 1..8 {
            network.connect(id(i), id((i * (2 * k + 1) + 31 * k) % n + 1));
        }
    }
    sleep(Duration::from_secs(10)).await;
    let degrees: Vec<_> = (1..=n).map(|i| network.gossip_degree(id(i), &Topic::Nodes).unwrap()).collect();
    assert!(degrees.iter().all(|d| (1..=10).contains(d)), "{degrees:?}");
    let before = network.counters(id(1)).of(MessageKind::Gossip).messages_sent;
    for transport in transports.iter().skip(1).take(9) {
        transport.publish(Topic::Nodes, vec![0; 100]);
    }
    sleep(Duration::from_secs(10)).await;
    let others = usize::from(n) - 1;
    let hub = network.counters(id(1)).of(MessageKind::Gossip).messages_sent - before;
    assert!(hub <= 180, "a node with {others} neighbours passed nine messages on {hub} times");
    // Its own it gives to all of them.
    transports[0].publish(Topic::Nodes, vec![0; 100]);
    let flooded = network.counters(id(1)).of(MessageKind::Gossip).messages_sent - before - hub;
    assert_eq!(flooded, others as u64);
    sleep(Duration::from_secs(10)).await;
    let heard: usize = probes.iter().map(|p| p.gossip.load(Ordering::Relaxed)).sum();
    assert_eq!(heard, 10 * others, "each message once at each other node");

    // A new node that knows only one other is reached too, and its words reach all.
    let late: Arc<Probe> = Arc::default();
    network.attach(id(n + 1), late.clone());
    let transport = network.transport(id(n + 1)).shared();
    transport.subscribe(Topic::Nodes);
    network.connect(id(n + 1), id(7));
    transports[99].publish(Topic::Nodes, vec![1; 100]);
    transport.publish(Topic::Nodes, vec![2; 100]);
    sleep(Duration::from_secs(10)).await;
    assert_eq!(late.gossip.load(Ordering::Relaxed), 1);
    let heard: usize = probes.iter().map(|p| p.gossip.load(Ordering::Relaxed)).sum();
    assert_eq!(heard, 10 * others + others + usize::from(n));
}

#[tokio::test(start_paused = true)]
async fn a_node_with_too_many_connections_closes_the_one_used_least_recently() {
    let (_network, _probes, transports) = nodes(6, 6, MemoryConfig { connections_max: 3, ..MemoryConfig::default() });
    let call = |to| transports[0].call(id(to), Service::Blobs, Bytes::new(), LIMIT);
    for to in [2, 3, 4, 2, 5] {
        call(to).await.unwrap();
        sleep(Duration::from_secs(2)).await;
    }
    assert_eq!(transports[0].connected(), [id(2), id(4), id(5)]);
    assert!(call(3).await.is_ok(), "and dials it again");
    assert_eq!(transports[0].connected(), [id(2), id(3), id(5)]);
}

#[tokio::test(start_paused = true)]
async fn partitions_overlap_and_end_one_by_one() {
    let (network, _probes, _transports) = nodes(11, 5, MemoryConfig::default());
    let cut = |a, b| network.is_cut(id(a), id(b));
    let first = network.begin_partition(&[vec![id(1), id(2)], vec![id(3), id(4)]]);
    let second = network.begin_partition(&[vec![id(1)], vec![id(2), id(3)]]);
    assert!(cut(1, 3) && cut(3, 1) && cut(1, 2) && cut(2, 4) && !cut(3, 4));
    assert!(!cut(1, 5) && !cut(5, 4), "a node on no side hears everyone");
    network.join_side(first, 1, id(5));
    assert!(cut(1, 5) && !cut(5, 4));
    network.end_partition(first);
    assert!(cut(1, 2) && cut(1, 3) && !cut(1, 4) && !cut(1, 5));
    network.cut(id(4), id(5));
    network.end_partition(second);
    assert!(!cut(1, 2) && cut(4, 5), "what others cut stays cut");
}

#[tokio::test(start_paused = true)]
async fn a_partition_leaves_later_nodes_and_healed_pairs_alone() {
    let (network, _probes, _transports) = nodes(7, 4, MemoryConfig::default());
    network.partition(&[id(1), id(2)]);
    network.isolate(id(2));
    assert!(network.is_cut(id(1), id(3)) && network.is_cut(id(1), id(2)) && !network.is_cut(id(3), id(4)));
    network.heal_one_way(id(1), id(3));
    assert!(!network.is_cut(id(1), id(3)) && network.is_cut(id(3), id(1)));
    network.cut_one_way(id(1), id(3));
    assert!(network.is_cut(id(1), id(3)));
    network.heal_all();
    let all: Vec<_> = (1..=4).map(id).collect();
    assert!(all.iter().all(|a| all.iter().all(|b| !network.is_cut(*a, *b))));
}

type Seen = (Instant, NodeId, NodeId, MessageKind, usize, Fate);

#[derive(Default)]
struct Trace(Mutex<Vec<Seen>>);

impl NetworkObserver for Trace {
    fn on_message(&self, at: Instant, from: NodeId, to: NodeId, kind: MessageKind, len: usize, fate: Fate) {
        self.0.lock().unwrap().push((at, from, to, kind, len, fate));
    }
}

/// A mesh with every fault there is; what was seen of it, times from its start.
async fn run(seed: u64) -> (Vec<NodeCounters>, Vec<(Duration, NodeId, NodeId, MessageKind, usize, Fate)>) {
    let start = Instant::now();
    let mut mesh = Mesh::new(seed, MemoryConfig::default());
    let trace = Arc::new(Trace::default());
    mesh.network.set_observer(trace.clone());
    mesh.network.configure(|c| {
        c.link = LinkProfile { loss: 0.02, duplication: 0.02, reordering: 0.1, ..LinkProfile::default() };
        c.link.bandwidth = Some(200_000);
    });
    for i in 1..=20 {
        mesh.start(id(i), &[id(1)]).await;
    }
    sleep(Duration::from_secs(10)).await;
    mesh.crash(id(4));
    mesh.network.partition(&[id(5), id(6), id(7)]);
    sleep(Duration::from_secs(20)).await;
    mesh.network.heal_all();
    sleep(Duration::from_secs(30)).await;
    let counters = (1..=20).map(|i| mesh.network.counters(id(i))).collect();
    let seen = trace.0.lock().unwrap().drain(..).map(|(at, a, b, k, l, f)| (at - start, a, b, k, l, f)).collect();
    (counters, seen)
}

#[tokio::test(start_paused = true)]
async fn the_same_seed_gives_the_same_messages_in_the_same_order() {
    let (counters, trace) = run(8).await;
    let fates: BTreeSet<_> = trace.iter().map(|t| t.5).collect();
    assert!(fates.is_superset(&[Fate::Delivered, Fate::Lost, Fate::Cut].into()), "{fates:?}");
    let again = run(8).await;
    assert!(counters == again.0, "the counters differ");
    let differs = trace.iter().zip(&again.1).position(|(a, b)| a != b);
    assert_eq!((differs, trace.len()), (None, again.1.len()));
    assert_ne!(trace, run(9).await.1);
}
