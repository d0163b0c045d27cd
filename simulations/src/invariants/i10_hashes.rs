use super::{Conflict, Invariant};
use crate::event::Event;
use crate::oracle::Oracle;
use std::time::Duration;

/// I10: every blob read matches its hash. The proof of it is at the far end: an engine is only ever given the bytes
/// that the log names for its version, whatever disks and links did to them on the way.
#[derive(Debug)]
pub(super) struct Hashes;

impl Invariant for Hashes {
    fn name(&self) -> &'static str {
        "I10 every blob read matches its hash"
    }
    fn on_event(&mut self, _at: Duration, event: &Event, oracle: &Oracle) -> Result<(), Conflict> {
        let Event::Served { node, model, version, weights } = event else { return Ok(()) };
        match oracle.weights(model, *version) {
            Some(hash) if hash == *weights => Ok(()),
            named => Err(format!(
                "node {} serves {model} version {version} from bytes with hash {}, the log names {:?}",
                node.0,
                weights.short(),
                named.map(|h| h.short())
            )),
        }
    }
}
