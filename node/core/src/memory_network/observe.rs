//! What passes through the network, for charts and traces.

use starling_protocol::NodeId;
use starling_protocol::wire::Service;
use tokio::time::Instant;

/// What a message belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MessageKind {
    /// A request, or its answer.
    Call(Service),
    /// One hop of a gossip message.
    Gossip,
    /// A frame of a stream, or its opening.
    Stream,
}

impl MessageKind {
    /// All kinds.
    pub const ALL: [Self; 7] = [
        Self::Call(Service::Swim),
        Self::Call(Service::Raft),
        Self::Call(Service::Rollouts),
        Self::Call(Service::Blobs),
        Self::Call(Service::Leader),
        Self::Gossip,
        Self::Stream,
    ];
    fn index(self) -> usize {
        Self::ALL.iter().position(|k| *k == self).unwrap_or_default()
    }
    /// In one word.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Call(Service::Swim) => "swim",
            Self::Call(Service::Raft) => "raft",
            Self::Call(Service::Rollouts) => "rollouts",
            Self::Call(Service::Blobs) => "blobs",
            Self::Call(Service::Leader) => "leader",
            Self::Gossip => "gossip",
            Self::Stream => "stream",
        }
    }
}

/// What became of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fate {
    /// It arrived.
    Delivered,
    /// The link lost it.
    Lost,
    /// The link was cut when it was sent or when it would have arrived.
    Cut,
    /// Too much waited for the bandwidth.
    QueueFull,
    /// The node that it was for, or that run of it, was gone.
    Gone,
}

/// Sees every message.
pub trait NetworkObserver: Send + Sync {
    /// Called once for each copy of a message, when its fate is known: at its arrival, or when it is lost. `len` is
    /// the body's length in bytes. The order follows from the seed. The network is locked meanwhile: do not call it.
    fn on_message(&self, at: Instant, from: NodeId, to: NodeId, kind: MessageKind, len: usize, fate: Fate);
}

/// Messages and the bytes of their bodies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Given to the network.
    pub messages_sent: u64,
    /// Arrived.
    pub messages_received: u64,
    /// Bytes given to the network.
    pub bytes_sent: u64,
    /// Bytes that arrived.
    pub bytes_received: u64,
}

/// A node's traffic since it was first heard of; a restart does not reset it. Bodies only: headers, acknowledgements
/// and the network's own housekeeping are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeCounters {
    /// Given to the network.
    pub messages_sent: u64,
    /// Arrived.
    pub messages_received: u64,
    /// Bytes given to the network.
    pub bytes_sent: u64,
    /// Bytes that arrived.
    pub bytes_received: u64,
    by_kind: [Traffic; MessageKind::ALL.len()],
}

impl NodeCounters {
    /// The part that belongs to `kind`.
    #[must_use]
    pub fn of(&self, kind: MessageKind) -> Traffic {
        self.by_kind[kind.index()]
    }
    pub(super) fn sent(&mut self, kind: MessageKind, len: usize) {
        let len = len as u64;
        self.messages_sent += 1;
        self.bytes_sent += len;
        let part = &mut self.by_kind[kind.index()];
        part.messages_sent += 1;
        part.bytes_sent += len;
    }
    pub(super) fn received(&mut self, kind: MessageKind, len: usize) {
        let len = len as u64;
        self.messages_received += 1;
        self.bytes_received += len;
        let part = &mut self.by_kind[kind.index()];
        part.messages_received += 1;
        part.bytes_received += len;
    }
}
