//! Which server an answer is asked of.

use super::pace::Pace;
use crate::watch::lock;
use starling_protocol::NodeId;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What this node knows of a server from its own streams. 72 bytes for every server ever asked.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    /// Streams open to it.
    open: u32,
    pace: Pace,
}

/// Streams that this node has open, and how fast each server was.
#[derive(Clone, Debug, Default)]
pub(super) struct Servers(Arc<Mutex<BTreeMap<NodeId, Known>>>);

impl Servers {
    /// The best of `candidates`: the one that failed this answer least often, then the one with the fewest streams of
    /// this node, then the lowest id.
    pub(super) fn choose(
        &self,
        candidates: impl IntoIterator<Item = NodeId>,
        failures: &BTreeMap<NodeId, u32>,
    ) -> Option<NodeId> {
        let known = lock(&self.0);
        let rank = |n: &NodeId| (failures.get(n).copied().unwrap_or(0), known.get(n).map_or(0, |k| k.open), *n);
        candidates.into_iter().min_by_key(rank)
    }

    /// Counts a stream to `server` while the guard lives.
    pub(super) fn count(&self, server: NodeId) -> OpenStream {
        lock(&self.0).entry(server).or_default().open += 1;
        OpenStream { server, servers: self.clone() }
    }

    pub(super) fn sample(&self, server: NodeId, first: bool, took: Duration) {
        lock(&self.0).entry(server).or_default().pace.sample(first, took);
    }

    pub(super) fn deadline(&self, server: NodeId, first: bool) -> Duration {
        lock(&self.0).get(&server).map(|k| k.pace).unwrap_or_default().deadline(first)
    }
}

/// See [`Servers::count`].
#[derive(Debug)]
pub(super) struct OpenStream {
    server: NodeId,
    servers: Servers,
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        if let Some(known) = lock(&self.servers.0).get_mut(&self.server) {
            known.open = known.open.saturating_sub(1);
        }
    }
}
