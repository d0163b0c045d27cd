//! What the node's logic sees of the network. libp2p implements it in `starling-mesh`; tests and the
//! simulator implement it in memory.

use async_trait::async_trait;
use bytes::Bytes;
use starling_protocol::NodeId;
use starling_protocol::wire::{Service, Topic};
use std::sync::Arc;
use std::time::Duration;

/// Why a call got no answer. None of these says whether the peer acted on the request, except `NotConnected`
/// and `TooLong`, where it did not.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// No connection and none could be made; the text names the addresses tried and why each failed.
    #[error("cannot reach {peer}: {reason}")]
    NotConnected {
        /// Who was called.
        peer: NodeId,
        /// Addresses and causes.
        reason: String,
    },
    /// No answer in time.
    #[error("{peer} gave no answer within {after:?}")]
    Timeout {
        /// Who was called.
        peer: NodeId,
        /// The limit.
        after: Duration,
    },
    /// The connection broke, or the peer refused the call.
    #[error("call to {peer} failed: {reason}")]
    Failed {
        /// Who was called.
        peer: NodeId,
        /// In words.
        reason: String,
    },
    /// The message is longer than a call may be.
    #[error("message of {got} bytes, at most {max} are allowed")]
    TooLong {
        /// Length in bytes.
        got: usize,
        /// Limit in bytes.
        max: usize,
    },
    /// This node is shutting down.
    #[error("the node is shutting down")]
    Closed,
}

/// One direction-pair of framed messages to a peer, e.g. one generation. Dropping either half ends it for the peer.
pub struct FrameStream {
    /// Frames to the peer.
    pub send: Box<dyn FrameSend>,
    /// Frames from the peer.
    pub recv: Box<dyn FrameRecv>,
}

impl std::fmt::Debug for FrameStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FrameStream")
    }
}

/// Sending half. Not cancel-safe: a dropped `send` may leave half a frame, so drop the stream then.
#[async_trait]
pub trait FrameSend: Send {
    /// Sends one frame; waits while the peer is slow.
    async fn send(&mut self, frame: Bytes) -> Result<(), CallError>;
}

/// Receiving half. `recv` is cancel-safe.
#[async_trait]
pub trait FrameRecv: Send {
    /// The next frame; `None` when the peer closed the stream in order.
    async fn recv(&mut self) -> Result<Option<Bytes>, CallError>;
}

/// What a peer's message was worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Valid: pass it on.
    Accept,
    /// Of no use (old, known): do not pass it on, no harm to the sender's score.
    Ignore,
    /// Wrong: do not pass it on, and lower the sender's score.
    Reject,
}

/// The node's logic, as the network sees it. Called from many tasks at once.
#[async_trait]
pub trait Inbound: Send + Sync + 'static {
    /// Answers a call. `Err` is sent back as the peer's refusal ([`CallError::Failed`]) and lowers its score when
    /// the request was malformed.
    async fn on_call(&self, from: NodeId, service: Service, body: Bytes) -> Result<Bytes, InboundError>;
    /// Serves a generation stream until it ends.
    async fn on_generate(&self, from: NodeId, stream: FrameStream);
    /// Judges and takes a gossip message. Must return at once.
    fn on_gossip(&self, from: NodeId, topic: &Topic, body: &[u8]) -> Verdict;
    /// A connection to `peer` opened (`true`) or the last one closed.
    fn on_connection(&self, peer: NodeId, connected: bool);
}

/// Why a call was not answered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InboundError {
    /// The caller's fault: malformed. Lowers its score.
    #[error("malformed request: {0}")]
    Malformed(String),
    /// This node cannot serve it now.
    #[error("{0}")]
    Unavailable(String),
}

/// The network, as the node's logic sees it.
#[async_trait]
pub trait Transport: Send + Sync + 'static {
    /// This node.
    fn local(&self) -> NodeId;
    /// Where this node can be dialled, as multiaddr text with its peer id.
    fn addresses(&self) -> Vec<String>;
    /// Peers with an open connection, ascending.
    fn connected(&self) -> Vec<NodeId>;
    /// Whether there is an open connection to `peer`.
    fn is_connected(&self, peer: NodeId) -> bool {
        self.connected().binary_search(&peer).is_ok()
    }
    /// Remembers where `peer` may be dialled (multiaddr text); used when a call finds no connection.
    fn add_addresses(&self, peer: NodeId, addresses: &[String]);
    /// Calls `peer` and waits for its answer, dialling first when need be. Calls to the local node are answered
    /// without the network. Cancel-safe: a dropped call may or may not have been served.
    async fn call(&self, peer: NodeId, service: Service, body: Bytes, limit: Duration) -> Result<Bytes, CallError>;
    /// Opens a generation stream to `peer`.
    async fn open_generate(&self, peer: NodeId, limit: Duration) -> Result<FrameStream, CallError>;
    /// Publishes on a topic, subscribed to or not. Fire and forget; never blocks.
    fn publish(&self, topic: Topic, body: Vec<u8>);
    /// Subscribes to a topic; again is harmless.
    fn subscribe(&self, topic: Topic);
}

/// A shared transport.
pub type SharedTransport = Arc<dyn Transport>;
