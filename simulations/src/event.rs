//! What happens in a run, as the checkers and the trace see it.

use serde::Serialize;
use starling_protocol::rollout::Rollout;
use starling_protocol::{EpisodeId, Hash, Lineage, ModelName, PolicyVersion, RolloutId, Term};
use std::time::Duration;

/// A node of the run: its place in [`crate::scenario::Scenario::node_names`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct NodeIx(pub u32);

/// One thing that happened.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "event")]
pub enum Event {
    /// A node's process runs.
    Started {
        /// Which.
        node: NodeIx,
    },
    /// A node's process is gone.
    Crashed {
        /// Which.
        node: NodeIx,
        /// Writes that were not synced are gone too.
        power_loss: bool,
        /// Everything on its disk is.
        disk_lost: bool,
    },
    /// A fault begins or ends.
    Fault {
        /// Its kind.
        kind: &'static str,
        /// Begins rather than ends.
        begins: bool,
        /// Whom it hits, or the sides that it makes.
        groups: Vec<Vec<NodeIx>>,
    },
    /// The safety phase is over and everything is healed.
    Healed,
    /// What a node believes of a model's leadership changed.
    Leads {
        /// Who believes.
        node: NodeIx,
        /// Of which model.
        model: ModelName,
        /// The term.
        term: Term,
        /// The leader, if it knows one.
        leader: Option<NodeIx>,
        /// It believes that it may act as leader itself.
        is_self: bool,
    },
    /// A committed step was applied and persisted on a node.
    Applied {
        /// Where.
        node: NodeIx,
        /// Of which model.
        model: ModelName,
        /// The version that it was trained from.
        parent: PolicyVersion,
        /// Its version.
        version: PolicyVersion,
        /// Its term.
        term: Term,
        /// Term of the log entry that committed it.
        logged: Term,
        /// Hash of the weights.
        weights: Hash,
        /// Nodes that held them when it was proposed.
        holders: Vec<NodeIx>,
        /// Rollouts that it used up.
        consumed: Vec<RolloutId>,
    },
    /// A node's disk says in which line of a model it is.
    Entered {
        /// Which node.
        node: NodeIx,
        /// Of which model.
        model: ModelName,
        /// The line, with those before it.
        lineage: Lineage,
    },
    /// A rollout was written to a node's disk.
    Stored {
        /// Where.
        node: NodeIx,
        /// Which.
        rollout: RolloutId,
    },
    /// A node's disk synced: all that was written to it is durable.
    Synced {
        /// Where.
        node: NodeIx,
    },
    /// A rollout was deleted from a node's disk.
    Deleted {
        /// Where.
        node: NodeIx,
        /// Which.
        rollout: RolloutId,
    },
    /// Bits flipped in a rollout on a node's disk.
    Rotted {
        /// Where.
        node: NodeIx,
        /// Which.
        rollout: RolloutId,
    },
    /// A node's disk says that a rollout is used up.
    MarkedConsumed {
        /// Where.
        node: NodeIx,
        /// Which.
        rollout: RolloutId,
        /// By which version.
        version: PolicyVersion,
    },
    /// A node's disk no longer says so.
    Unmarked {
        /// Where.
        node: NodeIx,
        /// Which.
        rollout: RolloutId,
    },
    /// A client was given an episode.
    Granted {
        /// The client.
        node: NodeIx,
        /// Which.
        episode: EpisodeId,
        /// Of which model.
        model: ModelName,
        /// The leader's term.
        term: Term,
    },
    /// A client no longer has an episode.
    Released {
        /// The client.
        node: NodeIx,
        /// Which.
        episode: EpisodeId,
    },
    /// A client sealed an episode's record; it may come to be stored from now on.
    Sealed {
        /// The client.
        node: NodeIx,
        /// Its address.
        rollout: RolloutId,
        /// Of which model.
        model: ModelName,
        /// The oldest version that sampled a token that trains; `None` if none of its tokens does.
        oldest: Option<PolicyVersion>,
        /// It was forged: no honest node may train on it.
        forged: bool,
    },
    /// A client was told that its episode is safe.
    Acknowledged {
        /// The client.
        node: NodeIx,
        /// Which.
        rollout: RolloutId,
        /// Who holds it, as the client was told.
        holders: Vec<NodeIx>,
        /// How many of them the promise asks for.
        promised: u32,
    },
    /// An engine took weights.
    Served {
        /// Where.
        node: NodeIx,
        /// Of which model.
        model: ModelName,
        /// Their version.
        version: PolicyVersion,
        /// blake3 of the bytes that the engine was given.
        weights: Hash,
    },
    /// A look at a node's queues and books.
    Gauge {
        /// Whose.
        node: NodeIx,
        /// What.
        gauge: Gauge,
        /// How much.
        value: u64,
        /// The bound.
        limit: u64,
    },
    /// A node waits, with or without a reason.
    Waits {
        /// Who.
        node: NodeIx,
        /// For how long nothing has moved.
        since: Duration,
        /// What it says about it.
        reason: Option<String>,
    },
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Gauge {
    /// Episodes running and accepted at a leader, against its quota.
    Quota,
    /// Node records known.
    Records,
    /// Writes that a power failure would undo.
    UnsyncedWrites,
    /// Bytes of the store.
    StoreBytes,
}

impl Event {
    /// The node that it happens to.
    #[must_use]
    pub fn node(&self) -> Option<NodeIx> {
        match self {
            Self::Fault { .. } | Self::Healed => None,
            Self::Started { node }
            | Self::Crashed { node, .. }
            | Self::Leads { node, .. }
            | Self::Applied { node, .. }
            | Self::Entered { node, .. }
            | Self::Stored { node, .. }
            | Self::Synced { node }
            | Self::Deleted { node, .. }
            | Self::Rotted { node, .. }
            | Self::MarkedConsumed { node, .. }
            | Self::Unmarked { node, .. }
            | Self::Granted { node, .. }
            | Self::Released { node, .. }
            | Self::Sealed { node, .. }
            | Self::Acknowledged { node, .. }
            | Self::Served { node, .. }
            | Self::Gauge { node, .. }
            | Self::Waits { node, .. } => Some(*node),
        }
    }
}

/// The oldest version that sampled a token of `rollout` that trains.
#[must_use]
pub fn oldest_version(rollout: &Rollout) -> Option<PolicyVersion> {
    let sampled = rollout.timelines.iter().flat_map(|t| t.loss_mask.iter().zip(&t.policy_versions));
    sampled.filter(|(trains, _)| **trains).map(|(_, v)| *v).min()
}
