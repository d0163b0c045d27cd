//! Calls: one request and one answer on a substream, which then serves the next call.
//!
//! Opening a substream costs a negotiation and several task switches, so the caller keeps it in the peer's pool.
//! Calls on one substream follow each other; calls at the same time use several, so none waits for another.

use crate::codec::{Duplex, Inbox, call_header};
use crate::links::Link;
use crate::shared::Shared;
use crate::substreams::Kind;
use bytes::Bytes;
use libp2p::Stream;
use libp2p::swarm::ConnectionId;
use starling_core::transport::{CallError, InboundError};
use starling_protocol::NodeId;
use starling_protocol::wire::{CALL_LEN_BYTES_MAX, Service};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::timeout;

/// Length and service or status.
const HEADER_LEN: usize = 5;
/// A call stream on which nothing comes for this long is closed by the side that serves.
pub(crate) const SERVER_IDLE: Duration = Duration::from_secs(120);
/// A request must come whole within this time: 4 MiB at 70 KiB/s.
const REQUEST_LIMIT: Duration = Duration::from_secs(60);
/// Longest reason of a refusal.
const REASON_LEN_BYTES_MAX: usize = 4 << 10;
/// What one malformed request costs; see `score.rs`.
const MALFORMED_POINTS: f64 = 5.0;

/// First byte of an answer.
const OK: u8 = 0;
const MALFORMED: u8 = 1;
const UNAVAILABLE: u8 = 2;

/// A substream for calls that this node makes.
pub(crate) struct CallStream {
    pub(crate) connection: ConnectionId,
    io: Arc<Duplex>,
    inbox: Inbox,
}

impl CallStream {
    async fn exchange(&mut self, service: Service, body: &[u8]) -> io::Result<(u8, Bytes)> {
        self.io.write(&call_header(body.len(), service as u8), body).await?;
        if !self.inbox.fill(&self.io, HEADER_LEN).await? {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the peer ended the stream without an answer"));
        }
        let (len, status) = (self.inbox.peek_len(), self.inbox.peek_kind());
        if len > CALL_LEN_BYTES_MAX {
            let text = format!("the answer has {len} bytes, at most {CALL_LEN_BYTES_MAX} are allowed");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        self.inbox.fill(&self.io, HEADER_LEN + len).await?;
        Ok((status, self.inbox.take(HEADER_LEN, len)))
    }
}

impl Drop for CallStream {
    fn drop(&mut self) {
        self.io.close_later();
    }
}

/// One call over a connection. Dropping this ends the substream; the peer may still act on the request.
pub(crate) async fn call(link: &Link, service: Service, body: &[u8]) -> Result<Bytes, CallError> {
    let failed = |reason: String| CallError::Failed { peer: link.node, reason };
    // Never closed, so this cannot fail.
    let _permit = link.calls(service).acquire().await;
    let mut stream = match link.take_idle(Instant::now()) {
        Some(stream) => stream,
        None => {
            let (connection, stream) = link.open(Kind::Call).await.map_err(|e| failed(e.to_string()))?;
            CallStream { connection, io: Arc::new(Duplex::new(stream)), inbox: Inbox::default() }
        }
    };
    let (status, answer) = stream.exchange(service, body).await.map_err(|e| failed(e.to_string()))?;
    if stream.inbox.is_empty() {
        link.put_idle(Instant::now(), stream);
    } // else the peer sends what nobody asked for: not to be used again
    outcome(link.node, status, answer)
}

fn outcome(peer: NodeId, status: u8, answer: Bytes) -> Result<Bytes, CallError> {
    let text = |b: &[u8]| String::from_utf8_lossy(&b[..b.len().min(REASON_LEN_BYTES_MAX)]).into_owned();
    match status {
        OK => Ok(answer),
        MALFORMED | UNAVAILABLE => Err(CallError::Failed { peer, reason: text(&answer) }),
        other => Err(CallError::Failed { peer, reason: format!("the answer has the unknown status {other}") }),
    }
}

/// A call of this node to itself: the same rules, no network.
pub(crate) async fn call_local(shared: &Shared, service: Service, body: Bytes) -> Result<Bytes, CallError> {
    let answer = match shared.logic() {
        Ok(logic) => logic.on_call(shared.local, service, body).await,
        Err(e) => Err(e),
    };
    answer.map_err(|e| CallError::Failed { peer: shared.local, reason: e.to_string() })
}

/// Serves the calls that come on one substream, one after the other. `_live` counts it.
pub(crate) async fn serve(shared: Arc<Shared>, peer: NodeId, stream: Stream, _live: Arc<()>) {
    let io = Arc::new(Duplex::new(stream));
    if let Err(error) = serve_all(&shared, peer, &io).await {
        tracing::trace!(peer = %peer.short(), %error, "a call stream ended");
    }
    io.close_later();
}

async fn serve_all(shared: &Shared, peer: NodeId, io: &Duplex) -> io::Result<()> {
    let mut inbox = Inbox::default();
    loop {
        match timeout(SERVER_IDLE, inbox.fill(io, HEADER_LEN)).await {
            Ok(Ok(true)) => {}
            Ok(Ok(false)) | Err(_) => return Ok(()), // closed in order, or idle
            Ok(Err(e)) => return Err(e),
        }
        let (len, service) = (inbox.peek_len(), inbox.peek_kind());
        if len > CALL_LEN_BYTES_MAX {
            let why = format!("request of {len} bytes, at most {CALL_LEN_BYTES_MAX} are allowed");
            return refuse(shared, peer, io, why).await;
        }
        let Some(service) = Service::from_byte(service) else {
            return refuse(shared, peer, io, format!("unknown service {service}")).await;
        };
        // Held until the answer is out: what all peers together make us keep in memory is bounded.
        let kib = u32::try_from(len.div_ceil(1 << 10)).unwrap_or(u32::MAX);
        let _memory = shared.call_memory(service).acquire_many(kib).await.map_err(io::Error::other)?;
        let whole = timeout(REQUEST_LIMIT, inbox.fill(io, HEADER_LEN + len)).await;
        whole.map_err(|_elapsed| io::Error::from(io::ErrorKind::TimedOut))??;
        let body = inbox.take(HEADER_LEN, len);
        let answer = match shared.logic() {
            Ok(logic) => logic.on_call(peer, service, body).await,
            Err(e) => Err(e),
        };
        match answer {
            Ok(body) if body.len() <= CALL_LEN_BYTES_MAX => io.write(&call_header(body.len(), OK), &body).await?,
            Ok(body) => {
                let why =
                    format!("the answer would have {} bytes, at most {CALL_LEN_BYTES_MAX} are allowed", body.len());
                tracing::error!(peer = %peer.short(), ?service, "{why}");
                reply_reason(io, UNAVAILABLE, &why).await?;
            }
            Err(e @ InboundError::Malformed(_)) => {
                shared.penalise(peer, MALFORMED_POINTS, e.to_string());
                reply_reason(io, MALFORMED, &e.to_string()).await?;
            }
            Err(e @ InboundError::Unavailable(_)) => reply_reason(io, UNAVAILABLE, &e.to_string()).await?,
        }
    }
}

/// Answers a request that breaks the protocol, and gives the stream up.
async fn refuse(shared: &Shared, peer: NodeId, io: &Duplex, why: String) -> io::Result<()> {
    let text = InboundError::Malformed(why).to_string();
    shared.penalise(peer, MALFORMED_POINTS, text.clone());
    reply_reason(io, MALFORMED, &text).await
}

async fn reply_reason(io: &Duplex, status: u8, text: &str) -> io::Result<()> {
    let bytes = &text.as_bytes()[..text.len().min(REASON_LEN_BYTES_MAX)];
    io.write(&call_header(bytes.len(), status), bytes).await
}
