use super::{Conflict, End, Invariant};
use crate::event::Event;
use crate::oracle::Oracle;
use std::time::Duration;

/// I7: after a heal, all live servers come into the greatest line, serve the newest version committed in it, and training
/// goes on, within the scenario's bound.
#[derive(Debug)]
pub(super) struct Convergence;

impl Invariant for Convergence {
    fn name(&self) -> &'static str {
        "I7 live servers converge on the newest version, and training goes on"
    }
    fn on_event(&mut self, _at: Duration, _event: &Event, _oracle: &Oracle) -> Result<(), Conflict> {
        Ok(())
    }
    fn at_end(&mut self, end: &End<'_>, oracle: &Oracle) -> Result<(), Conflict> {
        if end.converged {
            return Ok(());
        }
        let mut why = Vec::new();
        if !end.jobs_done && oracle.counts.steps <= end.steps_at_heal {
            why.push(format!("no step was committed in the {:?} after the heal", end.limit));
        }
        for model in end.models {
            let newest = oracle.newest(model);
            for node in end.servers {
                let served = oracle.served.get(&(*node, model.clone()));
                if served != Some(&newest) {
                    let (line, served) = (oracle.lineage_of(*node, model).line, served.map(ToString::to_string));
                    why.push(format!("node {} in {line} serves {model} {served:?} of {newest}", node.0));
                }
            }
        }
        why.extend(end.said.iter().map(|(node, said)| format!("node {} says: {said}", node.0)));
        Err(why.join("; "))
    }
}
