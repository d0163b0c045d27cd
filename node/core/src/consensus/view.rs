//! Who leads a group, as far as this node can know.

use std::time::Duration;

use starling_protocol::{NodeId, Term};
use tokio::time::Instant;

/// Who leads a group. It is knowledge of the past; what it says may have changed by the time it is read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LeaderView {
    /// The leader that this node heard of a short while ago; `None` when it hears none.
    pub leader: Option<NodeId>,
    /// The newest term that this node knows.
    pub term: Term,
    /// Whether this node may act as the leader: it is the leader of `term`, and a quorum answered it within the
    /// election timeout. It becomes false about an election timeout after the quorum was lost, which is before
    /// another leader can have been elected.
    pub is_self: bool,
    /// When a quorum last answered this node as the leader.
    pub quorum_acked_at: Option<Instant>,
    /// Why there is no leader, once that has lasted.
    pub wait: Option<String>,
}

impl LeaderView {
    /// Time since a quorum last answered this node as the leader.
    #[must_use]
    pub fn quorum_age(&self) -> Option<Duration> {
        self.quorum_acked_at.map(|at| at.elapsed())
    }
    /// Whether the two say the same, but for the time of the last answer.
    pub(super) fn says_the_same_as(&self, other: &Self) -> bool {
        let timeless = |v: &Self| Self { quorum_acked_at: None, ..v.clone() };
        timeless(self) == timeless(other)
    }
}
