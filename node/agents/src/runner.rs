//! Keeps the slots busy: claims episodes, renews their leases, hands results to the host.

use crate::cause::AbortCause;
use crate::config::{ConfigError, RunnerConfig};
use crate::host::{ClaimOutcome, EpisodeHost, EpisodeStart};
use crate::launch::Launcher;
use crate::report::EpisodeReport;
use crate::slot::{Control, Job, Shared, Slot, SlotEvent, Stop, stopped};
use crate::stats::{RunnerStats, StatsCell};
use starling_protocol::EpisodeId;
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

/// Pause after a claim that brought too little; doubles up to the longest.
const CLAIM_PAUSE_MIN: Duration = Duration::from_millis(50);
/// Longest pause between claims.
const CLAIM_PAUSE_MAX: Duration = Duration::from_millis(500);
/// Shortest time between two renewals, whatever the lease's length.
const RENEWAL_MIN: Duration = Duration::from_millis(20);
/// Pause between attempts to end an episode; doubles up to the longest.
const END_PAUSE_MIN: Duration = Duration::from_millis(50);
/// Longest pause between attempts to end an episode.
const END_PAUSE_MAX: Duration = Duration::from_secs(1);
/// On shutdown: how long a claim and the ends under way may still take.
const FAREWELL: Duration = Duration::from_secs(3);

/// Why a runner did not start. Changes nothing; the operator's to correct.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// A setting is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The thread that starts programs could not be started.
    #[error("agent runner: could not start its launcher")]
    Launcher(#[source] std::io::Error),
}

/// Runs agent programs for the episodes of a host.
#[derive(Clone, Debug)]
pub struct Runner {
    config: RunnerConfig,
    stats: Arc<StatsCell>,
}

impl Runner {
    /// Checks the settings.
    ///
    /// # Errors
    /// [`ConfigError`] for the first one that is wrong.
    pub fn new(config: RunnerConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Self { config, stats: Arc::default() })
    }

    /// Counters so far. Cheap enough for a dashboard.
    #[must_use]
    pub fn stats(&self) -> RunnerStats {
        self.stats.update(|s| s.clone())
    }

    /// Runs episodes until `shutdown` resolves. Then programs are ended, what they were doing is aborted, ends that are
    /// under way get 3 s, and no process is left when this returns.
    ///
    /// Dropping the future kills the programs as well, but tells the host nothing.
    ///
    /// # Errors
    /// [`RunError`] when it could not start.
    pub async fn run(
        &self,
        host: Arc<dyn EpisodeHost>,
        shutdown: impl Future<Output = ()> + Send,
    ) -> Result<(), RunError> {
        self.config.validate()?;
        let launcher = Launcher::start(&self.config).map_err(RunError::Launcher)?;
        let shared = Arc::new(Shared {
            config: self.config.clone(),
            launcher,
            stats: Arc::clone(&self.stats),
            logged: Mutex::default(),
        });
        let mut desk = Desk::open(host, &shared);
        desk.serve(shutdown).await;
        desk.close().await;
        if let Some(shared) = Arc::into_inner(shared) {
            shared.launcher.stop().await;
        }
        Ok(())
    }
}

type Claiming = Pin<Box<dyn Future<Output = ClaimReply> + Send>>;

/// A claim's outcome with what was asked.
struct ClaimReply {
    want: usize,
    asked: Vec<EpisodeId>,
    asked_at: Instant,
    outcome: ClaimOutcome,
}

/// An episode that was handed out and not answered yet.
struct Open {
    control: watch::Sender<Control>,
    lease_ttl: Duration,
}

/// A slot as the runner sees it.
struct SlotEntry {
    jobs: mpsc::Sender<Job>,
    busy: bool,
}

/// The runner's state while it runs. Every episode in `open` is either in a slot or in `ending`.
struct Desk {
    host: Arc<dyn EpisodeHost>,
    stats: Arc<StatsCell>,
    slots: Vec<SlotEntry>,
    ready: BTreeSet<usize>,
    open: BTreeMap<EpisodeId, Open>,
    ending: JoinSet<EpisodeId>,
    slot_tasks: JoinSet<()>,
    events: mpsc::Receiver<SlotEvent>,
    closing: watch::Sender<bool>,
    claim: Option<Claiming>,
    renewal: Option<Claiming>,
    claim_pause: Duration,
    claim_not_before: Instant,
    renew_at: Instant,
}

impl Desk {
    fn open(host: Arc<dyn EpisodeHost>, shared: &Arc<Shared>) -> Self {
        let slots = shared.config.slots;
        // At most three events of a slot are on their way: done, ready, unready.
        let (tell, events) = mpsc::channel(3 * slots);
        let (closing, closed) = watch::channel(false);
        let mut slot_tasks = JoinSet::new();
        let entries = (0..slots).map(|index| {
            let (jobs, inbox) = mpsc::channel(1);
            let slot = Slot::new(index, Arc::clone(shared), inbox, tell.clone(), closed.clone());
            slot_tasks.spawn(slot.run());
            SlotEntry { jobs, busy: false }
        });
        Self {
            host,
            stats: Arc::clone(&shared.stats),
            slots: entries.collect(),
            ready: BTreeSet::new(),
            open: BTreeMap::new(),
            ending: JoinSet::new(),
            slot_tasks,
            events,
            closing,
            claim: None,
            renewal: None,
            claim_pause: Duration::ZERO,
            claim_not_before: Instant::now(),
            renew_at: Instant::now(),
        }
    }

    async fn serve(&mut self, shutdown: impl Future<Output = ()> + Send) {
        tokio::pin!(shutdown);
        loop {
            let want = self.want();
            let claim_due = want > 0 && self.claim.is_none();
            let renewal_due = !self.open.is_empty() && self.renewal.is_none();
            tokio::select! {
                () = &mut shutdown => return,
                Some(event) = self.events.recv() => {
                    self.on_slot(event);
                    // Slots that got free together are filled with one claim.
                    while let Ok(event) = self.events.try_recv() {
                        self.on_slot(event);
                    }
                }
                Some(done) = self.ending.join_next() => self.on_answered(done),
                Some(ended) = self.slot_tasks.join_next() => on_slot_end(ended),
                reply = poll(&mut self.claim), if self.claim.is_some() => {
                    self.claim = None;
                    self.on_claim(reply);
                }
                reply = poll(&mut self.renewal), if self.renewal.is_some() => {
                    self.renewal = None;
                    self.on_leases(&reply);
                }
                () = sleep_until(self.claim_not_before), if claim_due => self.claim = Some(self.ask(want)),
                () = sleep_until(self.renew_at), if renewal_due => self.renewal = Some(self.ask(0)),
            }
        }
    }

    /// How many episodes there is room for. Ends that the host is slow to accept hold new episodes back once there are
    /// as many as slots, so that what is open stays within twice the slots.
    fn want(&self) -> usize {
        self.ready.len().min((2 * self.slots.len()).saturating_sub(self.open.len()))
    }

    fn ask(&mut self, want: usize) -> Claiming {
        let host = Arc::clone(&self.host);
        let asked: Vec<_> = self.open.keys().copied().collect();
        let asked_at = Instant::now();
        if want == 0 {
            self.schedule_renewal(asked_at);
        }
        Box::pin(async move {
            let outcome = host.claim(want, &asked).await;
            ClaimReply { want, asked, asked_at, outcome }
        })
    }

    /// Claims mostly renew, too, so the next renewal counts from the newest that did.
    fn schedule_renewal(&mut self, asked_at: Instant) {
        let shortest = self.open.values().map(|o| o.lease_ttl).min();
        self.renew_at = asked_at + shortest.map_or(Duration::from_secs(1), |ttl| (ttl / 3).max(RENEWAL_MIN));
    }

    fn on_claim(&mut self, mut reply: ClaimReply) {
        self.on_leases(&reply);
        let episodes = std::mem::take(&mut reply.outcome.episodes);
        let (got, want) = (episodes.len(), reply.want);
        for start in episodes {
            self.take(start, reply.asked_at);
        }
        if reply.outcome.renewed {
            self.schedule_renewal(reply.asked_at);
        }
        if got >= want {
            self.claim_pause = Duration::ZERO;
            self.note_wait(None);
            return;
        }
        let reason = reply.outcome.wait.take();
        self.note_wait(Some(reason.unwrap_or_else(|| format!("the host gave {got} of {want} and no reason"))));
        self.claim_pause = match got {
            0 => (self.claim_pause * 2).clamp(CLAIM_PAUSE_MIN, CLAIM_PAUSE_MAX),
            _ => CLAIM_PAUSE_MIN,
        };
        self.claim_not_before = Instant::now() + self.claim_pause;
    }

    fn on_leases(&mut self, ClaimReply { asked, asked_at, outcome, .. }: &ClaimReply) {
        if outcome.renewed {
            for open in asked.iter().filter_map(|id| self.open.get(id)) {
                // From the time of asking: the keeper's clock cannot have started earlier.
                open.control.send_modify(|c| c.lease_until = c.lease_until.max(*asked_at + open.lease_ttl));
            }
        }
        for id in &outcome.revoked {
            if let Some(open) = self.open.get(id) {
                tracing::info!(episode = %id, "lease revoked");
                open.control.send_modify(|c| c.stop = Some(Stop::Revoked));
            }
        }
    }

    fn note_wait(&mut self, reason: Option<String>) {
        let changed = self.stats.update(|s| {
            let changed = s.wait != reason;
            s.wait.clone_from(&reason);
            changed
        });
        match (changed, reason) {
            (true, Some(reason)) => tracing::info!(reason, "agents wait for episodes"),
            (true, None) => tracing::info!("agents have episodes again"),
            (false, _) => {}
        }
    }

    /// Gives an episode to a slot.
    fn take(&mut self, start: EpisodeStart, asked_at: Instant) {
        let episode = start.episode;
        let Some(control) = self.enter(&start, asked_at) else { return };
        let job = Job { start, control };
        let slot = self.ready.pop_first().and_then(|index| self.slots.get_mut(index));
        // A slot that is not busy has an empty channel.
        let given = slot.is_some_and(|slot| {
            slot.busy = slot.jobs.try_send(job).is_ok();
            slot.busy
        });
        if !given {
            self.answer(episode, Err(AbortCause::Surplus));
        }
        self.count_open();
    }

    /// Books an episode that was handed out; from here on it is owed an answer.
    fn enter(&mut self, start: &EpisodeStart, asked_at: Instant) -> Option<watch::Receiver<Control>> {
        let (episode, lease_ttl) = (start.episode, start.lease_ttl);
        if self.open.contains_key(&episode) {
            tracing::warn!(%episode, "handed out although it is running here: ignored");
            return None;
        }
        let (control, follow) = watch::channel(Control { stop: None, lease_until: asked_at + lease_ttl });
        self.open.insert(episode, Open { control, lease_ttl });
        self.stats.update(|s| s.started += 1);
        Some(follow)
    }

    fn on_slot(&mut self, event: SlotEvent) {
        match event {
            // A busy slot's word is out of date: it did not know yet of the job that it has.
            SlotEvent::Ready(index) => {
                if self.slots.get(index).is_some_and(|s| !s.busy) {
                    self.ready.insert(index);
                }
            }
            SlotEvent::Unready(index) => {
                self.ready.remove(&index);
            }
            SlotEvent::Done(index, episode, result) => {
                if let Some(slot) = self.slots.get_mut(index) {
                    slot.busy = false;
                }
                self.answer(episode, result);
                self.count_open();
            }
        }
    }

    /// Tells the host how an episode went, beside everything else: it may take as long as the host likes.
    fn answer(&mut self, episode: EpisodeId, result: Result<EpisodeReport, AbortCause>) {
        let Some(open) = self.open.get(&episode) else { return };
        let (host, stats, control) = (Arc::clone(&self.host), Arc::clone(&self.stats), open.control.subscribe());
        self.ending.spawn(async move {
            let answered = match result {
                Ok(report) => end(&*host, episode, report, control).await,
                Err(cause) => Err(cause),
            };
            match answered {
                Ok(()) => stats.update(|s| s.ended += 1),
                Err(cause) => {
                    tracing::debug!(%episode, %cause, "episode given up");
                    stats.aborted(&cause);
                    host.abort(episode, cause.to_string()).await;
                }
            }
            episode
        });
    }

    fn on_answered(&mut self, done: Result<EpisodeId, tokio::task::JoinError>) {
        match done {
            Ok(episode) => {
                self.open.remove(&episode);
            }
            // The host panicked. Its episode stays open until the lease runs out, which is what a dead node looks like.
            Err(err) => tracing::error!(%err, "episode host failed"),
        }
        self.count_open();
    }

    fn count_open(&self) {
        let running = self.slots.iter().filter(|s| s.busy).count();
        let ending = self.open.len().saturating_sub(running);
        self.stats.update(|s| (s.running, s.ending) = (running, ending));
    }

    /// Ends every program and answers for every episode.
    async fn close(&mut self) {
        self.closing.send_replace(true);
        for open in self.open.values() {
            open.control.send_modify(|c| c.stop = c.stop.or(Some(Stop::Shutdown)));
        }
        if self.claim.is_some()
            && let Ok(reply) = timeout(FAREWELL, poll(&mut self.claim)).await
        {
            // What the host gave out while we were leaving is owed an answer too.
            for start in reply.outcome.episodes {
                if self.enter(&start, reply.asked_at).is_some() {
                    self.answer(start.episode, Err(AbortCause::Shutdown));
                }
            }
        }
        // Without senders the slots end; their last words are still heard.
        for slot in &mut self.slots {
            slot.jobs = mpsc::channel(1).0;
        }
        loop {
            tokio::select! {
                Some(event) = self.events.recv() => self.on_slot(event),
                Some(done) = self.ending.join_next() => self.on_answered(done),
                Some(ended) = self.slot_tasks.join_next() => on_slot_end(ended),
                else => break,
            }
        }
    }
}

async fn poll(claim: &mut Option<Claiming>) -> ClaimReply {
    match claim {
        Some(claim) => claim.await,
        None => std::future::pending().await,
    }
}

fn on_slot_end(ended: Result<(), tokio::task::JoinError>) {
    if let Err(err) = ended {
        tracing::error!(%err, "a slot of the agent runner failed; it takes no more episodes");
    }
}

/// Ends an episode, again and again while its lease is valid.
async fn end(
    host: &dyn EpisodeHost,
    episode: EpisodeId,
    report: EpisodeReport,
    mut control: watch::Receiver<Control>,
) -> Result<(), AbortCause> {
    let lease = control.clone();
    let give_up = async {
        let cause = stopped(&mut control).await;
        if cause == AbortCause::Shutdown {
            tokio::time::sleep(FAREWELL).await;
        }
        cause
    };
    let attempts = async {
        let mut pause = END_PAUSE_MIN;
        loop {
            let Err(last_error) = host.end(episode, report.reward, report.metrics.clone()).await else { return Ok(()) };
            let next = Instant::now() + pause;
            if next >= lease.borrow().lease_until {
                tracing::warn!(%episode, last_error, "an episode's end was not accepted while its lease was valid");
                return Err(AbortCause::EndRefused { last_error });
            }
            tracing::debug!(%episode, last_error, ?pause, "the episode's end was not accepted, trying again");
            sleep_until(next).await;
            pause = (pause * 2).min(END_PAUSE_MAX);
        }
    };
    tokio::select! {
        biased;
        done = attempts => done,
        cause = give_up => Err(cause),
    }
}
