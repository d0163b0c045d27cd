//! Who is in the mesh: liveness by SWIM (through foca), and what each node says of itself by signed records.
//!
//! Liveness is a judgement, not a fact: it tells whom to ask and whom to make a voter, and decides nothing that
//! must be safe. A killed node is known dead after about 2 to 3 s: at most one probe period until someone probes
//! it, one period until that probe has failed, and the suspicion time in which a slow node may object.
//!
//! Records travel three ways: by gossip on change and at a slow beat, directly to a node that joins, and by
//! comparison with one random member at every beat, which repairs what gossip lost.

mod driver;
mod identity;
mod records;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use starling_protocol::codec::{decode, encode};
use starling_protocol::record::{NodeRecord, Role, SignedRecord};
use starling_protocol::signed::{Signer, Verifier};
use starling_protocol::wire::{CALL_LEN_BYTES_MAX, Gossip, Service, Topic};
use starling_protocol::{NodeId, Timestamp};
use tokio::sync::{broadcast, mpsc};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::runtime::spawn;
use crate::transport::{InboundError, SharedTransport, Verdict};
use crate::watch::{self, lock};
use driver::{Driver, Input};
use identity::Identity;
use records::Table;

/// Inputs waiting for the driver: SWIM sends a few packets a second, so a full queue means overload, and packets
/// may be dropped then. 1,024 × 16 KiB is 16 MiB at worst.
const INPUTS_MAX: usize = 1024;
/// Events that a slow listener may lag behind before it must look at [`Membership::live`] again.
const EVENTS_MAX: usize = 256;
/// How long a message with records may take.
const RECORDS_LIMIT: Duration = Duration::from_secs(2);
/// Most bytes of records in one message.
const RECORDS_BYTES_MAX: usize = 1 << 20;

/// How fast the mesh notices. The defaults are for a local network of up to some hundred nodes.
#[derive(Clone, Debug)]
pub struct MembershipConfig {
    /// One member is probed in each; default 500 ms.
    pub probe_period: Duration,
    /// How long a direct probe may take before others are asked to probe; below the period. Default 200 ms.
    pub probe_timeout: Duration,
    /// How long a suspect may take to object: long enough for a process that a busy machine does not schedule at
    /// once. Default 1.5 s.
    pub suspicion: Duration,
    /// Nodes to announce to, besides those connected.
    pub seeds: Vec<NodeId>,
    /// How often to announce while no member is known; default 500 ms.
    pub announce_every: Duration,
    /// How often to announce to connected nodes that are no members; default 5 s.
    pub merge_every: Duration,
    /// How often the known records are compared with a member's; default 10 s.
    pub record_beat: Duration,
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

/// Body of a [`Service::Swim`] call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum SwimFrame {
    /// One of foca's packets; answered by nothing.
    Packet(#[serde(with = "serde_bytes")] Vec<u8>),
    /// Take these records; answered by nothing.
    Push(Vec<SignedRecord>),
    /// Push me the records newer than these; answered by nothing.
    Pull(Vec<(NodeId, u64)>),
}

/// The members of the mesh and their records.
#[derive(Debug)]
pub struct Membership {
    inner: Arc<Inner>,
    inputs: mpsc::Sender<Input>,
}

#[derive(Debug)]
struct Inner {
    node: NodeId,
    transport: SharedTransportDebug,
    verifier: VerifierDebug,
    started: (Timestamp, Instant),
    table: Mutex<Table>,
    live: watch::Sender<Arc<Vec<NodeId>>>,
    events: broadcast::Sender<MemberEvent>,
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
        let (live, _) = watch::channel(Arc::new(vec![node]));
        let table = Table::of(node);
        let inner = Arc::new(Inner {
            node,
            transport: SharedTransportDebug(transport.clone()),
            verifier: VerifierDebug(verifier),
            started: (now, Instant::now()),
            table: Mutex::new(table),
            live,
            events: broadcast::Sender::new(EVENTS_MAX),
        });
        transport.subscribe(Topic::Nodes);
        let (inputs, rx) = mpsc::channel(INPUTS_MAX);
        let identity = Identity { node, incarnation: now.0.max(1) };
        let driver = Driver::new(&inner, transport, identity, config, seed);
        drop(spawn(driver.run(rx, shutdown)));
        Arc::new(Self { inner, inputs })
    }

    /// Serves a [`Service::Swim`] call, whose answer is empty. Returns at once.
    ///
    /// # Errors
    /// [`InboundError::Malformed`] when it is none.
    pub fn on_packet(&self, from: NodeId, body: &[u8]) -> Result<(), InboundError> {
        let frame =
            decode("SWIM call", body, CALL_LEN_BYTES_MAX).map_err(|e| InboundError::Malformed(e.to_string()))?;
        match frame {
            SwimFrame::Packet(packet) => {
                if self.inputs.try_send(Input::Packet(packet.into())).is_err() {
                    tracing::debug!(%from, "SWIM packet dropped: the queue is full or the node stops");
                }
            }
            SwimFrame::Push(records) => {
                for record in records {
                    if self.inner.take(&record, &*self.inner.verifier.0) == Verdict::Reject {
                        tracing::warn!(%from, "a pushed node record does not verify");
                    }
                }
            }
            SwimFrame::Pull(digest) => {
                let records = lock(&self.inner.table).newer_than(&digest, RECORDS_BYTES_MAX);
                if !records.is_empty() {
                    self.inner.call(from, &SwimFrame::Push(records));
                }
            }
        }
        Ok(())
    }

    /// Tells that a connection opened: a peer that is no member yet is announced to.
    pub fn on_connection(&self, peer: NodeId, connected: bool) {
        if connected && self.inputs.try_send(Input::Connected(peer)).is_err() {
            tracing::debug!(%peer, "not announced: the queue is full or the node stops");
        }
    }

    /// Judges and takes a record that came by gossip.
    #[must_use]
    pub fn on_record(&self, record: &SignedRecord, verifier: &dyn Verifier) -> Verdict {
        self.inner.take(record, verifier)
    }

    /// Makes `record` this node's: sets its node, raises its sequence above the last one, signs it and publishes it.
    /// Call it on every change and at a slow beat.
    pub fn publish_record(&self, record: NodeRecord, signer: &dyn Signer) {
        self.inner.publish(record, signer);
    }

    /// Live nodes, ascending, this one included.
    #[must_use]
    pub fn live(&self) -> Vec<NodeId> {
        lock(&self.inner.table).live.iter().copied().collect()
    }
    /// Whether `node` is alive.
    #[must_use]
    pub fn is_live(&self, node: NodeId) -> bool {
        lock(&self.inner.table).live.contains(&node)
    }
    /// The live nodes, as they change.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Arc<Vec<NodeId>>> {
        self.inner.live.receiver()
    }
    /// Every coming and going from now on. A listener that lags too far misses some: see [`Membership::live`].
    #[must_use]
    pub fn events(&self) -> broadcast::Receiver<MemberEvent> {
        self.inner.events.subscribe()
    }
    /// What `node` last said of itself, whether or not it is alive.
    #[must_use]
    pub fn record(&self, node: NodeId) -> Option<NodeRecord> {
        lock(&self.inner.table).record(node).cloned()
    }
    /// All records known.
    #[must_use]
    pub fn records(&self) -> BTreeMap<NodeId, NodeRecord> {
        lock(&self.inner.table).records().map(|r| (r.node, r.clone())).collect()
    }
    /// Records of the live nodes, by node.
    #[must_use]
    pub fn live_records(&self) -> Vec<NodeRecord> {
        lock(&self.inner.table).live_records().cloned().collect()
    }
    /// Live nodes that say they have `role`, ascending.
    #[must_use]
    pub fn live_with(&self, role: Role) -> Vec<NodeId> {
        lock(&self.inner.table).live_records().filter(|r| r.has(role)).map(|r| r.node).collect()
    }
    /// Live nodes that hold rollouts and weights for others, ascending.
    #[must_use]
    pub fn live_holders(&self) -> Vec<NodeId> {
        lock(&self.inner.table).live_records().filter(|r| r.holds_rollouts()).map(|r| r.node).collect()
    }
    /// Live nodes that hold rollouts and weights for others and take more, ascending.
    #[must_use]
    pub fn live_takers(&self) -> Vec<NodeId> {
        lock(&self.inner.table).live_records().filter(|r| r.takes_rollouts()).map(|r| r.node).collect()
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

    fn take(&self, signed: &SignedRecord, verifier: &dyn Verifier) -> Verdict {
        let record = match signed.verify(verifier) {
            Ok(record) => record,
            Err(error) => {
                tracing::debug!(%error, "node record refused");
                return Verdict::Reject;
            }
        };
        // A record of our own is an echo, or comes from an earlier run. If its number is higher than ours the clock
        // went back; the table keeps it, so the next publication goes above it.
        if lock(&self.table).take(record, signed.clone()) { Verdict::Accept } else { Verdict::Ignore }
    }

    fn publish(&self, mut record: NodeRecord, signer: &dyn Signer) {
        let signed = {
            let mut table = lock(&self.table);
            let last = table.record(self.node).map_or(0, |r| r.sequence);
            record.node = self.node;
            record.sequence = self.now().0.max(record.sequence).max(last.saturating_add(1));
            let signed = SignedRecord::seal(&record, signer);
            let taken = table.take(record, signed.clone());
            debug_assert!(taken, "the own record has a new sequence number");
            signed
        };
        self.transport.0.publish(Topic::Nodes, encode(&Gossip::Node(signed)));
    }

    fn call(&self, peer: NodeId, frame: &SwimFrame) {
        let (transport, body) = (self.transport.0.clone(), Bytes::from(encode(frame)));
        drop(spawn(async move {
            if let Err(error) = transport.call(peer, Service::Swim, body, RECORDS_LIMIT).await {
                tracing::debug!(%error, "node records not exchanged; the beat will repeat it");
            }
        }));
    }

    /// Gives the own record to a node that joined.
    fn push_to(&self, peer: NodeId) {
        let own = lock(&self.table).signed(self.node).cloned();
        if let Some(own) = own {
            self.call(peer, &SwimFrame::Push(vec![own]));
        }
    }

    /// Asks for the records that this node lacks.
    fn pull_from(&self, peer: NodeId) {
        let digest = lock(&self.table).digest();
        self.call(peer, &SwimFrame::Pull(digest));
    }

    fn set_live(&self, members: impl Iterator<Item = NodeId>) {
        let now: std::collections::BTreeSet<_> = members.chain([self.node]).collect();
        let before = std::mem::replace(&mut lock(&self.table).live, now.clone());
        if before == now {
            return;
        }
        self.live.replace(Arc::new(now.iter().copied().collect()));
        let joined = now.difference(&before).map(|n| MemberEvent::Joined(*n));
        let left = before.difference(&now).map(|n| MemberEvent::Left(*n));
        for event in joined.chain(left) {
            let _nobody_listens = self.events.send(event);
        }
    }
}
