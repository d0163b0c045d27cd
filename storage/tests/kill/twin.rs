//! The memory twin of a store on disk, and the comparison of both.

use crate::operations::{JOB, log_of, perform, vote};
use starling_protocol::Hash;
use starling_storage::blobs::get_blob;
use starling_storage::rollouts::{count, get_rollout, list_all};
use starling_storage::schema::FORMAT_KEY;
use starling_storage::{Family, MemoryStore, SharedStore, Store, StoreError, audit};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Everything in a store: family, key, hash of the value.
pub(crate) type Content = BTreeMap<(Family, Vec<u8>), Hash>;

/// All that `store` holds, but for the format version, which a memory store has none of.
pub(crate) fn content(store: &dyn Store) -> Result<Content, StoreError> {
    let mut all = Content::new();
    for family in Family::ALL {
        for (key, value) in store.scan(family, &[], None, usize::MAX)? {
            if (family, key.as_slice()) != (Family::Meta, FORMAT_KEY) {
                all.insert((family, key), Hash::of(&value));
            }
        }
    }
    Ok(all)
}

/// Went through the operations below `done`, and through nothing else.
#[derive(Debug)]
pub(crate) struct Twin {
    seed: u64,
    store: SharedStore,
    pub(crate) done: u64,
    vote: u64,
}

impl Twin {
    pub(crate) fn new(seed: u64) -> Self {
        Self { seed, store: Arc::new(MemoryStore::new()), done: 0, vote: 0 }
    }

    pub(crate) fn perform_up_to(&mut self, done: u64) {
        while self.done < done {
            perform(&self.store, self.seed, self.done);
            self.done += 1;
        }
    }

    pub(crate) fn content(&self) -> Content {
        content(&self.store).unwrap()
    }

    /// Checks that `store` is what the acknowledged operations made of it, with or without the one in flight after
    /// them, and goes there itself.
    pub(crate) fn compare(&mut self, store: &SharedStore, when: &str) {
        let (mut found, expected) = (content(store).unwrap(), self.content());
        // Chunks of a transfer that the kill interrupted: they are missing until the index names them.
        let named = |key: &[u8]| store.get(Family::BlobIndex, key).unwrap().is_some();
        found.retain(|(family, key), _| *family != Family::Blobs || named(key));
        if found != expected {
            let acknowledged = self.done;
            self.perform_up_to(acknowledged + 1);
            let next = self.content();
            assert!(
                found == next,
                "{when}: after {acknowledged} acknowledged operations the store is neither what they made: {}; nor what \
                 one more would have: {}",
                difference(&expected, &found),
                difference(&next, &found)
            );
        }
        self.check_promises(store, when);
    }

    /// What holds whatever was written.
    fn check_promises(&mut self, store: &SharedStore, when: &str) {
        let log = log_of(store);
        let indices: Vec<u64> = log.read(0, u64::MAX, usize::MAX).unwrap().into_iter().map(|(i, _)| i).collect();
        assert!(indices.windows(2).all(|w| w[0] + 1 == w[1]), "{when}: the log has a gap: {indices:?}");
        let now = vote(&log);
        assert!(now >= self.vote, "{when}: the vote fell from {} to {now}", self.vote);
        self.vote = now;
        let ids = list_all(store, JOB, None, usize::MAX).unwrap();
        assert_eq!(ids.len(), count(store, JOB).unwrap(), "{when}");
        for id in &ids {
            assert!(get_rollout(store, *id).unwrap().is_some(), "{when}: {id} is indexed and not there");
        }
        for (key, _) in store.scan(Family::Blobs, &[], None, usize::MAX).unwrap() {
            assert!(get_blob(store, Hash(key.try_into().unwrap())).unwrap().is_some(), "{when}");
        }
        let report = audit(std::slice::from_ref(store), ids).unwrap();
        assert!(report.is_clean() && report.corrupt.is_empty(), "{when}: {report:?}");
    }
}

fn difference(expected: &Content, found: &Content) -> String {
    let name = |(family, key): &(Family, Vec<u8>)| format!("{family} {}", starling_storage::schema::hex(key));
    let missing: Vec<_> = expected.keys().filter(|k| !found.contains_key(*k)).take(3).map(name).collect();
    let extra: Vec<_> = found.keys().filter(|k| !expected.contains_key(*k)).take(3).map(name).collect();
    let other = |(k, v): &(&(Family, Vec<u8>), &Hash)| expected.get(*k).is_some_and(|e| e != *v);
    let changed: Vec<_> = found.iter().filter(other).take(3).map(|(k, _)| name(k)).collect();
    format!("missing {missing:?}, too much {extra:?}, different {changed:?}")
}
