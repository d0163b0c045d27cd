//! Gossip along a mesh of bounded degree, as gossipsub does it (libp2p specs, `pubsub/gossipsub/gossipsub-v1.1.md`).
//!
//! Each subscriber of a topic keeps [`DEGREE`] of its neighbours as mesh peers. A message goes along the mesh at once.
//! At every heartbeat a node offers what it heard lately to [`LAZY`] neighbours outside of its mesh, and who lacks a
//! message asks for it: that joins parts which no mesh edge joins. A node's own message goes to all of its neighbours
//! that want it, as `starling-mesh` has it (`flood_publish`): whoever forms the mesh around it cannot keep it back.
//! Scores, back-off after a prune and the outbound quota of the real one are not modelled.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use rand::RngExt;
use starling_protocol::wire::Topic;
use tokio::time::Instant;

use super::links::Delivery;
use super::observe::{Fate, MessageKind};
use super::queue::Task;
use super::{Slot, World};

/// Mesh peers that a node wants, and below and above which it changes something; as `starling-mesh` sets them.
pub(super) const DEGREE: usize = 6;
pub(super) const DEGREE_LOW: usize = 4;
pub(super) const DEGREE_HIGH: usize = 10;
/// Neighbours outside of the mesh that a heartbeat tells what was heard lately.
const LAZY: usize = 4;
/// As `starling-mesh` sets it.
const HEARTBEAT: Duration = Duration::from_millis(500);
/// A message is offered for this long: five heartbeats.
const OFFERED_FOR: Duration = Duration::from_millis(2500);
/// A message is passed on and remembered for this long after it was published.
const REMEMBERED_FOR: Duration = Duration::from_secs(120);
/// Most messages that a node offers at once; the oldest fall out.
const OFFERED_MAX: usize = 512;

/// A published message, and who has it.
#[derive(Debug)]
struct Message {
    topic: u32,
    body: Bytes,
    expires: Instant,
    /// One bit a node.
    seen: Vec<u64>,
    /// Subscribers among those that have it.
    reached: usize,
}

/// All topics and the messages under way.
#[derive(Debug, Default)]
pub(super) struct Gossip {
    topics: Vec<Topic>,
    topic_ids: BTreeMap<Topic, u32>,
    /// Subscribers of each topic.
    subscribers: Vec<usize>,
    /// The oldest first; it is number `expired`.
    messages: VecDeque<Message>,
    expired: u64,
}

impl Gossip {
    fn message(&self, id: u64) -> Option<&Message> {
        self.messages.get(usize::try_from(id.checked_sub(self.expired)?).ok()?)
    }
    fn message_mut(&mut self, id: u64) -> Option<&mut Message> {
        self.messages.get_mut(usize::try_from(id.checked_sub(self.expired)?).ok()?)
    }
}

/// A node's part.
#[derive(Debug, Default)]
pub(super) struct Subscriber {
    /// Mesh peers for each topic subscribed to. An edge is in the meshes of both its ends.
    meshes: BTreeMap<u32, BTreeSet<Slot>>,
    /// Heard lately, with until when they are offered to others.
    offered: VecDeque<(Instant, u64)>,
    beating: bool,
}

impl Message {
    fn has(&self, node: Slot) -> bool {
        self.seen.get(node as usize / 64).is_some_and(|w| w >> (node % 64) & 1 == 1)
    }
    /// Returns whether it is news.
    fn mark(&mut self, node: Slot) -> bool {
        let word = node as usize / 64;
        if word >= self.seen.len() {
            self.seen.resize(word + 1, 0);
        }
        let (bit, old) = (1 << (node % 64), self.seen[word]);
        self.seen[word] |= bit;
        old & bit == 0
    }
}

impl World {
    fn topic_id(&mut self, topic: &Topic) -> u32 {
        if let Some(id) = self.gossip.topic_ids.get(topic) {
            return *id;
        }
        let id = u32::try_from(self.gossip.topics.len()).unwrap_or(u32::MAX);
        self.gossip.topics.push(topic.clone());
        self.gossip.subscribers.push(0);
        self.gossip.topic_ids.insert(topic.clone(), id);
        id
    }
    fn mesh(&self, node: Slot, topic: u32) -> Option<&BTreeSet<Slot>> {
        self.node(node).gossip.meshes.get(&topic)
    }
    fn degree(&self, node: Slot, topic: u32) -> usize {
        self.mesh(node, topic).map_or(0, BTreeSet::len)
    }
    /// Mesh peers of `node` on `topic`; `None` when it has not subscribed.
    pub(super) fn degree_on(&self, node: Slot, topic: &Topic) -> Option<usize> {
        self.mesh(node, *self.gossip.topic_ids.get(topic)?).map(BTreeSet::len)
    }
    pub(super) fn shares_mesh(&self, a: Slot, b: Slot) -> bool {
        self.node(a).gossip.meshes.values().any(|m| m.contains(&b))
    }

    pub(super) fn subscribe(&mut self, node: Slot, topic: &Topic) {
        let topic = self.topic_id(topic);
        if self.mesh(node, topic).is_none() {
            self.node_mut(node).gossip.meshes.insert(topic, BTreeSet::new());
            self.gossip.subscribers[topic as usize] += 1;
        }
        self.repair(node, topic);
        self.start_beating(node);
    }

    /// Heartbeats run while the node does.
    pub(super) fn start_beating(&mut self, node: Slot) {
        let state = self.node(node);
        let Some(run) = state.process.as_ref().map(|p| p.run) else { return };
        if state.gossip.meshes.is_empty() || state.gossip.beating {
            return;
        }
        self.node_mut(node).gossip.beating = true;
        let first = HEARTBEAT.mul_f64(self.rng.random_range(0.0..1.0));
        self.queue.push(Instant::now() + first, Task::Heartbeat { node, run });
    }

    /// The node's process is gone: its next run has heard nothing.
    pub(super) fn forget_gossip(&mut self, node: Slot) {
        let topics = std::mem::take(&mut self.node_mut(node).gossip).meshes;
        for topic in topics.keys() {
            self.gossip.subscribers[*topic as usize] -= 1;
        }
        let (word, bit) = (node as usize / 64, 1 << (node % 64));
        for message in &mut self.gossip.messages {
            let Some(seen) = message.seen.get_mut(word).filter(|w| **w & bit != 0) else { continue };
            *seen &= !bit;
            message.reached = message.reached.saturating_sub(usize::from(topics.contains_key(&message.topic)));
        }
    }

    /// A new connection may serve the meshes of both its ends.
    pub(super) fn join_meshes(&mut self, a: Slot, b: Slot) {
        for topic in 0..self.gossip.topics.len() {
            let topic = u32::try_from(topic).unwrap_or(u32::MAX);
            if self.mesh(a, topic).is_some() && self.mesh(b, topic).is_some() {
                self.repair(a, topic);
                self.repair(b, topic);
            }
        }
    }

    /// A connection is gone.
    pub(super) fn leave_meshes(&mut self, a: Slot, b: Slot) {
        for (node, peer) in [(a, b), (b, a)] {
            for mesh in self.node_mut(node).gossip.meshes.values_mut() {
                mesh.remove(&peer);
            }
        }
    }

    /// Neighbours of `node` that subscribed to `topic` and are not in its mesh, at most `want`, from a random place
    /// on. A node of many topics among neighbours of few looks at all of them.
    fn outside(&mut self, node: Slot, topic: u32, want: usize) -> Vec<Slot> {
        let places = u32::try_from(self.nodes.len()).unwrap_or(u32::MAX).max(1);
        let start = self.rng.random_range(0..places);
        let peers = &self.node(node).access.peers;
        let mesh = self.mesh(node, topic);
        let around = peers.range(start..).chain(peers.range(..start)).map(|(p, _)| *p);
        around
            .filter(|p| mesh.is_none_or(|m| !m.contains(p)) && self.mesh(*p, topic).is_some())
            .filter(|p| !self.is_cut(node, *p) && !self.is_cut(*p, node))
            .take(want)
            .collect()
    }

    /// Brings the mesh of `node` up to its degree. A full neighbour is grafted only by a node that would have no mesh
    /// peer otherwise, so that none stays alone.
    fn repair(&mut self, node: Slot, topic: u32) {
        if self.degree(node, topic) >= DEGREE_LOW {
            return;
        }
        for peer in self.outside(node, topic, 4 * DEGREE) {
            let degree = self.degree(node, topic);
            if degree >= DEGREE {
                break;
            }
            if self.degree(peer, topic) < DEGREE_HIGH || degree == 0 {
                self.graft(node, peer, topic, true);
            }
        }
        self.prune(node, topic);
    }

    fn graft(&mut self, a: Slot, b: Slot, topic: u32, there: bool) {
        for (node, peer) in [(a, b), (b, a)] {
            if let Some(mesh) = self.node_mut(node).gossip.meshes.get_mut(&topic) {
                if there {
                    mesh.insert(peer);
                } else {
                    mesh.remove(&peer);
                }
            }
        }
    }

    /// Takes peers out of a mesh that is too large, from a random one on; only those that have enough others.
    fn prune(&mut self, node: Slot, topic: u32) {
        let degree = self.degree(node, topic);
        if degree <= DEGREE_HIGH {
            return;
        }
        let mut peers: Vec<_> = self.mesh(node, topic).into_iter().flatten().copied().collect();
        let start = self.rng.random_range(0..peers.len());
        peers.rotate_left(start);
        peers.retain(|p| self.degree(*p, topic) > DEGREE_LOW);
        for peer in peers.into_iter().take(degree - DEGREE) {
            self.graft(node, peer, topic, false);
        }
    }

    pub(super) fn heartbeat(&mut self, node: Slot, run: u64) {
        if !self.runs(node, run) {
            return;
        }
        let now = Instant::now();
        self.queue.push(now + HEARTBEAT, Task::Heartbeat { node, run });
        self.expire(now);
        let topics: Vec<_> = self.node(node).gossip.meshes.keys().copied().collect();
        for topic in topics {
            self.repair(node, topic);
            self.prune(node, topic);
            self.offer(node, topic, now);
        }
    }

    fn expire(&mut self, now: Instant) {
        while self.gossip.messages.front().is_some_and(|oldest| oldest.expires <= now) {
            self.gossip.messages.pop_front();
            self.gossip.expired += 1;
        }
    }

    /// IHAVE, IWANT and the message: three hops, and only for what the neighbour lacks.
    fn offer(&mut self, node: Slot, topic: u32, now: Instant) {
        let offered = &mut self.node_mut(node).gossip.offered;
        while offered.front().is_some_and(|(until, _)| *until <= now) {
            offered.pop_front();
        }
        // What every subscriber has nobody lacks.
        let subscribers = self.gossip.subscribers[topic as usize];
        let lacked = |m: &Message| m.topic == topic && m.reached < subscribers;
        let ids = self.node(node).gossip.offered.iter().map(|(_, id)| *id);
        let ids: Vec<_> = ids.filter(|id| self.gossip.message(*id).is_some_and(lacked)).collect();
        if ids.is_empty() {
            return;
        }
        for peer in self.outside(node, topic, LAZY) {
            for id in &ids {
                if self.gossip.message(*id).is_some_and(|m| !m.has(peer)) {
                    let asked = self.latency(node, peer) + self.latency(peer, node);
                    self.send_gossip(node, peer, *id, asked);
                }
            }
        }
    }

    /// `node` has a message. Returns whether it is news.
    fn mark(&mut self, node: Slot, id: u64) -> bool {
        let Some(topic) = self.gossip.message(id).map(|m| m.topic) else { return false };
        let subscribed = self.mesh(node, topic).is_some();
        let Some(message) = self.gossip.message_mut(id) else { return false };
        let news = message.mark(node);
        message.reached += usize::from(news && subscribed);
        news
    }

    /// Starts a message at `node`: to all neighbours that want it.
    pub(super) fn publish(&mut self, node: Slot, topic: &Topic, body: Bytes) {
        let topic = self.topic_id(topic);
        let (id, expires) = (self.gossip.expired + self.gossip.messages.len() as u64, Instant::now() + REMEMBERED_FOR);
        self.gossip.messages.push_back(Message { topic, body, expires, seen: Vec::new(), reached: 0 });
        self.mark(node, id);
        let peers = self.node(node).access.peers.keys().copied();
        let peers: Vec<_> = peers.filter(|p| self.mesh(*p, topic).is_some()).collect();
        self.send_on(node, peers, id);
    }

    /// Passes a message on along the mesh of `node`; a node without one gives it to some neighbours that want it.
    pub(super) fn forward(&mut self, node: Slot, not_to: Slot, id: u64) {
        let Some(topic) = self.gossip.message(id).map(|m| m.topic) else { return };
        let mut peers = match self.mesh(node, topic) {
            Some(mesh) if !mesh.is_empty() => mesh.iter().copied().collect(),
            _ => self.outside(node, topic, DEGREE),
        };
        peers.retain(|p| *p != not_to);
        self.send_on(node, peers, id);
    }

    fn send_on(&mut self, node: Slot, peers: Vec<Slot>, id: u64) {
        let offered = &mut self.node_mut(node).gossip.offered;
        if offered.len() >= OFFERED_MAX {
            offered.pop_front();
        }
        offered.push_back((Instant::now() + OFFERED_FOR, id));
        for peer in peers {
            self.send_gossip(node, peer, id, Duration::ZERO);
        }
    }

    /// One hop. A loss is repaired later; a copy that the peer has already is counted, and goes no further.
    fn send_gossip(&mut self, from: Slot, to: Slot, id: u64, later: Duration) {
        let Some(message) = self.gossip.message(id) else { return };
        let (len, known) = (message.body.len(), message.has(to));
        let kind = MessageKind::Gossip;
        self.node_mut(from).counters.sent(kind, len);
        let Some(run) = self.node(to).process.as_ref().map(|p| p.run) else { return };
        if self.is_cut(from, to) {
            return self.observe(from, to, kind, len, Fate::Cut);
        }
        if known {
            self.node_mut(to).counters.received(kind, len);
            return self.observe(from, to, kind, len, Fate::Delivered);
        }
        let copies = if self.duplicates(from, to) { 2 } else { 1 };
        for _ in 0..copies {
            let at = match self.passage(from, to, len, Delivery::Datagram) {
                Ok(at) => at,
                Err(Fate::Lost) => Instant::now() + self.latency(from, to) + self.config.gossip_repair,
                Err(fate) => {
                    self.observe(from, to, kind, len, fate);
                    continue;
                }
            };
            self.queue.push(at + later, Task::Gossip { from, to, run, id });
        }
    }

    /// A message arrives; returns it when it is news.
    pub(super) fn take_gossip(&mut self, from: Slot, to: Slot, run: u64, id: u64) -> Option<(Topic, Bytes)> {
        let message = self.gossip.message(id)?;
        let (len, topic, body) = (message.body.len(), message.topic, message.body.clone());
        if !self.arrives(from, to, Some(run), MessageKind::Gossip, len) || self.mesh(to, topic).is_none() {
            return None;
        }
        self.mark(to, id).then(|| (self.gossip.topics[topic as usize].clone(), body))
    }
}
