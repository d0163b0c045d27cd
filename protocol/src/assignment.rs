//! What a client is given to run: one episode under a lease.

use crate::ids::{EpisodeId, GroupId, JobId, ModelName, PolicyVersion, TaskRef, Term};
use crate::job::Sampling;
use crate::time::Timestamp;
use serde::{Deserialize, Serialize};

/// Which evaluation of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EvalPhase {
    /// Before the first step.
    Start,
    /// After the last step.
    End,
}

/// What an episode is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// Its rollout may be trained on.
    Train,
    /// Its rollout is only scored.
    Eval {
        /// Which evaluation.
        phase: EvalPhase,
        /// At temperature 0 rather than with the job's sampling.
        greedy: bool,
        /// Place in the evaluation's plan.
        slot: u32,
    },
}

/// A lease as its holder renews it, with what a leader that did not give it needs to take it over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldLease {
    /// The run.
    pub episode: EpisodeId,
    /// Its job.
    pub job: JobId,
    /// Its group; the default id for evaluation.
    pub group: GroupId,
    /// Which run of its place, from 0.
    pub attempt: u32,
    /// What is being done.
    pub task: TaskRef,
    /// Training or evaluation.
    pub purpose: Purpose,
}

impl From<&Assignment> for HeldLease {
    fn from(a: &Assignment) -> Self {
        Self {
            episode: a.episode,
            job: a.job,
            group: a.group,
            attempt: a.attempt,
            task: a.task.clone(),
            purpose: a.purpose,
        }
    }
}

/// One leased episode. The lease is held by the node that claimed it until `lease_expires`, renewed by every claim.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Assignment {
    /// The job.
    pub job: JobId,
    /// The model it trains.
    pub model: ModelName,
    /// This run; a replacement has an id of its own.
    pub episode: EpisodeId,
    /// The group that its rollout belongs to; the default id for evaluation.
    pub group: GroupId,
    /// Which run of this place in the group, from 0.
    pub attempt: u32,
    /// What is to be done.
    pub task: TaskRef,
    /// The task's line, a JSON object, as it stands in the set.
    pub task_line: String,
    /// Training or evaluation.
    pub purpose: Purpose,
    /// Committed version when it was assigned.
    pub policy_version: PolicyVersion,
    /// The term whose leader gave the lease: the fencing token.
    pub term: Term,
    /// Seed of the episode's sampling and of its environment.
    pub seed: u64,
    /// Defaults of requests; binding in a greedy evaluation.
    pub sampling: Sampling,
    /// When the lease ends unless renewed, on the leader's clock.
    pub lease_expires: Timestamp,
    /// The lease's length, so that a holder can time renewals without the leader's clock. Milliseconds.
    pub lease_ttl_ms: u64,
    /// Holders that the rollout needs.
    pub replication: u8,
}
