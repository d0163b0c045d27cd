//! Why a group was not opened, an entry not logged, a barrier not reached.

use std::io;
use std::time::Duration;

use starling_protocol::{Line, ModelName, NodeId};
use starling_storage::StoreError;

/// A group could not be opened. Nothing was started.
#[derive(Debug, thiserror::Error)]
pub enum GroupError {
    /// The list of groups cannot be read. Retryable if the store's error is.
    #[error("read the list of groups")]
    List(#[source] StoreError),
    /// The group's log or state cannot be read.
    #[error("read the log of {model}")]
    Store {
        /// Which group.
        model: ModelName,
        /// Why.
        source: io::Error,
    },
    /// There are as many groups on this node as there may be.
    #[error("group of {model}: this node is in {max} groups already")]
    TooMany {
        /// Which group.
        model: ModelName,
        /// The limit.
        max: usize,
    },
    /// The group's run changed while its line was to be changed. Retryable.
    #[error("group of {model}: it was started over meanwhile")]
    Changed {
        /// Which group.
        model: ModelName,
    },
    /// openraft refused: the settings or the log make no sense to it.
    #[error("start the group of {model}: {reason}")]
    Raft {
        /// Which group.
        model: ModelName,
        /// openraft's own words.
        reason: String,
    },
}

/// This node does not join a group. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The inviter is not a live server, as far as this node knows. Retryable: its record may be on the way.
    #[error("{from} is not known here as a live server")]
    UnknownInviter {
        /// Who asked.
        from: NodeId,
    },
    /// The group exists, and the inviter is not in it. The inviter's fault, or its announcement is on the way.
    #[error("{from} is not known here as a member of the group of {model}")]
    NotAMember {
        /// Who asked.
        from: NodeId,
        /// For which group.
        model: ModelName,
    },
    /// This node is in a greater line, which the inviter's is going to join.
    #[error("{model} is in {ours} here; {from} speaks for {theirs}")]
    LesserLine {
        /// Who asked.
        from: NodeId,
        /// For which group.
        model: ModelName,
        /// The inviter's line.
        theirs: Line,
        /// This node's.
        ours: Line,
    },
    /// The inviter called this node into as many groups as it may.
    #[error("{from} called this node into {max} groups already")]
    TooMany {
        /// Who asked.
        from: NodeId,
        /// The limit.
        max: usize,
    },
    /// The group does not open.
    #[error(transparent)]
    Group(#[from] GroupError),
}

impl JoinError {
    /// Whether the same invitation may be taken a little later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::UnknownInviter { .. })
    }
}

/// An entry was not proposed, or its outcome is not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProposeError {
    /// This node does not lead, or not in the given term. Nothing was logged; ask the named node, which is this one
    /// if it leads again in a later term.
    #[error("not the leader; {}", .0.map_or_else(|| "none is known".to_owned(), |n| format!("ask {n}")))]
    NotLeader(Option<NodeId>),
    /// There is no leader because too few voters answer. Nothing was logged; retryable, the text says what is missing.
    #[error("no quorum: {0}")]
    NoQuorum(String),
    /// The entry may be in the log or may come into it later, or not. Read the state before trying again.
    #[error("outcome unknown after {after:?}: {reason}")]
    Unknown {
        /// How long it was waited for.
        after: Duration,
        /// In words.
        reason: String,
    },
    /// This node is not in the group. Nothing was logged.
    #[error("this node is not in the group of {0}")]
    NoGroup(ModelName),
    /// The entry is too long. Nothing was logged; permanent.
    #[error("entry of {got} bytes, at most {max} are allowed")]
    TooLong {
        /// Its length.
        got: usize,
        /// The limit.
        max: usize,
    },
}

/// A barrier was not reached. Nothing was changed; retryable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// Ask the named node.
    #[error("not the leader; {}", .0.map_or_else(|| "none is known".to_owned(), |n| format!("ask {n}")))]
    NotLeader(Option<NodeId>),
    /// Too few voters answer.
    #[error("no quorum: {0}")]
    NoQuorum(String),
    /// This node is not in the group, or the group stopped.
    #[error("this node is not in the group of {0}")]
    NoGroup(ModelName),
}

/// No new generation was opened. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum ReopenError {
    /// This node is not in the group.
    #[error("this node is not in the group of {0}")]
    NoGroup(ModelName),
    /// The group works, or another node must do it.
    #[error("no new generation of {model} is opened: {reason}")]
    Refused {
        /// Which group.
        model: ModelName,
        /// Why, and who is to do what.
        reason: String,
    },
    /// The group does not start over.
    #[error(transparent)]
    Group(#[from] GroupError),
}

/// A group was not created, or not completely. Trying again is safe.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// This node must be one of the voters.
    #[error("the creating node is not among the voters")]
    NotAVoter,
    /// The own part of the group does not open.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// A voter does not take part.
    #[error("voter {node} does not join: {reason}")]
    Voter {
        /// Which.
        node: NodeId,
        /// Its words, or the network's.
        reason: String,
    },
    /// openraft refused the first membership.
    #[error("initialize the group of {model}: {reason}")]
    Initialize {
        /// Which group.
        model: ModelName,
        /// openraft's own words.
        reason: String,
    },
    /// The group exists now, but its first entry is not known to be in.
    #[error("log the model's first entry")]
    Propose(#[source] ProposeError),
    /// The model exists with another first entry, or the leader refused it.
    #[error("the model's first entry was refused: {0}")]
    Refused(String),
}
