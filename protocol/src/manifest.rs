//! Weights and files as ordered lists of content-addressed chunks.

use crate::ids::Hash;
use serde::{Deserialize, Serialize};

/// Chunk length. 1 MiB keeps a chunk well under the 4 MiB request limit and a 0.9 M-parameter model at four chunks.
pub const CHUNK_LEN_BYTES: usize = 1 << 20;

/// Most chunks in one manifest: 64 Ki × 1 MiB = 64 GiB.
pub const CHUNKS_MAX: usize = 1 << 16;

/// Ordered chunk hashes of one byte string (a safetensors file, an optimizer state, a task set).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Total length in bytes.
    pub len_bytes: u64,
    /// blake3 of the whole.
    pub hash: Hash,
    /// blake3 of each chunk of [`CHUNK_LEN_BYTES`], the last one shorter.
    pub chunks: Vec<Hash>,
}

/// How the bytes of one manifest follow from those of another: the second way to get them, with less to send.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeltaManifest {
    /// What must be here already, whole.
    pub base: Manifest,
    /// The delta's own bytes: zstd of the XOR of both, see `starling_storage::delta`.
    pub patch: Manifest,
}

/// Why a manifest or what was assembled from it is refused. Permanent; the sender's fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    /// The number of chunks does not follow from the length.
    #[error("manifest of {len_bytes} bytes lists {got} chunks, expected {expected}")]
    ChunkCount {
        /// Declared length.
        len_bytes: u64,
        /// Chunks that follow from it.
        expected: u64,
        /// Chunks listed.
        got: usize,
    },
    /// Assembled bytes do not have the declared hash.
    #[error("assembled {len_bytes} bytes have hash {got}, the manifest says {expected}")]
    WrongHash {
        /// Assembled length.
        len_bytes: usize,
        /// Hash in the manifest.
        expected: Hash,
        /// Hash of what was assembled.
        got: Hash,
    },
}

impl Manifest {
    /// Describes `bytes`; `chunks(bytes)` yields the chunks in the same order.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self {
            len_bytes: bytes.len() as u64,
            hash: Hash::of(bytes),
            chunks: Self::chunks_of(bytes).map(Hash::of).collect(),
        }
    }
    /// The chunks of `bytes`, in order.
    pub fn chunks_of(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
        bytes.chunks(CHUNK_LEN_BYTES)
    }
    /// Checks that length and chunk count agree.
    ///
    /// # Errors
    /// [`ManifestError::ChunkCount`].
    pub fn check(&self) -> Result<(), ManifestError> {
        let expected = self.len_bytes.div_ceil(CHUNK_LEN_BYTES as u64);
        if expected == self.chunks.len() as u64 && self.chunks.len() <= CHUNKS_MAX {
            Ok(())
        } else {
            Err(ManifestError::ChunkCount { len_bytes: self.len_bytes, expected, got: self.chunks.len() })
        }
    }
    /// Joins verified chunks and checks the whole.
    ///
    /// # Errors
    /// [`ManifestError::WrongHash`] when the result is not what the manifest describes.
    pub fn assemble(&self, chunks: &[Vec<u8>]) -> Result<Vec<u8>, ManifestError> {
        let bytes = chunks.concat();
        let got = Hash::of(&bytes);
        if got == self.hash {
            Ok(bytes)
        } else {
            Err(ManifestError::WrongHash { len_bytes: bytes.len(), expected: self.hash, got })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_join_to_what_the_manifest_describes() {
        let bytes: Vec<u8> = (0..=250u8).cycle().take(CHUNK_LEN_BYTES * 2 + 7).collect();
        let m = Manifest::of(&bytes);
        assert_eq!(m.chunks.len(), 3);
        m.check().unwrap();
        let chunks: Vec<Vec<u8>> = Manifest::chunks_of(&bytes).map(<[u8]>::to_vec).collect();
        assert_eq!(m.assemble(&chunks).unwrap(), bytes);
        assert!(matches!(m.assemble(&chunks[1..]), Err(ManifestError::WrongHash { .. })));
    }

    #[test]
    fn a_manifest_with_a_missing_chunk_is_refused() {
        let mut m = Manifest::of(&[1; 10]);
        m.chunks.clear();
        assert!(matches!(m.check(), Err(ManifestError::ChunkCount { expected: 1, got: 0, .. })));
    }
}
