//! Sealed rollouts by id, and which job they belong to.

use crate::blobs::{get_checked, put_if_new};
use crate::consumed::is_consumed;
use crate::error::StoreError;
use crate::schema::{hash_at_end, job_rollout_key, prefix_end, split_job_rollout_key, successor};
use crate::store::{Batch, Durability, Family, Store};
use starling_protocol::{JobId, PolicyVersion, RolloutId};

/// Index entries read at once.
const PAGE: usize = 512;

/// Stores envelopes and indexes them by job, all or none. Those that are here already only gain durability;
/// corrupt copies are replaced. Returns how many were new.
///
/// # Errors
/// [`StoreError::WrongId`] when an id is not the hash of its bytes, and then nothing is stored; else as
/// [`Store::write`]. The call may be repeated.
pub fn put_rollouts(
    store: &dyn Store,
    rollouts: &[(RolloutId, &[u8], JobId)],
    durability: Durability,
) -> Result<usize, StoreError> {
    for (id, envelope, _) in rollouts {
        let got = RolloutId::of(envelope);
        if got != *id {
            return Err(StoreError::WrongId { expected: *id, got });
        }
    }
    put_hashed(store, rollouts, durability)
}

/// [`put_rollouts`] of envelopes whose ids nobody has named; returns these.
///
/// # Errors
/// As [`Store::write`], and then nothing is stored. The call may be repeated.
pub fn put_envelopes(
    store: &dyn Store,
    envelopes: &[(&[u8], JobId)],
    durability: Durability,
) -> Result<Vec<RolloutId>, StoreError> {
    let hashed: Vec<_> = envelopes.iter().map(|(bytes, job)| (RolloutId::of(bytes), *bytes, *job)).collect();
    put_hashed(store, &hashed, durability)?;
    Ok(hashed.into_iter().map(|(id, _, _)| id).collect())
}

fn put_hashed(
    store: &dyn Store,
    rollouts: &[(RolloutId, &[u8], JobId)],
    durability: Durability,
) -> Result<usize, StoreError> {
    let mut batch = Batch::new();
    let mut new = 0;
    for (id, envelope, job) in rollouts {
        new += usize::from(put_if_new(store, &mut batch, Family::Rollouts, *id, envelope)?);
        let key = job_rollout_key(*job, *id);
        if store.get(Family::RolloutsByJob, &key)?.is_none() {
            batch.put(Family::RolloutsByJob, key, []);
        }
    }
    store.write(batch, durability)?;
    Ok(new)
}

/// The envelope, whose hash was checked just now.
///
/// # Errors
/// [`StoreError::Corrupt`] when the stored bytes have another hash; else as [`Store::get`].
pub fn get_rollout(store: &dyn Store, id: RolloutId) -> Result<Option<Vec<u8>>, StoreError> {
    get_checked(store, Family::Rollouts, id)
}

/// Whether an envelope is here.
///
/// # Errors
/// As [`Store::get`].
pub fn has_rollout(store: &dyn Store, id: RolloutId) -> Result<bool, StoreError> {
    Ok(store.get(Family::Rollouts, &id.0)?.is_some())
}

/// Rollouts of `job` that no step has consumed, as far as this store knows: ascending, at most `limit`, after
/// `after`. Reads the index up to the last one returned, consumed entries included.
///
/// # Errors
/// As [`Store::get`].
pub fn list_unconsumed(
    store: &dyn Store,
    job: JobId,
    after: Option<RolloutId>,
    limit: usize,
) -> Result<Vec<RolloutId>, StoreError> {
    list(store, job, after, limit, |id| Ok(is_consumed(store, id)?.is_none()))
}

/// Rollouts of `job`, consumed or not: ascending, at most `limit`, after `after`.
///
/// # Errors
/// As [`Store::get`].
pub fn list_all(
    store: &dyn Store,
    job: JobId,
    after: Option<RolloutId>,
    limit: usize,
) -> Result<Vec<RolloutId>, StoreError> {
    list(store, job, after, limit, |_| Ok(true))
}

/// How many rollouts of `job` are here. Reads the job's whole index.
///
/// # Errors
/// As [`Store::get`].
pub fn count(store: &dyn Store, job: JobId) -> Result<usize, StoreError> {
    let mut count = 0;
    let mut after = None;
    loop {
        let page = list_all(store, job, after, PAGE)?;
        count += page.len();
        after = page.last().copied();
        if page.len() < PAGE {
            return Ok(count);
        }
    }
}

/// A row of the index: which job, which rollout, and the version that consumed it, if one did.
pub type IndexRow = (JobId, RolloutId, Option<PolicyVersion>);

/// Rows of the index of all jobs, in its order, at most `limit`, after `after`: for walks that take a few at a time.
///
/// # Errors
/// As [`Store::get`].
pub fn page(store: &dyn Store, after: Option<(JobId, RolloutId)>, limit: usize) -> Result<Vec<IndexRow>, StoreError> {
    let from = after.map_or_else(Vec::new, |(job, id)| successor(&job_rollout_key(job, id)));
    let rows = store.scan(Family::RolloutsByJob, &from, None, limit)?;
    rows.into_iter()
        .map(|(key, _)| {
            let (job, id) = split_job_rollout_key(&key)
                .ok_or_else(|| StoreError::corrupt(Family::RolloutsByJob, &key, "not a job and a rollout"))?;
            Ok((job, id, is_consumed(store, id)?))
        })
        .collect()
}

/// Forgets rollouts of `job`, and that they were here. The caller knows that a committed step consumed them. What the
/// audit needs stays: that they were acknowledged, and which step consumed them.
///
/// # Errors
/// As [`Store::write`]; then none is forgotten.
pub fn delete_rollouts(store: &dyn Store, rollouts: &[(JobId, RolloutId)]) -> Result<(), StoreError> {
    let mut batch = Batch::new();
    for (job, id) in rollouts {
        batch.delete(Family::RolloutsByJob, job_rollout_key(*job, *id));
        batch.delete(Family::Rollouts, id.0);
    }
    store.write(batch, Durability::Buffered)
}

fn list(
    store: &dyn Store,
    job: JobId,
    after: Option<RolloutId>,
    limit: usize,
    keep: impl Fn(RolloutId) -> Result<bool, StoreError>,
) -> Result<Vec<RolloutId>, StoreError> {
    let end = prefix_end(&job.0);
    let mut from = after.map_or_else(|| job.0.to_vec(), |id| successor(&job_rollout_key(job, id)));
    let mut ids = Vec::new();
    while ids.len() < limit {
        let page = store.scan(Family::RolloutsByJob, &from, end.as_deref(), PAGE)?;
        let Some((last, _)) = page.last() else { break };
        from = successor(last);
        let full = page.len() == PAGE;
        for (key, _) in page {
            let Some(id) = hash_at_end(&key).filter(|_| key.len() == 48) else {
                return Err(StoreError::corrupt(Family::RolloutsByJob, &key, "not a job and a rollout"));
            };
            if keep(id)? {
                ids.push(id);
                if ids.len() == limit {
                    return Ok(ids);
                }
            }
        }
        if !full {
            break;
        }
    }
    Ok(ids)
}
