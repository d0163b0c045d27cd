//! Keys on disk. Changing anything here changes [`FORMAT_VERSION`].
//!
//! Numbers are big endian, so that bytes sort as numbers do. A name comes with its length in front, so that no
//! name's keys lie among those of another that it begins.

use starling_protocol::ids::NAME_LEN_BYTES_MAX;
use starling_protocol::{Hash, JobId, ModelName, PolicyVersion, RolloutId};

/// Version of the layout on disk: 3 since a step's row names its entry's term and the version that it was trained from,
/// and a group its line.
pub const FORMAT_VERSION: u32 = 4;

/// Key of the format version in `Meta`.
pub const FORMAT_KEY: &[u8] = b"format_version";

/// Lower-case hexadecimal.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// The smallest key above all keys that begin with `prefix`; `None` when there is none.
#[must_use]
pub fn prefix_end(prefix: &[u8]) -> Option<Vec<u8>> {
    let keep = prefix.iter().rposition(|b| *b != u8::MAX)?;
    let mut end = prefix[..=keep].to_vec();
    end[keep] += 1;
    Some(end)
}

/// The smallest key above `key`.
#[must_use]
pub fn successor(key: &[u8]) -> Vec<u8> {
    let mut next = key.to_vec();
    next.push(0);
    next
}

/// Prefix of all keys of a model: length of its name, name.
///
/// # Panics
/// Never: a model's name has at most 128 bytes.
#[must_use]
pub fn model_prefix(model: &ModelName) -> Vec<u8> {
    let name = model.as_str().as_bytes();
    const { assert!(NAME_LEN_BYTES_MAX <= u8::MAX as usize) };
    let mut key = Vec::with_capacity(1 + name.len() + 8);
    #[expect(clippy::cast_possible_truncation, reason = "asserted above")]
    key.push(name.len() as u8);
    key.extend_from_slice(name);
    key
}

/// Key in `RolloutsByJob`: job, rollout.
#[must_use]
pub fn job_rollout_key(job: JobId, id: RolloutId) -> [u8; 48] {
    let mut key = [0; 48];
    key[..16].copy_from_slice(&job.0);
    key[16..].copy_from_slice(&id.0);
    key
}

/// Key in `Quarantine`: length of the family's name, name, the value's key there.
#[must_use]
pub fn quarantine_key(family: &str, key: &[u8]) -> Vec<u8> {
    let mut all = Vec::with_capacity(1 + family.len() + key.len());
    #[expect(clippy::cast_possible_truncation, reason = "families have short names")]
    all.push(family.len() as u8);
    all.extend_from_slice(family.as_bytes());
    all.extend_from_slice(key);
    all
}

/// Key in `Models`: model, version.
#[must_use]
pub fn step_key(model: &ModelName, version: PolicyVersion) -> Vec<u8> {
    numbered_key(model, version.0)
}

/// Key in `RaftLog`: group, index.
#[must_use]
pub fn log_key(group: &ModelName, index: u64) -> Vec<u8> {
    numbered_key(group, index)
}

/// Key in `RaftMeta`: group, name.
#[must_use]
pub fn raft_meta_key(group: &ModelName, name: &str) -> Vec<u8> {
    let mut key = model_prefix(group);
    key.extend_from_slice(name.as_bytes());
    key
}

/// Group and name of a key in `RaftMeta`; `None` if it is not one.
#[must_use]
pub fn split_raft_meta_key(key: &[u8]) -> Option<(ModelName, &str)> {
    let (len, rest) = key.split_first()?;
    let (group, name) = rest.split_at_checked(usize::from(*len))?;
    let group = ModelName::new(std::str::from_utf8(group).ok()?).ok()?;
    Some((group, std::str::from_utf8(name).ok()?))
}

fn numbered_key(model: &ModelName, number: u64) -> Vec<u8> {
    let mut key = model_prefix(model);
    key.extend_from_slice(&number.to_be_bytes());
    key
}

/// Model and number of a key in `Models` or `RaftLog`; `None` if it is not one.
#[must_use]
pub fn split_numbered_key(key: &[u8]) -> Option<(ModelName, u64)> {
    let (len, rest) = key.split_first()?;
    let (name, number) = rest.split_at_checked(usize::from(*len))?;
    let model = ModelName::new(std::str::from_utf8(name).ok()?).ok()?;
    Some((model, u64::from_be_bytes(number.try_into().ok()?)))
}

/// Job and rollout of a key in `RolloutsByJob`; `None` if it is not one.
#[must_use]
pub fn split_job_rollout_key(key: &[u8]) -> Option<(JobId, RolloutId)> {
    let (job, id) = key.split_at_checked(16)?;
    Some((JobId(job.try_into().ok()?), Hash(id.try_into().ok()?)))
}

/// The last 32 bytes of a key, where the hash stands; `None` if it is shorter.
#[must_use]
pub fn hash_at_end(key: &[u8]) -> Option<Hash> {
    key.last_chunk::<32>().map(|h| Hash(*h))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(s: &str) -> ModelName {
        ModelName::new(s).unwrap()
    }

    #[test]
    fn golden_bytes() {
        assert_eq!(hex(&step_key(&model("m/1"), PolicyVersion(258))), "036d2f310000000000000102");
        assert_eq!(hex(&log_key(&model("m"), u64::MAX)), "016dffffffffffffffff");
        assert_eq!(hex(&raft_meta_key(&model("m"), "vote")), "016d766f7465");
        let key = job_rollout_key(JobId([0xaa; 16]), Hash([0xbb; 32]));
        assert_eq!(hex(&key), "aa".repeat(16) + &"bb".repeat(32));
        assert_eq!(hash_at_end(&key), Some(Hash([0xbb; 32])));
        assert_eq!(split_job_rollout_key(&key), Some((JobId([0xaa; 16]), Hash([0xbb; 32]))));
        assert_eq!(split_job_rollout_key(&key[1..]), None);
        assert_eq!(hex(&quarantine_key("blobs", &[7, 8])), "05626c6f62730708");
        assert_eq!((FORMAT_VERSION, FORMAT_KEY), (4, b"format_version".as_slice()));
    }

    #[test]
    fn a_meta_key_splits_into_what_it_was_made_of() {
        assert_eq!(split_raft_meta_key(&raft_meta_key(&model("m/1"), "lineage")), Some((model("m/1"), "lineage")));
        assert_eq!(split_raft_meta_key(b"\x05ab"), None);
    }

    #[test]
    fn keys_sort_as_their_numbers() {
        let m = model("m");
        for (a, b) in [(0, 1), (255, 256), (65_535, 65_536), (u64::MAX - 1, u64::MAX)] {
            assert!(log_key(&m, a) < log_key(&m, b), "{a} {b}");
        }
    }

    #[test]
    fn a_name_that_begins_another_has_its_own_range() {
        let (short, long) = (model_prefix(&model("a")), model_prefix(&model("ab")));
        let end = prefix_end(&short).unwrap();
        let foreign = log_key(&model("ab"), 0);
        assert!(!(short <= foreign && foreign < end));
        assert!(foreign.starts_with(&long));
    }

    #[test]
    fn prefix_end_skips_full_bytes() {
        assert_eq!(prefix_end(&[1, 2]), Some(vec![1, 3]));
        assert_eq!(prefix_end(&[1, 255, 255]), Some(vec![2]));
        assert_eq!(prefix_end(&[255, 255]), None);
        assert_eq!(prefix_end(&[]), None);
    }

    #[test]
    fn a_numbered_key_splits_into_what_it_was_made_of() {
        let m = model("org/model-0.1_b");
        assert_eq!(split_numbered_key(&step_key(&m, PolicyVersion(7))), Some((m, 7)));
        for bad in [&b""[..], b"\x05ab", b"\x01a1234567", b"\x01 12345678", b"\x01a123456789"] {
            assert_eq!(split_numbered_key(bad), None, "{bad:?}");
        }
    }
}
