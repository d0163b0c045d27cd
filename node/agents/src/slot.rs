//! A slot: runs one episode after another, and pauses when the program keeps failing.

use crate::cause::AbortCause;
use crate::config::{AgentMode, RunnerConfig};
use crate::host::EpisodeStart;
use crate::launch::Launcher;
use crate::process::Process;
use crate::report::EpisodeReport;
use crate::stats::StatsCell;
use crate::{per_episode, worker};
use starling_protocol::EpisodeId;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout};

/// What all slots of a runner have in common.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: RunnerConfig,
    pub(crate) launcher: Launcher,
    pub(crate) stats: Arc<StatsCell>,
    /// Newest failure that was logged, so that the same one is not logged over and over.
    pub(crate) logged: Mutex<String>,
}

/// Why an episode must stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    Revoked,
    Shutdown,
}

impl Stop {
    pub(crate) fn cause(self) -> AbortCause {
        match self {
            Self::Revoked => AbortCause::Revoked,
            Self::Shutdown => AbortCause::Shutdown,
        }
    }
}

/// What the runner tells an episode while it goes on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Control {
    pub(crate) stop: Option<Stop>,
    pub(crate) lease_until: Instant,
}

/// Returns when the episode must stop. Cancel-safe.
pub(crate) async fn stopped(control: &mut watch::Receiver<Control>) -> AbortCause {
    let stop = control.wait_for(|c| c.stop.is_some()).await.map(|c| c.stop);
    // An error means that the runner is gone.
    stop.ok().flatten().unwrap_or(Stop::Shutdown).cause()
}

/// An episode for a slot.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) start: EpisodeStart,
    pub(crate) control: watch::Receiver<Control>,
}

/// What a slot tells the runner.
#[derive(Debug)]
pub(crate) enum SlotEvent {
    /// It can take an episode.
    Ready(usize),
    /// It no longer can: its worker ended while it had nothing to do.
    Unready(usize),
    /// It is done with an episode. A `Ready` follows when it can take another.
    Done(usize, EpisodeId, Result<EpisodeReport, AbortCause>),
}

/// First pause after the program failed twice in a row in a slot; doubles.
const PAUSE_MIN: Duration = Duration::from_millis(100);
/// Longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// How long to pause after `failures` in a row. One is forgiven: programs do crash.
fn pause(failures: u32) -> Duration {
    match failures {
        0 | 1 => Duration::ZERO,
        n => PAUSE_MAX.min(PAUSE_MIN * 2u32.pow((n - 2).min(10))),
    }
}

/// One slot; ends when the runner closes it.
#[derive(Debug)]
pub(crate) struct Slot {
    index: usize,
    shared: Arc<Shared>,
    jobs: mpsc::Receiver<Job>,
    events: mpsc::Sender<SlotEvent>,
    /// Failures of the program since its last success.
    failures: u32,
    /// Workers started so far.
    launches: u64,
    worker: Option<Process>,
    /// True when no more episodes come.
    closing: watch::Receiver<bool>,
}

impl Slot {
    pub(crate) fn new(
        index: usize,
        shared: Arc<Shared>,
        jobs: mpsc::Receiver<Job>,
        events: mpsc::Sender<SlotEvent>,
        closing: watch::Receiver<bool>,
    ) -> Self {
        Self { index, shared, jobs, events, failures: 0, launches: 0, worker: None, closing }
    }

    pub(crate) async fn run(mut self) {
        while let Some(Job { start, mut control }) = self.next_job().await {
            let episode = start.episode;
            let result = self.run_job(&start, &mut control).await;
            match &result {
                Ok(_) => self.failures = 0,
                Err(cause) if cause.blames_agent() => self.note_failure(cause),
                Err(_) => {}
            }
            if self.events.send(SlotEvent::Done(self.index, episode, result)).await.is_err() {
                break;
            }
        }
        self.jobs.close();
        // A job that came while the worker was being replaced is owed an answer.
        while let Some(Job { start, .. }) = self.jobs.recv().await {
            let done = SlotEvent::Done(self.index, start.episode, Err(AbortCause::Shutdown));
            let _runner_gone = self.events.send(done).await;
        }
        self.drop_worker().await;
    }

    /// Makes ready, says so, and waits. `None` when the runner has closed the slot.
    async fn next_job(&mut self) -> Option<Job> {
        loop {
            if !self.make_ready().await {
                return None;
            }
            self.events.send(SlotEvent::Ready(self.index)).await.ok()?;
            let Some(worker) = &mut self.worker else {
                return self.jobs.recv().await;
            };
            let why = tokio::select! {
                biased;
                job = self.jobs.recv() => return job,
                why = worker::idle(worker) => why,
            };
            // The runner may have sent a job at this very moment; then it waits in the channel until the new worker is
            // there, and the runner ignores what the slot says in between.
            self.events.send(SlotEvent::Unready(self.index)).await.ok()?;
            let stderr = worker.stderr_tail("");
            self.note_failure(&format_args!("agent worker cannot be used any more: {why}{stderr}"));
            self.drop_worker().await;
        }
    }

    /// Pauses as long as the program's failures ask for and starts a worker if one is needed. `false` when closed.
    async fn make_ready(&mut self) -> bool {
        loop {
            let pause = pause(self.failures);
            if !pause.is_zero() {
                // Closing ends the pause early; the runner being gone counts as closing.
                let _closed_or_over = timeout(pause, self.closing.wait_for(|c| *c)).await;
            }
            if *self.closing.borrow() {
                return false;
            }
            // Some programs end after a number of episodes on purpose.
            if self.worker.as_ref().is_some_and(|w| w.exit.has_ended()) {
                self.drop_worker().await;
            }
            if self.shared.config.mode == AgentMode::PerEpisode || self.worker.is_some() {
                return true;
            }
            match self.shared.launcher.launch(Vec::new()).await {
                Ok(process) => {
                    self.worker = Some(process);
                    if self.launches > 0 {
                        self.shared.stats.update(|s| s.worker_restarts += 1);
                    }
                    self.launches += 1;
                    return true;
                }
                Err(cause) => self.note_failure(&cause),
            }
        }
    }

    async fn run_job(
        &mut self,
        start: &EpisodeStart,
        control: &mut watch::Receiver<Control>,
    ) -> Result<EpisodeReport, AbortCause> {
        let shared = Arc::clone(&self.shared);
        if shared.config.sets.as_ref().is_some_and(|sets| !sets.contains(&start.set)) {
            return Err(AbortCause::ForeignSet { set: start.set.clone() });
        }
        let Some(worker) = &mut self.worker else {
            return per_episode::run_episode(&shared, start, control).await;
        };
        let (result, usable) = worker::run_episode(&shared, worker, start, control).await;
        if !usable {
            self.drop_worker().await;
        }
        result
    }

    async fn drop_worker(&mut self) {
        if let Some(mut worker) = self.worker.take() {
            // Closing its input asks it to end; then the group is ended anyway.
            drop(worker.stdin.take());
            worker.terminate(self.shared.config.kill_grace).await;
            worker.discard().await;
        }
    }

    fn note_failure(&mut self, failure: &dyn std::fmt::Display) {
        self.failures = self.failures.saturating_add(1);
        let pause = pause(self.failures);
        let text = failure.to_string();
        let (slot, in_a_row) = (self.index, self.failures);
        let new = {
            let mut logged = self.shared.logged.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *logged, text.clone()) != text
        };
        if new {
            tracing::warn!(slot, in_a_row, ?pause, "{text}");
        } else {
            tracing::debug!(slot, in_a_row, ?pause, "{text}");
        }
        let text = if pause.is_zero() { text } else { format!("{text} (slot {slot} pauses {pause:?})") };
        self.shared.stats.update(|s| s.last_failure = Some(text));
    }
}
