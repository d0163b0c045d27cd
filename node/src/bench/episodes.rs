//! Episodes per second through begin, one chat and a durable end, over HTTP, with an engine that costs nothing.
//!
//! The peer is what a server without a mesh cannot do without: the same three calls, answered with the same bytes by
//! bare handlers, the last of which puts the same envelope into one RocksDB with one synced write.

use super::http::{Agent, Begun, MODEL, Server, answer};
use super::load::{Done, Load, alternate};
use super::report::{Better, Row};
use super::trio::{REPLICATION, Trio};
use anyhow::{Context, anyhow};
use async_trait::async_trait;
use axum::Router;
use axum::body::Bytes;
use axum::http::{StatusCode, header};
use axum::routing::post;
use serde::Deserialize;
use starling_core::NodeCore;
use starling_gateway::null::{NullBackend, byte_format};
use starling_gateway::text::ChatFormat;
use starling_gateway::{
    Backend, BackendError, ClaimError, ClaimRequest, Gateway, GatewayConfig, GenerateStream, ModelInfo, SealError,
};
use starling_protocol::assignment::Assignment;
use starling_protocol::rollout::Rollout;
use starling_protocol::wire::Generate;
use starling_protocol::{EpisodeId, JobId, ModelName, NodeId, RolloutId, Timestamp};
use starling_storage::{Durability, RocksOptions, RocksStore, SharedStore, rollouts};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const LOAD: Load = Load { at_once: 32, time_max: Duration::from_millis(2500), count_max: 20_000 };
const PEER: &str = "three bare axum handlers, one fsynced RocksDB put";

/// A null engine with real ends: the node's way of sealing, without leases.
struct DurableBackend {
    null: NullBackend,
    core: Arc<NodeCore>,
}

#[async_trait]
impl Backend for DurableBackend {
    fn node(&self) -> NodeId {
        self.null.node()
    }

    fn now(&self) -> Timestamp {
        self.null.now()
    }

    async fn claim(&self, filter: ClaimRequest) -> Result<Assignment, ClaimError> {
        Ok(Assignment { replication: REPLICATION, ..self.null.claim(filter).await? })
    }

    async fn generate(&self, request: Generate) -> Result<GenerateStream, BackendError> {
        self.null.generate(request).await
    }

    async fn seal(&self, rollout: Rollout) -> Result<RolloutId, SealError> {
        let sealed = rollout.seal(&**self.core.signer())?;
        let id = sealed.id;
        let held = self.core.rollouts().replicate(&rollout.model, rollout.job, sealed, usize::from(REPLICATION)).await;
        match held {
            Ok(holders) if holders.len() == usize::from(REPLICATION) => Ok(id),
            Ok(holders) => Err(SealError::Storage(format!("only {} nodes hold it", holders.len()))),
            Err(e) => Err(SealError::Storage(e.to_string())),
        }
    }

    async fn abort(&self, assignment: &Assignment, cause: String) {
        self.null.abort(assignment, cause).await;
    }

    fn still_leased(&self, episode: EpisodeId) -> bool {
        self.null.still_leased(episode)
    }

    fn models(&self) -> Vec<ModelInfo> {
        self.null.models()
    }

    async fn chat_format(&self, model: &ModelName) -> Result<Arc<ChatFormat>, BackendError> {
        self.null.chat_format(model).await
    }
}

/// The rows of `episodes`.
///
/// # Errors
/// When a call fails, or an acknowledged rollout is not on both holders.
pub(super) async fn measure(runs: usize) -> anyhow::Result<Vec<Row>> {
    let trio = Trio::start().await?;
    let format = Arc::new(byte_format(8192)?);
    let null = NullBackend::new(trio.gateway.identity.clone(), ModelName::new(MODEL)?, format, answer())
        .tokens_per_frame(answer().len());
    let backend = Arc::new(DurableBackend { null, core: trio.gateway.core.clone() });
    let server = Server::start(Gateway::new(backend, GatewayConfig::default()).router()).await?;
    let agent = Agent::new()?;

    let canned = Canned::record(&agent, &server.base, &trio).await?;
    let store = Arc::new(RocksStore::open(trio.dir().join("peer"), &RocksOptions::default())?);
    let peer = Server::start(canned.router(store)).await?;

    let mut acknowledged = 0;
    let ours = async || {
        let done = episodes(&agent, &server.base).await?;
        acknowledged += done.count;
        anyhow::Ok(done.per_second())
    };
    let (ours, theirs) = alternate(runs, ours, async || Ok(episodes(&agent, &peer.base).await?.per_second())).await?;
    trio.check_held(JobId::default(), acknowledged).await?;
    drop((server, peer));
    trio.stop().await;
    Ok(vec![Row::new(
        "begin, one chat, durable end; 32 clients",
        "episodes/s",
        Better::More,
        &ours,
        Some((PEER, &theirs)),
    )])
}

async fn episodes(agent: &Agent, base: &str) -> anyhow::Result<Done> {
    let (agent, base) = (agent.clone(), base.to_owned());
    LOAD.run(move |_| {
        let (agent, base) = (agent.clone(), base.clone());
        async move {
            let (episode, _) = agent.begin(&base).await?;
            agent.chat(&base, &episode).await?;
            agent.end(&base, &episode).await?;
            Ok(())
        }
    })
    .await
}

/// One real episode's answers and its envelope.
struct Canned {
    begun: Bytes,
    episode: Begun,
    chat: Bytes,
    end: Bytes,
    envelope: Vec<u8>,
}

#[derive(Deserialize)]
struct Ended {
    rollout: RolloutId,
}

impl Canned {
    async fn record(agent: &Agent, base: &str, trio: &Trio) -> anyhow::Result<Self> {
        let (episode, begun) = agent.begin(base).await?;
        let chat = agent.chat(base, &episode).await?;
        let end = agent.end(base, &episode).await?;
        let Ended { rollout } = serde_json::from_slice(&end).context("answer to an end")?;
        let envelope = rollouts::get_rollout(&*trio.holders[0].store, rollout)?
            .ok_or_else(|| anyhow!("the first episode's rollout is not on a holder"))?;
        Ok(Self { begun, episode, chat, end, envelope })
    }

    fn router(self, store: SharedStore) -> Router {
        let say = |body: Bytes| {
            post(move |_request: Bytes| async move { ([(header::CONTENT_TYPE, "application/json")], body) })
        };
        let (end, envelope, count) = (self.end, Arc::new(self.envelope), Arc::new(AtomicU64::new(0)));
        let store_and_say = post(move |_request: Bytes| {
            let (store, envelope, end) = (store.clone(), envelope.clone(), end.clone());
            let i = count.fetch_add(1, Ordering::Relaxed);
            async move {
                let put = tokio::task::spawn_blocking(move || put(&store, &envelope, i)).await;
                match put {
                    Ok(Ok(())) => Ok(([(header::CONTENT_TYPE, "application/json")], end)),
                    Ok(Err(e)) => Err((StatusCode::INTERNAL_SERVER_ERROR, e.to_string())),
                    Err(e) => Err((StatusCode::INTERNAL_SERVER_ERROR, e.to_string())),
                }
            }
        });
        Router::new()
            .route("/v1/episodes", say(self.begun))
            .route("/v1/chat/completions", say(self.chat))
            .route(&format!("/v1/episodes/{}/end", self.episode.episode), store_and_say)
    }
}

/// Stores a copy of `envelope` that is like no other; its last bytes are those of the signature.
fn put(store: &SharedStore, envelope: &[u8], i: u64) -> anyhow::Result<()> {
    let mut bytes = envelope.to_vec();
    let at = bytes.len().saturating_sub(8);
    for (to, from) in bytes[at..].iter_mut().zip(i.to_le_bytes()) {
        *to = from;
    }
    rollouts::put_rollouts(&**store, &[(RolloutId::of(&bytes), &bytes, JobId::default())], Durability::Synced)?;
    Ok(())
}
