//! Generation streams: frames both ways on one substream.

use crate::codec::{Duplex, Inbox, frame_header};
use crate::links::Link;
use crate::shared::Shared;
use crate::substreams::Kind;
use async_trait::async_trait;
use bytes::Bytes;
use libp2p::Stream;
use starling_core::transport::{CallError, FrameRecv, FrameSend, FrameStream};
use starling_protocol::NodeId;
use starling_protocol::wire::FRAME_LEN_BYTES_MAX;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, mpsc};

/// The length.
const HEADER_LEN: usize = 4;
/// What a frame that is too long costs the peer; see `score.rs`.
const TOO_LONG_POINTS: f64 = 5.0;
/// Frames in flight each way on a stream of this node to itself.
const LOCAL_BOUND: usize = 16;

/// Opens a generation stream on a connection.
pub(crate) async fn open(shared: &Arc<Shared>, link: &Link) -> Result<FrameStream, CallError> {
    let failed = |reason: String| CallError::Failed { peer: link.node, reason };
    let permit = Arc::clone(&link.streams).acquire_owned().await.map_err(|e| failed(e.to_string()))?;
    let (_, stream) = link.open(Kind::Generate).await.map_err(|e| failed(e.to_string()))?;
    Ok(frames(shared, link.node, stream, Some(permit)))
}

/// Serves one generation stream. `_live` counts it.
pub(crate) async fn serve(shared: Arc<Shared>, peer: NodeId, stream: Stream, _live: Arc<()>) {
    match shared.inbound() {
        Some(logic) => {
            let stream = frames(&shared, peer, stream, None);
            logic.on_generate(peer, stream).await;
        }
        None => tracing::debug!(peer = %peer.short(), "a generation came before the node was ready"),
    }
}

/// A stream of this node to itself.
pub(crate) fn open_local(shared: &Arc<Shared>) -> Result<FrameStream, CallError> {
    let peer = shared.local;
    let logic = shared.logic().map_err(|e| CallError::Failed { peer, reason: e.to_string() })?;
    let (to_server, from_client) = mpsc::channel(LOCAL_BOUND);
    let (to_client, from_server) = mpsc::channel(LOCAL_BOUND);
    let half =
        |send, recv| FrameStream { send: Box::new(LocalSend { peer, send }), recv: Box::new(LocalRecv { recv }) };
    let theirs = half(to_client, from_client);
    shared.spawn(async move { logic.on_generate(peer, theirs).await });
    Ok(half(to_server, from_server))
}

fn frames(shared: &Arc<Shared>, peer: NodeId, stream: Stream, permit: Option<OwnedSemaphorePermit>) -> FrameStream {
    let io = Arc::new(Duplex::new(stream));
    let held = Arc::new(permit);
    FrameStream {
        send: Box::new(Sender { peer, io: Arc::clone(&io), _permit: Arc::clone(&held) }),
        recv: Box::new(Receiver { peer, io, inbox: Inbox::default(), shared: Arc::clone(shared), _permit: held }),
    }
}

struct Sender {
    peer: NodeId,
    io: Arc<Duplex>,
    _permit: Arc<Option<OwnedSemaphorePermit>>,
}

#[async_trait]
impl FrameSend for Sender {
    async fn send(&mut self, frame: Bytes) -> Result<(), CallError> {
        if frame.len() > FRAME_LEN_BYTES_MAX {
            return Err(CallError::TooLong { got: frame.len(), max: FRAME_LEN_BYTES_MAX });
        }
        let sent = self.io.write(&frame_header(frame.len()), &frame).await;
        sent.map_err(|e| CallError::Failed { peer: self.peer, reason: e.to_string() })
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.io.close_later();
    }
}

struct Receiver {
    peer: NodeId,
    io: Arc<Duplex>,
    inbox: Inbox,
    shared: Arc<Shared>,
    _permit: Arc<Option<OwnedSemaphorePermit>>,
}

#[async_trait]
impl FrameRecv for Receiver {
    async fn recv(&mut self) -> Result<Option<Bytes>, CallError> {
        let failed = |reason: String| CallError::Failed { peer: self.peer, reason };
        if !self.inbox.fill(&self.io, HEADER_LEN).await.map_err(|e| failed(e.to_string()))? {
            return Ok(None);
        }
        let len = self.inbox.peek_len();
        if len > FRAME_LEN_BYTES_MAX {
            let why = format!("frame of {len} bytes, at most {FRAME_LEN_BYTES_MAX} are allowed");
            self.shared.penalise(self.peer, TOO_LONG_POINTS, why.clone());
            return Err(failed(why));
        }
        self.inbox.fill(&self.io, HEADER_LEN + len).await.map_err(|e| failed(e.to_string()))?;
        Ok(Some(self.inbox.take(HEADER_LEN, len)))
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        // Nobody reads any more: our end tells the peer, even while the sending half lives.
        self.io.close_later();
    }
}

struct LocalSend {
    peer: NodeId,
    send: mpsc::Sender<Bytes>,
}

#[async_trait]
impl FrameSend for LocalSend {
    async fn send(&mut self, frame: Bytes) -> Result<(), CallError> {
        if frame.len() > FRAME_LEN_BYTES_MAX {
            return Err(CallError::TooLong { got: frame.len(), max: FRAME_LEN_BYTES_MAX });
        }
        let gone = |_| CallError::Failed { peer: self.peer, reason: "the other side dropped the stream".into() };
        self.send.send(frame).await.map_err(gone)
    }
}

struct LocalRecv {
    recv: mpsc::Receiver<Bytes>,
}

#[async_trait]
impl FrameRecv for LocalRecv {
    async fn recv(&mut self) -> Result<Option<Bytes>, CallError> {
        Ok(self.recv.recv().await)
    }
}
