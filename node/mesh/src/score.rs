//! What peers' misbehaviour costs them.
//!
//! Each offence adds points, which wear off by one a second. gossipsub gets them as its application score; at
//! [`BAN_POINTS`] the peer is cut off for a while.

use starling_protocol::NodeId;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Points that get a peer banned: 20 malformed calls or 10 wrong gossip messages at once.
pub(crate) const BAN_POINTS: f64 = 100.0;
/// How long a ban lasts.
pub(crate) const BAN: Duration = Duration::from_secs(600);
/// What one gossip message that the node's logic rejects costs who passed it on.
pub(crate) const GOSSIP_POINTS: f64 = 10.0;
const DECAY_PER_SECOND: f64 = 1.0;

/// Points of all peers that have some, and the bans.
#[derive(Debug, Default)]
pub(crate) struct Scores {
    points: BTreeMap<NodeId, (f64, Instant)>,
    bans: BTreeMap<NodeId, Instant>,
}

impl Scores {
    /// The points of a peer; 0 is good.
    pub(crate) fn points(&self, node: NodeId, now: Instant) -> f64 {
        self.points.get(&node).map_or(0.0, |(points, at)| worn(*points, *at, now))
    }

    /// Adds points; `true` when that gets the peer banned.
    pub(crate) fn add(&mut self, node: NodeId, points: f64, now: Instant) -> bool {
        let total = self.points(node, now) + points;
        self.points.insert(node, (total, now));
        let banned = total >= BAN_POINTS && !self.bans.contains_key(&node);
        if banned {
            self.bans.insert(node, now + BAN);
        }
        banned
    }

    /// Forgets what has worn off; returns the peers with points, and those whose ban is over.
    pub(crate) fn sweep(&mut self, now: Instant) -> (Vec<(NodeId, f64)>, Vec<NodeId>) {
        let scored: Vec<_> = self.points.iter().map(|(n, (p, at))| (*n, worn(*p, *at, now))).collect();
        self.points.retain(|_, (p, at)| worn(*p, *at, now) > 0.0);
        let over: Vec<_> = self.bans.iter().filter(|(_, end)| **end <= now).map(|(n, _)| *n).collect();
        for node in &over {
            self.bans.remove(node);
            self.points.remove(node);
        }
        (scored, over)
    }

    pub(crate) fn is_banned(&self, node: NodeId) -> bool {
        self.bans.contains_key(&node)
    }
}

fn worn(points: f64, at: Instant, now: Instant) -> f64 {
    (points - now.saturating_duration_since(at).as_secs_f64() * DECAY_PER_SECOND).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_wear_off_and_enough_of_them_ban_for_a_while() {
        let (mut scores, node, start) = (Scores::default(), NodeId([1; 32]), Instant::now());
        let at = |s| start + Duration::from_secs(s);
        assert!(!scores.add(node, 60.0, at(0)));
        assert!((scores.points(node, at(20)) - 40.0).abs() < 1e-6);
        assert!(!scores.add(node, 50.0, at(20)), "90");
        assert!(scores.add(node, 10.0, at(20)));
        assert!(!scores.add(node, 10.0, at(20)), "banned already");
        assert!(scores.is_banned(node));
        assert!(scores.sweep(at(100)).1.is_empty());
        assert_eq!(scores.sweep(at(700)).1, [node]);
        assert!(!scores.is_banned(node));
        assert!(scores.points(node, at(700)) < 1e-6);
    }
}
