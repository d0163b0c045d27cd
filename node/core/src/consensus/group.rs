//! One group on this node.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use openraft::RaftMetrics;
use starling_protocol::control::ModelState;
use starling_protocol::{Lineage, ModelName, NodeId};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::autopilot::Sightings;
use super::disk::Disk;
use super::network::Incoming;
use super::state_machine::StateMachine;
use super::succession::Reigns;
use super::type_config::TypeConfig;
use super::view::LeaderView;
use crate::watch::Sender;

pub(super) type Raft = openraft::Raft<TypeConfig, StateMachine>;

/// One run of a group on this node. A group that stopped because of its disk, or that changed its line, is followed by another run, with the same
/// feeds.
pub(super) struct Group {
    pub(super) raft: Raft,
    pub(super) disk: Disk,
    /// The line that this run is in.
    pub(super) lineage: Lineage,
    pub(super) incoming: Incoming,
    /// When a leader was last heard.
    pub(super) heard: Mutex<Option<Instant>>,
    /// A leader that is heard and has no quorum, as its survey said, and when it said so last.
    pub(super) powerless: Mutex<Option<(NodeId, Instant)>>,
    /// Since when none is heard.
    pub(super) leaderless_since: Mutex<Instant>,
    /// What is to become of a group without a quorum, as last looked into.
    pub(super) outlook: Mutex<Option<String>>,
    /// Who called this node into the group last.
    pub(super) inviter: Mutex<Option<NodeId>>,
    /// Why this node must not lead, if it must not.
    pub(super) unfit: Mutex<Option<String>>,
    /// Whether openraft was told that this node stands for election.
    pub(super) stands: AtomicBool,
    /// Who led, and for how long.
    pub(super) reigns: Mutex<Reigns>,
    /// Who has been there, and since when, while this node leads.
    pub(super) sightings: Mutex<Sightings>,
    /// Ends what watches over this run of the group.
    pub(super) closed: CancellationToken,
    pub(super) model: ModelName,
    pub(super) leadership: Sender<LeaderView>,
    pub(super) state: Sender<Arc<ModelState>>,
}

impl Group {
    /// Whether no log has come yet.
    pub(super) fn is_empty(&self) -> bool {
        self.metrics().membership_config.membership().nodes().next().is_none()
    }

    pub(super) fn metrics(&self) -> RaftMetrics<TypeConfig> {
        self.raft.metrics().get()
    }

    pub(super) fn publish(&self, view: LeaderView) {
        self.leadership.modify(|old| {
            let changed = !view.says_the_same_as(old);
            match (&old.wait, &view.wait) {
                (None, Some(wait)) => tracing::warn!(model = %self.model, %wait, "the group waits"),
                (Some(_), None) => tracing::info!(model = %self.model, leader = ?view.leader, "the group goes on"),
                (Some(_), Some(_)) | (None, None) => {}
            }
            if view.is_self != old.is_self {
                tracing::info!(model = %self.model, term = view.term.0, leads = view.is_self, "leadership of this node");
            }
            *old = view;
            changed
        });
    }
}
