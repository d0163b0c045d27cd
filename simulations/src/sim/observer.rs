//! Network messages into the trace.

use super::recorder::Recorder;
use starling_core::memory_network::{Fate, MessageKind, NetworkObserver};
use starling_protocol::NodeId;
use tokio::time::Instant;

/// Writes every message into the trace's hash.
#[derive(Debug)]
pub(crate) struct Tap(pub(crate) Recorder);

impl NetworkObserver for Tap {
    fn on_message(&self, _at: Instant, from: NodeId, to: NodeId, kind: MessageKind, len: usize, fate: Fate) {
        self.0.message(from, to, kind, len, fate);
    }
}
