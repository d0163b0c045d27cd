//! What is known of the nodes: who lives, and what each says of itself.

use std::collections::{BTreeMap, BTreeSet};

use starling_protocol::NodeId;
use starling_protocol::record::{NodeRecord, SignedRecord};

/// Most records kept: at 8 KiB each at worst, 32 MiB.
pub(super) const RECORDS_MAX: usize = 4096;

#[derive(Clone, Debug)]
struct Known {
    record: NodeRecord,
    signed: SignedRecord,
}

/// Live nodes and records. Plain data: verification happens before a record comes here.
#[derive(Debug, Default)]
pub(super) struct Table {
    pub(super) live: BTreeSet<NodeId>,
    records: BTreeMap<NodeId, Known>,
}

impl Table {
    /// Only `node` lives, and nothing is known of it.
    pub(super) fn of(node: NodeId) -> Self {
        Self { live: [node].into(), records: BTreeMap::new() }
    }

    /// Takes a verified record; false when an equal or newer one is known, or there is no room.
    pub(super) fn take(&mut self, record: NodeRecord, signed: SignedRecord) -> bool {
        if self.records.get(&record.node).is_some_and(|k| k.record.sequence >= record.sequence) {
            return false;
        }
        if self.records.len() >= RECORDS_MAX && !self.records.contains_key(&record.node) && !self.forget_one() {
            return false;
        }
        self.records.insert(record.node, Known { record, signed });
        true
    }

    /// Drops the oldest record of a node that is not alive.
    fn forget_one(&mut self) -> bool {
        let oldest = self
            .records
            .iter()
            .filter(|(node, _)| !self.live.contains(node))
            .min_by_key(|(_, k)| k.record.sequence)
            .map(|(node, _)| *node);
        oldest.is_some_and(|node| self.records.remove(&node).is_some())
    }

    pub(super) fn record(&self, node: NodeId) -> Option<&NodeRecord> {
        self.records.get(&node).map(|k| &k.record)
    }
    pub(super) fn signed(&self, node: NodeId) -> Option<&SignedRecord> {
        self.records.get(&node).map(|k| &k.signed)
    }
    pub(super) fn records(&self) -> impl Iterator<Item = &NodeRecord> {
        self.records.values().map(|k| &k.record)
    }
    pub(super) fn live_records(&self) -> impl Iterator<Item = &NodeRecord> {
        self.records().filter(|r| self.live.contains(&r.node))
    }
    pub(super) fn digest(&self) -> Vec<(NodeId, u64)> {
        self.records().map(|r| (r.node, r.sequence)).collect()
    }
    /// Records that a node with `digest` lacks, at most `max_bytes` of them.
    pub(super) fn newer_than(&self, digest: &[(NodeId, u64)], max_bytes: usize) -> Vec<SignedRecord> {
        let theirs: BTreeMap<_, _> = digest.iter().copied().collect();
        let mut left = max_bytes;
        let lacking = self.records.iter().filter(|(n, k)| theirs.get(n).is_none_or(|s| *s < k.record.sequence));
        lacking
            .map_while(|(_, k)| {
                // The signature, its signer and lengths take about 100 bytes.
                left = left.checked_sub(k.signed.body.len() + 128)?;
                Some(k.signed.clone())
            })
            .collect()
    }
}
