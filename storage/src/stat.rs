//! What is in a store, counted from its indexes.

use crate::acknowledged::acknowledged;
use crate::blobs::list_blobs;
use crate::error::StoreError;
use crate::quarantine::quarantined;
use crate::rollouts::page;
use crate::store::Store;
use serde::{Deserialize, Serialize};
use starling_protocol::JobId;
use std::collections::BTreeMap;

/// Rows read at once.
const ROWS: usize = 4096;

/// Rollouts of one job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobCount {
    /// Here, whether consumed or not.
    pub rollouts: u64,
    /// Of these, as far as this store knows, consumed by no step.
    pub unconsumed: u64,
}

/// What is in a store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreStat {
    /// Bytes on disk, logs included.
    pub size_bytes: u64,
    /// Bytes that it still takes; `None` when nothing limits it.
    pub headroom_bytes: Option<u64>,
    /// Chunks of weights and files.
    pub blobs: u64,
    /// Their bytes.
    pub blob_bytes: u64,
    /// Rollouts by job.
    pub jobs: BTreeMap<JobId, JobCount>,
    /// Rollouts that this node acknowledged as a gateway.
    pub acknowledged: u64,
    /// Values found corrupt and set aside.
    pub quarantined: u64,
}

/// Counts. Reads the indexes, not the values: about a second for a million rollouts.
///
/// # Errors
/// As [`Store::get`].
pub fn stat(store: &dyn Store) -> Result<StoreStat, StoreError> {
    let mut s = StoreStat {
        size_bytes: store.size_bytes()?,
        headroom_bytes: store.headroom_bytes()?,
        quarantined: quarantined(store)?.len() as u64,
        ..StoreStat::default()
    };
    let mut after = None;
    loop {
        let rows = list_blobs(store, after, ROWS)?;
        let Some((last, _)) = rows.last() else { break };
        after = Some(*last);
        s.blobs += rows.len() as u64;
        s.blob_bytes += rows.iter().map(|(_, len)| len).sum::<u64>();
    }
    let mut after = None;
    loop {
        let rows = page(store, after, ROWS)?;
        let Some((job, id, _)) = rows.last() else { break };
        after = Some((*job, *id));
        for (job, _, by) in rows {
            let count = s.jobs.entry(job).or_default();
            count.rollouts += 1;
            count.unconsumed += u64::from(by.is_none());
        }
    }
    let mut after = None;
    loop {
        let rows = acknowledged(store, after, ROWS)?;
        let Some(last) = rows.last() else { return Ok(s) };
        after = Some(last.id);
        s.acknowledged += rows.len() as u64;
    }
}
