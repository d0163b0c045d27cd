//! A server on any port of loopback, and calls to it.

use anyhow::{Context, bail};
use axum::Router;
use axum::body::Bytes;
use serde::Deserialize;
use starling_gateway::text::byte_model;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// Name of the model that is served.
pub(super) const MODEL: &str = "bench";
/// An agent's first call.
pub(super) const CHAT: &str =
    r#"{"model":"bench","messages":[{"role":"user","content":"What is 12 * 34? Answer with the number only."}]}"#;

/// What the null engine says: 16 tokens of the byte-level model, the end among them.
pub(super) fn answer() -> Vec<u32> {
    b"The sum is 408.".iter().map(|b| u32::from(*b)).chain([byte_model::END]).collect()
}

/// Ends when it is dropped.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) base: String,
    task: JoinHandle<()>,
}

impl Server {
    /// # Errors
    /// When loopback cannot be listened on.
    pub(super) async fn start(router: Router) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.context("cannot listen on loopback")?;
        let base = format!("http://{}", listener.local_addr()?);
        let task = tokio::spawn(async move {
            if let Err(e) = axum::serve(listener, router).await {
                tracing::error!(error = %e, "the server ended");
            }
        });
        Ok(Self { base, task })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// An agent's side.
#[derive(Clone, Debug)]
pub(super) struct Agent(reqwest::Client);

/// What the gateway answers to a begin, as far as an agent needs it.
#[derive(Debug, Deserialize)]
pub(super) struct Begun {
    pub(super) episode: String,
    pub(super) api_key: String,
}

impl Agent {
    /// # Errors
    /// When the client cannot be built.
    pub(super) fn new() -> anyhow::Result<Self> {
        // No proxy of the environment: the servers are in this process.
        Ok(Self(reqwest::Client::builder().no_proxy().build()?))
    }

    /// # Errors
    /// When there is no answer, or one that is not 200.
    pub(super) async fn post(&self, url: &str, key: Option<&str>, body: &'static str) -> anyhow::Result<Bytes> {
        let mut request = self.0.post(url).header("content-type", "application/json").body(body);
        if let Some(key) = key {
            request = request.bearer_auth(key);
        }
        let response = request.send().await?;
        let status = response.status();
        let answer = response.bytes().await?;
        if !status.is_success() {
            bail!("{url}: {status}: {}", String::from_utf8_lossy(&answer));
        }
        Ok(answer)
    }

    /// # Errors
    /// As [`Agent::post`].
    pub(super) async fn begin(&self, base: &str) -> anyhow::Result<(Begun, Bytes)> {
        let answer = self.post(&format!("{base}/v1/episodes"), None, r#"{"agent":"bench"}"#).await?;
        Ok((serde_json::from_slice(&answer).context("answer to a begin")?, answer))
    }

    /// # Errors
    /// As [`Agent::post`].
    pub(super) async fn chat(&self, base: &str, episode: &Begun) -> anyhow::Result<Bytes> {
        self.post(&format!("{base}/v1/chat/completions"), Some(&episode.api_key), CHAT).await
    }

    /// # Errors
    /// As [`Agent::post`].
    pub(super) async fn end(&self, base: &str, episode: &Begun) -> anyhow::Result<Bytes> {
        let url = format!("{base}/v1/episodes/{}/end", episode.episode);
        self.post(&url, Some(&episode.api_key), r#"{"reward":1.0}"#).await
    }
}
