//! Which store this is: an id that is drawn when it is first opened, and lost with it.
//!
//! Votes and acknowledged log entries are promises that only the store remembers. A node that comes back with its key and
//! another store has forgotten them, and others must be able to see that.

use crate::error::StoreError;
use crate::store::{Batch, Durability, Family, Store};
use starling_protocol::StoreId;

/// Key in `Meta`.
const KEY: &[u8] = b"store_id";

/// The id of `store`; `fresh` becomes it if there is none yet, durably before this returns.
///
/// # Errors
/// [`StoreError::Corrupt`] when it has another length; else as [`Store::get`] and [`Store::write`].
pub fn store_id(store: &dyn Store, fresh: StoreId) -> Result<StoreId, StoreError> {
    if let Some(bytes) = store.get(Family::Meta, KEY)? {
        let id = <[u8; 16]>::try_from(bytes.as_slice());
        return id.map(StoreId).map_err(|_wrong_length| {
            StoreError::corrupt(Family::Meta, KEY, format!("a store's id of {} bytes, expected 16", bytes.len()))
        });
    }
    let mut batch = Batch::new();
    batch.put(Family::Meta, KEY, fresh.0);
    store.write(batch, Durability::Synced)?;
    Ok(fresh)
}
