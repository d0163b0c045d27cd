use super::{Conflict, Invariant};
use crate::event::Event;
use crate::oracle::Oracle;
use starling_protocol::PolicyVersion;
use std::time::Duration;

/// I2: the committed versions of a lineage form one chain: every node that applies a version applies the same step, it
/// follows one that was committed, by one step and in the same line or into a later generation, and terms never fall
/// along the chain.
#[derive(Debug)]
pub(super) struct VersionChain;

impl Invariant for VersionChain {
    fn name(&self) -> &'static str {
        "I2 committed versions form one chain"
    }
    fn on_event(&mut self, _at: Duration, event: &Event, oracle: &Oracle) -> Result<(), Conflict> {
        let Event::Applied { node, model, parent, version, term, weights, consumed, .. } = event else { return Ok(()) };
        let step = |v: PolicyVersion| oracle.steps.get(&(model.clone(), v));
        if let Some(first) = step(*version)
            && (first.parent, first.term, first.weights, &first.consumed) != (*parent, *term, *weights, consumed)
        {
            return Err(format!(
                "{model} has two versions {version}: term {} with weights {}, and on node {} term {term} with {}",
                first.term,
                first.weights.short(),
                node.0,
                weights.short()
            ));
        }
        if version.steps() == 0 {
            return Err(format!("node {} applied a step of {model} as version 0", node.0));
        }
        let continues = parent.mark() == version.mark() || parent.generation() < version.generation();
        if version.steps() != parent.steps() + 1 || !continues {
            return Err(format!("{model}: version {version} follows version {parent}"));
        }
        // A new line takes over what was logged in the line before, whatever became of it there.
        if term.mark() != version.mark() && term.generation() >= version.generation() {
            return Err(format!("{model}: version {version} was committed in term {term} of another line"));
        }
        match step(*parent) {
            Some(before) if before.term > *term => {
                Err(format!("{model}: version {version} of term {term} follows one of term {}", before.term))
            }
            None if parent.steps() > 0 => {
                Err(format!("{model}: version {version} was committed and version {parent} never"))
            }
            _ => Ok(()),
        }
    }
}
