//! One direction of a stream: ordered, never lossy, as slow as its link.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use starling_protocol::NodeId;
use starling_protocol::wire::FRAME_LEN_BYTES_MAX;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::links::Delivery;
use super::observe::MessageKind;
use super::{MemoryNetwork, Slot};
use crate::transport::{CallError, FrameRecv, FrameSend};
use crate::watch::lock;

/// Frames under way in one direction of a stream: a slow reader stops its writer after this many.
const STREAM_FRAMES_MAX: usize = 16;

/// A frame and when it arrives.
type Frame = (Instant, Bytes);

pub(super) fn pipe(
    network: &Arc<MemoryNetwork>,
    from: (Slot, NodeId),
    to: (Slot, NodeId),
    writer: Option<u64>,
) -> (PipeSend, PipeRecv) {
    let (tx, rx) = mpsc::channel(STREAM_FRAMES_MAX);
    let send = PipeSend { network: network.clone(), from: from.0, to, tx, last: Instant::now() };
    (send, PipeRecv { network: network.clone(), from, to: to.0, writer, rx, next: None })
}

pub(super) struct PipeSend {
    network: Arc<MemoryNetwork>,
    from: Slot,
    to: (Slot, NodeId),
    tx: mpsc::Sender<Frame>,
    last: Instant,
}

pub(super) struct PipeRecv {
    network: Arc<MemoryNetwork>,
    from: (Slot, NodeId),
    to: Slot,
    /// The run of the writing node: when it is over, an end of the pipe is a break.
    writer: Option<u64>,
    rx: mpsc::Receiver<Frame>,
    next: Option<Frame>,
}

fn broken(peer: NodeId) -> CallError {
    CallError::Failed { peer, reason: "the connection broke".into() }
}

#[async_trait]
impl FrameSend for PipeSend {
    async fn send(&mut self, frame: Bytes) -> Result<(), CallError> {
        if frame.len() > FRAME_LEN_BYTES_MAX {
            return Err(CallError::TooLong { got: frame.len(), max: FRAME_LEN_BYTES_MAX });
        }
        // Room first: what waits for the reader must not take the line's time.
        let room = self.tx.reserve().await.map_err(|_closed| broken(self.to.1))?;
        let (at, idle) = {
            let mut world = lock(&self.network.0);
            world.touch(self.from, self.to.0);
            let at = world.send(self.from, self.to.0, MessageKind::Stream, frame.len(), Delivery::Reliable);
            (at, world.config.idle_timeout)
        };
        let Some(at) = at else {
            sleep(idle).await;
            return Err(broken(self.to.1));
        };
        self.last = self.last.max(at); // frames do not overtake each other
        room.send((self.last, frame));
        Ok(())
    }
}

#[async_trait]
impl FrameRecv for PipeRecv {
    async fn recv(&mut self) -> Result<Option<Bytes>, CallError> {
        loop {
            if let Some((at, _)) = &self.next {
                sleep_until(*at).await;
                let Some((_, frame)) = self.next.take() else { continue };
                let mut world = lock(&self.network.0);
                world.node_mut(self.to).counters.received(MessageKind::Stream, frame.len());
                world.observe(self.from.0, self.to, MessageKind::Stream, frame.len(), super::Fate::Delivered);
                return Ok(Some(frame));
            }
            let (cut, idle) = {
                let world = lock(&self.network.0);
                (world.is_cut(self.from.0, self.to), world.config.idle_timeout)
            };
            match timeout(idle, self.rx.recv()).await {
                Ok(Some(frame)) => self.next = Some(frame),
                Ok(None) => {
                    let alive = self.writer.is_none_or(|w| lock(&self.network.0).runs(self.from.0, w));
                    return if alive { Ok(None) } else { Err(broken(self.from.1)) };
                }
                Err(_quiet) if cut && lock(&self.network.0).is_cut(self.from.0, self.to) => {
                    return Err(broken(self.from.1));
                }
                Err(_quiet) => {}
            }
        }
    }
}
