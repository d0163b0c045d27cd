//! What the gateway asks of its node. The bench and the tests plug in here too.

use crate::text::ChatFormat;
use async_trait::async_trait;
use futures::Stream;
use futures::stream::BoxStream;
use starling_protocol::assignment::Assignment;
use starling_protocol::rollout::{FinishReason, Rollout, RolloutError, TurnReceipt};
use starling_protocol::wire::{Generate, TokenFrame};
use starling_protocol::{EpisodeId, JobId, ModelName, NodeId, PolicyVersion, RolloutId, Timestamp};
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

/// Which episode is wanted; `None` takes any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimRequest {
    /// Of this model.
    pub model: Option<ModelName>,
    /// Of this job.
    pub job: Option<JobId>,
}

/// Why there is no episode to run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClaimError {
    /// Not now, and why. Ask again.
    #[error("no episode to run now: {0}")]
    Wait(String),
    /// No such model on the mesh. The caller's fault.
    #[error("model {0} is not on the mesh")]
    NoModel(ModelName),
    /// No such job. The caller's fault.
    #[error("job {0} is not known")]
    NoJob(JobId),
}

/// Why tokens cannot be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BackendError {
    /// No such model on the mesh. The caller's fault.
    #[error("model {0} is not on the mesh")]
    NoModel(ModelName),
    /// Nobody can answer now. The same call may succeed later.
    #[error("{0}")]
    Unavailable(String),
    /// The call failed and would fail again.
    #[error("{0}")]
    Failed(String),
}

/// Why an episode's end was not acknowledged. Nothing is lost: the episode stays open unless the lease is gone.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SealError {
    /// The episode belongs to somebody else now; its rollout would not count.
    #[error("the episode's lease was lost: {0}")]
    LeaseLost(String),
    /// Not enough nodes hold the rollout durably. The same end may succeed later.
    #[error("the rollout is not stored durably: {0}")]
    Storage(String),
    /// The record is not a rollout; a bug of the gateway or too long an episode.
    #[error(transparent)]
    Invalid(#[from] RolloutError),
}

/// A model of the mesh as `/v1/models` lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelInfo {
    /// Its name.
    pub name: ModelName,
    /// The version that serves.
    pub version: PolicyVersion,
    /// When it joined the mesh.
    pub created: Timestamp,
}

/// What an answer brings.
#[derive(Clone, Debug, PartialEq)]
pub enum AnswerEvent {
    /// Tokens, as they are sampled.
    Tokens(Vec<TokenFrame>),
    /// The answer is complete.
    End {
        /// Why.
        finish: FinishReason,
        /// The servers' word for it: what no receipt covers is recorded, and not trained on.
        receipt: Option<TurnReceipt>,
    },
}

/// The events of one answer. A server that is lost on the way is the backend's to replace. Dropping it cancels the
/// generation.
pub struct GenerateStream {
    events: BoxStream<'static, Result<AnswerEvent, BackendError>>,
    stop: Box<dyn FnMut(u32) + Send>,
}

impl GenerateStream {
    /// From the events and what [`GenerateStream::stop`] is to do.
    pub fn new(
        events: impl Stream<Item = Result<AnswerEvent, BackendError>> + Send + 'static,
        stop: impl FnMut(u32) + Send + 'static,
    ) -> Self {
        Self { events: Box::pin(events), stop: Box::new(stop) }
    }

    /// Ends the answer after its first `keep` tokens, all of which have been read from this stream.
    ///
    /// What the other side owes: one more [`AnswerEvent::End`] whose receipt covers those tokens and none behind them,
    /// also where the server had sampled further or had ended by itself before it heard of the stop. An `End` that
    /// was on its way already must not come out of this stream.
    pub fn stop(&mut self, keep: u32) {
        (self.stop)(keep);
    }
}

impl Stream for GenerateStream {
    type Item = Result<AnswerEvent, BackendError>;
    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.events.as_mut().poll_next(cx)
    }
}

impl fmt::Debug for GenerateStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GenerateStream(..)")
    }
}

/// The node behind the gateway.
#[async_trait]
pub trait Backend: Send + Sync + 'static {
    /// Who seals the rollouts.
    fn node(&self) -> NodeId;
    /// The node's clock.
    fn now(&self) -> Timestamp;
    /// Leases one episode.
    async fn claim(&self, filter: ClaimRequest) -> Result<Assignment, ClaimError>;
    /// Starts an answer, on whichever server suits.
    async fn generate(&self, request: Generate) -> Result<GenerateStream, BackendError>;
    /// Seals the record, has it held durably by as many nodes as the assignment asks, and only then returns.
    /// The gateway lets it run to its end even if the caller goes away.
    async fn seal(&self, rollout: Rollout) -> Result<RolloutId, SealError>;
    /// Gives an episode back that will not end here.
    async fn abort(&self, assignment: &Assignment, cause: String);
    /// Whether the episode still belongs to this node.
    fn still_leased(&self, episode: EpisodeId) -> bool;
    /// Models that can be asked for.
    fn models(&self) -> Vec<ModelInfo>;
    /// A model's templates and tokenizer, fetched once and kept.
    async fn chat_format(&self, model: &ModelName) -> Result<Arc<ChatFormat>, BackendError>;
}
