//! A mesh of processes in a folder of its own.

use crate::audit::StoresReport;
use crate::job::Job;
use crate::network::Network;
use crate::node::{Role, TestNode};
use crate::seed::Seed;
use crate::wait::until;
use anyhow::{Context, bail, ensure};
use serde_json::Value;
use std::ops::Index;
use std::path::Path;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// All nodes must know each other within this time.
const MEET_LIMIT: Duration = Duration::from_secs(30);
/// Lines of each log that a failure shows.
const LOG_LINES_SHOWN: usize = 12;

/// See the crate's text.
#[derive(Debug)]
pub struct TestMesh {
    root: Option<TempDir>,
    seed: Option<Seed>,
    nodes: Vec<TestNode>,
    ticket: Option<String>,
    /// What every node gets besides its role.
    arguments: Vec<String>,
    /// After the nodes: their processes end first.
    network: Option<Network>,
    passed: bool,
}

impl Index<usize> for TestMesh {
    type Output = TestNode;
    fn index(&self, i: usize) -> &TestNode {
        &self.nodes[i]
    }
}

impl TestMesh {
    /// An empty folder.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn new(name: &str) -> anyhow::Result<Self> {
        Self::new_in(&std::env::temp_dir(), name)
    }

    /// An empty folder inside `parent`.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn new_in(parent: &Path, name: &str) -> anyhow::Result<Self> {
        let root = tempfile::Builder::new().prefix(&format!("starling-{name}-")).tempdir_in(parent)?;
        let (nodes, arguments) = (Vec::new(), Vec::new());
        Ok(Self { root: Some(root), seed: None, nodes, ticket: None, arguments, network: None, passed: false })
    }

    /// The seed that a failure must show.
    #[must_use]
    pub fn seeded(mut self, seed: Seed) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Every node is started with `arguments` besides.
    #[must_use]
    pub fn with_arguments(mut self, arguments: &[&str]) -> Self {
        self.arguments = arguments.iter().map(|a| (*a).to_owned()).collect();
        self
    }

    /// Node `i` is to run at place `i` of `network`.
    #[must_use]
    pub fn within(mut self, network: Network) -> Self {
        self.network = Some(network);
        self
    }

    /// The network, to cut.
    ///
    /// # Errors
    /// When the nodes run in the network of the test itself.
    pub fn network(&self) -> anyhow::Result<&Network> {
        self.network.as_ref().context("the mesh was not made within a network of its own")
    }

    /// The folder: data folders, `<node>.log`, job files.
    #[must_use]
    pub fn root(&self) -> &Path {
        self.root.as_ref().map_or(Path::new("."), TempDir::path)
    }

    /// Nodes so far.
    #[must_use]
    pub fn nodes(&self) -> &[TestNode] {
        &self.nodes
    }

    /// Starts one more node and returns its index. The first one begins the mesh, the others join it.
    ///
    /// # Errors
    /// When it is not up in time.
    pub async fn add(&mut self, name: &str, role: Role) -> anyhow::Result<usize> {
        let ticket = self.ticket.clone();
        self.add_with_ticket(name, role, ticket).await
    }

    /// Starts one more node that joins with `ticket`.
    ///
    /// # Errors
    /// When it is not up in time.
    pub async fn add_with_ticket(&mut self, name: &str, role: Role, ticket: Option<String>) -> anyhow::Result<usize> {
        let space = self.network.as_ref().map(|n| n.space(self.nodes.len()).clone());
        let node = TestNode::new(self.root(), name, role, ticket, self.arguments.clone(), space)?;
        self.nodes.push(node);
        let i = self.nodes.len() - 1;
        self.start(i).await?;
        if i == 0 {
            let answer = self[0].admin("/ticket").await?;
            self.ticket = Some(answer["ticket"].as_str().context("a ticket is text")?.to_owned());
        }
        Ok(i)
    }

    /// Starts node `i` again, on its folder.
    ///
    /// # Errors
    /// When it runs, or is not up in time.
    pub async fn start(&mut self, i: usize) -> anyhow::Result<()> {
        self.nodes[i].start().await
    }

    /// SIGKILL to node `i`; returns when it is gone.
    ///
    /// # Errors
    /// When it had ended by itself.
    pub fn kill(&mut self, i: usize) -> anyhow::Result<()> {
        self.nodes[i].kill()
    }

    /// SIGTERM to node `i`; returns when it is gone.
    ///
    /// # Errors
    /// When it had to be killed, or ended with a failure.
    pub async fn stop(&mut self, i: usize) -> anyhow::Result<()> {
        self.nodes[i].terminate();
        self.nodes[i].ended().await
    }

    /// What happens when node `i` leaves for good: its folder, identity and store included, is deleted. When it starts
    /// again, somebody new begins at its place.
    ///
    /// # Errors
    /// When it runs, or the folder cannot be deleted.
    pub fn erase(&self, i: usize) -> anyhow::Result<()> {
        ensure!(!self[i].is_up(), "{} runs", self[i].name());
        std::fs::remove_dir_all(self[i].data()).with_context(|| self[i].data().display().to_string())
    }

    /// SIGTERM to all nodes; returns when they are gone.
    ///
    /// # Errors
    /// When one had to be killed, or ended with a failure.
    pub async fn stop_all(&mut self) -> anyhow::Result<()> {
        self.nodes.iter().for_each(TestNode::terminate);
        for node in &mut self.nodes {
            node.ended().await?;
        }
        Ok(())
    }

    /// Fails when a node ended although nobody asked it to.
    ///
    /// # Errors
    /// Names it.
    pub fn ensure_all_run(&mut self) -> anyhow::Result<()> {
        match self.nodes.iter_mut().find_map(TestNode::unexpected_exit) {
            Some(what) => bail!(what),
            None => Ok(()),
        }
    }

    /// Nodes that ended although nobody asked them to, each told once.
    pub fn unexpected_exits(&mut self) -> Vec<(usize, String)> {
        let mut found = Vec::new();
        for (i, node) in self.nodes.iter_mut().enumerate() {
            if let Some(what) = node.unexpected_exit() {
                node.destroy();
                found.push((i, what));
            }
        }
        found
    }

    /// Waits until every running node sees every other one, with its record.
    ///
    /// # Errors
    /// When they do not meet in time.
    pub async fn meet(&self) -> anyhow::Result<()> {
        let up: Vec<&TestNode> = self.nodes.iter().filter(|n| n.is_up()).collect();
        until("all nodes know each other", MEET_LIMIT, async || {
            for node in &up {
                let answer = node.admin("/nodes").await.map_err(|e| format!("{e:#}"))?;
                let live = |id: &str| {
                    let list = answer["nodes"].as_array().into_iter().flatten();
                    list.into_iter().any(|n| n["live"] == true && n["record"]["node"] == id)
                };
                if let Some(missing) = up.iter().find(|n| !live(n.id())) {
                    return Err(format!("{} does not see {}", node.name(), missing.name()));
                }
            }
            Ok(())
        })
        .await
    }

    /// Submits `job` through the command line of node `i` and returns its id.
    ///
    /// # Errors
    /// When it is refused.
    pub async fn submit(&self, i: usize, job: &Job) -> anyhow::Result<String> {
        let file = job.write(self.root())?.display().to_string();
        let answer = self[i].cli_json(&["job", "submit", &file]).await?;
        Ok(answer["job"].as_str().context("a job's id is text")?.to_owned())
    }

    /// The model's status on each running server that answers, with the server's index.
    pub async fn model_views(&self) -> Vec<(usize, Value)> {
        let mut views = Vec::new();
        for (i, node) in self.nodes.iter().enumerate().filter(|(_, n)| n.is_server() && n.is_up()) {
            if let Ok(view) = node.admin(&format!("/models/{}", crate::MODEL)).await {
                views.push((i, view));
            }
        }
        views
    }

    /// The version that server `i` has.
    ///
    /// # Errors
    /// When it does not answer, or knows of no version.
    pub async fn version_of(&self, i: usize) -> anyhow::Result<u64> {
        let view = self[i].admin(&format!("/models/{}", crate::MODEL)).await?;
        view["version"].as_u64().context("a version")
    }

    /// Waits until node `i` knows all running ones and, as a server, has caught up with `version`.
    ///
    /// # Errors
    /// When `limit` is over; says what it does.
    pub async fn caught_up(&self, i: usize, version: u64, limit: Duration) -> anyhow::Result<()> {
        let node = &self[i];
        let up = self.nodes.iter().filter(|n| n.is_up()).count();
        until(&format!("{} is back in the mesh", node.name()), limit, async || {
            let status = node.admin("/status").await.map_err(|e| format!("{e:#}"))?;
            let members = status["members"].as_array().map_or(0, Vec::len);
            let has = status["models"][0]["version"].as_u64();
            if members == up && (!node.is_server() || has >= Some(version)) {
                Ok(())
            } else {
                Err(format!("{members} of {up} members, version {has:?} of {version}; {}", status["doing"]))
            }
        })
        .await
    }

    /// [`Self::caught_up`] for all running nodes.
    ///
    /// # Errors
    /// When `limit` is over for one of them; says what it does.
    pub async fn whole(&self, version: u64, limit: Duration) -> anyhow::Result<()> {
        let begun = Instant::now();
        for i in (0..self.nodes.len()).filter(|i| self[*i].is_up()) {
            self.caught_up(i, version, limit.saturating_sub(begun.elapsed())).await?;
        }
        Ok(())
    }

    /// Stops `job` and waits until all running servers have its end and the same version, which is returned: nothing is
    /// committed after it.
    ///
    /// # Errors
    /// When they do not agree within `limit`; says what they have.
    pub async fn settle(&self, job: &str, limit: Duration) -> anyhow::Result<u64> {
        until("the job is stopped", limit, async || {
            let output = self[0].cli(&["job", "stop", job]).await.map_err(|e| format!("{e:#}"))?;
            if output.code == Some(0) { Ok(()) } else { Err(output.stderr) }
        })
        .await?;
        let servers = self.nodes.iter().filter(|n| n.is_server() && n.is_up()).count();
        until("all servers have the same version and the job's end", limit, async || {
            let views = self.model_views().await;
            let facts = |v: &Value| (v["version"].clone(), v["jobs"][0]["end"].clone());
            let same = views.iter().all(|(_, v)| facts(v) == facts(&views[0].1) && !v["jobs"][0]["end"].is_null());
            if views.len() == servers && same {
                Ok(())
            } else {
                Err(format!("{:?}", views.iter().map(|(i, v)| (i, facts(v))).collect::<Vec<_>>()))
            }
        })
        .await?;
        Ok(self.version().await)
    }

    /// The newest version that any running server has.
    pub async fn version(&self) -> u64 {
        self.model_views().await.iter().filter_map(|(_, v)| v["version"].as_u64()).max().unwrap_or(0)
    }

    /// The index of the server that leads now, as far as the running servers know.
    pub async fn leader(&self) -> Option<usize> {
        let views = self.model_views().await;
        let leads = |v: &Value| v["is_leader"] == true;
        views.into_iter().filter(|(_, v)| leads(v)).max_by_key(|(_, v)| v["term"].as_u64()).map(|(i, _)| i)
    }

    /// Waits until some running server has at least `version`, and returns what it has.
    ///
    /// # Errors
    /// When `limit` is over; says what the leader does.
    pub async fn reach(&self, version: u64, limit: Duration) -> anyhow::Result<u64> {
        until(&format!("version {version}"), limit, async || {
            let views = self.model_views().await;
            let newest = views.iter().filter_map(|(_, v)| v["version"].as_u64()).max().unwrap_or(0);
            if newest >= version {
                return Ok(newest);
            }
            let told = |(i, v): &(usize, Value)| {
                let name = self[*i].name();
                format!(
                    "{name}: version {} term {} leads {} {}",
                    v["version"], v["term"], v["is_leader"], v["activity"]
                )
            };
            Err(views.iter().map(told).collect::<Vec<_>>().join("; "))
        })
        .await
    }

    /// Reads the stores of all nodes, which must have ended.
    ///
    /// # Errors
    /// When a store cannot be read or its own versions are out of order.
    pub fn read_stores(&self) -> anyhow::Result<StoresReport> {
        let stores: Vec<_> = self.nodes.iter().map(|n| n.data().join("store")).collect();
        StoresReport::read(&stores, &[])
    }

    /// Processes that belong to this mesh: nodes by their arguments, agents by their environment.
    #[must_use]
    pub fn processes(&self) -> Vec<String> {
        let root = self.root().display().to_string();
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if !name.bytes().all(|b| b.is_ascii_digit()) || name == std::process::id().to_string() {
                continue;
            }
            let read = |file: &str| {
                String::from_utf8_lossy(&std::fs::read(entry.path().join(file)).unwrap_or_default()).into_owned()
            };
            if read("cmdline").contains(&root) || read("environ").contains(&root) {
                found.push(format!("{name}: {}", read("cmdline").replace('\0', " ")));
            }
        }
        found
    }

    /// The processes end, and the folder stays.
    pub fn keep(mut self) {
        if let Some(root) = self.root.take() {
            let _ = root.keep();
        }
        self.passed = true;
    }

    /// The test has passed: the folder may go.
    pub fn passed(mut self) {
        self.passed = true;
    }
}

impl Drop for TestMesh {
    fn drop(&mut self) {
        self.nodes.iter_mut().for_each(TestNode::destroy);
        if self.passed {
            return;
        }
        if let Some(Seed(seed)) = self.seed {
            eprintln!("failed with TEST_SEED={seed}");
        }
        let Some(root) = self.root.take() else { return };
        let root = root.keep();
        for node in &self.nodes {
            let text = std::fs::read_to_string(node.log()).unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            eprintln!("--- the last lines of {}", node.log().display());
            lines.iter().skip(lines.len().saturating_sub(LOG_LINES_SHOWN)).for_each(|l| eprintln!("{l}"));
        }
        eprintln!("--- data and logs are kept in {}", root.display());
    }
}
