//! The run itself: phases, the queue of faults, the end.

use super::faults::{self, Cut, CutSet, Cuts};
use super::node::{Around, Lost, SimNode};
use super::observer::Tap;
use super::recorder::{Recorded, Recorder};
use super::setup;
use crate::event::{Event, NodeIx};
use crate::invariants::End;
use crate::scenario::plan;
use crate::scenario::{Fault, FaultKind, LinkBehaviour, Mode, Scenario, Session};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use starling_core::membership::SharedRecords;
use starling_core::memory_network::{LinkProfile, MemoryConfig, MemoryNetwork, NodeCounters};
use starling_core::runtime::NodeScope;
use starling_protocol::{ModelName, NodeId, PolicyVersion};
use starling_storage::{AuditReport, SharedStore};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, sleep_until, timeout};

/// Longest setup: joining, electing, creating, submitting. Faults begin after it.
const SETUP_MAX: Duration = Duration::from_secs(60);
/// Nodes start within this time of each other.
const START_SPREAD: Duration = Duration::from_millis(500);
/// Nodes that a new one knows.
const SEEDS: usize = 3;
/// Who stays away for less may be back before all have noticed, which is no detection then.
const NOTICED_WITHIN: Duration = Duration::from_secs(20);
/// How often the liveness phase looks.
const LOOK: Duration = Duration::from_millis(250);

/// Something that the run does to its nodes.
#[derive(Clone, Debug)]
enum Action {
    Begin(usize),
    End(usize),
    /// A flapping split changes: cut or whole.
    Flap {
        fault: usize,
        cut: bool,
    },
    /// A node under churn goes, or comes back.
    Churn {
        fault: usize,
        node: NodeIx,
        leaves: bool,
    },
    /// A crashed node comes back.
    Restart(NodeIx),
    /// The quiet time before the first fault begins, or ends.
    Quiet {
        begins: bool,
    },
    /// Do all know of the last death?
    Look,
}

/// See the module's text.
pub(crate) struct World {
    seed: u64,
    scenario: Arc<Scenario>,
    job: Arc<crate::scenario::Job>,
    rng: ChaCha8Rng,
    network: Arc<MemoryNetwork>,
    recorder: Recorder,
    nodes: Vec<SimNode>,
    models: Vec<ModelName>,
    faults: Vec<Fault>,
    queue: BTreeMap<(Duration, u64), Action>,
    sequence: u64,
    cuts: Cuts,
    /// What each running fault did, so that its end undoes that and nothing else.
    effects: BTreeMap<usize, Effect>,
    /// Whom each running fault hits, for the event of its end.
    hit: BTreeMap<usize, Vec<Vec<NodeIx>>>,
    safety_from: Instant,
    operators: Vec<NodeScope>,
    records: Arc<SharedRecords>,
    /// When the last node died for long, until all others know.
    undetected_since: Option<Instant>,
    detected_in: Option<Duration>,
    /// Traffic of all nodes at the start of the quiet time before the first fault.
    quiet_from: Option<(Instant, Load)>,
    steady: Option<Load>,
}

/// Messages and bytes that a node sends in a second, on average over all.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Load {
    /// Messages, each direction of a call counted as one.
    pub messages: f64,
    /// Bytes of their bodies.
    pub bytes: f64,
}

#[derive(Clone, Debug)]
enum Effect {
    /// What it cuts, and while it is cut, how.
    Cut(CutSet, Option<Cut>),
    Nodes(Vec<NodeIx>),
}

/// What a run leaves.
pub(crate) struct Ended {
    pub(crate) recorded: Recorded,
    pub(crate) names: Vec<String>,
    pub(crate) traffic: Vec<NodeCounters>,
    pub(crate) audit: Option<AuditReport>,
    pub(crate) virtual_time: Duration,
    /// From the heal to convergence.
    pub(crate) healed_in: Option<Duration>,
    /// From a death that lasted to all others knowing it.
    pub(crate) detected_in: Option<Duration>,
    /// In the quiet time before the first fault.
    pub(crate) steady: Option<Load>,
}

impl World {
    pub(crate) fn new(scenario: Arc<Scenario>, seed: u64, keep: bool) -> Self {
        let start = Instant::now();
        let names = scenario.node_names();
        let id = |name: &str| super::key::SimKey::named(name).0;
        let ids = names.iter().zip(0_u32..).map(|((name, _), i)| (id(name), NodeIx(i)));
        let recorder = Recorder::new(start, ids, &scenario.job, keep);
        let nodes = names.iter().zip(0_u32..).map(|((name, g), i)| {
            let group = scenario.nodes[*g].clone();
            let device = scenario.device(&group);
            SimNode::new(NodeIx(i), name.clone(), group, device, start, &recorder)
        });
        let nodes: Vec<SimNode> = nodes.collect();
        let config = MemoryConfig { link: profile(&scenario.network), ..MemoryConfig::default() };
        let network = MemoryNetwork::new(seed, config);
        network.set_observer(Arc::new(Tap(recorder.clone())));
        Self {
            seed,
            job: Arc::new(scenario.job.clone()),
            rng: ChaCha8Rng::seed_from_u64(seed ^ 0x0005_74a6),
            network,
            recorder,
            nodes,
            models: setup::model_names(&scenario.job),
            faults: plan::faults(&scenario, seed),
            queue: BTreeMap::new(),
            sequence: 0,
            cuts: Cuts::default(),
            effects: BTreeMap::new(),
            hit: BTreeMap::new(),
            safety_from: start,
            operators: Vec::new(),
            records: Arc::default(),
            undetected_since: None,
            detected_in: None,
            quiet_from: None,
            steady: None,
            scenario,
        }
    }

    /// Runs to the end, or to the first violation.
    pub(crate) async fn run(mut self) -> Ended {
        self.set_links();
        self.start_all().await;
        self.set_up().await;
        self.safety().await;
        let healed_at = self.recorder.now();
        let steps_at_heal = self.recorder.oracle(|o| o.counts.steps);
        if !self.recorder.is_violated() {
            self.heal().await;
        }
        let mut converged = false;
        while !self.recorder.is_violated() && self.recorder.now() - healed_at < self.scenario.converge {
            if self.is_converged(steps_at_heal) {
                converged = true;
                break;
            }
            self.pause(LOOK).await;
        }
        let healed_in = converged.then(|| self.recorder.now() - healed_at);
        self.end(steps_at_heal, converged, healed_in)
    }

    fn seeds_of(&mut self, node: NodeIx) -> Vec<NodeId> {
        // An operator's list of peers: the first nodes, and some that it has met.
        let mut seeds: Vec<NodeId> =
            self.nodes.iter().filter(|n| n.ix != node && !n.group.absent).take(SEEDS).map(|n| n.id).collect();
        for _ in 0..SEEDS {
            let other = &self.nodes[self.rng.random_range(0..self.nodes.len())];
            if other.ix != node && !seeds.contains(&other.id) {
                seeds.push(other.id);
            }
        }
        seeds
    }

    async fn start(&mut self, node: NodeIx) {
        let seeds = self.seeds_of(node);
        let (network, recorder, job) = (self.network.clone(), self.recorder.clone(), self.job.clone());
        let (records, mode) = (self.records.clone(), self.scenario.mode);
        let around = Around {
            seed: self.seed,
            network: &network,
            recorder: &recorder,
            job: &job,
            mode,
            records: &records,
            generation_after: self.scenario.generation_after,
            seeds,
        };
        if let Err(why) = self.nodes[node.0 as usize].start(&around).await {
            // Its disk may be failing: it is tried again, as a supervisor would.
            tracing::debug!(why, "a node does not start");
            self.after(Duration::from_secs(1), Action::Restart(node));
        }
    }

    fn crash(&mut self, who: &[NodeIx], power_loss: bool, lost: Lost) {
        for node in who {
            self.nodes[node.0 as usize].crash(&self.network, &self.recorder, power_loss, lost);
        }
        if lost == Lost::DiskAndKey {
            for node in who {
                self.cuts.follow(*node, &self.nodes, &self.network);
            }
        }
    }

    /// Sleeps, or returns at the first violation.
    async fn pause(&self, d: Duration) {
        tokio::select! {
            biased;
            () = self.recorder.alarm.notified() => {}
            () = sleep(d) => {}
        }
    }

    fn set_links(&self) {
        for link in &self.scenario.links {
            let mut none = ChaCha8Rng::seed_from_u64(0);
            let model = &self.models[0];
            let from = faults::resolve(&link.from, &BTreeSet::new(), &self.nodes, model, &mut none);
            let to = faults::resolve(&link.to, &BTreeSet::new(), &self.nodes, model, &mut none);
            for a in &from {
                for b in to.iter().filter(|b| *b != a) {
                    let (a, b) = (&self.nodes[a.0 as usize], &self.nodes[b.0 as usize]);
                    self.network.set_link(a.id, b.id, profile(&link.behaviour));
                }
            }
        }
    }

    async fn start_all(&mut self) {
        let present: Vec<NodeIx> = self.nodes.iter().filter(|n| !n.group.absent).map(|n| n.ix).collect();
        let step = START_SPREAD / u32::try_from(present.len().max(1)).unwrap_or(u32::MAX);
        for node in present {
            self.start(node).await;
            sleep(step).await;
        }
    }

    async fn set_up(&mut self) {
        let server = self.nodes.iter().find(|n| n.group.role.serves() && n.is_up()).map(|n| n.ix);
        if self.scenario.mode == Mode::Membership {
            let deadline = Instant::now() + SETUP_MAX;
            while !self.all_know_all() && Instant::now() < deadline {
                self.pause(LOOK).await;
            }
            return;
        }
        let Some(core) = server.and_then(|s| self.nodes[s.0 as usize].core().cloned()) else { return };
        let servers = self.nodes.iter().filter(|n| n.is_up() && n.group.role.serves()).count();
        let deadline = Instant::now() + SETUP_MAX;
        // A model's group is made of the servers that its creator knows.
        while core.membership().live_servers().len() < servers && Instant::now() < deadline {
            self.pause(LOOK).await;
        }
        let scope = NodeScope::new(self.seed);
        let submissions = self.models.iter().map(|model| {
            let submit = setup::submit(core.clone(), model.clone(), self.job.clone(), self.seed, self.recorder.clone());
            scope.spawn(submit)
        });
        let submissions: Vec<_> = submissions.collect();
        for submission in submissions {
            let _late = timeout(deadline.saturating_duration_since(Instant::now()), submission).await;
        }
        self.operators.push(scope);
    }

    fn after(&mut self, d: Duration, action: Action) {
        self.at(self.safety_from.elapsed() + d, action);
    }
    fn at(&mut self, at: Duration, action: Action) {
        self.sequence += 1;
        self.queue.insert((at, self.sequence), action);
    }

    async fn safety(&mut self) {
        self.safety_from = Instant::now();
        for i in 0..self.faults.len() {
            self.at(self.faults[i].at, Action::Begin(i));
        }
        let first = self.faults.first().map_or(self.scenario.duration, |f| f.at);
        // Late enough that even a large mesh has introduced all its nodes.
        self.at(first.mul_f64(0.75), Action::Quiet { begins: true });
        self.at(first.mul_f64(0.98), Action::Quiet { begins: false });
        while !self.recorder.is_violated() {
            let next = self.queue.first_key_value().map(|((at, _), _)| *at);
            let until = next.unwrap_or(self.scenario.duration).min(self.scenario.duration);
            tokio::select! {
                biased;
                () = self.recorder.alarm.notified() => return,
                () = sleep_until(self.safety_from + until) => {}
            }
            if next.is_none_or(|at| at >= self.scenario.duration) {
                return;
            }
            if let Some((_, action)) = self.queue.pop_first() {
                self.act(action).await;
            }
        }
    }

    async fn act(&mut self, action: Action) {
        match action {
            Action::Begin(i) => self.begin(i).await,
            Action::End(i) => self.finish_fault(i),
            Action::Flap { fault, cut } => self.flap(fault, cut),
            Action::Churn { fault, node, leaves } => self.churn(fault, node, leaves).await,
            Action::Restart(node) => {
                self.undetected_since = None; // from now on there is nothing to detect
                self.start(node).await;
            }
            Action::Quiet { begins } => self.measure(begins),
            Action::Look => self.look(),
        }
    }

    fn load(&self) -> Load {
        let sum = self
            .nodes
            .iter()
            .map(|n| self.network.counters(n.id))
            .fold((0, 0), |(m, b), c| (m + c.messages_sent, b + c.bytes_sent));
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
        Load { messages: sum.0 as f64, bytes: sum.1 as f64 }
    }

    fn measure(&mut self, begins: bool) {
        let now = self.load();
        match (begins, self.quiet_from) {
            (true, _) => self.quiet_from = Some((Instant::now(), now)),
            (false, Some((since, before))) => {
                #[expect(clippy::cast_precision_loss, reason = "at most 20,000 nodes")]
                let per = 1.0 / (since.elapsed().as_secs_f64().max(1e-3) * self.nodes.len() as f64);
                let per_node = |a: f64, b: f64| (a - b) * per;
                self.steady = Some(Load {
                    messages: per_node(now.messages, before.messages),
                    bytes: per_node(now.bytes, before.bytes),
                });
            }
            (false, None) => {}
        }
    }

    /// Whether every node that is up counts as many live nodes as there are.
    fn all_know_all(&self) -> bool {
        let up = self.nodes.iter().filter(|n| n.is_up()).count();
        self.nodes.iter().filter_map(SimNode::membership).all(|m| m.live_count() == up)
    }

    fn look(&mut self) {
        let Some(since) = self.undetected_since else { return };
        if self.all_know_all() {
            self.detected_in = Some(since.elapsed());
            self.undetected_since = None;
        } else {
            self.after(LOOK, Action::Look);
        }
    }

    /// A fault begins.
    fn tell(&mut self, i: usize, groups: Vec<Vec<NodeIx>>) {
        self.hit.insert(i, groups.clone());
        self.recorder.record(Event::Fault { kind: self.faults[i].kind.name(), begins: true, groups });
    }

    fn nodes_of(&mut self, selects: &[crate::scenario::Select]) -> Vec<NodeIx> {
        faults::resolve(selects, &BTreeSet::new(), &self.nodes, &self.models[0], &mut self.rng)
    }

    fn cut(&mut self, i: usize, set: CutSet, groups: Vec<Vec<NodeIx>>) {
        self.tell(i, groups);
        let cut = self.cuts.cut(&set, &self.nodes, &self.network);
        self.effects.insert(i, Effect::Cut(set, Some(cut)));
    }

    async fn begin(&mut self, i: usize) {
        let fault = self.faults[i].clone();
        match &fault.kind {
            FaultKind::Split { sides } => {
                let sides = faults::sides(sides, None, &self.nodes, &self.models[0], &mut self.rng);
                self.cut(i, CutSet::Between(sides.clone()), sides);
            }
            FaultKind::Islands { count } => {
                let sides = faults::islands(*count, self.nodes.len(), &mut self.rng);
                self.cut(i, CutSet::Between(sides.clone()), sides);
            }
            FaultKind::OneWay { from, to } => {
                let (from, to) = (self.nodes_of(from), self.nodes_of(to));
                self.cut(i, faults::one_way(&from, &to), vec![from, to]);
            }
            FaultKind::Bridge { node, sides } => {
                let bridge = self.nodes_of(std::slice::from_ref(node)).first().copied();
                let sides = faults::sides(sides, bridge, &self.nodes, &self.models[0], &mut self.rng);
                self.cut(i, CutSet::Between(sides.clone()), sides);
            }
            FaultKind::Flapping { sides, .. } => {
                let sides = faults::sides(sides, None, &self.nodes, &self.models[0], &mut self.rng);
                let set = CutSet::Between(sides.clone());
                self.tell(i, sides);
                self.effects.insert(i, Effect::Cut(set, None));
                self.flap(i, true);
            }
            FaultKind::Isolate { nodes } => {
                let nodes = self.nodes_of(nodes);
                self.cut(i, faults::isolated(&nodes, self.nodes.len()), vec![nodes]);
            }
            FaultKind::Crash { nodes, power_loss, disk_lost, key_kept, away } => {
                let nodes = self.nodes_of(nodes);
                self.tell(i, vec![nodes.clone()]);
                let lost = match (disk_lost, key_kept) {
                    (false, _) => Lost::Nothing,
                    (true, true) => Lost::Disk,
                    (true, false) => Lost::DiskAndKey,
                };
                self.crash(&nodes, *power_loss, lost);
                self.bring_back(&nodes, *away);
                if away.is_none_or(|a| a >= NOTICED_WITHIN) {
                    self.undetected_since = Some(Instant::now());
                    self.after(LOOK, Action::Look);
                }
            }
            FaultKind::MassLeave { nodes, share, away } => {
                let nodes = self.nodes_of(nodes).into_iter().filter(|n| self.nodes[n.0 as usize].is_up()).collect();
                let nodes = faults::share_of(nodes, *share, &mut self.rng);
                self.tell(i, vec![nodes.clone()]);
                self.crash(&nodes, false, Lost::Nothing);
                self.bring_back(&nodes, *away);
            }
            FaultKind::Join { nodes } => {
                let nodes = self.nodes_of(nodes);
                self.tell(i, vec![nodes.clone()]);
                for node in nodes {
                    self.start(node).await;
                }
            }
            FaultKind::Churn { nodes, session, mean, .. } => {
                let nodes = self.nodes_of(nodes);
                self.tell(i, vec![nodes.clone()]);
                for node in &nodes {
                    let stays = faults::session(*session, *mean, &mut self.rng);
                    self.after(stays, Action::Churn { fault: i, node: *node, leaves: true });
                }
                self.effects.insert(i, Effect::Nodes(nodes));
            }
            FaultKind::Degrade { nodes, .. }
            | FaultKind::DiskSlow { nodes, .. }
            | FaultKind::DiskFull { nodes }
            | FaultKind::DiskFails { nodes }
            | FaultKind::DiskCorrupt { nodes, .. }
            | FaultKind::ClockJump { nodes, .. }
            | FaultKind::ClockSkew { nodes, .. }
            | FaultKind::SlowDevice { nodes, .. } => {
                let nodes = self.nodes_of(nodes);
                self.tell(i, vec![nodes.clone()]);
                for node in &nodes {
                    self.ail(&fault.kind, *node, true);
                }
                self.effects.insert(i, Effect::Nodes(nodes));
            }
        }
        if let Some(lasts) = fault.lasts {
            self.after(lasts, Action::End(i));
        }
    }

    fn bring_back(&mut self, nodes: &[NodeIx], away: Option<Duration>) {
        if let Some(away) = away {
            for node in nodes {
                self.after(away, Action::Restart(*node));
            }
        }
    }

    /// A node's own ailment begins or ends.
    fn ail(&mut self, kind: &FaultKind, ix: NodeIx, begins: bool) {
        let base = profile(&self.scenario.network);
        let node = &mut self.nodes[ix.0 as usize];
        match kind {
            FaultKind::DiskSlow { delay, .. } => node.set_disk_delay(if begins { *delay } else { Duration::ZERO }),
            FaultKind::DiskFull { .. } => node.disk.set_full(begins),
            FaultKind::DiskFails { .. } => node.disk.set_failing(begins),
            FaultKind::DiskCorrupt { values, .. } if begins => {
                let rng = &mut self.rng;
                node.disk.corrupt(*values, |n| rng.random_range(0..n));
            }
            FaultKind::ClockJump { by_ms, .. } if begins => node.clock.jump(*by_ms),
            FaultKind::ClockSkew { rate, .. } => node.clock.set_rate(if begins { *rate } else { 1.0 }),
            FaultKind::SlowDevice { factor, .. } => node.slowness.set(if begins { *factor } else { 1.0 }),
            FaultKind::Degrade { loss, latency, bandwidth_kib_s, .. } => {
                let profile = if begins {
                    LinkProfile {
                        latency: *base.latency.start() + *latency..=*base.latency.end() + *latency,
                        loss: loss.max(base.loss),
                        bandwidth: (*bandwidth_kib_s > 0).then_some(*bandwidth_kib_s * 1024).or(base.bandwidth),
                        ..base
                    }
                } else {
                    base
                };
                self.network.set_node_profile(node.id, profile);
            }
            _ => {}
        }
    }

    fn finish_fault(&mut self, i: usize) {
        let Some(effect) = self.effects.remove(&i) else { return };
        let groups = self.hit.remove(&i).unwrap_or_default();
        self.recorder.record(Event::Fault { kind: self.faults[i].kind.name(), begins: false, groups });
        match effect {
            Effect::Cut(_, None) => {}
            Effect::Cut(set, Some(cut)) => self.cuts.heal(cut, &set, &self.nodes, &self.network),
            Effect::Nodes(nodes) => {
                let kind = self.faults[i].kind.clone();
                for node in nodes {
                    self.ail(&kind, node, false);
                }
            }
        }
    }

    fn flap(&mut self, i: usize, cut: bool) {
        let FaultKind::Flapping { period, .. } = self.faults[i].kind else { return };
        let Some(Effect::Cut(set, now)) = self.effects.get_mut(&i) else { return };
        match (cut, now.take()) {
            (true, None) => *now = Some(self.cuts.cut(set, &self.nodes, &self.network)),
            (false, Some(is)) => self.cuts.heal(is, set, &self.nodes, &self.network),
            (_, is) => *now = is,
        }
        self.after(period / 2, Action::Flap { fault: i, cut: !cut });
    }

    async fn churn(&mut self, i: usize, node: NodeIx, leaves: bool) {
        let FaultKind::Churn { session, mean, away, .. } = self.faults[i].kind else { return };
        if leaves && self.effects.contains_key(&i) {
            // A volunteer's machine that goes to sleep: half of them get no chance to sync.
            let power_loss = self.rng.random_bool(0.5);
            self.crash(&[node], power_loss, Lost::Nothing);
            let gone = faults::session(Session::Exponential, away, &mut self.rng);
            self.after(gone, Action::Churn { fault: i, node, leaves: false });
        } else if !leaves {
            self.start(node).await;
            let stays = faults::session(session, mean, &mut self.rng);
            self.after(stays, Action::Churn { fault: i, node, leaves: true });
        }
    }

    /// Ends every fault, and starts every node that a fault did not take for good.
    async fn heal(&mut self) {
        let running: Vec<usize> = self.effects.keys().copied().collect();
        for i in running {
            self.finish_fault(i);
        }
        self.cuts.heal_all(&self.network);
        let gone = self.gone_for_good();
        let down: Vec<NodeIx> =
            self.nodes.iter().filter(|n| !n.is_up() && !gone.contains(&n.ix)).map(|n| n.ix).collect();
        self.recorder.record(Event::Healed);
        for node in down {
            self.start(node).await;
        }
    }

    /// Nodes that a fault without `away` took, and absent ones that nobody started.
    fn gone_for_good(&self) -> BTreeSet<NodeIx> {
        let returns: BTreeSet<NodeIx> = self
            .queue
            .values()
            .filter_map(|a| match a {
                Action::Restart(n) | Action::Churn { node: n, leaves: false, .. } => Some(*n),
                _ => None,
            })
            .collect();
        self.nodes.iter().filter(|n| !n.is_up() && !returns.contains(&n.ix)).map(|n| n.ix).collect()
    }

    fn live_servers(&self) -> Vec<NodeIx> {
        self.nodes.iter().filter(|n| n.is_up() && n.group.role.serves()).map(|n| n.ix).collect()
    }

    fn jobs_done(&self) -> bool {
        if self.scenario.mode == Mode::Membership {
            return true;
        }
        self.recorder.oracle(|o| self.models.iter().all(|m| o.newest(m).steps() >= self.job.steps))
    }

    fn is_converged(&self, steps_at_heal: u64) -> bool {
        if self.scenario.mode == Mode::Membership {
            return self.all_know_all();
        }
        let servers = self.live_servers();
        let done = self.jobs_done();
        self.recorder.oracle(|o| {
            let all_newest = self.models.iter().all(|m| {
                let (lineage, newest) = (o.lineage(m), o.newest(m));
                // While training goes on a version may be one behind: the next one is on its way.
                let near = |v: &PolicyVersion| lineage.contains(*v) && v.steps() + 1 >= newest.steps();
                servers
                    .iter()
                    .all(|s| o.lineage_of(*s, m) == lineage && o.served.get(&(*s, m.clone())).is_some_and(near))
            });
            all_newest && (done || o.counts.steps > steps_at_heal + self.models.len() as u64)
        })
    }

    fn end(mut self, steps_at_heal: u64, converged: bool, healed_in: Option<Duration>) -> Ended {
        let virtual_time = self.recorder.now();
        let servers = self.live_servers();
        let said: Vec<(NodeIx, String)> = if converged { Vec::new() } else { self.what_they_say() };
        let models: &[ModelName] = if self.scenario.mode == Mode::Membership { &[] } else { &self.models };
        let end = End {
            servers: &servers,
            models,
            steps_at_heal,
            jobs_done: self.jobs_done(),
            limit: self.scenario.converge,
            said: &said,
            converged,
        };
        let recorded = self.recorder.finish(&end);
        let traffic = self.nodes.iter().map(|n| self.network.counters(n.id)).collect();
        let everyone: Vec<NodeIx> = self.nodes.iter().map(|n| n.ix).collect();
        self.crash(&everyone, false, Lost::Nothing);
        for operator in &self.operators {
            operator.crash();
        }
        let stores: Vec<SharedStore> = self.nodes.iter().map(|n| n.disk.clone() as SharedStore).collect();
        let audit = starling_storage::audit(&stores, []).ok();
        let names = self.nodes.iter().map(|n| n.name.clone()).collect();
        let (detected_in, steady) = (self.detected_in, self.steady);
        Ended { recorded, names, traffic, audit, virtual_time, healed_in, detected_in, steady }
    }

    fn what_they_say(&self) -> Vec<(NodeIx, String)> {
        let mut said = Vec::new();
        if self.scenario.mode == Mode::Membership {
            let up = self.nodes.iter().filter(|n| n.is_up()).count();
            let wrong = self.nodes.iter().filter_map(|n| Some((n.ix, n.membership()?.live_count())));
            let wrong = wrong.filter(|(_, live)| *live != up).take(8);
            return wrong.map(|(ix, live)| (ix, format!("{live} nodes live, {up} do"))).collect();
        }
        for node in self.nodes.iter().filter(|n| n.group.role.serves()) {
            for model in &self.models {
                let words = match node.core() {
                    None => "down".to_owned(),
                    Some(core) => {
                        let s = core.model_status(model);
                        format!(
                            "{model} version {} term {} leads {} {} {}",
                            s["version"], s["term"], s["is_leader"], s["wait"], s["activity"]["doing"]
                        )
                    }
                };
                said.push((node.ix, words));
            }
        }
        said
    }
}

fn profile(b: &LinkBehaviour) -> LinkProfile {
    let ms = |v: f64| Duration::from_secs_f64(v / 1000.0);
    LinkProfile {
        latency: ms(b.latency_ms.0)..=ms(b.latency_ms.1),
        loss: b.loss,
        duplication: b.duplication,
        reordering: b.reordering,
        reordering_delay: ms(b.latency_ms.1.max(1.0) * 4.0),
        bandwidth: (b.bandwidth_kib_s > 0).then_some(b.bandwidth_kib_s * 1024),
        ..LinkProfile::default()
    }
}
