//! The seam: where episodes come from and where their rewards go.

use async_trait::async_trait;
use starling_protocol::EpisodeId;
use starling_protocol::assignment::{Assignment, Purpose};
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// Hands out episodes and takes their ends. Called from several tasks at once.
#[async_trait]
pub trait EpisodeHost: Send + Sync + 'static {
    /// Asks for up to `want` episodes and renews the leases of `running`, which is everything that was handed out and
    /// not answered yet. `want` is 0 when only the leases are due.
    ///
    /// The runner asks again on its own, so this should not wait for work: return what there is, and say in
    /// [`ClaimOutcome::wait`] why it is less than `want`. Dropping the future is allowed only on shutdown.
    async fn claim(&self, want: usize, running: &[EpisodeId]) -> ClaimOutcome;

    /// Ends an episode. `reward` and every metric are finite as `f32`.
    ///
    /// # Errors
    /// Why it was not accepted, in words. The runner tries again while the lease is valid, so a repetition of an end
    /// that was accepted must be accepted too. After the last failure it calls [`EpisodeHost::abort`].
    async fn end(&self, episode: EpisodeId, reward: f64, metrics: BTreeMap<String, f64>) -> Result<(), String>;

    /// Gives an episode up; it will not be ended. Also called for a revoked episode, once its program is gone.
    async fn abort(&self, episode: EpisodeId, cause: String);
}

/// What a claim brought.
#[derive(Clone, Debug, Default)]
pub struct ClaimOutcome {
    /// At most as many as were wanted.
    pub episodes: Vec<EpisodeStart>,
    /// Of the running ones, those whose lease is lost: their programs are killed at once.
    pub revoked: Vec<EpisodeId>,
    /// Why there were fewer episodes than wanted, in words.
    pub wait: Option<String>,
    /// True when the leases of the running episodes that are not revoked were renewed; false when whoever keeps them
    /// could not be asked.
    pub renewed: bool,
}

/// What an episode is for, as the agent is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EpisodePurpose {
    /// Its rollout may be trained on.
    Train,
    /// Its rollout is only scored.
    Eval,
}

impl EpisodePurpose {
    /// `train` or `eval`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Eval => "eval",
        }
    }
}

impl fmt::Display for EpisodePurpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl From<&Purpose> for EpisodePurpose {
    fn from(purpose: &Purpose) -> Self {
        match purpose {
            Purpose::Train => Self::Train,
            Purpose::Eval { .. } => Self::Eval,
        }
    }
}

/// One episode to run.
#[derive(Clone)]
pub struct EpisodeStart {
    /// The episode.
    pub episode: EpisodeId,
    /// The task's line, a JSON object without line breaks, as it stands in the set.
    pub task_line: String,
    /// Where the OpenAI API of this episode is, with `/v1`.
    pub base_url: String,
    /// Its key.
    pub api_key: String,
    /// The model to ask for.
    pub model: String,
    /// Seed of the episode's environment.
    pub seed: u64,
    /// The task set's name.
    pub set: String,
    /// The task's id.
    pub task_id: String,
    /// Training or evaluation.
    pub purpose: EpisodePurpose,
    /// How long a lease lasts from its last renewal.
    pub lease_ttl: Duration,
}

impl EpisodeStart {
    /// From an assignment and what the gateway adds.
    #[must_use]
    pub fn from_assignment(assignment: &Assignment, base_url: String, api_key: String) -> Self {
        Self {
            episode: assignment.episode,
            task_line: assignment.task_line.clone(),
            base_url,
            api_key,
            model: assignment.model.to_string(),
            seed: assignment.seed,
            set: assignment.task.set.clone(),
            task_id: assignment.task.id.clone(),
            purpose: (&assignment.purpose).into(),
            lease_ttl: Duration::from_millis(assignment.lease_ttl_ms),
        }
    }
}

impl fmt::Debug for EpisodeStart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the key: keys never reach a log.
        f.debug_struct("EpisodeStart")
            .field("episode", &self.episode)
            .field("set", &self.set)
            .field("task_id", &self.task_id)
            .field("purpose", &self.purpose)
            .finish_non_exhaustive()
    }
}
