//! Messages between nodes, of [`WIRE_VERSION`]. Postcard, each with a length limit.
//!
//! One request-response protocol carries [`Service`] calls, one stream protocol carries generation, and
//! gossip carries [`Gossip`]. Bodies of rollouts and weights never travel by gossip.

use crate::assignment::{Assignment, HeldLease};
use crate::control::ControlEntry;
use crate::ids::{EpisodeId, Hash, JobId, ModelName, NodeId, PolicyVersion, RolloutId, StoreId, Term};
use crate::lineage::{Line, Lineage};
use crate::manifest::{DeltaManifest, Manifest};
use crate::record::SignedRecord;
use crate::rollout::{FinishReason, Receipt};
use serde::{Deserialize, Serialize};

/// Version of the messages, a part of every protocol's and topic's name: 2 since they name their line. Nodes of another
/// version do not understand each other, and say so when they meet.
pub const WIRE_VERSION: u32 = 3;
/// Longest request or response: four chunks or one rollout, with room for the frame.
pub const CALL_LEN_BYTES_MAX: usize = (4 << 20) + (64 << 10);
/// Longest frame of a generation stream: 128 Ki token ids of five bytes.
pub const FRAME_LEN_BYTES_MAX: usize = 1 << 20;
/// Longest gossip message.
pub const GOSSIP_LEN_BYTES_MAX: usize = 16 << 10;

/// What a call is about: chooses the handler, is the first byte on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum Service {
    /// Membership: probes, joins and comparisons of tables; see `docs/consensus.md`.
    Swim = 0,
    /// Raft messages of one model's group.
    Raft = 1,
    /// [`RolloutCall`] → [`RolloutReply`].
    Rollouts = 2,
    /// [`BlobCall`] → [`BlobReply`].
    Blobs = 3,
    /// [`LeaderCall`] → [`LeaderReply`].
    Leader = 4,
}

impl Service {
    /// From the first byte of a call.
    #[must_use]
    pub fn from_byte(b: u8) -> Option<Self> {
        [Self::Swim, Self::Raft, Self::Rollouts, Self::Blobs, Self::Leader].into_iter().find(|s| *s as u8 == b)
    }
}

/// Gossip topics. `Nodes` is one topic; the others are one a model.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Topic {
    /// Node records.
    Nodes,
    /// Stored rollouts of a model.
    Rollouts(ModelName),
    /// Committed steps of a model.
    Weights(ModelName),
    /// Models and their groups.
    Models,
}

impl Topic {
    /// The topic's name on the mesh.
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Self::Nodes => format!("starling/nodes/{WIRE_VERSION}"),
            Self::Models => format!("starling/models/{WIRE_VERSION}"),
            Self::Rollouts(m) => format!("starling/rollouts/{WIRE_VERSION}/{m}"),
            Self::Weights(m) => format!("starling/weights/{WIRE_VERSION}/{m}"),
        }
    }
}

/// Where a stored rollout lies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RolloutAnnouncement {
    /// Its address.
    pub id: RolloutId,
    /// Its job.
    pub job: JobId,
    /// Nodes that hold it durably.
    pub holders: Vec<NodeId>,
}

/// A model of the mesh and who hosts it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelAnnouncement {
    /// Its name.
    pub model: ModelName,
    /// The line that the sender is in.
    pub line: Line,
    /// Voters of its group, as the sender knows them.
    pub voters: Vec<NodeId>,
    /// The leader that the sender knows, with its term.
    pub leader: Option<(NodeId, Term)>,
    /// The version committed.
    pub version: PolicyVersion,
    /// The job that runs.
    pub running_job: Option<JobId>,
}

/// One gossip message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Gossip {
    /// On [`Topic::Nodes`].
    Node(SignedRecord),
    /// On [`Topic::Rollouts`].
    Rollouts(Vec<RolloutAnnouncement>),
    /// On [`Topic::Weights`]: a version was committed.
    Committed {
        /// Model.
        model: ModelName,
        /// Term.
        term: Term,
        /// Version.
        version: PolicyVersion,
    },
    /// On [`Topic::Models`].
    Model(ModelAnnouncement),
}

/// To a holder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum RolloutCall {
    /// Store these envelopes durably, then answer.
    Put(Vec<serde_bytes::ByteBuf>),
    /// Give me these.
    Get(Vec<RolloutId>),
    /// Which rollouts of a job do you hold that no step has consumed? At most `limit`, after `after` in id order.
    List {
        /// Job.
        job: JobId,
        /// Start after this id.
        after: Option<RolloutId>,
        /// At most this many.
        limit: u32,
    },
    /// Which of these do you hold, and which does your log say are consumed? At most [`HAVE_MAX`].
    Have(Vec<RolloutId>),
}

/// Most ids in a [`RolloutCall::Have`] or hashes in a [`BlobCall::Have`]: 64 Ki × 33 bytes = 2.1 MiB, so the chunks
/// of the longest manifest fit into one call.
pub const HAVE_MAX: usize = 1 << 16;

/// From a holder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum RolloutReply {
    /// These lie durably on this node now. An envelope that did not verify is missing.
    Stored(Vec<RolloutId>),
    /// The envelopes asked for that this node has, cut where the reply would grow too long.
    Bodies(Vec<serde_bytes::ByteBuf>),
    /// Ids, ascending.
    Ids(Vec<RolloutId>),
    /// Of those asked for, in the order asked.
    Have {
        /// They lie durably here.
        held: Vec<RolloutId>,
        /// A step of a model whose group this node is in consumed them, whether or not they are still here.
        consumed: Vec<RolloutId>,
    },
    /// The store cannot take it, and why (disk full, quota).
    Refused(String),
}

/// To a holder of weights and files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum BlobCall {
    /// Give me a chunk.
    Get(Hash),
    /// Fetch all chunks of these manifests from `from`, store them durably, then answer.
    Hold {
        /// What.
        manifests: Vec<Manifest>,
        /// Who has it.
        from: NodeId,
        /// A shorter way to the first one, if there is one.
        delta: Option<DeltaManifest>,
    },
    /// Which of these chunks do you not have? At most [`HAVE_MAX`].
    Have(Vec<Hash>),
}

/// From a holder of weights and files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum BlobReply {
    /// The chunk.
    Chunk(serde_bytes::ByteBuf),
    /// Not here.
    Missing(Hash),
    /// All of it lies durably here now.
    Held,
    /// Of the chunks asked for, these are not here.
    Lacks(Vec<Hash>),
    /// It could not be fetched or stored, and why.
    Refused(String),
}

/// To any voter of a model, which answers itself or names the leader.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum LeaderCall {
    /// Give me up to `want` episodes; these are still running here.
    Claim {
        /// Model.
        model: ModelName,
        /// How many more.
        want: u32,
        /// How large the caller's block should be: episodes leased and not begun.
        ahead: u32,
        /// How large it is: so many of `running` have not begun.
        stocked: u32,
        /// Leases to renew; a leader that did not give them takes them over where it can.
        running: Vec<HeldLease>,
    },
    /// These episodes will not end here.
    Abort {
        /// Model.
        model: ModelName,
        /// Which, with the cause in words.
        episodes: Vec<(EpisodeId, String)>,
    },
    /// Put an entry into the model's log.
    Propose {
        /// Model.
        model: ModelName,
        /// Entry.
        entry: Box<ControlEntry>,
    },
    /// What is the state of the model?
    Status {
        /// Model.
        model: ModelName,
    },
    /// Take part in this line of the model's group; a node in a lesser line leaves that.
    JoinGroup {
        /// Model.
        model: ModelName,
        /// The sender's line.
        lineage: Lineage,
    },
    /// What do you know of the group, which has lost its quorum? See [`Standing`].
    Survey {
        /// Model.
        model: ModelName,
    },
    /// Which models do you know? Any node answers; for one that gossip has not reached.
    Models,
}

/// Why a claim brought fewer episodes than wanted: promise 5, it never waits silently.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WaitReason {
    /// No job runs.
    NoJob,
    /// Enough episodes are running or waiting to be trained on.
    QuotaFull {
        /// Running and accepted.
        have: u64,
        /// The most there may be.
        max: u64,
    },
    /// The leader catches up with its log.
    LeaderStarting,
    /// All episodes of an evaluation are running.
    EvaluationFull,
}

/// Where a member of a group stands that may have lost its quorum for good.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Standing {
    /// Its line.
    pub line: Line,
    /// The version that it applied.
    pub version: PolicyVersion,
    /// Term and index of the last entry in its log; nothing before the first.
    pub last: Option<(Term, u64)>,
    /// The leader that it hears.
    pub leader: Option<NodeId>,
    /// Whether it could lead what it opens: a server whose disk takes writes.
    pub able: bool,
    /// Milliseconds until it agrees to a new generation; `None` if it never does.
    pub willing_in_ms: Option<u64>,
}

/// From a voter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum LeaderReply {
    /// Episodes to run, leases that are void, and why there are not more.
    Assigned {
        /// To run now.
        assignments: Vec<Assignment>,
        /// Of the `running` ones: no longer leased to the caller; stop them.
        revoked: Vec<EpisodeId>,
        /// Why there are fewer than wanted.
        wait: Option<WaitReason>,
        /// When there are fewer: milliseconds after which asking again is worth it.
        retry_ms: u32,
    },
    /// Done.
    Done,
    /// Ask this node instead; `None` when no leader is known.
    NotLeader(Option<NodeId>),
    /// The entry was refused, or the call cannot be answered, and why.
    Refused(String),
    /// JSON for people and tools; see `docs/http.md`.
    Status(String),
    /// Models known.
    Models(Vec<ModelAnnouncement>),
    /// To a survey; nothing from a node that is not in the group.
    Standing(Option<Standing>),
    /// To [`LeaderCall::JoinGroup`]: the node takes part with this store.
    Joined {
        /// Which.
        store: StoreId,
    },
}

/// First frame on a generation stream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Generate {
    /// Model.
    pub model: ModelName,
    /// Exact token ids of the whole context.
    pub prompt: Vec<u32>,
    /// 0 is greedy.
    pub temperature: f32,
    /// 1 keeps all.
    pub top_p: f32,
    /// 0 keeps all.
    pub top_k: u32,
    /// Sampling seed.
    pub seed: u64,
    /// Tokens of this answer that were drawn under the seed before, by a server that was lost, and now end the prompt:
    /// the generator goes on behind their draws.
    pub drawn: u32,
    /// Most tokens.
    pub max_tokens: u32,
    /// Ids that end the turn; the one that does is part of the answer.
    pub stop_token_ids: Vec<u32>,
    /// Alternatives to report for each token, at most 20.
    pub top_logprobs: u8,
}

/// Further frames from the gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GenerateControl {
    /// Stop now; the first `keep` tokens count. The server answers with [`GenerateFrame::End`] for those.
    Stop {
        /// How many tokens the turn keeps.
        keep: u32,
    },
}

/// One sampled token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenFrame {
    /// Token id.
    pub id: u32,
    /// Under the unmodified distribution, nats.
    pub logprob: f32,
    /// Version that sampled it.
    pub version: PolicyVersion,
    /// The most likely tokens under the unmodified distribution, best first.
    pub top: Vec<(u32, f32)>,
}

/// Frames from the server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum GenerateFrame {
    /// Tokens sampled since the last frame.
    Tokens(Vec<TokenFrame>),
    /// The turn is over.
    End {
        /// Why.
        finish: FinishReason,
        /// Tokens that the receipt covers, counted from the first one of this stream. After a
        /// [`GenerateControl::Stop`] it tells the answer to it from an end that crossed it.
        tokens: u32,
        /// The server's signature over the turn, see [`crate::rollout::receipt_body`].
        receipt: Receipt,
    },
    /// The turn failed, and why.
    Failed {
        /// Whether the same request may succeed elsewhere or later.
        retryable: bool,
        /// In words.
        reason: String,
    },
}
