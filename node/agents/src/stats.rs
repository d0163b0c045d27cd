//! What a runner has done so far.

use crate::cause::AbortCause;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Counters of a [`crate::Runner`], since it was made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunnerStats {
    /// Episodes taken from the host and given to a program.
    pub started: u64,
    /// Episodes whose end was accepted.
    pub ended: u64,
    /// Episodes given up, by [`AbortCause::label`].
    pub aborted: BTreeMap<&'static str, u64>,
    /// Episodes in a program now.
    pub running: usize,
    /// Episodes whose end the host has not accepted yet.
    pub ending: usize,
    /// Worker processes that had to be replaced.
    pub worker_restarts: u64,
    /// Why the host gives fewer episodes than there is room for; `None` while it gives enough.
    pub wait: Option<String>,
    /// The newest failure of the program, in full, with whatever it says for how long its slot pauses.
    pub last_failure: Option<String>,
}

#[derive(Debug, Default)]
pub(crate) struct StatsCell(Mutex<RunnerStats>);

impl StatsCell {
    pub(crate) fn update<T>(&self, change: impl FnOnce(&mut RunnerStats) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn aborted(&self, cause: &AbortCause) {
        self.update(|s| *s.aborted.entry(cause.label()).or_default() += 1);
    }
}
