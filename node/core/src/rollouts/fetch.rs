//! Rollouts from this store and from other holders.

use super::Rollouts;
use super::serve::set_aside;
use crate::runtime::blocking;
use futures::stream::{FuturesUnordered, StreamExt};
use starling_protocol::rollout::{VerifiedRollout, read_rollout, verify_rollout};
use starling_protocol::wire::{RolloutAnnouncement, RolloutCall, RolloutReply};
use starling_protocol::{Hash, JobId, NodeId, RolloutId};
use starling_storage::{Durability, Store, StoreError, rollouts};
use std::collections::{BTreeMap, BTreeSet};

/// Ids in one answer: 4096 × 32 bytes.
const LIST_MAX: u32 = 4096;

impl Rollouts {
    /// Verified rollouts among `wanted`, from the local store or from the holders named. What cannot be had or
    /// does not verify is left out, and said in the log.
    pub async fn fetch(&self, wanted: &[RolloutAnnouncement]) -> Vec<VerifiedRollout> {
        let ids: Vec<RolloutId> = wanted.iter().map(|w| w.id).collect();
        let store = self.store.clone();
        let local = blocking(move || {
            let (mut good, mut corrupt) = (Vec::new(), Vec::new());
            for id in ids {
                match rollouts::get_rollout(&*store, id) {
                    Ok(Some(bytes)) => good.push((id, bytes)),
                    Ok(None) => {}
                    Err(StoreError::Corrupt { reason, .. }) => {
                        set_aside(&store, id, &reason);
                        corrupt.push(id);
                    }
                    Err(e) => tracing::warn!(rollout = %id.short(), error = %e, "cannot read a rollout"),
                }
            }
            (good, corrupt)
        })
        .await;
        let (local, corrupt) = local.unwrap_or_default();
        let mut found: BTreeMap<RolloutId, Vec<u8>> = local.into_iter().collect();
        for attempt in 0..2 {
            let mut by_holder: BTreeMap<NodeId, Vec<RolloutId>> = BTreeMap::new();
            // One without a connection may be gone: it is asked when the others do not have it.
            for w in wanted.iter().filter(|w| !found.contains_key(&w.id)) {
                let (near, far): (Vec<&NodeId>, Vec<&NodeId>) =
                    w.holders.iter().partition(|h| self.transport.is_connected(**h));
                if let Some(h) = near.into_iter().chain(far).nth(attempt % w.holders.len().max(1)) {
                    by_holder.entry(*h).or_default().push(w.id);
                }
            }
            let fetches = by_holder.into_iter().map(|(holder, ids)| async move {
                let mut came = BTreeMap::new();
                self.fetch_from(holder, &ids, &mut came).await;
                came
            });
            found.extend(futures::future::join_all(fetches).await.into_iter().flatten());
        }
        let (verifier, store) = (self.verifier.clone(), self.store.clone());
        blocking(move || {
            for id in corrupt {
                match found.get(&id) {
                    Some(bytes) => put_back(&*store, id, bytes),
                    None => tracing::warn!(rollout = %id.short(), "corrupt rollout not replaced: no holder gave it"),
                }
            }
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

    /// Has one rollout that was corrupt here given back by any live holder; tells whether one did.
    pub(super) async fn repair(&self, id: RolloutId) -> bool {
        let local = self.transport.local();
        for holder in self.membership.live_holders().into_iter().filter(|n| *n != local) {
            let mut found = BTreeMap::new();
            self.fetch_from(holder, &[id], &mut found).await;
            if let Some(bytes) = found.remove(&id) {
                let store = self.store.clone();
                return blocking(move || put_back(&*store, id, &bytes)).await.is_ok();
            }
        }
        false
    }

    /// Every unconsumed rollout of `job` that live holders list. Returns as soon as at most `unheard_max` of them have not
    /// answered, though never without any answer.
    pub async fn list_unconsumed(&self, job: JobId, unheard_max: usize) -> Vec<RolloutAnnouncement> {
        let mut lists: FuturesUnordered<_> =
            self.membership.live_holders().into_iter().map(|holder| self.list_of(holder, job)).collect();
        let (mut unheard, enough) = (lists.len(), unheard_max.min(lists.len().saturating_sub(1)));
        let mut holders_of: BTreeMap<RolloutId, Vec<NodeId>> = BTreeMap::new();
        while unheard > enough
            && let Some((holder, ids)) = lists.next().await
        {
            unheard -= usize::from(ids.is_some());
            for id in ids.into_iter().flatten() {
                holders_of.entry(id).or_default().push(holder);
            }
        }
        holders_of.into_iter().map(|(id, holders)| RolloutAnnouncement { id, job, holders }).collect()
    }

    /// What `holder` lists; `None` when it does not tell all.
    async fn list_of(&self, holder: NodeId, job: JobId) -> (NodeId, Option<Vec<RolloutId>>) {
        let (mut all, mut after) = (Vec::new(), None);
        loop {
            let call = RolloutCall::List { job, after, limit: LIST_MAX };
            match self.ask(holder, &call).await {
                Ok(RolloutReply::Ids(ids)) => {
                    after = ids.last().copied();
                    let last = ids.len() < LIST_MAX as usize;
                    all.extend(ids);
                    if last {
                        return (holder, Some(all));
                    }
                }
                Ok(_) => return (holder, None),
                Err(e) => {
                    tracing::warn!(holder = %holder.short(), error = %e, "cannot list rollouts");
                    return (holder, None);
                }
            }
        }
    }
}

/// Stores a copy in the place of a corrupt one. Its hash was checked; whether it verifies was when it first came.
fn put_back(store: &dyn Store, id: RolloutId, bytes: &[u8]) {
    let job = match read_rollout(bytes) {
        Ok(rollout) => rollout.job,
        Err(e) => {
            tracing::error!(rollout = %id.short(), error = %e, "a holder gave what is no rollout");
            return;
        }
    };
    if let Err(e) = rollouts::put_rollouts(store, &[(id, bytes, job)], Durability::Synced) {
        tracing::error!(rollout = %id.short(), error = %e, "cannot replace a corrupt rollout");
    }
}
