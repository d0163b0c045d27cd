//! The run: a mesh, watchers beside it, and one fault after another.

use crate::ledger::{self, Ledger};
use crate::log::Log;
use crate::snapshot;
use crate::watch::{self, Board, Shown};
use anyhow::{Context, ensure};
use rand::RngExt;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use starling_tests::{Job, Network, Role, Seed, StoresReport, TestMesh, agent_binary, until};
use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

const SERVERS: [usize; 3] = [0, 1, 2];
const WITNESS: usize = 3;

const VOLUNTEERS: [usize; 2] = [6, 7];
const NODES: usize = 8;
/// Cut and paused, but never killed and never stopped: their memory and open files are what leaks are looked for in.
const LONG_LIVED: [usize; 3] = [0, WITNESS, 4];

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

/// A step within this time of the end of a fault; the machine may be starved by others.
const STEP_LIMIT: Duration = Duration::from_secs(180);
/// All nodes know each other, and the servers have what the newest had, within this time.
const WHOLE_LIMIT: Duration = Duration::from_secs(240);
/// What was on its way when a cut came may still arrive.
const IN_FLIGHT: Duration = Duration::from_secs(3);
/// All stores are audited so often.
const SNAPSHOT_EVERY: Duration = Duration::from_secs(15 * 60);

/// What is asked for.
pub(crate) struct Plan {
    pub(crate) hours: f64,
    pub(crate) seed: u64,
    pub(crate) folder: PathBuf,
}

/// A fault. Node numbers are places in the mesh.
#[derive(Debug)]
enum Fault {
    Kill {
        nodes: Vec<usize>,
        away: Duration,
    },
    Stop {
        node: usize,
        away: Duration,
    },
    Pause {
        node: usize,
        time: Duration,
    },
    /// The groups reach only themselves.
    Split {
        groups: Vec<Vec<usize>>,
        time: Duration,
    },
    /// One node only hears, or only speaks.
    OneWay {
        node: usize,
        speaks: bool,
        time: Duration,
    },
    /// A cable pulled and put back, several times.
    Flap {
        node: usize,
        times: u32,
        period: Duration,
    },
    Loss {
        percent: u32,
        time: Duration,
    },
    /// A volunteer leaves: drained and stopped, or killed; its folder is deleted.
    Leave {
        node: usize,
        drained: bool,
    },
    Join {
        node: usize,
    },
}

pub(crate) struct Soak {
    mesh: TestMesh,
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
            "seed": plan.seed, "hours": plan.hours, "cuts": why_not.is_none(), "no_cuts_because": why_not,
            "unix": std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_secs(),
            "servers": 3, "witness": 1, "clients": 2, "volunteers": 2, "rollouts_kept": ROLLOUTS_KEPT,
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
    let player_rng = {
        use rand::SeedableRng;
        ChaCha8Rng::seed_from_u64(rng.random())
    };
    let board: Board = Rc::new(RefCell::new(Vec::new()));
    let mut soak = Soak {
        mesh,
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
    let end = Instant::now() + Duration::from_secs_f64(plan.hours * 3600.0);
    soak.faults(end).await?;
    jobs.abort();
    let done = soak.finish(watchers).await;
    if let Err(e) = &done {
        log.event("violation", &json!({ "what": "the end", "why": format!("{e:#}") }));
    }
    log.event("end", &json!({}));
    Ok(())
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
        seed: seed * 1000 + number,
        sets: vec!["sums"],
        ..Job::tiny(&format!("soak-{number}"), JOB_STEPS)
    };
    let text = format!("optimizer_state_every = 4\n{}", job.toml());
    let file = folder.join(format!("{}.toml", job.name));
    std::fs::write(&file, text)?;
    let data = server.data.display().to_string();
    let file = file.display().to_string();
    let output =
        starling_tests::starling_in(server.space.as_ref(), &["--data", &data, "job", "submit", &file, "--json"])
            .await?;
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
            let (name, role) = match i {
                0..=2 => (format!("server-{}", i + 1), Role::Server),
                WITNESS => ("witness".to_owned(), Role::Witness),
                4 | 5 => (format!("client-{}", i - 3), role.clone()),
                6 => ("volunteer-1".to_owned(), role.clone()),
                _ => ("volunteer-2".to_owned(), Role::Server),
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

    /// One fault after another until `end`.
    async fn faults(&mut self, end: Instant) -> anyhow::Result<()> {
        let begun = self.progress("the first step", 0).await;
        ensure!(begun, "training did not begin");
        let mut next_snapshot = Instant::now() + SNAPSHOT_EVERY;
        let mut round = 0_u64;
        while Instant::now() < end && !self.log.folder().join("stop").exists() {
            round += 1;
            let calm = Duration::from_millis(self.rng.random_range(10_000..40_000));
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
        let leader = self.mesh.leader().await.unwrap_or(0);
        let killable: Vec<usize> = (0..NODES).filter(|i| !LONG_LIVED.contains(i) && self.mesh[*i].is_up()).collect();
        let up: Vec<usize> = (0..NODES).filter(|i| self.mesh[*i].is_up()).collect();
        let rng = &mut self.rng;
        let some = |rng: &mut ChaCha8Rng, nodes: &[usize]| nodes.choose(rng).copied().unwrap_or(leader);
        let seconds =
            |rng: &mut ChaCha8Rng, from: u64, to: u64| Duration::from_millis(rng.random_range(from * 1000..=to * 1000));
        let time = seconds(rng, 8, 40);
        let away = seconds(rng, 0, 20);
        let kind = rng.random_range(0..100);
        let kind = if self.cuttable || !(52..90).contains(&kind) { kind } else { kind - 52 };
        // The leader is hit more often than by chance.
        let server = if rng.random_bool(0.4) && !LONG_LIVED.contains(&leader) { leader } else { some(rng, &killable) };
        match kind {
            0..16 => Fault::Kill { nodes: vec![server], away },
            16..22 => Fault::Kill { nodes: vec![1, 2], away },
            22..26 => Fault::Kill { nodes: vec![1, 5], away },
            26..38 => Fault::Stop { node: server, away },
            38..45 => Fault::Pause { node: some(rng, &up), time: seconds(rng, 2, 20) },
            45..52 => {
                let node = *VOLUNTEERS.choose(rng).unwrap_or(&VOLUNTEERS[0]);
                match self.joined.contains(&node) {
                    true => Fault::Leave { node, drained: rng.random_bool(0.6) },
                    false => Fault::Join { node },
                }
            }
            52..61 => {
                let others = up.iter().copied().filter(|i| *i != leader).collect();
                Fault::Split { groups: vec![vec![leader], others], time }
            }
            61..68 => Fault::OneWay {
                node: if rng.random_bool(0.6) { leader } else { some(rng, &up) },
                speaks: rng.random_bool(0.5),
                time,
            },
            68..76 => {
                // Everyone on one of two sides.
                let mut groups = vec![Vec::new(), Vec::new()];
                up.iter().for_each(|i| groups[rng.random_range(0..2)].push(*i));
                Fault::Split { groups, time }
            }
            76..81 => {
                let middle = some(rng, &SERVERS);
                let mut groups = vec![vec![middle], vec![middle]];
                up.iter().filter(|i| **i != middle).for_each(|i| groups[rng.random_range(0..2)].push(*i));
                Fault::Split { groups, time }
            }
            81..86 => Fault::Flap { node: some(rng, &up), times: rng.random_range(3..=8), period: seconds(rng, 1, 5) },
            86..90 => Fault::Loss { percent: rng.random_range(5..=25), time },
            _ => {
                let node = *VOLUNTEERS.choose(rng).unwrap_or(&VOLUNTEERS[0]);
                match self.joined.contains(&node) {
                    true => Fault::Leave { node, drained: rng.random_bool(0.6) },
                    false => Fault::Join { node },
                }
            }
        }
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
                // A leader alone, cut off both ways, commits nothing.
                let alone = groups.iter().find(|g| g.len() == 1).map(|g| g[0]).filter(|i| self.mesh[*i].is_server());
                tokio::time::sleep(IN_FLIGHT).await;
                let before = self.version_of(alone).await;
                tokio::time::sleep(*time).await;
                let after = self.version_of(alone).await;
                self.mesh.network()?.heal()?;
                if let (Some(i), Some(before), Some(after)) = (alone, before, after) {
                    self.log.event("alone", &json!({ "node": self.name(i), "before": before, "after": after }));
                    if before != after {
                        self.violation(
                            "one writer",
                            &format!("{}, cut off, went from {before} to {after}", self.name(i)),
                        );
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

    /// A volunteer leaves for good, and what it held is gone. Without a drain its copies are the second ones: so only
    /// when the others had time to restore what an earlier fault took.
    async fn leave(&mut self, i: usize, drained: bool) -> anyhow::Result<()> {
        let mut drain = None;
        if drained {
            let output = self.mesh[i].cli(&["node", "drain"]).await;
            let done = output.as_ref().is_ok_and(|o| o.code == Some(0));
            drain = Some(match output {
                Ok(o) => json!({ "code": o.code, "stderr": o.stderr }),
                Err(e) => json!({ "trouble": format!("{e:#}") }),
            });
            if !done {
                tokio::time::sleep(Duration::from_secs(90)).await;
            }
            self.stop(i).await?;
        } else {
            // The grace time of 30 s, and a sweep.
            tokio::time::sleep(Duration::from_secs(90)).await;
            self.hide(i);
            self.mesh.kill(i)?;
        }
        self.mesh.erase(i)?;
        self.joined.retain(|j| *j != i);
        self.log.event("left", &json!({ "node": self.name(i), "drained": drained, "drain": drain }));
        Ok(())
    }

    async fn version_of(&self, i: Option<usize>) -> Option<u64> {
        let view = self.mesh[i?].admin(&format!("/models/{}", starling_tests::MODEL)).await.ok()?;
        view["version"].as_u64()
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

    /// Waits for a version after `before`.
    async fn progress(&mut self, what: &str, before: u64) -> bool {
        let begun = Instant::now();
        match self.mesh.reach(before + 1, STEP_LIMIT).await {
            Ok(version) => {
                self.log.event("step", &json!({ "version": version, "after_s": begun.elapsed().as_secs_f64() }));
                true
            }
            Err(e) => {
                self.violation(what, &format!("{e:#}"));
                false
            }
        }
    }

    /// Waits until every node that should run knows the others, and the servers have caught up.
    async fn whole(&mut self, round: u64) {
        let begun = Instant::now();
        let up: Vec<usize> = (0..NODES).filter(|i| self.mesh[*i].is_up()).collect();
        let target = self.mesh.version().await;
        let done = until("the mesh is whole", WHOLE_LIMIT, async || {
            for i in &up {
                let status = self.mesh[*i].admin("/status").await.map_err(|e| format!("{e:#}"))?;
                let members = status["members"].as_array().map_or(0, Vec::len);
                let version = status["models"][0]["version"].as_u64().unwrap_or(0);
                let behind = self.mesh[*i].is_server() && version < target;
                if members != up.len() || behind {
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    return Err(format!(
                        "{}: {members} of {} members, version {version} of {target}; {}",
                        self.name(*i),
                        up.len(),
                        status["doing"]
                    ));
                }
            }
            Ok(())
        })
        .await;
        match done {
            Ok(()) => self.log.event("whole", &json!({ "round": round, "after_s": begun.elapsed().as_secs_f64() })),
            Err(e) => self.violation(&format!("the mesh is whole after round {round}"), &format!("{e:#}")),
        }
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
        self.mesh.nodes().iter().for_each(starling_tests::TestNode::pause);
        let copies = snapshot::copy(&stores, &folder);
        self.mesh.nodes().iter().for_each(starling_tests::TestNode::resume);
        self.board.borrow_mut().iter_mut().for_each(|n| n.answers = n.pid.is_some());
        let stood = begun.elapsed();
        let copies = copies?;
        let report = tokio::task::spawn_blocking(move || snapshot::audit(&copies, &acknowledged, &folder)).await??;
        self.audited("snapshot", &report, Some(stood));
        Ok(())
    }

    fn audited(&self, what: &str, report: &StoresReport, stood: Option<Duration>) {
        let a = &report.audit;
        self.log.event(
            what,
            &json!({
                "stood_still_s": stood.map(|s| s.as_secs_f64()),
                "acknowledged": a.acknowledged, "to_the_soak": self.ledger.acknowledged.borrow().len(),
                "lost": a.lost, "held": a.held, "consumed": a.consumed, "consumed_twice": a.consumed_twice.len(),
                "consumed_and_deleted": a.consumed_and_deleted, "forked_versions": a.forked_versions.len(),
                "corrupt": a.corrupt.len(), "steps": report.steps.len(),
                "newest": report.steps.keys().next_back(),
            }),
        );
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
        self.mesh.stop_all().await?;
        let left = self.mesh.processes();
        if !left.is_empty() {
            self.violation("processes left", &left.join("\n"));
        }
        let acknowledged = self.ledger.acknowledged.borrow().clone();
        let stores: Vec<PathBuf> =
            self.mesh.nodes().iter().map(|n| n.data().join("store")).filter(|s| s.join("CURRENT").exists()).collect();
        let report = StoresReport::read(&stores, &acknowledged).context("the stores at the end")?;
        self.audited("audit", &report, None);
        Ok(())
    }
}
