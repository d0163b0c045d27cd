//! What the next step trains on, and what becomes of it.

use super::{AcceptedRollout, Ledger};
use crate::advantage::{batch_advantages, is_informative};
use crate::ids::{GroupId, PolicyVersion, RolloutId, TaskRef};
use crate::job::CollectionRule;

/// A whole group.
#[derive(Clone, Debug, PartialEq)]
pub struct RolloutGroup {
    /// Its id.
    pub id: GroupId,
    /// Its task.
    pub task: TaskRef,
    /// `group_size` rollouts, in order of id.
    pub rollouts: Vec<AcceptedRollout>,
    /// One per rollout; `None` when the rewards are all equal.
    pub advantages: Option<Vec<f32>>,
}

/// What a step trains on. `groups` may include uninformative ones, which are consumed but carry no gradient.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingBatch {
    /// The version that is trained.
    pub version: PolicyVersion,
    /// The version that the step makes.
    pub next: PolicyVersion,
    /// Whole groups, oldest first.
    pub groups: Vec<RolloutGroup>,
    /// Groups opened per task set, to go with the step.
    pub groups_opened: Vec<u64>,
}

impl TrainingBatch {
    /// Ids of every rollout that the step uses up.
    #[must_use]
    pub fn consumed(&self) -> Vec<RolloutId> {
        self.groups.iter().flat_map(|g| g.rollouts.iter().map(|r| r.id)).collect()
    }
}

impl Ledger {
    /// The next step's batch, once the collection rule is met and no other batch is being trained.
    /// Its groups stay out of reach until [`Ledger::handle_committed`] or [`Ledger::handle_step_failed`].
    pub fn take_batch(&mut self) -> Option<TrainingBatch> {
        if !self.training.is_empty() || self.evaluation.is_some() || self.job.steps >= self.job.spec.steps {
            return None;
        }
        self.drop_stale_groups();
        let target = self.job.spec.groups_per_step as usize;
        let mut counted = 0;
        let (mut picked, mut rewards) = (Vec::new(), Vec::new());
        for (id, group) in self.groups.iter().filter(|(_, g)| self.is_whole(g)) {
            if counted == target {
                break;
            }
            let of_group = group.rewards();
            counted += usize::from(self.job.spec.collection == CollectionRule::Groups || is_informative(&of_group));
            picked.push(*id);
            rewards.push(of_group);
        }
        // Groups without a gradient fill the quota but not the batch: once they take all of it, and of what replaces
        // them, go on with what there is, or a model that always (or never) succeeds would wait for ever. A group that
        // lacks an episode gets another attempt instead.
        let quota_spent = self.accepted() + u64::from(self.job.spec.group_size) > self.quota();
        let all_whole = self.groups.values().all(|g| self.is_whole(g));
        if counted < target && !(quota_spent && all_whole && self.leases.is_empty() && !picked.is_empty()) {
            return None;
        }
        self.training.clone_from(&picked);
        let advantages = batch_advantages(self.job.spec.trainer.algorithm.advantage, &rewards);
        // Copied only now: this is asked after every rollout that comes, and mostly answered with no.
        let copy = |(id, advantages)| {
            let group = self.groups.get(&id)?;
            let rollouts = group.rollouts.values().cloned().collect();
            Some(RolloutGroup { id, task: group.task.clone(), rollouts, advantages })
        };
        Some(TrainingBatch {
            version: self.version,
            next: self.next_version(),
            groups: picked.into_iter().zip(advantages).filter_map(copy).collect(),
            groups_opened: self.groups_opened.clone(),
        })
    }

    pub(super) fn drop_stale_groups(&mut self) {
        let stale: Vec<GroupId> = self
            .groups
            .iter()
            .filter(|(_, g)| g.rollouts.values().any(|r| self.is_stale(Some(r.oldest_version))))
            .map(|(id, _)| *id)
            .collect();
        for id in stale {
            if let Some(g) = self.groups.remove(&id) {
                self.counts.stale_dropped += g.rollouts.len() as u64;
                for e in g.running {
                    self.leases.remove(&e);
                }
            }
        }
    }

    /// The batch's step was committed as `version`.
    pub fn handle_committed(&mut self, version: PolicyVersion, consumed: &[RolloutId]) {
        self.version = version;
        self.job.steps += 1;
        for id in std::mem::take(&mut self.training) {
            self.groups.remove(&id);
        }
        self.consumed.extend(consumed);
        self.drop_stale_groups();
        self.plan_evaluation();
        if self.job.steps >= self.job.spec.steps {
            // Nothing more trains: what still runs is of no use.
            self.groups.clear();
            self.leases.clear();
        }
    }

    /// The step was not committed; its groups may train again.
    pub fn handle_step_failed(&mut self) {
        self.training.clear();
    }
}
