//! The command line's side of the admin routes.

use crate::BadInput;
use crate::data_dir::DataDir;
use anyhow::{Context, anyhow};
use reqwest::StatusCode;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::time::Duration;

/// Limit of one request; a submission waits for an election.
const LIMIT: Duration = Duration::from_secs(60);

/// Talks to the node that runs on a data folder.
#[derive(Debug, Clone)]
pub struct AdminClient {
    http: reqwest::Client,
    base: String,
    token: String,
}

impl AdminClient {
    /// Finds the node that runs on `data`.
    ///
    /// # Errors
    /// When none does.
    pub fn of(data: &DataDir) -> anyhow::Result<Self> {
        let running = data.running()?;
        Self::new(&running.http, data.admin_token()?)
    }

    /// For a node at `http`.
    ///
    /// # Errors
    /// When no HTTP client can be made.
    pub fn new(http: &str, token: String) -> anyhow::Result<Self> {
        let client = reqwest::Client::builder().timeout(LIMIT).no_proxy().build()?;
        Ok(Self { http: client, base: format!("{http}/starling/v1"), token })
    }

    /// GET.
    ///
    /// # Errors
    /// The node's own words, as [`BadInput`] where it calls the request bad, or why it cannot be reached.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<T> {
        self.send(self.http.get(format!("{}{path}", self.base))).await
    }

    /// POST.
    ///
    /// # Errors
    /// The node's own words, as [`BadInput`] where it calls the request bad, or why it cannot be reached.
    pub async fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> anyhow::Result<T> {
        self.send(self.http.post(format!("{}{path}", self.base)).json(body)).await
    }

    async fn send<T: DeserializeOwned>(&self, request: reqwest::RequestBuilder) -> anyhow::Result<T> {
        let response = request
            .bearer_auth(&self.token)
            .send()
            .await
            .with_context(|| format!("cannot reach the node at {}: is it still running?", self.base))?;
        let status = response.status();
        let body = response.bytes().await?;
        if !status.is_success() {
            let said: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
            let text = said["error"]["message"].as_str().map(str::to_owned);
            let said = anyhow!(text.unwrap_or_else(|| format!("the node answered {status}")));
            // What the node finds wrong with the request is the caller's to mend, as if it had been found here.
            return Err(if status == StatusCode::BAD_REQUEST { BadInput::wrap(said) } else { said });
        }
        serde_json::from_slice(&body).context("the node's answer is not what this version expects")
    }
}
