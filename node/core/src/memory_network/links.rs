//! What a link does to what crosses it: time, loss, duplication, reordering, bandwidth, cuts; and which connections
//! are open.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::{Bound, RangeInclusive};
use std::sync::Arc;
use std::time::Duration;

use rand::RngExt;
use starling_protocol::NodeId;
use tokio::time::Instant;

use super::observe::{Fate, MessageKind};
use super::{Slot, World};

/// Bytes of one packet: what is lost of a long frame is one of these (RFC 9000 §14: at least 1200).
const PACKET_LEN_BYTES: usize = 1200;
/// A frame's packets are sent again at most this often; at 50 % loss one in a thousand frames needs more.
const RETRANSMISSIONS_MAX: u32 = 10;
/// The use of a connection is noted at most this often.
const USE_RESOLUTION: Duration = Duration::from_secs(1);

/// How a link behaves, in one direction.
#[derive(Clone, Debug, PartialEq)]
pub struct LinkProfile {
    /// Time of one hop, drawn evenly. Default 0.5 to 5 ms.
    pub latency: RangeInclusive<Duration>,
    /// Share of calls, each way, that are lost. A lost gossip message comes [`super::MemoryConfig::gossip_repair`]
    /// later; of a stream each packet of 1200 bytes is lost with this share, and sent again a round trip later.
    pub loss: f64,
    /// Share of calls and gossip messages that arrive twice.
    pub duplication: f64,
    /// Share of calls and gossip messages that take [`LinkProfile::reordering_delay`] longer, so that later ones
    /// overtake them.
    pub reordering: f64,
    /// How much longer. Default 20 ms.
    pub reordering_delay: Duration,
    /// Bytes a second; a message takes its length divided by this, after those before it. `None` is no limit.
    pub bandwidth: Option<u64>,
    /// Most bytes that wait for the bandwidth; a call or gossip message beyond is dropped, a stream waits instead.
    /// Default 16 MiB: four of the longest calls.
    pub queue_bytes_max: u64,
}

impl Default for LinkProfile {
    fn default() -> Self {
        Self {
            latency: Duration::from_micros(500)..=Duration::from_millis(5),
            loss: 0.0,
            duplication: 0.0,
            reordering: 0.0,
            reordering_delay: Duration::from_millis(20),
            bandwidth: None,
            queue_bytes_max: 16 << 20,
        }
    }
}

/// Profiles, cuts and queues.
#[derive(Debug, Default)]
pub(super) struct Links {
    base: Arc<LinkProfile>,
    pairs: HashMap<(Slot, Slot), Arc<LinkProfile>>,
    /// (from, to): nothing passes.
    cuts: HashSet<(Slot, Slot)>,
    /// (from, to): something passes although the two are in different cells.
    bridges: HashSet<(Slot, Slot)>,
    /// Partitions that last: on which side of each a node is. Nodes of side 0 hear everyone.
    partitions: BTreeMap<u64, Vec<u16>>,
    partitioned: u64,
    /// Until when a pair's line is busy.
    busy: HashMap<(Slot, Slot), Instant>,
    cells: u32,
}

/// When something was, and which of what was then.
type Stamp = (Instant, u64);

/// When a connection was last used.
#[derive(Clone, Copy, Debug)]
pub(super) struct Use {
    last: Stamp,
    /// What [`Access::by_use`] has it under.
    noted: Stamp,
}

/// A node's side of its links.
#[derive(Debug, Default)]
pub(super) struct Access {
    profile: Option<Arc<LinkProfile>>,
    busy_up: Option<Instant>,
    busy_down: Option<Instant>,
    /// Partitions refine cells; nodes of different cells do not hear each other.
    cell: u32,
    /// Connections, with when each was last used.
    pub(super) peers: BTreeMap<Slot, Use>,
    /// The same by use, as of when this was last asked: since then a connection may have been used again.
    by_use: BTreeMap<Stamp, Slot>,
}

/// What decides the fate of a message besides its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Delivery {
    /// A loss is silence.
    Datagram,
    /// A loss is lateness.
    Reliable,
}

fn chance(world: &mut World, share: f64) -> bool {
    share > 0.0 && world.rng.random_bool(share.clamp(0.0, 1.0))
}

fn micros(d: Duration) -> u64 {
    u64::try_from(d.as_micros()).unwrap_or(u64::MAX)
}

/// Puts `len` bytes behind what `busy` says is under way. Returns when they are through; `None` is a full queue.
fn through(
    busy: &mut Option<Instant>,
    from: Instant,
    len: usize,
    profile: &LinkProfile,
    delivery: Delivery,
) -> Option<Instant> {
    let Some(bandwidth) = profile.bandwidth else { return Some(from) };
    let rate = bandwidth.max(1);
    let start = busy.map_or(from, |b| b.max(from));
    let len = len as u64;
    let nanos = |bytes: u64| u128::from(bytes) * 1_000_000_000 / u128::from(rate);
    let waiting = start.duration_since(from).as_nanos();
    if delivery == Delivery::Datagram && waiting + nanos(len) > nanos(profile.queue_bytes_max) {
        return None;
    }
    let took = Duration::from_nanos(u64::try_from(nanos(len)).unwrap_or(u64::MAX));
    *busy = start.checked_add(took);
    *busy
}

impl World {
    pub(super) fn set_default_profile(&mut self, profile: LinkProfile) {
        self.links.base = Arc::new(profile);
    }
    pub(super) fn set_pair_profile(&mut self, from: Slot, to: Slot, profile: LinkProfile) {
        self.links.pairs.insert((from, to), Arc::new(profile));
    }
    pub(super) fn set_access_profile(&mut self, node: Slot, profile: LinkProfile) {
        self.node_mut(node).access.profile = Some(Arc::new(profile));
    }

    /// The profiles that a message from `from` to `to` passes: the pair's, or those of both ends, or the default.
    fn profiles(&self, from: Slot, to: Slot) -> (Arc<LinkProfile>, Option<Arc<LinkProfile>>) {
        if let Some(pair) = self.links.pairs.get(&(from, to)) {
            return (pair.clone(), None);
        }
        match (&self.node(from).access.profile, &self.node(to).access.profile) {
            (None, None) => (self.links.base.clone(), None),
            (Some(one), None) | (None, Some(one)) => (one.clone(), None),
            (Some(up), Some(down)) => (up.clone(), Some(down.clone())),
        }
    }

    fn draw_latency(&mut self, profile: &LinkProfile) -> Duration {
        let (low, high) = (micros(*profile.latency.start()), micros(*profile.latency.end()));
        Duration::from_micros(if low < high { self.rng.random_range(low..=high) } else { low })
    }

    /// Time of one hop without losses and queues.
    pub(super) fn latency(&mut self, from: Slot, to: Slot) -> Duration {
        let (first, second) = self.profiles(from, to);
        let one = self.draw_latency(&first);
        second.map_or(one, |p| one.max(self.draw_latency(&p)))
    }

    /// Whether what was sent arrives twice.
    pub(super) fn duplicates(&mut self, from: Slot, to: Slot) -> bool {
        let (first, second) = self.profiles(from, to);
        chance(self, first.duplication) || second.is_some_and(|p| chance(self, p.duplication))
    }

    /// When `len` bytes that leave now arrive.
    pub(super) fn passage(&mut self, from: Slot, to: Slot, len: usize, delivery: Delivery) -> Result<Instant, Fate> {
        let (first, second) = self.profiles(from, to);
        let mut at = self.occupy(from, to, len, &first, second.as_deref(), delivery)?;
        let packets = i32::try_from(len.div_ceil(PACKET_LEN_BYTES).max(1)).unwrap_or(i32::MAX);
        let mut delay = Duration::ZERO;
        for profile in std::iter::once(&first).chain(second.as_ref()) {
            let latency = self.draw_latency(profile);
            let mut extra = Duration::ZERO;
            match delivery {
                Delivery::Datagram => {
                    if chance(self, profile.loss) {
                        return Err(Fate::Lost);
                    }
                    if chance(self, profile.reordering) {
                        extra = profile.reordering_delay;
                    }
                }
                Delivery::Reliable => {
                    let mut share = 1.0 - (1.0 - profile.loss.clamp(0.0, 1.0)).powi(packets);
                    for _ in 0..RETRANSMISSIONS_MAX {
                        if !chance(self, share) {
                            break;
                        }
                        // A round trip until the sender knows.
                        extra += self.draw_latency(profile) + self.draw_latency(profile);
                        share = profile.loss;
                    }
                }
            }
            delay = delay.max(latency + extra);
        }
        at += delay;
        Ok(at)
    }

    /// Takes the message's share of the bandwidth. A node's own profile is that of its access line, which all its
    /// messages share; the default's and a pair's are of a line that the two have to themselves.
    fn occupy(
        &mut self,
        from: Slot,
        to: Slot,
        len: usize,
        first: &LinkProfile,
        second: Option<&LinkProfile>,
        delivery: Delivery,
    ) -> Result<Instant, Fate> {
        let now = Instant::now();
        if first.bandwidth.is_none() && second.is_none_or(|p| p.bandwidth.is_none()) {
            return Ok(now);
        }
        let own = !self.links.pairs.contains_key(&(from, to));
        let up = self.node(from).access.profile.clone().filter(|_| own);
        let down = self.node(to).access.profile.clone().filter(|_| own);
        let mut at = Some(now);
        if up.is_none() && down.is_none() {
            let mut busy = self.links.busy.get(&(from, to)).copied();
            at = through(&mut busy, now, len, first, delivery);
            if let Some(busy) = busy {
                self.links.busy.insert((from, to), busy);
            }
        }
        if let Some(profile) = up {
            at = through(&mut self.node_mut(from).access.busy_up, now, len, &profile, delivery);
        }
        if let (Some(profile), Some(sent)) = (down, at) {
            at = through(&mut self.node_mut(to).access.busy_down, sent, len, &profile, delivery);
        }
        at.ok_or(Fate::QueueFull)
    }

    /// Sends `len` bytes: counts them, and says when they arrive. What does not arrive is told to the observer.
    pub(super) fn send(
        &mut self,
        from: Slot,
        to: Slot,
        kind: MessageKind,
        len: usize,
        delivery: Delivery,
    ) -> Option<Instant> {
        self.node_mut(from).counters.sent(kind, len);
        let passage = if self.is_cut(from, to) { Err(Fate::Cut) } else { self.passage(from, to, len, delivery) };
        match passage {
            Ok(at) => Some(at),
            Err(fate) => {
                self.observe(from, to, kind, len, fate);
                None
            }
        }
    }

    pub(super) fn is_cut(&self, from: Slot, to: Slot) -> bool {
        let apart = self.node(from).access.cell != self.node(to).access.cell;
        (apart && !self.links.bridges.contains(&(from, to)))
            || (!self.links.cuts.is_empty() && self.links.cuts.contains(&(from, to)))
            || self.links.partitions.values().any(|sides| {
                let side = |node: Slot| sides.get(node as usize).copied().unwrap_or_default();
                let (a, b) = (side(from), side(to));
                a != b && a != 0 && b != 0
            })
    }
    /// Begins a partition. Returns its number.
    pub(super) fn begin_partition(&mut self) -> u64 {
        self.links.partitioned += 1;
        self.links.partitions.insert(self.links.partitioned, Vec::new());
        self.links.partitioned
    }
    /// Puts a node on a side of a partition that lasts.
    pub(super) fn put_on_side(&mut self, partition: u64, node: Slot, side: u16) {
        let Some(sides) = self.links.partitions.get_mut(&partition) else { return };
        if sides.len() <= node as usize {
            sides.resize(node as usize + 1, 0);
        }
        sides[node as usize] = side;
    }
    pub(super) fn end_partition(&mut self, partition: u64) {
        self.links.partitions.remove(&partition);
    }
    pub(super) fn cut(&mut self, from: Slot, to: Slot) {
        self.links.cuts.insert((from, to));
        self.links.bridges.remove(&(from, to));
    }
    pub(super) fn heal(&mut self, from: Slot, to: Slot) {
        self.links.cuts.remove(&(from, to));
        if self.node(from).access.cell != self.node(to).access.cell {
            self.links.bridges.insert((from, to));
        }
    }
    /// Cuts the nodes of `side` off from all others that exist now.
    pub(super) fn split(&mut self, side: &[Slot]) {
        let inside: HashSet<_> = side.iter().copied().collect();
        self.links.bridges.retain(|(a, b)| inside.contains(a) == inside.contains(b));
        let mut renamed = HashMap::new();
        for &node in side {
            let cell = self.node(node).access.cell;
            let cells = &mut self.links.cells;
            let new = *renamed.entry(cell).or_insert_with(|| {
                *cells += 1;
                *cells
            });
            self.node_mut(node).access.cell = new;
        }
    }
    pub(super) fn heal_all(&mut self) {
        self.links.cuts.clear();
        self.links.bridges.clear();
        self.links.partitions.clear();
        self.nodes.iter_mut().for_each(|n| n.access.cell = 0);
    }

    pub(super) fn is_connected(&self, a: Slot, b: Slot) -> bool {
        self.node(a).access.peers.contains_key(&b)
    }

    /// Notes that the connection between `a` and `b` is used, at both ends.
    pub(super) fn touch(&mut self, a: Slot, b: Slot) {
        let now = Instant::now();
        for (node, peer) in [(a, b), (b, a)] {
            self.uses += 1;
            let stamp = (now, self.uses);
            let access = &mut self.node_mut(node).access;
            let Some(used) = access.peers.get_mut(&peer) else { continue };
            if now.duration_since(used.last.0) >= USE_RESOLUTION {
                used.last = stamp;
            }
        }
    }

    /// Opens a connection. Returns those that had to be closed for it, because an end had too many.
    pub(super) fn open(&mut self, a: Slot, b: Slot) -> Vec<(Slot, Slot)> {
        let mut victims = Vec::new();
        for (node, peer) in [(a, b), (b, a)] {
            self.uses += 1;
            let stamp = (Instant::now(), self.uses);
            let access = &mut self.node_mut(node).access;
            access.peers.insert(peer, Use { last: stamp, noted: stamp });
            access.by_use.insert(stamp, peer);
        }
        for node in [a, b] {
            while self.node(node).access.peers.len() > self.config.connections_max.max(1) {
                let Some(victim) = self.least_used(node, a, b) else { break };
                self.remove_link(node, victim);
                victims.push((node, victim));
            }
        }
        victims
    }

    /// The least recently used connection of `node` that carries no gossip mesh, or else the very least.
    fn least_used(&mut self, node: Slot, a: Slot, b: Slot) -> Option<Slot> {
        let mut after = None;
        let mut least = None;
        loop {
            let access = &mut self.node_mut(node).access;
            let from = after.map_or(Bound::Unbounded, Bound::Excluded);
            let Some((&noted, &peer)) = access.by_use.range((from, Bound::Unbounded)).next() else { return least };
            if let Some(used) = access.peers.get_mut(&peer).filter(|u| u.last != noted) {
                // Its place is further on.
                used.noted = used.last;
                access.by_use.remove(&noted);
                access.by_use.insert(used.noted, peer);
                continue;
            }
            after = Some(noted);
            if peer == a || peer == b {
                continue;
            }
            if !self.shares_mesh(node, peer) {
                return Some(peer);
            }
            least = least.or(Some(peer));
        }
    }

    /// Removes a connection from both ends; false when there was none.
    pub(super) fn remove_link(&mut self, a: Slot, b: Slot) -> bool {
        let mut was_open = false;
        for (node, peer) in [(a, b), (b, a)] {
            let access = &mut self.node_mut(node).access;
            if let Some(used) = access.peers.remove(&peer) {
                access.by_use.remove(&used.noted);
                was_open = true;
            }
        }
        if was_open {
            self.leave_meshes(a, b);
        }
        was_open
    }

    /// Connections over links of which one direction is cut.
    pub(super) fn cut_links(&self) -> Vec<(Slot, Slot)> {
        let all = (0..).zip(&self.nodes).flat_map(|(a, n)| n.access.peers.keys().map(move |b| (a, *b)));
        all.filter(|(a, b)| a < b && (self.is_cut(*a, *b) || self.is_cut(*b, *a))).collect()
    }

    /// Connected nodes, ascending by id.
    pub(super) fn neighbours(&self, node: Slot) -> Vec<NodeId> {
        let mut ids: Vec<_> = self.node(node).access.peers.keys().map(|p| self.node(*p).id).collect();
        ids.sort_unstable();
        ids
    }
}
