//! The leader's ledger of one job: who runs what, what came in, what the next step trains on.
//!
//! Sans-IO. The optimizer leader owns one per term and feeds it claims, verified rollouts, aborts and time;
//! it answers with assignments, batches and finished evaluations. It is rebuilt at the start of a term from
//! [`JobState`] and the unconsumed rollouts of the stores, so it needs no storage of its own.
//!
//! Admission (AReaL, arXiv:2505.24298 §4.1, with `accepted := consumed` after a restart): episodes accepted
//! but not yet consumed plus episodes running stay at or under `(η + 1)·B`, B the episodes of a step and η the
//! job's `staleness_max`. So a rollout is at most η versions old when it trains, unless its episode was slow;
//! groups that grew too old are dropped whole and reported. Clients hold small blocks of it ahead (`blocks`). Dynamic
//! sampling adds room for the replacement of groups without a gradient: [`Ledger::quota`].

mod adoption;
mod blocks;

use crate::advantage::{batch_advantages, is_informative};
use crate::assignment::{Assignment, EvalPhase, HeldLease, Purpose};
use crate::control::{EvalScore, EvaluationCompleted, JobState};
use crate::ids::{EpisodeId, GroupId, NodeId, PolicyVersion, RolloutId, TaskRef, Term};
use crate::job::{CollectionRule, Sampling};
use crate::lineage::Lineage;
use crate::planted::{self, Bug};
use crate::rollout::{Rollout, VerifiedRollout};
use crate::task::{Task, TaskOrder};
use crate::time::Timestamp;
use crate::wire::WaitReason;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use adoption::Adoption;
use blocks::Block;

/// Most episodes in one answer to a claim.
pub const CLAIM_MAX: usize = 256;
/// Most evaluation episodes that run at once.
const EVAL_RUNNING_MAX: usize = 512;

/// Dynamic sampling replaces groups without a gradient by up to so many steps' worth of episodes, then the step goes on
/// with what it has; verl's recipe for DAPO gives up after 10 tries.
const REPLACED_STEPS_MAX: u64 = 4;

/// The task sets of a job, read.
#[derive(Clone, Debug)]
pub struct LoadedTasks {
    /// Training tasks.
    pub train: Vec<Task>,
    /// Held-out tasks; empty when the job has none.
    pub heldout: Vec<Task>,
}

/// A rollout that counts.
#[derive(Clone, Debug, PartialEq)]
pub struct AcceptedRollout {
    /// Its address.
    pub id: RolloutId,
    /// What it says.
    pub rollout: Rollout,
    /// Oldest version that sampled a trained token; the assigning version when no token trains.
    pub oldest_version: PolicyVersion,
}

/// A whole group.
#[derive(Clone, Debug, PartialEq)]
pub struct RolloutGroup {
    /// Its id.
    pub id: GroupId,
    /// Its task.
    pub task: TaskRef,
    /// `group_size` rollouts, in order of id.
    pub rollouts: Vec<AcceptedRollout>,
    /// One per rollout; `None` when the rewards are all equal.
    pub advantages: Option<Vec<f32>>,
}

/// What a step trains on. `groups` may include uninformative ones, which are consumed but carry no gradient.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingBatch {
    /// The version that is trained.
    pub version: PolicyVersion,
    /// The version that the step makes.
    pub next: PolicyVersion,
    /// Whole groups, oldest first.
    pub groups: Vec<RolloutGroup>,
    /// Groups opened per task set, to go with the step.
    pub groups_opened: Vec<u64>,
}

impl TrainingBatch {
    /// Ids of every rollout that the step uses up.
    #[must_use]
    pub fn consumed(&self) -> Vec<RolloutId> {
        self.groups.iter().flat_map(|g| g.rollouts.iter().map(|r| r.id)).collect()
    }
}

/// What the ledger made of a rollout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Admission {
    /// It counts.
    Accepted,
    /// It is valid but of no use, and why.
    Ignored(Surplus),
    /// It is not of this job, or says something that cannot be.
    Invalid(String),
}

/// Why a valid rollout is of no use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Surplus {
    /// Already accepted.
    Known,
    /// A step consumed it.
    Consumed,
    /// Its group is full.
    GroupFull,
    /// Its group was trained on, grew too old, or its job is over.
    GroupClosed,
    /// Too many versions old.
    Stale,
    /// Its evaluation is over, or the place in it is taken.
    EvaluationOver,
}

/// Counters since the start of the term, for status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LedgerCounts {
    /// Episodes assigned.
    pub assigned: u64,
    /// Rollouts accepted.
    pub accepted: u64,
    /// Rollouts ignored.
    pub ignored: u64,
    /// Rollouts refused as invalid.
    pub invalid: u64,
    /// Episodes aborted by their holder.
    pub aborted: u64,
    /// Leases of a former leader that were taken over.
    pub adopted: u64,
    /// Leases that ran out.
    pub expired: u64,
    /// Rollouts dropped with a group that grew too old.
    pub stale_dropped: u64,
}

#[derive(Clone, Debug)]
struct Lease {
    holder: NodeId,
    expires: Timestamp,
    place: Place,
}

#[derive(Clone, Copy, Debug)]
enum Place {
    Group(GroupId),
    Eval(usize),
}

#[derive(Clone, Debug)]
struct OpenGroup {
    task: TaskRef,
    attempts: u32,
    running: BTreeSet<EpisodeId>,
    rollouts: BTreeMap<RolloutId, AcceptedRollout>,
}

impl OpenGroup {
    fn rewards(&self) -> Vec<f32> {
        self.rollouts.values().map(|r| r.rollout.reward).collect()
    }
}

#[derive(Clone, Debug)]
struct EvalSlot {
    set: usize,
    index: u32,
    greedy: bool,
    attempts: u32,
    running: Option<EpisodeId>,
    reward: Option<f32>,
}

#[derive(Clone, Debug)]
struct Evaluation {
    phase: EvalPhase,
    slots: Vec<EvalSlot>,
}

/// See the module's text.
#[derive(Debug)]
pub struct Ledger {
    job: JobState,
    term: Term,
    version: PolicyVersion,
    lineage: Lineage,
    tasks: Vec<LoadedTasks>,
    orders: Vec<TaskOrder>,
    groups_opened: Vec<u64>,
    /// Groups of this term below it are of an earlier start of the same leader.
    first_seq: u64,
    group_seq: u64,
    episode_seq: u64,
    groups: BTreeMap<GroupId, OpenGroup>,
    leases: BTreeMap<EpisodeId, Lease>,
    training: Vec<GroupId>,
    consumed: BTreeSet<RolloutId>,
    evaluation: Option<Evaluation>,
    adoption: Adoption,
    /// Of each client that has one.
    blocks: BTreeMap<NodeId, Block>,
    /// Clients whose last claim was held back for want of places, and when.
    hungry: BTreeMap<NodeId, Timestamp>,
    counts: LedgerCounts,
}

impl Ledger {
    /// For `job` as its log stands at `version`, led in `term`. `tasks` are its sets in the job's order.
    ///
    /// # Panics
    /// When `tasks` are not one per set of the job, or a training set is empty: the caller reads both from the job.
    #[must_use]
    pub fn new(job: JobState, term: Term, version: PolicyVersion, tasks: Vec<LoadedTasks>) -> Self {
        assert_eq!(tasks.len(), job.spec.tasks.len(), "one loaded set per task set of the job");
        assert!(tasks.iter().all(|t| !t.train.is_empty()), "no training set is empty");
        let orders = tasks
            .iter()
            .enumerate()
            .map(|(i, t)| {
                TaskOrder::new(job.spec.seed.wrapping_add(i as u64), u32::try_from(t.train.len()).unwrap_or(u32::MAX))
            })
            .collect();
        let mut groups_opened = job.groups_opened.clone();
        groups_opened.resize(tasks.len(), 0);
        let adoption = Adoption::new(groups_opened.clone());
        let mut ledger = Self {
            job,
            term,
            version,
            lineage: Lineage::default(),
            tasks,
            orders,
            groups_opened,
            first_seq: 0,
            group_seq: 0,
            episode_seq: 0,
            groups: BTreeMap::new(),
            leases: BTreeMap::new(),
            training: Vec::new(),
            consumed: BTreeSet::new(),
            evaluation: None,
            adoption,
            blocks: BTreeMap::new(),
            hungry: BTreeMap::new(),
            counts: LedgerCounts::default(),
        };
        ledger.plan_evaluation();
        ledger
    }

    /// Counts groups and episodes from `first` on. A leader may start over within its term (its quorum was silent for a
    /// while, its process was restarted); then it must not draw the same ids again, so every start takes a higher
    /// number than the one before could reach. Groups of its former starts are adopted like those of former terms.
    #[must_use]
    pub fn counting_from(mut self, first: u64) -> Self {
        (self.first_seq, self.group_seq, self.episode_seq) = (first, first, first);
        self
    }

    /// In this line; without it, in that of the model's creation.
    #[must_use]
    pub fn of_line(mut self, lineage: Lineage) -> Self {
        self.lineage = lineage;
        self
    }

    /// Whether whoever opened the group is gone: another leader, or this one before it started over, or that of a line
    /// that this one won against.
    fn is_adopted(&self, id: &GroupId) -> bool {
        id.term.mark() != self.term.mark() || *id < GroupId { term: self.term, seq: self.first_seq }
    }

    /// The job as this ledger sees it.
    #[must_use]
    pub fn job(&self) -> &JobState {
        &self.job
    }
    /// The version that the next step trains.
    #[must_use]
    pub fn version(&self) -> PolicyVersion {
        self.version
    }
    /// The version that the next step makes.
    #[must_use]
    pub fn next_version(&self) -> PolicyVersion {
        self.lineage.next(self.version)
    }
    /// Counters since the start of the term.
    #[must_use]
    pub fn counts(&self) -> &LedgerCounts {
        &self.counts
    }
    /// Episodes leased now.
    #[must_use]
    pub fn running(&self) -> u64 {
        self.leases.len() as u64
    }
    /// Accepted rollouts that no step consumed yet.
    #[must_use]
    pub fn accepted(&self) -> u64 {
        self.groups.values().map(|g| g.rollouts.len() as u64).sum()
    }
    /// Whole groups that could train now.
    #[must_use]
    pub fn whole_groups(&self) -> u64 {
        self.groups.values().filter(|g| self.is_whole(g)).count() as u64
    }
    /// Groups that a leader of an earlier term opened; they are completed on top of the quota, or a full quota of
    /// broken groups would wait for ever.
    #[must_use]
    pub fn adopted_groups(&self) -> u64 {
        self.groups.keys().filter(|id| self.is_adopted(id)).count() as u64
    }
    /// Places of the evaluation that runs now: how many have a reward, and of how many.
    #[must_use]
    pub fn evaluation_progress(&self) -> Option<(EvalPhase, usize, usize)> {
        let e = self.evaluation.as_ref()?;
        Some((e.phase, e.slots.iter().filter(|s| s.reward.is_some()).count(), e.slots.len()))
    }
    /// All steps and evaluations of the job are done.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.evaluation.is_none() && self.job.steps >= self.job.spec.steps
    }
    /// Most episodes accepted and running at once: `(η + 1)·B`, and under dynamic sampling as many more as replace whole
    /// groups without a gradient, up to `4·B`.
    #[must_use]
    pub fn quota(&self) -> u64 {
        let step = self.job.spec.episodes_per_step();
        (u64::from(self.job.spec.staleness_max) + 1) * step + self.replaced().min(REPLACED_STEPS_MAX * step)
    }

    /// Episodes of whole groups that dynamic sampling replaces.
    fn replaced(&self) -> u64 {
        if self.job.spec.collection == CollectionRule::Groups {
            return 0;
        }
        let dull = self.groups.values().filter(|g| self.is_whole(g) && !is_informative(&g.rewards()));
        dull.map(|g| g.rollouts.len() as u64).sum()
    }

    fn group_size(&self) -> usize {
        self.job.spec.group_size as usize
    }

    fn is_whole(&self, g: &OpenGroup) -> bool {
        let have = if planted::has(Bug::CountTimelines) {
            g.rollouts.values().map(|r| r.rollout.timelines.len()).sum()
        } else {
            g.rollouts.len()
        };
        have >= self.group_size()
    }

    fn plan_evaluation(&mut self) {
        let spec = &self.job.spec;
        let due = |phase, asked| asked && self.job.evaluation(phase).is_none();
        let phase = if self.job.steps == 0 && due(EvalPhase::Start, spec.evaluate.at_start) {
            EvalPhase::Start
        } else if self.job.steps >= spec.steps && due(EvalPhase::End, spec.evaluate.at_end) {
            EvalPhase::End
        } else {
            self.evaluation = None;
            return;
        };
        let mut slots = Vec::new();
        for (set, tasks) in self.tasks.iter().enumerate() {
            let n = u32::try_from(tasks.heldout.len()).unwrap_or(u32::MAX).max(1);
            for (greedy, count) in [(false, spec.evaluate.samples), (true, spec.evaluate.greedy)] {
                slots.extend((0..count).map(|i| EvalSlot {
                    set,
                    index: i % n,
                    greedy,
                    attempts: 0,
                    running: None,
                    reward: None,
                }));
            }
        }
        self.evaluation = Some(Evaluation { phase, slots });
    }

    /// Renews the caller's leases, takes over those that a former leader gave it, and gives it up to `want` more
    /// episodes.
    ///
    /// Returns the assignments, those of `running` that are no longer leased to `holder`, and why there are
    /// fewer assignments than wanted. `stocked` of the running ones have not begun: see [`Ledger::handle_reserve`].
    pub fn handle_claim(
        &mut self,
        now: Timestamp,
        holder: NodeId,
        want: usize,
        stocked: usize,
        running: &[HeldLease],
    ) -> (Vec<Assignment>, Vec<EpisodeId>, Option<WaitReason>) {
        self.handle_timeout(now);
        let expires = now + Duration::from_millis(self.job.spec.lease_ttl_ms);
        let mut revoked = Vec::new();
        for held in running {
            let goes_on = match self.leases.get_mut(&held.episode) {
                Some(lease) if lease.holder == holder => {
                    lease.expires = expires;
                    true
                }
                Some(_) => false,
                None => self.adopt(holder, expires, held),
            };
            if !goes_on {
                revoked.push(held.episode);
            }
        }
        let mut given = Vec::new();
        let mut wait = None;
        while given.len() < want.min(CLAIM_MAX) {
            match self.next_place(now) {
                Ok(place) => given.push(self.lease(now, holder, place)),
                Err(reason) => {
                    wait = Some(reason);
                    break;
                }
            }
        }
        let refused = matches!(wait, Some(WaitReason::QuotaFull { .. } | WaitReason::EvaluationFull));
        self.note_claim(now, holder, stocked as u64, refused);
        (given, revoked, wait)
    }

    fn next_place(&mut self, now: Timestamp) -> Result<Place, WaitReason> {
        if let Some(e) = &self.evaluation {
            if self.leases.len() >= EVAL_RUNNING_MAX {
                return Err(WaitReason::EvaluationFull);
            }
            let free = e.slots.iter().position(|s| s.reward.is_none() && s.running.is_none());
            return free.map(Place::Eval).ok_or(WaitReason::EvaluationFull);
        }
        if self.job.steps >= self.job.spec.steps {
            return Err(WaitReason::NoJob);
        }
        let size = self.group_size();
        // Groups that lack episodes come first, so that a crash delays its group and not the batch after it.
        // What a former leader's groups lack may still run: its holder is heard first.
        let keeps = self.adoption.keeps_places(now, Duration::from_millis(self.job.spec.lease_ttl_ms));
        let lacks = |g: &OpenGroup| g.rollouts.len() + g.running.len() < size;
        let lacking = self.groups.iter().find(|(id, g)| lacks(g) && !(keeps && self.is_adopted(id)));
        if let Some((id, _)) = lacking {
            return Ok(Place::Group(*id));
        }
        let (have, max) = (self.accepted() + self.running(), self.quota());
        if have + size as u64 > max {
            return Err(WaitReason::QuotaFull { have, max });
        }
        Ok(Place::Group(self.open_group()))
    }

    fn open_group(&mut self) -> GroupId {
        // The set that is furthest behind its share; exact over any window, ties to the first.
        let share = |i: usize| (self.groups_opened[i] as f64 + 1.0) / self.job.spec.tasks[i].weight;
        let set = (0..self.tasks.len()).min_by(|a, b| share(*a).total_cmp(&share(*b))).unwrap_or(0);
        let index = self.orders[set].nth(self.groups_opened[set]);
        self.groups_opened[set] += 1;
        let id = GroupId { term: self.term, seq: self.group_seq };
        self.group_seq += 1;
        let task = TaskRef {
            set: self.job.spec.tasks[set].name.clone(),
            index,
            id: self.tasks[set].train[index as usize].id.clone(),
        };
        let group = OpenGroup { task, attempts: 0, running: BTreeSet::new(), rollouts: BTreeMap::new() };
        self.groups.insert(id, group);
        id
    }

    fn lease(&mut self, now: Timestamp, holder: NodeId, place: Place) -> Assignment {
        let seed = self.draw();
        let mut episode = [0; 16];
        episode.copy_from_slice(&seed[..16]);
        let episode = EpisodeId(episode);
        let mut sampling = self.job.spec.sampling;
        let (group, attempt, task, line, purpose) = match place {
            Place::Group(id) => {
                let set = self.set_index(&self.groups[&id].task.set);
                #[expect(clippy::expect_used, reason = "next_place returned a group that is in the map")]
                let g = self.groups.get_mut(&id).expect("group is open");
                g.running.insert(episode);
                g.attempts += 1;
                let line = self.tasks[set].train[g.task.index as usize].line.clone();
                (id, g.attempts - 1, g.task.clone(), line, Purpose::Train)
            }
            Place::Eval(slot) => {
                #[expect(clippy::expect_used, reason = "next_place returned a slot of the evaluation")]
                let e = self.evaluation.as_mut().expect("an evaluation runs");
                let s = &mut e.slots[slot];
                s.running = Some(episode);
                s.attempts += 1;
                if s.greedy {
                    sampling = Sampling { temperature: 0.0, ..sampling };
                }
                let t = &self.tasks[s.set].heldout[s.index as usize];
                let name = self.job.spec.tasks[s.set].name.clone();
                let task = TaskRef { set: name, index: s.index, id: t.id.clone() };
                let slot = u32::try_from(slot).unwrap_or(u32::MAX);
                let purpose = Purpose::Eval { phase: e.phase, greedy: s.greedy, slot };
                (GroupId::default(), s.attempts - 1, task, t.line.clone(), purpose)
            }
        };
        let ttl = self.job.spec.lease_ttl_ms;
        let expires = now + Duration::from_millis(ttl);
        self.leases.insert(episode, Lease { holder, expires, place });
        self.counts.assigned += 1;
        Assignment {
            job: self.job.job,
            model: self.job.spec.model.clone(),
            episode,
            group,
            attempt,
            task,
            task_line: line,
            purpose,
            policy_version: self.version,
            term: self.term,
            seed: u64::from_le_bytes([seed[16], seed[17], seed[18], seed[19], seed[20], seed[21], seed[22], seed[23]]),
            sampling,
            lease_expires: expires,
            lease_ttl_ms: ttl,
            replication: self.job.spec.replication,
        }
    }

    /// Ids and seeds follow from job, term and count: replays are exact, and two leaders never draw the same, nor one
    /// that starts over (see [`Ledger::counting_from`]).
    fn draw(&mut self) -> [u8; 32] {
        let mut h = blake3::Hasher::new();
        h.update(b"starling/episode/1").update(&self.job.job.0).update(&self.job.spec.seed.to_le_bytes());
        h.update(&self.term.0.to_le_bytes()).update(&self.episode_seq.to_le_bytes());
        self.episode_seq += 1;
        *h.finalize().as_bytes()
    }

    fn set_index(&self, name: &str) -> usize {
        self.job.spec.tasks.iter().position(|t| t.name == name).unwrap_or(0)
    }

    fn release(&mut self, episode: EpisodeId) -> Option<Lease> {
        let lease = self.leases.remove(&episode)?;
        match lease.place {
            Place::Group(id) => {
                if let Some(g) = self.groups.get_mut(&id) {
                    g.running.remove(&episode);
                }
            }
            Place::Eval(slot) => {
                if let Some(s) = self.evaluation.as_mut().and_then(|e| e.slots.get_mut(slot))
                    && s.running == Some(episode)
                {
                    s.running = None;
                }
            }
        }
        Some(lease)
    }

    /// The holder gives an episode up; its place is free for a replacement. `false` when `holder` had no lease on it.
    pub fn handle_abort(&mut self, holder: NodeId, episode: EpisodeId) -> bool {
        if self.leases.get(&episode).is_none_or(|l| l.holder != holder) {
            return false;
        }
        self.release(episode);
        self.counts.aborted += 1;
        true
    }

    /// Ends leases that ran out.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        self.adoption.saw(now);
        let over: Vec<EpisodeId> = self.leases.iter().filter(|(_, l)| l.expires <= now).map(|(id, _)| *id).collect();
        for id in over {
            self.release(id);
            self.counts.expired += 1;
        }
    }

    /// When [`Ledger::handle_timeout`] has something to do.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        self.leases.values().map(|l| l.expires).min()
    }

    /// Takes a verified rollout, whoever delivered it and how often.
    pub fn handle_rollout(&mut self, v: VerifiedRollout) -> Admission {
        let admission = self.admit(v);
        match &admission {
            Admission::Accepted => self.counts.accepted += 1,
            Admission::Ignored(_) => self.counts.ignored += 1,
            Admission::Invalid(_) => self.counts.invalid += 1,
        }
        admission
    }

    fn admit(&mut self, v: VerifiedRollout) -> Admission {
        let r = &v.rollout;
        if r.job != self.job.job || r.model != self.job.spec.model {
            return Admission::Invalid(format!("rollout of job {}, expected {}", r.job, self.job.job));
        }
        if self.consumed.contains(&v.id) {
            return Admission::Ignored(Surplus::Consumed);
        }
        let versions = || r.timelines.iter().flat_map(|t| &t.policy_versions);
        if let Some(newest) = versions().filter(|v| self.lineage.contains(**v)).max()
            && *newest > self.version
        {
            return Admission::Invalid(format!("sampled by version {newest}, the newest is {}", self.version));
        }
        // Of a line that went another way: how old it is cannot be said.
        let mut trained = r.timelines.iter().flat_map(|t| t.loss_mask.iter().zip(&t.policy_versions));
        let orphaned = trained.any(|(trains, v)| *trains && !self.lineage.contains(*v));
        let lease = self.release(r.episode);
        if orphaned && !planted::has(Bug::AdmitStale) {
            return Admission::Ignored(Surplus::Stale);
        }
        match r.purpose {
            Purpose::Eval { phase, greedy, slot } => self.admit_eval(&v, phase, greedy, slot),
            Purpose::Train => self.admit_train(v, lease.is_some()),
        }
    }

    fn admit_eval(&mut self, v: &VerifiedRollout, phase: EvalPhase, greedy: bool, slot: u32) -> Admission {
        let Some(e) = self.evaluation.as_mut().filter(|e| e.phase == phase) else {
            return Admission::Ignored(Surplus::EvaluationOver);
        };
        let Some(s) = e.slots.get_mut(slot as usize).filter(|s| s.greedy == greedy) else {
            return Admission::Invalid(format!("evaluation slot {slot}, greedy {greedy}: not in the plan"));
        };
        if s.reward.is_some() {
            return Admission::Ignored(Surplus::EvaluationOver);
        }
        if v.oldest_version().is_some_and(|o| o != self.version) {
            return Admission::Ignored(Surplus::Stale);
        }
        s.reward = Some(v.rollout.reward);
        if let Some(other) = s.running.take() {
            self.leases.remove(&other);
        }
        Admission::Accepted
    }

    fn admit_train(&mut self, v: VerifiedRollout, leased: bool) -> Admission {
        let id = v.rollout.group;
        if !self.groups.contains_key(&id) {
            let adopted = self.is_adopted(&id);
            if !adopted && id.term == self.term && id.seq < self.group_seq {
                return Admission::Ignored(Surplus::GroupClosed);
            }
            // A group whose leader is gone: its rollouts are as good as any.
            if !adopted || leased {
                return Admission::Invalid(format!("group {id:?} was not opened in term {}", self.term));
            }
            let set = self.job.spec.tasks.iter().position(|t| t.name == v.rollout.task.set);
            let known = set.and_then(|s| self.tasks[s].train.get(v.rollout.task.index as usize));
            if known.is_none_or(|t| t.id != v.rollout.task.id) {
                return Admission::Invalid(format!("unknown task {:?}", v.rollout.task));
            }
            if self.is_stale(v.oldest_version()) {
                return Admission::Ignored(Surplus::Stale);
            }
            let task = v.rollout.task.clone();
            self.groups
                .insert(id, OpenGroup { task, attempts: 0, running: BTreeSet::new(), rollouts: BTreeMap::new() });
        }
        let (size, stale) = (self.group_size(), self.is_stale(v.oldest_version()));
        let (in_training, version) = (self.training.contains(&id), self.version);
        #[expect(clippy::expect_used, reason = "inserted just above when it was missing")]
        let group = self.groups.get_mut(&id).expect("group is open");
        if group.task != v.rollout.task {
            return Admission::Invalid(format!("task {:?}, its group has {:?}", v.rollout.task, group.task));
        }
        if group.rollouts.contains_key(&v.id) {
            return Admission::Ignored(Surplus::Known);
        }
        if in_training || group.rollouts.len() >= size {
            return Admission::Ignored(Surplus::GroupFull);
        }
        if stale {
            return Admission::Ignored(Surplus::Stale);
        }
        if group.rollouts.values().any(|o| o.rollout.episode == v.rollout.episode) {
            return Admission::Invalid(format!("a second rollout of episode {}", v.rollout.episode));
        }
        let oldest_version = v.oldest_version().unwrap_or(version);
        group.rollouts.insert(v.id, AcceptedRollout { id: v.id, rollout: v.rollout, oldest_version });
        // A late rollout took the place of its replacement: that one is surplus now.
        while group.rollouts.len() + group.running.len() > size {
            let Some(surplus) = group.running.pop_last() else { break };
            self.leases.remove(&surplus);
        }
        Admission::Accepted
    }

    fn is_stale(&self, oldest: Option<PolicyVersion>) -> bool {
        !planted::has(Bug::AdmitStale)
            && oldest.is_some_and(|o| {
                let staleness = self.lineage.staleness(self.version, o);
                staleness.is_none_or(|s| s > u64::from(self.job.spec.staleness_max))
            })
    }

    /// The next step's batch, once the collection rule is met and no other batch is being trained.
    /// Its groups stay out of reach until [`Ledger::handle_committed`] or [`Ledger::handle_step_failed`].
    pub fn take_batch(&mut self) -> Option<TrainingBatch> {
        if !self.training.is_empty() || self.evaluation.is_some() || self.job.steps >= self.job.spec.steps {
            return None;
        }
        self.drop_stale_groups();
        let target = self.job.spec.groups_per_step as usize;
        let mut counted = 0;
        let (mut picked, mut rewards) = (Vec::new(), Vec::new());
        for (id, group) in self.groups.iter().filter(|(_, g)| self.is_whole(g)) {
            if counted == target {
                break;
            }
            let of_group = group.rewards();
            counted += usize::from(self.job.spec.collection == CollectionRule::Groups || is_informative(&of_group));
            picked.push(*id);
            rewards.push(of_group);
        }
        // Groups without a gradient fill the quota but not the batch: once they take all of it, and of what replaces
        // them, go on with what there is, or a model that always (or never) succeeds would wait for ever. A group that
        // lacks an episode gets another attempt instead.
        let quota_spent = self.accepted() + u64::from(self.job.spec.group_size) > self.quota();
        let all_whole = self.groups.values().all(|g| self.is_whole(g));
        if counted < target && !(quota_spent && all_whole && self.leases.is_empty() && !picked.is_empty()) {
            return None;
        }
        self.training.clone_from(&picked);
        let advantages = batch_advantages(self.job.spec.trainer.algorithm.advantage, &rewards);
        // Copied only now: this is asked after every rollout that comes, and mostly answered with no.
        let copy = |(id, advantages)| {
            let group = self.groups.get(&id)?;
            let rollouts = group.rollouts.values().cloned().collect();
            Some(RolloutGroup { id, task: group.task.clone(), rollouts, advantages })
        };
        Some(TrainingBatch {
            version: self.version,
            next: self.next_version(),
            groups: picked.into_iter().zip(advantages).filter_map(copy).collect(),
            groups_opened: self.groups_opened.clone(),
        })
    }

    fn drop_stale_groups(&mut self) {
        let stale: Vec<GroupId> = self
            .groups
            .iter()
            .filter(|(_, g)| g.rollouts.values().any(|r| self.is_stale(Some(r.oldest_version))))
            .map(|(id, _)| *id)
            .collect();
        for id in stale {
            if let Some(g) = self.groups.remove(&id) {
                self.counts.stale_dropped += g.rollouts.len() as u64;
                for e in g.running {
                    self.leases.remove(&e);
                }
            }
        }
    }

    /// The batch's step was committed as `version`.
    pub fn handle_committed(&mut self, version: PolicyVersion, consumed: &[RolloutId]) {
        self.version = version;
        self.job.steps += 1;
        for id in std::mem::take(&mut self.training) {
            self.groups.remove(&id);
        }
        self.consumed.extend(consumed);
        self.drop_stale_groups();
        self.plan_evaluation();
        if self.job.steps >= self.job.spec.steps {
            // Nothing more trains: what still runs is of no use.
            self.groups.clear();
            self.leases.clear();
        }
    }

    /// The step was not committed; its groups may train again.
    pub fn handle_step_failed(&mut self) {
        self.training.clear();
    }

    /// The evaluation that runs, once every place has its reward.
    #[must_use]
    pub fn finished_evaluation(&self) -> Option<EvaluationCompleted> {
        let e = self.evaluation.as_ref()?;
        if e.slots.iter().any(|s| s.reward.is_none()) {
            return None;
        }
        let score = |set: usize| {
            let of = |greedy: bool| -> Vec<f64> {
                let of_set = e.slots.iter().filter(|s| s.set == set && s.greedy == greedy);
                of_set.filter_map(|s| s.reward.map(f64::from)).collect()
            };
            let (sampled, greedy) = (of(false), of(true));
            let mean = |v: &[f64]| if v.is_empty() { 0.0 } else { v.iter().sum::<f64>() / v.len() as f64 };
            let m = mean(&sampled);
            let n = sampled.len() as f64;
            let var = if n > 1.0 { sampled.iter().map(|r| (r - m).powi(2)).sum::<f64>() / (n - 1.0) } else { 0.0 };
            EvalScore {
                samples: u32::try_from(sampled.len()).unwrap_or(u32::MAX),
                mean: m,
                ci95: if n > 0.0 { 1.96 * (var / n).sqrt() } else { 0.0 },
                greedy_samples: u32::try_from(greedy.len()).unwrap_or(u32::MAX),
                greedy_mean: mean(&greedy),
            }
        };
        let scores = self.job.spec.tasks.iter().enumerate().map(|(i, t)| (t.name.clone(), score(i))).collect();
        Some(EvaluationCompleted { job: self.job.job, phase: e.phase, version: self.version, scores })
    }

    /// The finished evaluation stands in the log.
    pub fn handle_evaluated(&mut self, e: EvaluationCompleted) {
        self.job.evaluations.push(e);
        self.leases.retain(|_, l| matches!(l.place, Place::Group(_)));
        self.plan_evaluation();
    }
}
