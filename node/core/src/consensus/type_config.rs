//! The types that openraft is instantiated with.

use std::fmt;

use serde::{Deserialize, Serialize};
use starling_protocol::control::{Applied, ControlEntry};
use starling_protocol::{NodeId, StoreId};

use crate::runtime::ScopedRuntime;

/// What a log entry carries: a [`ControlEntry`] with the one-line text that openraft's own log lines need.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LogPayload(pub ControlEntry);

impl fmt::Display for LogPayload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            ControlEntry::ModelCreated { model, .. } => write!(f, "model {model} created"),
            ControlEntry::JobSubmitted { job, .. } => write!(f, "job {job} submitted"),
            ControlEntry::StepCommitted(s) => {
                write!(f, "step to version {} of term {}, {} rollouts", s.version, s.term, s.consumed.len())
            }
            ControlEntry::EvaluationCompleted(e) => write!(f, "evaluation {:?} of version {}", e.phase, e.version),
            ControlEntry::JobEnded { job, end } => write!(f, "job {job} ended: {end:?}"),
        }
    }
}

/// What the log keeps of a member.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seat {
    /// The store that it had when it was taken in. Another one has forgotten what this one promised, so the seat is not its.
    pub store: StoreId,
}

impl fmt::Display for Seat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "store {}", self.store.short())
    }
}

openraft::declare_raft_types!(
    /// One group: entries are [`LogPayload`], answers are [`Applied`], and a term has one leader, so that the
    /// term alone is the fencing token.
    pub TypeConfig:
        D = LogPayload,
        R = Applied,
        NodeId = NodeId,
        Node = Seat,
        Term = u64,
        LeaderId = openraft::impls::leader_id_std::LeaderId<u64, NodeId>,
        AsyncRuntime = ScopedRuntime,
);

pub(crate) type Entry = openraft::alias::EntryOf<TypeConfig>;
pub(crate) type LogId = openraft::alias::LogIdOf<TypeConfig>;
pub(crate) type Vote = openraft::alias::VoteOf<TypeConfig>;
pub(crate) type StoredMembership = openraft::alias::StoredMembershipOf<TypeConfig>;
pub(crate) type SnapshotMeta = openraft::alias::SnapshotMetaOf<TypeConfig>;
pub(crate) type Snapshot = openraft::alias::SnapshotOf<TypeConfig, Vec<u8>>;
