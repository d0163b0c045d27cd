//! An agent in Rust: solves the task sets `sums` and `calculator` with a model behind an OpenAI-compatible API.
//!
//! ```text
//! starling-agent-rust [--worker] [--set sums|calculator]
//! ```
//!
//! Without `--worker` it runs one episode: task on standard input, result on standard output. With it, one episode per
//! line of input. The contract is in `docs/agents.md`; [`episode::run`] is the part to replace with an agent of yours.

mod calculator;
mod chat;
mod episode;
mod task;

use anyhow::{Context, Result, bail};
use chat::Endpoint;
use serde::Deserialize;
use serde_json::{Value, json};
use std::io::{BufRead, Read, Write};
use task::{Kind, Task};

/// A worker's input line. Fields that this agent has no use for are left out.
#[derive(Deserialize)]
struct EpisodeLine {
    episode: String,
    task: Value,
    base_url: String,
    api_key: String,
    model: String,
}

fn main() -> Result<()> {
    let (mut worker, mut kind) = (false, None);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--worker" => worker = true,
            "--set" => kind = Some(args.next().context("--set: a name is missing")?.parse::<Kind>()?),
            other => bail!("argument {other:?}: expected --worker or --set NAME"),
        }
    }
    // One thread is enough: an episode mostly waits for the model.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let client = chat::client()?;
    if worker {
        return serve(&runtime, &client, kind);
    }
    let mut line = String::new();
    std::io::stdin().read_to_string(&mut line).context("standard input")?;
    let task = Task::new(&serde_json::from_str(&line).context("task")?, kind)?;
    let variable = |name: &str| std::env::var(name).with_context(|| format!("environment variable {name}"));
    let endpoint = Endpoint {
        base_url: variable("OPENAI_BASE_URL")?,
        api_key: variable("OPENAI_API_KEY")?,
        model: variable("STARLING_MODEL")?,
    };
    let outcome = runtime.block_on(episode::run(&client, &endpoint, &task))?;
    answer(&json!({ "reward": outcome.reward, "metrics": outcome.metrics }))
}

/// Runs an episode per input line until the input ends. The client keeps its connection between them.
fn serve(runtime: &tokio::runtime::Runtime, client: &reqwest::Client, kind: Option<Kind>) -> Result<()> {
    for line in std::io::stdin().lock().lines() {
        let EpisodeLine { episode, task, base_url, api_key, model } =
            serde_json::from_str(&line?).context("input line")?;
        let endpoint = Endpoint { base_url, api_key, model };
        let result = Task::new(&task, kind).and_then(|task| runtime.block_on(episode::run(client, &endpoint, &task)));
        answer(&match result {
            Ok(outcome) => json!({ "episode": episode, "reward": outcome.reward, "metrics": outcome.metrics }),
            // It costs this episode; the worker goes on.
            Err(err) => json!({ "episode": episode, "error": format!("{err:#}") }),
        })?;
    }
    Ok(())
}

fn answer(line: &Value) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}
