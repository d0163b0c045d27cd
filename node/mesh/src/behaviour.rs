//! All protocols of a node, put together.

use crate::config::{MeshConfig, Names, is_loopback};
use crate::error::MeshError;
use crate::shared::Shared;
use crate::substreams;
use libp2p::core::transport::dummy::DummyTransport;
use libp2p::core::upgrade::Version;
use libp2p::gossipsub::{
    self, AllowAllSubscriptionFilter, IdentityTransform, MaxCountSubscriptionFilter, MessageAuthenticity,
    PeerScoreParams, PeerScoreThresholds, TopicScoreParams, ValidationMode,
};
use libp2p::kad::{self, store::MemoryStore};
use libp2p::swarm::NetworkBehaviour;
use libp2p::swarm::behaviour::toggle::Toggle;
use libp2p::{Swarm, SwarmBuilder};
use libp2p::{allow_block_list, autonat, connection_limits, dcutr, dns, identify, mdns, ping, relay};
use libp2p::{identity::Keypair, noise, quic, tcp, yamux};
use starling_protocol::wire::GOSSIP_LEN_BYTES_MAX;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

/// Streams of one connection: 384 of ours (`Limits::inbound_streams_per_connection`) and the rest for libp2p's own.
const MUXED_STREAMS_MAX: usize = 512;
/// Topics a peer may subscribe to: four kinds, two of them per model.
const TOPICS_PER_PEER_MAX: usize = 1024;
/// gossipsub's envelope around a message: key, signature, topic, sequence number.
const GOSSIP_ENVELOPE_BYTES: usize = 1 << 10;

/// How often QUIC shows an otherwise silent peer that it is there; five times within the 10 s of silence after which a
/// connection is given up (libp2p's default, kept): at 20 % loss all of them are lost once in 3000 times, and a process
/// that gets no CPU for some seconds keeps its connections. A killed peer need not wait for the 10 s: membership misses it
/// after 3 and has its connections closed ([`crate::Mesh::disconnect`]), and one that is back earlier says so when it
/// connects (`close_former_lives`).
const KEEP_ALIVE: Duration = Duration::from_secs(2);

pub(crate) type Gossip =
    gossipsub::Behaviour<IdentityTransform, MaxCountSubscriptionFilter<AllowAllSubscriptionFilter>>;

#[derive(NetworkBehaviour)]
pub(crate) struct Behaviour {
    // The first three refuse connections before anything else sees them.
    pub(crate) limits: connection_limits::Behaviour,
    pub(crate) blocked: allow_block_list::Behaviour<allow_block_list::BlockedPeers>,
    pub(crate) substreams: substreams::Behaviour,
    pub(crate) identify: identify::Behaviour,
    pub(crate) ping: ping::Behaviour,
    pub(crate) kad: kad::Behaviour<MemoryStore>,
    pub(crate) gossip: Gossip,
    pub(crate) relay_client: relay::client::Behaviour,
    pub(crate) relay: Toggle<relay::Behaviour>,
    pub(crate) dcutr: Toggle<dcutr::Behaviour>,
    pub(crate) autonat: Toggle<autonat::Behaviour>,
    pub(crate) mdns: Toggle<mdns::tokio::Behaviour>,
}

/// The swarm of a node, not listening yet.
pub(crate) fn swarm(config: &MeshConfig, shared: &Arc<Shared>) -> Result<Swarm<Behaviour>, MeshError> {
    let setup = |what, reason: String| MeshError::Setup { what, reason };
    let mux = || {
        let mut mux = yamux::Config::default();
        mux.set_max_num_streams(MUXED_STREAMS_MAX);
        mux
    };
    let builder = SwarmBuilder::with_existing_identity(config.identity.keypair())
        .with_tokio()
        .with_tcp(tcp::Config::default().nodelay(true), noise::Config::new, mux)
        .map_err(|e| setup("TCP", e.to_string()))?
        .with_quic_config(|quic| quic_config(quic, config));
    // The two builders have different types, so what follows is written once as a macro.
    macro_rules! finish {
        ($builder:expr) => {
            $builder
                .with_relay_client(noise::Config::new, mux)
                .map_err(|e| setup("the relay client", e.to_string()))?
                .with_behaviour(|key, relay_client| Behaviour::new(config, shared, key, relay_client))
                .map_err(|e| setup("the protocols", e.to_string()))?
                .with_swarm_config(|c| {
                    c.with_idle_connection_timeout(config.limits.connection_idle)
                        // A new stream's first bytes go along with the protocol's name: a round trip less, and over
                        // TCP half the CPU. All peers speak what we ask for, since identify has said so.
                        .with_substream_upgrade_protocol_override(Version::V1Lazy)
                        // A burst of generations: 128 of `Limits::streams_per_peer`, and calls.
                        .with_max_negotiating_inbound_streams(256)
                        .with_smart_dial()
                })
                .with_connection_timeout(config.limits.dial)
                .build()
        };
    }
    // A machine without a resolver (no /etc/resolv.conf) can still dial addresses that are numbers.
    Ok(match dns::tokio::Transport::system(DummyTransport::<()>::new()) {
        Ok(_) => finish!(builder.with_dns().map_err(|e| setup("DNS", e.to_string()))?),
        Err(error) => {
            tracing::warn!(%error, "no name resolution; /dns addresses cannot be dialled");
            finish!(builder.with_dns_config(dns::ResolverConfig::default(), dns::ResolverOpts::default()))
        }
    })
}

/// The agent text told to peers: program, version, and a number drawn for this run of the process, by which peers know
/// that connections to an earlier run lead nowhere.
fn this_run(agent: &str) -> String {
    // Seeded by the operating system.
    format!("{agent} run/{:016x}", RandomState::new().build_hasher().finish())
}

fn quic_config(mut quic: quic::Config, config: &MeshConfig) -> quic::Config {
    quic.handshake_timeout = config.limits.dial;
    quic.keep_alive_interval = KEEP_ALIVE;
    quic.max_concurrent_stream_limit = u32::try_from(MUXED_STREAMS_MAX).unwrap_or(u32::MAX);
    // The loopback device takes packets of 64 KiB. Measured on two busy cores (echoed calls, twice each, taking turns)
    // with them and with the usual 1452 bytes: 65–94 and 78–110 µs of CPU for a call of 10 kB, 10.7–12.2 and 13.3–13.5 ms
    // for one of 1 MiB. The receive buffer of 212 kB overflows equally often with both (some 500 packets a run).
    if config.listen.iter().all(is_loopback) { quic.mtu_upper_bound(u16::MAX - 8) } else { quic }
}

impl Behaviour {
    fn new(
        config: &MeshConfig,
        shared: &Arc<Shared>,
        key: &Keypair,
        relay_client: relay::client::Behaviour,
    ) -> Result<Self, Box<dyn std::error::Error + Send + Sync>> {
        let local = key.public().to_peer_id();
        let nat = config.wants_nat();
        let mdns = config.mdns.then(|| mdns::tokio::Behaviour::new(mdns::Config::default(), local)).transpose()?;
        Ok(Self {
            limits: connection_limits::Behaviour::new(connection_limits(config)),
            blocked: allow_block_list::Behaviour::default(),
            substreams: substreams::Behaviour::new(Arc::clone(shared)),
            identify: identify::Behaviour::new(
                identify::Config::new(shared.names.mesh.clone(), key.public())
                    .with_agent_version(this_run(&config.agent))
                    .with_push_listen_addr_updates(true),
            ),
            // A dead connection is noticed within 15 s and closed, so that the next call dials anew.
            ping: ping::Behaviour::new(
                ping::Config::new().with_interval(Duration::from_secs(5)).with_timeout(Duration::from_secs(10)),
            ),
            kad: kademlia(local, &shared.names),
            gossip: gossip(key, &shared.names)?,
            relay_client,
            relay: config.relay.then(|| relay::Behaviour::new(local, relay::Config::default())).into(),
            dcutr: nat.then(|| dcutr::Behaviour::new(local)).into(),
            autonat: nat.then(|| autonat::Behaviour::new(local, autonat::Config::default())).into(),
            mdns: mdns.into(),
        })
    }
}

fn connection_limits(config: &MeshConfig) -> connection_limits::ConnectionLimits {
    let max = config.limits.connections;
    connection_limits::ConnectionLimits::default()
        .with_max_established(Some(max))
        // Simultaneous dials by both sides over both transports, and a relayed connection that is being replaced.
        .with_max_established_per_peer(Some(6))
        .with_max_pending_incoming(Some(max / 4))
        .with_max_pending_outgoing(Some(max / 4))
}

fn kademlia(local: libp2p::PeerId, names: &Names) -> kad::Behaviour<MemoryStore> {
    let mut config = kad::Config::new(names.kad.clone());
    config
        .set_query_timeout(Duration::from_secs(10))
        .set_periodic_bootstrap_interval(Some(Duration::from_secs(60)))
        .set_substreams_timeout(Duration::from_secs(5));
    let mut kad = kad::Behaviour::with_config(local, MemoryStore::new(local), config);
    kad.set_mode(Some(kad::Mode::Server));
    kad
}

fn gossip(key: &Keypair, names: &Names) -> Result<Gossip, Box<dyn std::error::Error + Send + Sync>> {
    let config = gossipsub::ConfigBuilder::default()
        .protocol_id_prefix(names.gossip.as_ref().to_owned())
        .validation_mode(ValidationMode::Strict)
        .validate_messages()
        .max_transmit_size(GOSSIP_LEN_BYTES_MAX + GOSSIP_ENVELOPE_BYTES)
        .heartbeat_interval(Duration::from_millis(500))
        .heartbeat_initial_delay(Duration::from_millis(100))
        // Below `low` a node grafts whoever it knows, so two nodes are a mesh; above ten it stays sparse.
        .mesh_n_low(4)
        .mesh_n(6)
        .mesh_n_high(10)
        .mesh_outbound_min(2)
        .gossip_lazy(4)
        .flood_publish(true)
        .duplicate_cache_time(Duration::from_secs(120))
        .history_length(10)
        .history_gossip(5)
        .build()?;
    let filter = MaxCountSubscriptionFilter {
        filter: AllowAllSubscriptionFilter {},
        max_subscribed_topics: TOPICS_PER_PEER_MAX,
        max_subscriptions_per_request: TOPICS_PER_PEER_MAX,
    };
    let authenticity = MessageAuthenticity::Signed(key.clone());
    let mut gossip = Gossip::new_with_subscription_filter(authenticity, config, filter)?;
    let params = PeerScoreParams {
        app_specific_weight: 1.0,
        // Many nodes behind one NAT, or on one machine, are normal.
        ip_colocation_factor_weight: 0.0,
        retain_score: Duration::from_secs(600),
        ..PeerScoreParams::default()
    };
    gossip.with_peer_score(params, PeerScoreThresholds::default())?;
    Ok(gossip)
}

/// Topics are slow and small, so deliveries earn little; an invalid message costs at once: three in a row (−10 × 3²)
/// and the peer is graylisted at −80.
pub(crate) fn topic_score() -> TopicScoreParams {
    TopicScoreParams {
        topic_weight: 1.0,
        time_in_mesh_weight: 0.0,
        first_message_deliveries_weight: 0.1,
        first_message_deliveries_decay: 0.9,
        first_message_deliveries_cap: 10.0,
        mesh_message_deliveries_weight: 0.0,
        mesh_failure_penalty_weight: 0.0,
        invalid_message_deliveries_weight: -10.0,
        invalid_message_deliveries_decay: 0.97,
        ..TopicScoreParams::default()
    }
}
