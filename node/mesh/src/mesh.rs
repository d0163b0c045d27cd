//! The handle of a running mesh.

use crate::config::{MeshConfig, Names};
use crate::driver::Driver;
use crate::error::{DialReport, MeshError};
use crate::shared::{COMMANDS_BOUND, Command, Shared};
use crate::{behaviour, calls, streams};
use async_trait::async_trait;
use bytes::Bytes;
use libp2p::multiaddr::Protocol;
use starling_bootstrap::identity::peer_id_of_known;
use starling_bootstrap::ticket::parse_address;
use starling_bootstrap::{PeerBook, Source};
use starling_core::transport::{CallError, FrameStream, Inbound, Transport};
use starling_protocol::NodeId;
use starling_protocol::wire::{CALL_LEN_BYTES_MAX, GOSSIP_LEN_BYTES_MAX, Service, Topic};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout_at};

/// How long listening may take at start.
const START_LIMIT: Duration = Duration::from_secs(5);

/// A node's place in the mesh. Ends when the last handle is dropped, in order with [`Mesh::shutdown`].
pub struct Mesh {
    shared: Arc<Shared>,
    commands: mpsc::Sender<Command>,
}

impl std::fmt::Debug for Mesh {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mesh({} at {})", self.shared.local.short(), self.shared.names.mesh)
    }
}

impl Mesh {
    /// Starts listening and dialling; returns once all listeners have an address. Until [`Mesh::serve`], calls from
    /// peers are answered with "the node is starting".
    ///
    /// # Errors
    /// [`MeshError`], naming the address when it cannot be listened on. Nothing keeps running then.
    pub async fn start(config: MeshConfig) -> Result<Arc<Self>, MeshError> {
        let local = config.identity.node_id();
        let (commands, received) = mpsc::channel(COMMANDS_BOUND);
        let mut book = config.cached.clone();
        book.forgive();
        for (node, addresses) in config.bootstrap.iter().filter(|(n, _)| *n != local) {
            for address in addresses {
                book.add(*node, crate::config::without_peer(address), Source::Config);
            }
        }
        let names = Names::new(config.network);
        // The driver must end when all handles are gone, so what it shares holds no strong sender.
        let shared = Arc::new(Shared::new(local, names, config.limits.clone(), book, commands.downgrade()));
        let swarm = behaviour::swarm(&config, &shared)?;
        let (ready, started) = oneshot::channel();
        let driver = Driver::new(swarm, Arc::clone(&shared), &config, received, ready);
        tokio::spawn(driver.run(config));
        let mesh = Arc::new(Self { shared, commands });
        match tokio::time::timeout(START_LIMIT, started).await {
            Ok(Ok(Ok(()))) => Ok(mesh),
            Ok(Ok(Err(error))) => Err(error),
            Ok(Err(_)) => Err(MeshError::Stopped),
            Err(_) => Err(MeshError::Setup { what: "listening", reason: format!("no address after {START_LIMIT:?}") }),
        }
    }

    /// Gives the mesh the node's logic, once. Returns `false`, changing nothing, when it has one or is closed.
    pub fn serve(&self, logic: Arc<dyn Inbound>) -> bool {
        self.shared.set_inbound(logic)
    }

    /// Addresses that could not be dialled and why, of peers to which there is no connection.
    #[must_use]
    pub fn reachability(&self) -> Vec<DialReport> {
        self.shared.reports()
    }

    /// The peers known now, to be kept for the next start as [`MeshConfig::cached`].
    #[must_use]
    pub fn peers(&self) -> PeerBook {
        self.shared.book().clone()
    }

    /// The score of a connected peer: 0 is neutral, below −80 its gossip is ignored.
    pub async fn score(&self, peer: NodeId) -> Option<f64> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(Command::Score { node: peer, reply }).await.ok()?;
        answer.await.ok()?
    }

    /// Lowers a peer's score for what the node's logic found out later, e.g. a rollout that does not verify.
    /// 100 points at once ban it; one point a second wears off.
    pub fn penalise(&self, peer: NodeId, points: f64, why: impl Into<String>) {
        self.shared.penalise(peer, points, why.into());
    }

    /// [`Transport::addresses`] without the peer id.
    #[must_use]
    pub fn listening(&self) -> Vec<String> {
        self.shared.listen().iter().map(ToString::to_string).collect()
    }

    /// Closes all connections to `peer`, so that what waits for it fails now and not when a timeout is over: for a peer
    /// that membership gave up. A peer that lives is dialled again as any former one. `why` is for the log.
    ///
    /// Waits for room among the driver's commands, not for the connections.
    pub async fn disconnect(&self, peer: NodeId, why: impl Into<String>) {
        let _closed = self.commands.send(Command::Disconnect { node: peer, why: why.into() }).await;
    }

    /// Closes all connections in order, ends all serving tasks and lets go of the node's logic. Again is harmless.
    pub async fn shutdown(&self) {
        let (reply, done) = oneshot::channel();
        if self.commands.send(Command::Shutdown { reply }).await.is_ok() {
            let _ = done.await;
        }
    }

    /// Why there is no connection after `limit`: what was tried until then.
    fn still_dialling(&self, peer: NodeId, limit: Duration) -> CallError {
        let known: Vec<String> = self.shared.book().addresses(peer).iter().map(ToString::to_string).collect();
        let mut tried: Vec<String> = Vec::new();
        for report in self.shared.reports().into_iter().filter(|r| r.peer == peer) {
            tried.push(format!("{}: {}", report.address, report.error));
        }
        let pending = known.into_iter().filter(|a| !tried.iter().any(|t| t.starts_with(&format!("{a}: "))));
        tried.extend(pending.map(|a| format!("{a}: no answer yet")).collect::<Vec<_>>());
        let what = if tried.is_empty() { "looking for an address".into() } else { tried.join("; ") };
        CallError::NotConnected { peer, reason: format!("no connection within {limit:?}: {what}") }
    }
}

#[async_trait]
impl Transport for Mesh {
    fn local(&self) -> NodeId {
        self.shared.local
    }

    fn addresses(&self) -> Vec<String> {
        let peer = peer_id_of_known(self.shared.local);
        self.shared.listen().into_iter().map(|a| a.with(Protocol::P2p(peer)).to_string()).collect()
    }

    fn connected(&self) -> Vec<NodeId> {
        self.shared.links().iter().filter(|l| l.is_confirmed()).map(|l| l.node).collect()
    }

    fn is_connected(&self, peer: NodeId) -> bool {
        self.shared.link(peer).is_some_and(|l| l.is_confirmed())
    }

    fn add_addresses(&self, peer: NodeId, addresses: &[String]) {
        let parsed = addresses.iter().filter_map(|text| match parse_address(peer, text) {
            Ok(address) => Some(address),
            Err(reason) => {
                tracing::debug!(peer = %peer.short(), address = %text, %reason, "an address is of no use");
                None
            }
        });
        self.shared.learn(peer, parsed, Source::Record);
    }

    async fn call(&self, peer: NodeId, service: Service, body: Bytes, limit: Duration) -> Result<Bytes, CallError> {
        if body.len() > CALL_LEN_BYTES_MAX {
            return Err(CallError::TooLong { got: body.len(), max: CALL_LEN_BYTES_MAX });
        }
        let deadline = Instant::now() + limit;
        let late = || CallError::Timeout { peer, after: limit };
        if peer == self.shared.local {
            let answer = timeout_at(deadline, calls::call_local(&self.shared, service, body)).await;
            return answer.unwrap_or_else(|_elapsed| Err(late()));
        }
        let link = match timeout_at(deadline, self.shared.connect(peer)).await {
            Ok(link) => link?,
            Err(_elapsed) => return Err(self.still_dialling(peer, limit)),
        };
        timeout_at(deadline, calls::call(&link, service, &body)).await.unwrap_or_else(|_elapsed| Err(late()))
    }

    async fn open_generate(&self, peer: NodeId, limit: Duration) -> Result<FrameStream, CallError> {
        if peer == self.shared.local {
            return streams::open_local(&self.shared);
        }
        let deadline = Instant::now() + limit;
        let link = match timeout_at(deadline, self.shared.connect(peer)).await {
            Ok(link) => link?,
            Err(_elapsed) => return Err(self.still_dialling(peer, limit)),
        };
        let opened = timeout_at(deadline, streams::open(&self.shared, &link)).await;
        opened.unwrap_or(Err(CallError::Timeout { peer, after: limit }))
    }

    fn publish(&self, topic: Topic, body: Vec<u8>) {
        if body.len() > GOSSIP_LEN_BYTES_MAX {
            let (got, max) = (body.len(), GOSSIP_LEN_BYTES_MAX);
            tracing::error!(topic = %topic.name(), got, max, "gossip is too long and was not published");
            return;
        }
        if self.commands.try_send(Command::Publish { topic, body }).is_err() {
            self.shared.count_dropped_publication();
        }
    }

    fn subscribe(&self, topic: Topic) {
        self.shared.want_topic(topic);
    }
}
