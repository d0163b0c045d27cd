//! How two tables become equal: their hashes first, then those of 256 buckets, then the rows of some that differ.
//! In a mesh where nothing changes a comparison takes two messages of a few bytes, whatever its size.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hashbrown::HashMap;
use rand::RngExt;
use starling_protocol::NodeId;
use starling_protocol::record::SignedRecord;
use tokio::time::Instant;

use super::Inner;
use super::table::{BUCKETS, Row};
use super::wire::{Compared, Difference, Frame, Rows, Welcome};
use crate::watch::lock;

/// Rows compared at once: 2,000 × 48 bytes is 96 KiB.
const ROWS_MAX: usize = 2_000;
/// Most bytes of records in one message: about 800 usual ones.
const RECORDS_BYTES_MAX: usize = 256 << 10;
/// Nodes named to one that joins when too many do.
const NAMED: usize = 8;
/// A table of up to this many nodes (3 KiB) is given to everyone who asks.
const SMALL_TABLE: usize = 64;

impl Inner {
    /// Announces this node to `peer`, and takes what it knows.
    pub(super) async fn join(&self, peer: NodeId, limit: Duration) {
        let frame = {
            let swim = lock(&self.swim);
            let record = swim.table.get(self.node).and_then(|r| r.known.as_ref().map(|k| k.signed.clone()));
            Frame::Join { incarnation: swim.incarnation(), record }
        };
        match self.request::<Welcome>(peer, &frame, limit).await {
            Some(Welcome::Table { rows, records }) => {
                self.hear_rows(&rows);
                self.take_all(peer, &records);
                self.differs.store(true, Ordering::Release);
            }
            Some(Welcome::Elsewhere(peers)) => *lock(&self.named) = peers.into_iter().take(NAMED).collect(),
            None => {}
        }
    }

    pub(super) fn on_join(&self, from: NodeId, incarnation: u64, record: Option<&SignedRecord>) -> Welcome {
        if let Some(record) = record {
            self.take_all(from, std::slice::from_ref(record));
        }
        let now = Instant::now();
        let mut swim = lock(&self.swim);
        swim.hear_alive(now, from, incarnation);
        self.tell(&mut swim);
        if swim.table.len() <= SMALL_TABLE || swim.admits_join(now) {
            let rows = swim.table.rows_where(|_| true);
            let records = records(swim.table.rows().map(|(_, row)| row), |_| 0);
            return Welcome::Table { rows, records };
        }
        Welcome::Elsewhere(swim.some_live(NAMED, from))
    }

    /// Compares tables with `peer`, and makes both more alike.
    pub(super) async fn compare(self: Arc<Self>, peer: NodeId, limit: Duration) {
        let frame = {
            let swim = lock(&self.swim);
            Frame::Compare { incarnation: swim.incarnation(), hash: swim.table.hash() }
        };
        let Some(Compared::Buckets(theirs)) = self.request::<Compared>(peer, &frame, limit).await else { return };
        self.differs.store(true, Ordering::Release);
        let frame = {
            let mut swim = lock(&self.swim);
            let start = swim.rng().random_range(0..BUCKETS);
            let ours = swim.table.buckets();
            let each = swim.table.len().div_ceil(BUCKETS);
            let differing = (0..BUCKETS).map(|i| (start + i) % BUCKETS).filter(|b| theirs.get(*b) != Some(&ours[*b]));
            let some = differing.take((ROWS_MAX / each.max(1)).max(1));
            let buckets: Vec<_> = some.filter_map(|b| u8::try_from(b).ok()).collect();
            let asked = mask(&buckets);
            let rows = swim.table.rows_where(|bucket| asked[bucket]);
            Frame::Exchange { buckets, rows }
        };
        let Some(difference) = self.request::<Difference>(peer, &frame, limit).await else { return };
        self.hear_rows(&difference.rows);
        self.take_all(peer, &difference.records);
        let wanted = {
            let swim = lock(&self.swim);
            records(swim.table.rows_of(difference.wanted.iter().take(ROWS_MAX)), |_| 0)
        };
        if !wanted.is_empty() {
            let _nothing: Option<()> = self.request(peer, &Frame::Records(wanted), limit).await;
        }
    }

    pub(super) fn on_compare(&self, from: NodeId, incarnation: u64, hash: u64) -> Compared {
        let mut swim = lock(&self.swim);
        swim.hear_alive(Instant::now(), from, incarnation);
        self.tell(&mut swim);
        if swim.table.hash() == hash {
            return Compared::Same;
        }
        Compared::Buckets(swim.table.buckets().to_vec())
    }

    pub(super) fn on_exchange(&self, buckets: &[u8], rows: &Rows) -> Difference {
        let theirs: HashMap<_, _> = rows.iter().map(|(node, version, sequence)| (node, (version, sequence))).collect();
        self.hear_rows(rows);
        let swim = lock(&self.swim);
        let asked = mask(buckets);
        let ours = {
            let places = swim.table.places();
            let ours = swim.table.rows().filter(|(at, _)| asked[places.bucket(*at)]);
            ours.map(|(at, row)| (places.node(at), row)).collect::<Vec<_>>()
        };
        let mut difference = Difference::default();
        for (node, row) in &ours {
            if theirs.get(node).is_none_or(|(v, _)| *v < row.version.settled()) {
                difference.rows.push(*node, row.version.settled(), row.sequence());
            }
        }
        // What they have and this node has not by now was refused: a full table, or a claim from the future.
        let newer = |(node, row): &&(NodeId, &Row)| theirs.get(node).is_some_and(|(_, s)| *s > row.sequence());
        difference.wanted = ours.iter().filter(newer).map(|(node, _)| *node).collect();
        difference.records =
            records(ours.into_iter().map(|(_, row)| row), |node| theirs.get(node).map_or(0, |(_, s)| *s));
        difference
    }

    fn hear_rows(&self, rows: &Rows) {
        let now = Instant::now();
        let mut swim = lock(&self.swim);
        for (node, version, _) in rows.iter() {
            swim.hear_row(now, node, version);
        }
        self.tell(&mut swim);
    }
}

/// Which buckets are among `buckets`.
fn mask(buckets: &[u8]) -> [bool; BUCKETS] {
    let mut asked = [false; BUCKETS];
    buckets.iter().for_each(|b| asked[usize::from(*b)] = true);
    asked
}

/// The records of `rows` that are newer than what the other has, as many as fit into one message.
fn records<'a>(rows: impl Iterator<Item = &'a Row>, theirs: impl Fn(&NodeId) -> u64) -> Vec<SignedRecord> {
    let mut left = RECORDS_BYTES_MAX;
    let newer = rows.filter_map(|r| r.known.as_ref()).filter(|k| k.record.sequence > theirs(&k.record.node));
    newer
        .map_while(|known| {
            // The signature, its signer and lengths take about 100 bytes.
            left = left.checked_sub(known.signed.body.len() + 128)?;
            Some(known.signed.clone())
        })
        .collect()
}
