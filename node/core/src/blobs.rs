//! Weights, model files and task sets as content-addressed chunks: serving, fetching, placing on other nodes.

use crate::runtime::{Stopped, blocking};
use crate::transport::{CallError, InboundError, SharedTransport};
use bytes::Bytes;
use starling_protocol::codec::{DecodeError, decode, encode};
use starling_protocol::manifest::{Manifest, ManifestError};
use starling_protocol::wire::{BlobCall, BlobReply, CALL_LEN_BYTES_MAX, Service};
use starling_protocol::{Hash, NodeId};
use starling_storage::blobs;
use starling_storage::{Durability, SharedStore, StoreError};
use std::time::Duration;

/// Limit of one chunk request: 1 MiB at 1 Mbit/s, with room for a busy peer.
const CHUNK_LIMIT: Duration = Duration::from_secs(10);
/// Limit of a [`BlobCall::Hold`] whatever its size: a peer that was killed and came back under the same name may
/// still have a dead connection, and another holder is better than waiting for it to be noticed.
const HOLD_LIMIT: Duration = Duration::from_secs(5);
/// What each MiB adds to it.
const HOLD_LIMIT_PER_MIB: Duration = Duration::from_secs(1);

/// Why bytes could not be had or placed. Nothing wrong was stored; retry with other peers.
#[derive(Debug, thiserror::Error)]
pub enum BlobError {
    /// The local store failed.
    #[error("store")]
    Store(#[from] StoreError),
    /// The manifest or what came for it is wrong.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// A peer answered nonsense.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// No peer had a chunk; the text says what each answered.
    #[error("chunk {chunk}: no peer gave it: {tried}")]
    Unavailable {
        /// Which.
        chunk: Hash,
        /// Peers and their answers.
        tried: String,
    },
    /// The node ends.
    #[error(transparent)]
    Stopped(#[from] Stopped),
}

/// The node's blobs.
#[derive(Clone)]
pub struct Blobs {
    store: SharedStore,
    transport: SharedTransport,
}

impl std::fmt::Debug for Blobs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Blobs")
    }
}

impl Blobs {
    /// Over `store`, talking through `transport`.
    #[must_use]
    pub fn new(store: SharedStore, transport: SharedTransport) -> Self {
        Self { store, transport }
    }

    /// Stores `bytes` durably as chunks and returns their manifest.
    ///
    /// # Errors
    /// [`BlobError::Store`].
    pub async fn put(&self, bytes: Vec<u8>) -> Result<Manifest, BlobError> {
        let store = self.store.clone();
        Ok(blocking(move || blobs::put_manifest_bytes(&*store, &bytes)).await??)
    }

    /// The bytes of `manifest`: from the local store, missing chunks from `peers` in turn.
    ///
    /// # Errors
    /// [`BlobError`]; chunks that came stay stored, so a retry goes on where this stopped.
    pub async fn fetch(&self, manifest: &Manifest, peers: &[NodeId]) -> Result<Vec<u8>, BlobError> {
        self.hold(manifest, peers).await?;
        let (store, m) = (self.store.clone(), manifest.clone());
        let bytes = blocking(move || blobs::read_manifest(&*store, &m)).await??;
        bytes.ok_or(BlobError::Unavailable { chunk: manifest.hash, tried: "deleted while it was read".into() })
    }

    /// Makes sure that every chunk of `manifest` lies durably in the local store.
    ///
    /// # Errors
    /// [`BlobError`], as for [`Blobs::fetch`].
    pub async fn hold(&self, manifest: &Manifest, peers: &[NodeId]) -> Result<(), BlobError> {
        manifest.check()?;
        let (store, m) = (self.store.clone(), manifest.clone());
        let missing = blocking(move || blobs::missing_chunks(&*store, &m)).await??;
        for (i, chunk) in missing.into_iter().enumerate() {
            let bytes = self.fetch_chunk(chunk, peers, i).await?;
            let store = self.store.clone();
            blocking(move || blobs::put_blob(&*store, &bytes, Durability::Synced)).await??;
        }
        Ok(())
    }

    /// Peers take turns, starting at another one for each chunk, so that the load spreads.
    async fn fetch_chunk(&self, chunk: Hash, peers: &[NodeId], turn: usize) -> Result<Vec<u8>, BlobError> {
        let mut tried = String::new();
        for k in 0..peers.len() {
            let peer = peers[(turn + k) % peers.len()];
            if peer == self.transport.local() {
                continue;
            }
            let said = match self.ask(peer, &BlobCall::Get(chunk), CHUNK_LIMIT).await {
                Ok(BlobReply::Chunk(bytes)) if Hash::of(&bytes) == chunk => return Ok(bytes.into_vec()),
                Ok(BlobReply::Chunk(_)) => "bytes with another hash".to_owned(),
                Ok(BlobReply::Missing(_)) => "does not have it".to_owned(),
                Ok(BlobReply::Refused(why)) => why,
                Ok(BlobReply::Held) => "an answer to another question".to_owned(),
                Err(e) => e.to_string(),
            };
            tried.push_str(&format!("[{}: {said}] ", peer.short()));
        }
        if tried.is_empty() {
            "no peer known that could have it".clone_into(&mut tried);
        }
        Err(BlobError::Unavailable { chunk, tried })
    }

    /// Has `peer` fetch `manifests` from this node and store them durably.
    ///
    /// # Errors
    /// The peer's refusal or the call's failure, in words.
    pub async fn place(&self, peer: NodeId, manifests: Vec<Manifest>) -> Result<(), String> {
        let mib = manifests.iter().map(|m| m.len_bytes >> 20).sum::<u64>();
        let limit = HOLD_LIMIT + HOLD_LIMIT_PER_MIB * u32::try_from(mib).unwrap_or(u32::MAX);
        let call = BlobCall::Hold { manifests, from: self.transport.local() };
        match self.ask(peer, &call, limit).await {
            Ok(BlobReply::Held) => Ok(()),
            Ok(BlobReply::Refused(why)) => Err(why),
            Ok(BlobReply::Chunk(_) | BlobReply::Missing(_)) => Err("an answer to another question".into()),
            Err(e) => Err(e.to_string()),
        }
    }

    async fn ask(&self, peer: NodeId, call: &BlobCall, limit: Duration) -> Result<BlobReply, CallError> {
        let body = self.transport.call(peer, Service::Blobs, encode(call).into(), limit).await?;
        decode("blob reply", &body, CALL_LEN_BYTES_MAX).map_err(|e| CallError::Failed { peer, reason: e.to_string() })
    }

    /// Answers a peer.
    ///
    /// # Errors
    /// [`InboundError::Malformed`] for bytes that are no [`BlobCall`].
    pub async fn on_call(&self, body: &[u8]) -> Result<Bytes, InboundError> {
        let call: BlobCall =
            decode("blob call", body, CALL_LEN_BYTES_MAX).map_err(|e| InboundError::Malformed(e.to_string()))?;
        let reply = match call {
            BlobCall::Get(hash) => {
                let store = self.store.clone();
                match blocking(move || blobs::get_blob(&*store, hash)).await {
                    Ok(Ok(Some(bytes))) => BlobReply::Chunk(serde_bytes::ByteBuf::from(bytes)),
                    Ok(Ok(None)) => BlobReply::Missing(hash),
                    Ok(Err(e)) => BlobReply::Refused(e.to_string()),
                    Err(e) => BlobReply::Refused(e.to_string()),
                }
            }
            BlobCall::Hold { manifests, from } => {
                let mut reply = BlobReply::Held;
                for m in &manifests {
                    if let Err(e) = self.hold(m, &[from]).await {
                        reply = BlobReply::Refused(e.to_string());
                        break;
                    }
                }
                reply
            }
        };
        Ok(encode(&reply).into())
    }

    /// Deletes the chunks of `old` that none of `keep` needs.
    ///
    /// # Errors
    /// [`BlobError::Store`].
    pub async fn forget(&self, old: Vec<Manifest>, keep: &[Manifest]) -> Result<(), BlobError> {
        let kept: std::collections::BTreeSet<Hash> = keep.iter().flat_map(|m| m.chunks.iter().copied()).collect();
        let store = self.store.clone();
        let dead = old.into_iter().flat_map(|m| m.chunks).filter(move |c| !kept.contains(c)).collect::<Vec<_>>();
        Ok(blocking(move || blobs::delete_blobs(&*store, dead)).await??)
    }
}
