//! Connections: dialled, established, identified, lost.

use crate::config::{is_loopback, without_peer};
use crate::dial::{Stage, Waiter};
use crate::driver::Driver;
use crate::error::plain;
use crate::shared::now_ms;
use libp2p::core::ConnectedPoint;
use libp2p::swarm::dial_opts::{DialOpts, PeerCondition};
use libp2p::swarm::{ConnectionError, ConnectionId, DialError};
use libp2p::{Multiaddr, PeerId, TransportError, identify, ping};
use starling_bootstrap::identity::peer_id_of_known;
use starling_bootstrap::{Source, node_id_of, peer_id_of};
use starling_protocol::NodeId;
use std::io;
use std::time::{Duration, Instant};

/// Peers of former connections that are dialled again at one tick.
const REDIALS_PER_TICK: usize = 2;
/// Former peers that are looked after; with back-off up to 300 s, 64 are a dial every 5 s.
const FORMER_PEERS_MAX: usize = 64;
/// How long a node of another mesh stays connected, so that it learns why it is refused.
const FOREIGNER_LIMIT: Duration = Duration::from_secs(1);
/// Longest agent text that is kept of a peer.
const AGENT_CHARS_MAX: usize = 64;
/// Pings that must fail in a row before a connection is given up.
const PING_FAILURES_MAX: u32 = 2;

impl Driver {
    /// Connects to `node`, telling `waiter` how it went.
    pub(crate) fn connect(&mut self, node: NodeId, waiter: Option<Waiter>) {
        let refuse = |waiter: Option<Waiter>, why: String| drop(waiter.map(|w| w.send(Err(why))));
        if self.shared.link(node).is_some_and(|l| l.is_confirmed()) {
            drop(waiter.map(|w| w.send(Ok(()))));
            return;
        }
        if let Err(e) = peer_id_of(node) {
            return refuse(waiter, e.to_string());
        }
        if let Some((_, why)) = self.foreigners.get(&node).filter(|_| self.shared.link(node).is_some()) {
            return refuse(waiter, why.clone());
        }
        if self.scores.is_banned(node) {
            return refuse(waiter, "this node has banned the peer for its misbehaviour".into());
        }
        let now = Instant::now();
        if !self.dials.begin(node, waiter, now) {
            return;
        }
        if self.shared.link(node).is_some() {
            self.set_stage(node, Stage::Identifying(now));
            return;
        }
        let addresses = self.shared.book().addresses(node);
        if addresses.is_empty() {
            self.search(node);
        } else {
            self.dial(node, addresses);
        }
    }

    fn dial(&mut self, node: NodeId, addresses: Vec<Multiaddr>) {
        let peer = peer_id_of_known(node);
        let dialled = addresses.clone();
        let options = DialOpts::peer_id(peer).addresses(addresses).condition(PeerCondition::Disconnected).build();
        let id = options.connection_id();
        if let Some(attempt) = self.dials.get_mut(node) {
            attempt.dial = Some(id);
            attempt.dialled = dialled;
        }
        match self.swarm.dial(options) {
            Ok(()) => {}
            // Connected in between: identify is on its way.
            Err(DialError::DialPeerConditionFalse(_)) => self.set_stage(node, Stage::Identifying(Instant::now())),
            Err(error) => self.on_dial_error(peer, id, error),
        }
    }

    fn set_stage(&mut self, node: NodeId, stage: Stage) {
        if let Some(attempt) = self.dials.get_mut(node) {
            attempt.stage = stage;
        }
    }

    /// A dial failed, one of ours or of Kademlia.
    pub(crate) fn on_dial_error(&mut self, peer: PeerId, dial: ConnectionId, error: DialError) {
        let Some(node) = node_id_of(&peer) else { return };
        // One wrong answer ends the whole dial; the other addresses are still worth a try.
        let cut_short = matches!(error, DialError::WrongPeerId { .. } | DialError::LocalPeerId { .. });
        for (address, why) in self.explain(error) {
            self.note_failure(node, address, why);
        }
        if self.shared.link(node).is_some() {
            return; // connected otherwise
        }
        let Some(attempt) = self.dials.get_mut(node).filter(|a| a.dial == Some(dial)) else { return };
        let rest = attempt.untried(&attempt.dialled);
        if cut_short && !rest.is_empty() && rest.len() < attempt.dialled.len() {
            return self.dial(node, rest);
        }
        match attempt.stage {
            Stage::Dialling => self.search(node),
            Stage::DiallingFound => self.fail(node),
            Stage::Searching | Stage::Identifying(_) => {}
        }
    }

    /// The addresses of a failed dial and their causes.
    fn explain(&self, error: DialError) -> Vec<(Option<Multiaddr>, String)> {
        match error {
            DialError::Transport(errors) => errors.into_iter().map(|(a, e)| (Some(a), plain(&e))).collect(),
            DialError::WrongPeerId { obtained, address } => {
                let who = node_id_of(&obtained).map_or_else(|| obtained.to_string(), |n| n.to_string());
                vec![(Some(address), format!("wrong peer id: node {who} answers there"))]
            }
            DialError::LocalPeerId { address } => vec![(Some(address), "wrong peer id: that is this node".into())],
            DialError::NoAddresses => Vec::new(),
            DialError::Denied { cause } => {
                let inner = std::error::Error::source(&cause).map_or_else(|| cause.to_string(), ToString::to_string);
                vec![(None, format!("refused by this node: {inner}"))]
            }
            error @ (DialError::Aborted | DialError::DialPeerConditionFalse(_)) => vec![(None, error.to_string())],
        }
    }

    fn note_failure(&mut self, node: NodeId, address: Option<Multiaddr>, why: String) {
        let text = match &address {
            Some(address) => {
                let address = without_peer(address);
                self.shared.book().failed(node, &address);
                address.to_string()
            }
            None => "any address".into(),
        };
        tracing::debug!(peer = %node.short(), address = %text, %why, "a dial failed");
        if let Some(attempt) = self.dials.get_mut(node) {
            attempt.add_failure(text.clone(), why.clone());
        }
        self.shared.report(node, text, why);
    }

    /// Asks other peers for addresses of `node` that the book has not.
    fn search(&mut self, node: NodeId) {
        if self.announced_or_linked() {
            self.set_stage(node, Stage::Searching);
            let query = self.swarm.behaviour_mut().kad.get_closest_peers(peer_id_of_known(node));
            self.discovery.searches.insert(query, node);
        } else {
            self.fail(node);
        }
    }

    fn announced_or_linked(&self) -> bool {
        self.swarm.network_info().num_peers() > 0
    }

    /// What other peers said about where `node` is.
    pub(crate) fn on_found(&mut self, node: NodeId, found: Vec<Multiaddr>) {
        if self.dials.get_mut(node).is_none_or(|a| a.stage != Stage::Searching) {
            return;
        }
        if self.shared.link(node).is_some() {
            self.set_stage(node, Stage::Identifying(Instant::now()));
            return;
        }
        self.shared.learn(node, found.iter().cloned(), Source::Kademlia);
        let found: Vec<_> = found.iter().map(without_peer).collect();
        let Some(attempt) = self.dials.get_mut(node) else { return };
        let fresh = attempt.untried(&found);
        if fresh.is_empty() {
            if attempt.failures.is_empty() {
                self.note_failure(node, None, "no address is known here or to the peers asked".into());
            }
            self.fail(node);
        } else {
            self.set_stage(node, Stage::DiallingFound);
            self.dial(node, fresh);
        }
    }

    /// Nothing more can be tried for now.
    fn fail(&mut self, node: NodeId) {
        let Some((reason, pause)) = self.dials.fail(node, Instant::now()) else { return };
        if self.dials.is_bootstrap(node) {
            tracing::warn!(peer = %node, %reason, retry_in = ?pause, "cannot reach a bootstrap node");
        } else {
            tracing::debug!(peer = %node.short(), %reason, "cannot reach a peer");
        }
        if reason.starts_with("no address") {
            self.shared.report(node, "any address".into(), reason);
        }
    }

    pub(crate) fn fail_overdue(&mut self, now: Instant) {
        for (node, cause) in self.dials.overdue(now) {
            self.note_failure(node, None, cause.into());
            self.fail(node);
            if self.shared.link(node).is_some_and(|l| !l.is_confirmed()) {
                let _ = self.swarm.disconnect_peer_id(peer_id_of_known(node));
            }
        }
    }

    /// Dials bootstrap nodes and former peers whose connection is gone.
    pub(crate) fn redial(&mut self, now: Instant) {
        let wanted: Vec<NodeId> = self.dials.bootstrap().collect();
        for node in wanted {
            if self.dials.is_due(node, now) && self.shared.link(node).is_none() {
                self.connect(node, None);
            }
        }
        let former = self.shared.book().seen_nodes();
        let due =
            |n: &NodeId| self.dials.is_due(*n, now) && self.shared.link(*n).is_none() && !self.scores.is_banned(*n);
        let due: Vec<_> = former.into_iter().take(FORMER_PEERS_MAX).filter(due).take(REDIALS_PER_TICK).collect();
        for node in due {
            self.connect(node, None);
        }
    }

    pub(crate) fn on_established(
        &mut self,
        peer: PeerId,
        connection: ConnectionId,
        endpoint: &ConnectedPoint,
        failed: Vec<(Multiaddr, TransportError<io::Error>)>,
    ) {
        let Some(node) = node_id_of(&peer) else { return };
        let remote = without_peer(endpoint.get_remote_address());
        tracing::debug!(peer = %node.short(), address = %remote, dialled = endpoint.is_dialer(), "connected");
        self.remotes.insert(connection, remote.clone());
        for (address, _) in failed {
            self.shared.book().failed(node, &without_peer(&address));
        }
        if endpoint.is_dialer() {
            let mut book = self.shared.book();
            book.add(node, remote.clone(), Source::Identify);
            book.seen(node, &remote, now_ms());
        }
        self.set_stage(node, Stage::Identifying(Instant::now()));
    }

    pub(crate) fn on_closed(
        &mut self,
        peer: PeerId,
        connection: ConnectionId,
        left: u32,
        cause: Option<ConnectionError>,
    ) {
        self.ping_failures.remove(&connection);
        self.runs.remove(&connection);
        let remote = self.remotes.remove(&connection);
        let Some(node) = node_id_of(&peer) else { return };
        if left > 0 {
            return;
        }
        let cause = cause.map_or_else(|| "closed in order".into(), |e| e.to_string());
        tracing::debug!(peer = %node.short(), %cause, "disconnected");
        if self.announced.remove(&node)
            && let Some(logic) = self.shared.inbound()
        {
            logic.on_connection(node, false);
        }
        self.foreigners.remove(&node);
        if self.dials.is_dialling(node) {
            let why = format!("the connection closed before the peer said who it is: {cause}");
            self.note_failure(node, remote, why);
            self.fail(node);
        }
    }

    pub(crate) fn on_identify(&mut self, event: identify::Event) {
        match event {
            identify::Event::Received { connection_id, peer_id, info } => {
                let Some(node) = node_id_of(&peer_id) else { return };
                if info.protocol_version == self.shared.names.mesh {
                    self.confirm(node, peer_id, connection_id, &info);
                } else {
                    self.refuse_foreigner(node, connection_id, &info.protocol_version);
                }
            }
            identify::Event::Error { peer_id, error, .. } => {
                tracing::debug!(peer = %peer_id, %error, "identify failed");
            }
            identify::Event::Sent { .. } | identify::Event::Pushed { .. } => {}
        }
    }

    /// The peer is of our mesh.
    fn confirm(&mut self, node: NodeId, peer: PeerId, connection: ConnectionId, info: &identify::Info) {
        let Some(link) = self.shared.link(node) else { return };
        // What a peer listens on at its own loopback device means nothing to another machine.
        let here = self.remotes.get(&connection).is_none_or(is_loopback);
        let usable: Vec<_> = info.listen_addrs.iter().filter(|a| here || !is_loopback(a)).cloned().collect();
        for address in &usable {
            self.swarm.behaviour_mut().kad.add_address(&peer, without_peer(address));
        }
        self.shared.learn(node, usable, Source::Identify);
        self.discovery.on_identified(node, info);
        self.close_former_lives(node, connection, &info.agent_version);
        if !link.is_confirmed() {
            link.confirm();
            tracing::info!(peer = %node, agent = %info.agent_version, "peer joined");
            // Connected by its own dial, its address is a guess; but now it counts as a former peer.
            let mut book = self.shared.book();
            let guess = book.addresses(node).into_iter().next();
            guess.inspect(|address| book.seen(node, address, now_ms()));
        }
        self.shared.forget_reports(node);
        self.dials.succeed(node);
        self.announce_connections();
    }

    /// A peer whose process was killed and is back has a new run. QUIC cannot tell (quinn's endpoints know only connection
    /// ids of their own run, so that the new process is silent to the old connection), so its old connections would be
    /// given up after 10 s of silence only, and with them what waits on their streams.
    fn close_former_lives(&mut self, node: NodeId, connection: ConnectionId, agent: &str) {
        let run: String = agent.chars().take(AGENT_CHARS_MAX).collect();
        let former = |(c, (n, r)): &(&ConnectionId, &(NodeId, String))| *n == node && **c < connection && *r != run;
        let former: Vec<ConnectionId> = self.runs.iter().filter(former).map(|(c, _)| *c).collect();
        self.runs.insert(connection, (node, run));
        for old in former {
            tracing::debug!(peer = %node.short(), "it was restarted; a connection to its former process is closed");
            self.swarm.close_connection(old);
        }
    }

    fn refuse_foreigner(&mut self, node: NodeId, connection: ConnectionId, mesh: &str) {
        let shown: String = mesh.chars().take(64).collect();
        let why = format!("other mesh: the peer speaks {shown:?}, this node {:?}", self.shared.names.mesh);
        tracing::debug!(peer = %node.short(), %why, "a stranger");
        let remote = self.remotes.get(&connection).cloned();
        self.note_failure(node, remote, why.clone());
        self.fail(node);
        // Not closed at once: the peer shall learn the cause as well. Until then no protocol works with it.
        self.foreigners.insert(node, (Instant::now(), why));
    }

    /// Closes the connections to nodes of other meshes.
    pub(crate) fn close_foreigners(&mut self, now: Instant) {
        let over = |since: &Instant| now.saturating_duration_since(*since) >= FOREIGNER_LIMIT;
        let gone: Vec<_> = self.foreigners.iter().filter(|(_, (since, _))| over(since)).map(|(n, _)| *n).collect();
        for node in gone {
            self.foreigners.remove(&node);
            let _ = self.swarm.disconnect_peer_id(peer_id_of_known(node));
        }
    }

    /// Closes all connections to `node`: what waits on their streams fails at once. It may be dialled again.
    pub(crate) fn disconnect(&mut self, node: NodeId, why: &str) {
        let Ok(peer) = peer_id_of(node) else { return };
        if self.swarm.is_connected(&peer) {
            tracing::debug!(peer = %node.short(), %why, "its connections are closed");
            let _ = self.swarm.disconnect_peer_id(peer);
        }
    }

    /// Tells the node's logic of connections that it does not know of yet.
    pub(crate) fn announce_connections(&mut self) {
        let Some(logic) = self.shared.inbound() else { return };
        for link in self.shared.links() {
            if link.is_confirmed() && self.announced.insert(link.node) {
                logic.on_connection(link.node, true);
            }
        }
    }

    pub(crate) fn on_ping(&mut self, event: &ping::Event) {
        match &event.result {
            Ok(_) => drop(self.ping_failures.remove(&event.connection)),
            Err(ping::Failure::Unsupported) => {}
            Err(ping::Failure::Timeout | ping::Failure::Other { .. }) => {
                let failures = self.ping_failures.entry(event.connection).or_default();
                *failures += 1;
                if *failures >= PING_FAILURES_MAX {
                    tracing::debug!(peer = %event.peer, "no answer to pings; the connection is closed");
                    self.swarm.close_connection(event.connection);
                }
            }
        }
    }
}
