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
        let index = |n| self.0.index(n).map_or(u32::MAX, |i| i.0);
        let mut line = [0; 17];
        line[..4].copy_from_slice(&index(from).to_le_bytes());
        line[4..8].copy_from_slice(&index(to).to_le_bytes());
        line[8..16].copy_from_slice(&(len as u64).to_le_bytes());
        #[expect(clippy::cast_possible_truncation, reason = "seven kinds, five fates")]
        let kind = MessageKind::ALL.iter().position(|k| *k == kind).unwrap_or_default() as u8;
        line[16] = kind * 8 + fate as u8;
        self.0.message(&line);
    }
}
