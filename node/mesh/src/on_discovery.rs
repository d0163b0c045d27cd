//! Finding peers: Kademlia, the local network, and ways around NAT.

use crate::config::without_peer;
use crate::driver::Driver;
use libp2p::core::transport::ListenerId;
use libp2p::kad::{self, QueryId, QueryResult};
use libp2p::multiaddr::Protocol;
use libp2p::{Multiaddr, PeerId, autonat, identify, mdns, relay};
use starling_bootstrap::identity::peer_id_of_known;
use starling_bootstrap::{Source, node_id_of};
use starling_protocol::NodeId;
use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

/// Relays that a node behind NAT listens at: one may go away.
const RELAYS_MAX: usize = 2;
/// Pause between attempts to find a relay.
const RELAY_PAUSE: Duration = Duration::from_secs(10);

/// What the driver knows about finding peers.
#[derive(Debug, Default)]
pub(crate) struct Discovery {
    /// Kademlia queries for one peer.
    pub(crate) searches: HashMap<QueryId, NodeId>,
    /// Peers that relay, with an address.
    relays: BTreeMap<NodeId, Multiaddr>,
    /// Listeners at relays.
    reserved: HashMap<ListenerId, NodeId>,
    behind_nat: bool,
    relays_at: Option<Instant>,
}

impl Discovery {
    pub(crate) fn on_identified(&mut self, node: NodeId, info: &identify::Info) {
        let relays = info.protocols.contains(&relay::HOP_PROTOCOL_NAME);
        let direct = info.listen_addrs.iter().find(|a| !a.iter().any(|p| p == Protocol::P2pCircuit));
        match direct {
            Some(address) if relays => drop(self.relays.insert(node, without_peer(address))),
            _ => drop(self.relays.remove(&node)),
        }
    }

    pub(crate) fn on_listener_closed(&mut self, id: ListenerId) {
        self.reserved.remove(&id);
    }
}

impl Driver {
    pub(crate) fn on_kad(&mut self, event: kad::Event) {
        match event {
            kad::Event::OutboundQueryProgressed { id, result: QueryResult::GetClosestPeers(result), step, .. } => {
                let peers = match result {
                    Ok(kad::GetClosestPeersOk { peers, .. })
                    | Err(kad::GetClosestPeersError::Timeout { peers, .. }) => peers,
                };
                let wanted = self.discovery.searches.get(&id).copied();
                let mut found = Vec::new();
                for info in peers {
                    let Some(node) = node_id_of(&info.peer_id) else { continue };
                    if Some(node) == wanted {
                        found.extend(info.addrs.iter().cloned());
                    }
                    self.shared.learn(node, info.addrs, Source::Kademlia);
                }
                if let (Some(node), true) = (wanted, step.last) {
                    self.discovery.searches.remove(&id);
                    self.on_found(node, found);
                }
            }
            kad::Event::RoutingUpdated { peer, addresses, .. } => {
                if let Some(node) = node_id_of(&peer) {
                    self.shared.learn(node, addresses.iter().cloned(), Source::Kademlia);
                }
            }
            _ => {}
        }
    }

    pub(crate) fn on_mdns(&mut self, event: mdns::Event) {
        let mdns::Event::Discovered(found) = event else { return };
        for (peer, address) in found {
            let Some(node) = node_id_of(&peer) else { continue };
            if node != self.shared.local {
                self.shared.learn(node, [address], Source::Mdns);
                self.connect(node, None);
            }
        }
    }

    pub(crate) fn on_autonat(&mut self, event: autonat::Event) {
        if let autonat::Event::StatusChanged { old, new } = event {
            tracing::info!(?old, ?new, "reachability from outside");
            self.discovery.behind_nat = matches!(new, autonat::NatStatus::Private);
        }
    }

    /// Behind NAT, listens at relays, so that others can reach this node and then punch a hole.
    pub(crate) fn renew_relays(&mut self, now: Instant) {
        let discovery = &self.discovery;
        if !discovery.behind_nat
            || discovery.reserved.len() >= RELAYS_MAX
            || discovery.relays_at.is_some_and(|at| now - at < RELAY_PAUSE)
        {
            return;
        }
        self.discovery.relays_at = Some(now);
        let free: Vec<(NodeId, Multiaddr)> = self
            .discovery
            .relays
            .iter()
            .filter(|(n, _)| !self.discovery.reserved.values().any(|r| r == *n))
            .filter(|(n, _)| self.shared.link(**n).is_some_and(|l| l.is_confirmed()))
            .map(|(n, a)| (*n, a.clone()))
            .collect();
        if free.is_empty() && self.discovery.reserved.is_empty() {
            tracing::warn!("this node is behind NAT and no connected peer relays: others cannot reach it");
        }
        for (node, address) in free.into_iter().take(RELAYS_MAX - self.discovery.reserved.len()) {
            let relay: PeerId = peer_id_of_known(node);
            let at = address.with(Protocol::P2p(relay)).with(Protocol::P2pCircuit);
            match self.swarm.listen_on(at) {
                Ok(id) => drop(self.discovery.reserved.insert(id, node)),
                Err(error) => tracing::warn!(relay = %node.short(), %error, "cannot listen at a relay"),
            }
        }
    }
}
