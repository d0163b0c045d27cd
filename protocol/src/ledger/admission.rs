//! Rollouts that come: which of them count.

use super::{AcceptedRollout, Ledger, OpenGroup};
use crate::assignment::Purpose;
use crate::ids::PolicyVersion;
use crate::planted::{self, Bug};
use crate::rollout::VerifiedRollout;
use std::collections::{BTreeMap, BTreeSet};

/// What the ledger made of a rollout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Admission {
    /// It counts.
    Accepted,
    /// It is valid but of no use, and why.
    Ignored(Surplus),
    /// It is not of this job, or says something that cannot be.
    Invalid(String),
}

/// Why a valid rollout is of no use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Surplus {
    /// Already accepted.
    Known,
    /// A step consumed it.
    Consumed,
    /// Its group is full.
    GroupFull,
    /// Its group was trained on, grew too old, or its job is over.
    GroupClosed,
    /// Too many versions old.
    Stale,
    /// Its evaluation is over, or the place in it is taken.
    EvaluationOver,
}

impl Ledger {
    /// Takes a verified rollout, whoever delivered it and how often.
    pub fn handle_rollout(&mut self, v: VerifiedRollout) -> Admission {
        let admission = self.admit(v);
        match &admission {
            Admission::Accepted => self.counts.accepted += 1,
            Admission::Ignored(_) => self.counts.ignored += 1,
            Admission::Invalid(_) => self.counts.invalid += 1,
        }
        admission
    }

    pub(super) fn admit(&mut self, v: VerifiedRollout) -> Admission {
        let r = &v.rollout;
        if r.job != self.job.job || r.model != self.job.spec.model {
            return Admission::Invalid(format!("rollout of job {}, expected {}", r.job, self.job.job));
        }
        if self.consumed.contains(&v.id) {
            return Admission::Ignored(Surplus::Consumed);
        }
        let versions = || r.timelines.iter().flat_map(|t| &t.policy_versions);
        if let Some(newest) = versions().filter(|v| self.lineage.contains(**v)).max()
            && *newest > self.version
        {
            return Admission::Invalid(format!("sampled by version {newest}, the newest is {}", self.version));
        }
        // Of a line that went another way: how old it is cannot be said.
        let mut trained = r.timelines.iter().flat_map(|t| t.loss_mask.iter().zip(&t.policy_versions));
        let orphaned = trained.any(|(trains, v)| *trains && !self.lineage.contains(*v));
        let lease = self.release(r.episode);
        if orphaned && !planted::has(Bug::AdmitStale) {
            return Admission::Ignored(Surplus::Stale);
        }
        match r.purpose {
            Purpose::Eval { phase, greedy, slot } => self.admit_eval(&v, phase, greedy, slot),
            Purpose::Train => self.admit_train(v, lease.is_some()),
        }
    }

    pub(super) fn admit_train(&mut self, v: VerifiedRollout, leased: bool) -> Admission {
        let id = v.rollout.group;
        if !self.groups.contains_key(&id) {
            let adopted = self.is_adopted(&id);
            if !adopted && id.term == self.term && id.seq < self.group_seq {
                return Admission::Ignored(Surplus::GroupClosed);
            }
            // A group whose leader is gone: its rollouts are as good as any.
            if !adopted || leased {
                return Admission::Invalid(format!("group {id:?} was not opened in term {}", self.term));
            }
            let set = self.job.spec.tasks.iter().position(|t| t.name == v.rollout.task.set);
            let known = set.and_then(|s| self.tasks[s].train.get(v.rollout.task.index as usize));
            if known.is_none_or(|t| t.id != v.rollout.task.id) {
                return Admission::Invalid(format!("unknown task {:?}", v.rollout.task));
            }
            if self.is_stale(v.oldest_version()) {
                return Admission::Ignored(Surplus::Stale);
            }
            let task = v.rollout.task.clone();
            self.groups
                .insert(id, OpenGroup { task, attempts: 0, running: BTreeSet::new(), rollouts: BTreeMap::new() });
        }
        let (size, stale) = (self.group_size(), self.is_stale(v.oldest_version()));
        let (in_training, version) = (self.training.contains(&id), self.version);
        #[expect(clippy::expect_used, reason = "inserted just above when it was missing")]
        let group = self.groups.get_mut(&id).expect("group is open");
        if group.task != v.rollout.task {
            return Admission::Invalid(format!("task {:?}, its group has {:?}", v.rollout.task, group.task));
        }
        if group.rollouts.contains_key(&v.id) {
            return Admission::Ignored(Surplus::Known);
        }
        if in_training || group.rollouts.len() >= size {
            return Admission::Ignored(Surplus::GroupFull);
        }
        if stale {
            return Admission::Ignored(Surplus::Stale);
        }
        if group.rollouts.values().any(|o| o.rollout.episode == v.rollout.episode) {
            return Admission::Invalid(format!("a second rollout of episode {}", v.rollout.episode));
        }
        let oldest_version = v.oldest_version().unwrap_or(version);
        group.rollouts.insert(v.id, AcceptedRollout { id: v.id, rollout: v.rollout, oldest_version });
        // A late rollout took the place of its replacement: that one is surplus now.
        while group.rollouts.len() + group.running.len() > size {
            let Some(surplus) = group.running.pop_last() else { break };
            self.leases.remove(&surplus);
        }
        Admission::Accepted
    }

    pub(super) fn is_stale(&self, oldest: Option<PolicyVersion>) -> bool {
        !planted::has(Bug::AdmitStale)
            && oldest.is_some_and(|o| {
                let staleness = self.lineage.staleness(self.version, o);
                staleness.is_none_or(|s| s > u64::from(self.job.spec.staleness_max))
            })
    }
}
