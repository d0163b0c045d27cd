//! The leader's ledger of one job: who runs what, what came in, what the next step trains on.
//!
//! Sans-IO. The optimizer leader owns one per term and feeds it claims, verified rollouts, aborts and time;
//! it answers with assignments, batches and finished evaluations. It is rebuilt at the start of a term from
//! [`JobState`] and the unconsumed rollouts of the stores, so it needs no storage of its own.
//!
//! Admission (AReaL, arXiv:2505.24298 §4.1, with `accepted := consumed` after a restart): episodes accepted
//! but not yet consumed plus episodes running stay at or under `(η + 1)·B`, B the episodes of a step and η the
//! job's `staleness_max`. So a rollout is at most η versions old when it trains, unless its episode was slow;
//! groups that grew too old are dropped whole and reported. Clients hold small blocks of it ahead (`blocks`). Dynamic
//! sampling adds room for the replacement of groups without a gradient: [`Ledger::quota`].

mod admission;
mod adoption;
mod batch;
mod blocks;
mod evaluation;
mod leases;

pub use admission::{Admission, Surplus};
pub use batch::{RolloutGroup, TrainingBatch};

use crate::advantage::is_informative;
use crate::control::JobState;
use crate::ids::{EpisodeId, GroupId, NodeId, PolicyVersion, RolloutId, TaskRef, Term};
use crate::job::CollectionRule;
use crate::lineage::Lineage;
use crate::planted::{self, Bug};
use crate::rollout::Rollout;
use crate::task::{Task, TaskOrder};
use crate::time::Timestamp;
use std::collections::{BTreeMap, BTreeSet};

use adoption::Adoption;
use blocks::Block;
use evaluation::Evaluation;
use leases::Lease;

/// Most episodes in one answer to a claim.
pub const CLAIM_MAX: usize = 256;
/// Most evaluation episodes that run at once.
const EVAL_RUNNING_MAX: usize = 512;

/// Dynamic sampling replaces groups without a gradient by up to so many steps' worth of episodes, then the step goes on
/// with what it has; verl's recipe for DAPO gives up after 10 tries.
const REPLACED_STEPS_MAX: u64 = 4;

/// The task sets of a job, read.
#[derive(Clone, Debug)]
pub struct LoadedTasks {
    /// Training tasks.
    pub train: Vec<Task>,
    /// Held-out tasks; empty when the job has none.
    pub heldout: Vec<Task>,
}

/// A rollout that counts.
#[derive(Clone, Debug, PartialEq)]
pub struct AcceptedRollout {
    /// Its address.
    pub id: RolloutId,
    /// What it says.
    pub rollout: Rollout,
    /// Oldest version that sampled a trained token; the assigning version when no token trains.
    pub oldest_version: PolicyVersion,
}

/// Counters since the start of the term, for status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LedgerCounts {
    /// Episodes assigned.
    pub assigned: u64,
    /// Rollouts accepted.
    pub accepted: u64,
    /// Rollouts ignored.
    pub ignored: u64,
    /// Rollouts refused as invalid.
    pub invalid: u64,
    /// Episodes aborted by their holder.
    pub aborted: u64,
    /// Leases of a former leader that were taken over.
    pub adopted: u64,
    /// Leases that ran out.
    pub expired: u64,
    /// Rollouts dropped with a group that grew too old.
    pub stale_dropped: u64,
}

#[derive(Clone, Debug)]
struct OpenGroup {
    task: TaskRef,
    attempts: u32,
    running: BTreeSet<EpisodeId>,
    rollouts: BTreeMap<RolloutId, AcceptedRollout>,
}

impl OpenGroup {
    fn rewards(&self) -> Vec<f32> {
        self.rollouts.values().map(|r| r.rollout.reward).collect()
    }
}

/// See the module's text.
#[derive(Debug)]
pub struct Ledger {
    job: JobState,
    term: Term,
    version: PolicyVersion,
    lineage: Lineage,
    tasks: Vec<LoadedTasks>,
    orders: Vec<TaskOrder>,
    groups_opened: Vec<u64>,
    /// Groups of this term below it are of an earlier start of the same leader.
    first_seq: u64,
    group_seq: u64,
    episode_seq: u64,
    groups: BTreeMap<GroupId, OpenGroup>,
    leases: BTreeMap<EpisodeId, Lease>,
    training: Vec<GroupId>,
    consumed: BTreeSet<RolloutId>,
    evaluation: Option<Evaluation>,
    adoption: Adoption,
    /// Of each client that has one.
    blocks: BTreeMap<NodeId, Block>,
    /// Clients whose last claim was held back for want of places, and when.
    hungry: BTreeMap<NodeId, Timestamp>,
    counts: LedgerCounts,
}

impl Ledger {
    /// For `job` as its log stands at `version`, led in `term`. `tasks` are its sets in the job's order.
    ///
    /// # Panics
    /// When `tasks` are not one per set of the job, or a training set is empty: the caller reads both from the job.
    #[must_use]
    pub fn new(job: JobState, term: Term, version: PolicyVersion, tasks: Vec<LoadedTasks>) -> Self {
        assert_eq!(tasks.len(), job.spec.tasks.len(), "one loaded set per task set of the job");
        assert!(tasks.iter().all(|t| !t.train.is_empty()), "no training set is empty");
        let orders = tasks
            .iter()
            .enumerate()
            .map(|(i, t)| {
                TaskOrder::new(job.spec.seed.wrapping_add(i as u64), u32::try_from(t.train.len()).unwrap_or(u32::MAX))
            })
            .collect();
        let mut groups_opened = job.groups_opened.clone();
        groups_opened.resize(tasks.len(), 0);
        let adoption = Adoption::new(groups_opened.clone());
        let mut ledger = Self {
            job,
            term,
            version,
            lineage: Lineage::default(),
            tasks,
            orders,
            groups_opened,
            first_seq: 0,
            group_seq: 0,
            episode_seq: 0,
            groups: BTreeMap::new(),
            leases: BTreeMap::new(),
            training: Vec::new(),
            consumed: BTreeSet::new(),
            evaluation: None,
            adoption,
            blocks: BTreeMap::new(),
            hungry: BTreeMap::new(),
            counts: LedgerCounts::default(),
        };
        ledger.plan_evaluation();
        ledger
    }

    /// Counts groups and episodes from `first` on. A leader may start over within its term (its quorum was silent for a
    /// while, its process was restarted); then it must not draw the same ids again, so every start takes a higher
    /// number than the one before could reach. Groups of its former starts are adopted like those of former terms.
    #[must_use]
    pub fn counting_from(mut self, first: u64) -> Self {
        (self.first_seq, self.group_seq, self.episode_seq) = (first, first, first);
        self
    }

    /// In this line; without it, in that of the model's creation.
    #[must_use]
    pub fn of_line(mut self, lineage: Lineage) -> Self {
        self.lineage = lineage;
        self
    }

    /// Whether whoever opened the group is gone: another leader, or this one before it started over, or that of a line
    /// that this one won against.
    fn is_adopted(&self, id: &GroupId) -> bool {
        id.term.mark() != self.term.mark() || *id < GroupId { term: self.term, seq: self.first_seq }
    }

    /// The job as this ledger sees it.
    #[must_use]
    pub fn job(&self) -> &JobState {
        &self.job
    }
    /// The version that the next step trains.
    #[must_use]
    pub fn version(&self) -> PolicyVersion {
        self.version
    }
    /// The version that the next step makes.
    #[must_use]
    pub fn next_version(&self) -> PolicyVersion {
        self.lineage.next(self.version)
    }
    /// Counters since the start of the term.
    #[must_use]
    pub fn counts(&self) -> &LedgerCounts {
        &self.counts
    }
    /// Episodes leased now.
    #[must_use]
    pub fn running(&self) -> u64 {
        self.leases.len() as u64
    }
    /// Accepted rollouts that no step consumed yet.
    #[must_use]
    pub fn accepted(&self) -> u64 {
        self.groups.values().map(|g| g.rollouts.len() as u64).sum()
    }
    /// Whole groups that could train now.
    #[must_use]
    pub fn whole_groups(&self) -> u64 {
        self.groups.values().filter(|g| self.is_whole(g)).count() as u64
    }
    /// Groups that a leader of an earlier term opened; they are completed on top of the quota, or a full quota of
    /// broken groups would wait for ever.
    #[must_use]
    pub fn adopted_groups(&self) -> u64 {
        self.groups.keys().filter(|id| self.is_adopted(id)).count() as u64
    }
    /// All steps and evaluations of the job are done.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.evaluation.is_none() && self.job.steps >= self.job.spec.steps
    }
    /// Most episodes accepted and running at once: `(η + 1)·B`, and under dynamic sampling as many more as replace whole
    /// groups without a gradient, up to `4·B`.
    #[must_use]
    pub fn quota(&self) -> u64 {
        let step = self.job.spec.episodes_per_step();
        (u64::from(self.job.spec.staleness_max) + 1) * step + self.replaced().min(REPLACED_STEPS_MAX * step)
    }

    /// Episodes of whole groups that dynamic sampling replaces.
    fn replaced(&self) -> u64 {
        if self.job.spec.collection == CollectionRule::Groups {
            return 0;
        }
        let dull = self.groups.values().filter(|g| self.is_whole(g) && !is_informative(&g.rewards()));
        dull.map(|g| g.rollouts.len() as u64).sum()
    }

    fn group_size(&self) -> usize {
        self.job.spec.group_size as usize
    }

    fn is_whole(&self, g: &OpenGroup) -> bool {
        let have = if planted::has(Bug::CountTimelines) {
            g.rollouts.values().map(|r| r.rollout.timelines.len()).sum()
        } else {
            g.rollouts.len()
        };
        have >= self.group_size()
    }
}
