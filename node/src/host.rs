//! The agent runner's host: episodes come from leaders through the backend, and are begun at this node's gateway.

use crate::backend::NodeBackend;
use async_trait::async_trait;
use starling_agents::{ClaimOutcome, EpisodeHost, EpisodeStart};
use starling_gateway::Gateway;
use starling_protocol::{EpisodeId, ModelName};
use std::collections::BTreeMap;
use std::sync::Arc;

/// See the module's text.
pub struct GatewayHost {
    /// Where episodes are begun and ended.
    pub gateway: Gateway,
    /// Where they come from.
    pub backend: Arc<NodeBackend>,
    /// Only of these models; all when empty.
    pub models: Vec<ModelName>,
    /// The agent's name in rollouts.
    pub agent: String,
}

impl std::fmt::Debug for GatewayHost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("GatewayHost")
    }
}

#[async_trait]
impl EpisodeHost for GatewayHost {
    async fn claim(&self, want: usize, running: &[EpisodeId]) -> ClaimOutcome {
        let claimed = self.backend.client().claim(&self.models, want, running).await;
        let mut wait = claimed.wait;
        let mut episodes = Vec::with_capacity(claimed.assignments.len());
        for a in claimed.assignments {
            match self.gateway.begin_with(a.clone(), self.agent.clone()).await {
                Ok(h) => episodes.push(EpisodeStart::from_assignment(&h.assignment, h.base_url, h.key.0)),
                Err(e) => {
                    wait = Some(e.to_string());
                    self.backend.client().abort(&a, e.to_string()).await;
                }
            }
        }
        ClaimOutcome { episodes, revoked: claimed.revoked, wait, renewed: claimed.renewed }
    }

    async fn end(&self, episode: EpisodeId, reward: f64, metrics: BTreeMap<String, f64>) -> Result<(), String> {
        self.gateway.end(episode, reward, metrics).await.map(drop).map_err(|e| e.to_string())
    }

    async fn abort(&self, episode: EpisodeId, cause: String) {
        if let Err(e) = self.gateway.abort(episode, cause).await {
            tracing::debug!(episode = %episode.short(), error = %e, "nothing to abort");
        }
    }
}
