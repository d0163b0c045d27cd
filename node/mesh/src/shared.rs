//! What the driver, the callers and the serving tasks share.

use crate::config::{Limits, Names, is_loopback, without_peer};
use crate::error::DialReport;
use crate::links::{Link, is_control};
use libp2p::Multiaddr;
use libp2p::swarm::ConnectionId;
use starling_bootstrap::{PeerBook, Source};
use starling_core::transport::{CallError, Inbound, InboundError};
use starling_protocol::NodeId;
use starling_protocol::wire::{Service, Topic};
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::{Notify, Semaphore, mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Commands that wait for the driver: a burst of publications (jobs × rollouts) and a dial per peer; 1024 × at most
/// 16 KiB = 16 MiB.
pub(crate) const COMMANDS_BOUND: usize = 1024;
/// Most addresses whose failures are remembered: 64 peers × 16 addresses.
const REPORTS_MAX: usize = 1024;

/// What the driver is asked to do.
pub(crate) enum Command {
    /// Connect to a peer, or say in words why not.
    Connect { node: NodeId, reply: oneshot::Sender<Result<(), String>> },
    /// Publish on a topic.
    Publish { topic: Topic, body: Vec<u8> },
    /// A peer misbehaved.
    Penalise { node: NodeId, points: f64, why: String },
    /// Close all connections to a peer.
    Disconnect { node: NodeId, why: String },
    /// What is the peer's score?
    Score { node: NodeId, reply: oneshot::Sender<Option<f64>> },
    /// Close everything.
    Shutdown { reply: oneshot::Sender<()> },
}

pub(crate) struct Shared {
    pub(crate) local: NodeId,
    pub(crate) names: Names,
    pub(crate) limits: Limits,
    /// Weak, so that the driver ends when all handles of the mesh are gone.
    pub(crate) commands: mpsc::WeakSender<Command>,
    /// Memory for inbound calls, in KiB, for control and for load.
    control_memory: Semaphore,
    bulk_memory: Semaphore,
    /// Tells the driver to look at `topics` and `inbound` again.
    pub(crate) wake: Notify,
    pub(crate) closing: CancellationToken,
    pub(crate) dropped_publications: AtomicU64,
    tasks: TaskTracker,
    inbound: Mutex<Option<Arc<dyn Inbound>>>,
    links: Mutex<BTreeMap<NodeId, Arc<Link>>>,
    book: Mutex<PeerBook>,
    /// Listening and confirmed external addresses.
    listen: Mutex<BTreeSet<Multiaddr>>,
    reports: Mutex<BTreeMap<(NodeId, String), DialReport>>,
    topics: Mutex<BTreeSet<Topic>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(crate) fn new(
        local: NodeId,
        names: Names,
        limits: Limits,
        book: PeerBook,
        commands: mpsc::WeakSender<Command>,
    ) -> Self {
        let memory_kib = limits.inbound_call_memory_bytes.max(32 << 20) >> 10;
        Self {
            local,
            names,
            limits,
            commands,
            control_memory: Semaphore::new(memory_kib / 4),
            bulk_memory: Semaphore::new(memory_kib - memory_kib / 4),
            wake: Notify::new(),
            closing: CancellationToken::new(),
            dropped_publications: AtomicU64::new(0),
            tasks: TaskTracker::new(),
            inbound: Mutex::default(),
            links: Mutex::default(),
            book: Mutex::new(book),
            listen: Mutex::default(),
            reports: Mutex::default(),
            topics: Mutex::default(),
        }
    }

    /// Runs `task` until it ends or the mesh closes.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let closing = self.closing.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                () = closing.cancelled() => {}
                () = task => {}
            }
        });
    }

    /// Ends all serving tasks and lets go of the node's logic.
    pub(crate) async fn close(&self) {
        self.closing.cancel();
        self.tasks.close();
        self.tasks.wait().await;
        let logic = lock(&self.inbound).take();
        drop(logic);
        lock(&self.links).clear();
    }

    pub(crate) fn inbound(&self) -> Option<Arc<dyn Inbound>> {
        lock(&self.inbound).clone()
    }

    pub(crate) fn logic(&self) -> Result<Arc<dyn Inbound>, InboundError> {
        self.inbound().ok_or_else(|| InboundError::Unavailable("the node is starting".into()))
    }

    /// Takes the node's logic; `false` when there is one already.
    pub(crate) fn set_inbound(&self, logic: Arc<dyn Inbound>) -> bool {
        let mut inbound = lock(&self.inbound);
        if inbound.is_some() || self.closing.is_cancelled() {
            return false;
        }
        *inbound = Some(logic);
        drop(inbound);
        self.wake.notify_one();
        true
    }

    /// What bounds the memory of inbound calls of a service.
    pub(crate) fn call_memory(&self, service: Service) -> &Semaphore {
        if is_control(service) { &self.control_memory } else { &self.bulk_memory }
    }

    // Links.

    pub(crate) fn link(&self, node: NodeId) -> Option<Arc<Link>> {
        lock(&self.links).get(&node).cloned()
    }

    pub(crate) fn link_or_new(&self, node: NodeId) -> Arc<Link> {
        Arc::clone(lock(&self.links).entry(node).or_insert_with(|| Arc::new(Link::new(node, &self.limits))))
    }

    pub(crate) fn links(&self) -> Vec<Arc<Link>> {
        lock(&self.links).values().cloned().collect()
    }

    pub(crate) fn connection_closed(&self, node: NodeId, connection: ConnectionId) {
        let mut links = lock(&self.links);
        if links.get(&node).is_some_and(|link| link.remove_connection(connection)) {
            links.remove(&node);
        }
    }

    /// A connection to `node`, made if need be.
    pub(crate) async fn connect(&self, node: NodeId) -> Result<Arc<Link>, CallError> {
        if let Some(link) = self.link(node).filter(|l| l.is_confirmed()) {
            return Ok(link);
        }
        let (reply, answer) = oneshot::channel();
        let commands = self.commands.upgrade().ok_or(CallError::Closed)?;
        commands.send(Command::Connect { node, reply }).await.map_err(|_closed| CallError::Closed)?;
        drop(commands);
        let connected = answer.await.map_err(|_closed| CallError::Closed)?;
        connected.map_err(|reason| CallError::NotConnected { peer: node, reason })?;
        let gone = || CallError::NotConnected { peer: node, reason: "the connection closed at once".into() };
        self.link(node).ok_or_else(gone)
    }

    /// Lowers a peer's score. Never waits: while the driver is busy a penalty may be lost.
    pub(crate) fn penalise(&self, node: NodeId, points: f64, why: String) {
        if let Some(commands) = self.commands.upgrade() {
            let _ = commands.try_send(Command::Penalise { node, points, why });
        }
    }

    // Addresses.

    pub(crate) fn book(&self) -> MutexGuard<'_, PeerBook> {
        lock(&self.book)
    }

    /// Notes where a peer may be dialled, as far as that makes sense from here.
    pub(crate) fn learn(&self, node: NodeId, addresses: impl IntoIterator<Item = Multiaddr>, source: Source) {
        if node == self.local {
            return;
        }
        let ours = lock(&self.listen).clone();
        let mut book = self.book();
        for address in addresses {
            let address = without_peer(&address);
            if !ours.contains(&address) && !address.is_empty() {
                book.add(node, address, source);
            }
        }
    }

    pub(crate) fn add_listen(&self, address: &Multiaddr) {
        lock(&self.listen).insert(without_peer(address));
    }

    pub(crate) fn remove_listen(&self, address: &Multiaddr) {
        lock(&self.listen).remove(&without_peer(address));
    }

    /// Where this node can be dialled: loopback addresses only when there are no others.
    pub(crate) fn listen(&self) -> Vec<Multiaddr> {
        let all = lock(&self.listen).clone();
        let beyond: Vec<Multiaddr> = all.iter().filter(|a| !is_loopback(a)).cloned().collect();
        if beyond.is_empty() { all.into_iter().collect() } else { beyond }
    }

    // Failed dials.

    pub(crate) fn report(&self, peer: NodeId, address: String, error: String) {
        let mut reports = lock(&self.reports);
        let at = SystemTime::now();
        let since = reports.get(&(peer, address.clone())).map_or(at, |r| r.since);
        let report = DialReport { peer, address, error, at, since };
        reports.insert((peer, report.address.clone()), report);
        if reports.len() > REPORTS_MAX {
            let oldest = reports.values().min_by_key(|r| r.at).map(|r| (r.peer, r.address.clone()));
            oldest.map(|key| reports.remove(&key));
        }
    }

    pub(crate) fn forget_reports(&self, peer: NodeId) {
        lock(&self.reports).retain(|(p, _), _| *p != peer);
    }

    pub(crate) fn reports(&self) -> Vec<DialReport> {
        lock(&self.reports).values().cloned().collect()
    }

    // Topics.

    pub(crate) fn want_topic(&self, topic: Topic) {
        if lock(&self.topics).insert(topic) {
            self.wake.notify_one();
        }
    }

    pub(crate) fn topics(&self) -> BTreeSet<Topic> {
        lock(&self.topics).clone()
    }

    pub(crate) fn count_dropped_publication(&self) {
        let n = self.dropped_publications.fetch_add(1, Ordering::Relaxed) + 1;
        if n.is_power_of_two() {
            tracing::warn!(dropped = n, "gossip was not published: the mesh's driver does not keep up");
        }
    }
}

/// Milliseconds since the epoch.
pub(crate) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
