//! New weights as the difference to old ones: zstd of the XOR of both.
//!
//! After an optimizer step most bits of a float keep their value, first of all sign and exponent, so the XOR is
//! largely zero there. The bytes are laid out by their place in the float (all first bytes, then all second ones and so
//! on) before compression, which puts the zeros side by side. Lossless: the result is checked against the new weights'
//! own manifest by whoever applies it.

use starling_protocol::Hash;
use starling_protocol::manifest::{Manifest, ManifestError};

/// Bytes of one float.
const LANES: usize = 4;
/// Fast, and on noise-like input no worse than higher ones.
const LEVEL: i32 = 1;

/// Why a delta does not lead to the weights. Nothing was stored; fetch the full chunks instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeltaError {
    /// The base is not the one that the delta was made against.
    #[error("delta: its base has hash {expected}, got bytes with hash {got}")]
    WrongBase {
        /// The base named.
        expected: Hash,
        /// What was given.
        got: Hash,
    },
    /// The patch is no zstd stream of the length that it must have.
    #[error("delta: the patch does not unpack to {expected} bytes: {reason}")]
    BadPatch {
        /// Length of the new weights.
        expected: u64,
        /// What came.
        reason: String,
    },
    /// The result is not what the manifest describes: the sender's fault.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// The delta could not be made.
    #[error("delta: zstd: {0}")]
    Compress(&'static str),
}

/// The patch that leads from `base` to `new`. The lengths may differ.
///
/// # Errors
/// [`DeltaError::Compress`], which only a lack of memory brings about.
pub fn encode(base: &[u8], new: &[u8]) -> Result<Vec<u8>, DeltaError> {
    let planes = to_planes(new, base);
    let mut patch = vec![0; zstd_safe::compress_bound(planes.len())];
    let len = zstd_safe::compress(&mut patch[..], &planes, LEVEL)
        .map_err(|code| DeltaError::Compress(zstd_safe::get_error_name(code)))?;
    patch.truncate(len);
    Ok(patch)
}

/// The bytes of `full`, from the bytes of its base and a patch.
///
/// # Errors
/// [`DeltaError`] when the base is another one, or the patch does not lead to what `full` describes.
pub fn apply(base: &Manifest, base_bytes: &[u8], patch: &[u8], full: &Manifest) -> Result<Vec<u8>, DeltaError> {
    let got = Hash::of(base_bytes);
    if got != base.hash {
        return Err(DeltaError::WrongBase { expected: base.hash, got });
    }
    full.check()?;
    let bad = |reason: String| DeltaError::BadPatch { expected: full.len_bytes, reason };
    // The frame says how long its content is. A lie would make us allocate for nothing.
    match zstd_safe::get_frame_content_size(patch) {
        Ok(Some(len)) if len == full.len_bytes => {}
        Ok(len) => return Err(bad(format!("its frame announces {len:?}"))),
        Err(_not_zstd) => return Err(bad("not a zstd frame".into())),
    }
    let len = usize::try_from(full.len_bytes).map_err(|_too_long| bad("longer than this machine's memory".into()))?;
    let mut planes = vec![0; len];
    let got = zstd_safe::decompress(&mut planes[..], patch).map_err(|c| bad(zstd_safe::get_error_name(c).into()))?;
    if got != len {
        return Err(bad(format!("{got} bytes")));
    }
    let bytes = from_planes(&planes, base_bytes);
    let got = Hash::of(&bytes);
    if got != full.hash {
        let (len_bytes, expected) = (bytes.len(), full.hash);
        return Err(ManifestError::WrongHash { len_bytes, expected, got }.into());
    }
    Ok(bytes)
}

/// `bytes` XOR `base` (zero beyond its end), the first byte of each float first, then the second ones.
fn to_planes(bytes: &[u8], base: &[u8]) -> Vec<u8> {
    let mut planes = Vec::with_capacity(bytes.len());
    for lane in 0..LANES {
        let base = base.iter().skip(lane).step_by(LANES).chain(std::iter::repeat(&0));
        planes.extend(bytes.iter().skip(lane).step_by(LANES).zip(base).map(|(a, b)| a ^ b));
    }
    planes
}

/// The inverse of [`to_planes`].
fn from_planes(planes: &[u8], base: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; planes.len()];
    let mut rest = planes;
    for lane in 0..LANES {
        let (plane, after) = rest.split_at(planes.len().saturating_sub(lane).div_ceil(LANES));
        let base = base.iter().skip(lane).step_by(LANES).chain(std::iter::repeat(&0));
        for ((to, x), b) in bytes.iter_mut().skip(lane).step_by(LANES).zip(plane).zip(base) {
            *to = x ^ b;
        }
        rest = after;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suite::noise;

    /// Floats near 0.02 after a step of relative size 1e-3, as an optimizer makes it.
    fn step(n: usize) -> (Vec<u8>, Vec<u8>) {
        let drawn = noise(3, 2 * n);
        let old = |i: usize| 0.02 * (f32::from(drawn[i]) - 127.5) / 128.0;
        let new = |i: usize| old(i) * (1.0 + 1e-3 * (f32::from(drawn[n + i]) - 127.5) / 128.0);
        ((0..n).flat_map(|i| old(i).to_le_bytes()).collect(), (0..n).flat_map(|i| new(i).to_le_bytes()).collect())
    }

    #[test]
    fn a_patch_leads_from_the_base_to_the_new_weights_and_is_shorter() {
        let (old, new) = step(100_000);
        let patch = encode(&old, &new).unwrap();
        assert!(patch.len() < new.len() * 3 / 4, "{} of {} bytes", patch.len(), new.len());
        assert_eq!(apply(&Manifest::of(&old), &old, &patch, &Manifest::of(&new)).unwrap(), new);
    }

    #[test]
    fn lengths_may_differ_and_need_not_be_whole_floats() {
        for (old, new) in [(0, 0), (0, 7), (7, 0), (5, 9), (9, 5), (1023, 1025)] {
            let (old, new) = (noise(1, old), noise(2, new));
            let patch = encode(&old, &new).unwrap();
            assert_eq!(apply(&Manifest::of(&old), &old, &patch, &Manifest::of(&new)).unwrap(), new);
        }
    }

    #[test]
    fn another_base_is_refused_with_both_hashes() {
        let (old, new) = step(1000);
        let patch = encode(&old, &new).unwrap();
        let err = apply(&Manifest::of(&old), &new, &patch, &Manifest::of(&new)).unwrap_err();
        assert_eq!(err, DeltaError::WrongBase { expected: Hash::of(&old), got: Hash::of(&new) });
    }

    #[test]
    fn a_patch_that_is_broken_short_or_of_something_else_is_refused() {
        let (old, new) = step(1000);
        let (base, full) = (Manifest::of(&old), Manifest::of(&new));
        let patch = encode(&old, &new).unwrap();
        for cut in [0, 1, 8, patch.len() / 2, patch.len() - 1] {
            let err = apply(&base, &old, &patch[..cut], &full).unwrap_err();
            assert!(matches!(err, DeltaError::BadPatch { .. }), "{cut}: {err}");
        }
        let err = apply(&base, &old, &noise(1, 500), &full).unwrap_err();
        assert!(matches!(err, DeltaError::BadPatch { .. }), "{err}");
        let other = encode(&old, &old).unwrap();
        let err = apply(&base, &old, &other, &full).unwrap_err();
        assert!(matches!(err, DeltaError::Manifest(ManifestError::WrongHash { .. })), "{err}");
        let longer = encode(&old, &[new.clone(), vec![1]].concat()).unwrap();
        let err = apply(&base, &old, &longer, &full).unwrap_err();
        assert!(matches!(err, DeltaError::BadPatch { .. }), "{err}");
    }
}
