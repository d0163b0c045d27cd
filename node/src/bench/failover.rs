//! How long a model is without a leader, and without a step, after its leader was killed; beside the leader and the
//! next write of an etcd of three nodes with the same times, killed in turn with ours.
//!
//! Everything is real: three servers and a client of this binary on loopback, each with its folder, train the embedded
//! model while the leader gets SIGKILL; the client goes on ending episodes, and all stores are audited afterwards.

use super::etcd::Etcd;
use super::report::{Better, Row};
use crate::demo::mesh::{Demo, NodeKind, Plan, submission};
use anyhow::{Context, bail, ensure};
use serde_json::Value;
use starling_protocol::ModelName;
use std::time::{Duration, Instant};

/// The same for both.
pub(super) const HEARTBEAT_MS: u64 = 100;
pub(super) const ELECTION_MS: u64 = 1000;
/// How often the survivors of both are asked.
pub(super) const POLL: Duration = Duration::from_millis(5);
/// How long the survivors of both may take, and how long the killed one to be back.
pub(super) const LIMIT: Duration = Duration::from_secs(60);
const PEER: &str = "etcd, three nodes";
/// Small steps, so that what is measured is the failover and not the training: 8 episodes of at most 8 tokens, which
/// take a few milliseconds, and optimizer state with each hundredth. Else it is a job as any other: every step trains and has
/// its new weights on a second node before it is committed.
const JOB: &str = r#"
name = "failover"
steps = 1
groups_per_step = 2
group_size = 4
staleness_max = 4
optimizer_state_every = 100

[model]
name = "starling-byte"

[sampling]
max_tokens = 8

[[tasks]]
name = "sums"
train = "../tasks/sums/train.jsonl"
"#;
/// More than are taken in any run.
const STEPS: u64 = 1_000_000;

/// What a cluster took after its leader was killed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Healed {
    /// Until a survivor said that it leads.
    pub(super) leader: Duration,
    /// Until the next step, or write, was committed under it.
    pub(super) commit: Duration,
}

/// The rows of `failover`.
///
/// # Errors
/// When a mesh does not start or heal, or an acknowledged rollout is lost.
pub(super) async fn measure(runs: usize) -> anyhow::Result<Vec<Row>> {
    let dir = tempfile::tempdir().context("cannot make a folder for the nodes")?;
    let mut mesh = Ours::start(dir.path()).await?;
    let mut etcd = Etcd::start(&dir.path().join("etcd")).await?;
    if etcd.is_none() {
        eprintln!(
            "starling bench: there is no `etcd` to compare with; Debian has it as the package etcd-server (before trixie: etcd)"
        );
    }
    let (mut ours, mut theirs) = (Vec::with_capacity(runs), Vec::with_capacity(runs));
    for run in 0..runs {
        // Who goes first alternates: whatever the machine does beside falls on both.
        for first in [true, false] {
            if first == (run % 2 == 0) {
                ours.push(mesh.kill_leader().await?);
            } else if let Some(etcd) = &mut etcd {
                theirs.push(etcd.kill_leader().await?);
            }
        }
        tracing::info!(run, ours = ?ours.last(), etcd = ?theirs.last(), "healed");
    }
    drop(etcd);
    let audit = mesh.stop_and_audit().await?;
    let mut rows = Vec::new();
    for (what, time) in [
        ("leader elected", (|h| h.leader) as fn(&Healed) -> Duration),
        ("first commit", (|h| h.commit) as fn(&Healed) -> Duration),
    ] {
        let ms = |all: &[Healed]| -> Vec<f64> { all.iter().map(|h| time(h).as_secs_f64() * 1e3).collect() };
        let (mine, other) = (ms(&ours), ms(&theirs));
        let peer = (!other.is_empty()).then_some((PEER, other.as_slice()));
        rows.push(Row::new(what, "ms", Better::Less, &mine, peer));
        rows.push(Row::worst(format!("{what}, worst"), "ms", &mine, peer));
    }
    let count = |what: &str, n: usize| {
        let n = f64::from(u32::try_from(n).unwrap_or(u32::MAX));
        Row { runs, ..Row::new(what, "rollouts", Better::Less, &[n], None) }
    };
    rows.push(count("rollouts acknowledged", audit.acknowledged));
    rows.push(count("rollouts lost", audit.lost.len()));
    rows.push(count("rollouts consumed twice", audit.consumed_twice.len()));
    ensure!(audit.is_clean(), "a promise was broken: {audit:?}");
    Ok(rows)
}

struct Ours {
    mesh: Demo,
    model: ModelName,
}

/// What one server says of the model.
struct Said {
    server: usize,
    status: Value,
}

impl Said {
    fn term(&self) -> u64 {
        self.status["term"].as_u64().unwrap_or(0)
    }
    fn version(&self) -> u64 {
        self.status["version"].as_u64().unwrap_or(0)
    }
    fn leads(&self) -> bool {
        self.status["is_leader"] == true
    }
    /// Whether a step was committed under a term after `term`.
    fn committed_after(&self, term: u64) -> bool {
        self.status["terms"].as_array().is_some_and(|t| t.iter().any(|t| t.as_u64() > Some(term)))
    }
}

impl Ours {
    async fn start(dir: &std::path::Path) -> anyhow::Result<Self> {
        let times = ["--heartbeat", &format!("{HEARTBEAT_MS}ms"), "--election-timeout", &format!("{ELECTION_MS}ms")];
        let plan = Plan { servers: 3, clients: 1, slots: 8, arguments: times.map(str::to_owned).to_vec() };
        let mut mesh = Demo::new(dir, plan)?;
        mesh.start_all().await?;
        let job = mesh.submit(&submission(JOB, STEPS, 1)?).await?;
        Ok(Self { mesh, model: job.model })
    }

    /// What every server that answers says.
    async fn ask(&self) -> Vec<Said> {
        let path = &format!("/models/{}", self.model);
        let asked =
            self.mesh.live_servers().into_iter().map(|(server, client)| async move {
                client.get(path).await.ok().map(|status| Said { server, status })
            });
        futures::future::join_all(asked).await.into_iter().flatten().collect()
    }

    /// Waits until all three servers follow one leader that commits, and returns it with its term.
    async fn steady(&self) -> anyhow::Result<(usize, u64)> {
        let (begin, mut first) = (Instant::now(), None);
        loop {
            let said = self.ask().await;
            if let Some(leader) = said.iter().find(|s| s.leads()) {
                let (term, version) = (leader.term(), leader.version());
                let follows = |s: &&Said| s.term() == term && s.status["leader"] == leader.status["leader"];
                let agree = said.iter().filter(follows).filter(|s| s.version() + 1 >= version).count() == 3;
                // Two more steps: the leader is past its start.
                let since = *first.get_or_insert((term, version));
                if since.0 != term {
                    first = None;
                } else if agree && version >= since.1 + 2 {
                    return Ok((leader.server, term));
                }
            }
            if begin.elapsed() > LIMIT {
                let said: Vec<_> = said.iter().map(|s| s.status["activity"].to_string()).collect();
                bail!("the mesh did not train again within {LIMIT:?}: {}", said.join("; "));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn kill_leader(&mut self) -> anyhow::Result<Healed> {
        let (server, term) = self.steady().await?;
        // At any time between two heartbeats.
        tokio::time::sleep(Duration::from_millis(rand::random::<u64>() % HEARTBEAT_MS)).await;
        let begin = Instant::now();
        self.mesh.kill(server)?;
        let mut leader = None;
        let commit = loop {
            let said = self.ask().await;
            if leader.is_none() && said.iter().any(|s| s.leads() && s.term() > term) {
                leader = Some(begin.elapsed());
            }
            if said.iter().any(|s| s.committed_after(term)) {
                break begin.elapsed();
            }
            if begin.elapsed() > LIMIT {
                let said: Vec<_> = said.iter().map(|s| s.status.to_string()).collect();
                bail!("no step within {LIMIT:?} after the leader was killed: {}", said.join("; "));
            }
            tokio::time::sleep(POLL).await;
        };
        self.mesh.start(NodeKind::Server, server).await?;
        Ok(Healed { leader: leader.unwrap_or(commit), commit })
    }

    async fn stop_and_audit(mut self) -> anyhow::Result<starling_storage::AuditReport> {
        self.mesh.stop_all().await;
        tokio::task::block_in_place(|| self.mesh.audit())
    }
}
