//! As much of the OpenAI chat API as this agent needs.

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::{Value, json};
use std::time::Duration;

/// Where the model is. It changes with every episode: the key is the episode's.
pub(crate) struct Endpoint {
    pub(crate) base_url: String,
    pub(crate) api_key: String,
    pub(crate) model: String,
}

/// The model's message.
pub(crate) struct Reply {
    /// As it came: it goes back into the conversation like this.
    pub(crate) message: Value,
    pub(crate) content: String,
    pub(crate) tool_calls: Vec<ToolCall>,
}

#[derive(Deserialize)]
struct Message {
    content: Option<String>,
    tool_calls: Option<Vec<ToolCall>>,
}

#[derive(Deserialize)]
pub(crate) struct ToolCall {
    pub(crate) id: String,
    pub(crate) function: Function,
}

#[derive(Deserialize)]
pub(crate) struct Function {
    pub(crate) name: String,
    /// JSON, if the model wrote some.
    pub(crate) arguments: String,
}

/// A client that keeps its connection. The gateway is on this machine, so a proxy has no business in between.
pub(crate) fn client() -> Result<reqwest::Client> {
    Ok(reqwest::Client::builder().no_proxy().tcp_nodelay(true).build()?)
}

/// Tries of a call that the server could not take: it was not started, so trying again changes nothing.
const TRIES: u32 = 4;

/// Asks the model. Sampling is left to the job, so nothing but messages and tools is sent.
pub(crate) async fn ask(client: &reqwest::Client, to: &Endpoint, messages: &[Value], tools: &Value) -> Result<Reply> {
    let mut body = json!({ "model": to.model, "messages": messages });
    if !tools.is_null() {
        body["tools"] = tools.clone();
    }
    let url = format!("{}/chat/completions", to.base_url);
    for attempt in 1.. {
        let sent = client.post(&url).bearer_auth(&to.api_key).json(&body).send().await;
        let retryable = match &sent {
            Ok(response) => matches!(response.status().as_u16(), 429 | 503),
            Err(err) => err.is_connect(),
        };
        if retryable && attempt < TRIES {
            tokio::time::sleep(Duration::from_millis(100 << attempt)).await;
            continue;
        }
        let response = sent.with_context(|| format!("POST {url}"))?;
        let (status, text) = (response.status(), response.text().await?);
        if !status.is_success() {
            bail!("POST {url}: {status}: {text}");
        }
        return read(&text).with_context(|| format!("POST {url}: the answer was {text}"));
    }
    unreachable!("the last try returns")
}

fn read(text: &str) -> Result<Reply> {
    let mut body: Value = serde_json::from_str(text)?;
    let message = body.pointer_mut("/choices/0/message").context("field `choices[0].message` is missing")?.take();
    let Message { content, tool_calls } = Message::deserialize(&message)?;
    Ok(Reply { content: content.unwrap_or_default(), tool_calls: tool_calls.unwrap_or_default(), message })
}
