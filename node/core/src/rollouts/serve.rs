//! What this node answers to peers: puts, gets, lists.

use super::Rollouts;
use crate::runtime::{blocking, spawn};
use crate::transport::InboundError;
use bytes::Bytes;
use serde_bytes::ByteBuf;
use starling_protocol::codec::{decode, encode};
use starling_protocol::planted::{self, Bug};
use starling_protocol::record::Intake;
use starling_protocol::rollout::{ROLLOUT_LEN_BYTES_MAX, open_rollouts};
use starling_protocol::signed::Verifier;
use starling_protocol::wire::{CALL_LEN_BYTES_MAX, HAVE_MAX, RolloutCall, RolloutReply};
use starling_protocol::{NodeId, RolloutId};
use starling_storage::quarantine::quarantine_rollout;
use starling_storage::{Durability, SharedStore, Store, StoreError, consumed, rollouts};
use std::sync::Arc;

impl Rollouts {
    /// Answers a peer.
    ///
    /// # Errors
    /// [`InboundError::Malformed`] for bytes that are no [`RolloutCall`].
    pub async fn on_call(self: &Arc<Self>, from: NodeId, body: &[u8]) -> Result<Bytes, InboundError> {
        let call: RolloutCall =
            decode("rollout call", body, CALL_LEN_BYTES_MAX).map_err(|e| InboundError::Malformed(e.to_string()))?;
        if let RolloutCall::Have(ids) = &call
            && ids.len() > HAVE_MAX
        {
            let why = format!("field `ids`: expected at most {HAVE_MAX}, got {}", ids.len());
            return Err(InboundError::Malformed(why));
        }
        if matches!(call, RolloutCall::Put(_)) && self.is_draining() {
            return Ok(encode(&RolloutReply::Refused("this node is draining".into())).into());
        }
        let (store, verifier) = (self.store.clone(), self.verifier.clone());
        let (reply, corrupt) = blocking(move || answer(&store, &*verifier, from, call))
            .await
            .map_err(|e| InboundError::Unavailable(e.to_string()))?;
        for id in corrupt {
            self.repair_later(id);
        }
        Ok(encode(&reply).into())
    }

    fn is_draining(&self) -> bool {
        self.membership.of_record(self.transport.local(), |r| r.intake) == Some(Intake::Draining)
    }

    /// Moves a rollout that was read and found corrupt out of the way, and fetches it from another holder.
    pub(crate) fn set_aside_and_repair(self: &Arc<Self>, id: RolloutId, reason: &str) {
        set_aside(&self.store, id, reason);
        self.repair_later(id);
    }

    /// Fetches a rollout whose copy here was corrupt from another holder.
    fn repair_later(self: &Arc<Self>, id: RolloutId) {
        let this = self.clone();
        spawn(async move {
            if this.repair(id).await {
                tracing::info!(rollout = %id.short(), "corrupt rollout replaced by another holder's");
            } else {
                tracing::warn!(rollout = %id.short(), "corrupt rollout not replaced yet: no live holder gave it");
            }
        });
    }
}

fn answer(
    store: &SharedStore,
    verifier: &dyn Verifier,
    from: NodeId,
    call: RolloutCall,
) -> (RolloutReply, Vec<RolloutId>) {
    let mut corrupt = Vec::new();
    let refused = |e: &dyn std::fmt::Display| RolloutReply::Refused(e.to_string());
    let reply = match call {
        RolloutCall::Put(bodies) => {
            let mut items = Vec::with_capacity(bodies.len());
            for (body, opened) in bodies.iter().zip(open_rollouts(&bodies, verifier)) {
                match opened {
                    Ok(r) => items.push((body.as_slice(), r.job)),
                    Err(e) => tracing::warn!(from = %from.short(), error = %e, "rollout refused"),
                }
            }
            let durability =
                if planted::has(Bug::AcknowledgeBeforePersist) { Durability::Buffered } else { Durability::Synced };
            match rollouts::put_envelopes(&**store, &items, durability) {
                Ok(ids) => RolloutReply::Stored(ids),
                Err(e) => refused(&e),
            }
        }
        RolloutCall::Get(ids) => {
            let mut bodies = Vec::new();
            let mut len = 0;
            for id in ids {
                match rollouts::get_rollout(&**store, id) {
                    Ok(Some(b)) => {
                        len += b.len() + 8;
                        if len > ROLLOUT_LEN_BYTES_MAX && !bodies.is_empty() {
                            break;
                        }
                        bodies.push(ByteBuf::from(b));
                    }
                    Ok(None) => {}
                    Err(StoreError::Corrupt { reason, .. }) => {
                        set_aside(store, id, &reason);
                        corrupt.push(id);
                    }
                    Err(e) => return (refused(&e), corrupt),
                }
            }
            RolloutReply::Bodies(bodies)
        }
        RolloutCall::List { job, after, limit } => {
            match rollouts::list_unconsumed(&**store, job, after, (limit as usize).min(4096)) {
                Ok(ids) => RolloutReply::Ids(ids),
                Err(e) => refused(&e),
            }
        }
        RolloutCall::Have(ids) => match have(&**store, ids) {
            Ok((held, consumed)) => RolloutReply::Have { held, consumed },
            Err(e) => refused(&e),
        },
    };
    (reply, corrupt)
}

/// Which of `ids` are here, and which a step consumed.
fn have(store: &dyn Store, ids: Vec<RolloutId>) -> Result<(Vec<RolloutId>, Vec<RolloutId>), StoreError> {
    let (mut held, mut used) = (Vec::new(), Vec::new());
    for id in ids {
        if rollouts::has_rollout(store, id)? {
            held.push(id);
        }
        if consumed::is_consumed(store, id)?.is_some() {
            used.push(id);
        }
    }
    Ok((held, used))
}

/// Moves a corrupt rollout out of the way, wherever its job's index has it.
pub(super) fn set_aside(store: &SharedStore, id: RolloutId, reason: &str) {
    tracing::error!(rollout = %id.short(), %reason, "a stored rollout is corrupt: quarantined");
    // Its job cannot be read any more; the row that is left says that this node should have it.
    if let Err(e) = quarantine_rollout(&**store, None, id) {
        tracing::error!(rollout = %id.short(), error = %e, "cannot quarantine it");
    }
}
