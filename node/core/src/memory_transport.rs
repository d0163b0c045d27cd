//! A network in one process: tests and the simulator join their nodes through it.
//!
//! It reads tokio's clock and one seeded generator and nothing else, so on a current-thread runtime with paused
//! time a run follows from its seed. Faults are set from outside while it runs: links are cut (also one way) and
//! healed, messages are late or lost, nodes are detached as if their process had died.
//!
//! What it keeps of the real network: a call that is lost looks like silence, not like an error; the callee works
//! on whether or not the caller still waits; a connection outlives a cut by [`MemoryConfig::idle_timeout`]; gossip
//! passes from neighbour to neighbour and only as far as the neighbours accept it; streams keep their order.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use starling_protocol::NodeId;
use starling_protocol::wire::{CALL_LEN_BYTES_MAX, FRAME_LEN_BYTES_MAX, GOSSIP_LEN_BYTES_MAX, Service, Topic};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::runtime::NodeScope;
use crate::transport::{
    CallError, FrameRecv, FrameSend, FrameStream, Inbound, InboundError, SharedTransport, Transport, Verdict,
};
use crate::watch::lock;

/// Frames under way in one direction of a stream: a slow reader stops its writer after this many.
const STREAM_FRAMES_MAX: usize = 16;
/// Message ids that a node remembers, so that gossip does not circle. 32 KiB a node.
const SEEN_MAX: usize = 4096;

/// How the network behaves.
#[derive(Clone, Debug)]
pub struct MemoryConfig {
    /// Time of one hop, drawn evenly.
    pub latency: RangeInclusive<Duration>,
    /// Share of calls, each way, that are lost; a lost gossip message comes [`MemoryConfig::gossip_repair`] later.
    pub loss: f64,
    /// What gossip's own repair takes for a lost message.
    pub gossip_repair: Duration,
    /// How long a connection over a cut link lives before both ends drop it.
    pub idle_timeout: Duration,
}

impl Default for MemoryConfig {
    fn default() -> Self {
        Self {
            latency: Duration::from_micros(500)..=Duration::from_millis(5),
            loss: 0.0,
            gossip_repair: Duration::from_secs(1),
            idle_timeout: Duration::from_secs(5),
        }
    }
}

/// The network. Keep it by `Arc`; every node's [`MemoryTransport`] holds one.
#[derive(Debug)]
pub struct MemoryNetwork(Mutex<World>);

#[derive(Debug)]
struct World {
    rng: ChaCha8Rng,
    config: MemoryConfig,
    nodes: BTreeMap<NodeId, Node>,
    /// (from, to): nothing passes.
    cuts: BTreeSet<(NodeId, NodeId)>,
    /// Open connections, the smaller node first.
    links: BTreeSet<(NodeId, NodeId)>,
    messages: u64,
    attachments: u64,
    calls: u64,
}

#[derive(Default)]
struct Node {
    process: Option<Process>,
    topics: BTreeSet<Topic>,
    seen: BTreeSet<u64>,
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node").field("attached", &self.process.is_some()).field("topics", &self.topics).finish()
    }
}

/// One run of a node: what is under way to it dies with it.
#[derive(Clone)]
struct Process {
    inbound: Arc<dyn Inbound>,
    scope: Option<NodeScope>,
    attachment: u64,
}

impl Process {
    fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) {
        match &self.scope {
            Some(scope) => drop(scope.spawn(future)),
            None => drop(tokio::spawn(future)),
        }
    }
}

enum Dial {
    Open(Process),
    /// Nobody listens there.
    Refused,
    /// Packets vanish.
    Silent,
}

fn link(a: NodeId, b: NodeId) -> (NodeId, NodeId) {
    if a < b { (a, b) } else { (b, a) }
}

impl World {
    fn is_cut(&self, from: NodeId, to: NodeId) -> bool {
        self.cuts.contains(&(from, to))
    }
    fn latency(&mut self) -> Duration {
        let micros = |d: &Duration| u64::try_from(d.as_micros()).unwrap_or(u64::MAX);
        let range = micros(self.config.latency.start())..=micros(self.config.latency.end());
        Duration::from_micros(self.rng.random_range(range))
    }
    fn loses(&mut self) -> bool {
        self.config.loss > 0.0 && self.rng.random_bool(self.config.loss.clamp(0.0, 1.0))
    }
    /// Time of one hop; `None` when the message is lost.
    fn hop(&mut self, from: NodeId, to: NodeId) -> Option<Duration> {
        let (latency, lost) = (self.latency(), self.loses());
        (!lost && !self.is_cut(from, to)).then_some(latency)
    }
    fn process(&self, node: NodeId) -> Option<Process> {
        self.nodes.get(&node).and_then(|n| n.process.clone())
    }
    fn runs(&self, node: NodeId, attachment: u64) -> bool {
        self.process(node).is_some_and(|p| p.attachment == attachment)
    }
    fn neighbours(&self, node: NodeId) -> Vec<NodeId> {
        let mut peers: Vec<_> = self
            .links
            .iter()
            .filter_map(|&(a, b)| match node {
                n if n == a => Some(b),
                n if n == b => Some(a),
                _ => None,
            })
            .collect();
        peers.sort_unstable();
        peers
    }
}

impl MemoryNetwork {
    /// A network whose latencies and losses follow from `seed`.
    #[must_use]
    pub fn new(seed: u64, config: MemoryConfig) -> Arc<Self> {
        Arc::new(Self(Mutex::new(World {
            rng: ChaCha8Rng::seed_from_u64(seed),
            config,
            nodes: BTreeMap::new(),
            cuts: BTreeSet::new(),
            links: BTreeSet::new(),
            messages: 0,
            attachments: 0,
            calls: 0,
        })))
    }
    /// The network as `node` sees it. Nobody reaches the node before [`MemoryNetwork::attach`].
    #[must_use]
    pub fn transport(self: &Arc<Self>, node: NodeId) -> Arc<MemoryTransport> {
        Arc::new(MemoryTransport { network: self.clone(), node })
    }
    /// Starts delivering to `inbound`. What is delivered runs in the caller's [`NodeScope`], if there is one.
    pub fn attach(&self, node: NodeId, inbound: Arc<dyn Inbound>) {
        let mut world = lock(&self.0);
        world.attachments += 1;
        let process = Process { inbound, scope: NodeScope::current(), attachment: world.attachments };
        let entry = world.nodes.entry(node).or_default();
        *entry = Node { process: Some(process), topics: std::mem::take(&mut entry.topics), seen: BTreeSet::new() };
    }
    /// The node's process is gone: its connections break, and what was under way to it is lost.
    pub fn detach(&self, node: NodeId) {
        let gone = {
            let mut world = lock(&self.0);
            if let Some(n) = world.nodes.get_mut(&node) {
                *n = Node::default();
            }
            world.neighbours(node)
        };
        gone.into_iter().for_each(|peer| self.close(node, peer));
    }
    /// Opens a connection, if both run and no direction is cut. Returns whether it is open now.
    pub fn connect(&self, a: NodeId, b: NodeId) -> bool {
        matches!(self.dial(a, b), Dial::Open(_))
    }
    /// Cuts both directions between `a` and `b`. Call it inside the runtime.
    pub fn cut(self: &Arc<Self>, a: NodeId, b: NodeId) {
        self.cut_one_way(a, b);
        self.cut_one_way(b, a);
    }
    /// Nothing passes from `from` to `to` any more; the other direction still works. Call it inside the runtime.
    pub fn cut_one_way(self: &Arc<Self>, from: NodeId, to: NodeId) {
        let idle = {
            let mut world = lock(&self.0);
            world.cuts.insert((from, to));
            world.config.idle_timeout
        };
        let network = self.clone();
        drop(tokio::spawn(async move {
            sleep(idle).await;
            if network.is_cut(from, to) {
                network.close(from, to);
            }
        }));
    }
    /// Cuts `node` off from all others.
    pub fn isolate(self: &Arc<Self>, node: NodeId) {
        for other in self.others(node) {
            self.cut(node, other);
        }
    }
    /// Cuts every link between `side` and the rest.
    pub fn partition(self: &Arc<Self>, side: &[NodeId]) {
        for &node in side {
            for other in self.others(node).into_iter().filter(|o| !side.contains(o)) {
                self.cut(node, other);
            }
        }
    }
    /// Heals both directions.
    pub fn heal(&self, a: NodeId, b: NodeId) {
        let mut world = lock(&self.0);
        world.cuts.remove(&(a, b));
        world.cuts.remove(&(b, a));
    }
    /// Heals everything.
    pub fn heal_all(&self) {
        lock(&self.0).cuts.clear();
    }
    /// Whether messages from `from` to `to` vanish.
    #[must_use]
    pub fn is_cut(&self, from: NodeId, to: NodeId) -> bool {
        lock(&self.0).is_cut(from, to)
    }
    /// Changes the behaviour from now on.
    pub fn configure(&self, change: impl FnOnce(&mut MemoryConfig)) {
        change(&mut lock(&self.0).config);
    }
    /// Calls sent so far.
    #[must_use]
    pub fn calls(&self) -> u64 {
        lock(&self.0).calls
    }

    fn others(&self, node: NodeId) -> Vec<NodeId> {
        lock(&self.0).nodes.keys().copied().filter(|n| *n != node).collect()
    }

    fn dial(&self, from: NodeId, to: NodeId) -> Dial {
        let (process, caller) = {
            let mut world = lock(&self.0);
            let key = link(from, to);
            if world.links.contains(&key) {
                match world.process(to) {
                    Some(process) => return Dial::Open(process),
                    None => return Dial::Refused,
                }
            }
            if world.is_cut(from, to) || world.is_cut(to, from) {
                return Dial::Silent;
            }
            let Some(process) = world.process(to) else { return Dial::Refused };
            let caller = world.process(from);
            if caller.is_some() {
                world.links.insert(key);
            }
            (process, caller)
        };
        if let Some(caller) = caller {
            caller.inbound.on_connection(to, true);
            process.inbound.on_connection(from, true);
        }
        Dial::Open(process)
    }

    fn close(&self, a: NodeId, b: NodeId) {
        let ends = {
            let mut world = lock(&self.0);
            if !world.links.remove(&link(a, b)) {
                return;
            }
            [(world.process(a), b), (world.process(b), a)]
        };
        for (process, peer) in ends {
            if let Some(process) = process {
                process.inbound.on_connection(peer, false);
            }
        }
    }

    /// Passes a message on from `node` to its neighbours.
    fn forward(self: &Arc<Self>, node: NodeId, not_to: Option<NodeId>, id: u64, topic: &Topic, body: &Bytes) {
        let sends = {
            let mut world = lock(&self.0);
            let mut sends = Vec::new();
            for peer in world.neighbours(node) {
                let wants = world.nodes.get(&peer).is_some_and(|n| n.topics.contains(topic) && !n.seen.contains(&id));
                if Some(peer) == not_to || !wants || world.is_cut(node, peer) {
                    continue;
                }
                let mut delay = world.latency();
                if world.loses() {
                    delay += world.config.gossip_repair;
                }
                if let Some(process) = world.process(peer) {
                    sends.push((peer, process, delay));
                }
            }
            sends
        };
        for (peer, process, delay) in sends {
            let (network, topic, body, attachment) = (self.clone(), topic.clone(), body.clone(), process.attachment);
            let inbound = process.inbound.clone();
            process.spawn(async move {
                sleep(delay).await;
                {
                    let mut world = lock(&network.0);
                    if world.is_cut(node, peer) || !world.runs(peer, attachment) {
                        return;
                    }
                    let Some(n) = world.nodes.get_mut(&peer) else { return };
                    if !n.seen.insert(id) {
                        return;
                    }
                    if n.seen.len() > SEEN_MAX {
                        n.seen.pop_first();
                    }
                }
                if inbound.on_gossip(node, &topic, &body) == Verdict::Accept {
                    network.forward(peer, Some(node), id, &topic, &body);
                }
            });
        }
    }
}

/// One node's end of a [`MemoryNetwork`].
#[derive(Debug)]
pub struct MemoryTransport {
    network: Arc<MemoryNetwork>,
    node: NodeId,
}

impl MemoryTransport {
    /// The same, as the node's logic takes it.
    #[must_use]
    pub fn shared(self: &Arc<Self>) -> SharedTransport {
        self.clone()
    }
    /// The network.
    #[must_use]
    pub fn network(&self) -> &Arc<MemoryNetwork> {
        &self.network
    }

    /// Opens a connection or says why there is none.
    async fn reach(&self, peer: NodeId, limit: Duration) -> Result<Process, CallError> {
        match self.network.dial(self.node, peer) {
            Dial::Open(process) => Ok(process),
            Dial::Refused => {
                let delay = lock(&self.network.0).latency();
                sleep(delay.min(limit)).await;
                Err(CallError::NotConnected { peer, reason: "nobody listens there".into() })
            }
            Dial::Silent => {
                sleep(limit).await;
                Err(CallError::NotConnected { peer, reason: format!("no answer to the dial within {limit:?}") })
            }
        }
    }

    /// Lets `body` reach `process` after its hop, and its answer come back through the channel.
    fn request(&self, peer: NodeId, process: &Process, service: Service, body: Bytes) -> oneshot::Receiver<Reply> {
        let (tx, rx) = oneshot::channel();
        let (network, from, attachment) = (self.network.clone(), self.node, process.attachment);
        let inbound = process.inbound.clone();
        let hop = {
            let mut world = lock(&network.0);
            world.calls += 1;
            world.hop(from, peer)
        };
        if let Some(delay) = hop {
            process.spawn(async move {
                sleep(delay).await;
                let arrives = {
                    let world = lock(&network.0);
                    !world.is_cut(from, peer) && world.runs(peer, attachment)
                };
                if !arrives {
                    return;
                }
                let reply = inbound.on_call(from, service, body).await;
                let back = lock(&network.0).hop(peer, from);
                let Some(delay) = back else { return };
                sleep(delay).await;
                if !network.is_cut(peer, from) {
                    let _unheard = tx.send(reply); // the caller may have given up
                }
            });
        }
        rx
    }
}

type Reply = Result<Bytes, InboundError>;

#[async_trait]
impl Transport for MemoryTransport {
    fn local(&self) -> NodeId {
        self.node
    }
    fn addresses(&self) -> Vec<String> {
        vec![format!("/memory/{}", self.node.short())]
    }
    fn connected(&self) -> Vec<NodeId> {
        lock(&self.network.0).neighbours(self.node)
    }
    fn add_addresses(&self, _peer: NodeId, _addresses: &[String]) {}

    async fn call(&self, peer: NodeId, service: Service, body: Bytes, limit: Duration) -> Result<Bytes, CallError> {
        if body.len() > CALL_LEN_BYTES_MAX {
            return Err(CallError::TooLong { got: body.len(), max: CALL_LEN_BYTES_MAX });
        }
        let deadline = Instant::now() + limit;
        let silence = CallError::Timeout { peer, after: limit };
        let refused = |e: InboundError| CallError::Failed { peer, reason: e.to_string() };
        if peer == self.node {
            let process = lock(&self.network.0).process(peer).ok_or(CallError::Closed)?;
            return match timeout(limit, process.inbound.on_call(peer, service, body)).await {
                Ok(reply) => reply.map_err(refused),
                Err(_elapsed) => Err(silence),
            };
        }
        let process = self.reach(peer, limit).await?;
        let rx = self.request(peer, &process, service, body);
        let answer = async {
            match rx.await {
                Ok(reply) => reply.map_err(refused),
                Err(_lost) => {
                    sleep_until(deadline).await;
                    Err(CallError::Timeout { peer, after: limit })
                }
            }
        };
        tokio::time::timeout_at(deadline, answer).await.unwrap_or(Err(silence))
    }

    async fn open_generate(&self, peer: NodeId, limit: Duration) -> Result<FrameStream, CallError> {
        let process = if peer == self.node {
            lock(&self.network.0).process(peer).ok_or(CallError::Closed)?
        } else {
            self.reach(peer, limit).await?
        };
        let mine = lock(&self.network.0).process(self.node).map(|p| p.attachment);
        let hop = lock(&self.network.0).hop(self.node, peer);
        let Some(delay) = hop else {
            sleep(limit).await;
            return Err(CallError::Timeout { peer, after: limit });
        };
        let (there, their_end) = pipe(&self.network, self.node, peer, mine);
        let (back, my_end) = pipe(&self.network, peer, self.node, Some(process.attachment));
        let (inbound, from) = (process.inbound.clone(), self.node);
        process.spawn(async move {
            sleep(delay).await;
            inbound.on_generate(from, FrameStream { send: Box::new(back), recv: Box::new(their_end) }).await;
        });
        Ok(FrameStream { send: Box::new(there), recv: Box::new(my_end) })
    }

    fn publish(&self, topic: Topic, body: Vec<u8>) {
        if body.len() > GOSSIP_LEN_BYTES_MAX {
            tracing::warn!(topic = topic.name(), len = body.len(), "gossip message too long, dropped");
            return;
        }
        let id = {
            let mut world = lock(&self.network.0);
            world.messages += 1;
            let id = world.messages;
            world.nodes.entry(self.node).or_default().seen.insert(id);
            id
        };
        self.network.forward(self.node, None, id, &topic, &body.into());
    }
    fn subscribe(&self, topic: Topic) {
        lock(&self.network.0).nodes.entry(self.node).or_default().topics.insert(topic);
    }
}

/// A frame and when it arrives.
type Frame = (Instant, Bytes);

fn pipe(network: &Arc<MemoryNetwork>, from: NodeId, to: NodeId, writer: Option<u64>) -> (PipeSend, PipeRecv) {
    let (tx, rx) = mpsc::channel(STREAM_FRAMES_MAX);
    let send = PipeSend { network: network.clone(), from, to, tx, last: Instant::now() };
    (send, PipeRecv { network: network.clone(), from, to, writer, rx, next: None })
}

struct PipeSend {
    network: Arc<MemoryNetwork>,
    from: NodeId,
    to: NodeId,
    tx: mpsc::Sender<Frame>,
    last: Instant,
}

struct PipeRecv {
    network: Arc<MemoryNetwork>,
    from: NodeId,
    to: NodeId,
    /// The run of the writing node: when it is over, an end of the pipe is a break.
    writer: Option<u64>,
    rx: mpsc::Receiver<Frame>,
    next: Option<Frame>,
}

fn broken(peer: NodeId) -> CallError {
    CallError::Failed { peer, reason: "the connection broke".into() }
}

#[async_trait]
impl FrameSend for PipeSend {
    async fn send(&mut self, frame: Bytes) -> Result<(), CallError> {
        if frame.len() > FRAME_LEN_BYTES_MAX {
            return Err(CallError::TooLong { got: frame.len(), max: FRAME_LEN_BYTES_MAX });
        }
        let (cut, idle, latency) = {
            let mut world = lock(&self.network.0);
            (world.is_cut(self.from, self.to), world.config.idle_timeout, world.latency())
        };
        if cut {
            sleep(idle).await;
            return Err(broken(self.to));
        }
        self.last = self.last.max(Instant::now() + latency); // frames do not overtake each other
        self.tx.send((self.last, frame)).await.map_err(|_closed| broken(self.to))
    }
}

#[async_trait]
impl FrameRecv for PipeRecv {
    async fn recv(&mut self) -> Result<Option<Bytes>, CallError> {
        loop {
            if let Some((at, _)) = &self.next {
                sleep_until(*at).await;
                return Ok(self.next.take().map(|(_, frame)| frame));
            }
            let (cut, idle) = {
                let world = lock(&self.network.0);
                (world.is_cut(self.from, self.to), world.config.idle_timeout)
            };
            match timeout(idle, self.rx.recv()).await {
                Ok(Some(frame)) => self.next = Some(frame),
                Ok(None) => {
                    let alive = self.writer.is_none_or(|w| lock(&self.network.0).runs(self.from, w));
                    return if alive { Ok(None) } else { Err(broken(self.from)) };
                }
                Err(_quiet) if cut && self.network.is_cut(self.from, self.to) => return Err(broken(self.from)),
                Err(_quiet) => {}
            }
        }
    }
}
