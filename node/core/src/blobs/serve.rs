//! What this node answers to peers that ask for chunks.

use super::Blobs;
use crate::runtime::{blocking, spawn};
use crate::transport::InboundError;
use bytes::Bytes;
use futures::stream::{StreamExt, TryStreamExt};
use starling_protocol::Hash;
use starling_protocol::codec::{decode, encode};
use starling_protocol::wire::{BlobCall, BlobReply, CALL_LEN_BYTES_MAX, HAVE_MAX};
use starling_storage::quarantine::quarantine_blob;
use starling_storage::{StoreError, blobs};

/// Manifests of one call that are fetched at a time: weights and optimizer state share their syncs.
const HOLDS_AT_ONCE: usize = 2;

impl Blobs {
    /// Answers a peer.
    ///
    /// # Errors
    /// [`InboundError::Malformed`] for bytes that are no [`BlobCall`].
    pub async fn on_call(&self, body: &[u8]) -> Result<Bytes, InboundError> {
        let call: BlobCall =
            decode("blob call", body, CALL_LEN_BYTES_MAX).map_err(|e| InboundError::Malformed(e.to_string()))?;
        let reply = match call {
            BlobCall::Get(hash) => self.give(hash).await,
            BlobCall::Hold { manifests, from, delta } => {
                let mut delta = delta;
                let holds: Vec<_> = manifests
                    .into_iter()
                    .map(|m| {
                        // It leads to the first one.
                        let delta = delta.take();
                        async move { self.hold_either_way(&m, delta.as_ref(), &[from]).await }
                    })
                    .collect();
                let held = futures::stream::iter(holds).buffered(HOLDS_AT_ONCE).try_for_each(|()| async { Ok(()) });
                match held.await {
                    Ok(()) => BlobReply::Held,
                    Err(e) => BlobReply::Refused(e.to_string()),
                }
            }
            BlobCall::Have(chunks) if chunks.len() > HAVE_MAX => {
                let why = format!("field `chunks`: expected at most {HAVE_MAX}, got {}", chunks.len());
                return Err(InboundError::Malformed(why));
            }
            BlobCall::Have(chunks) => {
                let store = self.store.clone();
                let lacks = move || {
                    let mut lacks = Vec::new();
                    for chunk in chunks {
                        if !blobs::has_blob(&*store, chunk)? {
                            lacks.push(chunk);
                        }
                    }
                    Ok::<_, StoreError>(lacks)
                };
                match blocking(lacks).await {
                    Ok(Ok(lacks)) => BlobReply::Lacks(lacks),
                    Ok(Err(e)) => BlobReply::Refused(e.to_string()),
                    Err(e) => BlobReply::Refused(e.to_string()),
                }
            }
        };
        Ok(encode(&reply).into())
    }

    async fn give(&self, hash: Hash) -> BlobReply {
        let store = self.store.clone();
        match blocking(move || blobs::get_blob(&*store, hash)).await {
            Ok(Ok(Some(bytes))) => BlobReply::Chunk(serde_bytes::ByteBuf::from(bytes)),
            Ok(Ok(None)) => BlobReply::Missing(hash),
            Ok(Err(StoreError::Corrupt { reason, .. })) => {
                self.set_aside(hash, &reason).await;
                // Another peer may have it; the one that asks does not wait for that.
                let this = self.clone();
                spawn(async move {
                    let peers = this.transport.connected();
                    match super::transfer::fetch_chunks(&this, vec![hash], &peers).await {
                        Ok(()) => tracing::info!(chunk = %hash.short(), "corrupt chunk replaced by a peer's"),
                        Err(e) => tracing::warn!(chunk = %hash.short(), error = %e, "corrupt chunk not replaced yet"),
                    }
                });
                BlobReply::Missing(hash)
            }
            Ok(Err(e)) => BlobReply::Refused(e.to_string()),
            Err(e) => BlobReply::Refused(e.to_string()),
        }
    }

    /// Moves a corrupt chunk out of the way.
    pub(super) async fn set_aside(&self, hash: Hash, reason: &str) {
        tracing::error!(chunk = %hash.short(), %reason, "a stored chunk is corrupt: quarantined");
        let store = self.store.clone();
        if let Ok(Err(e)) = blocking(move || quarantine_blob(&*store, hash)).await {
            tracing::error!(chunk = %hash.short(), error = %e, "cannot quarantine it");
        }
    }
}
