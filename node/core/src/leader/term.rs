//! One term of leadership, from the barrier at its start to the loss of the quorum.

use super::batch::{metrics_of, samples_of};
use super::{Desk, Open};
use crate::compute::{StepInput, StepTrainer, Stepped, TrainerStart};
use crate::consensus::ProposeError;
use starling_protocol::alarm::{MismatchAlarm, MismatchWatch};
use starling_protocol::control::{Applied, ControlEntry, JobEnd, JobState, ModelState, StepCommitted};
use starling_protocol::ledger::{Admission, Ledger, LoadedTasks, TrainingBatch};
use starling_protocol::manifest::{DeltaManifest, Manifest};
use starling_protocol::planted::{self, Bug};
use starling_protocol::task::{Task, read_task_set};
use starling_protocol::wire::RolloutAnnouncement;
use starling_protocol::{NodeId, Term};
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::pin::pin;
use std::sync::{Arc, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior, timeout};

/// How often leases are checked and holders asked for rollouts that no announcement brought.
const BEAT: Duration = Duration::from_secs(1);
/// Without an announcement for this long, holders are listed.
const QUIET: Duration = Duration::from_secs(2);
/// Pause before a failed term starts again.
const RETRY: Duration = Duration::from_millis(300);
/// Announcements fetched and verified at a time.
const INTAKE_BATCH: usize = 128;

/// Leads whenever the group says so, until the node ends.
pub(super) async fn lead(desk: Arc<Desk>, mut intake: mpsc::Receiver<RolloutAnnouncement>) {
    let shutdown = desk.context.shutdown.clone();
    let Some(mut leadership) = desk.context.groups.leadership(&desk.model) else { return };
    loop {
        let view = leadership.borrow_and_update().clone();
        if view.is_self {
            tracing::info!(model = %desk.model, term = view.term.0, "this node leads");
            let run = run_term(&desk, view.term, &mut intake);
            // A quorum that is silent for longer than the lease ends nothing: the same node may lead the same term a second
            // later, and what runs is worth keeping. Until then no claim is answered ([`Desk::on_call`]), no entry passes.
            let lost = async {
                loop {
                    if leadership.changed().await.is_err() {
                        return;
                    }
                    let term = leadership.borrow_and_update().term;
                    if term != view.term && !planted::has(Bug::SkipFencing) {
                        return;
                    }
                }
            };
            let ended = tokio::select! {
                biased;
                () = shutdown.cancelled() => return,
                () = lost => Err("another term began".to_owned()),
                r = run => r,
            };
            *desk.open.lock().unwrap_or_else(PoisonError::into_inner) = None;
            if let Err(why) = ended {
                desk.doing(format!("term {} paused: {why}", view.term));
                tracing::warn!(model = %desk.model, term = view.term.0, %why, "the leader starts over");
                let _asked = desk.hand_on(false).await;
            }
            tokio::time::sleep(RETRY).await;
            continue;
        }
        desk.doing(match view.leader {
            Some(n) => format!("following {}", n.short()),
            None => view.wait.clone().unwrap_or_else(|| "waiting for a leader to be elected".into()),
        });
        tokio::select! {
            biased;
            () = shutdown.cancelled() => return,
            r = leadership.changed() => if r.is_err() { return },
        }
    }
}

/// Runs the model's jobs one after another. Returns on an error that the next start of the term may not have.
async fn run_term(
    desk: &Arc<Desk>,
    term: Term,
    intake: &mut mpsc::Receiver<RolloutAnnouncement>,
) -> Result<(), String> {
    desk.doing("catching up with the log");
    desk.context.groups.linearizable_barrier(&desk.model).await.map_err(|e| e.to_string())?;
    let mut states = desk.context.groups.state(&desk.model).ok_or("the group is closed")?;
    loop {
        let state = states.borrow_and_update().clone();
        match state.running_job() {
            Some(job) => JobRun::start(desk, term, &state, job.clone()).await?.run(intake).await?,
            None => {
                desk.doing("no job: waiting for one");
                match timeout(BEAT, states.changed()).await {
                    Ok(changed) => changed.map_err(|_closed| "the group is closed")?,
                    Err(_elapsed) => desk.hand_on(false).await?,
                }
            }
        }
    }
}

/// The trainer's thread with the version that it stands at.
struct JobRun<'a> {
    desk: &'a Arc<Desk>,
    term: Term,
    job: JobState,
    trainer: Box<dyn StepTrainer>,
    /// The model's state at the start; consumed rollouts of later steps are in the ledger.
    state: Arc<ModelState>,
    /// Of the newest committed version.
    weights: Manifest,
    /// Of this term's steps: what came before it, the alarm does not know.
    mismatch: MismatchWatch,
    /// What it said of the last step, for status.
    alarm: Option<String>,
    training: Option<Training>,
    collecting_since: Instant,
    heard: Instant,
}

struct Training {
    batch: TrainingBatch,
    with_optimizer_state: bool,
    done: oneshot::Receiver<Result<Stepped, String>>,
    collect_ms: u64,
    since: Instant,
}

impl<'a> JobRun<'a> {
    async fn start(desk: &'a Arc<Desk>, term: Term, state: &Arc<ModelState>, job: JobState) -> Result<Self, String> {
        let context = &desk.context;
        desk.doing(format!("loading job {}", job.spec.name));
        let sources = context.models.sources_of(&desk.model);
        let tasks = async {
            let mut tasks = Vec::new();
            for set in &job.spec.tasks {
                let train = load_tasks(desk, &set.train).await?;
                let heldout = match &set.heldout {
                    Some(m) => load_tasks(desk, m).await?,
                    None => Vec::new(),
                };
                tasks.push(LoadedTasks { train, heldout });
            }
            Ok::<_, String>(tasks)
        };
        let manifest = state.weights.as_ref().ok_or("the model has no weights")?;
        // A holder need not serve the model, so the log knows more than the mesh says.
        let with_holders = |holders: &[NodeId]| -> Vec<NodeId> {
            let live = holders.iter().filter(|n| context.membership.is_live(**n));
            live.chain(&sources).copied().collect::<BTreeSet<_>>().into_iter().collect()
        };
        let holders = with_holders(&state.weights_holders);
        let weights = async { context.blobs.fetch(manifest, &holders).await.map_err(|e| e.to_string()) };
        let optimizer_state = async {
            let adapters = job.spec.trainer.lora.is_some();
            if adapters && job.steps == 0 {
                return Ok(None); // they are this job's own
            }
            let Some((version, m)) = &state.optimizer_state else { return Ok(None) };
            // Moments some versions old are better than none; they must not keep a model from training.
            Ok(match context.blobs.fetch(m, &with_holders(&state.optimizer_holders)).await {
                Ok(bytes) => Some(bytes),
                Err(e) if adapters => return Err(format!("the job's adapters of version {version}: {e}")),
                Err(e) => {
                    tracing::warn!(model = %desk.model, %version, error = %e, "optimizer starts without its moments");
                    None
                }
            })
        };
        // The weights before the job's first step: the current ones until there was one.
        let reference = async {
            match state.reference.as_ref().filter(|r| r.job == job.job) {
                Some(r) if job.spec.trainer.needs_first_weights() => {
                    let found = context.blobs.fetch(&r.weights, &with_holders(&r.holders)).await;
                    found
                        .map(Some)
                        .map_err(|e| format!("the job's first weights, which its KL or its adapters need: {e}"))
                }
                _ => Ok(None),
            }
        };
        let (tasks, weights, config, optimizer_state, reference) =
            futures::try_join!(tasks, weights, load_config(desk, state), optimizer_state, reference)?;
        let needs_first = job.spec.trainer.needs_first_weights();
        let reference = reference.or_else(|| needs_first.then(|| weights.clone()));
        let start = TrainerStart { weights, optimizer_state, reference, seed: job.spec.seed };
        let trainer = context.compute.start_trainer(&config, start, &job.spec.trainer)?;
        // This term may have been led from here before. No start gives out a million episodes in a millisecond.
        let first = if planted::has(Bug::ReissueEpisode) { 0 } else { (context.clock)().0.saturating_mul(1 << 20) };
        let ledger = Ledger::new(job.clone(), term, state.version, tasks);
        let ledger = ledger.of_line(state.lineage.clone()).counting_from(first);
        *desk.open.lock().unwrap_or_else(PoisonError::into_inner) = Some(Open { term, ledger });
        let mismatch_limit = job.spec.trainer.mismatch_kl_alarm;
        let run = Self {
            desk,
            term,
            job,
            trainer,
            state: state.clone(),
            weights: manifest.clone(),
            mismatch: MismatchWatch::new(mismatch_limit),
            alarm: None,
            training: None,
            collecting_since: Instant::now(),
            heard: Instant::now(),
        };
        // What was acknowledged lies on `replication` holders: the former leader, killed a moment ago and not missed yet,
        // keeps nobody waiting. What lies on it alone is listed when it is quiet.
        run.adopt_stored(usize::from(run.job.spec.replication).saturating_sub(1)).await;
        Ok(run)
    }

    /// Takes what the holders have and no announcement brought: at the start of a term, and when it is quiet.
    async fn adopt_stored(&self, unheard_max: usize) {
        let listed = self.desk.context.rollouts.list_unconsumed(self.job.job, unheard_max).await;
        for part in listed.chunks(INTAKE_BATCH) {
            self.admit(part).await;
        }
    }

    async fn admit(&self, announced: &[RolloutAnnouncement]) {
        let fresh: Vec<RolloutAnnouncement> = announced
            .iter()
            .filter(|a| a.job == self.job.job && !self.state.consumed.contains_key(&a.id))
            .cloned()
            .collect();
        if fresh.is_empty() {
            return;
        }
        for v in self.desk.context.rollouts.fetch(&fresh).await {
            let id = v.id;
            if let Some(Admission::Invalid(why)) = self.desk.with_ledger(|l| l.handle_rollout(v)) {
                tracing::warn!(model = %self.desk.model, rollout = %id.short(), %why, "rollout not admitted");
            }
        }
        self.desk.progress.notify_one();
    }

    async fn run(mut self, intake: &mut mpsc::Receiver<RolloutAnnouncement>) -> Result<(), String> {
        let mut beat = tokio::time::interval(BEAT);
        beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut announced = Vec::with_capacity(INTAKE_BATCH);
        loop {
            if let ControlFlow::Break(()) = self.advance().await? {
                return Ok(());
            }
            let trained = async {
                match &mut self.training {
                    Some(t) => (&mut t.done).await.map_err(|_gone| "the trainer's thread ended".to_owned()),
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                stepped = trained => {
                    let training = self.training.take().ok_or("no step was running")?;
                    self.commit(training, stepped??).await?;
                    self.desk.hand_on(true).await?;
                }
                n = intake.recv_many(&mut announced, INTAKE_BATCH) => {
                    if n == 0 { return Err("the node is shutting down".into()); }
                    self.heard = Instant::now();
                    self.admit(&announced).await;
                    announced.clear();
                }
                () = self.desk.progress.notified() => {}
                _ = beat.tick() => self.on_beat().await?,
            }
        }
    }

    async fn on_beat(&mut self) -> Result<(), String> {
        let now = (self.desk.context.clock)();
        self.desk.with_ledger(|l| l.handle_timeout(now));
        let state = self.desk.context.groups.state(&self.desk.model).ok_or("the group is closed")?;
        let (logged, ours) = (state.borrow().version, self.desk.with_ledger(|l| l.version()));
        if Some(logged) != ours {
            return Err(format!("the log stands at version {logged}, which this node did not train"));
        }
        if self.training.is_none() && self.heard.elapsed() > QUIET {
            self.heard = Instant::now();
            self.adopt_stored(0).await;
        }
        if self.training.is_none() { self.desk.hand_on(false).await } else { Ok(()) }
    }

    /// Starts what can start: a step, the end of an evaluation, the end of the job.
    async fn advance(&mut self) -> Result<ControlFlow<()>, String> {
        if let Some(e) = self.desk.with_ledger(|l| l.finished_evaluation()).flatten() {
            tracing::info!(model = %self.desk.model, phase = ?e.phase, version = %e.version, scores = ?e.scores, "evaluated");
            self.propose(ControlEntry::EvaluationCompleted(e.clone())).await?;
            self.desk.with_ledger(|l| l.handle_evaluated(e));
            self.collecting_since = Instant::now();
        }
        if self.desk.with_ledger(|l| l.is_done()) == Some(true) {
            self.propose(ControlEntry::JobEnded { job: self.job.job, end: JobEnd::Finished }).await?;
            *self.desk.open.lock().unwrap_or_else(PoisonError::into_inner) = None;
            tracing::info!(model = %self.desk.model, job = %self.job.job.short(), "job finished");
            return Ok(ControlFlow::Break(()));
        }
        if self.training.is_none()
            && let Some(batch) = self.desk.with_ledger(Ledger::take_batch).flatten()
        {
            if planted::has(Bug::ConsumeBeforeCommit) {
                self.desk.context.rollouts.mark_consumed_early(&batch.consumed(), batch.next);
            }
            let every = self.job.spec.optimizer_state_every;
            let with_optimizer_state = every > 0 && batch.next.steps().is_multiple_of(every);
            let spec = &self.job.spec;
            let done_steps = self.desk.with_ledger(|l| l.job().steps).unwrap_or_default();
            let done = self.trainer.step(StepInput {
                samples: samples_of(&batch, &spec.trainer.algorithm),
                learning_rate: spec.trainer.learning_rate * spec.trainer.schedule.factor(done_steps, spec.steps),
                with_optimizer_state,
            });
            let collect_ms = millis(self.collecting_since);
            self.training = Some(Training { batch, with_optimizer_state, done, collect_ms, since: Instant::now() });
        }
        self.tell();
        Ok(ControlFlow::Continue(()))
    }

    fn tell(&self) {
        let view = self.desk.context.groups.leadership(&self.desk.model).map(|v| v.borrow().clone());
        if let Some(view) = view.filter(|v| !v.is_self) {
            let why = view.wait.unwrap_or_else(|| "no quorum answers".into());
            self.desk.doing(format!("term {} is held up: {why}", self.term));
            return;
        }
        let said = self.desk.with_ledger(|l| match (&self.training, l.evaluation_progress()) {
            (Some(t), _) => format!("training version {}", t.batch.next),
            (None, Some((phase, have, of))) => {
                format!("evaluating ({phase:?}): {have} of {of} episodes, {} running", l.running())
            }
            (None, None) => format!(
                "collecting for version {}: {} of {} whole groups, {} episodes accepted, {} running",
                l.next_version(),
                l.whole_groups(),
                l.job().spec.groups_per_step,
                l.accepted(),
                l.running()
            ),
        });
        if let Some(said) = said {
            self.desk.doing(match &self.alarm {
                Some(alarm) => format!("{said}; {alarm}"),
                None => said,
            });
        }
    }

    /// Stores the new weights, has a second node hold them, and only then proposes the step.
    async fn commit(&mut self, t: Training, stepped: Stepped) -> Result<(), String> {
        let context = &self.desk.context;
        let train_ms = millis(t.since);
        let replicating = Instant::now();
        let bytes = stepped.weights.clone();
        let optimizer_state = stepped.optimizer_state.filter(|_| t.with_optimizer_state);
        // At the same time, so that they share their syncs.
        let (weights, weights_delta, optimizer_state) = futures::try_join!(
            context.blobs.put(stepped.weights),
            context.blobs.put_delta(&self.weights, bytes),
            async {
                match optimizer_state {
                    Some(bytes) => context.blobs.put(bytes).await.map(Some),
                    None => Ok(None),
                }
            }
        )
        .map_err(|e| e.to_string())?;
        let manifests: Vec<Manifest> = std::iter::once(&weights).chain(&optimizer_state).cloned().collect();
        let holders = self.place(manifests, weights_delta.clone()).await?;
        let version = t.batch.next;
        let consumed = t.batch.consumed();
        let mut metrics = metrics_of(&t.batch, &stepped.report);
        if metrics.trained_tokens > 0 {
            metrics.mismatch_alarm = self.mismatch.observe(metrics.mismatch_kl);
            self.alarm = metrics.mismatch_alarm.map(|alarm| {
                let limit = self.job.spec.trainer.mismatch_kl_alarm;
                let (kl, what) = (metrics.mismatch_kl, if alarm == MismatchAlarm::Rising { "rising" } else { "too high" });
                tracing::warn!(model = %self.desk.model, %version, kl, limit, "mismatch of sampler and trainer is {what}");
                format!("mismatch KL {what}: {kl:.2e}, limit {limit}")
            });
        }
        metrics.collect_ms = t.collect_ms;
        metrics.train_ms = train_ms;
        metrics.replicate_ms = millis(replicating);
        let step = StepCommitted {
            job: self.job.job,
            term: self.term,
            parent: t.batch.version,
            version,
            weights: weights.clone(),
            weights_delta,
            optimizer_state,
            holders,
            consumed: consumed.clone(),
            groups_opened: t.batch.groups_opened.clone(),
            at: (context.clock)(),
            metrics,
        };
        let m = &step.metrics;
        let facts = format!(
            "reward {:.3?}, loss {:.4}, gradient {:.3}, mismatch KL {:.2e}, entropy {:.3}, clipped {:.1} %, masked {:.1} %, \
             staleness {:.2}",
            m.reward.values().collect::<Vec<_>>(),
            m.loss,
            m.grad_norm,
            m.mismatch_kl,
            m.entropy,
            100.0 * m.clip_fraction,
            100.0 * m.masked_fraction,
            m.staleness_mean
        );
        self.propose(ControlEntry::StepCommitted(Box::new(step))).await?;
        tracing::info!(model = %self.desk.model, %version, "step committed: {facts}");
        self.weights = weights;
        self.desk.with_ledger(|l| l.handle_committed(version, &consumed));
        self.collecting_since = Instant::now();
        Ok(())
    }

    /// A second holder, the best reachable one; waits, and says so, while a live voter exists but none takes it.
    ///
    /// # Errors
    /// When the weights are no longer here: nothing names them yet, so a wait that is long enough lets them be collected.
    async fn place(&self, manifests: Vec<Manifest>, delta: Option<DeltaManifest>) -> Result<Vec<NodeId>, String> {
        let context = &self.desk.context;
        let local = context.transport.local();
        let key = manifests[0].hash;
        loop {
            let others = context.membership.live_takers().into_iter().filter(|n| *n != local);
            let order = starling_protocol::placement::holders(key, others, usize::MAX);
            // One without a connection may be gone and not missed yet: it is asked last.
            let (near, far): (Vec<_>, Vec<_>) = order.into_iter().partition(|n| context.transport.is_connected(*n));
            let order = [near, far].concat();
            if order.is_empty() {
                // Alone: the group has one voter, or the quorum is lost and the proposal will not pass.
                return Ok(vec![local]);
            }
            for peer in order {
                match context.blobs.place(peer, manifests.clone(), delta.clone()).await {
                    Ok(()) => return Ok(vec![local, peer]),
                    Err(why) => {
                        self.desk.doing(format!("placing new weights: {} does not take them: {why}", peer.short()));
                        tracing::warn!(peer = %peer.short(), %why, "a holder did not take the new weights");
                    }
                }
            }
            tokio::time::sleep(RETRY).await;
            for manifest in &manifests {
                let here = context.blobs.hold(manifest, &[]).await;
                here.map_err(|e| format!("the step is lost with its weights, which waited too long: {e}"))?;
            }
        }
    }

    async fn propose(&self, entry: ControlEntry) -> Result<(), String> {
        if planted::has(Bug::SkipFencing) {
            return self.desk.context.models.propose(&self.desk.model, entry).await.map_err(|e| e.to_string());
        }
        let mut proposed = pin!(self.desk.context.groups.propose_as(&self.desk.model, self.term, entry));
        let outcome = loop {
            match timeout(BEAT, &mut proposed).await {
                Ok(outcome) => break outcome,
                Err(_elapsed) => {
                    let why = self.desk.context.groups.why_nothing_passes(&self.desk.model);
                    self.desk.doing(format!("waiting for a quorum to commit what was proposed: {why}"));
                }
            }
        };
        match outcome {
            Ok(Applied::Yes | Applied::Already) => Ok(()),
            Ok(Applied::Refused(why)) => Err(format!("the log refused it: {why}")),
            Err(e @ ProposeError::Unknown { .. }) => Err(format!("outcome unknown, reading the log again: {e}")),
            Err(e) => Err(e.to_string()),
        }
    }
}

fn millis(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}

async fn load_tasks(desk: &Desk, manifest: &Manifest) -> Result<Vec<Task>, String> {
    let sources = desk.context.models.sources_of(&desk.model);
    let bytes = desk.context.blobs.fetch(manifest, &sources).await.map_err(|e| e.to_string())?;
    read_task_set(&bytes, crate::task_id).map_err(|e| e.to_string())
}

async fn load_config(desk: &Desk, state: &ModelState) -> Result<Vec<u8>, String> {
    let sources = desk.context.models.sources_of(&desk.model);
    let m = state.files.get("config.json").ok_or("the model has no config.json")?;
    desk.context.blobs.fetch(m, &sources).await.map_err(|e| e.to_string())
}
