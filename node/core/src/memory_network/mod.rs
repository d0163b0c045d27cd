//! A network in one process: tests and the simulator join their nodes through it.
//!
//! It reads tokio's clock and one seeded generator and nothing else, so on a current-thread runtime with paused
//! time a run follows from its seed. What links do is set from outside while it runs: they are slow, narrow, lossy,
//! cut (also one way) and healed; nodes are detached as if their process had died.
//!
//! What it keeps of the real network: a call that is lost looks like silence, not like an error; the callee works
//! on whether or not the caller still waits; a connection outlives a cut by [`MemoryConfig::idle_timeout`] and is
//! closed when its node has too many; gossip passes along a mesh of bounded degree and only as far as the neighbours
//! accept it; streams keep their order, and a lost packet makes them late.
//!
//! All of it is one list of tasks by time (`queue`), so that a message costs one entry there, no task and no timer.

mod gossip;
mod links;
mod observe;
mod queue;
mod stream;
mod transport;

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use starling_protocol::NodeId;
use starling_protocol::wire::{Service, Topic};
use tokio::sync::oneshot;
use tokio::time::Instant;

pub use links::LinkProfile;
pub use observe::{Fate, MessageKind, NetworkObserver, NodeCounters, Traffic};
pub use transport::MemoryTransport;

use crate::runtime::NodeScope;
use crate::transport::{Inbound, InboundError};
use crate::watch::lock;
use gossip::{Gossip, Subscriber};
use links::{Access, Delivery, Links};
use queue::{Queue, Task};

/// How the network behaves.
#[derive(Clone, Debug)]
pub struct MemoryConfig {
    /// Every link that has no profile of its own, see [`MemoryNetwork::set_link`].
    pub link: LinkProfile,
    /// What gossip's own repair takes for a lost message. Default 1 s.
    pub gossip_repair: Duration,
    /// How long a connection over a cut link lives before both ends drop it. Default 5 s.
    pub idle_timeout: Duration,
    /// Connections of a node; for one more it closes the least recently used. Default 512, as a real node's.
    pub connections_max: usize,
}

impl Default for MemoryConfig {
    fn default() -> Self {
        Self {
            link: LinkProfile::default(),
            gossip_repair: Duration::from_secs(1),
            idle_timeout: Duration::from_secs(5),
            connections_max: 512,
        }
    }
}

/// The network. Keep it by `Arc`; every node's [`MemoryTransport`] holds one. Use it inside one tokio runtime.
#[derive(Debug)]
pub struct MemoryNetwork(Mutex<World>);

/// A node's place in [`World::nodes`].
type Slot = u32;

struct World {
    rng: ChaCha8Rng,
    config: MemoryConfig,
    slots: HashMap<NodeId, Slot>,
    nodes: Vec<Node>,
    links: Links,
    gossip: Gossip,
    queue: Queue,
    /// When connections over cut links are closed next, or were last.
    gives_up_at: Option<Instant>,
    /// Callers that wait, by call.
    calls_open: BTreeMap<u64, oneshot::Sender<Reply>>,
    calls: u64,
    runs: u64,
    uses: u64,
    observer: Option<Arc<dyn NetworkObserver>>,
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("World").field("nodes", &self.nodes.len()).field("queue", &self.queue).finish_non_exhaustive()
    }
}

type Reply = Result<Bytes, InboundError>;

struct Node {
    id: NodeId,
    process: Option<Arc<Process>>,
    access: Access,
    gossip: Subscriber,
    counters: NodeCounters,
}

/// One run of a node: what is under way to it dies with it.
struct Process {
    inbound: Arc<dyn Inbound>,
    scope: Option<NodeScope>,
    run: u64,
}

impl Process {
    fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) {
        match &self.scope {
            Some(scope) => drop(scope.spawn(future)),
            None => drop(tokio::spawn(future)),
        }
    }
    /// Runs `work` as the node does: what it spawns is the node's.
    fn enter<T>(&self, work: impl FnOnce() -> T) -> T {
        match &self.scope {
            Some(scope) => scope.enter(work),
            None => work(),
        }
    }
}

impl World {
    fn slot(&mut self, id: NodeId) -> Slot {
        let Self { slots, nodes, .. } = self;
        *slots.entry(id).or_insert_with(|| {
            nodes.push(Node {
                id,
                process: None,
                access: Access::default(),
                gossip: Subscriber::default(),
                counters: NodeCounters::default(),
            });
            u32::try_from(nodes.len() - 1).unwrap_or(u32::MAX) // four billion nodes do not fit into memory
        })
    }
    fn node(&self, slot: Slot) -> &Node {
        &self.nodes[slot as usize]
    }
    fn node_mut(&mut self, slot: Slot) -> &mut Node {
        &mut self.nodes[slot as usize]
    }
    fn runs(&self, node: Slot, run: u64) -> bool {
        self.node(node).process.as_ref().is_some_and(|p| p.run == run)
    }

    fn observe(&self, from: Slot, to: Slot, kind: MessageKind, len: usize, fate: Fate) {
        if let Some(observer) = &self.observer {
            observer.on_message(Instant::now(), self.node(from).id, self.node(to).id, kind, len, fate);
        }
    }

    /// A message is there; false when it does not get through after all. `run` is that of the receiver
    /// which it was sent to; an answer goes to whoever waits.
    fn arrives(&mut self, from: Slot, to: Slot, run: Option<u64>, kind: MessageKind, len: usize) -> bool {
        let fate = if self.is_cut(from, to) {
            Fate::Cut
        } else if run.is_some_and(|r| !self.runs(to, r)) {
            Fate::Gone
        } else {
            Fate::Delivered
        };
        if fate == Fate::Delivered {
            self.node_mut(to).counters.received(kind, len);
        }
        self.observe(from, to, kind, len, fate);
        fate == Fate::Delivered
    }

    /// Sends an answer back.
    fn answer(&mut self, id: u64, from: Slot, to: Slot, service: Service, reply: Reply) {
        let len = reply.as_ref().map_or(0, Bytes::len);
        if let Some(at) = self.send(from, to, MessageKind::Call(service), len, Delivery::Datagram) {
            self.queue.push(at, Task::Answer { id, from, to, service, reply });
        }
    }
}

impl MemoryNetwork {
    /// A network whose latencies and losses follow from `seed`.
    #[must_use]
    pub fn new(seed: u64, config: MemoryConfig) -> Arc<Self> {
        let mut world = World {
            rng: ChaCha8Rng::seed_from_u64(seed),
            config: config.clone(),
            slots: HashMap::new(),
            nodes: Vec::new(),
            links: Links::default(),
            gossip: Gossip::default(),
            queue: Queue::default(),
            gives_up_at: None,
            calls_open: BTreeMap::new(),
            calls: 0,
            runs: 0,
            uses: 0,
            observer: None,
        };
        world.set_default_profile(config.link);
        Arc::new(Self(Mutex::new(world)))
    }
    /// The network as `node` sees it. Nobody reaches the node before [`MemoryNetwork::attach`].
    #[must_use]
    pub fn transport(self: &Arc<Self>, node: NodeId) -> Arc<MemoryTransport> {
        let slot = lock(&self.0).slot(node);
        Arc::new(MemoryTransport::new(self.clone(), node, slot))
    }
    /// Starts delivering to `inbound`. What is delivered runs in the caller's [`NodeScope`], if there is one. Call it
    /// inside the runtime.
    pub fn attach(self: &Arc<Self>, node: NodeId, inbound: Arc<dyn Inbound>) {
        self.start_delivery();
        let mut world = lock(&self.0);
        world.runs += 1;
        let process = Process { inbound, scope: NodeScope::current(), run: world.runs };
        let slot = world.slot(node);
        world.node_mut(slot).process = Some(Arc::new(process));
        world.start_beating(slot);
    }
    /// The node's process is gone: its connections break, and what was under way to it is lost.
    pub fn detach(&self, node: NodeId) {
        let (slot, peers) = {
            let mut world = lock(&self.0);
            let slot = world.slot(node);
            world.node_mut(slot).process = None;
            (slot, world.node(slot).access.peers.keys().copied().collect::<Vec<_>>())
        };
        peers.into_iter().for_each(|peer| self.close(slot, peer));
        lock(&self.0).forget_gossip(slot);
    }
    /// Opens a connection, if both run and no direction is cut. Returns whether it is open now.
    pub fn connect(&self, a: NodeId, b: NodeId) -> bool {
        let (a, b) = self.slots(a, b);
        self.open(a, b)
    }
    /// Cuts both directions between `a` and `b`. Call it inside the runtime.
    pub fn cut(&self, a: NodeId, b: NodeId) {
        self.cut_one_way(a, b);
        self.cut_one_way(b, a);
    }
    /// Nothing passes from `from` to `to` any more; the other direction still works. Call it inside the runtime.
    pub fn cut_one_way(&self, from: NodeId, to: NodeId) {
        let (from, to) = self.slots(from, to);
        lock(&self.0).cut(from, to);
        self.give_up_later();
    }
    /// Cuts `node` off from all others that exist now. Call it inside the runtime.
    pub fn isolate(&self, node: NodeId) {
        self.partition(&[node]);
    }
    /// Cuts every link between `side` and the rest; what was cut before stays cut. Costs one step a node of `side`.
    /// Call it inside the runtime.
    pub fn partition(&self, side: &[NodeId]) {
        {
            let mut world = lock(&self.0);
            let side: Vec<_> = side.iter().map(|id| world.slot(*id)).collect();
            world.split(&side);
        }
        self.give_up_later();
    }
    /// Cuts every link between different ones of `sides`, whatever else is cut, until [`MemoryNetwork::end_partition`].
    /// Nodes on no side hear everyone. Costs one step a node. Returns the partition's number. Call it inside the
    /// runtime.
    pub fn begin_partition(&self, sides: &[Vec<NodeId>]) -> u64 {
        let partition = lock(&self.0).begin_partition();
        for (side, nodes) in sides.iter().enumerate() {
            nodes.iter().for_each(|node| self.join_side(partition, side, *node));
        }
        self.give_up_later();
        partition
    }
    /// One more node is on a side of a partition, which counts from 0. Without effect when the partition is over.
    pub fn join_side(&self, partition: u64, side: usize, node: NodeId) {
        let mut world = lock(&self.0);
        let slot = world.slot(node);
        world.put_on_side(partition, slot, u16::try_from(side + 1).unwrap_or(u16::MAX));
    }
    /// Ends one partition; what others cut stays cut.
    pub fn end_partition(&self, partition: u64) {
        lock(&self.0).end_partition(partition);
    }
    /// Heals both directions.
    pub fn heal(&self, a: NodeId, b: NodeId) {
        self.heal_one_way(a, b);
        self.heal_one_way(b, a);
    }
    /// Heals one direction.
    pub fn heal_one_way(&self, from: NodeId, to: NodeId) {
        let (from, to) = self.slots(from, to);
        lock(&self.0).heal(from, to);
    }
    /// Heals everything.
    pub fn heal_all(&self) {
        lock(&self.0).heal_all();
    }
    /// Whether messages from `from` to `to` vanish.
    #[must_use]
    pub fn is_cut(&self, from: NodeId, to: NodeId) -> bool {
        let (from, to) = self.slots(from, to);
        lock(&self.0).is_cut(from, to)
    }
    /// Changes the behaviour from now on.
    pub fn configure(&self, change: impl FnOnce(&mut MemoryConfig)) {
        let mut world = lock(&self.0);
        change(&mut world.config);
        let link = world.config.link.clone();
        world.set_default_profile(link);
    }
    /// Sets how the link from `from` to `to` behaves, whatever else is set for the two.
    pub fn set_link(&self, from: NodeId, to: NodeId, profile: LinkProfile) {
        let (from, to) = self.slots(from, to);
        lock(&self.0).set_pair_profile(from, to, profile);
    }
    /// Sets how the node's access line behaves, both ways: all its messages share its bandwidth. Between two nodes
    /// with profiles the slower latency counts, and each line may lose a message.
    pub fn set_node_profile(&self, node: NodeId, profile: LinkProfile) {
        let mut world = lock(&self.0);
        let slot = world.slot(node);
        world.set_access_profile(slot, profile);
    }
    /// What the node sent and received so far.
    #[must_use]
    pub fn counters(&self, node: NodeId) -> NodeCounters {
        let world = lock(&self.0);
        world.slots.get(&node).map(|s| world.node(*s).counters).unwrap_or_default()
    }
    /// Shows every message from now on to `observer`, instead of the one before.
    pub fn set_observer(&self, observer: Arc<dyn NetworkObserver>) {
        lock(&self.0).observer = Some(observer);
    }
    /// Calls sent so far.
    #[must_use]
    pub fn calls(&self) -> u64 {
        lock(&self.0).calls
    }
    /// Gossip neighbours of `node` on `topic`; `None` when it has not subscribed.
    #[must_use]
    pub fn gossip_degree(&self, node: NodeId, topic: &Topic) -> Option<usize> {
        let mut world = lock(&self.0);
        let slot = world.slot(node);
        world.degree_on(slot, topic)
    }

    fn slots(&self, a: NodeId, b: NodeId) -> (Slot, Slot) {
        let mut world = lock(&self.0);
        (world.slot(a), world.slot(b))
    }

    fn give_up_later(&self) {
        let mut world = lock(&self.0);
        let at = Instant::now() + world.config.idle_timeout;
        // One look at all connections for everything that is cut at once.
        if world.gives_up_at.replace(at) != Some(at) {
            world.queue.push(at, Task::GiveUpCut);
        }
    }

    /// Opens a connection and tells both ends.
    fn open(&self, a: Slot, b: Slot) -> bool {
        let (ends, victims) = {
            let mut world = lock(&self.0);
            if world.is_connected(a, b) {
                return true;
            }
            let (ids, cut) = ([world.node(a).id, world.node(b).id], world.is_cut(a, b) || world.is_cut(b, a));
            let (Some(one), Some(other)) = (world.node(a).process.clone(), world.node(b).process.clone()) else {
                return false;
            };
            if cut || a == b {
                return false;
            }
            let victims = world.open(a, b);
            world.join_meshes(a, b);
            ([(one, ids[1]), (other, ids[0])], victims)
        };
        for (process, peer) in ends {
            process.enter(|| process.inbound.on_connection(peer, true));
        }
        victims.into_iter().for_each(|(a, b)| self.tell_closed(a, b));
        true
    }

    fn close(&self, a: Slot, b: Slot) {
        let was_open = lock(&self.0).remove_link(a, b);
        if was_open {
            self.tell_closed(a, b);
        }
    }

    fn tell_closed(&self, a: Slot, b: Slot) {
        let ends = {
            let world = lock(&self.0);
            [(a, b), (b, a)].map(|(node, peer)| (world.node(node).process.clone(), world.node(peer).id))
        };
        for (process, peer) in ends {
            if let Some(process) = process {
                process.enter(|| process.inbound.on_connection(peer, false));
            }
        }
    }
}
