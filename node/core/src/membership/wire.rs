//! What members say to each other: [`Frame`] is the body of a `Service::Swim` call, its answers are beside it.

use serde::{Deserialize, Serialize};
use starling_protocol::NodeId;
use starling_protocol::record::SignedRecord;

use super::state::Version;

/// What is said of one node: its id and [`Version`].
const CLAIM_LEN_BYTES: usize = 40;
/// The same with the sequence number of its record.
const ROW_LEN_BYTES: usize = 48;
/// Which claim, and who accuses.
const ACCUSER_LEN_BYTES: usize = 34;

/// Claims about nodes, 40 bytes each: postcard would take ids apart byte by byte, and there are many.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Claims(#[serde(with = "serde_bytes")] Vec<u8>);

/// Who accuses the suspects among some claims: the claim's place in their list and the accuser, 34 bytes each, in the
/// order of the claims.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Accusers(#[serde(with = "serde_bytes")] Vec<u8>);

/// Rows of a table, 48 bytes each.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Rows(#[serde(with = "serde_bytes")] Vec<u8>);

fn word(bytes: &[u8]) -> u64 {
    bytes.try_into().map_or(0, u64::from_le_bytes)
}

fn id(bytes: &[u8]) -> NodeId {
    bytes.try_into().map_or_else(|_short| NodeId::default(), NodeId)
}

impl Claims {
    pub(super) fn push(&mut self, node: NodeId, version: Version) {
        self.0.extend_from_slice(&node.0);
        self.0.extend_from_slice(&version.0.to_le_bytes());
    }
    pub(super) fn len(&self) -> usize {
        self.0.len() / CLAIM_LEN_BYTES
    }
    /// A tail that is no whole claim is ignored.
    pub(super) fn iter(&self) -> impl Iterator<Item = (NodeId, Version)> {
        self.0.chunks_exact(CLAIM_LEN_BYTES).map(|c| (id(&c[..32]), Version(word(&c[32..]))))
    }
}

impl Accusers {
    pub(super) fn push(&mut self, claim: usize, accuser: NodeId) {
        self.0.extend_from_slice(&u16::try_from(claim).unwrap_or(u16::MAX).to_le_bytes());
        self.0.extend_from_slice(&accuser.0);
    }
    /// A tail that is no whole accuser is ignored.
    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, NodeId)> {
        let claim = |c: &[u8]| c.try_into().map_or(usize::MAX, |b| usize::from(u16::from_le_bytes(b)));
        self.0.chunks_exact(ACCUSER_LEN_BYTES).map(move |c| (claim(&c[..2]), id(&c[2..])))
    }
}

impl Rows {
    pub(super) fn push(&mut self, node: NodeId, version: Version, sequence: u64) {
        self.0.extend_from_slice(&node.0);
        self.0.extend_from_slice(&version.0.to_le_bytes());
        self.0.extend_from_slice(&sequence.to_le_bytes());
    }
    pub(super) fn iter(&self) -> impl Iterator<Item = (NodeId, Version, u64)> {
        self.0.chunks_exact(ROW_LEN_BYTES).map(|c| (id(&c[..32]), Version(word(&c[32..40])), word(&c[40..])))
    }
}

/// News, with who sends it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct News {
    /// The sender's incarnation: it lives.
    pub(super) incarnation: u64,
    pub(super) claims: Claims,
    pub(super) accusers: Accusers,
}

/// A call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Frame {
    /// Are you there? Answered by [`News`].
    Ping(News),
    /// Is `target` there? Answered by [`Relayed`].
    PingFor { target: NodeId, news: News },
    /// Take this; answered by [`News`].
    Gossip(News),
    /// I am new, or you seem to be; answered by [`Welcome`].
    Join { incarnation: u64, record: Option<SignedRecord> },
    /// The hash of my table; answered by [`Compared`].
    Compare { incarnation: u64, hash: u64 },
    /// My rows in these buckets; answered by [`Difference`].
    Exchange { buckets: Vec<u8>, rows: Rows },
    /// Take these; answered by nothing.
    Records(Vec<SignedRecord>),
}

/// Answer to [`Frame::PingFor`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Relayed {
    /// The target answered.
    Answered(News),
    /// It did not, but the relay is well (the Nack of Lifeguard).
    Silent(News),
}

/// Answer to [`Frame::Join`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Welcome {
    /// All rows of the table, and some records.
    Table { rows: Rows, records: Vec<SignedRecord> },
    /// Too many join here: try these.
    Elsewhere(Vec<NodeId>),
}

/// Answer to [`Frame::Compare`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Compared {
    Same,
    /// The hash of each bucket.
    Buckets(Vec<u64>),
}

/// Answer to [`Frame::Exchange`]: what the other lacks, and of whom this node lacks the record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Difference {
    pub(super) rows: Rows,
    pub(super) records: Vec<SignedRecord>,
    pub(super) wanted: Vec<NodeId>,
}
