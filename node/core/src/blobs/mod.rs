//! Weights, model files and task sets as content-addressed chunks: serving, fetching, placing on other nodes.
//!
//! ```text
//! hold ─▶ what is missing here ─▶ asked of many peers at once ─▶ hashed ─▶ written in groups ─▶ one sync
//!      └▶ or: delta here or fetched ─▶ applied to the base ─▶ checked against the manifest ─▶ written
//! ```

mod delta;
mod serve;
mod transfer;

use crate::runtime::{Stopped, blocking};
use crate::transport::{CallError, SharedTransport};
use starling_protocol::codec::{DecodeError, decode, encode};
use starling_protocol::manifest::{DeltaManifest, Manifest, ManifestError};
use starling_protocol::wire::{BlobCall, BlobReply, CALL_LEN_BYTES_MAX, Service};
use starling_protocol::{Hash, NodeId};
use starling_storage::blobs;
use starling_storage::{Family, SharedStore, StoreError};
use std::time::Duration;

/// Limit of a [`BlobCall::Have`], which reads an index.
const HAVE_LIMIT: Duration = Duration::from_secs(5);
/// How often a value that is read and found corrupt is fetched again, in one read.
const REPAIRS_MAX: usize = 4;
/// Limit of a [`BlobCall::Hold`] whatever its size: a peer that was killed and came back under the same name may
/// still have a dead connection, and another holder is better than waiting for it to be noticed.
const HOLD_LIMIT: Duration = Duration::from_secs(5);
/// What each MiB adds to it.
const HOLD_LIMIT_PER_MIB: Duration = Duration::from_secs(1);

/// Why bytes could not be had or placed. Nothing wrong was stored; retry with other peers.
#[derive(Debug, thiserror::Error)]
pub enum BlobError {
    /// The local store failed. Its words, since a peer or a leader that waits must hear of a full disk.
    #[error(transparent)]
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

    /// The bytes of `manifest`: from the local store, missing chunks from `peers`. A chunk that is corrupt here goes to
    /// quarantine and is fetched as if it were missing.
    ///
    /// # Errors
    /// [`BlobError`]; chunks that came stay stored, so a retry goes on where this stopped.
    pub async fn fetch(&self, manifest: &Manifest, peers: &[NodeId]) -> Result<Vec<u8>, BlobError> {
        let mut repairs = 0;
        loop {
            self.hold(manifest, peers).await?;
            let (store, m) = (self.store.clone(), manifest.clone());
            match blocking(move || blobs::read_manifest(&*store, &m)).await? {
                Ok(Some(bytes)) => return Ok(bytes),
                Ok(None) => {
                    return Err(BlobError::Unavailable {
                        chunk: manifest.hash,
                        tried: "deleted while it was read".into(),
                    });
                }
                Err(StoreError::Corrupt { family: Family::Blobs, key, reason }) if repairs < REPAIRS_MAX => {
                    repairs += 1;
                    let Ok(chunk) = key.parse::<Hash>() else {
                        return Err(StoreError::Corrupt { family: Family::Blobs, key, reason }.into());
                    };
                    self.set_aside(chunk, &reason).await;
                }
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Makes sure that every chunk of `manifest` lies durably in the local store.
    ///
    /// # Errors
    /// [`BlobError`], as for [`Blobs::fetch`].
    pub async fn hold(&self, manifest: &Manifest, peers: &[NodeId]) -> Result<(), BlobError> {
        manifest.check()?;
        let (store, m) = (self.store.clone(), manifest.clone());
        let missing = blocking(move || blobs::missing_chunks(&*store, &m)).await??;
        if missing.is_empty() { Ok(()) } else { transfer::fetch_chunks(self, missing, peers).await }
    }

    /// Has `peer` fetch `manifests` from this node and store them durably; the first one by way of `delta`, if there is
    /// one and the peer has its base.
    ///
    /// # Errors
    /// The peer's refusal or the call's failure, in words.
    pub async fn place(
        &self,
        peer: NodeId,
        manifests: Vec<Manifest>,
        delta: Option<DeltaManifest>,
    ) -> Result<(), String> {
        let mib = manifests.iter().map(|m| m.len_bytes >> 20).sum::<u64>();
        let limit = HOLD_LIMIT + HOLD_LIMIT_PER_MIB * u32::try_from(mib).unwrap_or(u32::MAX);
        let call = BlobCall::Hold { manifests, from: self.transport.local(), delta };
        match self.ask(peer, &call, limit).await {
            Ok(BlobReply::Held) => Ok(()),
            Ok(BlobReply::Refused(why)) => Err(why),
            Ok(_) => Err("an answer to another question".into()),
            Err(e) => Err(e.to_string()),
        }
    }

    /// Which of `chunks` `peer` does not have.
    ///
    /// # Errors
    /// The peer's refusal or the call's failure, in words.
    pub async fn lacks(&self, peer: NodeId, chunks: Vec<Hash>) -> Result<Vec<Hash>, String> {
        match self.ask(peer, &BlobCall::Have(chunks), HAVE_LIMIT).await {
            Ok(BlobReply::Lacks(chunks)) => Ok(chunks),
            Ok(BlobReply::Refused(why)) => Err(why),
            Ok(_) => Err("an answer to another question".into()),
            Err(e) => Err(e.to_string()),
        }
    }

    async fn ask(&self, peer: NodeId, call: &BlobCall, limit: Duration) -> Result<BlobReply, CallError> {
        let body = self.transport.call(peer, Service::Blobs, encode(call).into(), limit).await?;
        decode("blob reply", &body, CALL_LEN_BYTES_MAX).map_err(|e| CallError::Failed { peer, reason: e.to_string() })
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
