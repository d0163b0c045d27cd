//! Handing leadership over at a step boundary, and the order in which voters stand when there is none.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

use starling_protocol::record::{Fitness, Intake, NodeRecord, Role};
use starling_protocol::{ModelName, NodeId};
use tokio::time::timeout;

use super::group::Group;
use super::groups::Groups;
use super::succession::{Heir, clearly_better, heir};
use crate::watch::lock;

/// What a record says of its node's device for a model.
fn fitness_of(record: &NodeRecord, model: &ModelName) -> Fitness {
    record.models.iter().find(|h| h.model == *model).map_or(Fitness::Unknown, |h| h.fitness)
}

impl Groups {
    /// This node is about to leave: it does not stand any more, and hands over what it leads.
    pub fn set_draining(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Notes what this node's device is worth for training `model`.
    pub fn set_fitness(&self, model: &ModelName, fitness: Fitness) {
        lock(&self.fitness).insert(model.clone(), fitness);
    }

    /// What this node's device is worth for training `model`, as far as it knows.
    #[must_use]
    pub fn fitness(&self, model: &ModelName) -> Fitness {
        lock(&self.fitness).get(model).copied().unwrap_or_default()
    }

    /// What `node`'s device is worth for training `model`, as far as this node knows.
    pub(super) fn fitness_at(&self, node: NodeId, model: &ModelName) -> Fitness {
        if node == self.node {
            return self.fitness(model);
        }
        self.membership.of_record(node, |r| fitness_of(r, model)).unwrap_or(Fitness::Unknown)
    }

    /// Whether `node` is leaving the mesh, as it says.
    pub(super) fn drains(&self, node: NodeId) -> bool {
        if node == self.node {
            return self.is_draining();
        }
        self.membership.of_record(node, |r| r.intake) == Some(Intake::Draining)
    }

    /// Whether `node` may lead the group: a server that answers, does not leave, and can hold the trainer.
    pub(super) fn may_lead(&self, node: NodeId, model: &ModelName) -> bool {
        let able = self.membership.of_record(node, |r| {
            r.has(Role::Server) && r.intake != Intake::Draining && !matches!(fitness_of(r, model), Fitness::TooSmall)
        });
        able.unwrap_or(true) && self.membership.is_live(node)
    }

    /// Voters that could be asked to lead now: their logs are complete.
    fn heirs(&self, group: &Group) -> Vec<Heir> {
        let m = group.metrics();
        let now = self.started.elapsed();
        let steady = lock(&group.sightings).steady(now, self.config.transfer_after);
        let full = |n: NodeId| self.membership.of_record(n, |r| r.intake) == Some(Intake::Full);
        let voters: BTreeSet<_> = m.membership_config.voter_ids().collect();
        let newest = m.replication.iter().flatten().filter(|(n, _)| **n != self.node && voters.contains(*n));
        let newest: Vec<_> = newest.filter(|(n, _)| self.may_lead(**n, &group.model)).collect();
        let last = newest.iter().map(|(_, matched)| **matched).max();
        let complete = newest.into_iter().filter(|(_, matched)| Some(**matched) == last).map(|(n, _)| *n);
        let reigns = lock(&group.reigns);
        let heir = |node| Heir {
            node,
            speed: self.fitness_at(node, &group.model).tokens_per_s(),
            steady: steady.contains(&node) && !full(node),
            barred: reigns.is_barred(now, node),
        };
        complete.map(heir).collect()
    }

    /// Of `nodes`, those whose device is so much better than this node's that leadership should move to them.
    pub(super) fn better_than_self(&self, group: &Group, nodes: &BTreeSet<NodeId>) -> BTreeSet<NodeId> {
        let (now, own) = (self.started.elapsed(), self.fitness(&group.model).tokens_per_s());
        let reigns = lock(&group.reigns);
        let better = |n: &&NodeId| {
            clearly_better(self.fitness_at(**n, &group.model).tokens_per_s(), own)
                && self.may_lead(**n, &group.model)
                && !reigns.is_barred(now, **n)
        };
        nodes.iter().filter(|n| **n != self.node).filter(better).copied().collect()
    }

    /// At a boundary between two steps of `model`: gives leadership to another voter if it should have it, and waits until
    /// this node has let go. A clearly better device is asked only `after_step`, so that every reign has at least one.
    ///
    /// Returns whom it asked. Such a node usually leads soon; if it does not, whoever is elected does.
    pub async fn hand_on(&self, model: &ModelName, after_step: bool) -> Option<NodeId> {
        let group = self.group(model)?;
        let leaves = self.is_draining();
        if !group.leadership.get().is_self || !(leaves || after_step) {
            return None;
        }
        let own = self.fitness(model).tokens_per_s();
        let to = heir(own, leaves, &self.heirs(&group))?;
        let speed = self.fitness_at(to, model).tokens_per_s();
        tracing::info!(%model, to = %to.short(), leaves, ?own, ?speed, "this node asks another to lead");
        group.raft.trigger().transfer_leader(to).await.ok()?;
        // openraft logs nothing more from here on; another leader is known after an election.
        let mut leadership = group.leadership.receiver();
        let let_go = async { while leadership.borrow_and_update().is_self && leadership.changed().await.is_ok() {} };
        let _gone_or_lapsed = timeout(self.config.election_timeout_max, let_go).await;
        Some(to)
    }

    /// The voters that could lead, in the order in which they stand when the leader has fallen silent: the best device
    /// first, those that just proved unsteady last, equals by id. Nodes agree on it as far as their records do.
    pub(super) fn standing_order(&self, group: &Group) -> Vec<NodeId> {
        let m = group.metrics();
        let (since, reigns) = (self.started.elapsed(), lock(&group.reigns));
        let (answering, _) = self.answering(group);
        let able = |n: &NodeId| {
            *n == self.node || m.current_leader != Some(*n) && answering.contains(n) && self.may_lead(*n, &group.model)
        };
        let mut order: Vec<_> = m.membership_config.voter_ids().filter(able).collect();
        order.sort_by_cached_key(|n| {
            let speed = self.fitness_at(*n, &group.model).tokens_per_s();
            (reigns.is_barred(since, *n), std::cmp::Reverse(speed), *n)
        });
        order
    }
}
