//! Begin, end and abort of episodes; the HTTP routes and the agent runner share them.

use crate::api::openai_responses::ResponseStore;
use crate::backend::{Backend, BackendError, ClaimError, ClaimRequest, SealError};
use crate::episode::{Episode, EpisodeTable, Stage};
use crate::http::Replies;
use serde::Serialize;
use starling_protocol::assignment::Assignment;
use starling_protocol::rollout::Rollout;
use starling_protocol::{EpisodeId, EpisodeKey, RolloutId, Timestamp};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Semaphore;

/// Settings of the service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayConfig {
    /// Where agents of this machine reach the routes, `/v1` included.
    pub base_url: String,
    /// Whether chat is answered outside an episode, unrecorded. Meant for a service that only this machine reaches.
    pub open_inference: bool,
    /// Bearer token for beginning episodes and listing all of them; without one, whoever reaches the port may.
    pub admin_token: Option<String>,
    /// Longest request body. Worst case in memory: twice this times [`GatewayConfig::in_flight_max`].
    pub body_len_bytes_max: usize,
    /// Calls answered at a time; more are refused, not queued.
    pub in_flight_max: usize,
    /// A call fails when the engine is silent for so long.
    pub frame_timeout: Duration,
    /// A stream without an event for so long gets a sign of life, so that proxies and clients do not give up on it.
    pub heartbeat: Duration,
    /// Bytes of conversations that `previous_response_id` can go on from: in each episode, and outside all episodes.
    pub responses_len_bytes_max: usize,
    /// An episode without a call for so long is given back by [`Gateway::reap`].
    pub episode_idle_max: Duration,
    /// Ended episodes that are remembered, so that a repeated end gets the same answer. About 1 KiB each.
    pub ended_kept: usize,
}

impl Default for GatewayConfig {
    fn default() -> Self {
        Self {
            base_url: "http://127.0.0.1:10086/v1".into(),
            open_inference: true,
            admin_token: None,
            body_len_bytes_max: 8 << 20,
            in_flight_max: 1024,
            frame_timeout: Duration::from_secs(300),
            heartbeat: Duration::from_secs(15),
            responses_len_bytes_max: 16 << 20,
            episode_idle_max: Duration::from_secs(900),
            ended_kept: 4096,
        }
    }
}

/// An episode that was begun here.
#[derive(Clone, Debug)]
pub struct EpisodeHandle {
    /// What is to be done.
    pub assignment: Assignment,
    /// The agent's key.
    pub key: EpisodeKey,
    /// The agent's base URL.
    pub base_url: String,
}

/// Why an episode did not begin.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BeginError {
    /// None was to be had.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// The model's templates or tokenizer cannot be had. The lease was given back.
    #[error("the model's chat format is not available: {0}")]
    Format(#[from] BackendError),
}

/// Why an end was refused. The episode stays open except where the variant says otherwise.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum EndError {
    /// Never begun here, or long over.
    #[error("episode {0} is not known here")]
    Unknown(EpisodeId),
    /// A number that cannot be stored. The caller's fault.
    #[error("field `{field}`: expected a finite 32-bit number, got {got}")]
    NotFinite {
        /// `reward` or `metrics.<name>`.
        field: String,
        /// Its value.
        got: f64,
    },
    /// The caller believes it ran another task.
    #[error("field `task_id`: this episode's task is {expected:?}, got {got:?}")]
    WrongTask {
        /// The assignment's.
        expected: String,
        /// The caller's.
        got: String,
    },
    /// It was aborted, and why.
    #[error("episode {episode} was aborted: {cause}")]
    Aborted {
        /// The episode.
        episode: EpisodeId,
        /// The cause.
        cause: String,
    },
    /// Somebody else has the lease; the episode is over here.
    #[error("the lease of episode {0} was lost; the episode is given to another")]
    LeaseLost(EpisodeId),
    /// Not acknowledged. Unless the lease is lost, the same end may be sent again.
    #[error(transparent)]
    Seal(#[from] SealError),
}

/// Why an abort was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AbortError {
    /// Never begun here, or long over.
    #[error("episode {0} is not known here")]
    Unknown(EpisodeId),
    /// Its rollout is sealed or being sealed.
    #[error("episode {0} has ended")]
    Ended(EpisodeId),
}

/// An episode as `GET /v1/episodes` shows it; never its key.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EpisodeInfo {
    /// Which.
    pub episode: EpisodeId,
    /// `open`, `ending`, `ended` or `aborted`.
    pub state: &'static str,
    /// Its rollout, once acknowledged.
    pub rollout: Option<RolloutId>,
    /// Why it was aborted.
    pub cause: Option<String>,
    /// Its job.
    pub job: starling_protocol::JobId,
    /// Its model.
    pub model: starling_protocol::ModelName,
    /// Its task.
    pub task_id: String,
    /// Training or evaluation.
    pub purpose: starling_protocol::assignment::Purpose,
    /// Who runs it.
    pub agent: String,
    /// Calls recorded.
    pub turns: usize,
    /// Timelines so far.
    pub timelines: usize,
    /// Calls under way.
    pub in_flight: u32,
    /// Milliseconds since the epoch.
    pub started: Timestamp,
    /// Milliseconds since the epoch.
    pub last_activity: Timestamp,
}

pub(crate) struct Inner {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) config: GatewayConfig,
    pub(crate) in_flight: Arc<Semaphore>,
    /// Calls that may be repetitions, before their route has them; as many as may be answered at a time.
    pub(crate) arriving: Arc<Semaphore>,
    /// Of callers outside an episode.
    pub(crate) responses: Mutex<ResponseStore>,
    episodes: Mutex<EpisodeTable>,
}

impl Inner {
    pub(crate) fn episodes(&self) -> MutexGuard<'_, EpisodeTable> {
        self.episodes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The service. Clones share one state.
#[derive(Clone)]
pub struct Gateway(pub(crate) Arc<Inner>);

impl fmt::Debug for Gateway {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gateway").field("config", &self.0.config).finish_non_exhaustive()
    }
}

impl Gateway {
    /// A service without episodes.
    #[must_use]
    pub fn new(backend: Arc<dyn Backend>, config: GatewayConfig) -> Self {
        let places = || Arc::new(Semaphore::new(config.in_flight_max.min(Semaphore::MAX_PERMITS)));
        let (in_flight, arriving) = (places(), places());
        let (responses, episodes) = (Mutex::default(), Mutex::default());
        Self(Arc::new(Inner { backend, config, in_flight, arriving, responses, episodes }))
    }

    /// The HTTP routes under `/v1`.
    pub fn router(&self) -> axum::Router {
        crate::http::router(self.clone())
    }

    /// Leases an episode and opens it.
    ///
    /// # Errors
    /// [`BeginError`] when there is none.
    pub async fn begin(&self, filter: ClaimRequest, agent: impl Into<String>) -> Result<EpisodeHandle, BeginError> {
        let assignment = self.0.backend.claim(filter).await?;
        self.begin_with(assignment, agent).await
    }

    /// Opens an episode that the node has leased already.
    ///
    /// # Errors
    /// [`BeginError::Format`] when its model's templates cannot be had; the lease is given back.
    pub async fn begin_with(
        &self,
        assignment: Assignment,
        agent: impl Into<String>,
    ) -> Result<EpisodeHandle, BeginError> {
        let backend = &self.0.backend;
        let format = match backend.chat_format(&assignment.model).await {
            Ok(format) => format,
            Err(e) => {
                backend.abort(&assignment, format!("chat format: {e}")).await;
                return Err(e.into());
            }
        };
        let episode = Arc::new(Episode::new(assignment, agent.into(), format, backend.now()));
        let handle = EpisodeHandle {
            assignment: episode.assignment.clone(),
            key: episode.key.clone(),
            base_url: self.0.config.base_url.clone(),
        };
        tracing::debug!(episode = %episode.id(), agent = %episode.agent, "episode began");
        self.0.episodes().insert(episode);
        Ok(handle)
    }

    /// Ends an episode: its rollout is sealed and held durably when this returns. A second end gets the first
    /// one's rollout, whatever it says. Once under way it completes even if the returned future is dropped.
    ///
    /// # Errors
    /// [`EndError`]; the episode stays open for a correct end, unless it was aborted or its lease was lost.
    pub async fn end(
        &self,
        episode: EpisodeId,
        reward: f64,
        metrics: BTreeMap<String, f64>,
    ) -> Result<RolloutId, EndError> {
        self.end_task(episode, reward, metrics, None).await
    }

    pub(crate) async fn end_task(
        &self,
        id: EpisodeId,
        reward: f64,
        metrics: BTreeMap<String, f64>,
        task_id: Option<&str>,
    ) -> Result<RolloutId, EndError> {
        let episode = self.0.episodes().get(id).ok_or(EndError::Unknown(id))?;
        let expected = &episode.assignment.task.id;
        if let Some(got) = task_id.filter(|got| got != expected) {
            return Err(EndError::WrongTask { expected: expected.clone(), got: got.to_owned() });
        }
        let reward = finite(reward, || "reward".into())?;
        let metrics = metrics
            .into_iter()
            .map(|(name, v)| finite(v, || format!("metrics.{name}")).map(|v| (name, v)))
            .collect::<Result<BTreeMap<_, _>, _>>()?;
        let turn = Arc::clone(&episode.ending).lock_owned().await;
        let gateway = self.clone();
        let sealing = tokio::spawn(async move {
            let result = gateway.seal(&episode, reward, metrics).await;
            drop(turn);
            result
        });
        match sealing.await {
            Ok(result) => result,
            Err(e) => Err(SealError::Storage(format!("sealing failed: {e}")).into()),
        }
    }

    async fn seal(
        &self,
        episode: &Arc<Episode>,
        reward: f32,
        metrics: BTreeMap<String, f32>,
    ) -> Result<RolloutId, EndError> {
        let backend = &self.0.backend;
        let id = episode.id();
        match &episode.state().stage {
            Stage::Open | Stage::Ending => {}
            Stage::Ended(rollout) => return Ok(*rollout),
            Stage::Aborted(cause) => return Err(EndError::Aborted { episode: id, cause: cause.clone() }),
        }
        if !backend.still_leased(id) {
            self.close(episode, Stage::Aborted("the lease was lost".into()));
            return Err(EndError::LeaseLost(id));
        }
        let now = backend.now();
        let mut rollout = Rollout::begin(&episode.assignment, backend.node(), episode.agent.clone(), episode.started);
        {
            let mut state = episode.state();
            // An abort may have come first.
            if let Stage::Aborted(cause) = &state.stage {
                return Err(EndError::Aborted { episode: id, cause: cause.clone() });
            }
            state.stage = Stage::Ending;
            rollout.ended = *state.ended.get_or_insert(now);
            (rollout.timelines, rollout.turns) = state.tree.timelines();
        }
        episode.closed.send_replace(true);
        rollout.reward = reward;
        rollout.metrics = metrics;
        match backend.seal(rollout).await {
            Ok(rollout) => {
                tracing::debug!(episode = %id, %rollout, reward, "episode ended");
                self.close(episode, Stage::Ended(rollout));
                Ok(rollout)
            }
            Err(e @ SealError::LeaseLost(_)) => {
                self.close(episode, Stage::Aborted(e.to_string()));
                Err(e.into())
            }
            Err(e) => {
                tracing::warn!(episode = %id, error = %e, "episode's end is not acknowledged");
                episode.state().stage = Stage::Open;
                episode.closed.send_replace(false);
                Err(e.into())
            }
        }
    }

    /// Gives an episode up. Calls under way end with an error. A second abort changes nothing.
    ///
    /// # Errors
    /// [`AbortError`] when it is not known or has ended.
    pub async fn abort(&self, id: EpisodeId, cause: impl Into<String>) -> Result<(), AbortError> {
        let cause = cause.into();
        let episode = self.0.episodes().get(id).ok_or(AbortError::Unknown(id))?;
        {
            let mut state = episode.state();
            match &state.stage {
                Stage::Open => state.stage = Stage::Aborted(cause.clone()),
                Stage::Aborted(_) => return Ok(()),
                Stage::Ending | Stage::Ended(_) => return Err(AbortError::Ended(id)),
            }
        }
        tracing::debug!(episode = %id, cause, "episode aborted");
        self.close(&episode, Stage::Aborted(cause.clone()));
        self.0.backend.abort(&episode.assignment, cause).await;
        Ok(())
    }

    /// Closes an episode for good and lets its tokens go.
    fn close(&self, episode: &Arc<Episode>, stage: Stage) {
        {
            let mut state = episode.state();
            state.stage = stage;
            state.tree = starling_protocol::timeline::TimelineTree::default();
            state.responses = ResponseStore::default();
            state.replies = Replies::default();
        }
        episode.closed.send_replace(true);
        self.0.episodes().over(episode.id(), self.0.config.ended_kept);
    }

    /// Gives up episodes whose lease is lost or whose agent has been silent for too long, and returns them. For
    /// the node to call every few seconds.
    pub async fn reap(&self) -> Vec<EpisodeId> {
        let backend = &self.0.backend;
        let now = backend.now();
        let mut reaped = Vec::new();
        let episodes = self.0.episodes().all();
        for episode in episodes {
            let idle = {
                let state = episode.state();
                if state.stage != Stage::Open {
                    continue;
                }
                now.since(state.last_activity)
            };
            let cause = if !backend.still_leased(episode.id()) {
                "the lease was lost".to_owned()
            } else if idle > self.0.config.episode_idle_max && episode.in_flight.load(Ordering::Relaxed) == 0 {
                format!("no call for {} s", idle.as_secs())
            } else {
                continue;
            };
            if self.abort(episode.id(), cause).await.is_ok() {
                reaped.push(episode.id());
            }
        }
        reaped
    }

    /// Episodes whose leases are needed: open ones and those whose rollout is being stored.
    #[must_use]
    pub fn running(&self) -> Vec<EpisodeId> {
        let all = self.0.episodes().all();
        all.iter().filter(|e| matches!(e.state().stage, Stage::Open | Stage::Ending)).map(|e| e.id()).collect()
    }

    /// Every episode known here, newest first.
    #[must_use]
    pub fn episodes(&self) -> Vec<EpisodeInfo> {
        let all = self.0.episodes().all();
        let mut list: Vec<EpisodeInfo> = all.iter().map(|e| info(e)).collect();
        list.sort_by_key(|e| std::cmp::Reverse((e.started, e.episode)));
        list
    }
}

pub(crate) fn info(episode: &Episode) -> EpisodeInfo {
    let state = episode.state();
    let a = &episode.assignment;
    EpisodeInfo {
        episode: a.episode,
        state: state.stage.name(),
        rollout: if let Stage::Ended(id) = state.stage { Some(id) } else { None },
        cause: if let Stage::Aborted(cause) = &state.stage { Some(cause.clone()) } else { None },
        job: a.job,
        model: a.model.clone(),
        task_id: a.task.id.clone(),
        purpose: a.purpose,
        agent: episode.agent.clone(),
        turns: state.tree.turns(),
        timelines: state.tree.leaves(),
        in_flight: episode.in_flight.load(Ordering::Relaxed),
        started: episode.started,
        last_activity: state.last_activity,
    }
}

fn finite(value: f64, field: impl Fn() -> String) -> Result<f32, EndError> {
    #[expect(clippy::cast_possible_truncation, reason = "an overflow becomes infinite and is refused")]
    let narrow = value as f32;
    if narrow.is_finite() { Ok(narrow) } else { Err(EndError::NotFinite { field: field(), got: value }) }
}
