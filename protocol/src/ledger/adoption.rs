//! Leases of a former leader: they go on with the next one, when their holders renew them there.
//!
//! A ledger is rebuilt from the log and the stores, and those do not know what runs. The holder does: it renews with what
//! the lease says ([`HeldLease`]), and the ledger takes it over if its predecessor may have given it. A holder cannot
//! invent work by that: the task must lie where the job's own order was at, the place must be free, and in one term no
//! more leases are taken over than the quota let the predecessor give.

use super::evaluation::{EvalSlot, Evaluation};
use super::leases::{Lease, Place};
use super::{Ledger, OpenGroup};
use crate::assignment::{HeldLease, Purpose};
use crate::ids::{EpisodeId, GroupId, NodeId, TaskRef};
use crate::time::Timestamp;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Longest time for which free places of adopted groups are kept for their former holders: clients renew every 5 s at
/// least, and a call takes up to a second.
const KEPT_MAX: Duration = Duration::from_secs(6);

/// What a ledger keeps of its predecessor's leases.
#[derive(Debug, Default)]
pub(super) struct Adoption {
    /// The first time this ledger saw.
    began: Option<Timestamp>,
    /// Episodes taken over in this term. One that was aborted, ran out or came in does not come back. At most the quota.
    taken: BTreeSet<EpisodeId>,
    /// Groups opened per set at the start of this ledger.
    opened: Vec<u64>,
    /// Per set, the tasks that a predecessor may have opened a group with; made when it is first asked for.
    reachable: Option<Vec<BTreeSet<u32>>>,
}

impl Adoption {
    pub(super) fn new(opened: Vec<u64>) -> Self {
        Self { opened, ..Self::default() }
    }

    pub(super) fn saw(&mut self, now: Timestamp) {
        self.began.get_or_insert(now);
    }

    /// Until when free places of adopted groups wait for their former holders' first renewal.
    pub(super) fn keeps_places(&self, now: Timestamp, lease_ttl: Duration) -> bool {
        self.began.is_some_and(|began| now < began + (lease_ttl / 2).min(KEPT_MAX))
    }
}

impl Ledger {
    /// Takes over a lease that `holder` has from a former leader. `false` when it cannot be.
    pub(super) fn adopt(&mut self, holder: NodeId, expires: Timestamp, held: &HeldLease) -> bool {
        let known = held.job == self.job.job
            && (self.adoption.taken.len() as u64) < self.quota()
            && !self.adoption.taken.contains(&held.episode);
        let place = known.then(|| match held.purpose {
            Purpose::Train => self.adopt_in_group(held),
            Purpose::Eval { .. } => self.adopt_in_evaluation(held),
        });
        let Some(place) = place.flatten() else { return false };
        self.adoption.taken.insert(held.episode);
        self.leases.insert(held.episode, Lease { holder, expires, place });
        self.counts.adopted += 1;
        true
    }

    fn adopt_in_group(&mut self, held: &HeldLease) -> Option<Place> {
        let (id, size) = (held.group, self.group_size());
        if !self.is_adopted(&id) || self.job.steps >= self.job.spec.steps || self.training.contains(&id) {
            return None;
        }
        if !self.groups.contains_key(&id) {
            let groups_max = self.quota() / size.max(1) as u64;
            if self.adopted_groups() >= groups_max || !self.may_have_been_opened(&held.task) {
                return None;
            }
            let group =
                OpenGroup { task: held.task.clone(), attempts: 0, running: BTreeSet::new(), rollouts: BTreeMap::new() };
            self.groups.insert(id, group);
        }
        let group = self.groups.get_mut(&id)?;
        let came_in = group.rollouts.values().any(|r| r.rollout.episode == held.episode);
        if group.task != held.task || came_in || group.rollouts.len() + group.running.len() >= size {
            return None;
        }
        group.running.insert(held.episode);
        group.attempts = group.attempts.max(held.attempt.saturating_add(1));
        Some(Place::Group(id))
    }

    fn adopt_in_evaluation(&mut self, held: &HeldLease) -> Option<Place> {
        let Purpose::Eval { phase, greedy, slot } = held.purpose else { return None };
        let at = usize::try_from(slot).ok()?;
        let Self { evaluation, tasks, job, .. } = self;
        let Evaluation { slots, .. } = evaluation.as_mut().filter(|e| e.phase == phase)?;
        let slot: &mut EvalSlot = slots.get_mut(at).filter(|s| s.greedy == greedy)?;
        let task = tasks.get(slot.set)?.heldout.get(slot.index as usize)?;
        let is_its_task =
            held.task.set == job.spec.tasks[slot.set].name && held.task.index == slot.index && held.task.id == task.id;
        if !is_its_task || held.group != GroupId::default() || slot.reward.is_some() || slot.running.is_some() {
            return None;
        }
        slot.running = Some(held.episode);
        slot.attempts = slot.attempts.max(held.attempt.saturating_add(1));
        Some(Place::Eval(at))
    }

    /// Whether a leader before this one may have opened a group with `task`: it is a task of the job, and its set's order
    /// came by it within a quota of groups before or behind the place where the last committed step left it.
    fn may_have_been_opened(&mut self, task: &TaskRef) -> bool {
        let Some(set) = self.job.spec.tasks.iter().position(|t| t.name == task.set) else { return false };
        if self.tasks[set].train.get(task.index as usize).is_none_or(|t| t.id != task.id) {
            return false;
        }
        if self.adoption.reachable.is_none() {
            let reach = self.quota() / (self.group_size().max(1) as u64);
            let orders = self.orders.iter().zip(&self.adoption.opened);
            let reachable = orders.map(|(order, opened)| {
                let mut order = order.clone();
                (opened.saturating_sub(reach)..opened.saturating_add(reach)).map(|nth| order.nth(nth)).collect()
            });
            self.adoption.reachable = Some(reachable.collect());
        }
        self.adoption.reachable.as_ref().is_some_and(|sets| sets[set].contains(&task.index))
    }
}
