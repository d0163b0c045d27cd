use super::{Conflict, Invariant};
use crate::event::{Event, NodeIx};
use crate::oracle::Oracle;
use starling_protocol::EpisodeId;
use std::collections::BTreeMap;
use std::time::Duration;

/// I9: an episode is held by at most one lease at a time. A replacement is an episode of its own, so an id never goes
/// to a second client.
#[derive(Debug, Default)]
pub(super) struct OneLease {
    holders: BTreeMap<EpisodeId, NodeIx>,
}

impl Invariant for OneLease {
    fn name(&self) -> &'static str {
        "I9 an episode is held by one lease"
    }
    fn on_event(&mut self, _at: Duration, event: &Event, _oracle: &Oracle) -> Result<(), Conflict> {
        let Event::Granted { node, episode, .. } = event else { return Ok(()) };
        match self.holders.insert(*episode, *node) {
            Some(other) if other != *node => {
                Err(format!("episode {} was leased to node {} and to node {}", episode.short(), other.0, node.0))
            }
            _ => Ok(()),
        }
    }
}
