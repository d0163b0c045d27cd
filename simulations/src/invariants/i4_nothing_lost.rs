use super::{Conflict, End, Invariant};
use crate::event::Event;
use crate::oracle::{Oracle, RolloutFacts};
use starling_protocol::RolloutId;
use std::time::Duration;

/// I4: an acknowledged rollout lies durably where its client was told, and is not lost while fewer than `replication`
/// of its holders' disks are. It may be deleted once a committed step has consumed it.
#[derive(Debug)]
pub(super) struct NothingLost {
    pub(super) replication: u32,
}

impl NothingLost {
    fn check(&self, id: RolloutId, facts: &RolloutFacts) -> Result<(), Conflict> {
        let safe = facts.acknowledged.is_none() || !facts.consumed_by.is_empty() || !facts.durable.is_empty();
        let destroyed = u32::try_from(facts.destroyed.len()).unwrap_or(u32::MAX);
        if safe || destroyed >= self.replication {
            return Ok(());
        }
        Err(format!(
            "rollout {} was acknowledged at {:?} and lies on no disk; {} of the disks that held it were lost",
            id.short(),
            facts.acknowledged.unwrap_or_default(),
            destroyed
        ))
    }
}

impl Invariant for NothingLost {
    fn name(&self) -> &'static str {
        "I4 no acknowledged rollout is lost"
    }
    fn on_event(&mut self, _at: Duration, event: &Event, oracle: &Oracle) -> Result<(), Conflict> {
        match event {
            Event::Acknowledged { node, rollout, holders, promised } => {
                let facts = oracle.rollouts.get(rollout).cloned().unwrap_or_default();
                // A disk may be lost between its node's answer and the client's.
                if let Some(h) = holders.iter().find(|h| !facts.durable.contains(h) && !facts.destroyed.contains(h)) {
                    return Err(format!(
                        "client {} was told that rollout {} lies durably on node {}, and it does not",
                        node.0,
                        rollout.short(),
                        h.0
                    ));
                }
                if holders.len() < *promised as usize {
                    return Err(format!(
                        "rollout {} was acknowledged with {} holders, {promised} were promised",
                        rollout.short(),
                        holders.len()
                    ));
                }
                Ok(())
            }
            Event::Deleted { rollout, .. } => {
                oracle.rollouts.get(rollout).map_or(Ok(()), |facts| self.check(*rollout, facts))
            }
            Event::Crashed { power_loss: true, .. } | Event::Crashed { disk_lost: true, .. } => {
                oracle.rollouts.iter().try_for_each(|(id, facts)| self.check(*id, facts))
            }
            _ => Ok(()),
        }
    }
    fn at_end(&mut self, _end: &End<'_>, oracle: &Oracle) -> Result<(), Conflict> {
        oracle.rollouts.iter().try_for_each(|(id, facts)| self.check(*id, facts))
    }
}
