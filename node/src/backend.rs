//! The node behind its gateway: a [`Client`] of the mesh with the chat formats of its models.

use async_trait::async_trait;
use futures::stream;
use starling_core::NodeCore;
use starling_core::client::{self, Client, Generation, GenerationError, GenerationEvent};
use starling_gateway::text::ChatFormat;
use starling_gateway::{
    AnswerEvent, Backend, BackendError, ClaimError, ClaimRequest, GenerateStream, ModelInfo, SealError,
};
use starling_protocol::assignment::Assignment;
use starling_protocol::rollout::Rollout;
use starling_protocol::wire::Generate;
use starling_protocol::{EpisodeId, ModelName, NodeId, RolloutId, Timestamp};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::{OnceCell, mpsc};

/// See the module's text.
#[derive(Debug)]
pub struct NodeBackend {
    client: Client,
    formats: PerModel<ChatFormat>,
}

impl NodeBackend {
    /// Over `client`.
    #[must_use]
    pub fn new(client: Client) -> Arc<Self> {
        Arc::new(Self { client, formats: PerModel::default() })
    }

    /// The client.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.client
    }

    fn core(&self) -> &Arc<NodeCore> {
        self.client.core()
    }

    async fn fetch_format(&self, model: &ModelName) -> Result<ChatFormat, BackendError> {
        if self.core().models().get(model).is_none() && self.core().groups().state(model).is_none() {
            return Err(BackendError::NoModel(model.clone()));
        }
        let files = crate::model_files::fetch(self.core(), model).await.map_err(BackendError::Unavailable)?;
        crate::commands::checkpoint::chat_format(&files).map_err(|e| BackendError::Failed(e.to_string()))
    }
}

/// Something of each model, made once and kept. Whoever waits for one model's keeps nobody from another's.
#[derive(Debug)]
struct PerModel<T>(Mutex<BTreeMap<ModelName, Cell<T>>>);

type Cell<T> = Arc<OnceCell<Arc<T>>>;

impl<T> Default for PerModel<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> PerModel<T> {
    /// The model's, made by `make` if there is none yet. Callers that come meanwhile wait for it; when it fails the next
    /// one tries again, and a model of which nothing could be made is not remembered.
    async fn get_or_make<E>(&self, model: &ModelName, make: impl Future<Output = Result<T, E>>) -> Result<Arc<T>, E> {
        let cells = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let cell = cells().entry(model.clone()).or_default().clone();
        let made = cell.get_or_try_init(|| async { make.await.map(Arc::new) }).await.cloned();
        if made.is_err() {
            let mut cells = cells();
            // Two hold it: the map and this call. Then nobody else waits for it.
            if cells.get(model).is_some_and(|c| c.get().is_none() && Arc::ptr_eq(c, &cell) && Arc::strong_count(c) == 2)
            {
                cells.remove(model);
            }
        }
        made
    }
}

/// An answer with the way by which the gateway stops it.
struct Answer {
    generation: Generation,
    stops: mpsc::Receiver<u32>,
}

impl Answer {
    async fn next(&mut self) -> Option<Result<AnswerEvent, BackendError>> {
        loop {
            tokio::select! {
                biased;
                Some(keep) = self.stops.recv() => self.generation.stop(keep),
                event = self.generation.next() => {
                    return Some(match event? {
                        Ok(GenerationEvent::Tokens(tokens)) => Ok(AnswerEvent::Tokens(tokens)),
                        Ok(GenerationEvent::End { finish, receipt }) => Ok(AnswerEvent::End { finish, receipt }),
                        Err(e) => Err(backend_error(e)),
                    });
                }
            }
        }
    }
}

fn backend_error(e: GenerationError) -> BackendError {
    match e {
        GenerationError::NoModel(model) => BackendError::NoModel(model),
        GenerationError::Refused(_) => BackendError::Failed(e.to_string()),
        GenerationError::NoServer { .. } | GenerationError::Silent { .. } => BackendError::Unavailable(e.to_string()),
    }
}

#[async_trait]
impl Backend for NodeBackend {
    fn node(&self) -> NodeId {
        self.core().node()
    }

    fn now(&self) -> Timestamp {
        (self.core().clock())()
    }

    async fn claim(&self, filter: ClaimRequest) -> Result<Assignment, ClaimError> {
        let models: Vec<ModelName> = filter.model.into_iter().collect();
        if let Some(m) = models.first()
            && self.core().models().get(m).is_none()
        {
            return Err(ClaimError::NoModel(m.clone()));
        }
        if let Some(job) = filter.job
            && !self.core().models().list().iter().any(|a| a.running_job == Some(job))
        {
            return Err(ClaimError::NoJob(job));
        }
        let claimed = self.client.claim(&models, 1, &[]).await;
        claimed
            .assignments
            .into_iter()
            .next()
            .ok_or_else(|| ClaimError::Wait(claimed.wait.unwrap_or_else(|| "the leader gave no reason".into())))
    }

    async fn generate(&self, request: Generate) -> Result<GenerateStream, BackendError> {
        let generation = self.client.generate(request).await.map_err(backend_error)?;
        let (stop, stops) = mpsc::channel(1);
        let answer = Answer { generation, stops };
        let events = stream::unfold(answer, |mut a| async move { a.next().await.map(|e| (e, a)) });
        Ok(GenerateStream::new(events, move |keep| {
            let _ = stop.try_send(keep);
        }))
    }

    async fn seal(&self, rollout: Rollout) -> Result<RolloutId, SealError> {
        self.client.seal(rollout).await.map_err(|e| match e {
            client::SealError::LeaseLost(_) => SealError::LeaseLost(e.to_string()),
            client::SealError::Storage(why) => SealError::Storage(why.to_string()),
            client::SealError::Invalid(why) => SealError::Invalid(why),
        })
    }

    async fn abort(&self, assignment: &Assignment, cause: String) {
        self.client.abort(assignment, cause).await;
    }

    fn still_leased(&self, episode: EpisodeId) -> bool {
        self.client.lease(episode).is_some()
    }

    fn models(&self) -> Vec<ModelInfo> {
        let known = self.core().models().list();
        known.into_iter().map(|a| ModelInfo { name: a.model, version: a.version, created: Timestamp(0) }).collect()
    }

    async fn chat_format(&self, model: &ModelName) -> Result<Arc<ChatFormat>, BackendError> {
        self.formats.get_or_make(model, self.fetch_format(model)).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::{pending, ready};

    #[tokio::test]
    async fn a_model_whose_format_is_slow_keeps_nobody_from_another() {
        let formats: PerModel<u32> = PerModel::default();
        let (slow, fast) = (ModelName::new("slow").unwrap(), ModelName::new("fast").unwrap());
        let got = tokio::select! {
            biased;
            _ = formats.get_or_make(&slow, pending::<Result<u32, String>>()) => panic!("it never comes"),
            got = formats.get_or_make(&fast, ready(Ok::<_, String>(7))) => got,
        };
        assert_eq!(got, Ok(Arc::new(7)));
        assert_eq!(formats.get_or_make(&fast, ready(Err("made twice".to_owned()))).await, Ok(Arc::new(7)));
    }

    #[tokio::test]
    async fn what_could_not_be_made_is_tried_again_and_not_remembered() {
        let formats: PerModel<u32> = PerModel::default();
        let model = ModelName::new("m").unwrap();
        assert_eq!(formats.get_or_make(&model, ready(Err("no"))).await, Err("no"));
        assert!(formats.0.lock().unwrap().is_empty());
        assert_eq!(formats.get_or_make(&model, ready(Ok::<_, &str>(1))).await, Ok(Arc::new(1)));
    }
}
