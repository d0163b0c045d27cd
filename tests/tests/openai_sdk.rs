//! The `openai` and `anthropic` packages, unmodified, against a running node; and the example agent in Python.

use anyhow::{Context, ensure};
use serde_json::Value;
use starling_tests::{Job, MODEL, Role, TestMesh, patience, python, python_anthropic, repository, until};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(120);

#[tokio::test]
async fn the_openai_package_works_as_it_is() -> anyhow::Result<()> {
    checks("sdk", python()?, "openai_sdk.py").await
}

#[tokio::test]
async fn the_anthropic_package_works_with_the_version_header_of_2023() -> anyhow::Result<()> {
    checks("anthropic-sdk", python_anthropic()?, "anthropic_sdk.py").await
}

/// Runs a script of checks against a node that serves the embedded model.
async fn checks(name: &str, python: PathBuf, script: &str) -> anyhow::Result<()> {
    let mut mesh = TestMesh::new(name)?;
    mesh.add("server-1", Role::Server).await?;
    // Its steps never come, since nobody ends enough episodes: the weights stay the embedded ones.
    mesh.submit(0, &Job { groups_per_step: 64, ..Job::tiny(name, 1) }).await?;
    until("the model is served", LIMIT, async || {
        let status = mesh[0].admin("/status").await.map_err(|e| format!("{e:#}"))?;
        if status["serving"][0]["model"] == MODEL { Ok(()) } else { Err(status["doing"].to_string()) }
    })
    .await?;
    let mut checks = tokio::process::Command::new(python);
    checks.arg(repository().join("tests/python").join(script)).arg(mesh[0].http()).arg(MODEL);
    checks.stdin(Stdio::null()).kill_on_drop(true).env("NO_PROXY", "127.0.0.1");
    let output = tokio::time::timeout(patience(LIMIT), checks.output()).await.context("the checks did not end")??;
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(!out.trim().is_empty(), "the checks did not start: {err}");
    let mut failed = String::new();
    for line in out.lines() {
        let check: Value = serde_json::from_str(line).with_context(|| format!("{line}\n{err}"))?;
        if !check["error"].is_null() {
            failed.push_str(&format!("{}: {}\n", check["check"].as_str().unwrap_or_default(), check["error"]));
        }
    }
    ensure!(failed.is_empty() && output.status.success(), "{failed}{err}");
    eprintln!("{} checks of {script} passed", out.lines().count());
    mesh.passed();
    Ok(())
}

#[tokio::test]
async fn the_example_agent_in_python_trains_a_step() -> anyhow::Result<()> {
    let python = python()?;
    let agent = format!("{} {}", python.display(), repository().join("examples/agents/python/agent.py").display());
    let mut mesh = TestMesh::new("python-agent")?;
    mesh.add("server-1", Role::Server).await?;
    let job = Job { sets: vec!["sums", "calculator"], groups_per_step: 2, ..Job::tiny("python-agent", 1) };
    let job = mesh.submit(0, &job).await?;
    // A process an episode, which imports openai each time: two at once keep two cores busy.
    let client = mesh.add("client-1", Role::Client { agent, worker: false, slots: 2 }).await?;
    mesh.reach(1, LIMIT).await?;
    let rollouts = mesh[0].cli_json(&["rollout", "list", &job]).await?;
    let consumed: Vec<&Value> =
        rollouts["rollouts"].as_array().into_iter().flatten().filter(|r| r["consumed_by"] == 1).collect();
    ensure!(consumed.len() == 4, "two groups of two: {rollouts}");
    ensure!(consumed.iter().all(|r| r["turns"].as_u64() > Some(0)), "every episode asked the model: {rollouts}");
    let status = mesh[client].cli_json(&["status"]).await?;
    ensure!(status["agents"]["ended"].as_u64() >= Some(4), "{}", status["agents"]);
    ensure!(status["agents"]["last_failure"].is_null(), "{}", status["agents"]);
    mesh.stop_all().await?;
    mesh.read_stores()?.ensure_clean()?;
    mesh.passed();
    Ok(())
}
