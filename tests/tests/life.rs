//! The life of a mesh through its command line: begun, joined, trained, restarted, exported.

use anyhow::{Context, ensure};
use reqwest::Method;
use serde_json::{Value, json};
use starling_engine::{Checkpoint, Device};
use starling_protocol::manifest::Manifest;
use starling_tests::{Job, MODEL, Role, TestMesh, starling, until};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

/// The job of both tests: as long as the test runs.
fn job(name: &str) -> Job {
    Job { groups_per_step: 2, group_size: 4, lease_ttl_s: 5, ..Job::tiny(name, 100_000) }
}

#[tokio::test]
async fn every_command_tells_its_facts_as_json() -> anyhow::Result<()> {
    let mut mesh = TestMesh::new("life")?;
    // `init` makes the identity that `node run` then has.
    let data = mesh.root().join("server-1").display().to_string();
    let made = starling(&["--data", &data, "init", "--json"]).await?.json()?;
    let again = starling(&["--data", &data, "init", "--json"]).await?.json()?;
    ensure!(made == again && made["peer_id"].is_string(), "a second init changes nothing: {made} {again}");
    mesh.add("server-1", Role::Server).await?;
    ensure!(made["node"] == mesh[0].id(), "{made} is not {}", mesh[0].id());

    let ticket = mesh[0].cli_json(&["ticket"]).await?;
    ensure!(ticket["ticket"].as_str().is_some_and(|t| t.starts_with("starling1")), "{ticket}");
    mesh.add("server-2", Role::Server).await?;
    mesh.add("client-1", Role::rust_agent(4)?).await?;
    mesh.meet().await?;
    let nodes = mesh[0].cli_json(&["node", "list"]).await?;
    let nodes = nodes["nodes"].as_array().context("a list of nodes")?;
    ensure!(nodes.len() == 3 && nodes.iter().all(|n| n["live"] == true), "{nodes:?}");
    let roles: Vec<&Value> = nodes.iter().map(|n| &n["record"]["roles"]).collect();
    ensure!(roles.contains(&&json!(["client"])), "{roles:?}");

    let id = mesh.submit(0, &job("life")).await?;
    let jobs = mesh[1].cli_json(&["job", "list"]).await?;
    ensure!(jobs["jobs"][0]["job"] == id.as_str() && jobs["jobs"][0]["end"].is_null(), "{jobs}");
    mesh.reach(2, LIMIT).await?;
    let client = until("the client's agents have ended episodes", LIMIT, async || {
        let status = mesh[2].cli_json(&["status"]).await.map_err(|e| format!("{e:#}"))?;
        if status["agents"]["ended"].as_u64() > Some(0) { Ok(status) } else { Err(status["agents"].to_string()) }
    })
    .await?;
    ensure!(client["members"].as_array().map(Vec::len) == Some(3), "{client}");
    let status = mesh[0].cli_json(&["status"]).await?;
    ensure!(status["node"] == mesh[0].id() && status["models"][0]["model"] == MODEL, "{status}");
    ensure!(status["doing"].as_array().is_some_and(|d| !d.is_empty()), "it says what it does: {status}");

    let rollouts = mesh[0].cli_json(&["rollout", "list", &id, "--limit", "5"]).await?;
    let first = &rollouts["rollouts"][0];
    let rollout = first["id"].as_str().with_context(|| format!("a rollout in {rollouts}"))?;
    let shown = mesh[0].cli_json(&["rollout", "show", rollout]).await?;
    ensure!(shown["id"] == rollout && shown["rollout"]["job"] == id.as_str(), "{shown}");
    ensure!(shown["texts"][0].as_str().is_some_and(|t| !t.is_empty()), "its text: {shown}");

    let steps = mesh[1].cli_json(&["checkpoint", "list"]).await?;
    ensure!(steps["models"][0]["steps"][0]["version"] == 1, "{steps}");
    let stopped = mesh[1].cli_json(&["job", "stop", &id]).await?;
    ensure!(stopped["job"] == id.as_str(), "{stopped}");
    until("the job's end is listed", LIMIT, async || {
        let jobs = mesh[0].cli_json(&["job", "list"]).await.map_err(|e| format!("{e:#}"))?;
        if jobs["jobs"][0]["end"] == "stopped" { Ok(()) } else { Err(jobs.to_string()) }
    })
    .await?;

    let out = mesh.root().join("trained");
    let exported = mesh[0].cli_json(&["checkpoint", "export", MODEL, "--out", &out.display().to_string()]).await?;
    ensure!(exported["version"].as_u64() >= Some(2), "{exported}");
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        ensure!(out.join(file).is_file(), "{file} is missing in {}", out.display());
    }
    let checkpoint = Checkpoint::load(&out, &Device::Cpu)?;
    ensure!(checkpoint.files.contains_key("tokenizer.json"), "the tokenizer travels along");
    let committed = mesh[0].cli_json(&["checkpoint", "list"]).await?;
    let steps = committed["models"][0]["steps"].as_array().context("a list of steps")?;
    let step = steps.iter().find(|s| s["version"] == exported["version"]).context("the exported version")?;
    let hash = Manifest::of(&checkpoint.weights.to_safetensors()?).hash.to_string();
    ensure!(step["weights"] == hash.as_str(), "the exported weights are the committed ones: {step}, got {hash}");
    let refused = mesh[0].cli(&["checkpoint", "export", MODEL, "--out", &out.display().to_string()]).await?;
    ensure!(refused.code == Some(1) && refused.stderr.contains("not empty"), "{refused:?}");
    mesh.stop_all().await?;
    mesh.read_stores()?.ensure_clean()?;
    mesh.passed();
    Ok(())
}

#[tokio::test]
async fn a_killed_server_comes_back_and_a_late_one_serves() -> anyhow::Result<()> {
    let mut mesh = TestMesh::new("late")?;
    mesh.add("server-1", Role::Server).await?;
    mesh.add("server-2", Role::Server).await?;
    mesh.meet().await?;
    mesh.submit(0, &job("late")).await?;
    mesh.add("client-1", Role::rust_agent(4)?).await?;
    let before = mesh.reach(1, LIMIT).await?;

    let id = mesh[1].id().to_owned();
    let addresses = mesh[1].admin("/status").await?["addresses"].clone();
    mesh.kill(1)?;
    mesh.start(1).await?;
    ensure!(mesh[1].id() == id, "it was {id} and is {}", mesh[1].id());
    let now = mesh[1].admin("/status").await?["addresses"].clone();
    ensure!(now == addresses, "tickets that name {addresses} must keep their worth: it listens on {now}");
    // Two of two are needed to commit, so a step after the kill is one that both have agreed on.
    let target = mesh.reach(before + 2, LIMIT).await?;
    until("the restarted server has caught up and serves", LIMIT, async || served(&mesh, 1, target).await).await?;

    let late = mesh.add("server-3", Role::Server).await?;
    let target = mesh.version().await;
    until("the late server has the model and serves it", LIMIT, async || served(&mesh, late, target).await).await?;
    until("the late server is a voter", LIMIT, async || {
        let view = mesh[0].admin(&format!("/models/{MODEL}")).await.map_err(|e| format!("{e:#}"))?;
        let voters = view["voters"].as_array().map_or(0, Vec::len);
        if voters == 3 { Ok(()) } else { Err(view["voters"].to_string()) }
    })
    .await?;
    // With the first two gone nothing can be committed, and what is committed is still served: by the third alone.
    mesh.kill(0)?;
    mesh.kill(1)?;
    let body = json!({ "model": MODEL, "messages": [{ "role": "user", "content": "1+2" }], "max_tokens": 4 });
    until("the late server answers alone", LIMIT, async || {
        let sent = mesh[late].call(Method::POST, "/v1/chat/completions", None, body.to_string());
        match sent.await {
            Ok((status, answer)) if status.is_success() && answer["choices"][0]["message"].is_object() => Ok(()),
            Ok((status, answer)) => Err(format!("{status} {answer}")),
            Err(e) => Err(format!("{e:#}")),
        }
    })
    .await?;
    // And when they come back, training goes on.
    let version = mesh.version().await;
    mesh.start(0).await?;
    mesh.start(1).await?;
    mesh.reach(version + 2, LIMIT).await?;
    mesh.stop_all().await?;
    mesh.read_stores()?.ensure_clean()?;
    mesh.passed();
    Ok(())
}

/// Whether node `i` serves at least `version`.
async fn served(mesh: &TestMesh, i: usize, version: u64) -> Result<(), String> {
    let status = mesh[i].admin("/status").await.map_err(|e| format!("{e:#}"))?;
    let serving = status["serving"].as_array().into_iter().flatten();
    let served = serving.into_iter().any(|m| m["model"] == MODEL && m["version"].as_u64() >= Some(version));
    if served { Ok(()) } else { Err(format!("version {version} is wanted: {} {}", status["serving"], status["doing"])) }
}
