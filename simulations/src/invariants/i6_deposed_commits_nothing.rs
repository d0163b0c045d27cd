use super::{Conflict, Invariant};
use crate::event::{Event, NodeIx};
use crate::oracle::Oracle;
use starling_protocol::{ModelName, PolicyVersion, Term};
use std::collections::BTreeMap;
use std::time::Duration;

/// I6: a step stands in a log entry of its own term, it was made by that term's leader (which is the first holder that it
/// names), and no step of an older term is committed after one of a newer in the same line.
#[derive(Debug, Default)]
pub(super) struct DeposedCommitsNothing {
    leaders: BTreeMap<(ModelName, Term), NodeIx>,
    /// By model and line.
    newest: BTreeMap<(ModelName, u64), (PolicyVersion, Term)>,
}

impl Invariant for DeposedCommitsNothing {
    fn name(&self) -> &'static str {
        "I6 a deposed leader commits nothing"
    }
    fn on_event(&mut self, _at: Duration, event: &Event, _oracle: &Oracle) -> Result<(), Conflict> {
        match event {
            Event::Leads { node, model, term, is_self: true, .. } => {
                self.leaders.insert((model.clone(), *term), *node);
                Ok(())
            }
            Event::Applied { node, model, version, term, logged, holders, .. } => {
                if term != logged {
                    return Err(format!(
                        "node {} applied {model} version {version} of term {term}, a deposed leader's, from an entry of term {logged}",
                        node.0
                    ));
                }
                let leader = self.leaders.get(&(model.clone(), *term));
                match leader {
                    None => return Err(format!("{model} version {version} is of term {term}, in which nobody led")),
                    Some(l) if !holders.contains(l) => {
                        return Err(format!(
                            "{model} version {version} of term {term} was made on {:?}, the leader was node {}",
                            holders.iter().map(|h| h.0).collect::<Vec<_>>(),
                            l.0
                        ));
                    }
                    Some(_) => {}
                }
                let newest = self.newest.entry((model.clone(), version.mark())).or_insert((*version, *term));
                if version > &newest.0 {
                    if *term < newest.1 {
                        return Err(format!(
                            "{model} version {version} of term {term} was committed after version {} of term {}",
                            newest.0, newest.1
                        ));
                    }
                    *newest = (*version, *term);
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }
}
