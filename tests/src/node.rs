//! One node: its process, its folder, its admin routes, its command line.

use crate::binaries::{agent_binary, starling_binary};
use crate::network::{Space, enter};
use crate::proxy::Proxy;
use crate::wait::{patience, until};
use anyhow::{Context, bail, ensure};
use reqwest::{Method, StatusCode};
use serde_json::Value;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

/// A node must answer within this time of its start.
const START_LIMIT: Duration = Duration::from_secs(30);
/// A node must end within this time of SIGTERM: its agents get 8 s, its HTTP 2 s.
const STOP_LIMIT: Duration = Duration::from_secs(20);
/// A command must end within this time.
const COMMAND_LIMIT: Duration = Duration::from_secs(60);
/// Where a node in a namespace of its own listens.
const PORT_IN_SPACE: u16 = 4001;

/// What a node is started as.
#[derive(Clone, Debug)]
pub enum Role {
    /// `--role server`.
    Server,
    /// `--role witness`.
    Witness,
    /// The same with `--model`.
    ServerWith {
        /// `[NAME=]PATH`.
        model: String,
    },
    /// `--role client` with a program.
    Client {
        /// The program with its arguments.
        agent: String,
        /// Long-lived workers instead of a process an episode.
        worker: bool,
        /// Episodes at once.
        slots: usize,
    },
}

impl Role {
    /// A client with the example agent in Rust, in worker mode.
    ///
    /// # Errors
    /// When the agent is not built.
    pub fn rust_agent(slots: usize) -> anyhow::Result<Self> {
        Ok(Self::Client { agent: format!("{} --worker", agent_binary()?.display()), worker: true, slots })
    }

    fn arguments(&self) -> Vec<String> {
        match self {
            Self::Server => vec!["--role".into(), "server".into()],
            Self::Witness => vec!["--role".into(), "witness".into()],
            Self::ServerWith { model } => ["--role", "server", "--model", model].map(str::to_owned).to_vec(),
            Self::Client { agent, worker, slots } => {
                let mode = if *worker { "worker" } else { "per-episode" };
                ["--role", "client", "--agent-mode", mode, "--slots", &slots.to_string(), "--agent", agent]
                    .map(str::to_owned)
                    .to_vec()
            }
        }
    }
}

/// What a command of the command line did.
#[derive(Clone, Debug)]
pub struct CliOutput {
    /// Its exit code.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl CliOutput {
    /// Standard output as JSON.
    ///
    /// # Errors
    /// When the command failed or printed something else.
    pub fn json(&self) -> anyhow::Result<Value> {
        ensure!(self.code == Some(0), "exit code {:?}: {}", self.code, self.stderr);
        serde_json::from_str(&self.stdout).with_context(|| format!("expected JSON, got {:?}", self.stdout))
    }

    /// Checks that the command refused what it was given: exit code 2, and a message with each of `words`.
    ///
    /// # Errors
    /// Says what is missing.
    pub fn ensure_refused(&self, words: &[&str]) -> anyhow::Result<()> {
        ensure!(self.code == Some(2), "expected exit code 2, got {:?}: {}", self.code, self.stderr);
        for word in words {
            ensure!(self.stderr.contains(word), "expected {word:?} in the message, got {:?}", self.stderr);
        }
        Ok(())
    }
}

/// Runs `starling` with `arguments` to its end.
///
/// # Errors
/// When it cannot be started or does not end.
pub async fn starling<S: AsRef<std::ffi::OsStr>>(arguments: &[S]) -> anyhow::Result<CliOutput> {
    starling_in(None, arguments).await
}

/// Runs `starling` in a namespace, if one is given, to its end.
///
/// # Errors
/// When it cannot be started or does not end.
pub async fn starling_in<S: AsRef<std::ffi::OsStr>>(
    space: Option<&Space>,
    arguments: &[S],
) -> anyhow::Result<CliOutput> {
    let mut command = tokio::process::Command::new(starling_binary()?);
    let namespace = space.map(Space::open).transpose()?;
    if let Some(fd) = namespace.as_ref().map(AsRawFd::as_raw_fd) {
        // SAFETY: one system call; the descriptor is open until the command has ended.
        unsafe { command.pre_exec(move || enter(fd)) };
    }
    command.args(arguments).stdin(Stdio::null()).env("STARLING_LOG", "error").kill_on_drop(true);
    let shown: Vec<_> = arguments.iter().map(|a| a.as_ref().to_string_lossy()).collect();
    let output = tokio::time::timeout(patience(COMMAND_LIMIT), command.output())
        .await
        .with_context(|| format!("`starling {}` did not end within {COMMAND_LIMIT:?}", shown.join(" ")))??;
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Ok(CliOutput { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) })
}

/// A node of a [`crate::TestMesh`].
#[derive(Debug)]
pub struct TestNode {
    name: String,
    role: Role,
    data: PathBuf,
    log: PathBuf,
    /// `None` for the node that begins the mesh.
    ticket: Option<String>,
    /// What every start gets besides.
    arguments: Vec<String>,
    child: Option<Child>,
    http: String,
    id: String,
    client: reqwest::Client,
    /// Where it runs, if not in the network of the test itself, and how its HTTP is reached there.
    space: Option<(Space, Proxy)>,
}

impl TestNode {
    pub(crate) fn new(
        root: &Path,
        name: &str,
        role: Role,
        ticket: Option<String>,
        arguments: Vec<String>,
        space: Option<Space>,
    ) -> anyhow::Result<Self> {
        let with_proxy = |space: Space| anyhow::Ok((space.clone(), Proxy::start(&space)?));
        Ok(Self {
            space: space.map(with_proxy).transpose()?,
            name: name.into(),
            role,
            data: root.join(name),
            log: root.join(format!("{name}.log")),
            ticket,
            arguments,
            child: None,
            http: String::new(),
            id: String::new(),
            client: reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(30)).build()?,
        })
    }

    /// Its name in the test.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its folder.
    #[must_use]
    pub fn data(&self) -> &Path {
        &self.data
    }

    /// Its log.
    #[must_use]
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Its node id, of the newest start.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// `http://127.0.0.1:port`, of the newest start, as the test reaches it.
    #[must_use]
    pub fn http(&self) -> &str {
        &self.http
    }

    /// Whether it was started and not stopped.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.child.is_some()
    }

    /// Its network namespace, if not that of the test itself.
    #[must_use]
    pub fn space(&self) -> Option<&Space> {
        self.space.as_ref().map(|(space, _)| space)
    }

    /// Its process, while it runs.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Whether it is a server.
    #[must_use]
    pub fn is_server(&self) -> bool {
        matches!(self.role, Role::Server)
    }

    /// Starts the process, for the first time or again, and waits until it answers.
    pub(crate) async fn start(&mut self) -> anyhow::Result<()> {
        use std::os::unix::process::CommandExt;
        ensure!(self.child.is_none(), "{} runs already", self.name);
        let node_json = self.data.join("node.json");
        let _ = std::fs::remove_file(&node_json);
        let log = std::fs::OpenOptions::new().create(true).append(true).open(&self.log)?;
        let mut command = std::process::Command::new(starling_binary()?);
        command.arg("--data").arg(&self.data);
        match &self.ticket {
            Some(ticket) => command.arg("join").arg(ticket),
            None => command.args(["node", "run"]),
        };
        command.args(["--http", "127.0.0.1:0", "--threads", "1"]).args(self.role.arguments()).args(&self.arguments);
        if let Some((space, _)) = &self.space {
            let ip = space.address();
            command.args(["--listen", &format!("/ip4/{ip}/udp/{PORT_IN_SPACE}/quic-v1")]);
            command.args(["--listen", &format!("/ip4/{ip}/tcp/{PORT_IN_SPACE}")]);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let namespace = self.space.as_ref().map(|(space, _)| space.open()).transpose()?;
        let fd = namespace.as_ref().map(AsRawFd::as_raw_fd);
        // SAFETY: prctl and setns are plain system calls; they neither allocate nor take locks.
        unsafe {
            command.pre_exec(move || {
                fd.map_or(Ok(()), enter)?;
                match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
                    0 => Ok(()),
                    _ => Err(std::io::Error::last_os_error()),
                }
            });
        }
        let child = command.spawn().with_context(|| format!("cannot start {}", self.name))?;
        let child = self.child.insert(child);
        let (name, log) = (&self.name, &self.log);
        let running = until(&format!("{name} is up"), START_LIMIT, async || {
            if let Ok(Some(status)) = child.try_wait() {
                return Ok(Err(status));
            }
            let text = std::fs::read_to_string(&node_json).map_err(|e| format!("{}: {e}", node_json.display()))?;
            serde_json::from_str::<Value>(&text).map(Ok).map_err(|e| e.to_string())
        })
        .await?;
        let running = match running {
            Ok(running) => running,
            Err(status) => {
                self.child = None;
                bail!("{name} ended at its start ({status}), see {}", log.display());
            }
        };
        let text =
            |field: &str| running[field].as_str().map(str::to_owned).with_context(|| format!("node.json: {field}"));
        self.http = text("http")?;
        if let Some((_, proxy)) = &self.space {
            let inside = self.http.trim_start_matches("http://");
            proxy.lead_to(inside.parse().with_context(|| format!("node.json: http {inside}"))?);
            self.http = format!("http://{}", proxy.address());
        }
        self.id = text("node")?;
        Ok(())
    }

    /// SIGKILL, to the process that this node started and to no other. Returns when it is gone.
    ///
    /// # Errors
    /// When it had ended by itself.
    pub(crate) fn kill(&mut self) -> anyhow::Result<()> {
        let mut child = self.child.take().with_context(|| format!("{} does not run", self.name))?;
        let ended = child.try_wait()?;
        child.kill()?;
        child.wait()?;
        match ended {
            Some(status) => bail!("{} had ended by itself ({status}), see {}", self.name, self.log.display()),
            None => Ok(()),
        }
    }

    pub(crate) fn terminate(&self) {
        self.signal(libc::SIGTERM);
    }

    /// SIGSTOP: it stands still, and its connections stay open.
    pub fn pause(&self) {
        self.signal(libc::SIGSTOP);
    }

    /// SIGCONT, after [`Self::pause`].
    pub fn resume(&self) {
        self.signal(libc::SIGCONT);
    }

    fn signal(&self, signal: i32) {
        if let Some(pid) = self.child.as_ref().and_then(|c| i32::try_from(c.id()).ok()) {
            // SAFETY: kill has no memory effects; the pid is of a child that was not waited for yet.
            unsafe { libc::kill(pid, signal) };
        }
    }

    /// After [`Self::terminate`].
    pub(crate) async fn ended(&mut self) -> anyhow::Result<()> {
        let Some(mut child) = self.child.take() else { return Ok(()) };
        let what = format!("{} ends after SIGTERM", self.name);
        let ended = until(&what, STOP_LIMIT, async || match child.try_wait() {
            Ok(Some(status)) => Ok(status),
            Ok(None) => Err("it runs".into()),
            Err(e) => Err(e.to_string()),
        })
        .await;
        if ended.is_err() {
            let _ = child.kill();
            let _ = child.wait();
        }
        let status = ended?;
        ensure!(status.success(), "{} ended with {status}, see {}", self.name, self.log.display());
        Ok(())
    }

    /// The status of an exit that nobody asked for.
    pub(crate) fn unexpected_exit(&mut self) -> Option<String> {
        let status = self.child.as_mut()?.try_wait().ok().flatten()?;
        Some(format!("{} ended by itself ({status}), see {}", self.name, self.log.display()))
    }

    pub(crate) fn destroy(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Sends a request to any route and gives back status and body; a body that is no JSON becomes a text.
    ///
    /// # Errors
    /// When the node does not answer.
    pub async fn call(
        &self,
        method: Method,
        route: &str,
        key: Option<&str>,
        body: impl Into<reqwest::Body>,
    ) -> anyhow::Result<(StatusCode, Value)> {
        let mut request = self.client.request(method, format!("{}{route}", self.http));
        request = request.header("content-type", "application/json").body(body);
        if let Some(key) = key {
            request = request.bearer_auth(key);
        }
        let response = request.send().await.with_context(|| format!("{} {route}", self.name))?;
        let status = response.status();
        let bytes = response.bytes().await?;
        let body = serde_json::from_slice(&bytes)
            .unwrap_or_else(|_not_json| Value::String(String::from_utf8_lossy(&bytes).into_owned()));
        Ok((status, body))
    }

    /// The operator's token.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn admin_token(&self) -> anyhow::Result<String> {
        let path = self.data.join("admin.token");
        Ok(std::fs::read_to_string(&path).with_context(|| path.display().to_string())?.trim().to_owned())
    }

    /// GET of an admin route under `/starling/v1`.
    ///
    /// # Errors
    /// When the node does not answer or refuses.
    pub async fn admin(&self, route: &str) -> anyhow::Result<Value> {
        let token = self.admin_token()?;
        let (status, body) = self.call(Method::GET, &format!("/starling/v1{route}"), Some(&token), "").await?;
        ensure!(status.is_success(), "{} {route}: {status}: {body}", self.name);
        Ok(body)
    }

    /// Runs a command of the command line on this node's folder.
    ///
    /// # Errors
    /// When it cannot be started or does not end.
    pub async fn cli(&self, arguments: &[&str]) -> anyhow::Result<CliOutput> {
        let data = self.data.display().to_string();
        starling_in(self.space.as_ref().map(|(s, _)| s), &[&["--data", &data], arguments].concat()).await
    }

    /// The same with `--json`, parsed.
    ///
    /// # Errors
    /// When the command fails or prints no JSON.
    pub async fn cli_json(&self, arguments: &[&str]) -> anyhow::Result<Value> {
        let output = self.cli(&[arguments, &["--json"]].concat()).await?;
        output.json().with_context(|| format!("starling {} --json", arguments.join(" ")))
    }
}
