//! Once over everything that must lie on several nodes: rollouts page by page, then manifests one by one.

use super::Maintenance;
use crate::watch::lock;
use starling_protocol::repair::Holders;
use starling_protocol::{Hash, JobId, RolloutId};

/// Where a sweep stands.
#[derive(Clone, Copy, Debug)]
enum At {
    /// After this row of the index; `None` for its beginning.
    Rollouts(Option<(JobId, RolloutId)>),
    /// After this manifest; `None` before the first.
    Manifests(Option<Hash>),
}

/// A piece of a sweep, done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Piece<C> {
    /// Where to go on; `None` when this part of the sweep is complete.
    pub(super) next: Option<C>,
    /// Copies sent, and stored there.
    pub(super) restored: u64,
    /// Things of which it is not certain that they lie on enough nodes.
    pub(super) uncertain: u64,
}

/// The sweep under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sweep {
    at: At,
    urgent: bool,
    /// Of this sweep so far.
    uncertain: u64,
    /// Everything so far was looked at while this node was leaving.
    leaving: bool,
}

impl Default for Sweep {
    fn default() -> Self {
        Self { at: At::Rollouts(None), urgent: false, uncertain: 0, leaving: true }
    }
}

impl Sweep {
    /// Starts over, and fast: who may hold things changed.
    pub(super) fn hurry(&mut self) {
        *self = Self { urgent: true, ..Self::default() };
    }

    pub(super) fn is_urgent(&self) -> bool {
        self.urgent
    }

    /// One piece.
    pub(super) async fn step(&mut self, m: &Maintenance, holders: &Holders, leaving: bool) {
        self.leaving &= leaving;
        match self.at {
            At::Rollouts(after) => {
                let (piece, checked) = m.sweep_rollouts(after, holders, leaving).await;
                self.uncertain += piece.uncertain;
                self.at = piece.next.map_or(At::Manifests(None), |at| At::Rollouts(Some(at)));
                let mut status = lock(&m.status);
                status.checked += checked;
                status.rollouts_restored += piece.restored;
            }
            At::Manifests(after) => {
                let piece = m.sweep_manifest(after, holders, leaving).await;
                self.uncertain += piece.uncertain;
                lock(&m.status).manifests_restored += piece.restored;
                match piece.next {
                    Some(at) => self.at = At::Manifests(Some(at)),
                    None => self.complete(m),
                }
            }
        }
    }

    fn complete(&mut self, m: &Maintenance) {
        {
            let mut status = lock(&m.status);
            status.sweeps += 1;
            status.checked = 0;
            if self.uncertain == 0 {
                status.trouble = None;
            }
        }
        m.handle_swept(self.leaving, self.uncertain);
        // What could not be done is tried again at the slow beat: whoever did not answer is either about to be known
        // dead, which hurries, or busy.
        *self = Self::default();
    }
}
