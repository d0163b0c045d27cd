//! Postcard with a length limit on the way in: nothing a peer sends can make us allocate without bound.

use serde::{Serialize, de::DeserializeOwned};

/// Bytes that are not the message they should be. Nothing was changed by them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Longer than this kind of message may be.
    #[error("{what}: {got} bytes, at most {max} are allowed")]
    TooLong {
        /// The message expected.
        what: &'static str,
        /// Its length in bytes.
        got: usize,
        /// The limit in bytes.
        max: usize,
    },
    /// Not a postcard encoding of the message.
    #[error("{what}: malformed at or before byte {len}: {reason}")]
    Malformed {
        /// The message expected.
        what: &'static str,
        /// Length of the input in bytes.
        len: usize,
        /// postcard's own words.
        reason: String,
    },
    /// A valid message with bytes after its end.
    #[error("{what}: {extra} bytes after the end")]
    Trailing {
        /// The message expected.
        what: &'static str,
        /// How many bytes too many.
        extra: usize,
    },
}

/// Encodes `value`.
///
/// # Panics
/// Never for the types of this crate: all of them have a postcard form and memory is the only sink.
#[must_use]
pub fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    #[expect(clippy::expect_used, reason = "an in-memory sink cannot fail and all wire types have known lengths")]
    postcard::to_stdvec(value).expect("wire types are encodable")
}

/// Decodes exactly one `T` from `bytes`, of which there may be at most `max`.
///
/// # Errors
/// [`DecodeError`] when the input is too long, malformed or has a tail.
pub fn decode<T: DeserializeOwned>(what: &'static str, bytes: &[u8], max: usize) -> Result<T, DecodeError> {
    if bytes.len() > max {
        return Err(DecodeError::TooLong { what, got: bytes.len(), max });
    }
    let (value, rest) = postcard::take_from_bytes(bytes).map_err(|e| DecodeError::Malformed {
        what,
        len: bytes.len(),
        reason: e.to_string(),
    })?;
    if rest.is_empty() { Ok(value) } else { Err(DecodeError::Trailing { what, extra: rest.len() }) }
}
