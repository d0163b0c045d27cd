//! Deletes what is no longer of use: rollouts some time after a step consumed them, chunks that nothing names.
//!
//! What must never be deleted is not even looked at: a rollout goes only when this node's own log says that a committed
//! step consumed it, and when.

use super::MaintenanceConfig;
use starling_protocol::control::ModelState;
use starling_protocol::manifest::Manifest;
use starling_protocol::{Hash, JobId, ModelName, PolicyVersion, RolloutId, Timestamp};
use starling_storage::{Store, StoreError, blobs, rollouts, steps};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Rows of the index of rollouts looked at in a step: about 10 ms.
const ROLLOUT_ROWS: usize = 2048;
/// Rows of the index of chunks looked at in a step: 4 GiB of chunks.
const BLOB_ROWS: usize = 4096;
/// Chunks remembered as of no use: 64 Ki × 80 bytes = 5 MiB. More are noticed when these are gone.
const ORPHANS_MAX: usize = 1 << 16;
/// Deleted bytes that are worth a [`Store::reclaim`], which copies what shares files with them.
const RECLAIM_BYTES: u64 = 256 << 20;
/// What a reclaim gives back is at least one part in so many of the store: it copies three times that at most.
const RECLAIM_SHARE: u64 = 4;

/// What the node knows when it collects.
#[derive(Clone, Debug)]
pub struct Known {
    /// The models whose groups it is in.
    pub models: Vec<(ModelName, Arc<ModelState>)>,
    /// Whether these are all models that it has heard of. If not, it cannot tell which chunks are of use.
    pub complete: bool,
    /// The wall clock, as in [`starling_protocol::control::StepCommitted::at`].
    pub now: Timestamp,
}

/// What was deleted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Rollouts.
    pub rollouts: u64,
    /// Chunks.
    pub blobs: u64,
    /// Bytes of these chunks.
    pub blob_bytes: u64,
    /// Both walks began anew: everything was looked at.
    pub wrapped: bool,
}

/// The walk over rollouts and chunks, a piece at a time.
#[derive(Clone, Debug, Default)]
pub struct Collector {
    rollouts_after: Option<(JobId, RolloutId)>,
    blobs_after: Option<Hash>,
    /// Since when a chunk is known to be of no use.
    orphans: BTreeMap<Hash, Timestamp>,
    unreclaimed_bytes: u64,
}

impl Collector {
    /// One piece. With `full`, the space is given back to the disk as soon as anything was deleted.
    ///
    /// # Errors
    /// As [`Store::write`] and [`Store::get`]; the next step goes on.
    pub fn step(
        &mut self,
        store: &dyn Store,
        known: &Known,
        config: &MaintenanceConfig,
        full: bool,
    ) -> Result<Collected, StoreError> {
        let mut done = self.collect_rollouts(store, known, config)?;
        if known.complete {
            let of_blobs = self.collect_blobs(store, known, config)?;
            done.blobs = of_blobs.blobs;
            done.blob_bytes = of_blobs.blob_bytes;
        }
        done.wrapped = self.rollouts_after.is_none() && self.blobs_after.is_none();
        // A rollout's length is not read for this; a few KiB are what most have.
        self.unreclaimed_bytes += done.blob_bytes + done.rollouts * (4 << 10);
        if (full && self.unreclaimed_bytes > 0) || self.is_worth_a_reclaim(store)? {
            self.unreclaimed_bytes = 0;
            store.reclaim()?;
        }
        Ok(done)
    }

    /// A reclaim copies what is left, so it waits until it gives back a share of that, unless the space is needed.
    fn is_worth_a_reclaim(&self, store: &dyn Store) -> Result<bool, StoreError> {
        if self.unreclaimed_bytes < RECLAIM_BYTES {
            return Ok(false);
        }
        let is_short = store.headroom_bytes()?.is_some_and(|left| left < self.unreclaimed_bytes);
        Ok(is_short || self.unreclaimed_bytes >= store.size_bytes()? / RECLAIM_SHARE)
    }

    fn collect_rollouts(
        &mut self,
        store: &dyn Store,
        known: &Known,
        config: &MaintenanceConfig,
    ) -> Result<Collected, StoreError> {
        let rows = rollouts::page(store, self.rollouts_after, ROLLOUT_ROWS)?;
        self.rollouts_after = rows.last().filter(|_| rows.len() == ROLLOUT_ROWS).map(|(job, id, _)| (*job, *id));
        let model_of: BTreeMap<JobId, &ModelName> =
            known.models.iter().flat_map(|(name, s)| s.jobs.iter().map(move |j| (j.job, name))).collect();
        let mut committed: BTreeMap<(&ModelName, PolicyVersion), Option<Timestamp>> = BTreeMap::new();
        let mut dead = Vec::new();
        for (job, id, by) in rows {
            let (Some(version), Some(model)) = (by, model_of.get(&job).copied()) else { continue };
            let at = match committed.get(&(model, version)) {
                Some(at) => *at,
                None => {
                    // A replica that came by a snapshot lacks the step itself; one after it is later, which is safe.
                    let at = steps::first_from(store, model, version)?.map(|s| s.at);
                    committed.insert((model, version), at);
                    at
                }
            };
            if at.is_some_and(|at| at + config.rollouts_kept <= known.now) {
                dead.push((job, id));
            }
        }
        rollouts::delete_rollouts(store, &dead)?;
        Ok(Collected { rollouts: dead.len() as u64, ..Collected::default() })
    }

    fn collect_blobs(
        &mut self,
        store: &dyn Store,
        known: &Known,
        config: &MaintenanceConfig,
    ) -> Result<Collected, StoreError> {
        let rows = blobs::list_blobs(store, self.blobs_after, BLOB_ROWS)?;
        self.blobs_after = rows.last().filter(|_| rows.len() == BLOB_ROWS).map(|(hash, _)| *hash);
        if rows.is_empty() {
            return Ok(Collected::default());
        }
        let used = used_chunks(store, known, config)?;
        let mut dead = Vec::new();
        let mut done = Collected::default();
        for (hash, len) in rows {
            if used.contains(&hash) {
                self.orphans.remove(&hash);
                continue;
            }
            if self.orphans.len() >= ORPHANS_MAX && !self.orphans.contains_key(&hash) {
                continue;
            }
            let since = *self.orphans.entry(hash).or_insert(known.now);
            if since + config.orphans_kept <= known.now {
                self.orphans.remove(&hash);
                dead.push(hash);
                done.blob_bytes += len;
            }
        }
        done.blobs = dead.len() as u64;
        blobs::delete_blobs(store, dead)?;
        Ok(done)
    }
}

/// Chunks that a model's state names, or one of its last versions.
fn used_chunks(store: &dyn Store, known: &Known, config: &MaintenanceConfig) -> Result<BTreeSet<Hash>, StoreError> {
    let mut used = BTreeSet::new();
    let mut add = |m: &Manifest| used.extend(m.chunks.iter().copied());
    for (model, state) in &known.models {
        state.needed_manifests().for_each(&mut add);
        state.weights_delta.iter().for_each(|d| add(&d.patch));
        let first = state.lineage.back(state.version, config.versions_kept);
        for step in steps::from_version(store, model, first)? {
            add(&step.weights);
            step.optimizer_state.iter().for_each(&mut add);
            step.weights_delta.iter().for_each(|d| add(&d.patch));
        }
    }
    Ok(used)
}
