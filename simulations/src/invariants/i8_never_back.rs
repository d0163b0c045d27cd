use super::{Conflict, Invariant};
use crate::event::{Event, NodeIx};
use crate::oracle::Oracle;
use starling_protocol::{Line, ModelName, PolicyVersion};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// I8: a node's line, term and version of a model never fall, restarts included, unless its disk was lost: terms and
/// versions within a line, and their generation. A node whose disk takes no writes may have seen a term that it could
/// not note; it has answered nobody in it.
#[derive(Debug, Default)]
pub(super) struct NeverBack {
    /// Their disks have failed in this run.
    frail: BTreeSet<NodeIx>,
    lines: BTreeMap<(NodeIx, ModelName), Line>,
    terms: Seen,
    applied: Seen,
    served: Seen,
}

/// The last term or version: both count in the same way.
type Seen = BTreeMap<(NodeIx, ModelName), PolicyVersion>;

fn rises(seen: &mut Seen, node: NodeIx, model: &ModelName, now: PolicyVersion, what: &str) -> Result<(), Conflict> {
    // Of two lines of one generation either may have the greater numbers.
    let falls =
        |before: PolicyVersion| before > now && (before.mark() == now.mark() || before.generation() > now.generation());
    match seen.insert((node, model.clone()), now) {
        Some(before) if falls(before) => Err(format!("node {}: {what} of {model} fell from {before} to {now}", node.0)),
        _ => Ok(()),
    }
}

impl Invariant for NeverBack {
    fn name(&self) -> &'static str {
        "I8 term and version never fall"
    }
    fn on_event(&mut self, _at: Duration, event: &Event, _oracle: &Oracle) -> Result<(), Conflict> {
        match event {
            Event::Crashed { node, disk_lost, .. } => {
                // What an engine serves dies with its process.
                self.served.retain(|(n, _), _| n != node);
                if *disk_lost {
                    self.lines.retain(|(n, _), _| n != node);
                    self.terms.retain(|(n, _), _| n != node);
                    self.applied.retain(|(n, _), _| n != node);
                }
                Ok(())
            }
            Event::Fault { kind: "disk_fails", begins: true, groups } => {
                self.frail.extend(groups.iter().flatten());
                Ok(())
            }
            Event::Entered { node, model, lineage } => match self.lines.insert((*node, model.clone()), lineage.line) {
                Some(before) if before > lineage.line => {
                    Err(format!("node {} left {before} of {model} for {}, which is less", node.0, lineage.line))
                }
                _ => Ok(()),
            },
            Event::Leads { node, .. } if self.frail.contains(node) => Ok(()),
            Event::Leads { node, model, term, .. } => {
                // In a line that it just joined, a node knows no term before its leader comes.
                let line = self.lines.get(&(*node, model.clone())).copied().unwrap_or_default();
                if term.mark() != u64::from(line.mark()) {
                    return Ok(());
                }
                rises(&mut self.terms, *node, model, PolicyVersion(term.0), "the term")
            }
            Event::Applied { node, model, version, .. } => {
                rises(&mut self.applied, *node, model, *version, "the version")
            }
            Event::Served { node, model, version, .. } => {
                rises(&mut self.served, *node, model, *version, "the version served")
            }
            _ => Ok(()),
        }
    }
}
