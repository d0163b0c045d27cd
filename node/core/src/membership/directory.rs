//! Which place a node's id has: tables, queues and suspicions speak of nodes by place.
//!
//! An id is 32 bytes and finding one costs a hash and a comparison; a place is an index. The nodes of one process may
//! share a directory (see `sharing`): then a node has the same place in all their tables, and its id is kept once.

use std::sync::{Mutex, MutexGuard};

use hashbrown::HashTable;
use starling_protocol::NodeId;

use crate::watch::lock;

/// Mixes 64 bits (the finalizer of `SplitMix64`, Steele et al., OOPSLA 2014).
pub(super) fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn fold(key: u64, node: &NodeId) -> u64 {
    node.0.chunks_exact(8).fold(key, |h, c| mix(h ^ c.try_into().map_or(0, u64::from_le_bytes)))
}

/// What has a place.
#[derive(Clone, Copy, Debug)]
struct Entry {
    node: NodeId,
    /// What a fingerprint of its row begins with.
    print: u64,
    /// Tables that have a row for it.
    users: u32,
    /// Equal everywhere: the first byte of its key would do, were keys made to be fair.
    bucket: u8,
}

/// The places, under one lock.
#[derive(Debug, Default)]
pub(super) struct Places {
    entries: Vec<Entry>,
    free: Vec<u32>,
    index: HashTable<u32>,
    key: u64,
}

impl Places {
    /// The place of `node`, if any table knows it.
    pub(super) fn find(&self, node: &NodeId) -> Option<usize> {
        let at = self.index.find(fold(self.key, node), |i| self.entries[*i as usize].node == *node)?;
        Some(*at as usize)
    }
    /// The node at a place that is in use.
    pub(super) fn node(&self, at: usize) -> NodeId {
        self.entries[at].node
    }
    /// The bucket of a node, by which tables are compared.
    pub(super) fn bucket(&self, at: usize) -> usize {
        usize::from(self.entries[at].bucket)
    }
    /// Its bucket, and what a fingerprint of its row begins with.
    pub(super) fn print(&self, at: usize) -> (usize, u64) {
        (self.bucket(at), self.entries[at].print)
    }
}

/// The places of nodes.
#[derive(Debug, Default)]
pub(super) struct Directory(Mutex<Places>);

impl Directory {
    /// Empty. `key` keeps strangers from choosing ids that collide.
    pub(super) fn new(key: u64) -> Self {
        Self(Mutex::new(Places { key, ..Places::default() }))
    }
    pub(super) fn places(&self) -> MutexGuard<'_, Places> {
        lock(&self.0)
    }
    /// A table gets a row for `node`. Returns its place.
    pub(super) fn enter(&self, node: NodeId) -> usize {
        let Places { entries, free, index, key } = &mut *self.places();
        let hash = fold(*key, &node);
        if let Some(at) = index.find(hash, |i| entries[*i as usize].node == node) {
            entries[*at as usize].users += 1;
            return *at as usize;
        }
        let entry = Entry { node, print: fold(1, &node), users: 1, bucket: fold(0, &node).to_le_bytes()[0] };
        let at = free.pop().unwrap_or_else(|| {
            entries.push(entry);
            u32::try_from(entries.len() - 1).unwrap_or(u32::MAX) // four billion ids do not fit into memory
        });
        entries[at as usize] = entry;
        index.insert_unique(hash, at, |i| fold(*key, &entries[*i as usize].node));
        at as usize
    }
    /// Tables gave their rows at `places` up; a place that no table uses any more is another node's next.
    pub(super) fn leave(&self, places: impl Iterator<Item = usize>) {
        let Places { entries, free, index, key } = &mut *self.places();
        for at in places {
            let entry = &mut entries[at];
            entry.users -= 1;
            if entry.users > 0 {
                continue;
            }
            if let Ok(found) = index.find_entry(fold(*key, &entry.node), |i| *i as usize == at) {
                found.remove();
            }
            free.push(u32::try_from(at).unwrap_or(u32::MAX));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_kept_while_any_table_uses_it_and_given_away_after_that() {
        let directory = Directory::new(7);
        let id = |n| NodeId([n; 32]);
        let (a, b) = (directory.enter(id(1)), directory.enter(id(2)));
        assert_ne!(a, b);
        assert_eq!(directory.enter(id(1)), a, "a second table");
        directory.leave([a].into_iter());
        assert_eq!(directory.places().find(&id(1)), Some(a));
        directory.leave([a].into_iter());
        assert_eq!(directory.places().find(&id(1)), None);
        assert_eq!(directory.enter(id(3)), a);
        let places = directory.places();
        assert_eq!((places.node(a), places.find(&id(2))), (id(3), Some(b)));
    }
}
