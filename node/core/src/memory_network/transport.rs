//! One node's end of the network.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use starling_protocol::NodeId;
use starling_protocol::wire::{CALL_LEN_BYTES_MAX, GOSSIP_LEN_BYTES_MAX, Service, Topic};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};

use super::links::Delivery;
use super::observe::MessageKind;
use super::queue::Task;
use super::stream::pipe;
use super::{MemoryNetwork, Process, Reply, Slot};
use crate::transport::{CallError, FrameStream, InboundError, SharedTransport, Transport};
use crate::watch::lock;

/// One node's end of a [`MemoryNetwork`].
#[derive(Debug)]
pub struct MemoryTransport {
    network: Arc<MemoryNetwork>,
    node: NodeId,
    slot: Slot,
}

/// What a dial finds.
enum Dial {
    Open(Arc<Process>),
    /// It answers after this time.
    Handshake(Duration),
    /// Nobody listens there; known after this time.
    Refused(Duration),
    /// Packets vanish.
    Silent,
}

/// A call that waits for its answer; given up when dropped.
struct Waiting {
    network: Arc<MemoryNetwork>,
    id: u64,
    answer: oneshot::Receiver<Reply>,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        lock(&self.network.0).calls_open.remove(&self.id);
    }
}

impl MemoryTransport {
    pub(super) fn new(network: Arc<MemoryNetwork>, node: NodeId, slot: Slot) -> Self {
        Self { network, node, slot }
    }
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

    fn dial(&self, peer: Slot) -> Dial {
        let mut world = lock(&self.network.0);
        if world.is_connected(self.slot, peer) {
            world.touch(self.slot, peer);
            return match &world.node(peer).process {
                Some(process) => Dial::Open(process.clone()),
                None => Dial::Refused(Duration::ZERO),
            };
        }
        if world.is_cut(self.slot, peer) || world.is_cut(peer, self.slot) {
            return Dial::Silent;
        }
        let round_trip = world.latency(self.slot, peer) + world.latency(peer, self.slot);
        match world.node(peer).process {
            Some(_) => Dial::Handshake(round_trip),
            None => Dial::Refused(round_trip),
        }
    }

    /// Opens a connection, which takes a round trip, or says why there is none.
    async fn reach(&self, id: NodeId, peer: Slot, limit: Duration) -> Result<Arc<Process>, CallError> {
        let deadline = Instant::now() + limit;
        match self.dial(peer) {
            Dial::Open(process) => return Ok(process),
            Dial::Refused(after) => {
                sleep(after.min(limit)).await;
                return Err(CallError::NotConnected { peer: id, reason: "nobody listens there".into() });
            }
            Dial::Handshake(round_trip) if round_trip < limit => {
                sleep(round_trip).await;
                self.network.open(self.slot, peer);
                // A node that only calls, and has no process of its own, keeps no connection.
                let world = lock(&self.network.0);
                let cut = world.is_cut(self.slot, peer) || world.is_cut(peer, self.slot);
                if let (Some(process), false) = (&world.node(peer).process, cut) {
                    return Ok(process.clone());
                }
            }
            Dial::Handshake(_) | Dial::Silent => {}
        }
        sleep_until(deadline).await;
        Err(CallError::NotConnected { peer: id, reason: format!("no answer to the dial within {limit:?}") })
    }

    /// Sends a request to `process`, which runs at `to`; once more if the link doubles it.
    fn request(&self, to: Slot, process: &Process, service: Service, body: Bytes) -> Waiting {
        let (tx, answer) = oneshot::channel();
        let mut world = lock(&self.network.0);
        world.calls += 1;
        let (id, from, run) = (world.calls, self.slot, process.run);
        world.calls_open.insert(id, tx);
        let copies = if world.duplicates(from, to) { 2 } else { 1 };
        for _ in 0..copies {
            if let Some(at) = world.send(from, to, MessageKind::Call(service), body.len(), Delivery::Datagram) {
                world.queue.push(at, Task::Call { id, from, to, run, service, body: body.clone() });
            }
        }
        Waiting { network: self.network.clone(), id, answer }
    }

    fn peer(&self, peer: NodeId) -> Slot {
        lock(&self.network.0).slot(peer)
    }

    fn own_process(&self) -> Result<Arc<Process>, CallError> {
        lock(&self.network.0).node(self.slot).process.clone().ok_or(CallError::Closed)
    }
}

#[async_trait]
impl Transport for MemoryTransport {
    fn local(&self) -> NodeId {
        self.node
    }
    fn addresses(&self) -> Vec<String> {
        vec![format!("/memory/{}", self.node.short())]
    }
    fn connected(&self) -> Vec<NodeId> {
        lock(&self.network.0).neighbours(self.slot)
    }
    fn is_connected(&self, peer: NodeId) -> bool {
        let mut world = lock(&self.network.0);
        let slot = world.slot(peer);
        world.is_connected(self.slot, slot)
    }
    fn add_addresses(&self, _peer: NodeId, _addresses: &[String]) {}

    async fn call(&self, peer: NodeId, service: Service, body: Bytes, limit: Duration) -> Result<Bytes, CallError> {
        if body.len() > CALL_LEN_BYTES_MAX {
            return Err(CallError::TooLong { got: body.len(), max: CALL_LEN_BYTES_MAX });
        }
        self.network.start_delivery();
        let deadline = Instant::now() + limit;
        let silence = CallError::Timeout { peer, after: limit };
        let refused = |e: InboundError| CallError::Failed { peer, reason: e.to_string() };
        if peer == self.node {
            let process = self.own_process()?;
            return match timeout(limit, process.inbound.on_call(peer, service, body)).await {
                Ok(reply) => reply.map_err(refused),
                Err(_elapsed) => Err(silence),
            };
        }
        let slot = self.peer(peer);
        let process = self.reach(peer, slot, limit).await?;
        let mut waiting = self.request(slot, &process, service, body);
        drop(process);
        // The sender waits in the network until the answer comes or `waiting` is dropped.
        match timeout_at(deadline, &mut waiting.answer).await {
            Ok(Ok(reply)) => reply.map_err(refused),
            Ok(Err(_)) | Err(_) => Err(silence),
        }
    }

    async fn open_generate(&self, peer: NodeId, limit: Duration) -> Result<FrameStream, CallError> {
        self.network.start_delivery();
        let slot = self.peer(peer);
        let process = if slot == self.slot { self.own_process()? } else { self.reach(peer, slot, limit).await? };
        let (from, run, kind) = (self.slot, process.run, MessageKind::Stream);
        let (mine, at) = {
            let mut world = lock(&self.network.0);
            let mine = world.node(from).process.as_ref().map(|p| p.run);
            (mine, world.send(from, slot, kind, 0, Delivery::Reliable))
        };
        let Some(at) = at else {
            sleep(limit).await;
            return Err(CallError::Timeout { peer, after: limit });
        };
        let (there, their_end) = pipe(&self.network, (from, self.node), (slot, peer), mine);
        let (back, my_end) = pipe(&self.network, (slot, peer), (from, self.node), Some(run));
        let stream = FrameStream { send: Box::new(back), recv: Box::new(their_end) };
        lock(&self.network.0).queue.push(at, Task::Stream { from, to: slot, run, stream });
        Ok(FrameStream { send: Box::new(there), recv: Box::new(my_end) })
    }

    fn publish(&self, topic: Topic, body: Vec<u8>) {
        if body.len() > GOSSIP_LEN_BYTES_MAX {
            tracing::warn!(topic = topic.name(), len = body.len(), "gossip message too long, dropped");
            return;
        }
        lock(&self.network.0).publish(self.slot, &topic, body.into());
    }
    fn subscribe(&self, topic: Topic) {
        lock(&self.network.0).subscribe(self.slot, &topic);
    }
}
