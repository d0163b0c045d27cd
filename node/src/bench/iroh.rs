//! The peer program `tests/peers/iroh-blobs`, which fetches a blob whenever it is told to.

use anyhow::{Context, bail};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

const PROGRAM: &str = "starling-peer-iroh-blobs";
/// How long a line of it may take.
const LIMIT: Duration = Duration::from_secs(120);

/// The running program; it ends with this.
pub(super) struct Iroh {
    _child: Child,
    ask: ChildStdin,
    said: Lines<BufReader<ChildStdout>>,
}

impl Iroh {
    /// `None`, and a word about it, where there is no such program.
    ///
    /// # Errors
    /// When it is there and does not start.
    pub(super) async fn start(program: Option<&Path>, len_bytes: usize) -> anyhow::Result<Option<Self>> {
        let Some(program) = program.map(Path::to_owned).or_else(built) else {
            eprintln!("starling bench: there is no {PROGRAM} to compare with; `make bench` builds it");
            return Ok(None);
        };
        let mut command = Command::new(&program);
        command.arg(len_bytes.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().with_context(|| format!("cannot start {}", program.display()))?;
        let ask = child.stdin.take().context("its standard input is a pipe")?;
        let said = BufReader::new(child.stdout.take().context("its standard output is a pipe")?).lines();
        let mut this = Self { _child: child, ask, said };
        match this.line().await?.as_str() {
            "ready" => Ok(Some(this)),
            other => bail!("{PROGRAM} said {other:?}, expected \"ready\""),
        }
    }

    /// How long it took until all bytes were verified and synced.
    ///
    /// # Errors
    /// When it ended or says something else.
    pub(super) async fn fetch(&mut self) -> anyhow::Result<Duration> {
        self.ask.write_all(b"fetch\n").await.with_context(|| format!("{PROGRAM} ended"))?;
        let line = self.line().await?;
        let seconds: f64 = line.parse().with_context(|| format!("{PROGRAM} said {line:?}, expected seconds"))?;
        Duration::try_from_secs_f64(seconds).with_context(|| format!("{PROGRAM} said {line:?}"))
    }

    async fn line(&mut self) -> anyhow::Result<String> {
        let line = tokio::time::timeout(LIMIT, self.said.next_line()).await;
        line.with_context(|| format!("{PROGRAM} said nothing for {LIMIT:?}"))??
            .with_context(|| format!("{PROGRAM} ended; its reason stands above"))
    }
}

/// Where `make bench` puts it: beside the folder of this program.
fn built() -> Option<PathBuf> {
    let exe = std::env::current_exe().ok()?;
    let path = exe.parent()?.parent()?.join("peers/release").join(PROGRAM);
    path.is_file().then_some(path)
}
