//! What a gateway promised: rollouts whose end it acknowledged, and who held them then. Read by audits.

use crate::error::StoreError;
use crate::schema::{hash_at_end, successor};
use crate::store::{Batch, Durability, Family, KeyValue, Store};
use serde::{Deserialize, Serialize};
use starling_protocol::codec::{decode, encode};
use starling_protocol::{JobId, NodeId, RolloutId};

const PAGE: usize = 1024;
/// 64 holders of 32 bytes, a job and change.
const RECORD_LEN_BYTES_MAX: usize = 4096;

/// A promise kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acknowledged {
    /// The rollout.
    pub id: RolloutId,
    /// Its job.
    pub job: JobId,
    /// Nodes that held it durably when it was acknowledged.
    pub holders: Vec<NodeId>,
}

#[derive(Serialize, Deserialize)]
struct Row {
    job: JobId,
    holders: Vec<NodeId>,
}

/// Records that the gateway is about to acknowledge these rollouts. To be called before the agent hears of it,
/// so that the record is never short of what was promised.
///
/// # Errors
/// As [`Store::write`]; then none is recorded.
pub fn record_acknowledged(
    store: &dyn Store,
    rollouts: &[Acknowledged],
    durability: Durability,
) -> Result<(), StoreError> {
    let mut batch = Batch::new();
    for a in rollouts {
        batch.put(Family::Acknowledged, a.id.0, encode(&Row { job: a.job, holders: a.holders.clone() }));
    }
    store.write(batch, durability)
}

/// Acknowledged rollouts: ascending by id, at most `limit`, after `after`.
///
/// # Errors
/// [`StoreError::Corrupt`] when an entry cannot be decoded; else as [`Store::get`].
pub fn acknowledged(
    store: &dyn Store,
    after: Option<RolloutId>,
    limit: usize,
) -> Result<Vec<Acknowledged>, StoreError> {
    let from = after.map_or_else(Vec::new, |id| successor(&id.0));
    store.scan(Family::Acknowledged, &from, None, limit)?.iter().map(read).collect()
}

/// What was promised about one rollout.
///
/// # Errors
/// As [`acknowledged`].
pub fn promise(store: &dyn Store, id: RolloutId) -> Result<Option<Acknowledged>, StoreError> {
    let value = store.get(Family::Acknowledged, &id.0)?;
    value.map(|v| read(&(id.0.to_vec(), v))).transpose()
}

fn read((key, value): &KeyValue) -> Result<Acknowledged, StoreError> {
    let corrupt = |reason: String| StoreError::corrupt(Family::Acknowledged, key, reason);
    let id = hash_at_end(key).filter(|_| key.len() == 32).ok_or_else(|| corrupt("not a rollout id".to_owned()))?;
    let row: Row = decode("acknowledged rollout", value, RECORD_LEN_BYTES_MAX).map_err(|e| corrupt(e.to_string()))?;
    Ok(Acknowledged { id, job: row.job, holders: row.holders })
}

/// All of them.
///
/// # Errors
/// As [`acknowledged`].
pub fn all_acknowledged(store: &dyn Store) -> Result<Vec<Acknowledged>, StoreError> {
    let mut all: Vec<Acknowledged> = Vec::new();
    loop {
        let page = acknowledged(store, all.last().map(|a| a.id), PAGE)?;
        if page.is_empty() {
            return Ok(all);
        }
        all.extend(page);
    }
}
