//! What was found corrupt, out of the way: reads no longer stumble over it, and people can still look at it.
//!
//! A quarantined value is gone from its family and from the index, so the node knows that it lacks it and fetches it
//! from another holder.

use crate::error::StoreError;
use crate::schema::{hex, job_rollout_key, quarantine_key};
use crate::store::{Batch, Durability, Family, Store};
use starling_protocol::{Hash, JobId, RolloutId};

/// Most quarantined values listed at once.
const PAGE: usize = 64;
/// Longest part of a corrupt value that is kept: enough to see what it is; the good one comes from elsewhere.
const KEPT_LEN_BYTES_MAX: usize = 64 << 10;

/// Moves a corrupt blob away.
///
/// # Errors
/// As [`Store::write`]; then it stays where it is.
pub fn quarantine_blob(store: &dyn Store, hash: Hash) -> Result<(), StoreError> {
    let mut batch = Batch::new();
    move_away(store, &mut batch, Family::Blobs, &hash.0)?;
    batch.delete(Family::BlobIndex, hash.0);
    store.write(batch, Durability::Synced)
}

/// Moves a corrupt rollout away. Its row in the index goes too, if its job is known.
///
/// # Errors
/// As [`Store::write`]; then it stays where it is.
pub fn quarantine_rollout(store: &dyn Store, job: Option<JobId>, id: RolloutId) -> Result<(), StoreError> {
    let mut batch = Batch::new();
    move_away(store, &mut batch, Family::Rollouts, &id.0)?;
    if let Some(job) = job {
        batch.delete(Family::RolloutsByJob, job_rollout_key(job, id));
    }
    store.write(batch, Durability::Synced)
}

/// The quarantined values: family and key in words, and how many bytes were kept.
///
/// # Errors
/// As [`Store::get`].
pub fn quarantined(store: &dyn Store) -> Result<Vec<(String, usize)>, StoreError> {
    let mut all = Vec::new();
    let mut from = Vec::new();
    loop {
        let page = store.scan(Family::Quarantine, &from, None, PAGE)?;
        let Some((last, _)) = page.last() else { return Ok(all) };
        from = crate::schema::successor(last);
        all.extend(page.iter().map(|(key, value)| (readable(key), value.len())));
    }
}

/// Forgets all quarantined values.
///
/// # Errors
/// As [`Store::write`].
pub fn empty(store: &dyn Store) -> Result<(), StoreError> {
    let mut batch = Batch::new();
    // Keys begin with the length of a family's name, which is far below 0xff.
    batch.delete_range(Family::Quarantine, [], [u8::MAX]);
    store.write(batch, Durability::Buffered)
}

fn move_away(store: &dyn Store, batch: &mut Batch, family: Family, key: &[u8]) -> Result<(), StoreError> {
    let kept = match store.get(family, key) {
        Ok(Some(mut bytes)) => {
            bytes.truncate(KEPT_LEN_BYTES_MAX);
            bytes
        }
        Ok(None) => return Ok(()),
        // The database cannot read it back at all: what is left to keep is why.
        Err(StoreError::Corrupt { reason, .. }) => reason.into_bytes(),
        Err(e) => return Err(e),
    };
    batch.put(Family::Quarantine, quarantine_key(family.name(), key), kept);
    batch.delete(family, key);
    Ok(())
}

fn readable(key: &[u8]) -> String {
    let split = key.split_first().and_then(|(len, rest)| rest.split_at_checked(usize::from(*len)));
    match split {
        Some((family, key)) => format!("{}/{}", String::from_utf8_lossy(family), hex(key)),
        None => hex(key),
    }
}
