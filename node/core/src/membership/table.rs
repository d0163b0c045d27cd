//! What is known of the nodes: who lives, and what each says of itself.
//!
//! One row a node, 56 bytes and 9 of index: a table of 10,000 nodes is 0.7 MB without its records. Every change costs
//! the same however many rows there are.

use std::sync::Arc;

use hashbrown::HashTable;
use starling_protocol::NodeId;
use starling_protocol::record::{Intake, NodeRecord, Role, SignedRecord};

use super::state::Version;

/// Most nodes known, the dead included: 32,768 × 65 bytes is 2 MiB. One more replaces the longest dead.
pub(super) const ROWS_MAX: usize = 1 << 15;
/// Most bytes of records kept: 32,768 of the usual 0.3 KiB take 10 MiB, so that only a flood of long ones (up to 8 KiB
/// each) is refused. What is decoded takes about as much again.
const RECORDS_BYTES_MAX: usize = 64 << 20;
/// Buckets that two tables compare: 2 KiB of hashes; at 10,000 nodes each holds 40 rows.
pub(super) const BUCKETS: usize = 256;

/// A verified record with its signature. The nodes of one process may share them, see `sharing`.
#[derive(Debug)]
pub(super) struct Known {
    pub(super) record: NodeRecord,
    pub(super) signed: SignedRecord,
}

impl Known {
    fn len_bytes(&self) -> usize {
        self.signed.body.len() + 128
    }
}

/// A node.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) node: NodeId,
    pub(super) version: Version,
    pub(super) known: Option<Arc<Known>>,
    /// Seconds since this node's start when it was found alive or dead.
    since_s: u32,
    /// How often this row is still to be told; 0 when it is no news.
    pub(super) tellings: u8,
    pub(super) bucket: u8,
    /// Whether it has its turn in the order of probing.
    ordered: bool,
}

impl Row {
    pub(super) fn sequence(&self) -> u64 {
        self.known.as_ref().map_or(0, |k| k.record.sequence)
    }
}

/// Lists by role, ascending, made when asked for.
#[derive(Debug, Default)]
struct Lists {
    live: Option<Arc<Vec<NodeId>>>,
    holders: Option<Arc<Vec<NodeId>>>,
    roles: [Option<Arc<Vec<NodeId>>>; 3],
}

/// Live nodes and records. Plain data: verification happens before a record comes here.
#[derive(Debug)]
pub(super) struct Table {
    rows: Vec<Row>,
    index: HashTable<u32>,
    key: u64,
    live: usize,
    buckets: Box<[u64; BUCKETS]>,
    records_bytes: usize,
    lists: Lists,
}

/// Mixes 64 bits (the finalizer of `SplitMix64`, Steele et al., OOPSLA 2014).
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn fold(key: u64, node: &NodeId) -> u64 {
    node.0.chunks_exact(8).fold(key, |h, c| mix(h ^ c.try_into().map_or(0, u64::from_le_bytes)))
}

/// The bucket of a node, equal everywhere: the first byte of its key would do, were keys made to be fair.
fn bucket(node: &NodeId) -> u8 {
    fold(0, node).to_le_bytes()[0]
}

fn fingerprint(row: &Row) -> u64 {
    let h = mix(fold(1, &row.node) ^ row.version.settled().0);
    mix(h ^ row.sequence())
}

impl Table {
    /// Only `node` lives, and nothing is known of it. `key` keeps strangers from choosing ids that collide.
    pub(super) fn of(node: NodeId, version: Version, key: u64) -> Self {
        let mut table = Self {
            rows: Vec::new(),
            index: HashTable::new(),
            key,
            live: 0,
            buckets: Box::new([0; BUCKETS]),
            records_bytes: 0,
            lists: Lists::default(),
        };
        table.insert(node, version, 0);
        table
    }

    pub(super) fn find(&self, node: NodeId) -> Option<usize> {
        let at = self.index.find(fold(self.key, &node), |i| self.rows[*i as usize].node == node)?;
        Some(*at as usize)
    }
    pub(super) fn row(&self, at: usize) -> &Row {
        &self.rows[at]
    }
    pub(super) fn row_mut_tellings(&mut self, at: usize) -> &mut u8 {
        &mut self.rows[at].tellings
    }
    /// Returns what was set before.
    pub(super) fn set_ordered(&mut self, at: usize, ordered: bool) -> bool {
        std::mem::replace(&mut self.rows[at].ordered, ordered)
    }
    pub(super) fn get(&self, node: NodeId) -> Option<&Row> {
        self.find(node).map(|at| &self.rows[at])
    }
    pub(super) fn rows(&self) -> &[Row] {
        &self.rows
    }
    /// Live nodes, this one included.
    pub(super) fn live(&self) -> usize {
        self.live
    }
    pub(super) fn is_live(&self, node: NodeId) -> bool {
        self.get(node).is_some_and(|r| r.version.lives())
    }
    pub(super) fn buckets(&self) -> &[u64; BUCKETS] {
        &self.buckets
    }
    /// Equal tables have equal hashes; unequal ones with probability 2⁻⁶⁴, which the next change ends.
    pub(super) fn hash(&self) -> u64 {
        self.buckets.iter().fold(0, |h, b| mix(h ^ b))
    }

    /// Changes a row, and keeps hashes, counts and lists true.
    fn change(&mut self, at: usize, change: impl FnOnce(&mut Row)) {
        let row = &mut self.rows[at];
        let (before, lived) = (fingerprint(row), row.version.lives());
        change(row);
        let lives = row.version.lives();
        let slot = &mut self.buckets[usize::from(row.bucket)];
        *slot = slot.wrapping_sub(before).wrapping_add(fingerprint(row));
        self.live = self.live + usize::from(lives) - usize::from(lived);
        if lives != lived {
            self.lists = Lists::default();
        }
    }

    /// Adds a node that is not there; `None` when there is no room. Returns its place, which it keeps.
    pub(super) fn insert(&mut self, node: NodeId, version: Version, now_s: u32) -> Option<usize> {
        let row =
            Row { node, version, known: None, since_s: now_s, tellings: 0, bucket: bucket(&node), ordered: false };
        let at = if self.rows.len() < ROWS_MAX {
            self.rows.push(row);
            self.rows.len() - 1
        } else {
            let at = self.longest_dead()?;
            self.remove(at);
            self.rows[at] = row;
            at
        };
        let (key, rows) = (self.key, &self.rows);
        let place = u32::try_from(at).unwrap_or(u32::MAX);
        self.index.insert_unique(fold(key, &node), place, |i| fold(key, &rows[*i as usize].node));
        let print = fingerprint(&self.rows[at]);
        let slot = &mut self.buckets[usize::from(bucket(&node))];
        *slot = slot.wrapping_add(print);
        if version.lives() {
            self.live += 1;
            self.lists = Lists::default();
        }
        Some(at)
    }

    fn longest_dead(&self) -> Option<usize> {
        let dead = self.rows.iter().enumerate().filter(|(_, r)| !r.version.lives());
        dead.min_by_key(|(_, r)| r.since_s).map(|(at, _)| at)
    }

    /// Takes a dead row out of index and hashes; its place is filled by the caller.
    fn remove(&mut self, at: usize) {
        let row = &self.rows[at];
        let (node, print) = (row.node, fingerprint(row));
        self.records_bytes -= row.known.as_ref().map_or(0, |k| k.len_bytes());
        let slot = &mut self.buckets[usize::from(bucket(&node))];
        *slot = slot.wrapping_sub(print);
        if let Ok(entry) = self.index.find_entry(fold(self.key, &node), |i| *i as usize == at) {
            entry.remove();
        }
    }

    pub(super) fn set_version(&mut self, at: usize, version: Version, now_s: u32) {
        self.change(at, |row| {
            if row.version.lives() != version.lives() {
                row.since_s = now_s;
            }
            row.version = version;
        });
    }

    /// Whether a record of `node` with this number would be news that has room.
    pub(super) fn wants(&self, node: NodeId, sequence: u64) -> bool {
        self.get(node).is_none_or(|r| r.sequence() < sequence)
    }

    /// Takes a verified record; false when an equal or newer one is known, or there is no room. A node of which only
    /// its record is known counts as dead, of the lowest incarnation.
    pub(super) fn take(&mut self, known: Arc<Known>, now_s: u32) -> bool {
        let node = known.record.node;
        if !self.wants(node, known.record.sequence) {
            return false;
        }
        let Some(at) = self.find(node).or_else(|| self.insert(node, Version::alive(0).dead(), now_s)) else {
            return false;
        };
        let old = self.rows[at].known.clone();
        let bytes = self.records_bytes - old.as_ref().map_or(0, |k| k.len_bytes()) + known.len_bytes();
        if bytes > RECORDS_BYTES_MAX {
            return false;
        }
        self.records_bytes = bytes;
        if old.is_none_or(|o| o.record.roles != known.record.roles) {
            self.lists = Lists::default();
        }
        self.change(at, |row| row.known = Some(known));
        true
    }

    /// Known records of live nodes, in no particular order.
    fn live_known(&self) -> impl Iterator<Item = &NodeRecord> {
        self.rows.iter().filter(|r| r.version.lives()).filter_map(|r| r.known.as_ref().map(|k| &k.record))
    }
    /// Records of live nodes, by node.
    pub(super) fn live_records(&self) -> Vec<NodeRecord> {
        let mut records: Vec<_> = self.live_known().cloned().collect();
        records.sort_unstable_by_key(|r| r.node);
        records
    }
    /// Live nodes that hold rollouts and weights for others, ascending, with what they take.
    pub(super) fn live_intakes(&self) -> Vec<(NodeId, Intake)> {
        let mut all: Vec<_> = self.live_known().filter(|r| r.holds_rollouts()).map(|r| (r.node, r.intake)).collect();
        all.sort_unstable_by_key(|(node, _)| *node);
        all
    }
    pub(super) fn records(&self) -> impl Iterator<Item = &NodeRecord> {
        self.rows.iter().filter_map(|r| r.known.as_ref().map(|k| &k.record))
    }

    /// Live nodes, ascending.
    pub(super) fn live_list(&mut self) -> Arc<Vec<NodeId>> {
        if let Some(list) = &self.lists.live {
            return list.clone();
        }
        let list = ascending(self.rows.iter().filter(|r| r.version.lives()).map(|r| r.node));
        self.lists.live.insert(list).clone()
    }
    /// Live nodes that hold rollouts and weights for others, ascending.
    pub(super) fn holders_list(&mut self) -> Arc<Vec<NodeId>> {
        if let Some(list) = &self.lists.holders {
            return list.clone();
        }
        let list = ascending(self.live_known().filter(|r| r.holds_rollouts()).map(|r| r.node));
        self.lists.holders.insert(list).clone()
    }
    /// Live nodes with a role, ascending.
    pub(super) fn role_list(&mut self, role: Role) -> Arc<Vec<NodeId>> {
        let slot = match role {
            Role::Server => 0,
            Role::Client => 1,
            Role::Witness => 2,
        };
        if let Some(list) = &self.lists.roles[slot] {
            return list.clone();
        }
        let list = ascending(self.live_known().filter(|r| r.has(role)).map(|r| r.node));
        self.lists.roles[slot].insert(list).clone()
    }
}

fn ascending(nodes: impl Iterator<Item = NodeId>) -> Arc<Vec<NodeId>> {
    let mut list: Vec<_> = nodes.collect();
    list.sort_unstable();
    Arc::new(list)
}
