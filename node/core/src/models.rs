//! What a node without a group knows of the mesh's models: who leads, who votes, who serves.

use crate::membership::Membership;
use crate::runtime::spawn;
use crate::transport::{SharedTransport, Verdict};
use starling_protocol::codec::{decode, encode};
use starling_protocol::control::ControlEntry;
use starling_protocol::wire::{CALL_LEN_BYTES_MAX, LeaderCall, LeaderReply, ModelAnnouncement, Service};
use starling_protocol::{ModelName, NodeId, Term};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// Limit of one call to a leader.
const LEADER_LIMIT: Duration = Duration::from_secs(5);
/// Limit of a proposal, which waits for a quorum.
const PROPOSE_LIMIT: Duration = Duration::from_secs(15);

/// A model that nobody announced for this long is asked for: gossip may not reach this node, as happens for a while
/// when it came back before its peers noticed that it had gone. Three beats of its leader's.
const QUIET: Duration = Duration::from_secs(6);
/// Limit of such a question; the next beat asks another node.
const ASK_LIMIT: Duration = Duration::from_secs(2);

/// Why no leader answered. Every text says who was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LeaderError {
    /// Nobody announced the model.
    #[error("model {0} is not known on this mesh")]
    UnknownModel(ModelName),
    /// No voter answered as leader.
    #[error("model {model} has no leader now: {tried}")]
    NoLeader {
        /// Which model.
        model: ModelName,
        /// Who was asked and what they said.
        tried: String,
    },
    /// The leader said no.
    #[error("{0}")]
    Refused(String),
}

/// The directory of models.
pub struct Models {
    transport: SharedTransport,
    membership: Arc<Membership>,
    known: Mutex<BTreeMap<ModelName, Known>>,
    /// Questions asked so far: the next one goes to another node.
    asked: AtomicUsize,
    /// A question is under way.
    asking: AtomicBool,
}

struct Known {
    announced: ModelAnnouncement,
    heard: Instant,
}

impl std::fmt::Debug for Models {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Models")
    }
}

impl Models {
    /// Empty.
    #[must_use]
    pub fn new(transport: SharedTransport, membership: Arc<Membership>) -> Arc<Self> {
        Arc::new(Self {
            transport,
            membership,
            known: Mutex::default(),
            asked: AtomicUsize::new(0),
            asking: AtomicBool::new(false),
        })
    }

    /// Takes an announcement; a lesser line's does not replace a greater one's, nor an older term's leader a newer one's.
    pub fn on_announcement(&self, a: ModelAnnouncement) -> Verdict {
        let term = |a: &ModelAnnouncement| a.leader.map_or(Term(0), |(_, t)| t);
        let heard = Instant::now();
        let mut known = self.lock();
        match known.get_mut(&a.model) {
            Some(old) => {
                old.heard = heard;
                let rank = |a: &ModelAnnouncement| (a.line, term(a), a.version);
                let older = rank(&old.announced) > rank(&a);
                if older {
                    return Verdict::Ignore;
                }
                old.announced = a;
            }
            None => {
                known.insert(a.model.clone(), Known { announced: a, heard });
            }
        }
        Verdict::Accept
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<ModelName, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks another node for what it knows if gossip has brought nothing of late. For a slow beat; does not wait, and
    /// asks nothing while a question is under way.
    pub fn ask_if_quiet(self: &Arc<Self>) {
        let quiet = {
            let known = self.lock();
            known.is_empty() || known.values().any(|k| k.heard.elapsed() >= QUIET)
        };
        if !quiet || self.asking.swap(true, Ordering::Relaxed) {
            return;
        }
        let local = self.transport.local();
        let others: Vec<NodeId> = self.membership.live_holders().into_iter().filter(|n| *n != local).collect();
        if others.is_empty() {
            self.asking.store(false, Ordering::Relaxed);
            return;
        }
        let peer = others[self.asked.fetch_add(1, Ordering::Relaxed) % others.len()];
        let models = self.clone();
        drop(spawn(async move {
            let body = encode(&LeaderCall::Models).into();
            let answer = models.transport.call(peer, Service::Leader, body, ASK_LIMIT).await;
            models.asking.store(false, Ordering::Relaxed);
            let reply = answer
                .map_err(|e| e.to_string())
                .and_then(|b| decode::<LeaderReply>("leader reply", &b, CALL_LEN_BYTES_MAX).map_err(|e| e.to_string()));
            match reply {
                Ok(LeaderReply::Models(list)) => {
                    for a in list {
                        models.on_announcement(a);
                    }
                }
                Ok(_) => tracing::debug!(peer = %peer.short(), "an answer to another question"),
                Err(error) => tracing::debug!(peer = %peer.short(), error, "cannot ask for models"),
            }
        }));
    }

    /// Everything known, by name.
    #[must_use]
    pub fn list(&self) -> Vec<ModelAnnouncement> {
        self.lock().values().map(|k| k.announced.clone()).collect()
    }

    /// What is known of `model`.
    #[must_use]
    pub fn get(&self, model: &ModelName) -> Option<ModelAnnouncement> {
        self.lock().get(model).map(|k| k.announced.clone())
    }

    /// Live servers whose record says that they serve `model`.
    #[must_use]
    pub fn servers_of(&self, model: &ModelName) -> Vec<NodeId> {
        self.membership.of_holders(|r| r.models.iter().any(|m| m.model == *model).then_some(r.node))
    }

    /// Live voters and servers of `model`: who may have its weights, files and tasks.
    #[must_use]
    pub fn sources_of(&self, model: &ModelName) -> Vec<NodeId> {
        let mut all = self.servers_of(model);
        if let Some(a) = self.get(model) {
            if let Some((leader, _)) = a.leader {
                all.insert(0, leader);
            }
            all.extend(a.voters);
        }
        let mut seen = std::collections::BTreeSet::new();
        all.retain(|n| seen.insert(*n) && self.membership.is_live(*n));
        all
    }

    /// Asks the model's leader, following hints and trying every voter.
    ///
    /// # Errors
    /// [`LeaderError`] when nobody answered as leader.
    pub async fn ask_leader(&self, model: &ModelName, call: &LeaderCall) -> Result<LeaderReply, LeaderError> {
        let known = self.get(model).ok_or_else(|| LeaderError::UnknownModel(model.clone()))?;
        let limit = if matches!(call, LeaderCall::Propose { .. }) { PROPOSE_LIMIT } else { LEADER_LIMIT };
        let order = known.leader.map(|(n, _)| n).into_iter().chain(known.voters);
        // One without a connection may be gone and not missed yet: it is asked last.
        let is_near = |n: &NodeId| *n == self.transport.local() || self.transport.is_connected(*n);
        let (near, far): (Vec<_>, Vec<_>) = order.partition(is_near);
        let mut order = [near, far].concat();
        let body = encode(call);
        let mut tried = String::new();
        let mut asked = std::collections::BTreeSet::new();
        let mut i = 0;
        while i < order.len() {
            let peer = order[i];
            i += 1;
            if !asked.insert(peer) {
                continue;
            }
            let answer = self.transport.call(peer, Service::Leader, body.clone().into(), limit).await;
            let reply = answer
                .map_err(|e| e.to_string())
                .and_then(|b| decode::<LeaderReply>("leader reply", &b, CALL_LEN_BYTES_MAX).map_err(|e| e.to_string()));
            match reply {
                Ok(LeaderReply::NotLeader(hint)) => {
                    tried.push_str(&format!("[{} is not the leader] ", peer.short()));
                    if let Some(h) = hint {
                        order.insert(i, h);
                    }
                }
                Ok(LeaderReply::Refused(why)) => return Err(LeaderError::Refused(why)),
                Ok(reply) => {
                    self.note_leader(model, peer);
                    return Ok(reply);
                }
                Err(e) => tried.push_str(&format!("[{}: {e}] ", peer.short())),
            }
        }
        Err(LeaderError::NoLeader { model: model.clone(), tried })
    }

    fn note_leader(&self, model: &ModelName, leader: NodeId) {
        let mut known = self.lock();
        if let Some(Known { announced: a, .. }) = known.get_mut(model)
            && a.leader.is_none_or(|(n, _)| n != leader)
        {
            let term = a.leader.map_or(Term(0), |(_, t)| t);
            a.leader = Some((leader, term));
        }
    }

    /// Puts `entry` into the model's log, wherever its leader is.
    ///
    /// # Errors
    /// [`LeaderError`].
    pub async fn propose(&self, model: &ModelName, entry: ControlEntry) -> Result<(), LeaderError> {
        let call = LeaderCall::Propose { model: model.clone(), entry: Box::new(entry) };
        match self.ask_leader(model, &call).await? {
            LeaderReply::Done => Ok(()),
            other => Err(LeaderError::Refused(format!("unexpected answer {other:?}"))),
        }
    }
}
