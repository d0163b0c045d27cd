//! The one task that owns the swarm. It waits for the next event or command and handles it; `on_*.rs` say how.

use crate::behaviour::{Behaviour, BehaviourEvent};
use crate::config::MeshConfig;
use crate::dial::Dials;
use crate::error::{MeshError, plain, plain_io};
use crate::on_discovery::Discovery;
use crate::score::Scores;
use crate::shared::{Command, Shared};
use futures::StreamExt;
use libp2p::core::transport::ListenerId;
use libp2p::multiaddr::Protocol;
use libp2p::swarm::{ConnectionId, SwarmEvent};
use libp2p::{Multiaddr, Swarm};
use starling_protocol::NodeId;
use starling_protocol::wire::Topic;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, TcpListener, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};

/// How often timeouts and back-offs are looked at.
const TICK: Duration = Duration::from_millis(200);
/// How long closing connections may take at the end.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);

type Ready = oneshot::Sender<Result<(), MeshError>>;

pub(crate) struct Driver {
    pub(crate) swarm: Swarm<Behaviour>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) dials: Dials,
    pub(crate) discovery: Discovery,
    pub(crate) scores: Scores,
    /// The address at the other end of each connection.
    pub(crate) remotes: HashMap<ConnectionId, Multiaddr>,
    /// Which run of the peer's process said who it is on each connection: its agent text, which has the run in it.
    pub(crate) runs: BTreeMap<ConnectionId, (NodeId, String)>,
    /// Pings that failed in a row.
    pub(crate) ping_failures: HashMap<ConnectionId, u32>,
    /// Peers whose connection the node's logic was told of.
    pub(crate) announced: BTreeSet<NodeId>,
    /// Connected nodes of other meshes: since when, and why they are refused.
    pub(crate) foreigners: BTreeMap<NodeId, (Instant, String)>,
    /// Subscribed topics by name.
    pub(crate) topics: BTreeMap<String, Topic>,
    commands: mpsc::Receiver<Command>,
    /// Listeners that have no address yet, and who waits for them.
    starting: HashMap<ListenerId, Multiaddr>,
    ready: Option<Ready>,
}

impl Driver {
    pub(crate) fn new(
        swarm: Swarm<Behaviour>,
        shared: Arc<Shared>,
        config: &MeshConfig,
        commands: mpsc::Receiver<Command>,
        ready: Ready,
    ) -> Self {
        let bootstrap = config.bootstrap.iter().map(|(node, _)| *node).filter(|n| *n != shared.local);
        Self {
            swarm,
            dials: Dials::new(bootstrap),
            discovery: Discovery::default(),
            scores: Scores::default(),
            remotes: HashMap::new(),
            runs: BTreeMap::new(),
            ping_failures: HashMap::new(),
            announced: BTreeSet::new(),
            foreigners: BTreeMap::new(),
            topics: BTreeMap::new(),
            commands,
            starting: HashMap::new(),
            ready: Some(ready),
            shared,
        }
    }

    /// Listens, then runs until it is told to stop or all handles of the mesh are gone.
    pub(crate) async fn run(mut self, config: MeshConfig) {
        if let Err(error) = self.listen(&config) {
            self.ready.take().map(|r| r.send(Err(error)));
            self.shared.close().await;
            return;
        }
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let done = loop {
            tokio::select! {
                event = self.swarm.select_next_some() => self.on_event(event),
                command = self.commands.recv() => match command {
                    Some(Command::Shutdown { reply }) => break Some(reply),
                    Some(command) => self.on_command(command),
                    None => break None,
                },
                () = self.shared.wake.notified() => self.sync(),
                _ = tick.tick() => self.on_tick(Instant::now()),
            }
        };
        Box::pin(self.close()).await;
        done.map(|reply| reply.send(()));
    }

    fn listen(&mut self, config: &MeshConfig) -> Result<(), MeshError> {
        // All before the first is listened on: whoever tries again without the taken one finds the others free.
        config.listen.iter().try_for_each(refuse_taken)?;
        for address in &config.listen {
            let id = self
                .swarm
                .listen_on(address.clone())
                .map_err(|e| MeshError::Listen { address: address.clone(), reason: plain(&e) })?;
            self.starting.insert(id, address.clone());
        }
        for address in &config.external {
            self.swarm.add_external_address(address.clone());
            self.shared.add_listen(address);
        }
        self.ready_when_listening();
        Ok(())
    }

    fn ready_when_listening(&mut self) {
        if self.starting.is_empty()
            && let Some(ready) = self.ready.take()
        {
            let _ = ready.send(Ok(()));
        }
    }

    fn on_event(&mut self, event: SwarmEvent<BehaviourEvent>) {
        match event {
            SwarmEvent::Behaviour(event) => self.on_behaviour(event),
            SwarmEvent::ConnectionEstablished { peer_id, connection_id, endpoint, concurrent_dial_errors, .. } => {
                self.on_established(peer_id, connection_id, &endpoint, concurrent_dial_errors.unwrap_or_default());
            }
            SwarmEvent::ConnectionClosed { peer_id, connection_id, num_established, cause, .. } => {
                self.on_closed(peer_id, connection_id, num_established, cause);
            }
            SwarmEvent::OutgoingConnectionError { peer_id: Some(peer), connection_id, error } => {
                self.on_dial_error(peer, connection_id, error);
            }
            SwarmEvent::IncomingConnectionError { send_back_addr, error, .. } => {
                tracing::debug!(from = %send_back_addr, %error, "an incoming connection failed");
            }
            SwarmEvent::NewListenAddr { listener_id, address } => {
                tracing::info!(%address, "listening");
                self.shared.add_listen(&address);
                self.starting.remove(&listener_id);
                self.ready_when_listening();
            }
            SwarmEvent::ExpiredListenAddr { address, .. } => {
                tracing::warn!(%address, "no longer listening");
                self.shared.remove_listen(&address);
            }
            SwarmEvent::ListenerClosed { listener_id, addresses, reason } => {
                for address in &addresses {
                    self.shared.remove_listen(address);
                }
                let reason = reason.err().map_or_else(|| "closed".into(), |e| plain_io(&e));
                tracing::warn!(?addresses, %reason, "a listener ended");
                self.discovery.on_listener_closed(listener_id);
                if let Some(address) = self.starting.remove(&listener_id) {
                    self.ready.take().map(|r| r.send(Err(MeshError::Listen { address, reason })));
                }
            }
            SwarmEvent::ListenerError { error, .. } => tracing::warn!(error = %plain_io(&error), "a listener failed"),
            SwarmEvent::ExternalAddrConfirmed { address } => {
                tracing::info!(%address, "reachable from outside");
                self.shared.add_listen(&address);
            }
            SwarmEvent::ExternalAddrExpired { address } => self.shared.remove_listen(&address),
            _ => {}
        }
    }

    fn on_behaviour(&mut self, event: BehaviourEvent) {
        match event {
            BehaviourEvent::Identify(event) => self.on_identify(event),
            BehaviourEvent::Ping(event) => self.on_ping(&event),
            BehaviourEvent::Kad(event) => self.on_kad(event),
            BehaviourEvent::Gossip(event) => self.on_gossip(event),
            BehaviourEvent::Mdns(event) => self.on_mdns(event),
            BehaviourEvent::Autonat(event) => self.on_autonat(event),
            BehaviourEvent::RelayClient(event) => tracing::info!(?event, "relay client"),
            BehaviourEvent::Relay(event) => tracing::debug!(?event, "relay"),
            BehaviourEvent::Dcutr(event) => tracing::info!(?event, "hole punching"),
            BehaviourEvent::Limits(never) | BehaviourEvent::Blocked(never) | BehaviourEvent::Substreams(never) => {
                match never {}
            }
        }
    }

    fn on_command(&mut self, command: Command) {
        match command {
            Command::Connect { node, reply } => self.connect(node, Some(reply)),
            Command::Publish { topic, body } => {
                self.sync(); // the subscription came before the publication
                self.publish(&topic, body);
            }
            Command::Penalise { node, points, why } => self.penalise(node, points, &why),
            Command::Disconnect { node, why } => self.disconnect(node, &why),
            Command::Score { node, reply } => drop(reply.send(self.score(node))),
            Command::Shutdown { reply } => drop(reply.send(())), // taken by `run`
        }
    }

    /// Takes over what callers asked for without a command: topics, and the node's logic.
    fn sync(&mut self) {
        self.subscribe_wanted();
        self.announce_connections();
    }

    fn on_tick(&mut self, now: Instant) {
        self.sync();
        self.redial(now);
        self.fail_overdue(now);
        self.close_foreigners(now);
        self.wear_off_scores(now);
        self.renew_relays(now);
        for link in self.shared.links() {
            link.sweep(now);
        }
    }

    async fn close(mut self) {
        self.dials.clear();
        let peers: Vec<_> = self.swarm.connected_peers().copied().collect();
        for peer in peers {
            let _ = self.swarm.disconnect_peer_id(peer);
        }
        // The peers learn at once that we are gone, instead of by a timeout.
        let closed = async {
            while self.swarm.network_info().num_peers() > 0 {
                self.swarm.select_next_some().await;
            }
        };
        if tokio::time::timeout(CLOSE_LIMIT, closed).await.is_err() {
            tracing::debug!("some connections did not close in time");
        }
        self.shared.close().await;
    }
}

/// libp2p shares TCP ports between listeners (`SO_REUSEPORT`), so that a second node on the same port would start and
/// take half of the first one's connections. A plain bind does not share, so it tells.
fn refuse_taken(address: &Multiaddr) -> Result<(), MeshError> {
    let mut parts = address.iter();
    let ip: IpAddr = match parts.next() {
        Some(Protocol::Ip4(ip)) => ip.into(),
        Some(Protocol::Ip6(ip)) => ip.into(),
        _ => return Ok(()),
    };
    let bound = match parts.next() {
        Some(Protocol::Tcp(port)) if port != 0 => TcpListener::bind((ip, port)).map(drop),
        Some(Protocol::Udp(port)) if port != 0 => UdpSocket::bind((ip, port)).map(drop),
        _ => return Ok(()),
    };
    bound.map_err(|e| MeshError::Listen { address: address.clone(), reason: e.to_string() })
}
