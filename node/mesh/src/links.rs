//! The connections to one peer, and its idle call streams.

use crate::calls::CallStream;
use crate::config::Limits;
use crate::substreams::{Kind, Open, OpenError};
use libp2p::{Stream, swarm::ConnectionId};
use starling_protocol::NodeId;
use starling_protocol::wire::Service;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, mpsc, oneshot};

/// A call stream that lay idle for this long is closed. Well below [`crate::calls::SERVER_IDLE`], so that a stream
/// is never taken while the peer closes it.
pub(crate) const CLIENT_IDLE: Duration = Duration::from_secs(30);

/// Whether a service keeps the mesh alive (small and urgent) or carries its load.
pub(crate) fn is_control(service: Service) -> bool {
    match service {
        Service::Swim | Service::Raft => true,
        Service::Rollouts | Service::Blobs | Service::Leader => false,
    }
}

/// All connections to one peer. Made at the first, dropped after the last.
pub(crate) struct Link {
    pub(crate) node: NodeId,
    /// Bounds the calls in flight to the peer, apart for what keeps the mesh alive and for what is long: heartbeats
    /// never wait behind chunks.
    control: Semaphore,
    bulk: Semaphore,
    /// Bounds the generation streams open to the peer.
    pub(crate) streams: Arc<Semaphore>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    connections: Vec<(ConnectionId, mpsc::Sender<Open>)>,
    /// Last used at the end, so that the pool shrinks to what is needed.
    idle: Vec<(Instant, CallStream)>,
    /// Whether the peer said that it is of our mesh.
    confirmed: bool,
}

impl Link {
    pub(crate) fn new(node: NodeId, limits: &Limits) -> Self {
        Self {
            node,
            control: Semaphore::new(limits.calls_per_peer),
            bulk: Semaphore::new(limits.calls_per_peer),
            streams: Arc::new(Semaphore::new(limits.streams_per_peer)),
            state: Mutex::default(),
        }
    }

    /// What bounds the calls of a service.
    pub(crate) fn calls(&self, service: Service) -> &Semaphore {
        if is_control(service) { &self.control } else { &self.bulk }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_confirmed(&self) -> bool {
        self.lock().confirmed
    }

    pub(crate) fn confirm(&self) {
        self.lock().confirmed = true;
    }

    /// From now on new streams go over this connection. The ones before it may lead to a process that was killed:
    /// QUIC notices that only after its idle timeout, and a restarted peer would be deaf for so long.
    pub(crate) fn add_connection(&self, id: ConnectionId, opens: mpsc::Sender<Open>) {
        let old = {
            let mut state = self.lock();
            state.connections.push((id, opens));
            std::mem::take(&mut state.idle)
        };
        drop(old); // outside the lock
    }

    /// Forgets a connection and its idle streams; says whether none is left.
    pub(crate) fn remove_connection(&self, id: ConnectionId) -> bool {
        let mut state = self.lock();
        state.connections.retain(|(c, _)| *c != id);
        state.idle.retain(|(_, s)| s.connection != id);
        state.connections.is_empty()
    }

    /// The call stream used last, if one is idle.
    pub(crate) fn take_idle(&self, now: Instant) -> Option<CallStream> {
        let (since, stream) = self.lock().idle.pop()?;
        // The last one is the youngest: if it is too old, all are, and the sweep will take them.
        (now.duration_since(since) < CLIENT_IDLE).then_some(stream)
    }

    /// Keeps a stream whose call is over for the next call.
    pub(crate) fn put_idle(&self, now: Instant, stream: CallStream) {
        let mut state = self.lock();
        if state.connections.last().is_some_and(|(c, _)| *c == stream.connection) {
            state.idle.push((now, stream));
        }
    }

    /// Closes the streams that nobody needed for a while.
    pub(crate) fn sweep(&self, now: Instant) {
        let old: Vec<_> = {
            let mut state = self.lock();
            let keep = state.idle.partition_point(|(since, _)| now.duration_since(*since) >= CLIENT_IDLE);
            state.idle.drain(..keep).collect()
        };
        drop(old); // outside the lock
    }

    /// Opens a substream on the newest connection.
    pub(crate) async fn open(&self, kind: Kind) -> Result<(ConnectionId, Stream), OpenError> {
        // Bound to a name so that the lock is not held while waiting.
        let newest = self.lock().connections.last().cloned();
        let (id, opens) = newest.ok_or(OpenError::Closed)?;
        let (reply, answer) = oneshot::channel();
        opens.send(Open { kind, reply }).await.map_err(|_closed| OpenError::Closed)?;
        let stream = answer.await.map_err(|_closed| OpenError::Closed)??;
        Ok((id, stream))
    }
}
