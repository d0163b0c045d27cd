//! Three etcd nodes on loopback, whose leader is killed and started again.

use super::failover::{ELECTION_MS, HEARTBEAT_MS, Healed, LIMIT, POLL};
use anyhow::{Context, bail};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};
use tokio::process::{Child, Command};
use tokio::task::JoinSet;

const NODES: usize = 3;
/// Limit of one request: longer than any election. What is still in flight when a run ends is dropped.
const REQUEST_LIMIT: Duration = Duration::from_secs(10);

/// The cluster; its processes end with it.
pub(super) struct Etcd {
    nodes: Vec<Node>,
    http: reqwest::Client,
}

struct Node {
    arguments: Vec<String>,
    /// Where it answers JSON.
    url: String,
    child: Child,
}

/// What one request found.
enum Found {
    /// Whether the node says that it leads.
    Leads(bool),
    /// Whether a write was committed.
    Wrote(bool),
}

impl Etcd {
    /// `None` where there is no `etcd`.
    ///
    /// # Errors
    /// When it is there and does not start.
    pub(super) async fn start(dir: &Path) -> anyhow::Result<Option<Self>> {
        let Some(program) = program() else { return Ok(None) };
        let ports = (0..2 * NODES).map(|_| free_port()).collect::<anyhow::Result<Vec<_>>>()?;
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        let (clients, peers) = ports.split_at(NODES);
        let members: Vec<String> = peers.iter().enumerate().map(|(i, p)| format!("n{i}={}", url(*p))).collect();
        let mut nodes = Vec::new();
        for i in 0..NODES {
            let arguments = [
                ("name", format!("n{i}")),
                ("data-dir", dir.join(format!("n{i}")).display().to_string()),
                ("listen-client-urls", url(clients[i])),
                ("advertise-client-urls", url(clients[i])),
                ("listen-peer-urls", url(peers[i])),
                ("initial-advertise-peer-urls", url(peers[i])),
                ("initial-cluster", members.join(",")),
                ("heartbeat-interval", HEARTBEAT_MS.to_string()),
                ("election-timeout", ELECTION_MS.to_string()),
            ];
            let arguments: Vec<String> = arguments.into_iter().flat_map(|(k, v)| [format!("--{k}"), v]).collect();
            let child = spawn(&program, &arguments)?;
            nodes.push(Node { arguments, url: url(clients[i]), child });
        }
        let http = reqwest::Client::builder().no_proxy().timeout(REQUEST_LIMIT).build()?;
        let this = Self { nodes, http };
        this.steady().await?;
        Ok(Some(this))
    }

    /// Waits until all nodes follow one leader with the same log, and returns it.
    async fn steady(&self) -> anyhow::Result<usize> {
        let begin = Instant::now();
        loop {
            let asked = self.nodes.iter().map(|n| status(&self.http, &n.url));
            let said: Vec<Value> = futures::future::join_all(asked).await.into_iter().flatten().collect();
            let same = |field: &str| said.windows(2).all(|w| w[0][field] == w[1][field]);
            if said.len() == NODES
                && same("leader")
                && same("raftIndex")
                && let Some(leader) = said.iter().position(leads)
            {
                return Ok(leader);
            }
            if begin.elapsed() > LIMIT {
                bail!("etcd had no leader that all follow within {LIMIT:?}: {said:?}");
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Kills the leader; asks the survivors for their leader, and each in turn for a write, until both are there; starts
    /// the killed one again.
    pub(super) async fn kill_leader(&mut self) -> anyhow::Result<Healed> {
        let killed = self.steady().await?;
        tokio::time::sleep(Duration::from_millis(rand::random::<u64>() % HEARTBEAT_MS)).await;
        let survivors: Vec<String> = (0..NODES).filter(|i| *i != killed).map(|i| self.nodes[i].url.clone()).collect();
        let begin = Instant::now();
        self.nodes[killed].child.start_kill().context("cannot kill etcd's leader")?;
        let (mut leader, mut commit) = (None, None);
        let mut requests = JoinSet::new();
        let mut beat = tokio::time::interval(POLL);
        let mut turn = 0_usize;
        let healed = loop {
            tokio::select! {
                biased;
                Some(found) = requests.join_next() => match found? {
                    Found::Leads(true) => leader = leader.or(Some(begin.elapsed())),
                    Found::Wrote(true) => commit = commit.or(Some(begin.elapsed())),
                    Found::Leads(false) | Found::Wrote(false) => {}
                },
                _ = beat.tick() => {
                    // A write that waits for a leader may be lost with the election: a new one each time.
                    turn += 1;
                    let (http, url) = (self.http.clone(), survivors[turn % survivors.len()].clone());
                    requests.spawn(async move { Found::Wrote(write(&http, &url).await) });
                    for survivor in &survivors {
                        let (http, url) = (self.http.clone(), survivor.clone());
                        requests.spawn(async move { Found::Leads(status(&http, &url).await.as_ref().is_some_and(leads)) });
                    }
                }
            }
            if let (Some(leader), Some(commit)) = (leader, commit) {
                break Healed { leader: leader.min(commit), commit };
            }
            if begin.elapsed() > LIMIT {
                bail!("etcd did not heal within {LIMIT:?}");
            }
        };
        drop(requests);
        let node = &mut self.nodes[killed];
        node.child.wait().await?;
        node.child = spawn(&program().context("etcd is gone")?, &node.arguments)?;
        Ok(healed)
    }
}

fn leads(status: &Value) -> bool {
    status["leader"].is_string() && status["leader"] == status["header"]["member_id"]
}

async fn status(http: &reqwest::Client, url: &str) -> Option<Value> {
    post(http, &format!("{url}/v3/maintenance/status"), &json!({})).await
}

async fn write(http: &reqwest::Client, url: &str) -> bool {
    // Both in base64.
    let body = json!({ "key": "YmVuY2g=", "value": "eA==" });
    post(http, &format!("{url}/v3/kv/put"), &body).await.is_some_and(|a| a["header"].is_object())
}

/// `None` for anything but an answer of success.
async fn post(http: &reqwest::Client, url: &str, body: &Value) -> Option<Value> {
    let response = http.post(url).body(body.to_string()).send().await.ok()?.error_for_status().ok()?;
    serde_json::from_slice(&response.bytes().await.ok()?).ok()
}

fn spawn(program: &Path, arguments: &[String]) -> anyhow::Result<Child> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    command.spawn().with_context(|| format!("cannot start {}", program.display()))
}

/// `etcd` of the search path.
fn program() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join("etcd")).find(|file| file.is_file())
}

fn free_port() -> anyhow::Result<u16> {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).context("cannot listen on loopback")?;
    Ok(listener.local_addr()?.port())
}
