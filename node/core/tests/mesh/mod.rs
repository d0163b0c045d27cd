//! Nodes that are members and nothing else, over the memory network.
#![allow(dead_code, reason = "each test uses a part")]

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use starling_core::membership::{Membership, MembershipConfig, SharedRecords};
use starling_core::memory_network::{MemoryConfig, MemoryNetwork};
use starling_core::runtime::NodeScope;
use starling_core::transport::{FrameStream, Inbound, InboundError, Verdict};
use starling_protocol::codec::decode;
use starling_protocol::record::{NodeRecord, Role};
use starling_protocol::signed::{Signer, Verifier};
use starling_protocol::wire::{GOSSIP_LEN_BYTES_MAX, Gossip, Service, Topic};
use starling_protocol::{Hash, NodeId, StoreId, Timestamp};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub(crate) fn id(n: u16) -> NodeId {
    let mut bytes = [0; 32];
    bytes[..2].copy_from_slice(&n.to_be_bytes());
    NodeId(bytes)
}

/// Signs by hashing: no test here is about cryptography.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TestKey(pub(crate) NodeId);

impl Signer for TestKey {
    fn node_id(&self) -> NodeId {
        self.0
    }
    fn sign(&self, message: &[u8]) -> Vec<u8> {
        Hash::of(&[&self.0.0[..], message].concat()).0.to_vec()
    }
}

impl Verifier for TestKey {
    fn verify(&self, node: NodeId, message: &[u8], signature: &[u8]) -> bool {
        TestKey(node).sign(message) == signature
    }
}

pub(crate) fn record(node: NodeId) -> NodeRecord {
    NodeRecord {
        node,
        store: StoreId::default(),
        sequence: 0,
        roles: vec![Role::Server],
        version: "test".into(),
        addresses: Vec::new(),
        device: "cpu".into(),
        memory_bytes: 1 << 30,
        cores: 1,
        models: Vec::new(),
        storage_free_bytes: 1 << 30,
        agent_slots: 0,
        intake: Default::default(),
    }
}

struct Dispatch(Arc<Membership>, TestKey);

#[async_trait]
impl Inbound for Dispatch {
    async fn on_call(&self, from: NodeId, service: Service, body: Bytes) -> Result<Bytes, InboundError> {
        match service {
            Service::Swim => self.0.on_packet(from, &body).await,
            _ => Ok(body),
        }
    }
    async fn on_generate(&self, _from: NodeId, _stream: FrameStream) {}
    fn on_gossip(&self, _from: NodeId, _topic: &Topic, body: &[u8]) -> Verdict {
        match decode::<Gossip>("gossip", body, GOSSIP_LEN_BYTES_MAX) {
            Ok(Gossip::Node(record)) => self.0.on_record(&record, &self.1),
            _ => Verdict::Reject,
        }
    }
    fn on_connection(&self, peer: NodeId, connected: bool) {
        self.0.on_connection(peer, connected);
    }
}

pub(crate) struct Mesh {
    pub(crate) network: Arc<MemoryNetwork>,
    started: Instant,
    pub(crate) nodes: BTreeMap<NodeId, (NodeScope, Arc<Membership>)>,
    shared: Arc<SharedRecords>,
    seed: u64,
}

impl Mesh {
    pub(crate) fn new(seed: u64, config: MemoryConfig) -> Self {
        let network = MemoryNetwork::new(seed, config);
        Self { network, started: Instant::now(), nodes: BTreeMap::new(), shared: Arc::default(), seed }
    }

    /// Starts a node whose seeds are `seeds`.
    pub(crate) async fn start(&mut self, node: NodeId, seeds: &[NodeId]) {
        let seed = self.seed * 1_000_000 + self.nodes.len() as u64;
        let scope = NodeScope::new(seed);
        let now = Timestamp(1_000_000) + self.started.elapsed();
        let membership = scope
            .run(async {
                let transport = self.network.transport(node).shared();
                let key = TestKey(node);
                let config = MembershipConfig {
                    seeds: seeds.to_vec(),
                    shared_records: Some(self.shared.clone()),
                    ..MembershipConfig::default()
                };
                let membership =
                    Membership::start(transport, Arc::new(key), config, seed, now, CancellationToken::new());
                self.network.attach(node, Arc::new(Dispatch(membership.clone(), key)));
                membership.publish_record(record(node), &key);
                membership
            })
            .await;
        self.nodes.insert(node, (scope, membership));
    }

    pub(crate) fn crash(&mut self, node: NodeId) {
        if let Some((scope, _)) = self.nodes.remove(&node) {
            self.network.detach(node);
            scope.crash();
        }
    }

    pub(crate) fn members(&self) -> impl Iterator<Item = &Arc<Membership>> {
        self.nodes.values().map(|(_, m)| m)
    }

    /// Messages and bytes that all running nodes sent so far.
    pub(crate) fn traffic(&self) -> (u64, u64) {
        let counters = self.nodes.keys().map(|n| self.network.counters(*n));
        counters.fold((0, 0), |(m, b), c| (m + c.messages_sent, b + c.bytes_sent))
    }
}
