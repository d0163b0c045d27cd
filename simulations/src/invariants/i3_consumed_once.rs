use super::{Conflict, Invariant};
use crate::event::Event;
use crate::oracle::Oracle;
use starling_protocol::{ModelName, PolicyVersion, RolloutId};
use std::collections::BTreeMap;
use std::time::Duration;

/// I3: no rollout is consumed by two steps, and none is marked as consumed that no committed step consumed.
#[derive(Debug, Default)]
pub(super) struct ConsumedOnce {
    by: BTreeMap<RolloutId, (ModelName, PolicyVersion)>,
}

impl Invariant for ConsumedOnce {
    fn name(&self) -> &'static str {
        "I3 no rollout is consumed twice"
    }
    fn on_event(&mut self, _at: Duration, event: &Event, oracle: &Oracle) -> Result<(), Conflict> {
        match event {
            Event::Applied { model, version, consumed, .. } => {
                for id in consumed {
                    let now = (model.clone(), *version);
                    match self.by.insert(*id, now.clone()) {
                        Some(first) if first != now => {
                            return Err(format!(
                                "rollout {} was consumed by {} version {} and by {model} version {version}",
                                id.short(),
                                first.0,
                                first.1
                            ));
                        }
                        _ => {}
                    }
                }
                Ok(())
            }
            Event::MarkedConsumed { node, rollout, version } => {
                match oracle.rollouts.get(rollout).and_then(|f| f.consumed_by) {
                    Some(by) if by == *version => Ok(()),
                    by => Err(format!(
                        "node {} marks rollout {} as consumed by version {version}, the log says {by:?}",
                        node.0,
                        rollout.short()
                    )),
                }
            }
            _ => Ok(()),
        }
    }
}
