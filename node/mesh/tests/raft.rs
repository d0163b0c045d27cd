//! Raft over the real mesh: a message counts only from a member, and the connection proves who speaks.

mod common;

use async_trait::async_trait;
use bytes::Bytes;
use common::{LIMIT, Over, config, start_with, stop};
use starling_bootstrap::Ed25519Verifier;
use starling_core::consensus::{GroupConfig, Groups};
use starling_core::disk_health::WatchedStore;
use starling_core::membership::{Membership, MembershipConfig};
use starling_core::transport::{FrameStream, Inbound, InboundError, Transport, Verdict};
use starling_mesh::Mesh;
use starling_protocol::codec::encode;
use starling_protocol::control::ControlEntry;
use starling_protocol::manifest::Manifest;
use starling_protocol::wire::{Service, Topic};
use starling_protocol::{ModelName, NodeId, StoreId, Timestamp};
use starling_storage::MemoryStore;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// What a node does with Raft calls.
struct Voter(Arc<Groups>);

#[async_trait]
impl Inbound for Voter {
    async fn on_call(&self, from: NodeId, service: Service, body: Bytes) -> Result<Bytes, InboundError> {
        match service {
            Service::Raft => self.0.on_raft_call(from, &body).await,
            _ => Err(InboundError::Unavailable("not here".into())),
        }
    }
    async fn on_generate(&self, _from: NodeId, _stream: FrameStream) {}
    fn on_gossip(&self, _from: NodeId, _topic: &Topic, _body: &[u8]) -> Verdict {
        Verdict::Accept
    }
    fn on_connection(&self, _peer: NodeId, _connected: bool) {}
}

/// As Raft's request for a vote in term 99 is encoded: model, the two stores, kind of message, vote, last entry, transfer.
fn ballot(model: &ModelName, sender: NodeId, to: StoreId) -> Bytes {
    let vote = ((99_u64, sender), false);
    encode(&(model, StoreId::default(), to, 1_u8, (vote, None::<()>, false))).into()
}

#[tokio::test]
async fn a_stranger_asks_for_a_vote_in_vain() {
    let mesh = Mesh::start(config(1, Over::Quic)).await.unwrap();
    let shutdown = CancellationToken::new();
    let membership = Membership::start(
        mesh.clone(),
        Arc::new(Ed25519Verifier),
        MembershipConfig::default(),
        1,
        Timestamp(1),
        shutdown.clone(),
    );
    let store = WatchedStore::new(Arc::new(MemoryStore::new()));
    let groups = Groups::start(mesh.clone(), store, membership, GroupConfig::default(), 1, shutdown.clone());
    let voter = common::Node { mesh: mesh.clone(), logic: Arc::default() };
    assert!(mesh.serve(Arc::new(Voter(groups.clone()))));
    let model = ModelName::new("tiny").unwrap();
    let first =
        ControlEntry::ModelCreated { model: model.clone(), weights: Manifest::of(b"0"), files: BTreeMap::new() };
    groups.create(&model, &[voter.id()], first).await.unwrap();
    let term = groups.leadership(&model).unwrap().get().term;

    let stranger = start_with(2, Over::Quic, &voter).await;
    let ask = async |body| {
        let reply = stranger.mesh.call(voter.id(), Service::Raft, body, LIMIT).await;
        reply.map_or_else(|e| e.to_string(), |_| "answered".to_owned())
    };
    let store = groups.store_id();
    let own_name = ask(ballot(&model, stranger.id(), store)).await;
    assert!(own_name.contains("is not a member of the group"), "{own_name}");
    let other_name = ask(ballot(&model, voter.id(), store)).await;
    assert!(other_name.contains("is not a member of the group"), "{other_name}");
    let other_store = ask(ballot(&model, stranger.id(), StoreId([1; 16]))).await;
    assert!(other_store.contains("must be taken in again"), "{other_store}");
    tokio::time::sleep(Duration::from_millis(300)).await;
    let view = groups.leadership(&model).unwrap().get();
    assert!(view.is_self && view.term == term, "nothing came of it: {view:?}");
    shutdown.cancel();
    stop(vec![stranger, voter]).await;
}
