use super::{Conflict, Invariant};
use crate::event::Event;
use crate::oracle::Oracle;
use std::time::Duration;

/// A step uses up whole groups, and a group is `group_size` episodes, however many timelines they have.
#[derive(Debug)]
pub(super) struct WholeGroups {
    pub(super) group_size: usize,
    pub(super) groups_per_step: usize,
}

impl Invariant for WholeGroups {
    fn name(&self) -> &'static str {
        "a step uses up whole groups of episodes"
    }
    fn on_event(&mut self, _at: Duration, event: &Event, _oracle: &Oracle) -> Result<(), Conflict> {
        let Event::Applied { model, version, consumed, .. } = event else { return Ok(()) };
        let whole = consumed.len() % self.group_size == 0 && consumed.len() / self.group_size == self.groups_per_step;
        if whole {
            return Ok(());
        }
        Err(format!(
            "{model} version {version} used up {} episodes, expected {} groups of {}",
            consumed.len(),
            self.groups_per_step,
            self.group_size
        ))
    }
}
