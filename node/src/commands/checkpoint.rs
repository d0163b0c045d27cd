//! `starling checkpoint`, and the reading and writing of model folders.

use super::client::AdminClient;
use crate::admin::ExportRequest;
use crate::{BadInput, model_files, print};
use anyhow::{Context, bail};
use serde_json::Value;
use starling_core::NodeCore;
use starling_engine::{Checkpoint, Device, LlamaConfig, SaveDtype, Weights, lora};
use starling_gateway::text::{ChatFormat, FormatError, ModelFiles};
use starling_protocol::{ModelName, PolicyVersion, Term};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// The weights as f32 safetensors and the other files, by name, of a Hugging Face folder or a GGUF file.
///
/// # Errors
/// Names the file, config key or tensor at fault; a tokenizer or chat template that does not work is one too.
pub fn read_model(path: &Path) -> anyhow::Result<BTreeMap<String, Vec<u8>>> {
    let checkpoint = Checkpoint::load(path, &Device::Cpu).with_context(|| path.display().to_string())?;
    let mut files = checkpoint.files;
    files.insert("config.json".into(), checkpoint.config.to_json().into_bytes());
    files.insert("model.safetensors".into(), checkpoint.weights.to_safetensors()?);
    if !files.contains_key("tokenizer.json") {
        bail!("{}: expected a tokenizer.json in it, or a tokenizer in a GGUF", path.display());
    }
    // A model that cannot be talked to is refused now, not at its first request.
    chat_format(&files).with_context(|| path.display().to_string())?;
    Ok(files)
}

/// The chat format that a model's files make.
///
/// # Errors
/// [`FormatError`] naming the file.
pub fn chat_format(files: &BTreeMap<String, Vec<u8>>) -> Result<ChatFormat, FormatError> {
    let file = |name: &str| files.get(name).map(Vec::as_slice);
    ChatFormat::new(&ModelFiles {
        tokenizer: file("tokenizer.json").unwrap_or_default(),
        tokenizer_config: file("tokenizer_config.json"),
        chat_template: file("chat_template.jinja"),
        config: file("config.json").unwrap_or_default(),
        generation_config: file("generation_config.json"),
    })
}

/// Creates `model` on the mesh from the files of a folder.
///
/// # Errors
/// In words.
pub async fn create(
    core: &Arc<NodeCore>,
    model: &ModelName,
    mut files: BTreeMap<String, Vec<u8>>,
) -> Result<(), String> {
    let weights = files.remove("model.safetensors").ok_or("model.safetensors is missing")?;
    let config = files.get("config.json").ok_or("config.json is missing")?;
    let config = LlamaConfig::from_json(config).map_err(|e| e.to_string())?;
    // f32 whatever the folder has: these are the optimizer's master weights.
    let weights = tokio::task::spawn_blocking(move || {
        Weights::from_safetensors(&config, &weights, &Device::Cpu)
            .map_err(|e| e.to_string())?
            .to_safetensors()
            .map_err(|e| e.to_string())
    })
    .await
    .map_err(|e| e.to_string())??;
    core.create_model(model, weights, files).await
}

fn check_empty(out: &Path) -> anyhow::Result<()> {
    if std::fs::read_dir(out).is_ok_and(|mut d| d.next().is_some()) {
        bail!("{} is not empty", out.display());
    }
    Ok(())
}

/// Writes the adapters of the newest step that kept optimizer state, as PEFT loads them.
///
/// # Errors
/// When the folder is not empty, the model is not trained by adapters, or their state cannot be had.
pub async fn export_adapter(core: &Arc<NodeCore>, model: &ModelName, out: &Path) -> anyhow::Result<PolicyVersion> {
    check_empty(out)?;
    let found = model_files::optimizer_state(core, model).await.map_err(anyhow::Error::msg)?;
    let (version, manifest) = found.with_context(|| format!("model {model} has no optimizer state"))?;
    let bytes = core.blobs().fetch(&manifest, &core.models().sources_of(model)).await?;
    let (out, base) = (out.to_owned(), model.to_string());
    tokio::task::spawn_blocking(move || -> anyhow::Result<()> {
        let adapter = lora::peft_adapter(&bytes, &base)?;
        let adapter = adapter.with_context(|| {
            format!("model {base}: expected adapters in the optimizer state (a job with `trainer.lora`), got none")
        })?;
        std::fs::create_dir_all(&out)?;
        std::fs::write(out.join("adapter_config.json"), adapter.config)?;
        Ok(std::fs::write(out.join("adapter_model.safetensors"), adapter.weights)?)
    })
    .await??;
    Ok(version)
}

/// Writes the newest committed version of `model` as a Hugging Face folder.
///
/// # Errors
/// When the folder is not empty, or weights or files cannot be had.
pub async fn export(core: &Arc<NodeCore>, model: &ModelName, out: &Path) -> anyhow::Result<PolicyVersion> {
    check_empty(out)?;
    let version = match core.groups().state(model) {
        Some(s) => s.borrow().version,
        None => core.models().get(model).with_context(|| format!("model {model} is not known on this mesh"))?.version,
    };
    let (weights, _) = model_files::manifests(core, model).await.map_err(anyhow::Error::msg)?;
    let sources = core.models().sources_of(model);
    let bytes = core.blobs().fetch(&weights, &sources).await?;
    let mut files = model_files::fetch(core, model).await.map_err(anyhow::Error::msg)?;
    let config = files.remove("config.json").context("the model has no config.json")?;
    let config = LlamaConfig::from_json(&config)?;
    let out = out.to_owned();
    tokio::task::spawn_blocking(move || -> anyhow::Result<()> {
        let weights = Weights::from_safetensors(&config, &bytes, &Device::Cpu)?;
        std::fs::create_dir_all(&out)?;
        Ok(Checkpoint { config, weights, files }.save(&out, SaveDtype::F32)?)
    })
    .await??;
    Ok(version)
}

/// `checkpoint export`.
///
/// # Errors
/// [`BadInput`] for the name, or the node's refusal.
pub async fn export_command(
    client: &AdminClient,
    model: &str,
    out: &Path,
    adapter: bool,
    json: bool,
) -> anyhow::Result<()> {
    let model: ModelName = model.parse().map_err(BadInput::wrap)?;
    let out = std::path::absolute(out)?;
    let v: Value = client.post(&format!("/checkpoints/{model}"), &ExportRequest { out: out.clone(), adapter }).await?;
    print(json, &v, || {
        let version = PolicyVersion(v["version"].as_u64().unwrap_or_default());
        let what = if adapter { "the adapters of version" } else { "version" };
        format!("{what} {version} of {model} lies in {}", out.display())
    })
}

/// `checkpoint list`.
///
/// # Errors
/// When the node cannot be asked.
pub async fn list(client: &AdminClient, json: bool) -> anyhow::Result<()> {
    let status: Value = client.get("/status").await?;
    let mut all = Vec::new();
    for m in status["models"].as_array().into_iter().flatten() {
        if let Some(name) = m["model"].as_str() {
            all.push(client.get::<Value>(&format!("/steps/{name}")).await?);
        }
    }
    let v = serde_json::json!({ "models": all });
    print(json, &v, || {
        let mut lines = Vec::new();
        for m in v["models"].as_array().into_iter().flatten() {
            for s in m["steps"].as_array().into_iter().flatten() {
                let hash = s["weights"].as_str().unwrap_or_default();
                let name = m["model"].as_str().unwrap_or_default();
                lines.push(format!(
                    "{name}  version {:>5}  term {:>3}  weights {}",
                    PolicyVersion(s["version"].as_u64().unwrap_or_default()),
                    Term(s["term"].as_u64().unwrap_or_default()),
                    &hash[..hash.len().min(16)]
                ));
            }
        }
        if lines.is_empty() { "no committed steps in this node's store".into() } else { lines.join("\n") }
    })
}
