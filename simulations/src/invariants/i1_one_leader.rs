use super::{Conflict, Invariant};
use crate::event::{Event, NodeIx};
use crate::oracle::Oracle;
use starling_protocol::{ModelName, Term};
use std::collections::BTreeMap;
use std::time::Duration;

/// I1: at most one node acts as leader of a model in a term (Raft §5.2, election safety).
#[derive(Debug, Default)]
pub(super) struct OneLeader {
    leaders: BTreeMap<(ModelName, Term), NodeIx>,
}

impl Invariant for OneLeader {
    fn name(&self) -> &'static str {
        "I1 at most one leader per model and term"
    }
    fn on_event(&mut self, _at: Duration, event: &Event, _oracle: &Oracle) -> Result<(), Conflict> {
        let Event::Leads { node, model, term, is_self: true, .. } = event else { return Ok(()) };
        match self.leaders.insert((model.clone(), *term), *node) {
            Some(other) if other != *node => {
                Err(format!("nodes {} and {} both lead {model} in term {term}", other.0, node.0))
            }
            _ => Ok(()),
        }
    }
}
