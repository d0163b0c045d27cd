//! One leg of an answer: its stream at one server.

use super::servers::{OpenStream, Servers};
use crate::transport::{CallError, FrameRecv, FrameSend, SharedTransport};
use bytes::Bytes;
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream};
use starling_protocol::NodeId;
use starling_protocol::codec::{decode, encode};
use starling_protocol::wire::{FRAME_LEN_BYTES_MAX, GenerateControl, GenerateFrame};
use std::time::Duration;
use tokio::time::Instant;

/// Limit of opening a stream.
const OPEN_LIMIT: Duration = Duration::from_secs(5);

/// What a leg brings.
pub(super) enum LegEvent {
    /// The server has the request.
    Opened(Box<dyn FrameSend>),
    /// A frame.
    Frame(GenerateFrame),
    /// No more comes, and why.
    Lost(String),
}

/// See the module's text. Dropping it cancels the generation at its server.
pub(super) struct Leg {
    pub(super) server: NodeId,
    /// Tokens of the answer that this server was given at the end of its prompt.
    pub(super) from: usize,
    /// Whether a frame came.
    pub(super) begun: bool,
    /// The server owes a frame since then.
    pub(super) quiet_since: Instant,
    /// Another server is asked at this time.
    pub(super) hedge_at: Instant,
    send: Option<Box<dyn FrameSend>>,
    events: BoxStream<'static, LegEvent>,
    _open: OpenStream,
}

impl Leg {
    /// Asks `server` with the encoded request `first`.
    pub(super) fn open(
        transport: SharedTransport,
        servers: &Servers,
        server: NodeId,
        first: Bytes,
        from: usize,
    ) -> Self {
        let now = Instant::now();
        Self {
            server,
            from,
            begun: false,
            quiet_since: now,
            hedge_at: now + servers.deadline(server, true),
            send: None,
            events: events(transport, server, first),
            _open: servers.count(server),
        }
    }

    /// The next event; cancel-safe. Nothing follows [`LegEvent::Lost`].
    pub(super) fn poll_event(&mut self, cx: &mut std::task::Context<'_>) -> std::task::Poll<LegEvent> {
        self.events.poll_next_unpin(cx).map(|e| e.unwrap_or_else(|| LegEvent::Lost("the stream is over".into())))
    }

    pub(super) fn set_opened(&mut self, send: Box<dyn FrameSend>) {
        self.send = Some(send);
    }

    /// Whether the server has the request.
    pub(super) fn is_open(&self) -> bool {
        self.send.is_some()
    }

    /// Tells the server to stop after its first `keep` tokens. The sending half goes with the future and comes back:
    /// the stream ends for the server when it is dropped. `None` when the stream is not open.
    pub(super) fn stop(&mut self, keep: u32) -> Option<Stopping> {
        let mut send = self.send.take()?;
        Some(Box::pin(async move {
            let sent = send.send(encode(&GenerateControl::Stop { keep }).into()).await;
            (send, sent)
        }))
    }
}

/// A stop under way.
pub(super) type Stopping = BoxFuture<'static, (Box<dyn FrameSend>, Result<(), CallError>)>;

enum Stage {
    Dial(SharedTransport, Bytes),
    Read(Box<dyn FrameRecv>),
    Over,
}

fn events(transport: SharedTransport, server: NodeId, first: Bytes) -> BoxStream<'static, LegEvent> {
    let next = move |stage| async move {
        match stage {
            Stage::Dial(transport, first) => {
                let opened = async {
                    let mut stream = transport.open_generate(server, OPEN_LIMIT).await?;
                    stream.send.send(first).await?;
                    Ok::<_, CallError>(stream)
                };
                Some(match opened.await {
                    Ok(stream) => (LegEvent::Opened(stream.send), Stage::Read(stream.recv)),
                    Err(e) => (LegEvent::Lost(e.to_string()), Stage::Over),
                })
            }
            Stage::Read(mut recv) => {
                let frame = match recv.recv().await {
                    Ok(Some(bytes)) => decode::<GenerateFrame>("generate frame", &bytes, FRAME_LEN_BYTES_MAX)
                        .map_err(|e| format!("{}: {e}", server.short())),
                    Ok(None) => Err(format!("{} closed the stream", server.short())),
                    Err(e) => Err(e.to_string()),
                };
                Some(match frame {
                    Ok(frame) => (LegEvent::Frame(frame), Stage::Read(recv)),
                    Err(why) => (LegEvent::Lost(why), Stage::Over),
                })
            }
            Stage::Over => None,
        }
    };
    stream::unfold(Stage::Dial(transport, first), next).boxed()
}
