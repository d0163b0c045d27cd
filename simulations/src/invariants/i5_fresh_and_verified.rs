use super::{Conflict, Invariant};
use crate::event::Event;
use crate::oracle::Oracle;
use std::time::Duration;

/// I5: a step trains its parent on rollouts that an honest client sealed, whose oldest sampled token is of a version
/// that the parent goes back to, by at most `staleness_max` steps.
#[derive(Debug)]
pub(super) struct FreshAndVerified {
    pub(super) staleness_max: u64,
}

impl Invariant for FreshAndVerified {
    fn name(&self) -> &'static str {
        "I5 consumed rollouts are verified and within the staleness bound"
    }
    fn on_event(&mut self, _at: Duration, event: &Event, oracle: &Oracle) -> Result<(), Conflict> {
        let Event::Applied { model, parent: trained, version, consumed, .. } = event else { return Ok(()) };
        for id in consumed {
            let Some(facts) = oracle.rollouts.get(id).filter(|f| f.model.is_some()) else {
                return Err(format!("{model} version {version} consumed {}, which nobody sealed", id.short()));
            };
            if facts.forged {
                return Err(format!("{model} version {version} was trained on {}, which is forged", id.short()));
            }
            if facts.model.as_ref() != Some(model) {
                return Err(format!("{model} version {version} consumed {} of {:?}", id.short(), facts.model));
            }
            if let Some(oldest) = facts.oldest
                && (trained.steps().saturating_sub(oldest.steps()) > self.staleness_max
                    || !oracle.descends(model, *trained, oldest))
            {
                return Err(format!(
                    "{model}: version {trained} was trained on {} of version {oldest}, at most {} versions apart are allowed",
                    id.short(),
                    self.staleness_max
                ));
            }
        }
        Ok(())
    }
}
