use super::{Conflict, Invariant};
use crate::event::Event;
use crate::oracle::Oracle;
use starling_protocol::PolicyVersion;
use std::time::Duration;

/// I2: the committed versions of a lineage form one chain: every node that applies a version applies the same step,
/// and terms never fall along the chain.
#[derive(Debug)]
pub(super) struct VersionChain;

impl Invariant for VersionChain {
    fn name(&self) -> &'static str {
        "I2 committed versions form one chain"
    }
    fn on_event(&mut self, _at: Duration, event: &Event, oracle: &Oracle) -> Result<(), Conflict> {
        let Event::Applied { node, model, version, term, weights, consumed, .. } = event else { return Ok(()) };
        let step = |v: PolicyVersion| oracle.steps.get(&(model.clone(), v));
        if let Some(first) = step(*version)
            && (first.term, first.weights, &first.consumed) != (*term, *weights, consumed)
        {
            return Err(format!(
                "{model} has two versions {version}: term {} with weights {}, and on node {} term {term} with {}",
                first.term,
                first.weights.short(),
                node.0,
                weights.short()
            ));
        }
        if version.0 == 0 {
            return Err(format!("node {} applied a step of {model} as version 0", node.0));
        }
        if let Some(before) = step(PolicyVersion(version.0 - 1))
            && before.term > *term
        {
            return Err(format!("{model}: version {version} of term {term} follows one of term {}", before.term));
        }
        if version.0 > 1 && step(PolicyVersion(version.0 - 1)).is_none() {
            return Err(format!("{model}: version {version} was committed and version {} never", version.0 - 1));
        }
        Ok(())
    }
}
