//! A node that has endless work and samples nothing: for `starling bench` and for tests.
//!
//! It gives the same answer to every call at once, with valid receipts, and seals for real, so what is left to
//! measure is the gateway itself.

use crate::backend::{
    AnswerEvent, Backend, BackendError, ClaimError, ClaimRequest, GenerateStream, ModelInfo, SealError,
};
use crate::text::{ChatFormat, FormatError, ModelFiles, byte_model};
use async_trait::async_trait;
use futures::Stream;
use starling_protocol::assignment::{Assignment, Purpose};
use starling_protocol::job::Sampling;
use starling_protocol::rollout::{FinishReason, Receipt, Rollout, SealedRollout, TurnReceipt, receipt_body};
use starling_protocol::signed::{Domain, Signature, Signer};
use starling_protocol::wire::{Generate, TokenFrame};
use starling_protocol::{
    EpisodeId, GroupId, JobId, ModelName, NodeId, PolicyVersion, RolloutId, TaskRef, Term, Timestamp,
};
use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Rollouts kept for [`NullBackend::sealed`]: the last so many.
const SEALED_KEPT: usize = 64;

type Answer = dyn Fn(&Generate) -> Vec<u32> + Send + Sync;

/// See the module.
pub struct NullBackend {
    signer: Arc<dyn Signer>,
    model: ModelName,
    format: Arc<ChatFormat>,
    answer: Box<Answer>,
    tokens_per_frame: usize,
    purpose: Purpose,
    sampling: Sampling,
    task_line: String,
    claimed: AtomicU64,
    sealed: Mutex<VecDeque<SealedRollout>>,
}

impl fmt::Debug for NullBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NullBackend").field("model", &self.model).finish_non_exhaustive()
    }
}

/// The chat format of Starling's byte-level model, with a context of `context_len` tokens.
///
/// # Errors
/// [`FormatError`] if the files of [`byte_model`] do not fit together: a bug.
pub fn byte_format(context_len: u32) -> Result<ChatFormat, FormatError> {
    ChatFormat::new(&ModelFiles {
        tokenizer: byte_model::tokenizer_json().as_bytes(),
        tokenizer_config: Some(byte_model::tokenizer_config_json().as_bytes()),
        chat_template: Some(byte_model::chat_template().as_bytes()),
        config: format!("{{\"max_position_embeddings\": {context_len}}}").as_bytes(),
        generation_config: None,
    })
}

impl NullBackend {
    /// Serves `model` and answers every call with `answer`, signed by `signer`.
    #[must_use]
    pub fn new(signer: Arc<dyn Signer>, model: ModelName, format: Arc<ChatFormat>, answer: Vec<u32>) -> Self {
        Self {
            signer,
            model,
            format,
            answer: Box::new(move |_| answer.clone()),
            tokens_per_frame: 1,
            purpose: Purpose::Train,
            sampling: Sampling::default(),
            task_line: r#"{"id":"null","prompt":"Say something."}"#.into(),
            claimed: AtomicU64::new(0),
            sealed: Mutex::default(),
        }
    }

    /// Answers each call by `answer` instead.
    #[must_use]
    pub fn answering(mut self, answer: impl Fn(&Generate) -> Vec<u32> + Send + Sync + 'static) -> Self {
        self.answer = Box::new(answer);
        self
    }

    /// Puts so many tokens into a frame, at least one.
    #[must_use]
    pub fn tokens_per_frame(mut self, n: usize) -> Self {
        self.tokens_per_frame = n.max(1);
        self
    }

    /// What its assignments are for, and their sampling.
    #[must_use]
    pub fn assigning(mut self, purpose: Purpose, sampling: Sampling) -> Self {
        self.purpose = purpose;
        self.sampling = sampling;
        self
    }

    /// Rollouts sealed, oldest first; the last 64 are kept.
    #[must_use]
    pub fn sealed(&self) -> Vec<SealedRollout> {
        self.sealed.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

#[async_trait]
impl Backend for NullBackend {
    fn node(&self) -> NodeId {
        self.signer.node_id()
    }

    fn now(&self) -> Timestamp {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Timestamp(0) + since
    }

    async fn claim(&self, filter: ClaimRequest) -> Result<Assignment, ClaimError> {
        if let Some(other) = filter.model.filter(|m| *m != self.model) {
            return Err(ClaimError::NoModel(other));
        }
        if let Some(other) = filter.job.filter(|j| *j != JobId::default()) {
            return Err(ClaimError::NoJob(other));
        }
        let i = self.claimed.fetch_add(1, Ordering::Relaxed);
        let mut episode = [0; 16];
        episode[..8].copy_from_slice(&i.to_be_bytes());
        Ok(Assignment {
            job: JobId::default(),
            model: self.model.clone(),
            episode: EpisodeId(episode),
            group: GroupId { term: Term(1), seq: i / 8 },
            attempt: 0,
            task: TaskRef { set: "null".into(), index: 0, id: "null".into() },
            task_line: self.task_line.clone(),
            purpose: self.purpose,
            policy_version: PolicyVersion(1),
            term: Term(1),
            seed: i,
            sampling: self.sampling,
            lease_expires: self.now() + Duration::from_secs(3600),
            lease_ttl_ms: 3_600_000,
            replication: 1,
        })
    }

    async fn generate(&self, request: Generate) -> Result<GenerateStream, BackendError> {
        if request.model != self.model {
            return Err(BackendError::NoModel(request.model));
        }
        let mut tokens = (self.answer)(&request);
        let max = request.max_tokens as usize;
        let stops = tokens.last().is_some_and(|t| request.stop_token_ids.contains(t));
        let finish = if tokens.len() > max || !stops { FinishReason::Length } else { FinishReason::Stop };
        tokens.truncate(max);
        let keep = Arc::new(AtomicU32::new(u32::MAX));
        let frames = NullFrames {
            signer: Arc::clone(&self.signer),
            request,
            tokens,
            finish,
            sent: 0,
            per_frame: self.tokens_per_frame,
            keep: Arc::clone(&keep),
            over: false,
        };
        Ok(GenerateStream::new(frames, move |n| keep.store(n, Ordering::Relaxed)))
    }

    async fn seal(&self, rollout: Rollout) -> Result<RolloutId, SealError> {
        let sealed = rollout.seal(&*self.signer)?;
        let id = sealed.id;
        let mut kept = self.sealed.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == SEALED_KEPT {
            kept.pop_front();
        }
        kept.push_back(sealed);
        Ok(id)
    }

    async fn abort(&self, _: &Assignment, _: String) {}

    fn still_leased(&self, _: EpisodeId) -> bool {
        true
    }

    fn models(&self) -> Vec<ModelInfo> {
        vec![ModelInfo { name: self.model.clone(), version: PolicyVersion(1), created: Timestamp(0) }]
    }

    async fn chat_format(&self, model: &ModelName) -> Result<Arc<ChatFormat>, BackendError> {
        if *model == self.model { Ok(Arc::clone(&self.format)) } else { Err(BackendError::NoModel(model.clone())) }
    }
}

struct NullFrames {
    signer: Arc<dyn Signer>,
    request: Generate,
    tokens: Vec<u32>,
    finish: FinishReason,
    sent: usize,
    per_frame: usize,
    keep: Arc<AtomicU32>,
    over: bool,
}

const NULL_LOGPROB: f32 = -0.5;

impl Stream for NullFrames {
    type Item = Result<AnswerEvent, BackendError>;
    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if this.over {
            return Poll::Ready(None);
        }
        let keep = this.keep.load(Ordering::Relaxed) as usize;
        if this.sent < this.tokens.len() && keep > this.sent {
            let to = (this.sent + this.per_frame).min(this.tokens.len());
            let top: Vec<(u32, f32)> = (0..u32::from(this.request.top_logprobs)).map(|i| (i, -1.0)).collect();
            let frame =
                |&id: &u32| TokenFrame { id, logprob: NULL_LOGPROB, version: PolicyVersion(1), top: top.clone() };
            let frames = this.tokens[this.sent..to].iter().map(frame).collect();
            this.sent = to;
            return Poll::Ready(Some(Ok(AnswerEvent::Tokens(frames))));
        }
        this.over = true;
        let n = this.tokens.len().min(keep);
        let finish = if keep < usize::MAX && n == keep { FinishReason::Stop } else { this.finish };
        let (logprobs, versions) = (vec![NULL_LOGPROB; n], vec![PolicyVersion(1); n]);
        let body = receipt_body(&this.request.model, &this.request.prompt, &this.tokens[..n], &logprobs, &versions);
        let receipt = Receipt { signature: Signature::new(&*this.signer, Domain::Receipt, &body) };
        let receipt = Some(TurnReceipt { unreceipted_len: 0, receipt });
        Poll::Ready(Some(Ok(AnswerEvent::End { finish, receipt })))
    }
}
