//! Typed identifiers. One meaning each; see `docs/glossary.md`.

use crate::lineage;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A text that is not the identifier it should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{kind}: expected {expected}, got {got:?}")]
pub struct ParseIdError {
    /// Which identifier was asked for.
    pub kind: &'static str,
    /// What its text form is.
    pub expected: &'static str,
    /// What came, cut to 80 characters.
    pub got: String,
}

impl ParseIdError {
    fn new(kind: &'static str, expected: &'static str, got: &str) -> Self {
        Self { kind, expected, got: got.chars().take(80).collect() }
    }
}

fn hex(bytes: &[u8], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    bytes.iter().try_for_each(|b| write!(f, "{b:02x}"))
}

fn unhex<const N: usize>(s: &str) -> Option<[u8; N]> {
    let raw = s.as_bytes();
    if raw.len() != 2 * N {
        return None;
    }
    let nibble = |c: u8| (c as char).to_digit(16).and_then(|d| u8::try_from(d).ok());
    let mut out = [0; N];
    for (byte, pair) in out.iter_mut().zip(raw.chunks_exact(2)) {
        *byte = nibble(pair[0])? << 4 | nibble(pair[1])?;
    }
    Some(out)
}

macro_rules! bytes_id {
    ($(#[$doc:meta])* $name:ident, $len:literal, $expected:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub [u8; $len]);

        impl $name {
            /// The first eight hexadecimal digits: enough for a log line, never for equality.
            #[must_use]
            pub fn short(&self) -> String {
                self.to_string()[..8].to_owned()
            }
            /// The raw bytes.
            #[must_use]
            pub fn as_bytes(&self) -> &[u8] {
                &self.0
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                hex(&self.0, f)
            }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({})", stringify!($name), self.short())
            }
        }
        impl FromStr for $name {
            type Err = ParseIdError;
            fn from_str(s: &str) -> Result<Self, ParseIdError> {
                unhex(s).map(Self).ok_or_else(|| ParseIdError::new(stringify!($name), $expected, s))
            }
        }
        // Hexadecimal where people read it (JSON, TOML), raw bytes on the wire.
        impl Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                if s.is_human_readable() { s.collect_str(self) } else { self.0.serialize(s) }
            }
        }
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                if d.is_human_readable() {
                    let s = <std::borrow::Cow<'de, str>>::deserialize(d)?;
                    s.parse().map_err(serde::de::Error::custom)
                } else {
                    <[u8; $len]>::deserialize(d).map(Self)
                }
            }
        }
    };
}

bytes_id!(
    /// A node: its ed25519 public key. libp2p's `PeerId` is derived from it.
    NodeId, 32, "64 hexadecimal digits");
bytes_id!(
    /// blake3 of some bytes; the address of a blob, a chunk or a rollout.
    Hash, 32, "64 hexadecimal digits");
bytes_id!(
    /// One leased run of a task. Drawn at random by the leader that assigns it.
    EpisodeId, 16, "32 hexadecimal digits");
bytes_id!(
    /// A store: drawn when it is first opened. A node's key may outlive its store, and what the store had promised is
    /// forgotten then; this tells the two apart.
    StoreId, 16, "32 hexadecimal digits");
bytes_id!(
    /// A job: the first 16 bytes of blake3 of its encoded configuration and submission time.
    JobId, 16, "32 hexadecimal digits");

/// A rollout's address: blake3 of its sealed envelope.
pub type RolloutId = Hash;

impl Hash {
    /// blake3 of `bytes`.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }
    /// blake3 of the parts one after another, which need not lie in memory together.
    ///
    /// # Errors
    /// The first error among the parts.
    pub fn of_parts<E>(parts: impl IntoIterator<Item = Result<Vec<u8>, E>>) -> Result<Self, E> {
        let mut hasher = blake3::Hasher::new();
        for part in parts {
            hasher.update(&part?);
        }
        Ok(Self(*hasher.finalize().as_bytes()))
    }
}

/// Leadership number of a model's Raft group; also the fencing token. Like a version, it carries its line's mark, so no
/// two lines of a model share one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Term(pub u64);

/// Committed weights of a model: how many steps made them, and above that the mark of the line whose leader committed
/// them ([`crate::lineage::Line::mark`], 0 in generation 0). Version 0 is what training started from. Below 2^53.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PolicyVersion(pub u64);

impl PolicyVersion {
    /// Steps committed from version 0 to this one.
    #[must_use]
    pub fn steps(self) -> u64 {
        lineage::count_of(self.0)
    }
    /// Generation of its line.
    #[must_use]
    pub fn generation(self) -> u64 {
        lineage::generation_of(self.0)
    }
    /// Tells its line from others.
    #[must_use]
    pub fn mark(self) -> u64 {
        lineage::mark_of(self.0)
    }
}

impl Term {
    /// Tells its line from others.
    #[must_use]
    pub fn mark(self) -> u64 {
        lineage::mark_of(self.0)
    }
    /// Generation of its line.
    #[must_use]
    pub fn generation(self) -> u64 {
        lineage::generation_of(self.0)
    }
}

/// `42` in generation 0, `g1.42` in generation 1.
impl fmt::Display for PolicyVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        lineage::write_number(self.0, f)
    }
}

/// `7` in generation 0, `g1.7` in generation 1.
impl fmt::Display for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        lineage::write_number(self.0, f)
    }
}

/// The rollouts of one task that are compared with each other: unique per job.
///
/// A leader opens groups as (its term, a counter), so two leaders never open the same one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct GroupId {
    /// The term in which the group was opened.
    pub term: Term,
    /// Counts the groups opened in that term.
    pub seq: u64,
}

/// Longest model name, task-set name or task id, in bytes.
pub const NAME_LEN_BYTES_MAX: usize = 128;

/// A model's name in the mesh: 1 to 128 characters of `A-Z a-z 0-9 . _ - /`, as in the OpenAI `model` field.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct ModelName(String);

impl ModelName {
    /// Checks and takes a name.
    ///
    /// # Errors
    /// When the name is empty, too long or has a character outside the allowed set.
    pub fn new(s: impl Into<String>) -> Result<Self, ParseIdError> {
        let s = s.into();
        let ok = !s.is_empty()
            && s.len() <= NAME_LEN_BYTES_MAX
            && s.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-/".contains(&b));
        if ok { Ok(Self(s)) } else { Err(ParseIdError::new("model name", "1 to 128 of A-Z a-z 0-9 . _ - /", &s)) }
    }
    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for ModelName {
    type Err = ParseIdError;
    fn from_str(s: &str) -> Result<Self, ParseIdError> {
        Self::new(s)
    }
}

impl<'de> Deserialize<'de> for ModelName {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        Self::new(String::deserialize(d)?).map_err(serde::de::Error::custom)
    }
}

/// A task of a job: which set, which line of it, and the id that the set gives it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TaskRef {
    /// The task set's name in the job.
    pub set: String,
    /// Line of the set, from 0.
    pub index: u32,
    /// The task's own id.
    pub id: String,
}

/// The bearer key of one episode: an unguessable capability, given out at begin and void at the end.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct EpisodeKey(pub String);

impl fmt::Debug for EpisodeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EpisodeKey(..)") // keys never reach a log
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_round_trip_as_text_and_as_bytes() {
        let h = Hash::of(b"starling");
        assert_eq!(h.to_string().parse::<Hash>(), Ok(h));
        let wire = postcard::to_stdvec(&h).unwrap();
        assert_eq!(wire.len(), 32);
        assert_eq!(postcard::from_bytes::<Hash>(&wire).unwrap(), h);
    }

    #[test]
    fn a_bad_id_names_kind_expectation_and_value() {
        let err = "xyz".parse::<NodeId>().unwrap_err();
        assert_eq!(err.to_string(), "NodeId: expected 64 hexadecimal digits, got \"xyz\"");
    }

    #[test]
    fn model_names_refuse_spaces_and_excess() {
        assert!(ModelName::new("org/model-0.1_b").is_ok());
        assert!(ModelName::new("a b").is_err());
        assert!(ModelName::new("").is_err());
        assert!(ModelName::new("a".repeat(129)).is_err());
    }
}
