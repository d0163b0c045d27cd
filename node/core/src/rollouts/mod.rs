//! Rollouts on the mesh: sealed ones are made durable on `replication` holders, announced, listed and fetched.
//!
//! ```text
//! gateway ─ replicate ─▶ batch per holder ─▶ Put call ─▶ holder verifies, one fsync ─▶ Stored
//!         ◀─ acknowledged ── recorded in the gateway's own store ─▶ announced by gossip
//! ```

mod announce;
mod fetch;
mod promise;
mod put;
mod serve;

use crate::membership::Membership;
use crate::runtime::spawn;
use crate::transport::SharedTransport;
use announce::{ANNOUNCE_QUEUE, announcer};
use promise::{PROMISE_QUEUE, Promise, record_promises};
use put::{HOLDER_QUEUE, Put, put_batches};
use starling_protocol::codec::{decode, encode};
use starling_protocol::placement;
use starling_protocol::planted::{self, Bug};
use starling_protocol::record::Intake;
use starling_protocol::rollout::SealedRollout;
use starling_protocol::signed::Verifier;
use starling_protocol::wire::{CALL_LEN_BYTES_MAX, RolloutAnnouncement, RolloutCall, RolloutReply, Service};
use starling_protocol::{JobId, ModelName, NodeId, RolloutId};
use starling_storage::{Acknowledged, SharedStore};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

/// Limit of one [`RolloutCall`]: a 4 MiB batch at 8 Mbit/s.
const CALL_LIMIT: Duration = Duration::from_secs(5);

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

/// The node's rollouts.
pub struct Rollouts {
    store: SharedStore,
    transport: SharedTransport,
    membership: Arc<Membership>,
    verifier: Arc<dyn Verifier>,
    holders: Mutex<BTreeMap<NodeId, mpsc::Sender<Put>>>,
    announce: mpsc::Sender<(ModelName, RolloutAnnouncement)>,
    promises: mpsc::Sender<Promise>,
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
        let (promises, queue) = mpsc::channel(PROMISE_QUEUE);
        spawn(record_promises(store.clone(), queue, shutdown.clone()));
        Arc::new(Self {
            store,
            transport,
            membership,
            verifier,
            holders: Mutex::new(BTreeMap::new()),
            announce,
            promises,
            shutdown,
        })
    }

    /// See [`Bug::ConsumeBeforeCommit`].
    #[cfg(feature = "planted-bugs")]
    pub(crate) fn mark_consumed_early(&self, ids: &[RolloutId], version: starling_protocol::PolicyVersion) {
        let mut batch = starling_storage::Batch::new();
        starling_storage::consumed::mark_consumed(&mut batch, ids.iter().copied(), version);
        let _planted = starling_storage::Store::write(&*self.store, batch, starling_storage::Durability::Synced);
    }
    #[cfg(not(feature = "planted-bugs"))]
    #[expect(clippy::unused_self, reason = "the same call with and without planted bugs")]
    pub(crate) fn mark_consumed_early(&self, _ids: &[RolloutId], _version: starling_protocol::PolicyVersion) {}

    /// Makes `sealed` durable on `replication` holders (fewer only if fewer live and stay), records the acknowledgement
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
        let id = sealed.id;
        let order = self.put_order(id);
        if order.is_empty() {
            return Err(ReplicateError::NoHolders);
        }
        let need = replication.min(order.len());
        let need = if planted::has(Bug::ForgetHolder) { need.saturating_sub(1).max(1) } else { need };
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
        self.promise(Acknowledged { id, job, holders: held.clone() }).await.map_err(ReplicateError::Store)?;
        // A full queue drops the announcement, not the rollout: leaders also list what holders have.
        let _ = self.announce.try_send((model.clone(), RolloutAnnouncement { id, job, holders: held.clone() }));
        Ok(held)
    }

    /// Records what is about to be acknowledged.
    async fn promise(&self, record: Acknowledged) -> Result<(), String> {
        let (answer, recorded) = oneshot::channel();
        let stopped = || "the node is shutting down".to_owned();
        self.promises.send(Promise { record, answer }).await.map_err(|_closed| stopped())?;
        recorded.await.map_err(|_closed| stopped())?
    }

    /// Has one holder store `sealed`; returns once it said that it lies durably there.
    pub(crate) async fn put(&self, holder: NodeId, sealed: Arc<SealedRollout>) -> Result<(), String> {
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

    /// Whom to ask to hold `id`: those with room in rendezvous order, then those that said they are full, which count
    /// (a promise is not made smaller by a full disk) and may have room again. Nodes that are about to leave are not
    /// asked.
    fn put_order(&self, id: RolloutId) -> Vec<NodeId> {
        let mut by_intake: BTreeMap<Intake, Vec<NodeId>> = BTreeMap::new();
        for (node, intake) in self.membership.of_holders(|r| Some((r.node, r.intake))) {
            by_intake.entry(intake).or_default().push(node);
        }
        let ordered =
            |intake| placement::holders(id, by_intake.get(&intake).into_iter().flatten().copied(), usize::MAX);
        let mut order = ordered(Intake::Open);
        order.extend(ordered(Intake::Full));
        order
    }

    async fn ask(&self, holder: NodeId, call: &RolloutCall) -> Result<RolloutReply, String> {
        ask(&self.transport, holder, call).await
    }

    /// Which of `ids` `holder` has, and which it knows to be consumed.
    ///
    /// # Errors
    /// The call's failure, in words.
    pub(crate) async fn have(
        &self,
        holder: NodeId,
        ids: Vec<RolloutId>,
    ) -> Result<(Vec<RolloutId>, Vec<RolloutId>), String> {
        match self.ask(holder, &RolloutCall::Have(ids)).await? {
            RolloutReply::Have { held, consumed } => Ok((held, consumed)),
            RolloutReply::Refused(why) => Err(why),
            _ => Err("an answer to another question".into()),
        }
    }
}

async fn ask(transport: &SharedTransport, holder: NodeId, call: &RolloutCall) -> Result<RolloutReply, String> {
    let body =
        transport.call(holder, Service::Rollouts, encode(call).into(), CALL_LIMIT).await.map_err(|e| e.to_string())?;
    decode("rollout reply", &body, CALL_LEN_BYTES_MAX).map_err(|e| e.to_string())
}
