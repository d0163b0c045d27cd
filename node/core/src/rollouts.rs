//! Rollouts on the mesh: sealed ones are made durable on `replication` holders, announced, listed and fetched.
//!
//! ```text
//! gateway ─ replicate ─▶ batch per holder ─▶ Put call ─▶ holder verifies, one fsync ─▶ Stored
//!         ◀─ acknowledged ── recorded in the gateway's own store ─▶ announced by gossip
//! ```

use crate::membership::Membership;
use crate::runtime::{blocking, spawn};
use crate::transport::{InboundError, SharedTransport};
use bytes::Bytes;
use serde_bytes::ByteBuf;
use starling_protocol::codec::{decode, encode};
use starling_protocol::placement;
use starling_protocol::rollout::{ROLLOUT_LEN_BYTES_MAX, SealedRollout, VerifiedRollout, open_rollout, verify_rollout};
use starling_protocol::signed::Verifier;
use starling_protocol::wire::{
    CALL_LEN_BYTES_MAX, Gossip, RolloutAnnouncement, RolloutCall, RolloutReply, Service, Topic,
};
use starling_protocol::{Hash, JobId, ModelName, NodeId, RolloutId};
use starling_storage::{Acknowledged, Durability, SharedStore, acknowledged, rollouts};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

/// Limit of one [`RolloutCall`]: a 4 MiB batch at 8 Mbit/s.
const CALL_LIMIT: Duration = Duration::from_secs(5);
/// Envelopes waiting for one holder: at 2 KiB each, 2 MiB of memory a holder.
const HOLDER_QUEUE: usize = 1024;
/// Envelopes in one Put.
const BATCH_MAX: usize = 128;
/// Put calls in flight to one holder: one is being synced while the next one fills.
const PUTS_IN_FLIGHT: usize = 2;
/// Announcements waiting: 115 bytes each.
const ANNOUNCE_QUEUE: usize = 4096;
/// Announcements in one gossip message: 128 × 115 bytes stay under 16 KiB with up to two holders.
const ANNOUNCE_BATCH: usize = 96;
/// Announcements are collected this long.
const ANNOUNCE_BEAT: Duration = Duration::from_millis(20);

/// Why a rollout is not acknowledged. It may lie on some holders already; replicating it again is harmless.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReplicateError {
    /// Fewer holders took it than must.
    #[error("rollout {id} lies on {got} nodes, expected {need}: {tried}")]
    TooFewHolders {
        /// Which.
        id: RolloutId,
        /// Needed.
        need: usize,
        /// Reached.
        got: usize,
        /// What each holder said.
        tried: String,
    },
    /// No node that holds rollouts is known.
    #[error("no live node holds rollouts: is a server connected?")]
    NoHolders,
    /// The gateway's own store failed.
    #[error("store: {0}")]
    Store(String),
}

struct Put {
    sealed: Arc<SealedRollout>,
    answer: oneshot::Sender<Result<(), String>>,
}

/// The node's rollouts.
pub struct Rollouts {
    store: SharedStore,
    transport: SharedTransport,
    membership: Arc<Membership>,
    verifier: Arc<dyn Verifier>,
    holders: Mutex<BTreeMap<NodeId, mpsc::Sender<Put>>>,
    announce: mpsc::Sender<(ModelName, RolloutAnnouncement)>,
    shutdown: CancellationToken,
}

impl std::fmt::Debug for Rollouts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Rollouts")
    }
}

impl Rollouts {
    /// Starts the announcer; must run inside a tokio runtime.
    #[must_use]
    pub fn start(
        store: SharedStore,
        transport: SharedTransport,
        membership: Arc<Membership>,
        verifier: Arc<dyn Verifier>,
        shutdown: CancellationToken,
    ) -> Arc<Self> {
        let (announce, queue) = mpsc::channel(ANNOUNCE_QUEUE);
        spawn(announcer(transport.clone(), queue, shutdown.clone()));
        Arc::new(Self {
            store,
            transport,
            membership,
            verifier,
            holders: Mutex::new(BTreeMap::new()),
            announce,
            shutdown,
        })
    }

    /// Makes `sealed` durable on `replication` holders (fewer only if fewer live), records the acknowledgement
    /// and announces it. Returns the holders.
    ///
    /// # Errors
    /// [`ReplicateError`]; the caller keeps the rollout and may try again.
    pub async fn replicate(
        &self,
        model: &ModelName,
        job: JobId,
        sealed: SealedRollout,
        replication: usize,
    ) -> Result<Vec<NodeId>, ReplicateError> {
        let live = self.membership.live_holders();
        if live.is_empty() {
            return Err(ReplicateError::NoHolders);
        }
        let need = replication.min(live.len());
        let id = sealed.id;
        let order = placement::holders(id, live, usize::MAX);
        let sealed = Arc::new(sealed);
        let mut held = Vec::with_capacity(need);
        let mut tried = String::new();
        let mut next = order.into_iter();
        while held.len() < need {
            let round: Vec<NodeId> = next.by_ref().take(need - held.len()).collect();
            if round.is_empty() {
                return Err(ReplicateError::TooFewHolders { id, need, got: held.len(), tried });
            }
            let puts = round.into_iter().map(|holder| {
                let sealed = sealed.clone();
                async move { (holder, self.put(holder, sealed).await) }
            });
            for (holder, said) in futures::future::join_all(puts).await {
                match said {
                    Ok(()) => held.push(holder),
                    Err(why) => tried.push_str(&format!("[{}: {why}] ", holder.short())),
                }
            }
        }
        held.sort_unstable();
        let (store, record) = (self.store.clone(), held.clone());
        blocking(move || {
            let record = Acknowledged { id, job, holders: record };
            acknowledged::record_acknowledged(&*store, &[record], Durability::Buffered)
        })
        .await
        .map_err(|e| ReplicateError::Store(e.to_string()))?
        .map_err(|e| ReplicateError::Store(e.to_string()))?;
        // A full queue drops the announcement, not the rollout: leaders also list what holders have.
        let _ = self.announce.try_send((model.clone(), RolloutAnnouncement { id, job, holders: held.clone() }));
        Ok(held)
    }

    async fn put(&self, holder: NodeId, sealed: Arc<SealedRollout>) -> Result<(), String> {
        let queue = {
            let mut holders = self.holders.lock().unwrap_or_else(PoisonError::into_inner);
            holders
                .entry(holder)
                .or_insert_with(|| {
                    let (tx, rx) = mpsc::channel(HOLDER_QUEUE);
                    spawn(put_batches(self.transport.clone(), holder, rx, self.shutdown.clone()));
                    tx
                })
                .clone()
        };
        let (answer, stored) = oneshot::channel();
        queue.send(Put { sealed, answer }).await.map_err(|_closed| "the node is shutting down".to_owned())?;
        stored.await.map_err(|_closed| "the node is shutting down".to_owned())?
    }

    /// Answers a peer.
    ///
    /// # Errors
    /// [`InboundError::Malformed`] for bytes that are no [`RolloutCall`].
    pub async fn on_call(&self, from: NodeId, body: &[u8]) -> Result<Bytes, InboundError> {
        let call: RolloutCall =
            decode("rollout call", body, CALL_LEN_BYTES_MAX).map_err(|e| InboundError::Malformed(e.to_string()))?;
        let (store, verifier) = (self.store.clone(), self.verifier.clone());
        let reply = blocking(move || answer(&store, &*verifier, from, call))
            .await
            .map_err(|e| InboundError::Unavailable(e.to_string()))?;
        Ok(encode(&reply).into())
    }

    /// Verified rollouts among `wanted`, from the local store or from the holders named. What cannot be had or
    /// does not verify is left out, and said in the log.
    pub async fn fetch(&self, wanted: &[RolloutAnnouncement]) -> Vec<VerifiedRollout> {
        let ids: Vec<RolloutId> = wanted.iter().map(|w| w.id).collect();
        let store = self.store.clone();
        let local = blocking(move || {
            let read = |id: &RolloutId| rollouts::get_rollout(&*store, *id).ok().flatten().map(|b| (*id, b));
            ids.iter().filter_map(read).collect::<Vec<_>>()
        })
        .await
        .unwrap_or_default();
        let mut found: BTreeMap<RolloutId, Vec<u8>> = local.into_iter().collect();
        for attempt in 0..2 {
            let mut by_holder: BTreeMap<NodeId, Vec<RolloutId>> = BTreeMap::new();
            for w in wanted.iter().filter(|w| !found.contains_key(&w.id)) {
                if let Some(h) = w.holders.get(attempt % w.holders.len().max(1)) {
                    by_holder.entry(*h).or_default().push(w.id);
                }
            }
            for (holder, ids) in by_holder {
                self.fetch_from(holder, &ids, &mut found).await;
            }
        }
        let verifier = self.verifier.clone();
        blocking(move || {
            let mut good = Vec::with_capacity(found.len());
            for (id, bytes) in found {
                match verify_rollout(id, &bytes, &*verifier) {
                    Ok(v) => good.push(v),
                    Err(e) => tracing::warn!(rollout = %id.short(), error = %e, "rollout refused"),
                }
            }
            good
        })
        .await
        .unwrap_or_default()
    }

    async fn fetch_from(&self, holder: NodeId, ids: &[RolloutId], found: &mut BTreeMap<RolloutId, Vec<u8>>) {
        let mut left: BTreeSet<RolloutId> = ids.iter().copied().collect();
        // A reply is cut at the call limit: ask again for the rest while it brings something.
        while !left.is_empty() {
            let call = RolloutCall::Get(left.iter().copied().take(512).collect());
            let bodies = match self.ask(holder, &call).await {
                Ok(RolloutReply::Bodies(bodies)) => bodies,
                Ok(other) => {
                    tracing::warn!(holder = %holder.short(), ?other, "unexpected answer to a fetch");
                    return;
                }
                Err(e) => {
                    tracing::warn!(holder = %holder.short(), error = %e, "cannot fetch rollouts");
                    return;
                }
            };
            let before = left.len();
            for body in bodies {
                let id = Hash::of(&body);
                if left.remove(&id) {
                    found.insert(id, body.into_vec());
                }
            }
            if left.len() == before {
                return;
            }
        }
    }

    /// Every unconsumed rollout of `job` that a live holder lists.
    pub async fn list_unconsumed(&self, job: JobId) -> Vec<RolloutAnnouncement> {
        let mut holders_of: BTreeMap<RolloutId, Vec<NodeId>> = BTreeMap::new();
        for holder in self.membership.live_holders() {
            let mut after = None;
            loop {
                let call = RolloutCall::List { job, after, limit: 4096 };
                let ids = match self.ask(holder, &call).await {
                    Ok(RolloutReply::Ids(ids)) => ids,
                    Ok(_) => break,
                    Err(e) => {
                        tracing::warn!(holder = %holder.short(), error = %e, "cannot list rollouts");
                        break;
                    }
                };
                for id in &ids {
                    holders_of.entry(*id).or_default().push(holder);
                }
                if ids.len() < 4096 {
                    break;
                }
                after = ids.last().copied();
            }
        }
        holders_of.into_iter().map(|(id, holders)| RolloutAnnouncement { id, job, holders }).collect()
    }

    async fn ask(&self, holder: NodeId, call: &RolloutCall) -> Result<RolloutReply, String> {
        ask(&self.transport, holder, call).await
    }
}

async fn ask(transport: &SharedTransport, holder: NodeId, call: &RolloutCall) -> Result<RolloutReply, String> {
    let body =
        transport.call(holder, Service::Rollouts, encode(call).into(), CALL_LIMIT).await.map_err(|e| e.to_string())?;
    decode("rollout reply", &body, CALL_LEN_BYTES_MAX).map_err(|e| e.to_string())
}

fn answer(store: &SharedStore, verifier: &dyn Verifier, from: NodeId, call: RolloutCall) -> RolloutReply {
    let refused = |e: &dyn std::fmt::Display| RolloutReply::Refused(e.to_string());
    match call {
        RolloutCall::Put(bodies) => {
            let mut items = Vec::with_capacity(bodies.len());
            for body in &bodies {
                match open_rollout(body, verifier) {
                    Ok(r) => items.push((Hash::of(body), body.as_slice(), r.job)),
                    Err(e) => tracing::warn!(from = %from.short(), error = %e, "rollout refused"),
                }
            }
            match rollouts::put_rollouts(&**store, &items, Durability::Synced) {
                Ok(_) => RolloutReply::Stored(items.iter().map(|(id, _, _)| *id).collect()),
                Err(e) => refused(&e),
            }
        }
        RolloutCall::Get(ids) => {
            let mut bodies = Vec::new();
            let mut len = 0;
            for id in ids {
                match rollouts::get_rollout(&**store, id) {
                    Ok(Some(b)) => {
                        len += b.len() + 8;
                        if len > ROLLOUT_LEN_BYTES_MAX && !bodies.is_empty() {
                            break;
                        }
                        bodies.push(ByteBuf::from(b));
                    }
                    Ok(None) => {}
                    Err(e) => return refused(&e),
                }
            }
            RolloutReply::Bodies(bodies)
        }
        RolloutCall::List { job, after, limit } => {
            match rollouts::list_unconsumed(&**store, job, after, (limit as usize).min(4096)) {
                Ok(ids) => RolloutReply::Ids(ids),
                Err(e) => refused(&e),
            }
        }
    }
}

/// Sends what waits for one holder in batches, so that many episodes share one fsync.
async fn put_batches(
    transport: SharedTransport,
    holder: NodeId,
    mut queue: mpsc::Receiver<Put>,
    shutdown: CancellationToken,
) {
    let in_flight = Arc::new(tokio::sync::Semaphore::new(PUTS_IN_FLIGHT));
    let mut carried: Option<Put> = None;
    loop {
        let Ok(permit) = in_flight.clone().acquire_owned().await else { return };
        let first = match carried.take() {
            Some(p) => p,
            None => tokio::select! {
                biased;
                () = shutdown.cancelled() => return,
                p = queue.recv() => match p { Some(p) => p, None => return },
            },
        };
        let mut len = first.sealed.bytes.len();
        let mut batch = vec![first];
        while batch.len() < BATCH_MAX
            && let Ok(p) = queue.try_recv()
        {
            len += p.sealed.bytes.len();
            if len > ROLLOUT_LEN_BYTES_MAX {
                carried = Some(p);
                break;
            }
            batch.push(p);
        }
        let transport = transport.clone();
        spawn(async move {
            let _permit = permit;
            let bodies = batch.iter().map(|p| ByteBuf::from(p.sealed.bytes.clone())).collect();
            match ask(&transport, holder, &RolloutCall::Put(bodies)).await {
                Ok(RolloutReply::Stored(ids)) => {
                    let stored: BTreeSet<RolloutId> = ids.into_iter().collect();
                    for p in batch {
                        let ok = stored.contains(&p.sealed.id);
                        let _ = p.answer.send(if ok { Ok(()) } else { Err("it did not verify there".into()) });
                    }
                }
                other => {
                    let why = match other {
                        Ok(RolloutReply::Refused(why)) | Err(why) => why,
                        Ok(_) => "an answer to another question".into(),
                    };
                    for p in batch {
                        let _ = p.answer.send(Err(why.clone()));
                    }
                }
            }
        });
    }
}

async fn announcer(
    transport: SharedTransport,
    mut queue: mpsc::Receiver<(ModelName, RolloutAnnouncement)>,
    shutdown: CancellationToken,
) {
    loop {
        let first = tokio::select! {
            biased;
            () = shutdown.cancelled() => return,
            a = queue.recv() => match a { Some(a) => a, None => return },
        };
        tokio::time::sleep(ANNOUNCE_BEAT).await;
        let mut by_model: BTreeMap<ModelName, Vec<RolloutAnnouncement>> = BTreeMap::new();
        by_model.entry(first.0).or_default().push(first.1);
        while let Ok((model, a)) = queue.try_recv() {
            by_model.entry(model).or_default().push(a);
        }
        for (model, list) in by_model {
            let topic = Topic::Rollouts(model);
            transport.subscribe(topic.clone());
            for part in list.chunks(ANNOUNCE_BATCH) {
                transport.publish(topic.clone(), encode(&Gossip::Rollouts(part.to_vec())));
            }
        }
    }
}
