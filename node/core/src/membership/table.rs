//! What is known of the nodes: who lives, and what each says of itself.
//!
//! One row a node, 24 bytes, and some 45 of id and index in the directory: a table of 10,000 nodes is 0.7 MB without
//! its records. Every change costs the same however many rows there are.

use std::collections::BTreeMap;
use std::sync::Arc;

use starling_protocol::NodeId;
use starling_protocol::record::{NodeRecord, Role, SignedRecord};

use super::directory::{Directory, Places, mix};
use super::state::Version;
use super::wire::{Claims, Rows};

/// Most nodes known, the dead included: 32,768 × 70 bytes is 2.2 MiB. One more replaces the longest dead.
pub(super) const ROWS_MAX: usize = 1 << 15;
/// Most bytes of records kept: 32,768 of the usual 0.3 KiB take 10 MiB, so that only a flood of long ones (up to 8 KiB
/// each) is refused. What is decoded takes about as much again.
const RECORDS_BYTES_MAX: usize = 64 << 20;
/// Buckets that two tables compare: 2 KiB of hashes; at 10,000 nodes each holds 40 rows.
pub(super) const BUCKETS: usize = 256;
/// Rows are made room for in steps of this many: a table that doubled would waste a third of its memory.
const ROWS_STEP: usize = 512;

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

/// A node; which one is the directory's to say. 24 bytes.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) version: Version,
    pub(super) known: Option<Arc<Known>>,
    /// Seconds since this node's start when it was found alive or dead.
    since_s: u32,
    /// How often this row is still to be told; 0 when it is no news.
    pub(super) tellings: u8,
    /// Whether this place has a row.
    present: bool,
    /// Whether it has its turn in the order of probing.
    ordered: bool,
    /// Whether another accuser would not shorten its suspicion any more.
    pub(super) convicted: bool,
}

impl Row {
    const ABSENT: Self = Self {
        version: Version(0),
        known: None,
        since_s: 0,
        tellings: 0,
        present: false,
        ordered: false,
        convicted: false,
    };
    pub(super) fn sequence(&self) -> u64 {
        self.known.as_ref().map_or(0, |k| k.record.sequence)
    }
    /// Lives, and its record is not known.
    fn is_unrecorded(&self) -> bool {
        self.version.lives() && self.known.is_none()
    }
    /// Lives, and holds rollouts and weights for others.
    fn provides(&self) -> bool {
        self.version.lives() && self.known.as_ref().is_some_and(|k| k.record.holds_rollouts())
    }
}

/// Live nodes and records. Plain data: verification happens before a record comes here.
#[derive(Debug)]
pub(super) struct Table {
    directory: Arc<Directory>,
    /// By place.
    rows: Vec<Row>,
    count: usize,
    live: usize,
    /// Live nodes whose record is not known.
    unrecorded: usize,
    buckets: Box<[u64; BUCKETS]>,
    records_bytes: usize,
    /// Live nodes that hold rollouts and weights for others, with their places: few, and asked for all the time.
    providers: BTreeMap<NodeId, usize>,
    /// Counts changes of who is among them.
    provider_changes: u64,
    /// Live nodes, ascending, made when asked for.
    live_list: Option<Arc<Vec<NodeId>>>,
}

impl Drop for Table {
    fn drop(&mut self) {
        let used = self.rows.iter().enumerate().filter(|(_, r)| r.present).map(|(at, _)| at);
        self.directory.leave(used);
    }
}

impl Table {
    /// Only `node` lives, and nothing is known of it.
    pub(super) fn of(node: NodeId, version: Version, directory: Arc<Directory>) -> Self {
        let mut table = Self {
            directory,
            rows: Vec::new(),
            count: 0,
            live: 0,
            unrecorded: 0,
            buckets: Box::new([0; BUCKETS]),
            records_bytes: 0,
            providers: BTreeMap::new(),
            provider_changes: 0,
            live_list: None,
        };
        table.insert(node, version, 0);
        table
    }

    fn has(&self, at: usize) -> bool {
        self.rows.get(at).is_some_and(|r| r.present)
    }
    pub(super) fn find(&self, node: NodeId) -> Option<usize> {
        let at = self.directory.places().find(&node)?;
        self.has(at).then_some(at)
    }
    /// The places of all that is claimed, in order. One lock, and no row is waited for before the next id is found.
    pub(super) fn find_claimed(&self, claims: &Claims) -> Vec<Option<usize>> {
        if self.count + claims.len() > ROWS_MAX {
            return vec![None; claims.len()]; // a place may be given to another node while these are taken
        }
        let places = self.directory.places();
        let found = claims.iter().map(|(node, _)| places.find(&node).filter(|at| self.has(*at)));
        found.collect()
    }
    /// The row at a place that has one.
    pub(super) fn row(&self, at: usize) -> &Row {
        &self.rows[at]
    }
    /// The row at `at`, unless another replaced it meanwhile.
    pub(super) fn present(&self, at: usize) -> Option<&Row> {
        self.rows.get(at).filter(|r| r.present)
    }
    pub(super) fn node(&self, at: usize) -> NodeId {
        self.directory.places().node(at)
    }
    pub(super) fn places(&self) -> std::sync::MutexGuard<'_, Places> {
        self.directory.places()
    }
    pub(super) fn row_mut_tellings(&mut self, at: usize) -> &mut u8 {
        &mut self.rows[at].tellings
    }
    pub(super) fn set_convicted(&mut self, at: usize, convicted: bool) {
        self.rows[at].convicted = convicted;
    }
    /// Returns what was set before.
    pub(super) fn set_ordered(&mut self, at: usize, ordered: bool) -> bool {
        std::mem::replace(&mut self.rows[at].ordered, ordered)
    }
    pub(super) fn get(&self, node: NodeId) -> Option<&Row> {
        self.find(node).map(|at| &self.rows[at])
    }
    /// How many rows there are.
    pub(super) fn len(&self) -> usize {
        self.count
    }
    /// All rows with their places.
    pub(super) fn rows(&self) -> impl Iterator<Item = (usize, &Row)> {
        self.rows.iter().enumerate().filter(|(_, r)| r.present)
    }
    /// One of the rows that `wanted` chooses, the one that `draw` says of so many: each is as likely as the others,
    /// however they lie. Visits all rows.
    pub(super) fn some_row(&self, draw: impl FnOnce(usize) -> usize, wanted: impl Fn(&Row) -> bool) -> Option<NodeId> {
        let chosen = || self.rows().filter(|(_, r)| wanted(r));
        let many = chosen().count();
        let (at, _) = if many == 0 { None } else { chosen().nth(draw(many)) }?;
        Some(self.node(at))
    }
    /// The rows of some nodes, of those that have one.
    pub(super) fn rows_of<'a>(&'a self, nodes: impl Iterator<Item = &'a NodeId>) -> impl Iterator<Item = &'a Row> {
        nodes.filter_map(|n| self.get(*n))
    }
    /// Live nodes, this one included.
    pub(super) fn live(&self) -> usize {
        self.live
    }
    /// Live nodes whose record is not known.
    pub(super) fn unrecorded(&self) -> usize {
        self.unrecorded
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
        let (before, lived, provided) = ((row.version.settled(), row.sequence()), row.version.lives(), row.provides());
        let was_unrecorded = row.is_unrecorded();
        change(row);
        self.unrecorded = self.unrecorded + usize::from(row.is_unrecorded()) - usize::from(was_unrecorded);
        let (after, lives, provides) = ((row.version.settled(), row.sequence()), row.version.lives(), row.provides());
        if before != after {
            let (bucket, print) = self.directory.places().print(at);
            let slot = &mut self.buckets[bucket];
            *slot = slot.wrapping_sub(fingerprint(print, before)).wrapping_add(fingerprint(print, after));
        }
        if lives != lived {
            self.live = self.live + usize::from(lives) - usize::from(lived);
            self.live_list = None;
        }
        if provides != provided {
            let node = self.node(at);
            if provides {
                self.providers.insert(node, at);
            } else {
                self.providers.remove(&node);
            }
            self.provider_changes += 1;
        }
    }

    /// Adds a node that is not there; `None` when there is no room. Returns its place, which it keeps.
    pub(super) fn insert(&mut self, node: NodeId, version: Version, now_s: u32) -> Option<usize> {
        if self.count >= ROWS_MAX {
            let at = self.longest_dead()?;
            self.remove(at);
        }
        let at = self.directory.enter(node);
        if at >= self.rows.len() {
            let len = (at + 1).next_multiple_of(ROWS_STEP);
            self.rows.reserve_exact(len - self.rows.len());
            self.rows.resize(len, Row::ABSENT);
        }
        self.count += 1;
        self.rows[at] = Row { version, since_s: now_s, present: true, ..Row::ABSENT };
        let (bucket, print) = self.directory.places().print(at);
        let slot = &mut self.buckets[bucket];
        *slot = slot.wrapping_add(fingerprint(print, (version.settled(), 0)));
        if version.lives() {
            self.live += 1;
            self.unrecorded += 1;
            self.live_list = None;
        }
        Some(at)
    }

    fn longest_dead(&self) -> Option<usize> {
        let dead = self.rows().filter(|(_, r)| !r.version.lives());
        dead.min_by_key(|(_, r)| r.since_s).map(|(at, _)| at)
    }

    /// Takes a dead row out.
    fn remove(&mut self, at: usize) {
        let (bucket, print) = self.directory.places().print(at);
        let row = std::mem::replace(&mut self.rows[at], Row::ABSENT);
        self.count -= 1;
        self.records_bytes -= row.known.as_ref().map_or(0, |k| k.len_bytes());
        let slot = &mut self.buckets[bucket];
        *slot = slot.wrapping_sub(fingerprint(print, (row.version.settled(), row.sequence())));
        self.directory.leave(std::iter::once(at));
    }

    pub(super) fn set_version(&mut self, at: usize, version: Version, now_s: u32) {
        self.change(at, |row| {
            if row.version.lives() != version.lives() {
                row.since_s = now_s;
            }
            row.version = version;
            row.convicted = false;
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
        let old = self.rows[at].known.as_ref().map_or(0, |k| k.len_bytes());
        let bytes = self.records_bytes - old + known.len_bytes();
        if bytes > RECORDS_BYTES_MAX {
            return false;
        }
        self.records_bytes = bytes;
        self.change(at, |row| row.known = Some(known));
        true
    }

    /// Records of live nodes, by node.
    pub(super) fn live_records(&self) -> Vec<NodeRecord> {
        let live = self.rows().filter(|(_, r)| r.version.lives());
        let mut records: Vec<_> = live.filter_map(|(_, r)| r.known.as_ref().map(|k| k.record.clone())).collect();
        records.sort_unstable_by_key(|r| r.node);
        records
    }
    pub(super) fn records(&self) -> impl Iterator<Item = &NodeRecord> {
        self.rows().filter_map(|(_, r)| r.known.as_ref().map(|k| &k.record))
    }
    /// Records of the live nodes that hold rollouts and weights for others, by node.
    pub(super) fn providers(&self) -> impl Iterator<Item = &NodeRecord> {
        self.providers.values().filter_map(|at| self.rows[*at].known.as_ref().map(|k| &k.record))
    }
    /// Grows when one of these comes or goes.
    pub(super) fn provider_changes(&self) -> u64 {
        self.provider_changes
    }

    /// Live nodes, ascending.
    pub(super) fn live_list(&mut self) -> Arc<Vec<NodeId>> {
        if let Some(list) = &self.live_list {
            return list.clone();
        }
        let list = {
            let places = self.directory.places();
            ascending(self.rows().filter(|(_, r)| r.version.lives()).map(|(at, _)| places.node(at)))
        };
        self.live_list.insert(list).clone()
    }
    /// Live nodes with a role, ascending. All of them are looked at for clients, else only those that hold things.
    pub(super) fn with_role(&self, role: Role) -> Vec<NodeId> {
        if role != Role::Client {
            return self.providers().filter(|r| r.has(role)).map(|r| r.node).collect();
        }
        let mut list: Vec<_> = self
            .rows()
            .filter(|(_, r)| r.version.lives())
            .filter_map(|(_, r)| r.known.as_ref().filter(|k| k.record.has(role)).map(|k| k.record.node))
            .collect();
        list.sort_unstable();
        list
    }

    /// The rows of the buckets that `wanted` chooses, as they travel.
    pub(super) fn rows_where(&self, wanted: impl Fn(usize) -> bool) -> Rows {
        let places = self.directory.places();
        let mut rows = Rows::default();
        for (at, row) in self.rows() {
            if wanted(places.bucket(at)) {
                rows.push(places.node(at), row.version.settled(), row.sequence());
            }
        }
        rows
    }
}

/// What a row adds to the hash of its bucket: `print` stands for its node.
fn fingerprint(print: u64, (version, sequence): (Version, u64)) -> u64 {
    mix(mix(print ^ version.0) ^ sequence)
}

fn ascending(nodes: impl Iterator<Item = NodeId>) -> Arc<Vec<NodeId>> {
    let mut list: Vec<_> = nodes.collect();
    list.sort_unstable();
    Arc::new(list)
}
