//! The optimizer leader of a model: collects rollouts, trains, commits.
//!
//! One [`Desk`] per model on every voter. While this node leads, a term runs on it:
//!
//! ```text
//! claims ─▶ Desk ─ ledger ─▶ assignments          announced ids ─▶ fetched ─▶ verified ─▶ ledger
//! ledger ─ batch ─▶ trainer thread ─ weights ─▶ stored here ─▶ held by a second node ─▶ proposed (fenced by the term)
//! ```
//!
//! A term keeps nothing that the log and the stores do not have: the next leader rebuilds its ledger from them.

mod batch;
mod term;

use crate::blobs::Blobs;
use crate::compute::Compute;
use crate::consensus::Groups;
use crate::membership::Membership;
use crate::models::Models;
use crate::rollouts::Rollouts;
use crate::runtime::spawn;
use crate::transport::SharedTransport;
use starling_protocol::ledger::{CLAIM_MAX, Ledger};
use starling_protocol::wire::{LeaderCall, LeaderReply, RolloutAnnouncement, WaitReason};
use starling_protocol::{ModelName, NodeId, Term, Timestamp};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

/// Announcements waiting for the leader: 115 bytes each, two steps of 2,000 episodes.
const INTAKE_QUEUE: usize = 4096;

/// The node's wall clock as the protocol sees it; the simulator brings its own.
pub type Clock = Arc<dyn Fn() -> Timestamp + Send + Sync>;

/// What every leader of this node works with.
#[derive(Clone)]
pub struct LeaderContext {
    /// The network.
    pub transport: SharedTransport,
    /// Who lives.
    pub membership: Arc<Membership>,
    /// Raft groups.
    pub groups: Arc<Groups>,
    /// Rollouts.
    pub rollouts: Arc<Rollouts>,
    /// Weights, files, tasks.
    pub blobs: Blobs,
    /// The directory of models.
    pub models: Arc<Models>,
    /// Trains.
    pub compute: Arc<dyn Compute>,
    /// Wall clock.
    pub clock: Clock,
    /// Ends with the node.
    pub shutdown: CancellationToken,
}

impl std::fmt::Debug for LeaderContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("LeaderContext")
    }
}

/// What the leader does now: promise 5, it never waits silently.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct Activity {
    /// In words: what it does, or what it waits for.
    pub doing: String,
    /// Since when, milliseconds since the epoch.
    pub since_ms: u64,
}

pub(crate) struct Open {
    pub(crate) term: Term,
    pub(crate) ledger: Ledger,
}

/// Where claims for a model arrive, and where its leader works.
pub struct Desk {
    pub(crate) model: ModelName,
    pub(crate) context: LeaderContext,
    pub(crate) open: Mutex<Option<Open>>,
    pub(crate) intake: mpsc::Sender<RolloutAnnouncement>,
    pub(crate) activity: Mutex<Activity>,
    /// Something arrived that may complete a batch or an evaluation.
    pub(crate) progress: Notify,
}

impl std::fmt::Debug for Desk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Desk").field("model", &self.model).finish_non_exhaustive()
    }
}

impl Desk {
    /// Starts the leader's loop for `model`; it leads whenever this node's Raft group says so.
    #[must_use]
    pub fn start(model: ModelName, context: LeaderContext) -> Arc<Self> {
        let (intake, queue) = mpsc::channel(INTAKE_QUEUE);
        let desk = Arc::new(Self {
            model,
            context,
            open: Mutex::new(None),
            intake,
            activity: Mutex::new(Activity::default()),
            progress: Notify::new(),
        });
        spawn(term::lead(desk.clone(), queue));
        desk
    }

    /// What the leader does now.
    #[must_use]
    pub fn activity(&self) -> Activity {
        self.activity.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn doing(&self, what: impl Into<String>) {
        let what = what.into();
        let mut activity = self.activity.lock().unwrap_or_else(PoisonError::into_inner);
        if activity.doing != what {
            tracing::debug!(model = %self.model, "leader: {what}");
            *activity = Activity { doing: what, since_ms: (self.context.clock)().0 };
        }
    }

    pub(crate) fn with_ledger<T>(&self, f: impl FnOnce(&mut Ledger) -> T) -> Option<T> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.as_mut().map(|o| f(&mut o.ledger))
    }

    /// Takes announced rollouts; a full queue drops them, since the leader also lists what holders have.
    pub fn on_announced(&self, list: Vec<RolloutAnnouncement>) {
        if self.open.lock().unwrap_or_else(PoisonError::into_inner).is_none() {
            return;
        }
        for a in list {
            let _ = self.intake.try_send(a);
        }
    }

    /// Answers a claim or an abort if this node leads; `None` when it does not.
    pub fn on_call(&self, from: NodeId, call: &LeaderCall) -> Option<LeaderReply> {
        let now = (self.context.clock)();
        let view = self.context.groups.leadership(&self.model)?.borrow().clone();
        if !view.is_self {
            return None;
        }
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let open = open.as_mut().filter(|o| o.term == view.term);
        match call {
            LeaderCall::Claim { want, ahead, stocked, running, .. } => Some(match open {
                Some(o) => {
                    let (want, stocked) = (*want as usize, *stocked as usize);
                    let (mut assignments, revoked, wait) = o.ledger.handle_claim(now, from, want, stocked, running);
                    if assignments.len() == want.min(CLAIM_MAX) {
                        let ahead = (*ahead as usize).min(CLAIM_MAX);
                        assignments.extend(o.ledger.handle_reserve(now, from, ahead, stocked));
                    }
                    let retry_ms = wait.as_ref().map_or(0, |_| retry_ms(&o.ledger));
                    LeaderReply::Assigned { assignments, revoked, wait, retry_ms }
                }
                // Leases of the former term go on: the ledger takes them over when they are renewed once it is there.
                None => LeaderReply::Assigned {
                    assignments: Vec::new(),
                    revoked: Vec::new(),
                    wait: Some(self.why_closed()),
                    retry_ms: 0,
                },
            }),
            LeaderCall::Abort { episodes, .. } => {
                if let Some(o) = open {
                    for (episode, cause) in episodes {
                        if o.ledger.handle_abort(from, *episode) {
                            tracing::info!(model = %self.model, episode = %episode.short(), %cause, "episode aborted");
                        }
                    }
                }
                Some(LeaderReply::Done)
            }
            LeaderCall::Propose { .. }
            | LeaderCall::Status { .. }
            | LeaderCall::JoinGroup { .. }
            | LeaderCall::Survey { .. }
            | LeaderCall::Models => None,
        }
    }

    /// Between two steps: gives leadership to a node that should have it; see [`Groups::hand_on`].
    ///
    /// # Errors
    /// When another was asked: this term is over then.
    pub(crate) async fn hand_on(&self, after_step: bool) -> Result<(), String> {
        match self.context.groups.hand_on(&self.model, after_step).await {
            None => Ok(()),
            Some(to) => Err(format!("{} was asked to lead instead", to.short())),
        }
    }

    fn why_closed(&self) -> WaitReason {
        let state = self.context.groups.state(&self.model);
        let has_job = state.is_some_and(|s| s.borrow().running_job().is_some());
        if has_job { WaitReason::LeaderStarting } else { WaitReason::NoJob }
    }
}

fn retry_ms(ledger: &Ledger) -> u32 {
    u32::try_from(ledger.retry_after().as_millis()).unwrap_or(u32::MAX)
}
