//! SWIM without its wires: claims in; claims, events and targets out. Time is an argument, chance a seed.
//!
//! Das, Gupta, Motivala, "SWIM: Scalable Weakly-consistent Infection-style Process Group Membership Protocol",
//! DSN 2002, with Lifeguard's changes (see `health`).

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use starling_protocol::{NodeId, Timestamp};
use tokio::time::Instant;

use super::MemberEvent;
use super::directory::Directory;
use super::health::{Health, Suspicion};
use super::state::Version;
use super::table::{Row, Table};
use super::wire::News;

/// A claim with an incarnation further ahead of this node's clock than this is ignored: else one false claim could
/// bar a node for good.
const AHEAD_MAX: Duration = Duration::from_secs(24 * 3600);
/// Nodes to be probed out of turn because a table differs; the rest comes up when tables are compared again.
const DOUBTED_MAX: usize = 64;
/// Joins answered with the whole table: at 10,000 nodes 20 a second are 10 MB/s.
const JOINS_PER_S: f64 = 20.0;
const JOINS_BURST: f64 = 50.0;

/// The members as this node sees them.
#[derive(Debug)]
pub(super) struct Swim {
    node: NodeId,
    started: (Timestamp, Instant),
    suspicion: Duration,
    pub(super) table: Table,
    pub(super) health: Health,
    rng: ChaCha8Rng,
    /// Rows that are news, the newest first; those with tellings left.
    queue: VecDeque<u32>,
    /// By place; never walked through, so that their order does not matter.
    suspicions: HashMap<u32, Suspicion>,
    /// When each of these is to be looked at, in milliseconds since the start: at or before its deadline.
    deadlines: BinaryHeap<Reverse<(u64, u32)>>,
    /// Live members in the order of probing, and some that died meanwhile.
    order: Vec<u32>,
    next: usize,
    doubted: VecDeque<NodeId>,
    joins: (f64, Instant),
    events: Vec<MemberEvent>,
    leaving: bool,
}

impl Swim {
    /// `directory` is one that other nodes of this process use too, or else it gets its own.
    pub(super) fn new(
        node: NodeId,
        now: Timestamp,
        suspicion: Duration,
        seed: u64,
        directory: Option<Arc<Directory>>,
    ) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let version = Version::alive(now.0.max(1));
        let key = rng.random();
        let directory = directory.unwrap_or_else(|| Arc::new(Directory::new(key)));
        Self {
            node,
            started: (now, Instant::now()),
            suspicion,
            table: Table::of(node, version, directory),
            health: Health::default(),
            rng,
            queue: VecDeque::new(),
            suspicions: HashMap::new(),
            deadlines: BinaryHeap::new(),
            order: Vec::new(),
            next: 0,
            doubted: VecDeque::new(),
            joins: (JOINS_BURST, Instant::now()),
            events: Vec::new(),
            leaving: false,
        }
    }

    pub(super) fn incarnation(&self) -> u64 {
        self.table.get(self.node).map_or(0, |r| r.version.incarnation())
    }
    pub(super) fn rng(&mut self) -> &mut ChaCha8Rng {
        &mut self.rng
    }
    pub(super) fn now_s(&self, now: Instant) -> u32 {
        u32::try_from(now.duration_since(self.started.1).as_secs()).unwrap_or(u32::MAX)
    }
    fn now_ms(&self, now: Instant) -> u64 {
        u64::try_from(now.duration_since(self.started.1).as_millis()).unwrap_or(u64::MAX)
    }
    /// Comings and goings since the last time.
    pub(super) fn drain_events(&mut self) -> Vec<MemberEvent> {
        std::mem::take(&mut self.events)
    }
    pub(super) fn has_news(&self) -> bool {
        !self.queue.is_empty()
    }
    /// How often a change is told: ln n spreads it to all but about e⁻³ of a node, comparing tables does the rest.
    fn tellings(&self) -> u8 {
        let n = self.table.live() as f64 + 1.0;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "ln of at most 32,769 is 11")]
        let ln = n.ln().ceil() as u8;
        ln + 3
    }
    fn tell(&mut self, at: usize) {
        let times = self.tellings();
        if std::mem::replace(self.table.row_mut_tellings(at), times) == 0 {
            self.queue.push_front(place(at));
        }
    }

    /// News for `peer`: first what is said against itself, so that it may object at once; then at most `limit`
    /// changes, the newest first.
    pub(super) fn news_for(&mut self, peer: NodeId, limit: usize) -> News {
        let mut told = Vec::with_capacity(limit.min(self.queue.len()) + 1);
        if let Some(at) = self.table.find(peer) {
            let version = self.table.row(at).version;
            if version != version.settled() || !version.lives() {
                told.push(place(at));
            }
        }
        for _ in 0..self.queue.len().min(limit) {
            let Some(slot) = self.queue.pop_front() else { break };
            if self.table.present(slot as usize).is_none() {
                continue; // replaced in a full table
            }
            let tellings = self.table.row_mut_tellings(slot as usize);
            *tellings = tellings.saturating_sub(1);
            if *tellings > 0 {
                self.queue.push_back(slot);
            }
            told.push(slot);
        }
        self.claims(&told)
    }

    /// What this node says of the nodes at these places.
    fn claims(&self, told: &[u32]) -> News {
        let mut news = News { incarnation: self.incarnation(), ..News::default() };
        let places = self.table.places();
        for (i, slot) in told.iter().enumerate() {
            let version = self.table.row(*slot as usize).version;
            news.claims.push(places.node(*slot as usize), version);
            if version.is_suspect()
                && let Some(suspicion) = self.suspicions.get(slot)
            {
                suspicion.accusers().iter().for_each(|a| news.accusers.push(i, places.node(*a as usize)));
            }
        }
        news
    }

    /// Takes news from a node, which lives then.
    pub(super) fn hear(&mut self, now: Instant, from: NodeId, news: &News) {
        self.hear_alive(now, from, news.incarnation);
        let found = self.table.find_claimed(&news.claims);
        // Accusers come in the order of their suspects; what is out of order has no weight.
        let mut accusers = news.accusers.iter().peekable();
        for (i, ((node, version), at)) in news.claims.iter().zip(found).enumerate() {
            let mut accused = false;
            while let Some((_, accuser)) = accusers.next_if(|(claim, _)| *claim == i) {
                if version.is_suspect() {
                    self.apply(now, (node, at), version, accuser, false);
                    accused = true;
                }
            }
            if !accused {
                self.apply(now, (node, at), version, from, false);
            }
        }
    }

    /// A node spoke, so it lives.
    pub(super) fn hear_alive(&mut self, now: Instant, node: NodeId, incarnation: u64) {
        self.apply(now, (node, None), Version::alive(incarnation), node, false);
    }

    /// Takes a row of another's table. It may be old: that a node died is a reason to ask it, not to believe it.
    /// Otherwise both sides of a healed partition would take each other's word that they are all dead.
    pub(super) fn hear_row(&mut self, now: Instant, node: NodeId, version: Version) {
        self.apply(now, (node, None), version.settled(), node, true);
    }

    /// Takes a claim about a node. Where it was found before stands beside it.
    fn apply(
        &mut self,
        now: Instant,
        (node, found): (NodeId, Option<usize>),
        version: Version,
        accuser: NodeId,
        second_hand: bool,
    ) {
        let latest = (self.started.0 + now.duration_since(self.started.1) + AHEAD_MAX).0;
        if version.incarnation() > latest {
            tracing::debug!(node = %node.short(), incarnation = version.incarnation(), latest, "claim from the future");
            return;
        }
        if node == self.node {
            return self.defend(now, version);
        }
        let Some(at) = found.or_else(|| self.table.find(node)) else {
            return self.meet(now, node, version, accuser, second_hand);
        };
        let known = self.table.row(at).version;
        if version < known {
            return;
        }
        if version == known {
            // Others know it too, so it needs fewer tellings (feedback, Demers et al., PODC 1987, §1.4).
            let tellings = self.table.row_mut_tellings(at);
            *tellings = (*tellings).min(tellings.saturating_sub(1).max(1));
            if version.is_suspect() && !self.table.row(at).convicted {
                self.confirm(now, at, accuser);
            }
            return;
        }
        if second_hand && known.lives() && !version.lives() && !version.has_left() {
            if self.doubted.len() < DOUBTED_MAX && !self.doubted.contains(&node) {
                self.doubted.push_back(node);
            }
            return;
        }
        self.turn(now, at, version, accuser);
        if !second_hand {
            self.tell(at);
        }
    }

    /// Another accuser of a suspect.
    fn confirm(&mut self, now: Instant, at: usize, accuser: NodeId) {
        let (now_ms, accuser) = (self.now_ms(now), self.table.find(accuser).map(place));
        let (Some(suspicion), Some(accuser)) = (self.suspicions.get_mut(&place(at)), accuser) else { return };
        if !suspicion.confirm(accuser) {
            return;
        }
        if suspicion.earliest_ms() <= now_ms {
            self.deadlines.push(Reverse((suspicion.deadline_ms, place(at)))); // it was looked at, and put off for longer
        }
        let convicted = suspicion.is_convicted();
        self.table.set_convicted(at, convicted);
        self.tell(at);
    }

    /// A node that was not known.
    fn meet(&mut self, now: Instant, node: NodeId, version: Version, accuser: NodeId, second_hand: bool) {
        let now_s = self.now_s(now);
        let Some(at) = self.table.insert(node, version.settled(), now_s) else {
            tracing::debug!(node = %node.short(), "not taken into the full table of members");
            return;
        };
        if version.lives() {
            self.welcome(at);
        }
        if version.is_suspect() {
            self.turn(now, at, version, accuser);
        }
        if !second_hand {
            self.tell(at);
        }
    }

    fn welcome(&mut self, at: usize) {
        self.events.push(MemberEvent::Joined(self.table.node(at)));
        if self.table.set_ordered(at, true) {
            return;
        }
        // At a random place, so that not all probe a new node at the same time.
        self.order.push(place(at));
        let last = self.order.len() - 1;
        let other = self.rng.random_range(0..=last);
        self.order.swap(last, other);
    }

    /// Moves a row to a later version.
    fn turn(&mut self, now: Instant, at: usize, version: Version, accuser: NodeId) {
        let (known, now_s) = (self.table.row(at).version, self.now_s(now));
        self.table.set_version(at, version, now_s);
        if version.is_suspect() {
            let accuser = self.table.find(accuser).map(place);
            let suspicion = Suspicion::new(self.now_ms(now), self.suspicion, self.table.live(), accuser);
            self.deadlines.push(Reverse((suspicion.earliest_ms(), place(at))));
            self.table.set_convicted(at, suspicion.is_convicted());
            self.suspicions.insert(place(at), suspicion);
        } else if known.is_suspect() {
            self.suspicions.remove(&place(at));
        }
        match (known.lives(), version.lives()) {
            (false, true) => self.welcome(at),
            (true, false) => self.events.push(MemberEvent::Left(self.table.node(at))),
            _ => {}
        }
    }

    /// Something is said about this node. What is worse than the truth is outbid.
    fn defend(&mut self, now: Instant, version: Version) {
        let Some(at) = self.table.find(self.node) else { return };
        let own = self.table.row(at).version;
        if version <= own || self.leaving {
            return;
        }
        if version.lives() {
            tracing::debug!(incarnation = version.incarnation(), "suspected by mistake");
        } else {
            tracing::warn!(incarnation = version.incarnation(), "declared dead by mistake, rejoining");
        }
        if version != version.settled() {
            self.health.worse(1); // others found this node slow
        }
        let now_s = self.now_s(now);
        self.table.set_version(at, Version::alive(version.incarnation() + 1), now_s);
        self.tell(at);
    }

    /// When a suspicion is to be looked at next.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let Reverse((at_ms, _)) = self.deadlines.peek()?;
        Some(self.started.1 + Duration::from_millis(*at_ms))
    }

    /// Suspects that did not object in time are dead.
    pub(super) fn expire(&mut self, now: Instant) {
        let now_ms = self.now_ms(now);
        while let Some(Reverse((at_ms, slot))) = self.deadlines.peek().copied() {
            if at_ms > now_ms {
                return;
            }
            self.deadlines.pop();
            // A suspicion that is over, or younger than this entry, has its own.
            let Some(suspicion) = self.suspicions.get(&slot).filter(|s| s.earliest_ms() <= at_ms) else { continue };
            if suspicion.deadline_ms > now_ms {
                self.deadlines.push(Reverse((suspicion.deadline_ms, slot)));
                continue;
            }
            let version = self.table.row(slot as usize).version.dead();
            self.turn(now, slot as usize, version, self.node);
            self.tell(slot as usize);
        }
    }

    /// Whom to probe: one that is doubted, or the next in the order, which is drawn anew after each round.
    pub(super) fn next_target(&mut self) -> Option<(NodeId, Version)> {
        while let Some(node) = self.doubted.pop_front() {
            if let Some(row) = self.table.get(node).filter(|r| r.version.lives()) {
                return Some((node, row.version));
            }
        }
        while !self.order.is_empty() {
            if self.next >= self.order.len() {
                self.next = 0;
                for i in (1..self.order.len()).rev() {
                    let other = self.rng.random_range(0..=i);
                    self.order.swap(i, other);
                }
            }
            let at = self.order[self.next] as usize;
            let lives = self.table.present(at).filter(|r| r.version.lives()).map(|r| (self.table.node(at), r.version));
            if let Some(target) = lives.filter(|(node, _)| *node != self.node) {
                self.next += 1;
                return Some(target);
            }
            self.table.set_ordered(at, false);
            self.order.swap_remove(self.next);
        }
        None
    }
    pub(super) fn has_doubts(&self) -> bool {
        !self.doubted.is_empty()
    }

    /// Up to `want` different live members other than `except`, drawn evenly.
    pub(super) fn some_live(&mut self, want: usize, except: NodeId) -> Vec<NodeId> {
        let mut chosen = Vec::with_capacity(want);
        for _ in 0..(4 * want + 4) {
            if chosen.len() == want || self.order.is_empty() {
                break;
            }
            let at = self.order[self.rng.random_range(0..self.order.len())] as usize;
            if self.table.present(at).is_some_and(|r| r.version.lives()) {
                let node = self.table.node(at);
                if node != except && !chosen.contains(&node) {
                    chosen.push(node);
                }
            }
        }
        chosen
    }

    /// One that was declared dead, and may only have been cut off.
    pub(super) fn some_dead(&mut self) -> Option<NodeId> {
        if self.table.live() == self.table.len() {
            return None;
        }
        let dead = |r: &Row| !r.version.lives() && !r.version.has_left() && r.version.incarnation() > 0;
        self.table.some_row(|rows| self.rng.random_range(0..rows), dead)
    }

    /// A probe of `target`, known in `version` then, is over. `silent_relays` were asked for help and said nothing.
    pub(super) fn probed(
        &mut self,
        now: Instant,
        target: NodeId,
        version: Version,
        answered: bool,
        silent_relays: u32,
    ) {
        if answered {
            return self.health.better();
        }
        self.health.worse(silent_relays);
        let Some(row) = self.table.get(target) else { return };
        if row.version.settled() == version.settled() {
            self.apply(now, (target, None), row.version.max(version.suspect()), self.node, false);
        }
    }

    /// Whether one more node may have the whole table now.
    pub(super) fn admits_join(&mut self, now: Instant) -> bool {
        let refill = now.duration_since(self.joins.1).as_secs_f64() * JOINS_PER_S;
        self.joins = ((self.joins.0 + refill).min(JOINS_BURST), now);
        let admits = self.joins.0 >= 1.0;
        if admits {
            self.joins.0 -= 1.0;
        }
        admits
    }

    /// This node says goodbye: from now on it tells that it left.
    pub(super) fn leave(&mut self, now: Instant) {
        self.leaving = true;
        if let Some(at) = self.table.find(self.node) {
            let (version, now_s) = (self.table.row(at).version.left(), self.now_s(now));
            self.table.set_version(at, version, now_s);
            self.tell(at);
        }
    }
}

fn place(at: usize) -> u32 {
    u32::try_from(at).unwrap_or(u32::MAX) // below `ROWS_MAX`
}
