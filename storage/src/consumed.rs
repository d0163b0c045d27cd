//! Which committed step used a rollout up. A replica writes this with the step, in one batch.

use crate::error::StoreError;
use crate::schema::{hash_at_end, successor};
use crate::store::{Batch, Family, Store};
use starling_protocol::{PolicyVersion, RolloutId};

const PAGE: usize = 1024;

/// Adds to `batch` that the step to `version` consumed `ids`.
pub fn mark_consumed(batch: &mut Batch, ids: impl IntoIterator<Item = RolloutId>, version: PolicyVersion) {
    for id in ids {
        batch.put(Family::Consumed, id.0, version.0.to_be_bytes());
    }
}

/// Adds to `batch` that `ids` are not consumed: the line whose steps consumed them was left.
pub fn unmark_consumed(batch: &mut Batch, ids: impl IntoIterator<Item = RolloutId>) {
    for id in ids {
        batch.delete(Family::Consumed, id.0);
    }
}

/// The version whose step consumed a rollout, as far as this store knows.
///
/// # Errors
/// [`StoreError::Corrupt`] when the entry is not a version; else as [`Store::get`].
pub fn is_consumed(store: &dyn Store, id: RolloutId) -> Result<Option<PolicyVersion>, StoreError> {
    let Some(value) = store.get(Family::Consumed, &id.0)? else {
        return Ok(None);
    };
    version(&id.0, &value).map(Some)
}

/// Every consumed rollout with its version, ascending by id.
///
/// # Errors
/// As [`is_consumed`].
pub fn all_consumed(store: &dyn Store) -> Result<Vec<(RolloutId, PolicyVersion)>, StoreError> {
    let mut all = Vec::new();
    let mut from = Vec::new();
    loop {
        let page = store.scan(Family::Consumed, &from, None, PAGE)?;
        let Some((last, _)) = page.last() else {
            return Ok(all);
        };
        from = successor(last);
        for (key, value) in page {
            let id = hash_at_end(&key)
                .filter(|_| key.len() == 32)
                .ok_or_else(|| StoreError::corrupt(Family::Consumed, &key, "not a rollout id"))?;
            all.push((id, version(&key, &value)?));
        }
    }
}

fn version(key: &[u8], value: &[u8]) -> Result<PolicyVersion, StoreError> {
    match value.try_into() {
        Ok(bytes) => Ok(PolicyVersion(u64::from_be_bytes(bytes))),
        Err(_) => Err(StoreError::corrupt(Family::Consumed, key, "not a version")),
    }
}
