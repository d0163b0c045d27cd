use super::{Conflict, Invariant};
use crate::event::{Event, NodeIx};
use crate::oracle::Oracle;
use starling_protocol::{ModelName, PolicyVersion, Term};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// I8: a node's term and version of a model never fall, restarts included, unless its disk was lost. A node whose disk
/// takes no writes may have seen a term that it could not note; it has answered nobody in it.
#[derive(Debug, Default)]
pub(super) struct NeverBack {
    /// Their disks have failed in this run.
    frail: BTreeSet<NodeIx>,
    terms: BTreeMap<(NodeIx, ModelName), Term>,
    applied: BTreeMap<(NodeIx, ModelName), PolicyVersion>,
    served: BTreeMap<(NodeIx, ModelName), PolicyVersion>,
}

fn rises<T: Copy + Ord + std::fmt::Display>(
    seen: &mut BTreeMap<(NodeIx, ModelName), T>,
    node: NodeIx,
    model: &ModelName,
    now: T,
    what: &str,
) -> Result<(), Conflict> {
    match seen.insert((node, model.clone()), now) {
        Some(before) if before > now => Err(format!("node {}: {what} of {model} fell from {before} to {now}", node.0)),
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
                    self.terms.retain(|(n, _), _| n != node);
                    self.applied.retain(|(n, _), _| n != node);
                }
                Ok(())
            }
            Event::Fault { kind: "disk_fails", begins: true, groups } => {
                self.frail.extend(groups.iter().flatten());
                Ok(())
            }
            Event::Leads { node, .. } if self.frail.contains(node) => Ok(()),
            Event::Leads { node, model, term, .. } => rises(&mut self.terms, *node, model, *term, "the term"),
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
