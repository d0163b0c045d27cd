//! Content-addressed chunks of weights and files. What is read is what was written, or an error.

use crate::error::StoreError;
use crate::schema::{hash_at_end, successor};
use crate::store::{Batch, Durability, Family, KeyValue, Store};
use starling_protocol::Hash;
use starling_protocol::manifest::{Manifest, ManifestError};
use std::collections::BTreeSet;

/// Chunks in one write: 4 × 1 MiB bounds the memory of a write whatever the length of the file.
const CHUNKS_PER_WRITE: usize = 4;

/// Stores `bytes` under their hash. If they are there already, only their durability may change; a corrupt
/// copy is replaced.
///
/// # Errors
/// As [`Store::write`]; the blob may be put again.
pub fn put_blob(store: &dyn Store, bytes: &[u8], durability: Durability) -> Result<Hash, StoreError> {
    let hash = Hash::of(bytes);
    let mut batch = Batch::new();
    add_blob(store, &mut batch, hash, bytes)?;
    store.write(batch, durability)?;
    Ok(hash)
}

/// Stores blobs whose hashes the caller has just checked, in one write. Unlike [`put_blob`] it does not look whether
/// they are here already: for chunks that are known to be missing, which must not be read, compared and copied again.
///
/// # Errors
/// As [`Store::write`]; then none is stored.
pub fn put_new_blobs(store: &dyn Store, blobs: Vec<(Hash, Vec<u8>)>, durability: Durability) -> Result<(), StoreError> {
    let mut batch = Batch::new();
    for (hash, bytes) in blobs {
        batch.put(Family::BlobIndex, hash.0, (bytes.len() as u64).to_be_bytes());
        batch.put(Family::Blobs, hash.0, bytes);
    }
    store.write(batch, durability)
}

/// As [`put_new_blobs`], but past the log: for many chunks, which are then written once and not twice. They count as
/// missing until [`settle_blobs`] says that they are here, and may be gone with the process before.
///
/// # Errors
/// As [`Store::write`].
pub fn put_unsettled_blobs(store: &dyn Store, blobs: Vec<(Hash, Vec<u8>)>) -> Result<(), StoreError> {
    store.put_unlogged(Family::Blobs, blobs.into_iter().map(|(hash, bytes)| (hash.0.to_vec(), bytes)).collect())
}

/// Makes blobs durable that [`put_unsettled_blobs`] took, each with its length in bytes; from now on they are here.
///
/// # Errors
/// As [`Store::write`]; the call may be repeated.
pub fn settle_blobs(store: &dyn Store, blobs: &[(Hash, u64)]) -> Result<(), StoreError> {
    // The index last: it must not name what a crash may take away.
    store.settle(Family::Blobs)?;
    let mut batch = Batch::new();
    for (hash, len_bytes) in blobs {
        batch.put(Family::BlobIndex, hash.0, len_bytes.to_be_bytes());
    }
    store.write(batch, Durability::Synced)
}

/// The blob, whose hash was checked just now.
///
/// # Errors
/// [`StoreError::Corrupt`] when the stored bytes have another hash; else as [`Store::get`].
pub fn get_blob(store: &dyn Store, hash: Hash) -> Result<Option<Vec<u8>>, StoreError> {
    get_checked(store, Family::Blobs, hash)
}

/// Whether a blob is here, by the index; does not read it.
///
/// # Errors
/// As [`Store::get`].
pub fn has_blob(store: &dyn Store, hash: Hash) -> Result<bool, StoreError> {
    Ok(store.get(Family::BlobIndex, &hash.0)?.is_some())
}

/// Hashes and lengths of the blobs here, by the index: ascending, at most `limit`, after `after`.
///
/// # Errors
/// [`StoreError::Corrupt`] for a row that is none; else as [`Store::get`].
pub fn list_blobs(store: &dyn Store, after: Option<Hash>, limit: usize) -> Result<Vec<(Hash, u64)>, StoreError> {
    let from = after.map_or_else(Vec::new, |h| successor(&h.0));
    let rows = store.scan(Family::BlobIndex, &from, None, limit)?;
    let row = |(key, value): KeyValue| {
        let hash = hash_at_end(&key).filter(|_| key.len() == 32);
        let len = value.as_slice().try_into().ok().map(u64::from_be_bytes);
        hash.zip(len).ok_or_else(|| StoreError::corrupt(Family::BlobIndex, &key, "not a hash and a length"))
    };
    rows.into_iter().map(row).collect()
}

/// Stores `bytes` as chunks. When this returns, all of them are durable, by one sync; before, any of them may
/// be there, which is harmless.
///
/// # Errors
/// As [`Store::write`]; some chunks may be stored, the call may be repeated.
pub fn put_manifest_bytes(store: &dyn Store, bytes: &[u8]) -> Result<Manifest, StoreError> {
    let manifest = Manifest::of(bytes);
    let mut todo = manifest.chunks.iter().zip(Manifest::chunks_of(bytes)).peekable();
    let mut batch = Batch::new();
    let mut in_batch = 0;
    while let Some((hash, chunk)) = todo.next() {
        in_batch += usize::from(add_blob(store, &mut batch, *hash, chunk)?);
        if in_batch == CHUNKS_PER_WRITE && todo.peek().is_some() {
            store.write(std::mem::take(&mut batch), Durability::Buffered)?;
            in_batch = 0;
        }
    }
    // A synced write makes the buffered ones before it durable too.
    store.write(batch, Durability::Synced)?;
    Ok(manifest)
}

/// What the manifest describes, checked chunk by chunk and as a whole; `None` if a chunk is missing.
///
/// # Errors
/// [`StoreError::Corrupt`] for a chunk, [`StoreError::Manifest`] when the manifest contradicts itself; else as
/// [`Store::get`].
pub fn read_manifest(store: &dyn Store, manifest: &Manifest) -> Result<Option<Vec<u8>>, StoreError> {
    manifest.check()?;
    // Not reserved ahead: a length that no chunks back must not allocate.
    let mut bytes = Vec::new();
    for hash in &manifest.chunks {
        let Some(chunk) = get_blob(store, *hash)? else {
            return Ok(None);
        };
        bytes.extend_from_slice(&chunk);
    }
    let got = Hash::of(&bytes);
    if got != manifest.hash {
        let (len_bytes, expected) = (bytes.len(), manifest.hash);
        return Err(ManifestError::WrongHash { len_bytes, expected, got }.into());
    }
    Ok(Some(bytes))
}

/// The chunks that are not here, each once, in the manifest's order.
///
/// # Errors
/// As [`Store::get`].
pub fn missing_chunks(store: &dyn Store, manifest: &Manifest) -> Result<Vec<Hash>, StoreError> {
    let mut seen = BTreeSet::new();
    let mut missing = Vec::new();
    for hash in &manifest.chunks {
        if seen.insert(*hash) && !has_blob(store, *hash)? {
            missing.push(*hash);
        }
    }
    Ok(missing)
}

/// Forgets blobs. The caller knows that no manifest needs them: equal chunks are stored once.
///
/// # Errors
/// As [`Store::write`]; then none is forgotten.
pub fn delete_blobs(store: &dyn Store, hashes: impl IntoIterator<Item = Hash>) -> Result<(), StoreError> {
    let mut batch = Batch::new();
    for hash in hashes {
        batch.delete(Family::BlobIndex, hash.0);
        batch.delete(Family::Blobs, hash.0);
    }
    store.write(batch, Durability::Buffered)
}

/// Adds a blob and its index row; tells whether the blob was not here.
fn add_blob(store: &dyn Store, batch: &mut Batch, hash: Hash, bytes: &[u8]) -> Result<bool, StoreError> {
    let new = put_if_new(store, batch, Family::Blobs, hash, bytes)?;
    if new || !has_blob(store, hash)? {
        batch.put(Family::BlobIndex, hash.0, (bytes.len() as u64).to_be_bytes());
    }
    Ok(new)
}

/// Adds a put to `batch` unless the same bytes are stored; tells whether it did.
pub(crate) fn put_if_new(
    store: &dyn Store,
    batch: &mut Batch,
    family: Family,
    hash: Hash,
    bytes: &[u8],
) -> Result<bool, StoreError> {
    let same = match store.get(family, &hash.0) {
        Ok(stored) => stored.is_some_and(|s| s == bytes),
        Err(StoreError::Corrupt { .. }) => false,
        Err(e) => return Err(e),
    };
    if !same {
        batch.put(family, hash.0, bytes);
    }
    Ok(!same)
}

/// Reads a value stored under its hash and checks it.
pub(crate) fn get_checked(store: &dyn Store, family: Family, hash: Hash) -> Result<Option<Vec<u8>>, StoreError> {
    let Some(bytes) = store.get(family, &hash.0)? else {
        return Ok(None);
    };
    let got = Hash::of(&bytes);
    if got == hash {
        Ok(Some(bytes))
    } else {
        Err(StoreError::corrupt(family, &hash.0, format!("{} bytes with hash {got}", bytes.len())))
    }
}
