//! What clients were promised, and where everything lies: the truth that the checkers compare nodes with.
//!
//! It is built from events alone and never asks a node.

use crate::event::{Event, NodeIx};
use starling_protocol::{Hash, Lineage, ModelName, PolicyVersion, RolloutId, Term};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A rollout's way so far.
#[derive(Clone, Debug, Default)]
pub struct RolloutFacts {
    /// The oldest version that sampled what trains of it.
    pub oldest: Option<PolicyVersion>,
    /// Of this model; `None` until a client seals it.
    pub model: Option<ModelName>,
    /// It must never be trained on.
    pub forged: bool,
    /// Its client was told that it is safe.
    pub acknowledged: Option<Duration>,
    /// On these disks, synced.
    pub durable: BTreeSet<NodeIx>,
    /// On these disks, not synced yet.
    pub written: BTreeSet<NodeIx>,
    /// Nodes that had it durably until their disk was lost, or rotted there.
    pub destroyed: BTreeSet<NodeIx>,
    /// Consumed by these versions: by at most one of each history.
    pub consumed_by: BTreeSet<PolicyVersion>,
}

/// A committed step as first seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepFacts {
    /// The version that it was trained from.
    pub parent: PolicyVersion,
    /// Its term.
    pub term: Term,
    /// Hash of its weights.
    pub weights: Hash,
    /// What it consumed.
    pub consumed: Vec<RolloutId>,
}

/// See the module's text.
#[derive(Debug, Default)]
pub struct Oracle {
    /// Nodes whose process runs.
    pub up: BTreeSet<NodeIx>,
    /// All rollouts.
    pub rollouts: BTreeMap<RolloutId, RolloutFacts>,
    /// Not synced yet, by node: what a sync makes durable and a power failure undoes.
    unsynced: BTreeMap<NodeIx, Vec<RolloutId>>,
    /// Committed steps by model and version.
    pub steps: BTreeMap<(ModelName, PolicyVersion), StepFacts>,
    /// Hash of the weights that each model began with.
    pub first_weights: BTreeMap<ModelName, Hash>,
    /// Newest version served, by node and model.
    pub served: BTreeMap<(NodeIx, ModelName), PolicyVersion>,
    /// Newest version applied, by node and model.
    pub applied: BTreeMap<(NodeIx, ModelName), PolicyVersion>,
    /// The line that each node is in, by node and model.
    pub lineages: BTreeMap<(NodeIx, ModelName), Lineage>,
    /// What disks say of consumed rollouts. After a power failure a node's are unknown until it writes them again.
    pub marks: BTreeMap<NodeIx, BTreeMap<RolloutId, PolicyVersion>>,
    /// Terms in which some node led.
    led: BTreeSet<(ModelName, Term)>,
    /// Counts for people.
    pub counts: Counts,
}

/// Totals of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counts {
    /// Steps committed, over all models.
    pub steps: u64,
    /// Terms in which some node led, over all models.
    pub terms: u64,
    /// Episodes that clients were given.
    pub episodes: u64,
    /// Rollouts acknowledged.
    pub acknowledged: u64,
    /// Rollouts consumed.
    pub consumed: u64,
    /// Processes that died.
    pub crashes: u64,
    /// Faults begun.
    pub faults: u64,
}

impl Oracle {
    /// The line of `model` that a node is in; that of the model's creation as long as it is in none.
    #[must_use]
    pub fn lineage_of(&self, node: NodeIx, model: &ModelName) -> Lineage {
        self.lineages.get(&(node, model.clone())).cloned().unwrap_or_default()
    }
    /// The greatest line of `model` among the nodes that are up: the one that must be everyone's once all meet.
    #[must_use]
    pub fn lineage(&self, model: &ModelName) -> Lineage {
        let lines = self.up.iter().map(|node| self.lineage_of(*node, model));
        lines.max_by_key(|l| l.line).unwrap_or_default()
    }
    /// The newest version of `model` committed in that line.
    #[must_use]
    pub fn newest(&self, model: &ModelName) -> PolicyVersion {
        let lineage = self.lineage(model);
        let all = (model.clone(), PolicyVersion(0))..=(model.clone(), PolicyVersion(u64::MAX));
        let mut steps = self.steps.range(all).rev().map(|((_, v), _)| *v);
        steps.find(|v| lineage.contains(*v)).unwrap_or_default()
    }
    /// Whether `late` goes back to `early`, or is it.
    #[must_use]
    pub fn descends(&self, model: &ModelName, late: PolicyVersion, early: PolicyVersion) -> bool {
        let mut at = late;
        while at.mark() != early.mark() && at.steps() > early.steps() {
            let Some(step) = self.steps.get(&(model.clone(), at)) else { return false };
            at = step.parent;
        }
        at.mark() == early.mark() && at >= early
    }
    /// Hash of the weights of a version.
    #[must_use]
    pub fn weights(&self, model: &ModelName, version: PolicyVersion) -> Option<Hash> {
        if version == PolicyVersion(0) {
            return self.first_weights.get(model).copied();
        }
        self.steps.get(&(model.clone(), version)).map(|s| s.weights)
    }

    /// Takes an event in. Called before the checkers look at it.
    pub fn on_event(&mut self, at: Duration, event: &Event) {
        match event {
            Event::Started { node } => {
                self.up.insert(*node);
            }
            Event::Crashed { node, power_loss, disk_lost } => {
                self.counts.crashes += 1;
                self.up.remove(node);
                self.served.retain(|(n, _), _| n != node);
                if *power_loss || *disk_lost {
                    for id in self.unsynced.remove(node).unwrap_or_default() {
                        self.rollouts.entry(id).or_default().written.remove(node);
                    }
                }
                if *power_loss || *disk_lost {
                    self.marks.remove(node);
                }
                if *disk_lost {
                    self.lineages.retain(|(n, _), _| n != node);
                    self.applied.retain(|(n, _), _| n != node);
                    for facts in self.rollouts.values_mut() {
                        if facts.durable.remove(node) {
                            facts.destroyed.insert(*node);
                        }
                    }
                }
            }
            Event::Fault { begins: true, .. } => self.counts.faults += 1,
            Event::Entered { node, model, lineage } => {
                self.lineages.insert((*node, model.clone()), lineage.clone());
            }
            Event::MarkedConsumed { node, rollout, version } => {
                self.marks.entry(*node).or_default().insert(*rollout, *version);
            }
            Event::Unmarked { node, rollout } => {
                self.marks.entry(*node).or_default().remove(rollout);
            }
            Event::Applied { node, model, parent, version, term, weights, consumed, .. } => {
                self.applied.insert((*node, model.clone()), *version);
                for id in consumed {
                    let facts = self.rollouts.entry(*id).or_default();
                    if facts.consumed_by.is_empty() {
                        self.counts.consumed += 1;
                    }
                    facts.consumed_by.insert(*version);
                }
                let counts = &mut self.counts;
                self.steps.entry((model.clone(), *version)).or_insert_with(|| {
                    counts.steps += 1;
                    StepFacts { parent: *parent, term: *term, weights: *weights, consumed: consumed.clone() }
                });
            }
            Event::Stored { node, rollout } => {
                self.rollouts.entry(*rollout).or_default().written.insert(*node);
                self.unsynced.entry(*node).or_default().push(*rollout);
            }
            Event::Synced { node } => {
                for id in self.unsynced.remove(node).unwrap_or_default() {
                    let facts = self.rollouts.entry(id).or_default();
                    if facts.written.remove(node) {
                        facts.durable.insert(*node);
                    }
                }
            }
            Event::Deleted { node, rollout } => {
                let facts = self.rollouts.entry(*rollout).or_default();
                facts.written.remove(node);
                facts.durable.remove(node);
            }
            Event::Rotted { node, rollout } => {
                let facts = self.rollouts.entry(*rollout).or_default();
                facts.written.remove(node);
                if facts.durable.remove(node) {
                    facts.destroyed.insert(*node);
                }
            }
            Event::Granted { .. } => self.counts.episodes += 1,
            Event::Sealed { rollout, model, oldest, forged, .. } => {
                let facts = self.rollouts.entry(*rollout).or_default();
                facts.oldest = *oldest;
                facts.model = Some(model.clone());
                facts.forged = *forged;
            }
            Event::Acknowledged { rollout, .. } => {
                self.counts.acknowledged += 1;
                self.rollouts.entry(*rollout).or_default().acknowledged = Some(at);
            }
            Event::Served { node, model, version, .. } => {
                self.served.insert((*node, model.clone()), *version);
            }
            Event::Leads { model, term, is_self: true, .. } => {
                if self.led.insert((model.clone(), *term)) {
                    self.counts.terms += 1;
                }
            }
            Event::Fault { .. }
            | Event::Healed
            | Event::Leads { .. }
            | Event::Released { .. }
            | Event::Gauge { .. }
            | Event::Waits { .. } => {}
        }
    }
}
