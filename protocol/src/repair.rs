//! Who puts back a missing copy: each holder decides alone, from who lives and who has what, and they agree.
//!
//! Each holder looks at what it has. For every id it asks the nodes of the id's *window*, the first few in
//! rendezvous order, whether they have it too. The first of those that have it sends it to the first ones that do
//! not, until `replication` nodes have it. If no node of the window has it, the asker itself does.
//!
//! Two nodes with different views of who lives may both send; a put is idempotent, so that costs bytes, nothing else.

use crate::ids::{Hash, NodeId};
use crate::placement;
use crate::time::Timestamp;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Nodes beyond the first `replication` ones that are asked whether they have a copy. A copy may lie further down the
/// order when a node before it was full or unreachable; two more places find all but a few of these, and missing one
/// costs one surplus copy.
pub const WINDOW_SPARE: usize = 2;

/// Who may hold things, as one node sees it now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holders {
    /// Live nodes that take copies.
    pub open: BTreeSet<NodeId>,
    /// Live nodes whose store is full: their copies count, nothing is sent to them.
    pub full: BTreeSet<NodeId>,
    /// Nodes that went away less than the grace time ago: those in a window count as if they had a copy, since most
    /// that go come back, and with what they had.
    pub away: BTreeSet<NodeId>,
}

impl Holders {
    /// The nodes to ask for `id`, best first: those of `open`, `full` and `away` that come first in rendezvous order.
    #[must_use]
    pub fn window(&self, id: Hash, replication: usize) -> Vec<NodeId> {
        let all = self.open.iter().chain(&self.full).chain(&self.away).copied();
        placement::holders(id, all, replication.saturating_add(WINDOW_SPARE))
    }

    /// To whom `local`, which has `id`, must send it. Empty when there are copies enough, when another node is to do
    /// it, or when nobody is left to take it.
    ///
    /// `have` are the nodes of `window` that said they have it. A node that is `leaving` counts as no holder, and
    /// sends whatever is missing itself, since it waits for it.
    #[must_use]
    pub fn targets(
        &self,
        local: NodeId,
        window: &[NodeId],
        have: &BTreeSet<NodeId>,
        replication: usize,
        leaving: bool,
    ) -> Vec<NodeId> {
        let has = |n: &NodeId| (*n == local && !leaving) || have.contains(n);
        let outside = usize::from(!leaving && !window.contains(&local));
        let copies = window.iter().filter(|n| has(n) || self.away.contains(n)).count() + outside;
        let missing = replication.saturating_sub(copies);
        if missing == 0 {
            return Vec::new();
        }
        let responsible = window.iter().find(|n| has(n)).copied();
        if !leaving && responsible.is_some_and(|n| n != local) {
            return Vec::new();
        }
        window.iter().filter(|n| self.open.contains(n) && !has(n)).take(missing).copied().collect()
    }
}

/// Which nodes went away, and when.
#[derive(Clone, Debug, Default)]
pub struct Absences {
    live: BTreeSet<NodeId>,
    gone: BTreeMap<NodeId, Timestamp>,
}

impl Absences {
    /// Takes the holders that live now; tells whether who may hold things changed: one came back or is new, or one
    /// has been gone for `grace`.
    pub fn handle_live(&mut self, now: Timestamp, live: BTreeSet<NodeId>, grace: Duration) -> bool {
        let came = live.iter().any(|n| !self.live.contains(n));
        for node in self.live.difference(&live) {
            self.gone.insert(*node, now);
        }
        self.gone.retain(|n, _| !live.contains(n));
        self.live = live;
        let before = self.gone.len();
        self.gone.retain(|_, since| now.since(*since) < grace);
        came || self.gone.len() < before
    }

    /// Nodes gone for less than the grace time.
    #[must_use]
    pub fn away(&self) -> BTreeSet<NodeId> {
        self.gone.keys().copied().collect()
    }

    /// When the next node has been gone for `grace`.
    #[must_use]
    pub fn poll_timeout(&self, grace: Duration) -> Option<Timestamp> {
        self.gone.values().min().map(|since| *since + grace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn n(i: u8) -> NodeId {
        NodeId([i; 32])
    }
    fn set(ids: &[u8]) -> BTreeSet<NodeId> {
        ids.iter().copied().map(n).collect()
    }
    fn holders(open: &[u8]) -> Holders {
        Holders { open: set(open), ..Holders::default() }
    }

    /// Applies every node's decision on `id` once; returns who has it then and how many sends it took.
    fn round(h: &Holders, has: &BTreeSet<NodeId>, id: Hash, replication: usize) -> (BTreeSet<NodeId>, usize) {
        let window = h.window(id, replication);
        let have = window.iter().filter(|n| has.contains(n) && !h.away.contains(n)).copied().collect();
        let mut after = has.clone();
        let mut sends = 0;
        for node in has.iter().filter(|n| !h.away.contains(n)) {
            let targets = h.targets(*node, &window, &have, replication, false);
            sends += targets.len();
            after.extend(targets);
        }
        (after, sends)
    }

    #[test]
    fn one_round_restores_every_copy_and_exactly_one_node_sends() {
        let h = holders(&[1, 2, 3, 4, 5, 6, 7]);
        for i in 0..500u32 {
            let id = Hash::of(&i.to_le_bytes());
            let first = h.window(id, 2)[usize::try_from(i % 4).unwrap()];
            let (after, sends) = round(&h, &BTreeSet::from([first]), id, 2);
            assert_eq!((after.len(), sends), (2, 1), "id {i}");
            assert_eq!(round(&h, &after, id, 2), (after.clone(), 0), "id {i}: settled");
        }
    }

    #[test]
    fn a_copy_outside_the_window_is_found_and_moved_into_it() {
        let h = holders(&[1, 2, 3, 4, 5, 6, 7]);
        let id = Hash::of(b"x");
        let window = h.window(id, 2);
        let outsider = *h.open.iter().find(|n| !window.contains(n)).unwrap();
        let (after, sends) = round(&h, &BTreeSet::from([outsider]), id, 2);
        assert_eq!(sends, 1);
        assert!(after.contains(&window[0]));
    }

    #[test]
    fn a_node_that_just_left_counts_until_the_grace_time_is_over() {
        let mut h = holders(&[1, 2, 3]);
        let id = Hash::of(b"x");
        let order = h.window(id, 2);
        h.open.remove(&order[1]);
        h.away.insert(order[1]);
        assert_eq!(h.targets(order[0], &h.window(id, 2), &BTreeSet::new(), 2, false), []);
        h.away.clear();
        assert_eq!(h.targets(order[0], &h.window(id, 2), &BTreeSet::new(), 2, false), [order[2]]);
    }

    #[test]
    fn a_full_node_is_not_sent_to_and_its_copy_counts() {
        let mut h = holders(&[1, 2, 3]);
        let id = Hash::of(b"x");
        let order = h.window(id, 2);
        h.open.remove(&order[1]);
        h.full.insert(order[1]);
        let window = h.window(id, 2);
        assert_eq!(h.targets(order[0], &window, &BTreeSet::new(), 2, false), [order[2]]);
        assert_eq!(h.targets(order[0], &window, &BTreeSet::from([order[1]]), 2, false), []);
    }

    #[test]
    fn a_leaving_node_sends_what_the_others_lack_and_counts_for_nothing() {
        let h = holders(&[1, 2, 3]);
        let id = Hash::of(b"x");
        let window = h.window(id, 2);
        assert_eq!(h.targets(n(9), &window, &BTreeSet::new(), 2, true), window[..2]);
        assert_eq!(h.targets(n(9), &window, &BTreeSet::from([window[0]]), 2, true), [window[1]]);
        assert_eq!(h.targets(n(9), &window, &BTreeSet::from([window[0], window[2]]), 2, true), []);
        assert_eq!(holders(&[]).targets(n(9), &[], &BTreeSet::new(), 2, true), []);
    }

    #[test]
    fn absences_tell_of_arrivals_and_of_the_end_of_the_grace_time() {
        let grace = Duration::from_secs(30);
        let mut a = Absences::default();
        assert!(a.handle_live(Timestamp(0), set(&[1, 2]), grace));
        assert!(!a.handle_live(Timestamp(1_000), set(&[1]), grace));
        assert_eq!((a.away(), a.poll_timeout(grace)), (set(&[2]), Some(Timestamp(31_000))));
        assert!(!a.handle_live(Timestamp(30_999), set(&[1]), grace));
        assert!(a.handle_live(Timestamp(31_000), set(&[1]), grace));
        assert_eq!((a.away(), a.poll_timeout(grace)), (set(&[]), None));
        assert!(a.handle_live(Timestamp(40_000), set(&[1, 2]), grace), "it is back");
    }
}
