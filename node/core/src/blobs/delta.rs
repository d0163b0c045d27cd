//! New weights by way of the old ones: less to send, the same bytes.

use super::{BlobError, Blobs};
use crate::runtime::blocking;
use starling_protocol::NodeId;
use starling_protocol::manifest::{DeltaManifest, Manifest};
use starling_storage::blobs::{missing_chunks, put_manifest_bytes, read_manifest};
use starling_storage::delta::{self, DeltaError};
use starling_storage::{SharedStore, StoreError};

/// Why the shorter way did not lead to the weights.
#[derive(Debug, thiserror::Error)]
enum ShortcutError {
    /// The base is not here.
    #[error("its base {} is not here", .0.short())]
    NoBase(starling_protocol::Hash),
    /// The weights came out right, and are not what the manifest's chunks add up to.
    #[error("the manifest lists other chunks than the weights have")]
    OtherChunks,
    #[error(transparent)]
    Delta(#[from] DeltaError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Blob(#[from] BlobError),
}

impl Blobs {
    /// Stores the delta from `base` to `new`, whose bytes are `bytes`, if it saves at least a quarter. `None` if it does
    /// not, or if the base is not here: a delta is never needed.
    ///
    /// # Errors
    /// [`BlobError::Store`] when it cannot be stored.
    pub async fn put_delta(&self, base: &Manifest, bytes: Vec<u8>) -> Result<Option<DeltaManifest>, BlobError> {
        let (store, base) = (self.store.clone(), base.clone());
        let made = move || {
            let Some(old) = read_manifest(&*store, &base)? else { return Ok(None) };
            let patch = match delta::encode(&old, &bytes) {
                Ok(patch) if patch.len() <= bytes.len() / 4 * 3 => patch,
                Ok(_) => return Ok(None),
                Err(e) => {
                    tracing::warn!(error = %e, "the new weights are published without a delta");
                    return Ok(None);
                }
            };
            Ok(Some(DeltaManifest { patch: put_manifest_bytes(&*store, &patch)?, base }))
        };
        Ok(blocking(made).await?.map_err(|e: StoreError| e)?)
    }

    /// [`Blobs::hold`], by way of `delta` if there is one and its base is here.
    ///
    /// # Errors
    /// As [`Blobs::hold`]: a delta that does not work out is said in the log, and the chunks are fetched.
    pub async fn hold_either_way(
        &self,
        manifest: &Manifest,
        delta: Option<&DeltaManifest>,
        peers: &[NodeId],
    ) -> Result<(), BlobError> {
        manifest.check()?;
        if let Some(delta) = delta {
            match self.hold_by_delta(manifest, delta, peers).await {
                Ok(()) => return Ok(()),
                Err(e) => {
                    tracing::info!(weights = %manifest.hash.short(), reason = %e, "no delta: fetching all chunks")
                }
            }
        }
        self.hold(manifest, peers).await
    }

    /// [`Blobs::fetch`], by way of `delta` if there is one and its base is here.
    ///
    /// # Errors
    /// As [`Blobs::fetch`].
    pub async fn fetch_either_way(
        &self,
        manifest: &Manifest,
        delta: Option<&DeltaManifest>,
        peers: &[NodeId],
    ) -> Result<Vec<u8>, BlobError> {
        self.hold_either_way(manifest, delta, peers).await?;
        self.fetch(manifest, peers).await
    }

    async fn hold_by_delta(
        &self,
        full: &Manifest,
        delta: &DeltaManifest,
        peers: &[NodeId],
    ) -> Result<(), ShortcutError> {
        let (store, m) = (self.store.clone(), full.clone());
        let missing = blocking(move || missing_chunks(&*store, &m)).await.map_err(BlobError::from)??;
        // Equal chunks and an earlier attempt count: the delta must be the shorter way.
        if missing.len() <= delta.patch.chunks.len() {
            return Ok(self.hold(full, peers).await?);
        }
        // Before anything is fetched.
        let (store, base) = (self.store.clone(), delta.base.clone());
        let lacks = blocking(move || missing_chunks(&*store, &base)).await.map_err(BlobError::from)??;
        if !lacks.is_empty() {
            return Err(ShortcutError::NoBase(delta.base.hash));
        }
        let patch = self.fetch(&delta.patch, peers).await?;
        let (store, base, full) = (self.store.clone(), delta.base.clone(), full.clone());
        blocking(move || apply(&store, &base, &patch, &full)).await.map_err(BlobError::from)?
    }
}

fn apply(store: &SharedStore, base: &Manifest, patch: &[u8], full: &Manifest) -> Result<(), ShortcutError> {
    let old = read_manifest(&**store, base)?.ok_or(ShortcutError::NoBase(base.hash))?;
    let bytes = delta::apply(base, &old, patch, full)?;
    drop(old);
    // The bytes are the right ones, so only a lying list of chunks can differ.
    if put_manifest_bytes(&**store, &bytes)?.chunks == full.chunks { Ok(()) } else { Err(ShortcutError::OtherChunks) }
}
