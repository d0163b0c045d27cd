//! A model's files beside its weights, wherever the mesh has them.

use starling_core::NodeCore;
use starling_protocol::control::ModelFiles;
use starling_protocol::manifest::Manifest;
use starling_protocol::wire::{LeaderCall, LeaderReply};
use starling_protocol::{ModelName, PolicyVersion};
use std::collections::BTreeMap;

/// Manifests of a model's weights and files, from this node's group or from a node that is in it.
///
/// # Errors
/// In words, with who was asked.
pub async fn manifests(core: &NodeCore, model: &ModelName) -> Result<(Manifest, ModelFiles), String> {
    if let Some(state) = core.groups().state(model) {
        let state = state.borrow().clone();
        let weights = state.weights.clone().ok_or_else(|| format!("model {model} has no weights yet"))?;
        return Ok((weights, state.files.clone()));
    }
    let call = LeaderCall::Status { model: model.clone() };
    match core.ask_leader(model, &call).await.map_err(|e| e.to_string())? {
        LeaderReply::Status(text) => {
            let mut v: serde_json::Value =
                serde_json::from_str(&text).map_err(|e| format!("status of {model}: {e}"))?;
            let mut take = |field: &str| v.get_mut(field).map(serde_json::Value::take).unwrap_or_default();
            let weights =
                serde_json::from_value(take("weights")).map_err(|e| format!("status field `weights`: {e}"))?;
            let files = serde_json::from_value(take("files")).map_err(|e| format!("status field `files`: {e}"))?;
            Ok((weights, files))
        }
        other => Err(format!("unexpected answer {other:?}")),
    }
}

/// Manifest of a model's newest optimizer state, with its version, from this node's group or from a node that is in it.
///
/// # Errors
/// In words, with who was asked.
pub async fn optimizer_state(core: &NodeCore, model: &ModelName) -> Result<Option<(PolicyVersion, Manifest)>, String> {
    if let Some(state) = core.groups().state(model) {
        return Ok(state.borrow().optimizer_state.clone());
    }
    let call = LeaderCall::Status { model: model.clone() };
    match core.ask_leader(model, &call).await.map_err(|e| e.to_string())? {
        LeaderReply::Status(text) => {
            let mut v: serde_json::Value =
                serde_json::from_str(&text).map_err(|e| format!("status of {model}: {e}"))?;
            let field = v.get_mut("optimizer_state").map(serde_json::Value::take).unwrap_or_default();
            serde_json::from_value(field).map_err(|e| format!("status field `optimizer_state`: {e}"))
        }
        other => Err(format!("unexpected answer {other:?}")),
    }
}

/// The files themselves.
///
/// # Errors
/// In words, with who was asked.
pub async fn fetch(core: &NodeCore, model: &ModelName) -> Result<BTreeMap<String, Vec<u8>>, String> {
    let (_, files) = manifests(core, model).await?;
    let sources = core.models().sources_of(model);
    let mut out = BTreeMap::new();
    for (name, m) in files {
        out.insert(name, core.blobs().fetch(&m, &sources).await.map_err(|e| e.to_string())?);
    }
    Ok(out)
}
