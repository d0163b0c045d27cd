//! Substreams for calls and generation, straight between a caller and a connection.
//!
//! libp2p's request-response passes each call through the swarm's task twice and keeps calls that nobody waits for
//! until a fixed time is over; libp2p-stream drops inbound streams when two come at once. This does neither.

use crate::shared::Shared;
use crate::{calls, streams};
use libp2p::core::transport::PortUse;
use libp2p::core::upgrade::{InboundUpgrade, OutboundUpgrade, UpgradeInfo};
use libp2p::core::{Endpoint, util};
use libp2p::swarm::handler::{
    ConnectionEvent, DialUpgradeError, FullyNegotiatedInbound, FullyNegotiatedOutbound, StreamUpgradeError,
};
use libp2p::swarm::{
    ConnectionDenied, ConnectionHandler, ConnectionHandlerEvent, ConnectionId, FromSwarm, NetworkBehaviour, Stream,
    StreamProtocol, SubstreamProtocol, THandler, THandlerInEvent, THandlerOutEvent, ToSwarm,
};
use libp2p::{Multiaddr, PeerId};
use starling_bootstrap::node_id_of;
use starling_protocol::NodeId;
use std::collections::HashMap;
use std::convert::Infallible;
use std::future::{Ready, ready};
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::sync::{mpsc, oneshot};

/// Requests to one connection that wait to be taken up: as many as may be in flight to a peer.
const OPENS_BOUND: usize = 64;

/// What a substream is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Call,
    Generate,
}

/// Asks a connection for a substream.
#[derive(Debug)]
pub(crate) struct Open {
    pub(crate) kind: Kind,
    pub(crate) reply: oneshot::Sender<Result<Stream, OpenError>>,
}

/// Why no substream was opened. The peer saw nothing.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OpenError {
    #[error("the connection closed")]
    Closed,
    #[error("the peer does not speak {0}")]
    Unsupported(StreamProtocol),
    #[error("opening a stream took too long")]
    Timeout,
    #[error("opening a stream failed: {0}")]
    Io(#[from] std::io::Error),
}

pub(crate) struct Behaviour {
    shared: Arc<Shared>,
    /// Connections that other behaviours may still refuse.
    made: HashMap<ConnectionId, mpsc::Sender<Open>>,
}

impl Behaviour {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, made: HashMap::new() }
    }

    fn handler(&mut self, connection: ConnectionId, peer: PeerId) -> Result<Handler, ConnectionDenied> {
        let node = node_id_of(&peer).ok_or_else(|| ConnectionDenied::new("not an ed25519 key"))?;
        let (send, opens) = mpsc::channel(OPENS_BOUND);
        self.made.insert(connection, send);
        Ok(Handler { node, shared: Arc::clone(&self.shared), opens, open: true, live: Arc::default() })
    }
}

impl NetworkBehaviour for Behaviour {
    type ConnectionHandler = Handler;
    type ToSwarm = Infallible;

    fn handle_established_inbound_connection(
        &mut self,
        connection: ConnectionId,
        peer: PeerId,
        _: &Multiaddr,
        _: &Multiaddr,
    ) -> Result<THandler<Self>, ConnectionDenied> {
        self.handler(connection, peer)
    }

    fn handle_established_outbound_connection(
        &mut self,
        connection: ConnectionId,
        peer: PeerId,
        _: &Multiaddr,
        _: Endpoint,
        _: PortUse,
    ) -> Result<THandler<Self>, ConnectionDenied> {
        self.handler(connection, peer)
    }

    fn on_swarm_event(&mut self, event: FromSwarm<'_>) {
        match event {
            FromSwarm::ConnectionEstablished(e) => {
                if let (Some(node), Some(opens)) = (node_id_of(&e.peer_id), self.made.remove(&e.connection_id)) {
                    self.shared.link_or_new(node).add_connection(e.connection_id, opens);
                }
            }
            FromSwarm::ConnectionClosed(e) => {
                if let Some(node) = node_id_of(&e.peer_id) {
                    self.shared.connection_closed(node, e.connection_id);
                }
            }
            FromSwarm::DialFailure(e) => {
                self.made.remove(&e.connection_id);
            }
            FromSwarm::ListenFailure(e) => {
                self.made.remove(&e.connection_id);
            }
            _ => {}
        }
    }

    fn on_connection_handler_event(&mut self, _: PeerId, _: ConnectionId, event: THandlerOutEvent<Self>) {
        util::unreachable(event)
    }

    fn poll(&mut self, _: &mut Context<'_>) -> Poll<ToSwarm<Self::ToSwarm, THandlerInEvent<Self>>> {
        Poll::Pending
    }
}

/// One connection's end of the above.
pub(crate) struct Handler {
    node: NodeId,
    shared: Arc<Shared>,
    opens: mpsc::Receiver<Open>,
    /// Whether more may come from `opens`.
    open: bool,
    /// One clone in each inbound stream.
    live: Arc<()>,
}

type Reply = oneshot::Sender<Result<Stream, OpenError>>;

impl ConnectionHandler for Handler {
    type FromBehaviour = Infallible;
    type ToBehaviour = Infallible;
    type InboundProtocol = Upgrade;
    type OutboundProtocol = Upgrade;
    type InboundOpenInfo = ();
    type OutboundOpenInfo = Reply;

    fn listen_protocol(&self) -> SubstreamProtocol<Upgrade> {
        let names = &self.shared.names;
        let both = vec![Name(Kind::Call, names.call.clone()), Name(Kind::Generate, names.generate.clone())];
        SubstreamProtocol::new(Upgrade(both), ())
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<ConnectionHandlerEvent<Upgrade, Reply, Infallible>> {
        while self.open {
            match self.opens.poll_recv(cx) {
                Poll::Ready(Some(Open { reply, .. })) if reply.is_closed() => {} // nobody waits any more
                Poll::Ready(Some(Open { kind, reply })) => {
                    let protocol = Upgrade(vec![Name(kind, self.shared.names.of(kind))]);
                    return Poll::Ready(ConnectionHandlerEvent::OutboundSubstreamRequest {
                        protocol: SubstreamProtocol::new(protocol, reply),
                    });
                }
                Poll::Ready(None) => self.open = false,
                Poll::Pending => break,
            }
        }
        Poll::Pending
    }

    fn on_behaviour_event(&mut self, event: Infallible) {
        util::unreachable(event)
    }

    fn on_connection_event(&mut self, event: ConnectionEvent<'_, Upgrade, Upgrade, (), Reply>) {
        match event {
            ConnectionEvent::FullyNegotiatedInbound(FullyNegotiatedInbound { protocol: (kind, stream), .. }) => {
                if Arc::strong_count(&self.live) > self.shared.limits.inbound_streams_per_connection {
                    tracing::warn!(peer = %self.node.short(), "too many open streams; the new one is dropped");
                    return;
                }
                let (shared, node, token) = (Arc::clone(&self.shared), self.node, Arc::clone(&self.live));
                match kind {
                    Kind::Call => shared.clone().spawn(calls::serve(shared, node, stream, token)),
                    Kind::Generate => shared.clone().spawn(streams::serve(shared, node, stream, token)),
                }
            }
            ConnectionEvent::FullyNegotiatedOutbound(FullyNegotiatedOutbound { protocol: (_, stream), info }) => {
                let _ = info.send(Ok(stream)); // a caller that went away drops the stream
            }
            ConnectionEvent::DialUpgradeError(DialUpgradeError { info, error }) => {
                let error = match error {
                    StreamUpgradeError::Timeout => OpenError::Timeout,
                    StreamUpgradeError::Apply(never) => match never {},
                    StreamUpgradeError::NegotiationFailed => OpenError::Unsupported(self.shared.names.call.clone()),
                    StreamUpgradeError::Io(e) => OpenError::Io(e),
                };
                let _ = info.send(Err(error));
            }
            _ => {}
        }
    }
}

/// Protocols to negotiate, each with what it is for.
#[derive(Clone, Debug)]
pub(crate) struct Upgrade(Vec<Name>);

#[derive(Clone, Debug)]
pub(crate) struct Name(Kind, StreamProtocol);

impl AsRef<str> for Name {
    fn as_ref(&self) -> &str {
        self.1.as_ref()
    }
}

impl UpgradeInfo for Upgrade {
    type Info = Name;
    type InfoIter = std::vec::IntoIter<Name>;
    fn protocol_info(&self) -> Self::InfoIter {
        self.0.clone().into_iter()
    }
}

impl InboundUpgrade<Stream> for Upgrade {
    type Output = (Kind, Stream);
    type Error = Infallible;
    type Future = Ready<Result<Self::Output, Infallible>>;
    fn upgrade_inbound(self, stream: Stream, name: Name) -> Self::Future {
        ready(Ok((name.0, stream)))
    }
}

impl OutboundUpgrade<Stream> for Upgrade {
    type Output = (Kind, Stream);
    type Error = Infallible;
    type Future = Ready<Result<Self::Output, Infallible>>;
    fn upgrade_outbound(self, stream: Stream, name: Name) -> Self::Future {
        ready(Ok((name.0, stream)))
    }
}
