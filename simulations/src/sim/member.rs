//! A node of a membership scenario: the part that keeps the list of nodes, and nothing else.

use super::key::SimKey;
use async_trait::async_trait;
use bytes::Bytes;
use starling_core::membership::Membership;
use starling_core::transport::{FrameStream, Inbound, InboundError, Verdict};
use starling_protocol::NodeId;
use starling_protocol::codec::decode;
use starling_protocol::wire::{GOSSIP_LEN_BYTES_MAX, Gossip, Service, Topic};
use std::sync::Arc;

/// What the network calls.
pub(crate) struct Member(pub(crate) Arc<Membership>, pub(crate) SimKey);

#[async_trait]
impl Inbound for Member {
    async fn on_call(&self, from: NodeId, service: Service, body: Bytes) -> Result<Bytes, InboundError> {
        match service {
            Service::Swim => self.0.on_packet(from, &body).await,
            other => Err(InboundError::Unavailable(format!("{other:?} is not part of this scenario"))),
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
