use super::{Conflict, Invariant};
use crate::event::Event;
use crate::oracle::Oracle;
use starling_protocol::{ModelName, PolicyVersion, RolloutId};
use std::collections::BTreeMap;
use std::time::Duration;

/// I3: no rollout is consumed by two steps of one history, and none is marked as consumed that no committed step
/// consumed, nor, on a node that joined a line, one that only another line consumed.
#[derive(Debug, Default)]
pub(super) struct ConsumedOnce {
    by: BTreeMap<RolloutId, Vec<(ModelName, PolicyVersion)>>,
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
                    let by = self.by.entry(*id).or_default();
                    if by.contains(&now) {
                        continue;
                    }
                    let together =
                        |v: PolicyVersion| oracle.descends(model, *version, v) || oracle.descends(model, v, *version);
                    if let Some(first) = by.iter().find(|(m, v)| m != model || together(*v)) {
                        return Err(format!(
                            "rollout {} was consumed by {} version {} and by {model} version {version}",
                            id.short(),
                            first.0,
                            first.1
                        ));
                    }
                    by.push(now);
                }
                Ok(())
            }
            Event::MarkedConsumed { node, rollout, version } => {
                match oracle.rollouts.get(rollout).map(|f| &f.consumed_by) {
                    Some(by) if by.contains(version) => Ok(()),
                    by => Err(format!(
                        "node {} marks rollout {} as consumed by version {version}, the log says {by:?}",
                        node.0,
                        rollout.short()
                    )),
                }
            }
            Event::Entered { node, model, lineage } => {
                let of_model = |id: &RolloutId| oracle.rollouts.get(id).and_then(|f| f.model.as_ref()) == Some(model);
                let mut marks = oracle.marks.get(node).into_iter().flatten();
                match marks.find(|(id, version)| of_model(id) && !lineage.contains(**version)) {
                    Some((id, version)) => Err(format!(
                        "node {} still marks rollout {} as consumed by version {version}, whose line it left",
                        node.0,
                        id.short()
                    )),
                    None => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }
}
