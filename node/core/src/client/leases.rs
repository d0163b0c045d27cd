//! Leases, as this node knows them: what to renew, when, and until when they surely last.

use crate::leader::Clock;
use crate::watch::{self, lock};
use starling_protocol::assignment::{Assignment, HeldLease};
use starling_protocol::{EpisodeId, Timestamp};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;
use std::time::Duration;

/// Renewals within a lease's length: two may be lost or late.
const RENEWALS_PER_LEASE: u32 = 3;
/// Between two renewals at least: the shortest lease a job may have is 1 s, and a claim may take as long as a call.
const RENEW_EVERY_MIN: Duration = Duration::from_millis(200);
/// Between two renewals at most, however long the leases are: a claim also brings what was revoked.
const RENEW_EVERY_MAX: Duration = Duration::from_secs(5);
/// Episodes that are remembered as ended here: whoever ran them hears of it within a claim.
const CLOSED_MAX: usize = 256;
/// Lengths after which a lease that was neither renewed nor ended is forgotten.
const FORGOTTEN_AFTER: u32 = 10;

/// A lease that this node holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Lease {
    /// What was assigned.
    pub assignment: Assignment,
    /// Given or renewed at, on this node's clock. It surely lasts for the assignment's `lease_ttl_ms` from then, less
    /// the time of the answer's way.
    pub renewed: Timestamp,
}

impl Lease {
    fn length(&self) -> Duration {
        Duration::from_millis(self.assignment.lease_ttl_ms)
    }

    fn renewal_at(&self) -> Timestamp {
        self.renewed + (self.length() / RENEWALS_PER_LEASE).clamp(RENEW_EVERY_MIN, RENEW_EVERY_MAX)
    }
}

/// All leases of this node.
#[derive(Debug)]
pub(super) struct Leases {
    held: Mutex<BTreeMap<EpisodeId, Lease>>,
    /// Episodes that were ended or given back here, oldest first: no longer leased, and not revoked.
    closed: Mutex<VecDeque<EpisodeId>>,
    /// Grows with every change: the next renewal may be due earlier.
    changed: watch::Sender<u64>,
}

impl Default for Leases {
    fn default() -> Self {
        let (changed, _) = watch::channel(0);
        Self { held: Mutex::default(), closed: Mutex::default(), changed }
    }
}

impl Leases {
    /// Takes in what a claim at `now` brought.
    pub(super) fn note(
        &self,
        now: Timestamp,
        assignments: &[Assignment],
        renewed: &[HeldLease],
        revoked: &[EpisodeId],
    ) {
        let mut held = lock(&self.held);
        for r in renewed {
            if let Some(l) = held.get_mut(&r.episode) {
                l.renewed = now;
            }
        }
        for id in revoked {
            held.remove(id);
        }
        for a in assignments {
            held.insert(a.episode, Lease { assignment: a.clone(), renewed: now });
        }
        // Episodes that ended long ago without a word.
        held.retain(|_, l| now.since(l.renewed) < l.length() * FORGOTTEN_AFTER);
        drop(held);
        self.changed.modify(|n| {
            *n += 1;
            true
        });
    }

    pub(super) fn get(&self, episode: EpisodeId) -> Option<Lease> {
        lock(&self.held).get(&episode).cloned()
    }

    /// Whether the lease lasts at `now`, as far as this node can know.
    pub(super) fn is_sure(&self, now: Timestamp, episode: EpisodeId) -> bool {
        lock(&self.held).get(&episode).is_some_and(|l| now.since(l.renewed) < l.length())
    }

    /// The episode was ended here, or given back.
    pub(super) fn forget(&self, episode: EpisodeId) {
        lock(&self.held).remove(&episode);
        let mut closed = lock(&self.closed);
        closed.push_back(episode);
        if closed.len() > CLOSED_MAX {
            closed.pop_front();
        }
    }

    /// Those of `running` whose lease was lost, whoever was told of it first.
    pub(super) fn lost(&self, running: &[EpisodeId]) -> Vec<EpisodeId> {
        let (held, closed) = (lock(&self.held), lock(&self.closed));
        running.iter().filter(|id| !held.contains_key(id) && !closed.contains(id)).copied().collect()
    }

    /// See [`super::Client::renewal_due`].
    pub(super) async fn renewal_due(&self, clock: &Clock) {
        let mut changed = self.changed.receiver();
        // Leases that a claim should have renewed and did not are due already: without a pause the caller's loop would
        // spin while the leader is away.
        let earliest = tokio::time::Instant::now() + RENEW_EVERY_MIN;
        loop {
            let due = lock(&self.held).values().map(Lease::renewal_at).min();
            let due = due.map(|at| earliest.max(tokio::time::Instant::now() + at.since(clock())));
            let sleep = async {
                match due {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = sleep => return,
                Ok(()) = changed.changed() => {}
            }
        }
    }
}
