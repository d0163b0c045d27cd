//! The run: a mesh, watchers beside it, and one fault after another.

use crate::audit;
use crate::faults::{self, Fault, NODES, SERVERS, Scene, VOLUNTEERS, WITNESS};
use crate::ledger::{self, Ledger};
use crate::log::Log;
use crate::patience::Patience;
use crate::watch::{self, Board, Shown};
use anyhow::{Context, ensure};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use starling_tests::{Job, Network, Role, Seed, StoresReport, TestMesh, TestNode, agent_binary, starling_in};
use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Episodes at once of a client.
const SLOTS: usize = 3;
/// An agent waits so long before each episode, so that training leaves some of the machine to others.
const AGENT_PAUSE_S: u32 = 4;
/// Pause of the soak's own agent between two episodes.
const PLAY_PAUSE: Duration = Duration::from_secs(3);
const JOB_STEPS: u64 = 40;
/// Jobs that are submitted and not over.
const JOBS_AHEAD: usize = 2;
const JOBS_EVERY: Duration = Duration::from_secs(10);
/// Deleted so soon after their consumption, so that deleting is soaked too.
const ROLLOUTS_KEPT: &str = "10m";
const STORE_QUOTA: &str = "3GiB";

/// A step within this time of the end of a fault; what nodes wait for a processor does not count.
const STEP_LIMIT: Duration = Duration::from_secs(180);
/// All nodes know each other, and the servers have what the newest had, within this time.
const WHOLE_LIMIT: Duration = Duration::from_secs(240);
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// What was on its way when a cut came may still arrive.
const IN_FLIGHT: Duration = Duration::from_secs(3);
/// What lost a copy has a second one again after this time: 30 s of grace for the node that had it, and a sweep.
const REPAIR_TIME: Duration = Duration::from_secs(90);
/// All stores are audited so often.
const SNAPSHOT_EVERY: Duration = Duration::from_secs(15 * 60);

/// What is asked for.
pub(crate) struct Plan {
    pub(crate) hours: f64,
    /// Between two faults, on average.
    pub(crate) calm: Duration,
    pub(crate) seed: u64,
    pub(crate) folder: PathBuf,
}

struct Soak {
    mesh: TestMesh,
    calm: Duration,
    cuttable: bool,
    rng: ChaCha8Rng,
    log: Rc<Log>,
    board: Board,
    ledger: Rc<Ledger>,
    /// Volunteers that are in the mesh.
    joined: Vec<usize>,
}

/// Runs the whole soak.
pub(crate) async fn run(plan: &Plan) -> anyhow::Result<()> {
    let log = Rc::new(Log::new(&plan.folder)?);
    let mut rng = Seed(plan.seed).rng();
    let why_not = Network::why_not();
    log.event(
        "begin",
        &json!({
            "seed": plan.seed, "hours": plan.hours, "calm_s": plan.calm.as_secs_f64(),
            "cuts": why_not.is_none(), "no_cuts_because": why_not,
            "unix": std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_secs(),
            "rollouts_kept": ROLLOUTS_KEPT,
            "store_quota": STORE_QUOTA, "job_steps": JOB_STEPS,
        }),
    );
    let mut mesh = TestMesh::new_in(&plan.folder, "soak")?.seeded(Seed(plan.seed)).with_arguments(&[
        "--rollouts-kept",
        ROLLOUTS_KEPT,
        "--store-quota",
        STORE_QUOTA,
    ]);
    if why_not.is_none() {
        mesh = mesh.within(Network::new(u8::try_from(NODES)?)?);
    }
    let ledger = Rc::new(Ledger::default());
    let player_rng = ChaCha8Rng::seed_from_u64(rng.random());
    let board: Board = Rc::new(RefCell::new(Vec::new()));
    let mut soak = Soak {
        mesh,
        calm: plan.calm,
        cuttable: why_not.is_none(),
        rng,
        log: log.clone(),
        board: board.clone(),
        ledger: ledger.clone(),
        joined: Vec::new(),
    };
    soak.build().await?;
    let client = reqwest::Client::builder().no_proxy().build()?;
    let watchers = [
        tokio::task::spawn_local(watch::sample(board.clone(), log.clone())),
        tokio::task::spawn_local(watch::statuses(board.clone(), log.clone(), client.clone())),
        tokio::task::spawn_local(ledger::play(
            board.clone(),
            log.clone(),
            client.clone(),
            ledger,
            player_rng,
            PLAY_PAUSE,
        )),
    ];
    let jobs = tokio::task::spawn_local(keep_jobs(board.clone(), log.clone(), client, plan.folder.clone(), plan.seed));
    soak.faults(Duration::from_secs_f64(plan.hours * 3600.0)).await?;
    jobs.abort();
    let done = soak.finish(watchers).await;
    if let Err(e) = &done {
        log.event("violation", &json!({ "what": "the end", "why": format!("{e:#}") }));
    }
    // Gigabytes, which are of use only where something was found; the nodes' logs stay.
    if log.violations() == 0 {
        (0..NODES).filter(|i| soak.mesh[*i].data().exists()).try_for_each(|i| soak.mesh.erase(i))?;
    }
    soak.mesh.keep();
    log.event("end", &json!({}));
    Ok(())
}

fn told(patience: &Patience) -> String {
    format!("not within {:.0?}, of which {:.0?} count", patience.elapsed(), patience.counted())
}

/// Submits jobs one after another, so that training never ends.
async fn keep_jobs(board: Board, log: Rc<Log>, client: reqwest::Client, folder: PathBuf, seed: u64) {
    let mut number = 0;
    loop {
        let servers: Vec<Shown> = board.borrow().iter().take(SERVERS.len()).filter(|n| n.answers).cloned().collect();
        for server in servers {
            let Ok(status) = watch::get(&client, &server, "/status").await else { continue };
            let list = status["models"][0]["jobs"].as_array().cloned().unwrap_or_default();
            if list.iter().filter(|j| j["end"].is_null()).count() >= JOBS_AHEAD {
                break;
            }
            number += 1;
            let submitted = submit(&server, &folder, number, seed).await;
            let told = match &submitted {
                Ok(job) => json!({ "number": number, "job": job }),
                Err(e) => json!({ "number": number, "refused": format!("{e:#}") }),
            };
            log.event("job", &told);
            break;
        }
        tokio::time::sleep(JOBS_EVERY).await;
    }
}

async fn submit(server: &Shown, folder: &std::path::Path, number: u64, seed: u64) -> anyhow::Result<Value> {
    let job = Job {
        groups_per_step: 8,
        group_size: 4,
        lease_ttl_s: 20,
        // So that the stores, which keep weights and optimizer states for an hour, stay small.
        optimizer_state_every: 4,
        seed: seed * 1000 + number,
        sets: vec!["sums"],
        ..Job::tiny(&format!("soak-{number}"), JOB_STEPS)
    };
    let file = job.write(folder)?.display().to_string();
    let data = server.data.display().to_string();
    let output = starling_in(server.space.as_ref(), &["--data", &data, "job", "submit", &file, "--json"]).await?;
    Ok(output.json()?["job"].clone())
}

impl Soak {
    async fn build(&mut self) -> anyhow::Result<()> {
        let mut paced = self.log.folder().join("paced-agent.sh");
        let agent = agent_binary()?;
        let script = format!(
            "while IFS= read -r line; do sleep {AGENT_PAUSE_S}; printf '%s\\n' \"$line\"; done | {} --worker\n",
            agent.display()
        );
        std::fs::write(&paced, script)?;
        paced = paced.canonicalize()?;
        let role = Role::Client { agent: format!("sh {}", paced.display()), worker: true, slots: SLOTS };
        for i in 0..NODES {
            let name = faults::name(i);
            let role = match i {
                WITNESS => Role::Witness,
                _ if SERVERS.contains(&i) || i == VOLUNTEERS[1] => Role::Server,
                _ => role.clone(),
            };
            self.board.borrow_mut().push(Shown { name: name.clone(), ..Shown::default() });
            self.mesh.add(&name, role).await?;
            self.show(i);
            self.log.event("start", &json!({ "node": name }));
        }
        self.joined = VOLUNTEERS.to_vec();
        self.mesh.meet().await
    }

    /// Writes node `i` on the board after its start.
    fn show(&self, i: usize) {
        let node = &self.mesh[i];
        let mut board = self.board.borrow_mut();
        let shown = &mut board[i];
        shown.life += 1;
        shown.pid = node.pid();
        shown.answers = node.is_up();
        node.http().clone_into(&mut shown.http);
        shown.token = node.admin_token().unwrap_or_default();
        node.data().clone_into(&mut shown.data);
        shown.space = node.space().cloned();
    }

    /// Node `i` is about to end.
    fn hide(&self, i: usize) {
        let mut board = self.board.borrow_mut();
        board[i].pid = None;
        board[i].answers = false;
    }

    fn name(&self, i: usize) -> String {
        self.mesh[i].name().to_owned()
    }

    fn names(&self, nodes: &[usize]) -> Vec<String> {
        nodes.iter().map(|i| self.name(*i)).collect()
    }

    fn violation(&self, what: &str, why: &str) {
        self.log.event("violation", &json!({ "what": what, "why": why }));
    }

    /// One fault after another for `time` from the first step on.
    async fn faults(&mut self, time: Duration) -> anyhow::Result<()> {
        let begun = self.progress("the first step", 0).await;
        ensure!(begun, "training did not begin");
        let end = Instant::now() + time;
        let mut next_snapshot = Instant::now() + SNAPSHOT_EVERY;
        let mut round = 0_u64;
        while Instant::now() < end && !self.log.folder().join("stop").exists() {
            round += 1;
            let calm = self.calm.mul_f64(self.rng.random_range(0.4..1.6));
            tokio::time::sleep(calm).await;
            self.restart_what_ended().await;
            let fault = self.draw().await;
            self.log.event("fault", &json!({ "round": round, "fault": format!("{fault:?}") }));
            if let Err(e) = self.inject(&fault).await {
                self.violation("the fault's own commands", &format!("{fault:?}: {e:#}"));
                self.mend().await;
            }
            let before = self.mesh.version().await;
            self.log.event("healed", &json!({ "round": round, "version": before }));
            if self.progress(&format!("a step after round {round}"), before).await {
                self.whole(round).await;
            }
            if Instant::now() > next_snapshot {
                next_snapshot += SNAPSHOT_EVERY;
                if let Err(e) = self.snapshot().await {
                    self.violation("snapshot", &format!("{e:#}"));
                }
            }
        }
        Ok(())
    }

    async fn draw(&mut self) -> Fault {
        let up = (0..NODES).filter(|i| self.mesh[*i].is_up()).collect();
        let scene = Scene { cuttable: self.cuttable, leader: self.mesh.leader().await, up };
        Fault::draw(&mut self.rng, &scene)
    }

    /// Makes the fault and takes it away again.
    async fn inject(&mut self, fault: &Fault) -> anyhow::Result<()> {
        match fault {
            Fault::Kill { nodes, away } => {
                let nodes: Vec<usize> = nodes.iter().copied().filter(|i| self.mesh[*i].is_up()).collect();
                for i in &nodes {
                    self.hide(*i);
                    self.mesh.kill(*i)?;
                }
                self.log.event("killed", &json!({ "nodes": self.names(&nodes), "away_s": away.as_secs_f64() }));
                tokio::time::sleep(*away).await;
                for i in nodes {
                    self.start(i).await?;
                }
                Ok(())
            }
            Fault::Stop { node, away } => {
                self.stop(*node).await?;
                tokio::time::sleep(*away).await;
                self.start(*node).await
            }
            Fault::Pause { node, time } => {
                self.board.borrow_mut()[*node].answers = false;
                self.mesh[*node].pause();
                self.log.event("paused", &json!({ "node": self.name(*node), "time_s": time.as_secs_f64() }));
                tokio::time::sleep(*time).await;
                self.mesh[*node].resume();
                self.board.borrow_mut()[*node].answers = true;
                Ok(())
            }
            Fault::Split { groups, time } => {
                let groups: Vec<&[usize]> = groups.iter().map(Vec::as_slice).collect();
                self.mesh.network()?.separate(&groups)?;
                let names: Vec<_> = groups.iter().map(|g| self.names(g)).collect();
                self.log.event("cut", &json!({ "groups": names, "time_s": time.as_secs_f64() }));
                // A server alone, the leader or not, commits nothing.
                let alone = fault.alone().filter(|i| self.mesh[*i].is_server());
                tokio::time::sleep(IN_FLIGHT).await;
                let before = self.version_of(alone).await;
                tokio::time::sleep(*time).await;
                let after = self.version_of(alone).await;
                self.mesh.network()?.heal()?;
                if let (Some(i), Some(before), Some(after)) = (alone, before, after) {
                    self.log.event("alone", &json!({ "node": self.name(i), "before": before, "after": after }));
                    if before != after {
                        let why = format!("{}, cut off, went from {before} to {after}", self.name(i));
                        self.violation("one writer", &why);
                    }
                }
                Ok(())
            }
            Fault::OneWay { node, speaks, time } => {
                let others: Vec<usize> = (0..NODES).filter(|i| i != node).collect();
                let (from, to): (&[usize], &[usize]) = if *speaks { (&others, &[]) } else { (&[], &others) };
                self.mesh.network()?.cut(*node, from, to)?;
                let how = if *speaks { "only speaks" } else { "only hears" };
                self.log
                    .event("one way", &json!({ "node": self.name(*node), "how": how, "time_s": time.as_secs_f64() }));
                tokio::time::sleep(*time).await;
                self.mesh.network()?.heal()
            }
            Fault::Flap { node, times, period } => {
                self.log.event(
                    "flapping",
                    &json!({ "node": self.name(*node), "times": times, "period_s": period.as_secs_f64() }),
                );
                for _ in 0..*times {
                    self.mesh.network()?.plug(*node, false)?;
                    tokio::time::sleep(*period).await;
                    self.mesh.network()?.plug(*node, true)?;
                    tokio::time::sleep(*period).await;
                }
                Ok(())
            }
            Fault::Loss { percent, time } => {
                (0..NODES).try_for_each(|i| self.mesh.network()?.lose(i, *percent))?;
                self.log.event("loss", &json!({ "percent": percent, "time_s": time.as_secs_f64() }));
                tokio::time::sleep(*time).await;
                self.mesh.network()?.heal()
            }
            Fault::Leave { node, drained } => self.leave(*node, *drained).await,
            Fault::Join { node } => {
                self.start(*node).await?;
                self.joined.push(*node);
                Ok(())
            }
        }
    }

    async fn start(&mut self, i: usize) -> anyhow::Result<()> {
        let begun = Instant::now();
        self.mesh.start(i).await?;
        self.show(i);
        self.log.event("started", &json!({ "node": self.name(i), "took_s": begun.elapsed().as_secs_f64() }));
        Ok(())
    }

    async fn stop(&mut self, i: usize) -> anyhow::Result<()> {
        let begun = Instant::now();
        self.hide(i);
        let ended = self.mesh.stop(i).await;
        let told = ended.as_ref().err().map(|e| format!("{e:#}"));
        self.log.event(
            "stopped",
            &json!({ "node": self.name(i), "took_s": begun.elapsed().as_secs_f64(), "trouble": told }),
        );
        if let Some(why) = told {
            self.violation("a graceful stop", &why);
        }
        Ok(())
    }

    /// A volunteer leaves for good, and what it held is gone. Undrained it may hold the only copy of what it acknowledged
    /// while it was cut off from everybody, so the others get the time to restore the second one first.
    async fn leave(&mut self, i: usize, drained: bool) -> anyhow::Result<()> {
        let mut safe = false;
        if drained {
            let output = self.mesh[i].cli(&["node", "drain"]).await;
            safe = output.as_ref().is_ok_and(|o| o.code == Some(0));
            let told = match output {
                Ok(o) => json!({ "node": self.name(i), "code": o.code, "stderr": o.stderr }),
                Err(e) => json!({ "node": self.name(i), "trouble": format!("{e:#}") }),
            };
            self.log.event("drain", &told);
            if !safe {
                self.violation("a drain", &told.to_string());
            }
        }
        if !safe {
            tokio::time::sleep(REPAIR_TIME).await;
        }
        if drained {
            self.stop(i).await?;
        } else {
            self.hide(i);
            self.mesh.kill(i)?;
        }
        self.mesh.erase(i)?;
        self.joined.retain(|j| *j != i);
        self.log.event("left", &json!({ "node": self.name(i), "drained": drained }));
        Ok(())
    }

    async fn version_of(&self, i: Option<usize>) -> Option<u64> {
        self.mesh.version_of(i?).await.ok()
    }

    /// Takes away every cut and pause, and starts what should run.
    async fn mend(&mut self) {
        if self.cuttable {
            let network = self.mesh.network();
            let healed = network.and_then(|n| {
                n.heal()?;
                (0..NODES).try_for_each(|i| n.plug(i, true))
            });
            if let Err(e) = healed {
                self.violation("healing", &format!("{e:#}"));
            }
        }
        for i in 0..NODES {
            self.mesh[i].resume();
            if self.mesh[i].is_up() {
                self.board.borrow_mut()[i].answers = true;
            }
        }
        self.restart_what_ended().await;
    }

    /// Nobody asked for these ends: each is a violation, and the node is started again.
    async fn restart_what_ended(&mut self) {
        for (i, what) in self.mesh.unexpected_exits() {
            self.hide(i);
            self.violation("a process ended by itself", &what);
        }
        for i in 0..NODES {
            let wanted = !VOLUNTEERS.contains(&i) || self.joined.contains(&i);
            if wanted
                && !self.mesh[i].is_up()
                && let Err(e) = self.start(i).await
            {
                self.violation("a start", &format!("{e:#}"));
            }
        }
    }

    fn pids(&self) -> Vec<u32> {
        self.mesh.nodes().iter().filter_map(TestNode::pid).collect()
    }

    /// Waits for a version after `before`.
    async fn progress(&mut self, what: &str, before: u64) -> bool {
        let mut patience = Patience::new(STEP_LIMIT, &self.pids());
        while let Err(e) = self.mesh.reach(before + 1, Duration::ZERO).await {
            if patience.is_over(&self.pids()) {
                self.violation(what, &format!("{}: {e:#}", told(&patience)));
                return false;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        self.log.event("step", &json!({ "after_s": patience.elapsed().as_secs_f64() }));
        true
    }

    /// Waits until every node that should run knows the others, and the servers have caught up.
    async fn whole(&mut self, round: u64) {
        let mut patience = Patience::new(WHOLE_LIMIT, &self.pids());
        let target = self.mesh.version().await;
        while let Err(e) = self.mesh.whole(target, Duration::ZERO).await {
            if patience.is_over(&self.pids()) {
                self.violation(
                    &format!("the mesh is whole after round {round}"),
                    &format!("{}: {e:#}", told(&patience)),
                );
                return;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        self.log.event("whole", &json!({ "round": round, "after_s": patience.elapsed().as_secs_f64() }));
    }

    /// All processes stand still for a moment, and their stores are copied and audited: what a power failure of all of
    /// them at once would have left.
    async fn snapshot(&mut self) -> anyhow::Result<()> {
        let acknowledged = self.ledger.acknowledged.borrow().clone();
        let folder = self.log.folder().join("snapshot");
        let stores: Vec<(String, PathBuf)> =
            self.mesh.nodes().iter().map(|n| (n.name().to_owned(), n.data().join("store"))).collect();
        let begun = Instant::now();
        self.board.borrow_mut().iter_mut().for_each(|n| n.answers = false);
        self.mesh.nodes().iter().for_each(TestNode::pause);
        let copies = audit::copy(&stores, &folder);
        self.mesh.nodes().iter().for_each(TestNode::resume);
        self.board.borrow_mut().iter_mut().for_each(|n| n.answers = n.pid.is_some());
        let stood = begun.elapsed();
        let copies = copies?;
        let report = tokio::task::spawn_blocking(move || audit::of_copies(&copies, &acknowledged, &folder)).await??;
        self.audited("snapshot", &report, Some(stood));
        Ok(())
    }

    fn audited(&self, what: &str, report: &StoresReport, stood: Option<Duration>) {
        let mut facts = audit::facts(report, self.ledger.acknowledged.borrow().len());
        facts["stood_still_s"] = json!(stood.map(|s| s.as_secs_f64()));
        self.log.event(what, &facts);
        if let Err(e) = report.ensure_clean() {
            self.violation(what, &format!("{e:#}"));
        }
    }

    async fn finish(&mut self, watchers: [tokio::task::JoinHandle<()>; 3]) -> anyhow::Result<()> {
        self.mend().await;
        let before = self.mesh.version().await;
        self.progress("the last step", before).await;
        self.whole(0).await;
        watchers.iter().for_each(tokio::task::JoinHandle::abort);
        let failures = json!(*self.ledger.failures.borrow());
        self.log.event(
            "own episodes",
            &json!({ "acknowledged": self.ledger.acknowledged.borrow().len(), "failures": failures }),
        );
        if let Err(e) = self.mesh.stop_all().await {
            self.violation("a graceful stop", &format!("{e:#}"));
        }
        let left = self.mesh.processes();
        if !left.is_empty() {
            self.violation("processes left", &left.join("\n"));
        }
        let acknowledged = self.ledger.acknowledged.borrow().clone();
        let report = audit::of_nodes(self.mesh.root(), &acknowledged).context("the stores at the end")?;
        self.audited("audit", &report, None);
        Ok(())
    }
}
