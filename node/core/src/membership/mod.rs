//! Who is in the mesh: liveness by SWIM, and what each node says of itself by signed records.
//!
//! Liveness is a judgement, not a fact: it tells whom to ask and whom to make a voter, and decides nothing that
//! must be safe. In a small mesh a killed node is known dead after about 2 to 3 s: at most one probe period until
//! someone probes it, one period until that probe has failed, and the suspicion time in which a slow node may object.
//! The suspicion time grows with the logarithm of the mesh.
//!
//! What a node sends a second does not depend on the size of the mesh while nothing changes. Every node knows every
//! other: placement needs that, and 10,000 rows are 0.7 MB (see `table`).
//!
//! Records travel three ways: by gossip on change, at a bounded rate; with the table to a node that joins; and by
//! comparison with one random member at every beat, which repairs what gossip lost (see `sync`).

mod directory;
mod driver;
mod health;
mod sharing;
mod state;
mod swim;
mod sync;
mod table;
mod wire;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use serde::de::DeserializeOwned;
use starling_protocol::codec::{decode, encode};
use starling_protocol::record::{NodeRecord, Role, SignedRecord};
use starling_protocol::signed::{Signer, Verifier};
use starling_protocol::wire::{CALL_LEN_BYTES_MAX, Gossip, Service, Topic};
use starling_protocol::{NodeId, PolicyVersion, Timestamp};
use tokio::sync::{Notify, broadcast};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::runtime::spawn;
use crate::transport::{InboundError, SharedTransport, Verdict};
use crate::watch::{self, lock};
use driver::{Driver, PIGGYBACK_CLAIMS};
pub use sharing::SharedRecords;
use swim::Swim;
use table::Known;
use wire::{Frame, News, Relayed};

/// Events that a slow listener may lag behind before it must look at [`Membership::live`] again.
const EVENTS_MAX: usize = 256;
/// Strangers remembered: as many as a node has connections. Others are noted when they connect again.
const STRANGERS_MAX: usize = 512;
/// How long a newly connected peer may take to answer a greeting.
const JOIN_LIMIT: Duration = Duration::from_secs(2);
/// A node's record, when it keeps changing, is published this often for each hundred nodes: everyone hears at most
/// 200 records a second.
const RECORD_INTERVAL: Duration = Duration::from_millis(500);
/// One in which only figures changed, that people read and nobody decides by (versions served, queues, bytes left), is
/// published this often for each node: everyone hears at most ten of them a second.
const FIGURES_INTERVAL: Duration = Duration::from_millis(100);
/// But at least this often.
const FIGURES_INTERVAL_MAX: Duration = Duration::from_secs(60);

/// How fast the mesh notices. The defaults are for a local network of any size.
#[derive(Clone, Debug)]
pub struct MembershipConfig {
    /// One member is probed in each; default 500 ms.
    pub probe_period: Duration,
    /// How long a direct probe may take before others are asked to probe; below the period. Default 200 ms.
    pub probe_timeout: Duration,
    /// How long a suspect may take to object, in a mesh of up to ten nodes and when others confirm the suspicion: long
    /// enough for a process that a busy machine does not schedule at once. It grows with log10 of the nodes. Default
    /// 1.5 s.
    pub suspicion: Duration,
    /// Nodes to announce to, besides those connected.
    pub seeds: Vec<NodeId>,
    /// How often to announce while no member is known; default 500 ms.
    pub announce_every: Duration,
    /// How often to greet connected nodes that are no members, and to knock on one declared dead; default 5 s.
    pub merge_every: Duration,
    /// How often the tables are compared with a member's; default 10 s, and 1 s while they differ.
    pub record_beat: Duration,
    /// For simulations: records and places that several nodes of this process share. Default none.
    pub shared_records: Option<Arc<SharedRecords>>,
}

impl Default for MembershipConfig {
    fn default() -> Self {
        Self {
            probe_period: Duration::from_millis(500),
            probe_timeout: Duration::from_millis(200),
            suspicion: Duration::from_millis(1500),
            seeds: Vec::new(),
            announce_every: Duration::from_millis(500),
            merge_every: Duration::from_secs(5),
            record_beat: Duration::from_secs(10),
            shared_records: None,
        }
    }
}

/// A node came or went, as this node sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberEvent {
    /// It answers.
    Joined(NodeId),
    /// It left, or nobody could reach it for the suspicion time.
    Left(NodeId),
}

/// The members of the mesh and their records.
#[derive(Debug)]
pub struct Membership {
    inner: Arc<Inner>,
    probe_timeout: Duration,
}

#[derive(Debug)]
struct Inner {
    node: NodeId,
    transport: SharedTransportDebug,
    verifier: VerifierDebug,
    shared_records: Option<Arc<SharedRecords>>,
    started: (Timestamp, Instant),
    swim: Mutex<Swim>,
    /// When the own record was last published.
    published: Mutex<Option<Instant>>,
    /// Counts changes of the live nodes.
    changes: watch::Sender<u64>,
    /// Counts changes of the live nodes that hold things for others.
    holder_changes: watch::Sender<u64>,
    holders_told: AtomicU64,
    events: broadcast::Sender<MemberEvent>,
    /// Wakes the driver; `gossip_sleeps` says that it waits for news.
    nudge: Notify,
    gossip_sleeps: AtomicBool,
    /// The last comparison found a difference.
    differs: AtomicBool,
    /// Members that a busy one named to this node when it joined.
    named: Mutex<Vec<NodeId>>,
    /// Nodes that were connected and no members when one of both changed.
    strangers: Mutex<BTreeSet<NodeId>>,
}

struct SharedTransportDebug(SharedTransport);

impl std::fmt::Debug for SharedTransportDebug {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Transport(..)")
    }
}

struct VerifierDebug(Arc<dyn Verifier>);

impl std::fmt::Debug for VerifierDebug {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Verifier(..)")
    }
}

impl Membership {
    /// Joins the mesh as the transport's node and keeps its place until `shutdown`, when it takes leave.
    ///
    /// `seed` decides which members are probed and when; in production it comes from the operating system. `now` is
    /// the wall clock; a restarted node must come with a later one than its former self.
    #[must_use]
    pub fn start(
        transport: SharedTransport,
        verifier: Arc<dyn Verifier>,
        config: MembershipConfig,
        seed: u64,
        now: Timestamp,
        shutdown: CancellationToken,
    ) -> Arc<Self> {
        let node = transport.local();
        let (changes, holder_changes) = (watch::channel(0).0, watch::channel(0).0);
        let directory = config.shared_records.as_ref().map(|s| s.directory());
        let inner = Arc::new(Inner {
            node,
            transport: SharedTransportDebug(transport.clone()),
            verifier: VerifierDebug(verifier),
            shared_records: config.shared_records.clone(),
            started: (now, Instant::now()),
            swim: Mutex::new(Swim::new(node, now, config.suspicion, seed, directory)),
            published: Mutex::new(None),
            changes,
            holder_changes,
            holders_told: AtomicU64::new(0),
            events: broadcast::Sender::new(EVENTS_MAX),
            nudge: Notify::new(),
            gossip_sleeps: AtomicBool::new(false),
            differs: AtomicBool::new(false),
            named: Mutex::new(Vec::new()),
            strangers: Mutex::default(),
        });
        transport.subscribe(Topic::Nodes);
        let probe_timeout = config.probe_timeout;
        drop(spawn(Driver::new(&inner, config).run(shutdown)));
        Arc::new(Self { inner, probe_timeout })
    }

    /// Serves a [`Service::Swim`] call. Waits only when it is to probe another node.
    ///
    /// # Errors
    /// [`InboundError::Malformed`] when it is none.
    pub async fn on_packet(&self, from: NodeId, body: &[u8]) -> Result<Bytes, InboundError> {
        let frame =
            decode("SWIM call", body, CALL_LEN_BYTES_MAX).map_err(|e| InboundError::Malformed(e.to_string()))?;
        let inner = &self.inner;
        Ok(match frame {
            Frame::Ping(news) | Frame::Gossip(news) => {
                inner.hear(from, &news);
                encode(&inner.news_for(from))
            }
            Frame::PingFor { target, news } => {
                inner.hear(from, &news);
                let answered = inner.ping(target, self.probe_timeout).await;
                let news = inner.news_for(from);
                encode(&if answered { Relayed::Answered(news) } else { Relayed::Silent(news) })
            }
            Frame::Join { incarnation, record } => encode(&inner.on_join(from, incarnation, record.as_ref())),
            Frame::Compare { incarnation, hash } => encode(&inner.on_compare(from, incarnation, hash)),
            Frame::Exchange { buckets, rows } => encode(&inner.on_exchange(&buckets, &rows)),
            Frame::Records(records) => {
                inner.take_all(from, &records);
                encode(&())
            }
        }
        .into())
    }

    /// Tells that a connection opened. A node without members announces itself there at once; one with members leaves
    /// that to the newcomer, and greets who is still a stranger after [`MembershipConfig::merge_every`].
    pub fn on_connection(&self, peer: NodeId, connected: bool) {
        if !connected {
            return;
        }
        let (alone, is_live) = {
            let swim = lock(&self.inner.swim);
            (swim.table.live() == 1, swim.table.is_live(peer))
        };
        if !is_live {
            self.inner.note_stranger(peer);
        }
        if alone {
            let inner = self.inner.clone();
            drop(spawn(async move { inner.join(peer, JOIN_LIMIT).await }));
        }
    }

    /// Judges and takes a record that came by gossip.
    #[must_use]
    pub fn on_record(&self, record: &SignedRecord, verifier: &dyn Verifier) -> Verdict {
        self.inner.take(record, verifier)
    }

    /// Makes `record` this node's: sets its node, raises its sequence above the last one, signs it and publishes it.
    /// Call it on every change and at a slow beat: a record that says nothing new is not published, and one that comes
    /// too soon after the last is left to the next beat: twice a second for each hundred nodes of the mesh, and in a
    /// mesh of a hundred every 10 s if only figures changed (versions served, queues, bytes left).
    pub fn publish_record(&self, record: NodeRecord, signer: &dyn Signer) {
        self.inner.publish(record, signer);
    }

    /// Live nodes, ascending, this one included.
    #[must_use]
    pub fn live(&self) -> Vec<NodeId> {
        lock(&self.inner.swim).table.live_list().to_vec()
    }
    /// How many live, this one included.
    #[must_use]
    pub fn live_count(&self) -> usize {
        lock(&self.inner.swim).table.live()
    }
    /// Whether `node` is alive.
    #[must_use]
    pub fn is_live(&self, node: NodeId) -> bool {
        lock(&self.inner.swim).table.is_live(node)
    }
    /// Changes with the set of live nodes; see [`Membership::live`] for it.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.inner.changes.receiver()
    }
    /// Changes with [`Membership::live_holders`]: in a large mesh far more seldom than [`Membership::watch`].
    #[must_use]
    pub fn watch_holders(&self) -> watch::Receiver<u64> {
        self.inner.holder_changes.receiver()
    }
    /// Every coming and going from now on. A listener that lags too far misses some: see [`Membership::live`].
    #[must_use]
    pub fn events(&self) -> broadcast::Receiver<MemberEvent> {
        self.inner.events.subscribe()
    }
    /// What `node` last said of itself, whether or not it is alive.
    #[must_use]
    pub fn record(&self, node: NodeId) -> Option<NodeRecord> {
        lock(&self.inner.swim).table.get(node)?.known.as_ref().map(|k| k.record.clone())
    }
    /// What `of` makes of what `node` last said of itself, without copying that.
    pub fn of_record<T>(&self, node: NodeId, of: impl FnOnce(&NodeRecord) -> T) -> Option<T> {
        lock(&self.inner.swim).table.get(node)?.known.as_ref().map(|k| of(&k.record))
    }
    /// How many records are known, without copying them.
    #[must_use]
    pub fn record_count(&self) -> usize {
        lock(&self.inner.swim).table.records().count()
    }
    /// All records known.
    #[must_use]
    pub fn records(&self) -> BTreeMap<NodeId, NodeRecord> {
        lock(&self.inner.swim).table.records().map(|r| (r.node, r.clone())).collect()
    }
    /// Records of the live nodes, by node.
    #[must_use]
    pub fn live_records(&self) -> Vec<NodeRecord> {
        lock(&self.inner.swim).table.live_records()
    }
    /// Live nodes that say they have `role`, ascending.
    #[must_use]
    pub fn live_with(&self, role: Role) -> Vec<NodeId> {
        lock(&self.inner.swim).table.with_role(role)
    }
    /// What `of` makes of the records of the live nodes that hold rollouts and weights for others, by node. Costs
    /// nothing for other nodes, and copies no record.
    pub fn of_holders<T>(&self, of: impl FnMut(&NodeRecord) -> Option<T>) -> Vec<T> {
        lock(&self.inner.swim).table.providers().filter_map(of).collect()
    }
    /// Live nodes that hold rollouts and weights for others, ascending.
    #[must_use]
    pub fn live_holders(&self) -> Vec<NodeId> {
        self.of_holders(|r| Some(r.node))
    }
    /// Live nodes that hold rollouts and weights for others and take more, ascending.
    #[must_use]
    pub fn live_takers(&self) -> Vec<NodeId> {
        self.of_holders(|r| r.takes_rollouts().then_some(r.node))
    }
    /// Live servers, ascending.
    #[must_use]
    pub fn live_servers(&self) -> Vec<NodeId> {
        self.live_with(Role::Server)
    }
}

impl Inner {
    /// The wall clock as of the start, moved on by tokio's clock.
    fn now(&self) -> Timestamp {
        self.started.0 + self.started.1.elapsed()
    }

    /// Calls `peer`; `None` when it does not answer, or not sensibly.
    async fn request<A: DeserializeOwned>(&self, peer: NodeId, frame: &Frame, limit: Duration) -> Option<A> {
        match self.transport.0.call(peer, Service::Swim, encode(frame).into(), limit).await {
            Ok(answer) => decode("SWIM answer", &answer, CALL_LEN_BYTES_MAX)
                .inspect_err(|error| tracing::debug!(%error, %peer, "no SWIM answer"))
                .ok(),
            Err(error) => {
                tracing::trace!(%error, "SWIM call lost");
                None
            }
        }
    }

    fn hear(&self, from: NodeId, news: &News) {
        let mut swim = lock(&self.swim);
        swim.hear(Instant::now(), from, news);
        self.tell(&mut swim);
    }
    fn news_for(&self, peer: NodeId) -> News {
        lock(&self.swim).news_for(peer, PIGGYBACK_CLAIMS)
    }

    /// Tells this node's logic who came and went, and the driver that there is something to tell.
    fn tell(&self, swim: &mut MutexGuard<'_, Swim>) {
        let events = swim.drain_events();
        if !events.is_empty() {
            for event in events {
                if let MemberEvent::Left(node) = event
                    && self.transport.0.is_connected(node)
                {
                    self.note_stranger(node);
                }
                match event {
                    MemberEvent::Joined(node) => tracing::info!(node = %node.short(), "node joined"),
                    MemberEvent::Left(node) => tracing::warn!(node = %node.short(), "node is gone"),
                }
                let _nobody_listens = self.events.send(event);
            }
            if swim.table.live() == 1 {
                tracing::warn!("no other node is alive");
            }
            self.changes.modify(|n| {
                *n += 1;
                true
            });
        }
        self.tell_of_holders(swim);
        if swim.has_news() && self.gossip_sleeps.swap(false, Ordering::AcqRel) {
            self.nudge.notify_one();
        }
    }

    fn note_stranger(&self, node: NodeId) {
        let mut strangers = lock(&self.strangers);
        if strangers.len() < STRANGERS_MAX {
            strangers.insert(node);
        }
    }

    fn tell_of_holders(&self, swim: &Swim) {
        let changes = swim.table.provider_changes();
        if self.holders_told.load(Ordering::Relaxed) != changes {
            self.holders_told.store(changes, Ordering::Relaxed);
            self.holder_changes.replace(changes);
        }
    }

    fn take_all(&self, from: NodeId, records: &[SignedRecord]) {
        for record in records {
            if self.take(record, &*self.verifier.0) == Verdict::Reject {
                tracing::warn!(%from, "a node record does not verify");
            }
        }
    }

    fn take(&self, signed: &SignedRecord, verifier: &dyn Verifier) -> Verdict {
        let signer = signed.signature.signer;
        let is_known = |swim: &Swim| swim.table.get(signer)?.known.as_ref().map(|k| k.signed == *signed);
        if is_known(&lock(&self.swim)) == Some(true) {
            return Verdict::Ignore; // without verifying it again
        }
        let known = match &self.shared_records {
            Some(shared) => shared.verify(signed, verifier),
            None => sharing::verified(signed, verifier),
        };
        let known = match known {
            Ok(known) => known,
            Err(error) => {
                tracing::debug!(%error, "node record refused");
                return Verdict::Reject;
            }
        };
        // A record of our own is an echo, or comes from an earlier run. If its number is higher than ours the clock
        // went back; the table keeps it, so the next publication goes above it.
        let mut swim = lock(&self.swim);
        let now_s = swim.now_s(Instant::now());
        let taken = swim.table.take(known, now_s);
        self.tell_of_holders(&swim);
        if taken { Verdict::Accept } else { Verdict::Ignore }
    }

    fn publish(&self, mut record: NodeRecord, signer: &dyn Signer) {
        let now = Instant::now();
        let signed = {
            let mut swim = lock(&self.swim);
            let own = swim.table.get(self.node).and_then(|r| r.known.clone());
            let mut published = lock(&self.published);
            if let (Some(own), Some(last)) = (&own, *published) {
                record.sequence = own.record.sequence;
                let live = u32::try_from(swim.table.live()).unwrap_or(u32::MAX);
                let mut interval = RECORD_INTERVAL * live.div_ceil(100);
                if without_figures(&own.record) == without_figures(&record) {
                    interval = interval.max((FIGURES_INTERVAL * live).min(FIGURES_INTERVAL_MAX));
                }
                if own.record == record || now < last + interval {
                    return;
                }
            }
            let last = own.map_or(0, |k| k.record.sequence);
            record.node = self.node;
            record.sequence = self.now().0.max(record.sequence).max(last.saturating_add(1));
            let signed = SignedRecord::seal(&record, signer);
            *published = Some(now);
            let now_s = swim.now_s(now);
            let known = Arc::new(Known { record, signed: signed.clone() });
            let taken = swim.table.take(known, now_s);
            debug_assert!(taken, "the own record has a new sequence number");
            self.tell_of_holders(&swim);
            if swim.table.live() == 1 {
                return; // nobody hears it: see the driver's `on_company`
            }
            signed
        };
        self.transport.0.publish(Topic::Nodes, encode(&Gossip::Node(signed)));
    }
}

/// A record as far as anybody decides by it.
fn without_figures(record: &NodeRecord) -> NodeRecord {
    let mut record = NodeRecord { storage_free_bytes: 0, ..record.clone() };
    for model in &mut record.models {
        (model.version, model.queue) = (PolicyVersion(0), 0);
    }
    record
}
