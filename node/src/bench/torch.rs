//! The peer program `tests/peers/torch_train.py`, which takes a step whenever it is told to.

use super::machine::cores;
use anyhow::{Context, bail};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

const SCRIPT: &str = include_str!("../../../tests/peers/torch_train.py");
/// How long a line of it may take: two steps on a busy machine.
const LIMIT: Duration = Duration::from_secs(600);

/// The running program; it ends with this.
pub(super) struct Torch {
    _child: Child,
    ask: ChildStdin,
    said: Lines<BufReader<ChildStdout>>,
}

impl Torch {
    /// By a Python that has torch.
    ///
    /// # Errors
    /// When it does not start.
    pub(super) async fn start(python: &Path) -> anyhow::Result<Self> {
        let mut command = Command::new(python);
        command.args(["-c", SCRIPT, &cores().to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().with_context(|| format!("cannot start {}", python.display()))?;
        let ask = child.stdin.take().context("its standard input is a pipe")?;
        let said = BufReader::new(child.stdout.take().context("its standard output is a pipe")?).lines();
        let mut this = Self { _child: child, ask, said };
        match this.line().await?.as_str() {
            "ready" => Ok(this),
            other => bail!("torch_train.py said {other:?}, expected \"ready\""),
        }
    }

    /// Seconds of one step of a kind that the script knows.
    ///
    /// # Errors
    /// When it ended or says something else.
    pub(super) async fn step(&mut self, kind: &str) -> anyhow::Result<f64> {
        self.ask.write_all(format!("{kind}\n").as_bytes()).await.context("torch_train.py ended")?;
        let line = self.line().await?;
        line.parse().with_context(|| format!("torch_train.py said {line:?}, expected seconds"))
    }

    async fn line(&mut self) -> anyhow::Result<String> {
        let line = tokio::time::timeout(LIMIT, self.said.next_line()).await;
        line.with_context(|| format!("torch_train.py said nothing for {LIMIT:?}"))??
            .context("torch_train.py ended; its reason stands above")
    }
}
