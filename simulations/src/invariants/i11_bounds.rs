use super::{Conflict, Invariant};
use crate::event::Event;
use crate::oracle::Oracle;
use std::time::Duration;

/// I11: bounded memory: queues, caches and the admission quota stay under their limits.
#[derive(Debug)]
pub(super) struct Bounds;

impl Invariant for Bounds {
    fn name(&self) -> &'static str {
        "I11 queues, caches and the quota stay under their limits"
    }
    fn on_event(&mut self, _at: Duration, event: &Event, _oracle: &Oracle) -> Result<(), Conflict> {
        match event {
            Event::Gauge { node, gauge, value, limit } if value > limit => {
                Err(format!("node {}: {gauge:?} is {value}, the limit is {limit}", node.0))
            }
            _ => Ok(()),
        }
    }
}
