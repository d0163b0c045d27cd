//! Clients, leaders and a log in virtual time.

use crate::invariants;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use starling_protocol::advantage::AdvantageRule;
use starling_protocol::assignment::Assignment;
use starling_protocol::codec::encode;
use starling_protocol::control::{Applied, ControlEntry, ModelState, StepCommitted, StepMetrics};
use starling_protocol::job::{CollectionRule, EvaluateSpec, JobSpec, Sampling, TaskSetSpec, TrainerSpec};
use starling_protocol::ledger::{Ledger, LoadedTasks, TrainingBatch};
use starling_protocol::manifest::Manifest;
use starling_protocol::rollout::{Rollout, Timeline, VerifiedRollout};
use starling_protocol::task::Task;
use starling_protocol::{EpisodeId, Hash, JobId, ModelName, NodeId, PolicyVersion, RolloutId, Term, Timestamp};
use std::collections::BTreeMap;

/// Events before a run counts as stuck.
const EVENTS_MAX: u64 = 200_000;

/// Something that happens at a time.
#[derive(Clone, Debug)]
enum Event {
    /// A client asks for work and renews what it runs.
    Claim(usize),
    /// An agent is done.
    Ended(usize, Assignment),
    /// A sealed rollout reaches the leader, perhaps not for the first time.
    Delivered(VerifiedRollout),
    /// The trainer is done with a batch of this term.
    Trained(Term, TrainingBatch),
    /// The leader is deposed and another one takes over.
    LeaderChange,
    /// The leader looks at its ledger.
    Beat,
}

/// What a run came to.
#[derive(Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Events handled.
    pub events: u64,
    /// Steps committed.
    pub steps: u64,
    /// Leaders that there were.
    pub terms: u64,
    /// blake3 over every event and its time: equal for equal seeds.
    pub trace: Hash,
}

#[derive(Debug, Default)]
struct Client {
    running: Vec<EpisodeId>,
}

/// See the module's text.
#[derive(Debug)]
pub struct World {
    seed: u64,
    rng: ChaCha8Rng,
    now: Timestamp,
    queue: BTreeMap<(Timestamp, u64), Event>,
    sequence: u64,
    trace: blake3_chain::Chain,
    spec: JobSpec,
    state: ModelState,
    committed: Vec<StepCommitted>,
    term: Term,
    ledger: Option<Ledger>,
    clients: Vec<Client>,
    stored: BTreeMap<RolloutId, VerifiedRollout>,
    grants: Vec<(EpisodeId, NodeId)>,
    /// Share of messages that are lost, and of those that arrive twice.
    loss: f64,
    duplication: f64,
    /// Faults stop at this time: what follows must be live.
    heal_at: Timestamp,
}

mod blake3_chain {
    use starling_protocol::Hash;

    /// A hash over everything that was added, in order.
    #[derive(Debug, Default)]
    pub(super) struct Chain(Hash);

    impl Chain {
        pub(super) fn add(&mut self, bytes: &[u8]) {
            let mut joined = self.0.0.to_vec();
            joined.extend_from_slice(bytes);
            self.0 = Hash::of(&joined);
        }
        pub(super) fn hash(&self) -> Hash {
            self.0
        }
    }
}

fn client_id(i: usize) -> NodeId {
    NodeId(*Hash::of(&(i as u64).to_le_bytes()).0.first_chunk().unwrap_or(&[0; 32]))
}

impl World {
    /// Everything follows from `seed`: sizes, loss, speed of clients, how often leaders fall.
    ///
    /// # Panics
    /// Never: the fixed model name is valid.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        #[expect(clippy::expect_used, reason = "a constant that the type accepts")]
        let model = ModelName::new("simulated").expect("a valid name");
        let set = |name: &str, weight| TaskSetSpec {
            name: name.into(),
            weight,
            train: Manifest::of(name.as_bytes()),
            heldout: None,
        };
        let spec = JobSpec {
            name: "simulated".into(),
            model: model.clone(),
            seed,
            steps: rng.random_range(3..8),
            groups_per_step: rng.random_range(1..5),
            group_size: rng.random_range(2..6),
            collection: if rng.random_bool(0.5) { CollectionRule::Groups } else { CollectionRule::InformativeGroups },
            staleness_max: rng.random_range(0..3),
            replication: 2,
            lease_ttl_ms: 5_000,
            optimizer_state_every: 1,
            sampling: Sampling::default(),
            trainer: TrainerSpec { advantage: AdvantageRule::Grpo, ..TrainerSpec::default() },
            tasks: vec![set("a", 1.0), set("b", 2.0)],
            evaluate: EvaluateSpec::default(),
        };
        let mut state = ModelState::default();
        let created = ControlEntry::ModelCreated { model, weights: Manifest::of(b"0"), files: BTreeMap::new() };
        state.apply(Term(1), &created);
        let job = JobId([7; 16]);
        let submitted = ControlEntry::JobSubmitted { job, spec: Box::new(spec.clone()), at: Timestamp(0) };
        state.apply(Term(1), &submitted);
        let clients = rng.random_range(1..6);
        let mut world = Self {
            seed,
            now: Timestamp(0),
            queue: BTreeMap::new(),
            sequence: 0,
            trace: blake3_chain::Chain::default(),
            spec,
            state,
            committed: Vec::new(),
            term: Term(0),
            ledger: None,
            clients: (0..clients).map(|_| Client::default()).collect(),
            stored: BTreeMap::new(),
            grants: Vec::new(),
            loss: rng.random_range(0.0..0.3),
            duplication: rng.random_range(0.0..0.3),
            heal_at: Timestamp(rng.random_range(5_000..60_000)),
            rng,
        };
        world.lead();
        for i in 0..clients {
            world.after(10, Event::Claim(i));
        }
        world.after(1_000, Event::Beat);
        let fall = world.rng.random_range(1_000..20_000);
        world.after(fall, Event::LeaderChange);
        world
    }

    /// The job.
    #[must_use]
    pub fn spec(&self) -> &JobSpec {
        &self.spec
    }
    /// Steps in the order of their commit.
    #[must_use]
    pub fn committed(&self) -> &[StepCommitted] {
        &self.committed
    }
    /// The current leader's ledger.
    #[must_use]
    pub fn ledger(&self) -> Option<&Ledger> {
        self.ledger.as_ref()
    }
    /// Every lease ever given.
    #[must_use]
    pub fn grants(&self) -> &[(EpisodeId, NodeId)] {
        &self.grants
    }
    /// The version that sampled a rollout.
    #[must_use]
    pub fn sampled_by(&self, id: RolloutId) -> Option<PolicyVersion> {
        self.stored.get(&id)?.oldest_version()
    }

    fn after(&mut self, ms: u64, event: Event) {
        self.sequence += 1;
        self.queue.insert((Timestamp(self.now.0 + ms), self.sequence), event);
    }

    fn faulty(&self) -> bool {
        self.now < self.heal_at
    }

    /// A new term: the ledger is rebuilt from the log and from what the stores have.
    fn lead(&mut self) {
        self.term = Term(self.term.0 + 1);
        let Some(job) = self.state.running_job().cloned() else { return };
        let task = |set: &str, i: u32| Task { id: format!("{set}-{i}"), line: "{}".into() };
        let tasks = ["a", "b"].map(|s| LoadedTasks { train: (0..7).map(|i| task(s, i)).collect(), heldout: vec![] });
        let mut ledger = Ledger::new(job, self.term, self.state.version, tasks.to_vec());
        for v in self.stored.values().filter(|v| !self.state.consumed.contains_key(&v.id)) {
            ledger.handle_rollout(v.clone());
        }
        self.ledger = Some(ledger);
    }

    /// Runs to the end of the job, checking every invariant after every event.
    ///
    /// # Errors
    /// The first violation, or that the job did not end; each with the seed that reproduces it.
    pub fn run(mut self) -> Result<Outcome, String> {
        let mut events = 0;
        while self.state.version.0 < self.spec.steps {
            let Some((at, event)) = self.queue.pop_first() else {
                return Err(format!("seed {}: nothing is left to happen at step {}", self.seed, self.state.version));
            };
            self.now = at.0;
            self.trace.add(&encode(&(at.0.0, format!("{event:?}"))));
            self.handle(event);
            events += 1;
            for (name, check) in invariants::ALL {
                check(&self).map_err(|v| format!("seed {}, event {events}: {name}: {v}", self.seed))?;
            }
            if events > EVENTS_MAX {
                return Err(format!(
                    "seed {}: not live: step {} of {}",
                    self.seed, self.state.version, self.spec.steps
                ));
            }
        }
        Ok(Outcome { events, steps: self.state.version.0, terms: self.term.0, trace: self.trace.hash() })
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Claim(i) => self.claim(i),
            Event::Ended(i, a) => self.ended(i, &a),
            Event::Delivered(v) => {
                // A leader looks consumed rollouts up in its log before its ledger sees them.
                if !self.state.consumed.contains_key(&v.id)
                    && let Some(l) = &mut self.ledger
                {
                    l.handle_rollout(v);
                }
                self.train();
            }
            Event::Trained(term, batch) => self.commit(term, &batch),
            Event::LeaderChange => {
                self.lead();
                if self.faulty() {
                    let next = self.rng.random_range(500..20_000);
                    self.after(next, Event::LeaderChange);
                }
            }
            Event::Beat => {
                if let Some(l) = &mut self.ledger {
                    l.handle_timeout(self.now);
                    // What no announcement brought is listed from the stores.
                    for v in self.stored.values().filter(|v| !self.state.consumed.contains_key(&v.id)) {
                        l.handle_rollout(v.clone());
                    }
                }
                self.train();
                self.after(1_000, Event::Beat);
            }
        }
    }

    fn claim(&mut self, i: usize) {
        let next = self.rng.random_range(50..500);
        self.after(next, Event::Claim(i));
        if self.faulty() && self.rng.random_bool(self.loss) {
            return;
        }
        let want = self.rng.random_range(1..5);
        let running = self.clients[i].running.clone();
        let Some(ledger) = &mut self.ledger else { return };
        let (given, revoked, _) = ledger.handle_claim(self.now, client_id(i), want, &running);
        self.grants.extend(given.iter().map(|a| (a.episode, client_id(i))));
        self.clients[i].running.retain(|e| !revoked.contains(e));
        if self.faulty() && self.rng.random_bool(self.loss) {
            return; // the answer is lost: these leases run out
        }
        for a in given {
            self.clients[i].running.push(a.episode);
            let takes = self.rng.random_range(20..2_000);
            self.after(takes, Event::Ended(i, a));
        }
    }

    fn ended(&mut self, i: usize, a: &Assignment) {
        self.clients[i].running.retain(|e| *e != a.episode);
        if self.faulty() && self.rng.random_bool(0.1) {
            if self.rng.random_bool(0.5)
                && let Some(l) = &mut self.ledger
            {
                l.handle_abort(client_id(i), a.episode);
            }
            return; // a crash that nobody hears of ends with the lease
        }
        let mut rollout = Rollout::begin(a, client_id(i), "simulated".into(), self.now);
        rollout.reward = if self.rng.random_bool(0.5) { 1.0 } else { 0.0 };
        rollout.timelines.push(Timeline {
            tokens: vec![1, 2],
            loss_mask: vec![false, true],
            behaviour_logprobs: vec![0.0, -0.5],
            policy_versions: vec![PolicyVersion(0), a.policy_version],
        });
        let v = VerifiedRollout { id: Hash::of(&encode(&rollout)), rollout };
        self.stored.insert(v.id, v.clone());
        let copies = if self.faulty() {
            1 + usize::from(self.rng.random_bool(self.duplication)) - usize::from(self.rng.random_bool(self.loss))
        } else {
            1
        };
        for _ in 0..copies {
            let delay = self.rng.random_range(1..800);
            self.after(delay, Event::Delivered(v.clone()));
        }
    }

    fn train(&mut self) {
        let Some(batch) = self.ledger.as_mut().and_then(Ledger::take_batch) else { return };
        let takes = self.rng.random_range(100..3_000);
        self.after(takes, Event::Trained(self.term, batch));
    }

    /// The proposal of a term, which the log takes only from the term that leads.
    fn commit(&mut self, term: Term, batch: &TrainingBatch) {
        let version = batch.version.next();
        let consumed = batch.consumed();
        let step = StepCommitted {
            job: JobId([7; 16]),
            term,
            version,
            weights: Manifest::of(&version.0.to_le_bytes()),
            weights_delta: None,
            optimizer_state: None,
            holders: vec![client_id(0)],
            consumed: consumed.clone(),
            groups_opened: batch.groups_opened.clone(),
            at: self.now,
            metrics: StepMetrics::default(),
        };
        let applied = self.state.apply(self.term, &ControlEntry::StepCommitted(Box::new(step.clone())));
        if applied == Applied::Yes {
            self.committed.push(step);
            if let Some(l) = &mut self.ledger {
                l.handle_committed(version, &consumed);
            }
        } else if term == self.term {
            // The leader's own step was refused: it reads the log and the stores again.
            self.lead();
        }
        self.train();
    }
}
