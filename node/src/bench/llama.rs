//! llama.cpp behind `tests/peers/llama-cpp/serve.py`, which answers one line with one line.

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// The running program; it ends with this.
pub(super) struct Llama {
    command: String,
    child: Child,
    ask: ChildStdin,
    said: Lines<BufReader<ChildStdout>>,
}

/// What it is asked to continue, all at once.
#[derive(Debug, Serialize)]
pub(super) struct Ask<'a> {
    /// Token ids of each prompt.
    pub(super) prompts: &'a [Vec<u32>],
    /// Greedy tokens after each.
    pub(super) new: u32,
    /// Whether it may go on from what it has computed before.
    pub(super) cache: bool,
}

/// How long that took; times in seconds.
#[derive(Debug, Deserialize)]
pub(super) struct Answer {
    /// From the first request to the last answer.
    pub(super) seconds: f64,
    /// For the prompt, by llama.cpp's own clock.
    pub(super) prompt_seconds: f64,
    /// For the new tokens, likewise.
    pub(super) decode_seconds: f64,
    /// Processor time of all its threads.
    pub(super) cpu_seconds: f64,
    /// New tokens of all prompts.
    pub(super) tokens: u64,
    /// Resident memory at most.
    pub(super) peak_bytes: u64,
}

impl Llama {
    /// Starts `command` (words apart by spaces) and waits until its model is loaded.
    ///
    /// # Errors
    /// When it does not start, or says something else.
    pub(super) fn start(command: &str) -> anyhow::Result<Self> {
        let mut words = command.split_whitespace();
        let program = words.next().context("--llama-cpp: expected a command, got nothing")?;
        let mut child = Command::new(program)
            .args(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("--llama-cpp: cannot start {program}"))?;
        let ask = child.stdin.take().context("its standard input is a pipe")?;
        let said = BufReader::new(child.stdout.take().context("its standard output is a pipe")?).lines();
        let mut this = Self { command: command.to_owned(), child, ask, said };
        match this.line()?.as_str() {
            "ready" => Ok(this),
            other => bail!("--llama-cpp {command}: expected \"ready\", got {other:?}"),
        }
    }

    /// Has the prompts continued.
    ///
    /// # Errors
    /// When it ended or says something else.
    pub(super) fn complete(&mut self, ask: &Ask<'_>) -> anyhow::Result<Answer> {
        let mut line = serde_json::to_vec(ask)?;
        line.push(b'\n');
        self.ask.write_all(&line).with_context(|| format!("--llama-cpp {}: ended", self.command))?;
        let answer = self.line()?;
        serde_json::from_str(&answer).with_context(|| format!("--llama-cpp {}: said {answer:?}", self.command))
    }

    fn line(&mut self) -> anyhow::Result<String> {
        let line = self.said.next().with_context(|| format!("--llama-cpp {}: ended", self.command))?;
        Ok(line?)
    }
}

impl Drop for Llama {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
