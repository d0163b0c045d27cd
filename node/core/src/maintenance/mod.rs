//! What a holder does so that nothing is lost and nothing piles up, a bounded piece at a time.
//!
//! ```text
//! beat ─▶ who lives, who is gone for too long ─▶ sweep: a page of rollouts, or one manifest ─▶ copies sent
//!      └▶ collector: consumed rollouts, old weights, orphans                └▶ who answers for it: protocol::repair
//! ```
//!
//! A *sweep* goes once over everything that must lie on several nodes. After a change of membership it goes as fast as
//! [`MaintenanceConfig::urgent_beat`] allows, else one piece at each slow beat, which finds what no change announced:
//! copies that were lost on a disk, puts that failed.

mod collector;
mod drain;
mod manifests;
mod rollouts;
mod sweep;

use crate::blobs::Blobs;
use crate::consensus::Groups;
use crate::leader::Clock;
use crate::membership::Membership;
use crate::models::Models;
use crate::rollouts::Rollouts;
use crate::runtime::{blocking, spawn};
use crate::watch::lock;
pub use collector::{Collected, Collector, Known};
pub use drain::{DrainError, DrainReport};
use serde::Serialize;
use starling_protocol::control::ModelState;
use starling_protocol::record::Intake;
use starling_protocol::repair::{Absences, Holders};
use starling_protocol::{ModelName, NodeId, Timestamp};
use starling_storage::{SharedStore, Store};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use sweep::Sweep;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Copies of weights, optimizer states, files and task sets: what placing new weights aims at.
pub(crate) const BLOB_REPLICATION: usize = 2;
/// With less room than this a store is full: two of the longest rollouts.
const FULL_BELOW_BYTES: u64 = 8 << 20;
/// With this much room a full store is open again. Twice as much, so that it does not change at each put.
const OPEN_FROM_BYTES: u64 = 16 << 20;
/// Stands for "nothing limits it".
const UNLIMITED: u64 = u64::MAX;

/// How fast, and how long things are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MaintenanceConfig {
    /// Between two pieces of work when nothing is wrong. Default 5 s: 512 rollouts and one manifest are checked then, so
    /// 40,000 rollouts take seven minutes.
    pub beat: Duration,
    /// Between two pieces after a change of membership. Default 200 ms: 2,560 rollouts a second are checked, and at
    /// most 16 MiB of them sent, 80 MiB/s.
    pub urgent_beat: Duration,
    /// A holder that is gone for longer is replaced. Default 30 s: most restarts are over by then, and copying what a
    /// node held for a reboot of it would be in vain. A node that starts waits as long before it copies anything.
    pub grace: Duration,
    /// How long a rollout is kept after a step consumed it. Default one day, for people who look at rollouts.
    pub rollouts_kept: Duration,
    /// Committed versions whose weights and optimizer states are kept beside what a model's state names. Default 4.
    pub versions_kept: u64,
    /// How long a chunk must have been of no use before it is deleted. Default one hour: chunks of weights and files
    /// lie here before the log entry that names them.
    pub orphans_kept: Duration,
}

impl Default for MaintenanceConfig {
    fn default() -> Self {
        Self {
            beat: Duration::from_secs(5),
            urgent_beat: Duration::from_millis(200),
            grace: Duration::from_secs(30),
            rollouts_kept: Duration::from_secs(86_400),
            versions_kept: 4,
            orphans_kept: Duration::from_secs(3600),
        }
    }
}

/// What maintenance works with.
#[derive(Clone)]
pub(crate) struct Parts {
    pub(crate) store: SharedStore,
    pub(crate) membership: Arc<Membership>,
    pub(crate) groups: Arc<Groups>,
    pub(crate) models: Arc<Models>,
    pub(crate) rollouts: Arc<Rollouts>,
    pub(crate) blobs: Blobs,
    pub(crate) clock: Clock,
    pub(crate) node: NodeId,
}

/// What maintenance did since the node started, and what it does now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MaintenanceStatus {
    /// Rollouts looked at in the sweep under way.
    pub checked: u64,
    /// Sweeps completed.
    pub sweeps: u64,
    /// Copies of rollouts sent to other holders.
    pub rollouts_restored: u64,
    /// Manifests that another holder fetched on this node's word.
    pub manifests_restored: u64,
    /// Consumed rollouts deleted.
    pub rollouts_deleted: u64,
    /// Chunks deleted.
    pub blobs_deleted: u64,
    /// Whether it hurries after a change of membership.
    pub urgent: bool,
    /// Why something is not on enough nodes yet, or could not be deleted.
    pub trouble: Option<String>,
}

/// The maintenance of one node.
pub struct Maintenance {
    parts: Parts,
    config: MaintenanceConfig,
    status: Mutex<MaintenanceStatus>,
    intake: Mutex<Intake>,
    headroom_bytes: AtomicU64,
    drain: Mutex<drain::Drain>,
    wake: Notify,
}

impl std::fmt::Debug for Maintenance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Maintenance").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Maintenance {
    /// Starts the loop; must run inside a tokio runtime.
    pub(crate) fn start(parts: Parts, config: MaintenanceConfig, shutdown: CancellationToken) -> Arc<Self> {
        let this = Arc::new(Self {
            parts,
            config,
            status: Mutex::default(),
            intake: Mutex::default(),
            headroom_bytes: AtomicU64::new(UNLIMITED),
            drain: Mutex::default(),
            wake: Notify::new(),
        });
        drop(spawn(this.clone().run(shutdown)));
        this
    }

    /// What it did and does.
    #[must_use]
    pub fn status(&self) -> MaintenanceStatus {
        lock(&self.status).clone()
    }

    /// Whether this node takes more to hold, for its record.
    #[must_use]
    pub fn intake(&self) -> Intake {
        if self.is_draining() { Intake::Draining } else { *lock(&self.intake) }
    }

    /// Bytes that this node may still take, as of the last beat; `None` when nothing limits them.
    #[must_use]
    pub fn headroom_bytes(&self) -> Option<u64> {
        Some(self.headroom_bytes.load(Ordering::Relaxed)).filter(|b| *b != UNLIMITED)
    }

    async fn run(self: Arc<Self>, shutdown: CancellationToken) {
        let started = Instant::now();
        let mut members = self.parts.membership.watch_holders();
        let mut absences = Absences::default();
        let mut sweep = Sweep::default();
        let mut collector = Collector::default();
        let mut next_collection = started;
        // A node that has just started knows nobody, and everybody would seem to have lost everything.
        let ready = started + self.config.grace;
        loop {
            let now = Timestamp(0) + started.elapsed();
            if absences.handle_live(now, self.live_holders(), self.config.grace) {
                sweep.hurry();
            }
            self.measure().await;
            let leaving = self.is_draining();
            let waiting = Instant::now() < ready && !leaving;
            if !waiting {
                sweep.step(&self, &self.holders(absences.away(), leaving), leaving).await;
            }
            if Instant::now() >= next_collection {
                next_collection = Instant::now() + self.config.beat;
                collector = self.collect(collector).await;
            }
            lock(&self.status).urgent = sweep.is_urgent();
            let pause = if sweep.is_urgent() && !waiting { self.config.urgent_beat } else { self.config.beat };
            let grace_ends = absences.poll_timeout(self.config.grace).map(|at| started + at.since(Timestamp(0)));
            let next = (Instant::now() + pause).min(grace_ends.unwrap_or(Instant::now() + pause));
            tokio::select! {
                biased;
                () = shutdown.cancelled() => return,
                changed = members.changed() => if changed.is_err() { return },
                () = self.wake.notified() => sweep.hurry(),
                () = tokio::time::sleep_until(next) => {}
            }
        }
    }

    fn live_holders(&self) -> BTreeSet<NodeId> {
        self.parts.membership.live_holders().into_iter().collect()
    }

    fn holders(&self, away: BTreeSet<NodeId>, leaving: bool) -> Holders {
        let mut holders = Holders { away, ..Holders::default() };
        for (node, intake) in self.parts.membership.of_holders(|r| Some((r.node, r.intake))) {
            match intake {
                // The own record may not say so yet.
                _ if leaving && node == self.parts.node => {}
                Intake::Open => drop(holders.open.insert(node)),
                Intake::Full => drop(holders.full.insert(node)),
                Intake::Draining => {}
            }
        }
        holders
    }

    /// Asks the store how much room there is.
    async fn measure(&self) {
        let store = self.parts.store.clone();
        let room = match blocking(move || store.headroom_bytes()).await {
            Ok(Ok(room)) => room,
            Ok(Err(e)) => {
                tracing::warn!(error = %e, "cannot tell how much room the store has");
                return;
            }
            Err(_stopped) => return,
        };
        self.headroom_bytes.store(room.unwrap_or(UNLIMITED), Ordering::Relaxed);
        let mut intake = lock(&self.intake);
        let before = *intake;
        match room {
            Some(bytes) if bytes < FULL_BELOW_BYTES => *intake = Intake::Full,
            Some(bytes) if bytes < OPEN_FROM_BYTES => {}
            _ => *intake = Intake::Open,
        }
        if *intake != before {
            tracing::warn!(room_bytes = room, intake = ?*intake, "the store's room changed what this node takes");
        }
    }

    /// The states of the models whose groups this node is in.
    fn states(&self) -> Vec<(ModelName, Arc<ModelState>)> {
        let groups = &self.parts.groups;
        groups.models().into_iter().filter_map(|m| groups.state(&m).map(|s| (m, s.borrow().clone()))).collect()
    }

    async fn collect(&self, mut collector: Collector) -> Collector {
        let models = self.states();
        // Who does not know a model's state cannot tell what of it is of use.
        let complete = self.parts.models.list().iter().all(|a| models.iter().any(|(m, _)| *m == a.model));
        let known = Known { models, complete, now: (self.parts.clock)() };
        let (store, config) = (self.parts.store.clone(), self.config.clone());
        let full = *lock(&self.intake) == Intake::Full;
        let done = blocking(move || {
            let collected = collector.step(&*store, &known, &config, full);
            (collector, collected)
        })
        .await;
        let Ok((collector, collected)) = done else { return Collector::default() };
        match collected {
            Ok(c) => {
                let mut status = lock(&self.status);
                status.rollouts_deleted += c.rollouts;
                status.blobs_deleted += c.blobs;
            }
            Err(e) => {
                tracing::warn!(error = %e, "cannot delete what is no longer needed");
                self.tell_trouble(Some(format!("deleting: {e}")));
            }
        }
        collector
    }

    fn tell_trouble(&self, trouble: Option<String>) {
        lock(&self.status).trouble = trouble;
    }
}
