//! What the steps of given-up lines consumed: their rollouts are free again, but copies may have been deleted meanwhile,
//! as consumed ones are. An audit asks here before it calls one lost.

use crate::error::StoreError;
use crate::schema::{hex, successor};
use crate::store::{Batch, Family, Store};
use starling_protocol::codec::{decode, encode};
use starling_protocol::control::StepCommitted;
use starling_protocol::{ModelName, RolloutId};

const PREFIX: &[u8] = b"given_up/";
/// The character after the slash.
const END: &[u8] = b"given_up0";
/// A step's rollouts, as the log bounds them.
const ROW_LEN_BYTES_MAX: usize = 16 << 20;
const PAGE: usize = 256;

/// Adds to `batch` that `step` of `model` was given up.
pub fn note_given_up(batch: &mut Batch, model: &ModelName, step: &StepCommitted) {
    let key = [PREFIX, model.as_str().as_bytes(), b"@", hex(&step.version.0.to_be_bytes()).as_bytes()].concat();
    batch.put(Family::Meta, key, encode(&step.consumed));
}

/// Every rollout that a given-up step consumed, in no order; once for each step.
///
/// # Errors
/// [`StoreError::Corrupt`] when a row cannot be decoded; else as [`Store::get`].
pub fn all_given_up(store: &dyn Store) -> Result<Vec<RolloutId>, StoreError> {
    let (mut all, mut from) = (Vec::new(), PREFIX.to_vec());
    loop {
        let page = store.scan(Family::Meta, &from, Some(END), PAGE)?;
        let Some((last, _)) = page.last() else { return Ok(all) };
        from = successor(last);
        for (key, value) in page {
            let ids: Vec<RolloutId> = decode("given-up step", &value, ROW_LEN_BYTES_MAX)
                .map_err(|e| StoreError::corrupt(Family::Meta, &key, e.to_string()))?;
            all.extend(ids);
        }
    }
}
