//! The node behind its gateway: leases from leaders, tokens from servers, rollouts onto holders.

use async_trait::async_trait;
use futures::stream;
use starling_core::NodeCore;
use starling_core::transport::{FrameRecv, FrameSend, FrameStream};
use starling_gateway::text::{ChatFormat, ModelFiles};
use starling_gateway::{Backend, BackendError, ClaimError, ClaimRequest, GenerateStream, ModelInfo, SealError};
use starling_protocol::assignment::Assignment;
use starling_protocol::codec::{decode, encode};
use starling_protocol::rollout::{Rollout, receipt_body};
use starling_protocol::signed::{Domain, Verifier};
use starling_protocol::wire::{
    FRAME_LEN_BYTES_MAX, Generate, GenerateControl, GenerateFrame, LeaderCall, LeaderReply, WaitReason,
};
use starling_protocol::{EpisodeId, ModelName, NodeId, PolicyVersion, RolloutId, Timestamp};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc;

/// Limit of opening a generation stream; the next server is tried after it.
const OPEN_LIMIT: Duration = Duration::from_secs(5);

/// Leases, as this node knows them: what to renew, and until when they surely last.
#[derive(Debug, Default)]
struct Leases(Mutex<BTreeMap<EpisodeId, Leased>>);

#[derive(Clone, Debug)]
struct Leased {
    assignment: Assignment,
    /// Renewed at, on this node's clock.
    renewed: Timestamp,
}

/// See the module's text.
pub struct NodeBackend {
    core: Arc<NodeCore>,
    verifier: Arc<dyn Verifier>,
    leases: Leases,
    formats: tokio::sync::Mutex<BTreeMap<ModelName, Arc<ChatFormat>>>,
    /// Streams that this node has open to each server.
    outstanding: Arc<Mutex<BTreeMap<NodeId, u32>>>,
}

impl std::fmt::Debug for NodeBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("NodeBackend")
    }
}

/// What a claim brought, over all models asked.
#[derive(Debug, Default)]
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

impl NodeBackend {
    /// Over `core`.
    #[must_use]
    pub fn new(core: Arc<NodeCore>, verifier: Arc<dyn Verifier>) -> Arc<Self> {
        Arc::new(Self {
            core,
            verifier,
            leases: Leases::default(),
            formats: tokio::sync::Mutex::new(BTreeMap::new()),
            outstanding: Arc::default(),
        })
    }

    /// Claims up to `want` episodes of `models` (all with a running job when empty) and renews `running`.
    pub async fn claim_many(&self, models: &[ModelName], want: usize, running: &[EpisodeId]) -> Claimed {
        let mut by_model: BTreeMap<ModelName, Vec<EpisodeId>> = BTreeMap::new();
        for id in running {
            if let Some(l) = self.lease(*id) {
                by_model.entry(l.assignment.model).or_default().push(*id);
            }
        }
        for a in self.core.models().list() {
            if a.running_job.is_some() && (models.is_empty() || models.contains(&a.model)) {
                by_model.entry(a.model).or_default();
            }
        }
        let mut out = Claimed { renewed: true, ..Claimed::default() };
        let draining = self.core.maintenance().is_draining();
        let want = if draining { 0 } else { want };
        if by_model.is_empty() && want > 0 {
            out.wait = Some(self.why_no_model(models));
            return out;
        }
        if draining {
            out.wait = Some("this node is draining".into());
        }
        for (model, running) in by_model {
            let left = u32::try_from(want.saturating_sub(out.assignments.len())).unwrap_or(u32::MAX);
            if left == 0 && running.is_empty() {
                continue;
            }
            let call = LeaderCall::Claim { model: model.clone(), want: left, running: running.clone() };
            match self.core.ask_leader(&model, &call).await {
                Ok(LeaderReply::Assigned { assignments, revoked, wait }) => {
                    self.note(&assignments, &running, &revoked);
                    out.assignments.extend(assignments);
                    out.revoked.extend(revoked);
                    if let Some(w) = wait.filter(|_| !draining) {
                        out.wait = Some(describe(&model, &w));
                    }
                }
                Ok(other) => out.wait = Some(format!("{model}: unexpected answer {other:?}")),
                Err(e) => {
                    out.renewed = false;
                    out.wait = Some(e.to_string());
                }
            }
        }
        if out.assignments.len() >= want {
            out.wait = None;
        }
        out
    }

    fn why_no_model(&self, models: &[ModelName]) -> String {
        let known = self.core.models().list();
        if known.is_empty() && self.core.membership().live().len() <= 1 {
            "no other node of the mesh is reachable yet".into()
        } else if known.is_empty() {
            "no model is known on this mesh yet: submit a job".into()
        } else if models.is_empty() {
            "no job runs on this mesh".into()
        } else {
            format!("no job runs for {models:?}")
        }
    }

    fn note(&self, assignments: &[Assignment], renewed: &[EpisodeId], revoked: &[EpisodeId]) {
        let now = (self.core.clock())();
        let mut leases = self.leases.0.lock().unwrap_or_else(PoisonError::into_inner);
        for id in renewed {
            if let Some(l) = leases.get_mut(id) {
                l.renewed = now;
            }
        }
        for id in revoked {
            leases.remove(id);
        }
        for a in assignments {
            leases.insert(a.episode, Leased { assignment: a.clone(), renewed: now });
        }
        // Episodes that ended long ago without a word.
        leases.retain(|_, l| now.since(l.renewed).as_millis() < 10 * u128::from(l.assignment.lease_ttl_ms));
    }

    fn lease(&self, episode: EpisodeId) -> Option<Leased> {
        self.leases.0.lock().unwrap_or_else(PoisonError::into_inner).get(&episode).cloned()
    }

    fn forget(&self, episode: EpisodeId) -> Option<Leased> {
        self.leases.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&episode)
    }

    /// Servers of `model`, the one with the fewest open streams of this node first.
    fn servers(&self, model: &ModelName) -> Vec<NodeId> {
        let mut servers = self.core.models().servers_of(model);
        let outstanding = self.outstanding.lock().unwrap_or_else(PoisonError::into_inner);
        servers.sort_by_key(|n| outstanding.get(n).copied().unwrap_or(0));
        servers
    }

    async fn open(&self, request: &Generate) -> Result<(FrameStream, Open), BackendError> {
        let servers = self.servers(&request.model);
        if servers.is_empty() {
            return Err(match self.core.models().get(&request.model) {
                Some(_) => BackendError::Unavailable(format!("no live server has model {} loaded now", request.model)),
                None => BackendError::NoModel(request.model.clone()),
            });
        }
        let first = encode(request);
        if first.len() > FRAME_LEN_BYTES_MAX {
            return Err(BackendError::Failed(format!("prompt of {} tokens is too long to send", request.prompt.len())));
        }
        let mut tried = String::new();
        for server in servers {
            let guard = Open::new(server, self.outstanding.clone());
            match self.core.transport().open_generate(server, OPEN_LIMIT).await {
                Ok(mut stream) => match stream.send.send(first.clone().into()).await {
                    Ok(()) => return Ok((stream, guard)),
                    Err(e) => tried.push_str(&format!("[{e}] ")),
                },
                Err(e) => tried.push_str(&format!("[{e}] ")),
            }
        }
        Err(BackendError::Unavailable(format!("no server answered: {tried}")))
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

/// Counts a stream to a server while it is open.
struct Open {
    server: NodeId,
    counts: Arc<Mutex<BTreeMap<NodeId, u32>>>,
}

impl Open {
    fn new(server: NodeId, counts: Arc<Mutex<BTreeMap<NodeId, u32>>>) -> Self {
        *counts.lock().unwrap_or_else(PoisonError::into_inner).entry(server).or_default() += 1;
        Self { server, counts }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if let Some(n) = self.counts.lock().unwrap_or_else(PoisonError::into_inner).get_mut(&self.server) {
            *n = n.saturating_sub(1);
        }
    }
}

/// One answer as it comes in, with what its receipt must cover.
struct Answer {
    send: Box<dyn FrameSend>,
    recv: Box<dyn FrameRecv>,
    stop: mpsc::Receiver<u32>,
    stopped: Option<u32>,
    done: bool,
    request: Generate,
    tokens: Vec<u32>,
    logprobs: Vec<f32>,
    versions: Vec<PolicyVersion>,
    verifier: Arc<dyn Verifier>,
    _open: Open,
}

impl Answer {
    async fn next(&mut self) -> Option<Result<GenerateFrame, BackendError>> {
        while !self.done {
            let frame = tokio::select! {
                biased;
                Some(keep) = self.stop.recv(), if self.stopped.is_none() => {
                    self.stopped = Some(keep);
                    if let Err(e) = self.send.send(encode(&GenerateControl::Stop { keep }).into()).await {
                        self.done = true;
                        return Some(Err(BackendError::Unavailable(e.to_string())));
                    }
                    continue;
                }
                frame = self.recv.recv() => frame,
            };
            let frame = match frame {
                Ok(Some(bytes)) => decode::<GenerateFrame>("generate frame", &bytes, FRAME_LEN_BYTES_MAX)
                    .map_err(|e| BackendError::Failed(e.to_string())),
                Ok(None) => Err(BackendError::Unavailable("the server closed the stream".into())),
                Err(e) => Err(BackendError::Unavailable(e.to_string())),
            };
            match &frame {
                Ok(GenerateFrame::Tokens(tokens)) => {
                    if self.stopped.is_some() {
                        continue; // sampled before the server heard of the stop
                    }
                    for t in tokens {
                        self.tokens.push(t.id);
                        self.logprobs.push(t.logprob);
                        self.versions.push(t.version);
                    }
                }
                Ok(GenerateFrame::End { receipt, .. }) => {
                    let n = self.stopped.map_or(self.tokens.len(), |k| k as usize).min(self.tokens.len());
                    let body = receipt_body(
                        &self.request.model,
                        &self.request.prompt,
                        &self.tokens[..n],
                        &self.logprobs[..n],
                        &self.versions[..n],
                    );
                    if !receipt.signature.verifies(&*self.verifier, Domain::Receipt, &body) {
                        if self.stopped.is_some() {
                            continue; // the turn had ended by itself: that receipt covers more than is kept
                        }
                        self.done = true;
                        return Some(Err(BackendError::Failed("the server's receipt does not verify".into())));
                    }
                    self.done = true;
                }
                Ok(GenerateFrame::Failed { .. }) | Err(_) => self.done = true,
            }
            return Some(frame);
        }
        None
    }
}

#[async_trait]
impl Backend for NodeBackend {
    fn node(&self) -> NodeId {
        self.core.node()
    }

    fn now(&self) -> Timestamp {
        (self.core.clock())()
    }

    async fn claim(&self, filter: ClaimRequest) -> Result<Assignment, ClaimError> {
        let models: Vec<ModelName> = filter.model.into_iter().collect();
        if let Some(m) = models.first()
            && self.core.models().get(m).is_none()
        {
            return Err(ClaimError::NoModel(m.clone()));
        }
        if let Some(job) = filter.job
            && !self.core.models().list().iter().any(|a| a.running_job == Some(job))
        {
            return Err(ClaimError::NoJob(job));
        }
        let claimed = self.claim_many(&models, 1, &[]).await;
        claimed
            .assignments
            .into_iter()
            .next()
            .ok_or_else(|| ClaimError::Wait(claimed.wait.unwrap_or_else(|| "the leader gave no reason".into())))
    }

    async fn generate(&self, request: Generate) -> Result<GenerateStream, BackendError> {
        let (stream, open) = self.open(&request).await?;
        let (stop, stops) = mpsc::channel(1);
        let answer = Answer {
            send: stream.send,
            recv: stream.recv,
            stop: stops,
            stopped: None,
            done: false,
            tokens: Vec::new(),
            logprobs: Vec::new(),
            versions: Vec::new(),
            verifier: self.verifier.clone(),
            request,
            _open: open,
        };
        let frames = stream::unfold(answer, |mut a| async move { a.next().await.map(|f| (f, a)) });
        Ok(GenerateStream::new(frames, move |keep| {
            let _ = stop.try_send(keep);
        }))
    }

    async fn seal(&self, rollout: Rollout) -> Result<RolloutId, SealError> {
        let lease = self.lease(rollout.episode);
        let lease = lease.ok_or_else(|| SealError::LeaseLost("its leader gave the episode to another node".into()))?;
        let sealed = rollout.seal(&**self.core.signer())?;
        let id = sealed.id;
        let replication = usize::from(lease.assignment.replication);
        self.core
            .rollouts()
            .replicate(&rollout.model, rollout.job, sealed, replication)
            .await
            .map_err(|e| SealError::Storage(e.to_string()))?;
        self.forget(rollout.episode);
        Ok(id)
    }

    async fn abort(&self, assignment: &Assignment, cause: String) {
        self.forget(assignment.episode);
        let model = assignment.model.clone();
        let call = LeaderCall::Abort { model: model.clone(), episodes: vec![(assignment.episode, cause)] };
        if let Err(e) = self.core.ask_leader(&model, &call).await {
            // Its lease runs out by itself.
            tracing::debug!(episode = %assignment.episode.short(), error = %e, "the leader did not hear of an abort");
        }
    }

    fn still_leased(&self, episode: EpisodeId) -> bool {
        self.lease(episode).is_some()
    }

    fn models(&self) -> Vec<ModelInfo> {
        let known = self.core.models().list();
        known.into_iter().map(|a| ModelInfo { name: a.model, version: a.version, created: Timestamp(0) }).collect()
    }

    async fn chat_format(&self, model: &ModelName) -> Result<Arc<ChatFormat>, BackendError> {
        let mut formats = self.formats.lock().await;
        if let Some(f) = formats.get(model) {
            return Ok(f.clone());
        }
        if self.core.models().get(model).is_none() && self.core.groups().state(model).is_none() {
            return Err(BackendError::NoModel(model.clone()));
        }
        let files = crate::model_files::fetch(&self.core, model).await.map_err(BackendError::Unavailable)?;
        let file = |name: &str| files.get(name).map(Vec::as_slice);
        let format = ChatFormat::new(&ModelFiles {
            tokenizer: file("tokenizer.json").unwrap_or_default(),
            tokenizer_config: file("tokenizer_config.json"),
            chat_template: file("chat_template.jinja"),
            config: file("config.json").unwrap_or_default(),
            generation_config: file("generation_config.json"),
        })
        .map_err(|e| BackendError::Failed(e.to_string()))?;
        let format = Arc::new(format);
        formats.insert(model.clone(), format.clone());
        Ok(format)
    }
}
