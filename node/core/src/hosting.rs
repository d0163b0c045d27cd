//! Models that this node serves: weights follow the committed version, generation streams are answered.

use crate::blobs::{BlobError, Blobs};
use crate::compute::{Compute, Engine, measure};
use crate::runtime::{Stopped, blocking, spawn};
use crate::transport::{FrameRecv, FrameSend, FrameStream};
use crate::watch;
use starling_engine::{
    EngineError, FinishReason as EngineFinish, GenerateRequest, SampledToken, SamplingParams, TokenSink,
};
use starling_protocol::codec::{decode, encode};
use starling_protocol::control::ModelState;
use starling_protocol::manifest::Manifest;
use starling_protocol::record::{Fitness, HostedModel};
use starling_protocol::rollout::{FinishReason, Receipt, receipt_body};
use starling_protocol::signed::{Domain, Signature, Signer};
use starling_protocol::wire::{FRAME_LEN_BYTES_MAX, Generate, GenerateControl, GenerateFrame, TokenFrame};
use starling_protocol::{ModelName, NodeId, PolicyVersion};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::mpsc;

/// Versions whose weights stay in the store beside the first one: running fetches of the last ones go on.
const VERSIONS_KEPT: usize = 4;
/// How long after the last token a caller may still cut the turn short.
const STOP_AFTER_END: std::time::Duration = std::time::Duration::from_secs(5);
/// Most alternatives reported for one token.
const TOP_LOGPROBS_MAX: u8 = 20;

/// Why a model cannot be served here yet.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// A file of the model is missing or wrong.
    #[error("model file {file}: {reason}")]
    File {
        /// Its name.
        file: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// Weights or files could not be had.
    #[error(transparent)]
    Blob(#[from] BlobError),
    /// The engine refused them.
    #[error("engine: {0}")]
    Engine(String),
    /// The node ends.
    #[error(transparent)]
    Stopped(#[from] Stopped),
}

/// A model's engine with what it needs to sign.
#[derive(Clone)]
struct Hosted {
    engine: Arc<dyn Engine>,
    version: PolicyVersion,
    fitness: Fitness,
}

/// All models that this node serves.
pub struct Hosting {
    blobs: Blobs,
    signer: Arc<dyn Signer>,
    compute: Arc<dyn Compute>,
    models: Mutex<BTreeMap<ModelName, Hosted>>,
    /// Grows with every change of [`Hosting::list`]'s versions.
    changed: watch::Sender<u64>,
    /// Devices are measured for one model at a time.
    measuring: tokio::sync::Mutex<()>,
}

impl std::fmt::Debug for Hosting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hosting")
    }
}

impl Hosting {
    /// Nothing hosted yet; engines are `compute`'s.
    #[must_use]
    pub fn new(blobs: Blobs, signer: Arc<dyn Signer>, compute: Arc<dyn Compute>) -> Arc<Self> {
        let (changed, _) = watch::channel(0);
        Arc::new(Self {
            blobs,
            signer,
            compute,
            models: Mutex::new(BTreeMap::new()),
            changed,
            measuring: tokio::sync::Mutex::default(),
        })
    }

    /// What is served now, for the node record.
    #[must_use]
    pub fn list(&self) -> Vec<HostedModel> {
        let models = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        models
            .iter()
            .map(|(name, h)| {
                let queue = u32::try_from(h.engine.queue()).unwrap_or(u32::MAX);
                HostedModel { model: name.clone(), version: h.version, queue, fitness: h.fitness }
            })
            .collect()
    }

    /// Signals when a model or its version changed.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.changed.receiver()
    }

    fn get(&self, model: &ModelName) -> Option<Hosted> {
        self.models.lock().unwrap_or_else(PoisonError::into_inner).get(model).cloned()
    }

    /// Follows `state` until its sender is gone: loads each committed version and swaps it in. `peers` says who
    /// may have the weights.
    pub async fn follow(
        self: Arc<Self>,
        model: ModelName,
        mut state: watch::Receiver<Arc<ModelState>>,
        peers: impl Fn() -> Vec<NodeId> + Send,
    ) {
        let mut kept: Vec<Manifest> = Vec::new();
        let mut base: Option<Manifest> = None;
        loop {
            let now = state.borrow_and_update().clone();
            if let Some(weights) = &now.weights {
                let served = self.get(&model).map(|h| h.version);
                if served != Some(now.version) {
                    match self.load(&model, &now, weights, &peers()).await {
                        Ok(()) => {
                            tracing::info!(%model, version = %now.version, "serving");
                            base.get_or_insert_with(|| weights.clone());
                            kept.push(weights.clone());
                            if kept.len() > VERSIONS_KEPT {
                                let old = vec![kept.remove(0)];
                                let keep: Vec<Manifest> = kept.iter().chain(&base).cloned().collect();
                                if let Err(e) = self.blobs.forget(old, &keep).await {
                                    tracing::warn!(%model, error = %e, "old weights stay in the store");
                                }
                            }
                        }
                        Err(e) => {
                            tracing::warn!(%model, version = %now.version, error = %e, "cannot serve yet, trying again");
                            tokio::time::sleep(std::time::Duration::from_millis(500)).await;
                            continue;
                        }
                    }
                }
            }
            if state.changed().await.is_err() {
                return;
            }
        }
    }

    async fn load(
        self: &Arc<Self>,
        model: &ModelName,
        state: &ModelState,
        weights: &Manifest,
        peers: &[NodeId],
    ) -> Result<(), HostError> {
        let bytes = self.blobs.fetch_either_way(weights, state.weights_delta.as_ref(), peers).await?;
        let hosted = self.get(model);
        let config = if hosted.is_some() {
            None
        } else {
            // The files of the model too: whoever serves it must be able to give them to a gateway when the nodes
            // that made it are gone.
            for (file, manifest) in &state.files {
                if let Err(e) = self.blobs.hold(manifest, peers).await {
                    tracing::warn!(%model, file, error = %e, "this server does not hold a file of the model");
                }
            }
            Some(self.config(state, peers).await?)
        };
        let (compute, version, first) = (self.compute.clone(), state.version, config.clone());
        let measured = first.map(|config| (config, bytes.clone()));
        // A model's first engine keeps the configuration: a model name stands for one architecture.
        let loaded = blocking(move || match (hosted, config) {
            (Some(h), _) => h.engine.swap_weights(&bytes, version).map(|()| Hosted { version, ..h }),
            (None, config) => {
                let engine = compute.start_engine(&config.unwrap_or_default(), &bytes, version)?;
                Ok(Hosted { engine, version, fitness: Fitness::Unknown })
            }
        })
        .await?
        .map_err(HostError::Engine)?;
        self.change(|models| {
            // It may have been measured meanwhile.
            let fitness = models.get(model).map_or(loaded.fitness, |h| h.fitness);
            models.insert(model.clone(), Hosted { fitness, ..loaded });
        });
        if let Some((config, weights)) = measured {
            drop(spawn(self.clone().measure(model.clone(), config, weights)));
        }
        Ok(())
    }

    fn change(&self, change: impl FnOnce(&mut BTreeMap<ModelName, Hosted>)) {
        change(&mut self.models.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.modify(|n| {
            *n += 1;
            true
        });
    }

    /// Measures how fast this node's device trains `model`, for its record.
    async fn measure(self: Arc<Self>, model: ModelName, config: Vec<u8>, weights: Vec<u8>) {
        let _one_at_a_time = self.measuring.lock().await;
        let fitness = measure(&*self.compute, &config, weights).await;
        tracing::info!(%model, ?fitness, "the device was measured");
        self.change(|models| {
            if let Some(hosted) = models.get_mut(&model) {
                hosted.fitness = fitness;
            }
        });
    }

    /// The model's `config.json`.
    async fn config(&self, state: &ModelState, peers: &[NodeId]) -> Result<Vec<u8>, HostError> {
        let file = "config.json";
        let manifest = state.files.get(file).ok_or(HostError::File { file, reason: "missing".into() })?;
        Ok(self.blobs.fetch(manifest, peers).await?)
    }

    /// Serves one generation stream to its end.
    pub async fn on_generate(&self, stream: FrameStream) {
        let FrameStream { mut send, mut recv } = stream;
        if let Err(failed) = self.generate(&mut *send, &mut *recv).await {
            let _ = send.send(encode(&failed).into()).await;
        }
    }

    async fn generate(&self, send: &mut dyn FrameSend, recv: &mut dyn FrameRecv) -> Result<(), GenerateFrame> {
        let refuse = |retryable, reason: String| GenerateFrame::Failed { retryable, reason };
        let first = match recv.recv().await {
            Ok(Some(frame)) => frame,
            Ok(None) | Err(_) => return Ok(()),
        };
        let req: Generate =
            decode("generate request", &first, FRAME_LEN_BYTES_MAX).map_err(|e| refuse(false, e.to_string()))?;
        let hosted =
            self.get(&req.model).ok_or_else(|| refuse(true, format!("model {} is not served here yet", req.model)))?;
        let (tokens, mut sampled) = mpsc::channel(req.max_tokens.clamp(1, 1024) as usize + 1);
        let sampling = SamplingParams {
            temperature: req.temperature,
            top_p: req.top_p,
            top_k: req.top_k,
            seed: req.seed,
            drawn: req.drawn,
            max_tokens: req.max_tokens,
            stop_token_ids: req.stop_token_ids,
            top_logprobs: req.top_logprobs.min(TOP_LOGPROBS_MAX),
        };
        let prompt = req.prompt.clone();
        hosted
            .engine
            .generate(GenerateRequest { prompt, sampling }, Box::new(Sink { tokens }))
            .map_err(|e| refuse(matches!(e, EngineError::Busy { .. } | EngineError::Stopped), e.to_string()))?;
        let mut turn = TurnSoFar::new(req.model, req.prompt);
        loop {
            tokio::select! {
                biased;
                control = recv.recv() => {
                    let Ok(Some(frame)) = control else { return Ok(()) }; // the caller is gone: dropping `sampled` stops the engine
                    drop(sampled);
                    return self.stop(&turn, &frame, send).await;
                }
                event = sampled.recv() => {
                    let mut frame = Vec::new();
                    let mut finished = None;
                    let mut event = event;
                    // All that is there goes into one frame: few tokens at a time while the engine is slow, many when we are.
                    loop {
                        match event {
                            Some(Event::Token(t)) => frame.push(turn.push(t)),
                            Some(Event::Finished(f)) => finished = Some(f),
                            None => finished = Some(Err("the engine stopped".into())),
                        }
                        match (&finished, sampled.try_recv()) {
                            (None, Ok(next)) => event = Some(next),
                            _ => break,
                        }
                    }
                    if !frame.is_empty() && send.send(encode(&GenerateFrame::Tokens(frame)).into()).await.is_err() {
                        return Ok(());
                    }
                    match finished {
                        None => {}
                        Some(Ok(finish)) => {
                            let end = turn.end(&*self.signer, usize::MAX, finish);
                            let _ = send.send(encode(&end).into()).await;
                            break;
                        }
                        Some(Err(reason)) => return Err(refuse(true, reason)),
                    }
                }
            }
        }
        // A stop text may lie in the last tokens: until the caller closes, it may still ask for a receipt over fewer.
        match tokio::time::timeout(STOP_AFTER_END, recv.recv()).await {
            Ok(Ok(Some(frame))) => self.stop(&turn, &frame, send).await,
            _ => Ok(()),
        }
    }

    async fn stop(&self, turn: &TurnSoFar, frame: &[u8], send: &mut dyn FrameSend) -> Result<(), GenerateFrame> {
        let GenerateControl::Stop { keep } = decode("generate control", frame, 64)
            .map_err(|e| GenerateFrame::Failed { retryable: false, reason: e.to_string() })?;
        let end = turn.end(&*self.signer, keep as usize, FinishReason::Stop);
        let _ = send.send(encode(&end).into()).await;
        Ok(())
    }
}

enum Event {
    Token(SampledToken),
    Finished(Result<FinishReason, String>),
}

struct Sink {
    tokens: mpsc::Sender<Event>,
}

impl TokenSink for Sink {
    fn token(&mut self, t: SampledToken) -> bool {
        // A full queue means that the caller reads slower than the engine samples for 1024 tokens: the engine
        // must not wait for it, so the turn ends.
        self.tokens.try_send(Event::Token(t)).is_ok()
    }
    fn finish(self: Box<Self>, r: Result<EngineFinish, EngineError>) {
        let r = r.map_err(|e| e.to_string()).map(|f| match f {
            EngineFinish::Stop => FinishReason::Stop,
            EngineFinish::Length => FinishReason::Length,
        });
        let _ = self.tokens.try_send(Event::Finished(r));
    }
}

/// What a turn's receipt covers, as it grows.
struct TurnSoFar {
    model: ModelName,
    prompt: Vec<u32>,
    tokens: Vec<u32>,
    logprobs: Vec<f32>,
    versions: Vec<PolicyVersion>,
}

impl TurnSoFar {
    fn new(model: ModelName, prompt: Vec<u32>) -> Self {
        Self { model, prompt, tokens: Vec::new(), logprobs: Vec::new(), versions: Vec::new() }
    }

    fn push(&mut self, t: SampledToken) -> TokenFrame {
        let version = PolicyVersion(t.policy_version);
        self.tokens.push(t.id);
        self.logprobs.push(t.logprob);
        self.versions.push(version);
        TokenFrame { id: t.id, logprob: t.logprob, version, top: t.top }
    }

    fn end(&self, signer: &dyn Signer, keep: usize, finish: FinishReason) -> GenerateFrame {
        let n = keep.min(self.tokens.len());
        let body = receipt_body(&self.model, &self.prompt, &self.tokens[..n], &self.logprobs[..n], &self.versions[..n]);
        let tokens = u32::try_from(n).unwrap_or(u32::MAX);
        GenerateFrame::End {
            finish,
            tokens,
            receipt: Receipt { signature: Signature::new(signer, Domain::Receipt, &body) },
        }
    }
}
