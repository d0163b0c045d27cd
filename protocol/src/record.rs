//! Node records: what a node says of itself, signed, with a sequence number.

use crate::codec::{DecodeError, decode, encode};
use crate::ids::{ModelName, NodeId, PolicyVersion, StoreId};
use crate::signed::{Domain, Signature, Signer, Verifier};
use serde::{Deserialize, Serialize};

/// Longest encoded record: it travels by gossip.
pub const RECORD_LEN_BYTES_MAX: usize = 8 << 10;

/// What a node does. A node may have several roles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Hosts models, serves and trains them, holds rollouts.
    Server,
    /// Runs agents.
    Client,
    /// Votes, holds rollouts, never optimizes.
    Witness,
}

impl std::str::FromStr for Role {
    type Err = crate::ids::ParseIdError;
    fn from_str(s: &str) -> Result<Self, Self::Err> {
        match s {
            "server" => Ok(Self::Server),
            "client" => Ok(Self::Client),
            "witness" => Ok(Self::Witness),
            _ => Err(crate::ids::ParseIdError {
                kind: "role",
                expected: "server, client or witness, with commas between several",
                got: s.chars().take(80).collect(),
            }),
        }
    }
}

/// A model as a server hosts it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostedModel {
    /// Its name.
    pub model: ModelName,
    /// The version it serves now.
    pub version: PolicyVersion,
    /// Sequences running and waiting.
    pub queue: u32,
    /// What the server's device is worth for training it.
    pub fitness: Fitness,
}

/// What a device is worth for training a model, as its own node measured it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fitness {
    /// Not measured yet, or the measurement failed.
    #[default]
    Unknown,
    /// The device's memory does not hold weights, gradients and moments: such a node votes and does not lead.
    TooSmall,
    /// It trains.
    Trains {
        /// Tokens a second, forward, backward and optimizer step, over a short batch that is the same on all nodes.
        tokens_per_s: u32,
    },
}

impl Fitness {
    /// Tokens a second, if they were measured.
    #[must_use]
    pub fn tokens_per_s(self) -> Option<u32> {
        match self {
            Self::Trains { tokens_per_s } => Some(tokens_per_s),
            Self::Unknown | Self::TooSmall => None,
        }
    }
}

/// Whether a holder takes what others ask it to hold. Whatever it says, it serves what it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Intake {
    /// It takes rollouts and weights.
    #[default]
    Open,
    /// Its quota or its disk is used up. It counts as a holder that should take a copy and cannot.
    Full,
    /// It is about to leave: placement skips it, and its copies do not count.
    Draining,
}

/// What a node says of itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeRecord {
    /// Who.
    pub node: NodeId,
    /// Its store. Zero when it does not say.
    pub store: StoreId,
    /// Milliseconds since the epoch when it was made; a higher number replaces a lower one.
    pub sequence: u64,
    /// What it does; sorted, without repetition.
    pub roles: Vec<Role>,
    /// The program's version.
    pub version: String,
    /// Where it can be dialled, as multiaddr text.
    pub addresses: Vec<String>,
    /// The device it computes on, e.g. `cpu` or `cuda:0 NVIDIA H200`.
    pub device: String,
    /// Memory of that device in bytes.
    pub memory_bytes: u64,
    /// Cores.
    pub cores: u32,
    /// Models that it serves.
    pub models: Vec<HostedModel>,
    /// Bytes of rollouts and weights that it may still take: below its quota and its disk's reserve.
    pub storage_free_bytes: u64,
    /// Agents that it runs at once; 0 without the client role.
    pub agent_slots: u32,
    /// Whether it takes more to hold.
    pub intake: Intake,
}

impl NodeRecord {
    /// Whether the node has `role`.
    #[must_use]
    pub fn has(&self, role: Role) -> bool {
        self.roles.contains(&role)
    }
    /// Whether the node holds rollouts for others.
    #[must_use]
    pub fn holds_rollouts(&self) -> bool {
        self.has(Role::Server) || self.has(Role::Witness)
    }
    /// Whether the node holds rollouts and takes more.
    #[must_use]
    pub fn takes_rollouts(&self) -> bool {
        self.holds_rollouts() && self.intake == Intake::Open
    }
}

/// A node record as it travels.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignedRecord {
    /// The encoded [`NodeRecord`].
    #[serde(with = "serde_bytes")]
    pub body: Vec<u8>,
    /// By the node itself.
    pub signature: Signature,
}

/// Why a node record is refused. The sender's fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// Not a record.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// The signature is not the node's.
    #[error("node record of {node}: signature by {signer} does not verify")]
    BadSignature {
        /// Whose record it claims to be.
        node: NodeId,
        /// Who signed.
        signer: NodeId,
    },
}

impl SignedRecord {
    /// Signs `record`, whose node must be the signer.
    #[must_use]
    pub fn seal(record: &NodeRecord, signer: &dyn Signer) -> Self {
        let body = encode(record);
        let signature = Signature::new(signer, Domain::NodeRecord, &body);
        Self { body, signature }
    }
    /// Checks the signature and returns the record.
    ///
    /// # Errors
    /// [`RecordError`] when it is malformed or not signed by its node.
    pub fn verify(&self, verifier: &dyn Verifier) -> Result<NodeRecord, RecordError> {
        let record: NodeRecord = decode("node record", &self.body, RECORD_LEN_BYTES_MAX)?;
        if record.node == self.signature.signer && self.signature.verifies(verifier, Domain::NodeRecord, &self.body) {
            Ok(record)
        } else {
            Err(RecordError::BadSignature { node: record.node, signer: self.signature.signer })
        }
    }
}
