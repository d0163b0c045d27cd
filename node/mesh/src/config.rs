//! What a mesh is started with.

use libp2p::multiaddr::Protocol;
use libp2p::{Multiaddr, StreamProtocol};
use starling_bootstrap::{Identity, PeerBook};
use starling_protocol::wire::WIRE_VERSION;
use starling_protocol::{Hash, NodeId};
use std::time::Duration;

/// What a mesh is started with. [`MeshConfig::new`] gives the defaults.
#[derive(Clone, Debug)]
pub struct MeshConfig {
    /// This node's key.
    pub identity: Identity,
    /// The mesh's id. Nodes of another mesh are refused: all protocol names carry its first eight digits.
    pub network: Hash,
    /// Where to listen. Default: the loopback device, any port, TCP. On one machine the kernel ends the connections of a
    /// process that was killed at once, and weights move faster than over QUIC; see `docs/mesh.md`.
    pub listen: Vec<Multiaddr>,
    /// Addresses under which this node can be reached from elsewhere, if it cannot find out (port forwarding).
    pub external: Vec<Multiaddr>,
    /// Nodes to knock at, again and again with back-off while there is no connection to them.
    pub bootstrap: Vec<(NodeId, Vec<Multiaddr>)>,
    /// Peers of the last run.
    pub cached: PeerBook,
    /// Whether to look for peers in the local network. Default: no.
    pub mdns: bool,
    /// Whether to find out about NAT, and to work around it with relays and hole punching. `None`, the default:
    /// when listening beyond loopback.
    pub nat: Option<bool>,
    /// Whether to relay for peers behind NAT. Default: no; bootstrap nodes do.
    pub relay: bool,
    /// Program and version, told to peers with a number that is drawn for each run.
    pub agent: String,
    /// Bounds.
    pub limits: Limits,
}

impl MeshConfig {
    /// A mesh on the loopback device with no bootstrap nodes.
    #[must_use]
    pub fn new(identity: Identity, network: Hash) -> Self {
        let loopback = Multiaddr::empty().with(Protocol::Ip4(std::net::Ipv4Addr::LOCALHOST));
        Self {
            identity,
            network,
            listen: vec![loopback.with(Protocol::Tcp(0))],
            external: Vec::new(),
            bootstrap: Vec::new(),
            cached: PeerBook::new(),
            mdns: false,
            nat: None,
            relay: false,
            agent: concat!("starling/", env!("CARGO_PKG_VERSION")).into(),
            limits: Limits::default(),
        }
    }

    pub(crate) fn wants_nat(&self) -> bool {
        self.nat.unwrap_or_else(|| !self.listen.iter().all(is_loopback))
    }
}

/// Bounds, with their arithmetic.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Calls of this node in flight to one peer, once for SWIM and Raft and once for the rest; more wait. Default 64:
    /// at 1 ms a call that is 64 000 calls/s, and 64 × 4 MiB = 256 MiB in the worst case.
    pub calls_per_peer: usize,
    /// Generation streams of this node open to one peer; more wait. Default 128: the largest batch of one server.
    pub streams_per_peer: usize,
    /// Streams that one connection of a peer may have open here; more are dropped. Default 384 ≥ 2 × 64 calls, 128
    /// generations, and half as many again whose caller has given up while they are still served here. What QUIC and
    /// yamux allow (512) leaves room for libp2p's own.
    pub inbound_streams_per_connection: usize,
    /// Memory for the bodies of inbound calls, over all peers, a quarter of it for SWIM and Raft; more wait.
    /// Default 256 MiB: 48 of the longest and 64 MiB of small ones. At least 32 MiB, so that each kind fits.
    pub inbound_call_memory_bytes: usize,
    /// Connections, both directions. Default 512: about 100 KiB each when idle, so 50 MiB.
    pub connections: u32,
    /// How long a dial to one address may take. Default 4 s: the cause is told within 5.
    pub dial: Duration,
    /// How long a connection stays without any stream. Default 10 min.
    pub connection_idle: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            calls_per_peer: 64,
            streams_per_peer: 128,
            inbound_streams_per_connection: 384,
            inbound_call_memory_bytes: 256 << 20,
            connections: 512,
            dial: Duration::from_secs(4),
            connection_idle: Duration::from_secs(600),
        }
    }
}

/// The mesh's protocol names. Each carries the network, so nothing of another mesh is ever understood.
#[derive(Clone, Debug)]
pub(crate) struct Names {
    /// Told by identify: `/starling/<first 8 digits>/<version>`.
    pub(crate) mesh: String,
    pub(crate) kad: StreamProtocol,
    pub(crate) gossip: StreamProtocol,
    pub(crate) call: StreamProtocol,
    pub(crate) generate: StreamProtocol,
}

impl Names {
    pub(crate) fn new(network: Hash) -> Self {
        let short = network.short();
        let name = |what: &str| {
            #[expect(clippy::expect_used, reason = "the text starts with a slash, the only thing that is asked")]
            StreamProtocol::try_from_owned(format!("/starling/{short}/{what}/{WIRE_VERSION}")).expect("starts with /")
        };
        Self {
            mesh: format!("/starling/{short}/{WIRE_VERSION}"),
            kad: name("kad"),
            gossip: name("gossip"),
            call: name("call"),
            generate: name("generate"),
        }
    }
}

/// Whether an address can only be reached from this machine.
pub(crate) fn is_loopback(address: &Multiaddr) -> bool {
    match address.iter().next() {
        Some(Protocol::Ip4(ip)) => ip.is_loopback(),
        Some(Protocol::Ip6(ip)) => ip.is_loopback(),
        _ => false,
    }
}

/// `address` without `/p2p/<peer>` at its end.
pub(crate) fn without_peer(address: &Multiaddr) -> Multiaddr {
    let mut address = address.clone();
    if matches!(address.iter().last(), Some(Protocol::P2p(_))) {
        address.pop();
    }
    address
}

impl Names {
    /// The protocol of a kind of substream.
    pub(crate) fn of(&self, kind: crate::substreams::Kind) -> StreamProtocol {
        match kind {
            crate::substreams::Kind::Call => self.call.clone(),
            crate::substreams::Kind::Generate => self.generate.clone(),
        }
    }
}
