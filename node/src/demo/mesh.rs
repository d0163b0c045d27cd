//! A mesh of processes, for the demo and for benchmarks: started, watched, killed, started again, stopped.

use crate::commands::client::AdminClient;
use crate::commands::job::SubmitReport;
use crate::data_dir::DataDir;
use crate::job_file::{JobFile, Submission};
use anyhow::{Context, bail};
use serde_json::Value;
use starling_protocol::NodeId;
use starling_storage::{AuditReport, RocksStore, SharedStore, audit};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::process::{Child, Command};

/// What the mesh consists of.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// Servers, the first ones in the list of nodes.
    pub(crate) servers: usize,
    /// Clients, after the servers.
    pub(crate) clients: usize,
    /// Episodes at once on each client.
    pub(crate) slots: usize,
    /// Further arguments of every node.
    pub(crate) arguments: Vec<String>,
}

/// A node must be up within this time.
const START_LIMIT: Duration = Duration::from_secs(30);

const TASKS: [(&str, &str); 4] = [
    ("tasks/sums/train.jsonl", include_str!("../../../tasks/sums/train.jsonl")),
    ("tasks/sums/heldout.jsonl", include_str!("../../../tasks/sums/heldout.jsonl")),
    ("tasks/calculator/train.jsonl", include_str!("../../../tasks/calculator/train.jsonl")),
    ("tasks/calculator/heldout.jsonl", include_str!("../../../tasks/calculator/heldout.jsonl")),
];

/// A job whose task files are those that the binary carries, as `../tasks/…`.
pub(crate) fn submission(job: &str, steps: u64, seed: u64) -> anyhow::Result<Submission> {
    let dir = tempfile::tempdir()?;
    for (path, text) in TASKS {
        let path = dir.path().join(path);
        std::fs::create_dir_all(path.parent().context("task files lie in folders")?)?;
        std::fs::write(path, text)?;
    }
    let mut job = JobFile::parse(job)?;
    job.steps = steps;
    job.seed = seed;
    for t in &mut job.tasks {
        t.rebase("../");
    }
    job.into_submission(dir.path())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NodeKind {
    Server,
    Client,
}

struct Process {
    kind: NodeKind,
    data: DataDir,
    child: Option<Child>,
    client: Option<AdminClient>,
    node: Option<NodeId>,
}

pub(crate) struct Demo {
    root: PathBuf,
    plan: Plan,
    processes: Vec<Process>,
    ticket: Option<String>,
    peak_rss_kib: u64,
    last_sample: Option<Instant>,
}

impl Demo {
    /// Folders under `dir/nodes`, emptied first: a mesh starts from nothing.
    pub(crate) fn new(dir: &Path, plan: Plan) -> anyhow::Result<Self> {
        let root = dir.join("nodes");
        if root.exists() {
            std::fs::remove_dir_all(&root).with_context(|| format!("cannot empty {}", root.display()))?;
        }
        let mut processes = Vec::new();
        for i in 0..plan.servers + plan.clients {
            let (kind, name) = if i < plan.servers {
                (NodeKind::Server, format!("server-{}", i + 1))
            } else {
                (NodeKind::Client, format!("client-{}", i + 1 - plan.servers))
            };
            let data = DataDir::open(Some(&root.join(name)))?;
            processes.push(Process { kind, data, child: None, client: None, node: None });
        }
        Ok(Self { root, plan, processes, ticket: None, peak_rss_kib: 0, last_sample: None })
    }

    pub(crate) fn logs(&self) -> &Path {
        &self.root
    }

    pub(crate) fn name(&self, i: usize) -> String {
        let path = self.processes[i].data.path();
        path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default()
    }

    pub(crate) fn index_of(&self, node: NodeId) -> Option<usize> {
        self.processes.iter().position(|p| p.node == Some(node))
    }

    pub(crate) fn peak_rss_mib(&self) -> u64 {
        self.peak_rss_kib / 1024
    }

    /// Admin clients of the servers that run, with their index.
    pub(crate) fn live_servers(&self) -> Vec<(usize, AdminClient)> {
        let live = |(i, p): (usize, &Process)| {
            let up = p.kind == NodeKind::Server && p.child.is_some();
            p.client.clone().filter(|_| up).map(|c| (i, c))
        };
        self.processes.iter().enumerate().filter_map(live).collect()
    }

    pub(crate) async fn start_all(&mut self) -> anyhow::Result<()> {
        self.start(NodeKind::Server, 0).await?;
        let client = self.processes[0].client.clone().context("the first server runs")?;
        let ticket: Value = client.get("/ticket").await?;
        self.ticket = Some(ticket["ticket"].as_str().context("a ticket is text")?.to_owned());
        for i in 1..self.processes.len() {
            self.start(self.processes[i].kind, i).await?;
        }
        let deadline = Instant::now() + START_LIMIT;
        loop {
            let status: Value = client.get("/status").await?;
            let nodes: Value = client.get("/nodes").await?;
            let known = nodes["nodes"].as_array().map_or(0, |n| n.iter().filter(|n| n["live"] == true).count());
            let members = status["members"].as_array().map_or(0, Vec::len);
            if members == self.processes.len() && known == self.processes.len() {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("only {members} of {} nodes found each other within {START_LIMIT:?}", self.processes.len());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Starts node `i`, for the first time or again, and waits until it answers.
    pub(crate) async fn start(&mut self, kind: NodeKind, i: usize) -> anyhow::Result<()> {
        let name = self.name(i);
        let process = &mut self.processes[i];
        process.data.clear_running();
        let exe = std::env::current_exe().context("cannot find this program")?;
        let mut command = Command::new(exe);
        command.arg("--data").arg(process.data.path());
        match &self.ticket {
            Some(t) => command.arg("join").arg(t),
            None => command.args(["node", "run"]),
        };
        command.args(["--http", "127.0.0.1:0", "--threads", "2"]).args(&self.plan.arguments);
        match kind {
            NodeKind::Server => command.args(["--role", "server"]),
            NodeKind::Client => {
                command.args(["--role", "client", "--agent-mode", "worker", "--slots", &self.plan.slots.to_string()]);
                command.arg("--agent").arg(format!("{} --worker", agent_binary()?.display()))
            }
        };
        let log = self.root.join(format!("{name}.log"));
        let log = std::fs::OpenOptions::new().create(true).append(true).open(log)?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).kill_on_drop(true);
        process.child = Some(command.spawn().with_context(|| format!("cannot start {name}"))?);
        let deadline = Instant::now() + START_LIMIT;
        let running = loop {
            if let Ok(r) = process.data.running() {
                break r;
            }
            let exited = process.child.as_mut().and_then(|c| c.try_wait().ok().flatten());
            if let Some(status) = exited {
                bail!("{name} ended at its start ({status}); its log is in {}", self.root.display());
            }
            if Instant::now() > deadline {
                bail!("{name} was not up within {START_LIMIT:?}; its log is in {}", self.root.display());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        };
        process.node = Some(running.node);
        process.client = Some(AdminClient::new(&running.http, process.data.admin_token()?)?);
        Ok(())
    }

    pub(crate) async fn submit(&self, s: &Submission) -> anyhow::Result<SubmitReport> {
        let client = self.processes[0].client.as_ref().context("the first server runs")?;
        client.post("/jobs", s).await
    }

    /// SIGKILL, as a power cut would be.
    pub(crate) fn kill(&mut self, i: usize) -> anyhow::Result<()> {
        let process = &mut self.processes[i];
        if let Some(mut child) = process.child.take() {
            child.start_kill().context("cannot kill the leader")?;
            tokio::spawn(async move { child.wait().await });
        }
        process.data.clear_running();
        Ok(())
    }

    /// A node that ended although nobody asked it to.
    pub(crate) fn unexpected_exit(&mut self) -> anyhow::Result<Option<String>> {
        for i in 0..self.processes.len() {
            let exited = match &mut self.processes[i].child {
                Some(c) => c.try_wait()?,
                None => None,
            };
            if let Some(status) = exited {
                return Ok(Some(format!("{} ({status})", self.name(i))));
            }
        }
        Ok(None)
    }

    pub(crate) async fn stop_all(&mut self) {
        for p in &self.processes {
            if let Some(pid) = p.child.as_ref().and_then(Child::id).and_then(|p| i32::try_from(p).ok()) {
                // SAFETY: kill has no memory effects; the pid is of a child that was not waited for yet.
                unsafe { libc::kill(pid, libc::SIGTERM) };
            }
        }
        for p in &mut self.processes {
            if let Some(mut child) = p.child.take()
                && tokio::time::timeout(Duration::from_secs(12), child.wait()).await.is_err()
            {
                let _ = child.kill().await;
            }
        }
    }

    /// Resident memory of the nodes and their agents, all together; sampled twice a second.
    pub(crate) fn sample_memory(&mut self) {
        if self.last_sample.is_some_and(|t| t.elapsed() < Duration::from_millis(500)) {
            return;
        }
        self.last_sample = Some(Instant::now());
        let roots: Vec<u32> = self.processes.iter().filter_map(|p| p.child.as_ref()?.id()).collect();
        self.peak_rss_kib = self.peak_rss_kib.max(tree_rss_kib(&roots) + own_rss_kib());
    }

    /// From the stores alone: what was acknowledged, held, consumed.
    pub(crate) fn audit(&self) -> anyhow::Result<AuditReport> {
        let mut stores: Vec<SharedStore> = Vec::new();
        for p in &self.processes {
            let path = p.data.store();
            let store = RocksStore::open_read_only(&path).with_context(|| path.display().to_string())?;
            stores.push(Arc::new(store));
        }
        Ok(audit(&stores, [])?)
    }
}

fn own_rss_kib() -> u64 {
    rss_kib(std::process::id())
}

fn rss_kib(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix("VmRSS:"));
    line.and_then(|l| l.trim().trim_end_matches(" kB").trim().parse().ok()).unwrap_or(0)
}

/// `roots` and all their descendants.
fn tree_rss_kib(roots: &[u32]) -> u64 {
    let mut parents = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // The command's name may hold blanks and brackets: fields count from the last bracket.
        let ppid = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1)?.parse::<u32>().ok());
        if let Some(ppid) = ppid {
            parents.push((pid, ppid));
        }
    }
    let mut tree: Vec<u32> = roots.to_vec();
    let mut i = 0;
    while i < tree.len() {
        let parent = tree[i];
        tree.extend(parents.iter().filter(|(_, p)| *p == parent).map(|(c, _)| *c));
        i += 1;
    }
    tree.into_iter().map(rss_kib).sum()
}

/// The agent that clients run: the example in Rust, beside this binary.
fn agent_binary() -> anyhow::Result<PathBuf> {
    let exe = std::env::current_exe().context("cannot find this program")?;
    let agent = exe.with_file_name("starling-agent-rust");
    if !agent.is_file() {
        bail!("{} is missing: build it with `make build`", agent.display());
    }
    Ok(agent)
}
