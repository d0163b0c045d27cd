//! `starling group reopen`.

use super::client::AdminClient;
use crate::{BadInput, print};
use anyhow::Context;
use serde_json::{Value, json};
use starling_protocol::{Line, ModelName};

/// `group reopen`.
///
/// # Errors
/// When no node runs, the model's name is none, or the node refuses, with its reason.
pub async fn reopen(client: &AdminClient, model: &str, json: bool) -> anyhow::Result<()> {
    let model: ModelName = model.parse().map_err(BadInput::wrap)?;
    let v: Value = client.post(&format!("/reopen/{model}"), &json!({})).await?;
    let line: Line = serde_json::from_value(v["line"].clone()).context("the node's answer")?;
    print(json, &v, || format!("{model} goes on from step {} in generation {}", line.steps, line.generation))
}
