//! One property a file, by its number in `ARCHITECTURE.md`. Each looks at every event.

mod i10_hashes;
mod i11_bounds;
mod i1_one_leader;
mod i2_version_chain;
mod i3_consumed_once;
mod i4_nothing_lost;
mod i5_fresh_and_verified;
mod i6_deposed_commits_nothing;
mod i7_convergence;
mod i8_never_back;
mod i9_one_lease;
mod named_waits;
mod whole_groups;

use crate::event::{Event, NodeIx};
use crate::oracle::Oracle;
use crate::scenario::Job;
use std::time::Duration;

/// What a checker found: the states that conflict.
pub type Conflict = String;

/// A property of runs. I12 (same seed, same trace) is a property of pairs of runs: see `run::replays`.
pub trait Invariant: Send {
    /// Number and words.
    fn name(&self) -> &'static str;
    /// Looks at an event that `oracle` knows already.
    ///
    /// # Errors
    /// The states that conflict.
    fn on_event(&mut self, at: Duration, event: &Event, oracle: &Oracle) -> Result<(), Conflict>;
    /// Looks at the end of the run.
    ///
    /// # Errors
    /// The states that conflict.
    fn at_end(&mut self, _end: &End<'_>, _oracle: &Oracle) -> Result<(), Conflict> {
        Ok(())
    }
}

/// How a run ended.
#[derive(Clone, Copy, Debug)]
pub struct End<'a> {
    /// Nodes with the server role that are up.
    pub servers: &'a [NodeIx],
    /// The models.
    pub models: &'a [starling_protocol::ModelName],
    /// Steps committed by the time of the heal.
    pub steps_at_heal: u64,
    /// All models' jobs had committed every step by then.
    pub jobs_done: bool,
    /// How long the liveness phase took at most.
    pub limit: Duration,
    /// What each node that is not where it should be says of itself.
    pub said: &'a [(NodeIx, String)],
    /// Everything was as it should be within the limit.
    pub converged: bool,
}

/// Every checker, for a scenario's job.
#[must_use]
pub fn all(job: &Job) -> Vec<Box<dyn Invariant>> {
    let (staleness_max, replication) = (u64::from(job.staleness_max), u32::from(job.replication));
    let (group_size, groups_per_step) = (job.group_size as usize, job.groups_per_step as usize);
    vec![
        Box::new(i1_one_leader::OneLeader::default()),
        Box::new(i2_version_chain::VersionChain),
        Box::new(i3_consumed_once::ConsumedOnce::default()),
        Box::new(i4_nothing_lost::NothingLost { replication }),
        Box::new(i5_fresh_and_verified::FreshAndVerified { staleness_max }),
        Box::new(i6_deposed_commits_nothing::DeposedCommitsNothing::default()),
        Box::new(i7_convergence::Convergence),
        Box::new(i8_never_back::NeverBack::default()),
        Box::new(i9_one_lease::OneLease::default()),
        Box::new(i10_hashes::Hashes),
        Box::new(i11_bounds::Bounds),
        Box::new(named_waits::NamedWaits),
        Box::new(whole_groups::WholeGroups { group_size, groups_per_step }),
    ]
}
