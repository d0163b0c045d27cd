//! openraft's messages as [`Service::Raft`] calls, and what a node does with those that come in.
//!
//! Every call is bounded, by openraft's `soft_ttl` if it is small: a lost answer would stop replication. A snapshot
//! travels in parts, each of which fits a call.

use std::future::Future;
use std::pin::pin;
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use openraft::errors::{NetworkError, RPCError, ReplicationClosed, StreamingError, Timeout, Unreachable};
use openraft::network::{RPCOption, RaftNetworkFactory, RaftNetworkV2};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, TransferLeaderRequest, TransferLeaderResponse,
    VoteRequest, VoteResponse,
};
use openraft::{OptionalSend, RPCTypes};
use serde::{Deserialize, Serialize};
use starling_protocol::codec::{decode, encode};
use starling_protocol::wire::{CALL_LEN_BYTES_MAX, Service};
use starling_protocol::{Line, ModelName, NodeId, StoreId};
use tokio::time::Instant;

use super::disk::VALUE_LEN_BYTES_MAX;
use super::group::Group;
use super::type_config::{Seat, Snapshot, SnapshotMeta, TypeConfig, Vote};
use crate::transport::{CallError, InboundError, SharedTransport};
use crate::watch::lock;

/// Frames up to this length must make it within openraft's own limit.
const SMALL_LEN_BYTES: u64 = 64 << 10;
/// Bytes of a snapshot in one call.
const PART_LEN_BYTES: usize = 1 << 20;

/// Body of a [`Service::Raft`] call.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct RaftFrame {
    pub(super) model: ModelName,
    /// The sender's line: what another line decides is nothing here.
    pub(super) line: Line,
    /// The sender's store.
    pub(super) from: StoreId,
    /// The store whose seat the message is for.
    pub(super) to: StoreId,
    pub(super) request: RaftRequest,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum RaftRequest {
    Append(AppendEntriesRequest<TypeConfig>),
    Vote(VoteRequest<TypeConfig>),
    PreVote(VoteRequest<TypeConfig>),
    Transfer(TransferLeaderRequest<TypeConfig>),
    Snapshot(SnapshotPart),
}

/// A piece of a snapshot; the pieces come in order, the first at offset 0.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct SnapshotPart {
    vote: Vote,
    meta: SnapshotMeta,
    offset: u64,
    total: u64,
    #[serde(with = "serde_bytes")]
    data: Vec<u8>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
enum RaftReply {
    Append(AppendEntriesResponse<TypeConfig>),
    Vote(VoteResponse<TypeConfig>),
    Transfer(TransferLeaderResponse<TypeConfig>),
    Snapshot(SnapshotResponse<TypeConfig>),
    /// The part was taken; the next may come.
    PartTaken,
}

impl RaftRequest {
    fn kind(&self) -> RPCTypes {
        match self {
            Self::Append(_) => RPCTypes::AppendEntries,
            Self::Vote(_) | Self::PreVote(_) => RPCTypes::Vote,
            Self::Transfer(_) => RPCTypes::TransferLeader,
            Self::Snapshot(_) => RPCTypes::InstallSnapshot,
        }
    }
    /// The node that this message claims to come from.
    fn sender(&self) -> NodeId {
        let vote = match self {
            Self::Append(r) => &r.vote,
            Self::Vote(r) | Self::PreVote(r) => &r.vote,
            Self::Transfer(r) => r.from_leader(),
            Self::Snapshot(p) => &p.vote,
        };
        vote.leader_id.voted_for
    }
}

/// Makes connections to the members of one group.
#[derive(Clone)]
pub(super) struct Network {
    pub(super) transport: SharedTransport,
    pub(super) model: ModelName,
    pub(super) line: Line,
    /// This node's.
    pub(super) store: StoreId,
}

impl RaftNetworkFactory<TypeConfig> for Network {
    type Network = Connection;

    async fn new_client(&mut self, target: NodeId, seat: &Seat) -> Connection {
        let Self { transport, model, line, store } = self.clone();
        Connection { transport, model, line, from: store, target, to: seat.store }
    }
}

/// Sends one group's messages to one node.
pub(super) struct Connection {
    transport: SharedTransport,
    model: ModelName,
    line: Line,
    from: StoreId,
    target: NodeId,
    to: StoreId,
}

type RpcResult<T> = Result<T, RPCError<TypeConfig>>;

impl Connection {
    async fn call(&self, request: RaftRequest, option: &RPCOption) -> RpcResult<RaftReply> {
        let kind = request.kind();
        let frame = RaftFrame { model: self.model.clone(), line: self.line, from: self.from, to: self.to, request };
        let body = Bytes::from(encode(&frame));
        // openraft's limit is made for heartbeats; a large frame may take a second more for each MiB.
        let limit = option.soft_ttl() + Duration::from_micros((body.len() as u64).saturating_sub(SMALL_LEN_BYTES));
        let reply = match self.transport.call(self.target, Service::Raft, body, limit).await {
            Ok(reply) => reply,
            Err(CallError::Timeout { after, .. }) => {
                let id = self.transport.local();
                return Err(Timeout { action: kind, id, target: self.target, timeout: after }.into());
            }
            Err(error @ (CallError::NotConnected { .. } | CallError::Failed { .. } | CallError::Closed)) => {
                return Err(Unreachable::new(&error).into());
            }
            Err(error @ CallError::TooLong { .. }) => return Err(NetworkError::new(&error).into()),
        };
        decode("Raft reply", &reply, CALL_LEN_BYTES_MAX).map_err(|e| NetworkError::new(&e).into())
    }

    fn unexpected<T>(&self) -> RpcResult<T> {
        let reason = format!("{} answered with another kind of reply", self.target);
        Err(NetworkError::from_string(reason).into())
    }
}

impl RaftNetworkV2<TypeConfig> for Connection {
    type SnapshotData = Vec<u8>;

    async fn append_entries(
        &mut self,
        rpc: AppendEntriesRequest<TypeConfig>,
        option: RPCOption,
    ) -> RpcResult<AppendEntriesResponse<TypeConfig>> {
        match self.call(RaftRequest::Append(rpc), &option).await? {
            RaftReply::Append(reply) => Ok(reply),
            _ => self.unexpected(),
        }
    }
    async fn vote(&mut self, rpc: VoteRequest<TypeConfig>, option: RPCOption) -> RpcResult<VoteResponse<TypeConfig>> {
        match self.call(RaftRequest::Vote(rpc), &option).await? {
            RaftReply::Vote(reply) => Ok(reply),
            _ => self.unexpected(),
        }
    }
    async fn pre_vote(
        &mut self,
        rpc: VoteRequest<TypeConfig>,
        option: RPCOption,
    ) -> RpcResult<VoteResponse<TypeConfig>> {
        match self.call(RaftRequest::PreVote(rpc), &option).await? {
            RaftReply::Vote(reply) => Ok(reply),
            _ => self.unexpected(),
        }
    }
    async fn transfer_leader(
        &mut self,
        req: TransferLeaderRequest<TypeConfig>,
        option: RPCOption,
    ) -> RpcResult<TransferLeaderResponse<TypeConfig>> {
        match self.call(RaftRequest::Transfer(req), &option).await? {
            RaftReply::Transfer(reply) => Ok(reply),
            _ => self.unexpected(),
        }
    }
    async fn full_snapshot(
        &mut self,
        vote: Vote,
        snapshot: Snapshot,
        cancel: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        option: RPCOption,
    ) -> Result<SnapshotResponse<TypeConfig>, StreamingError<TypeConfig>> {
        let mut cancel = pin!(cancel);
        let total = snapshot.snapshot.len() as u64;
        let mut offset = 0_usize;
        loop {
            let end = snapshot.snapshot.len().min(offset + PART_LEN_BYTES);
            let part = SnapshotPart {
                vote,
                meta: snapshot.meta.clone(),
                offset: offset as u64,
                total,
                data: snapshot.snapshot[offset..end].to_vec(),
            };
            let reply = tokio::select! {
                biased;
                closed = &mut cancel => return Err(closed.into()),
                reply = self.call(RaftRequest::Snapshot(part), &option) => reply?,
            };
            match reply {
                RaftReply::Snapshot(done) => return Ok(done),
                RaftReply::PartTaken if end < snapshot.snapshot.len() => offset = end,
                _ => return self.unexpected().map_err(Into::into),
            }
        }
    }
}

/// A snapshot of which not all parts came yet. A group takes one at a time.
#[derive(Debug, Default)]
pub(super) struct Incoming(Mutex<Option<Parts>>);

#[derive(Debug)]
struct Parts {
    from: NodeId,
    meta: SnapshotMeta,
    total: u64,
    data: Vec<u8>,
}

impl Incoming {
    /// Takes a part; returns the bytes when it was the last.
    fn take(&self, from: NodeId, part: &SnapshotPart) -> Result<Option<Vec<u8>>, InboundError> {
        let mut slot = lock(&self.0);
        if part.total > VALUE_LEN_BYTES_MAX as u64 {
            return Err(InboundError::Malformed(format!("a snapshot of {} bytes", part.total)));
        }
        if part.offset == 0 {
            *slot = Some(Parts { from, meta: part.meta.clone(), total: part.total, data: Vec::new() });
        }
        let fits = |p: &&mut Parts| {
            let len = p.data.len() as u64;
            p.from == from && p.meta == part.meta && p.total == part.total && len == part.offset
        };
        let Some(parts) = slot.as_mut().filter(fits) else {
            return Err(InboundError::Unavailable(format!("a snapshot's part at {} came out of order", part.offset)));
        };
        parts.data.extend_from_slice(&part.data);
        if (parts.data.len() as u64) < parts.total {
            return Ok(None);
        }
        Ok(slot.take().map(|p| p.data))
    }
}

impl Group {
    /// Serves one request of a member, or of a node that is about to be one.
    pub(super) async fn serve(&self, from: NodeId, request: RaftRequest) -> Result<Bytes, InboundError> {
        // Otherwise any node could speak in a leader's name.
        if request.sender() != from {
            return Err(InboundError::Malformed(format!("a Raft message of {} sent by {from}", request.sender())));
        }
        let stopped = |e: &dyn std::fmt::Display| InboundError::Unavailable(format!("the group is not running: {e}"));
        let reply = match request {
            RaftRequest::Append(rpc) => {
                let reply = self.raft.append_entries(rpc).await.map_err(|e| stopped(&e))?;
                if !matches!(reply, AppendEntriesResponse::HigherVote(_)) {
                    *lock(&self.heard) = Some(Instant::now());
                }
                RaftReply::Append(reply)
            }
            RaftRequest::Vote(rpc) => RaftReply::Vote(self.raft.vote(rpc).await.map_err(|e| stopped(&e))?),
            RaftRequest::PreVote(rpc) => RaftReply::Vote(self.raft.pre_vote(rpc).await.map_err(|e| stopped(&e))?),
            // Every voter hears of a transfer, and forgets its lease; only who is asked may refuse.
            RaftRequest::Transfer(rpc)
                if rpc.to_node_id() == self.raft.node_id() && !self.stands.load(Ordering::Relaxed) =>
            {
                let why = lock(&self.unfit).clone().unwrap_or_else(|| "it is leaving the mesh".to_owned());
                return Err(InboundError::Unavailable(format!("this node does not lead: {why}")));
            }
            RaftRequest::Transfer(rpc) => {
                RaftReply::Transfer(self.raft.handle_transfer_leader(rpc).await.map_err(|e| stopped(&e))?)
            }
            RaftRequest::Snapshot(part) => match self.incoming.take(from, &part)? {
                None => RaftReply::PartTaken,
                Some(snapshot) => {
                    let snapshot = Snapshot { meta: part.meta, snapshot };
                    let done = self.raft.install_full_snapshot(part.vote, snapshot).await.map_err(|e| stopped(&e))?;
                    *lock(&self.heard) = Some(Instant::now());
                    RaftReply::Snapshot(done)
                }
            },
        };
        Ok(encode(&reply).into())
    }
}
