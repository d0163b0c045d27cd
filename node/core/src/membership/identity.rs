//! Who a member is to foca: a node and which of its runs.

use serde::{Deserialize, Serialize};
use starling_protocol::NodeId;

/// A node's run. A restarted node comes with a higher incarnation, so it wins over the memory of its former self.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Identity {
    pub(super) node: NodeId,
    /// Milliseconds since the epoch when the run started, plus one for each time it was declared dead by mistake.
    pub(super) incarnation: u64,
}

impl Identity {
    /// How to address a node whose run is not known; only announcements may be sent there.
    pub(super) fn any_run_of(node: NodeId) -> Self {
        Self { node, incarnation: 0 }
    }
}

impl foca::Identity for Identity {
    type Addr = NodeId;

    fn renew(&self) -> Option<Self> {
        Some(Self { incarnation: self.incarnation.saturating_add(1), ..*self })
    }
    fn addr(&self) -> NodeId {
        self.node
    }
    fn win_addr_conflict(&self, adversary: &Self) -> bool {
        self.incarnation > adversary.incarnation
    }
}
