//! The node as a client of the mesh: leases from leaders, tokens from servers, rollouts onto holders.
//!
//! ```text
//! claim ─▶ leader ─▶ assignments, renewals          generate ─▶ server ─▶ tokens … lost? ─▶ next server ─▶ tokens, receipt
//! seal ─▶ signed rollout ─▶ `replication` holders ─▶ acknowledged
//! ```
//!
//! What agents see of it (HTTP, chat formats) lies above. An answer outlives its server, see [`Generation`].

mod block;
mod generation;
mod leases;
mod leg;
mod pace;
mod pending;
mod servers;

pub use generation::{Generation, GenerationError, GenerationEvent};
pub use leases::Lease;

use crate::NodeCore;
use block::Blocks;
use leases::Leases;
use pending::{Pending, Requests};
use servers::Servers;
use starling_protocol::assignment::{Assignment, HeldLease};
use starling_protocol::rollout::{Rollout, RolloutError};
use starling_protocol::wire::{FRAME_LEN_BYTES_MAX, Generate, LeaderCall, LeaderReply, WaitReason};
use starling_protocol::{EpisodeId, ModelName, RolloutId};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::runtime::spawn;
use crate::watch::lock;
use tokio::sync::oneshot;
use tokio::time::timeout;

/// How patient a client is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientConfig {
    /// How long an answer waits for a server when there is none, counted from its last token. Default 60 s: a server's
    /// death is known after 3 s (SWIM), an operator's restart or a new server takes some seconds to start, 10 s to
    /// fetch 1 GiB of weights at 100 MiB/s and 2 s to be announced, and that twice over is 40 s. It stays far below the
    /// 600 s that the providers' SDKs wait for an answer.
    pub server_wait: Duration,
    /// How long an answer waits for a server that holds the call and says nothing, counted from the last token. Default
    /// 240 s: a prompt of 16 Ki tokens at 100 tokens/s (a small CPU) takes 160 s, and it lies below the gateway's own
    /// 300 s, so that the reason given is the one that names the server.
    pub silence_max: Duration,
}

impl Default for ClientConfig {
    fn default() -> Self {
        Self { server_wait: Duration::from_secs(60), silence_max: Duration::from_secs(240) }
    }
}

/// What a claim brought, over all models asked.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Claimed {
    /// To run.
    pub assignments: Vec<Assignment>,
    /// No longer leased here.
    pub revoked: Vec<EpisodeId>,
    /// Why there are fewer than wanted.
    pub wait: Option<String>,
    /// Whether every leader with running episodes of this node was reached.
    pub renewed: bool,
}

/// Why an episode's end was not acknowledged. Nothing is lost: the same rollout may be sealed again unless the lease is
/// gone.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SealError {
    /// The episode belongs to somebody else now; its rollout would not count. Permanent.
    #[error("the lease of episode {0} was lost: its leader gave the episode to another node")]
    LeaseLost(EpisodeId),
    /// Not enough nodes hold the rollout durably. The same end may succeed later.
    #[error(transparent)]
    Storage(#[from] crate::rollouts::ReplicateError),
    /// The record is not a rollout; a bug of the caller or too long an episode. Permanent.
    #[error(transparent)]
    Invalid(#[from] RolloutError),
}

/// Counters since the start, for status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct ClientCounts {
    /// Answers asked for.
    pub generations: u64,
    /// Times that an answer lost the server that it came from, or was to come from.
    pub servers_lost: u64,
    /// Times that a silent server was not waited for alone.
    pub hedges: u64,
    /// Of these, how often the other server was first.
    pub hedges_won: u64,
    /// Tokens that agents saw and no server vouches for: context, not training.
    pub unreceipted_tokens: u64,
}

/// What the parts of a client share.
#[derive(Debug)]
struct Inner {
    core: Arc<NodeCore>,
    config: ClientConfig,
    leases: Leases,
    blocks: Mutex<Blocks>,
    servers: Servers,
    counts: Mutex<ClientCounts>,
    /// What answers wait for, with how many of them.
    waits: Mutex<BTreeMap<String, usize>>,
    requests: Mutex<Requests>,
}

impl Inner {
    fn count(&self, change: impl FnOnce(&mut ClientCounts)) {
        change(&mut lock(&self.counts));
    }
}

/// See the module's text. Clones are the same client.
#[derive(Clone, Debug)]
pub struct Client(Arc<Inner>);

impl Client {
    /// Over `core`.
    #[must_use]
    pub fn new(core: Arc<NodeCore>, config: ClientConfig) -> Self {
        Self(Arc::new(Inner {
            core,
            config,
            leases: Leases::default(),
            blocks: Mutex::default(),
            servers: Servers::default(),
            counts: Mutex::default(),
            waits: Mutex::default(),
            requests: Mutex::default(),
        }))
    }

    /// The node.
    #[must_use]
    pub fn core(&self) -> &Arc<NodeCore> {
        &self.0.core
    }

    /// Claims up to `want` episodes of `models` (all with a running job when empty) and renews the leases of `running`.
    ///
    /// The client keeps a small block of episodes ahead, at its own pace, and begins those first. So it goes on for a while
    /// when a leader is out of reach; a block goes back when the node drains or nothing is claimed any more.
    pub async fn claim(&self, models: &[ModelName], want: usize, running: &[EpisodeId]) -> Claimed {
        let inner = &self.0;
        let now = (inner.core.clock())();
        let draining = inner.core.maintenance().is_draining();
        let want = if draining { 0 } else { want };
        let (taken, given_back) = {
            let mut blocks = lock(&inner.blocks);
            let taken = blocks.take(now, models, want, |id| inner.leases.is_sure(now, id));
            (taken, blocks.give_back(now, draining))
        };
        for (model, assignments) in given_back {
            self.give_back(&model, assignments.iter().map(|a| a.episode), "its client does not begin it").await;
        }
        let mut by_model: BTreeMap<ModelName, Vec<HeldLease>> = BTreeMap::new();
        for lease in running.iter().filter_map(|id| inner.leases.get(*id)) {
            let held = HeldLease::from(&lease.assignment);
            by_model.entry(lease.assignment.model).or_default().push(held);
        }
        let mut stocked: BTreeMap<ModelName, u32> = BTreeMap::new();
        for a in lock(&inner.blocks).held() {
            by_model.entry(a.model.clone()).or_default().push(HeldLease::from(a));
            *stocked.entry(a.model.clone()).or_default() += 1;
        }
        // What begins now is renewed too: its lease may have been given a while ago.
        for a in &taken {
            by_model.entry(a.model.clone()).or_default().push(HeldLease::from(a));
        }
        for a in inner.core.models().list() {
            if a.running_job.is_some() && (models.is_empty() || models.contains(&a.model)) {
                by_model.entry(a.model).or_default();
            }
        }
        // Several may claim here, and one of them was told of a loss: who runs the episode must hear of it too.
        let revoked = inner.leases.lost(running);
        let mut out = Claimed { renewed: true, assignments: taken, revoked, ..Claimed::default() };
        if by_model.is_empty() && want > 0 {
            out.wait = Some(self.why_no_model(models));
            return out;
        }
        if draining {
            out.wait = Some("this node is draining".into());
        }
        for (model, running) in by_model {
            // Of other models only what is held here is renewed.
            let want = if models.is_empty() || models.contains(&model) { want } else { 0 };
            let left = u32::try_from(want.saturating_sub(out.assignments.len())).unwrap_or(u32::MAX);
            if left == 0 && running.is_empty() {
                continue;
            }
            // The block has what was asked for, and its leader did not answer a moment ago: nothing is renewed now.
            let silent = want > 0 && left == 0 && lock(&inner.blocks).is_silent((inner.core.clock())(), &model);
            if silent {
                out.renewed &= running.is_empty();
                continue;
            }
            if running.is_empty()
                && let Some(why) = lock(&inner.blocks).held_back((inner.core.clock())(), &model)
            {
                out.wait = Some(why.to_owned());
                continue;
            }
            let ahead = if want > 0 { lock(&inner.blocks).wanted_size() } else { 0 };
            let call = LeaderCall::Claim {
                model: model.clone(),
                want: left,
                ahead: u32::try_from(ahead).unwrap_or(u32::MAX),
                stocked: stocked.get(&model).copied().unwrap_or(0),
                running: running.clone(),
            };
            let asked = self.clone().ask(model.clone(), call, left, running);
            // What the block had should begin now, not when a leader that is away has answered.
            let answer = if out.assignments.is_empty() { asked.await } else { self.answer_soon(&model, asked).await };
            out.assignments.extend(answer.assignments);
            // The caller knows nothing of those that have not begun.
            out.assignments.retain(|a| !answer.revoked.contains(&a.episode));
            out.revoked.extend(answer.revoked);
            out.renewed &= answer.renewed;
            out.wait = answer.wait.filter(|_| !draining).or(out.wait);
        }
        out.revoked.extend(lock(&inner.blocks).take_revoked());
        if out.assignments.len() >= want {
            out.wait = None;
        }
        lock(&inner.blocks).note_begun((inner.core.clock())(), out.assignments.len());
        out
    }

    /// Claims `left` episodes and what the block should have; what the leader gives beyond `left` is laid into it.
    async fn ask(self, model: ModelName, call: LeaderCall, left: u32, running: Vec<HeldLease>) -> Claimed {
        let inner = &self.0;
        // A renewal holds nobody back.
        let asking = (left > 0).then(|| {
            Pending::new(inner, format!("{model}: no answer yet from its leader, which was asked for episodes"))
        });
        let reply = inner.core.ask_leader(&model, &call).await;
        drop(asking);
        let now = (inner.core.clock())();
        lock(&inner.blocks).note_answer(now, &model, reply.is_ok());
        match reply {
            Ok(LeaderReply::Assigned { mut assignments, mut revoked, wait, retry_ms }) => {
                inner.leases.note(now, &assignments, &running, &revoked);
                let ahead = assignments.split_off(assignments.len().min(left as usize));
                let wait = wait.map(|w| describe(&model, &w));
                let mut blocks = lock(&inner.blocks);
                blocks.add(ahead);
                revoked.retain(|id| !blocks.remove(&model, *id));
                if left > 0 {
                    let until = now + Duration::from_millis(u64::from(retry_ms));
                    blocks.note_held_back(&model, wait.clone().map(|why| (why, until)));
                }
                Claimed { assignments, revoked, wait, renewed: true }
            }
            Ok(other) => Claimed { wait: Some(format!("{model}: unexpected answer {other:?}")), ..Claimed::default() },
            Err(e) => Claimed { wait: Some(e.to_string()), renewed: running.is_empty(), ..Claimed::default() },
        }
    }

    /// The answer, if it comes within [`block::PATIENCE`]. A later one fills the block.
    async fn answer_soon(&self, model: &ModelName, asked: impl Future<Output = Claimed> + Send + 'static) -> Claimed {
        let (send, mut answer) = oneshot::channel();
        let this = self.clone();
        drop(spawn(async move {
            if let Err(late) = send.send(asked.await) {
                lock(&this.0.blocks).add_late(late.assignments, late.revoked);
            }
        }));
        if let Ok(Ok(answer)) = timeout(block::PATIENCE, &mut answer).await {
            return answer;
        }
        answer.close();
        answer.try_recv().unwrap_or_else(|_not_yet| {
            lock(&self.0.blocks).note_answer((self.0.core.clock())(), model, false);
            Claimed { wait: Some(format!("{model}: its leader has not answered yet")), ..Claimed::default() }
        })
    }

    fn why_no_model(&self, models: &[ModelName]) -> String {
        let core = &self.0.core;
        let known = core.models().list();
        if known.is_empty() && core.membership().live().len() <= 1 {
            "no other node of the mesh is reachable yet".into()
        } else if known.is_empty() {
            "no model is known on this mesh yet: submit a job".into()
        } else if models.is_empty() {
            "no job runs on this mesh".into()
        } else {
            format!("no job runs for {models:?}")
        }
    }

    /// The lease of an episode that runs here; `None` when its leader gave it to another node, or it is over.
    #[must_use]
    pub fn lease(&self, episode: EpisodeId) -> Option<Lease> {
        self.0.leases.get(episode)
    }

    /// Returns when leases should be renewed by a claim: each three times within its length, so that one lost claim does
    /// not cost it. Cancel-safe; never returns while nothing is leased.
    pub async fn renewal_due(&self) {
        self.0.leases.renewal_due(self.0.core.clock()).await;
    }

    /// Starts an answer and waits until some server has taken the request. Dropping the future or the answer cancels it.
    ///
    /// # Errors
    /// [`GenerationError`].
    pub async fn generate(&self, request: Generate) -> Result<Generation, GenerationError> {
        if self.0.core.models().get(&request.model).is_none() {
            return Err(GenerationError::NoModel(request.model));
        }
        if request.max_tokens == 0 {
            return Err(GenerationError::Refused("field `max_tokens`: expected at least 1, got 0".into()));
        }
        // A continued request carries the answer so far too; five bytes a token, and the other fields fit into 4 KiB.
        let tokens = request.prompt.len() as u64 + u64::from(request.max_tokens);
        if tokens * 5 + 4096 > FRAME_LEN_BYTES_MAX as u64 {
            let reason =
                format!("prompt and answer of {tokens} tokens do not fit into a frame of {FRAME_LEN_BYTES_MAX} bytes");
            return Err(GenerationError::Refused(reason));
        }
        self.0.count(|c| c.generations += 1);
        let mut generation = Generation::new(self.0.clone(), request);
        generation.opened().await?;
        Ok(generation)
    }

    /// Seals an episode's record and has it held durably by as many nodes as its lease asks; only then returns.
    ///
    /// # Errors
    /// [`SealError`].
    pub async fn seal(&self, rollout: Rollout) -> Result<RolloutId, SealError> {
        let core = &self.0.core;
        let lease = self.lease(rollout.episode).ok_or(SealError::LeaseLost(rollout.episode))?;
        let sealed = rollout.seal(&**core.signer())?;
        let id = sealed.id;
        let replication = usize::from(lease.assignment.replication);
        let what = format!("{}: no answer yet from enough nodes that are to hold an ended episode", rollout.model);
        let _asking = Pending::new(&self.0, what);
        core.rollouts().replicate(&rollout.model, rollout.job, sealed, replication).await?;
        self.0.leases.forget(rollout.episode);
        Ok(id)
    }

    /// Gives an episode back that will not end here; its leader may not hear of it, then the lease runs out by itself.
    pub async fn abort(&self, assignment: &Assignment, cause: String) {
        self.give_back(&assignment.model, std::iter::once(assignment.episode), &cause).await;
    }

    async fn give_back(&self, model: &ModelName, episodes: impl Iterator<Item = EpisodeId>, cause: &str) {
        let episodes: Vec<_> = episodes.map(|id| (id, cause.to_owned())).collect();
        episodes.iter().for_each(|(id, _)| self.0.leases.forget(*id));
        let call = LeaderCall::Abort { model: model.clone(), episodes };
        if let Err(e) = self.0.core.ask_leader(model, &call).await {
            tracing::debug!(%model, error = %e, "the leader did not hear of an abort");
        }
    }

    /// Counters.
    #[must_use]
    pub fn counts(&self) -> ClientCounts {
        *lock(&self.0.counts)
    }

    /// What answers, claims and ended episodes wait for now, in words.
    #[must_use]
    pub fn waits(&self) -> Vec<String> {
        let answers = lock(&self.0.waits)
            .iter()
            .map(|(why, n)| format!("{n} answer{} for {why}", if *n == 1 { " waits" } else { "s wait" }))
            .collect::<Vec<_>>();
        let requests = lock(&self.0.requests).told((self.0.core.clock())());
        answers.into_iter().chain(requests).collect()
    }
}

fn describe(model: &ModelName, wait: &WaitReason) -> String {
    match wait {
        WaitReason::NoJob => format!("{model}: no job runs"),
        WaitReason::QuotaFull { have, max } => {
            format!("{model}: {have} of at most {max} episodes are running or waiting to be trained on")
        }
        WaitReason::LeaderStarting => format!("{model}: the leader catches up with its log"),
        WaitReason::EvaluationFull => format!("{model}: all episodes of the evaluation are running"),
    }
}
