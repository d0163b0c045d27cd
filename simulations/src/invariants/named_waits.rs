use super::{Conflict, Invariant};
use crate::event::Event;
use crate::oracle::Oracle;
use std::time::Duration;

/// A wait without a reason may last this long (promise 5).
const PATIENCE: Duration = Duration::from_secs(5);

/// Promise 5: no node waits silently for more than 5 s.
#[derive(Debug)]
pub(super) struct NamedWaits;

impl Invariant for NamedWaits {
    fn name(&self) -> &'static str {
        "every wait has a named reason within 5 s"
    }
    fn on_event(&mut self, _at: Duration, event: &Event, _oracle: &Oracle) -> Result<(), Conflict> {
        match event {
            Event::Waits { node, since, reason }
                if *since > PATIENCE && reason.as_deref().is_none_or(str::is_empty) =>
            {
                Err(format!("node {} has waited for {since:?} and gives no reason", node.0))
            }
            _ => Ok(()),
        }
    }
}
