//! What a model's Raft group agrees on, and the state that follows from it.
//!
//! [`ModelState::apply`] is the only place where a step becomes committed: version chain, term fence and
//! consume-once are checked here, on every replica, in log order.

use crate::alarm::MismatchAlarm;
use crate::assignment::EvalPhase;
use crate::ids::{JobId, ModelName, NodeId, PolicyVersion, RolloutId, Term};
use crate::job::JobSpec;
use crate::lineage::{Line, Lineage};
use crate::manifest::{DeltaManifest, Manifest};
use crate::planted::{self, Bug};
use crate::time::Timestamp;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The files of a model beside its weights (`config.json`, `tokenizer.json`, …), by name.
pub type ModelFiles = BTreeMap<String, Manifest>;

/// What a step did, for people and plots.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Mean reward of the consumed episodes, per task set.
    pub reward: BTreeMap<String, f64>,
    /// Episodes consumed, per task set.
    pub episodes: BTreeMap<String, u64>,
    /// Groups whose rewards were all equal.
    pub groups_uninformative: u64,
    /// Tokens that trained.
    pub trained_tokens: u64,
    /// Loss.
    pub loss: f64,
    /// Gradient norm before clipping.
    pub grad_norm: f64,
    /// Learning rate of the step.
    pub learning_rate: f64,
    /// Share of trained tokens whose gradient a clip cut off or down.
    pub clip_fraction: f64,
    /// Share of trained tokens that a correction or the outlier guard dropped.
    pub masked_fraction: f64,
    /// Mean weight of the correction over trained tokens; 1 without one.
    pub correction_weight: f64,
    /// Trained tokens with a log-ratio beyond ±20, which was cut there.
    pub ratios_out_of_range: u64,
    /// k3 estimate of the KL divergence between the behaviour policy and the trained one, nats a token.
    pub mismatch_kl: f64,
    /// What is wrong with it, if something is.
    pub mismatch_alarm: Option<MismatchAlarm>,
    /// The job's own estimate of the KL divergence from the reference policy, nats a token; 0 without one.
    pub reference_kl: f64,
    /// Entropy of the policy, nats a token.
    pub entropy: f64,
    /// Largest staleness among the consumed episodes, in versions.
    pub staleness_max: u64,
    /// Mean staleness of the consumed episodes' trained tokens, in versions.
    pub staleness_mean: f64,
    /// Tokens of the trained timelines, prompts included.
    pub tokens: u64,
    /// Tokens more that would have trained if every call were a sequence of its own, instead of timelines.
    pub tokens_saved: u64,
    /// Of [`StepMetrics::tokens`], those that were not computed, as a sequence beside them has the same prefix.
    pub tokens_shared: u64,
    /// Arithmetic of the optimizer per second of its time, 6 · parameters · tokens, as a share of what the same threads
    /// reach in a large product; 0 where it was not measured.
    pub mfu: f64,
    /// Waiting for the batch, milliseconds.
    pub collect_ms: u64,
    /// Optimizing, milliseconds.
    pub train_ms: u64,
    /// Placing the new weights on a second holder, milliseconds.
    pub replicate_ms: u64,
}

/// A committed optimizer step: the only thing that moves a model's version.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepCommitted {
    /// The job that it belongs to.
    pub job: JobId,
    /// Term of the leader that made it; must be the term of the log entry.
    pub term: Term,
    /// The version that was trained; must be the current one.
    pub parent: PolicyVersion,
    /// The new version; must follow the current one in the group's line.
    pub version: PolicyVersion,
    /// The new weights, safetensors.
    pub weights: Manifest,
    /// A shorter way to them for nodes that have the former ones; `weights` is the truth.
    pub weights_delta: Option<DeltaManifest>,
    /// The optimizer's state after the step, if kept with this one.
    pub optimizer_state: Option<Manifest>,
    /// Nodes that held the weights durably before the step was proposed.
    pub holders: Vec<NodeId>,
    /// Rollouts that this step used up.
    pub consumed: Vec<RolloutId>,
    /// Groups opened so far, per task set of the job: where the next leader goes on.
    pub groups_opened: Vec<u64>,
    /// When the leader proposed it, on its clock.
    pub at: Timestamp,
    /// For people.
    pub metrics: StepMetrics,
}

/// Rewards of one evaluation of one task set.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EvalScore {
    /// Episodes sampled with the job's sampling.
    pub samples: u32,
    /// Their mean reward.
    pub mean: f64,
    /// Half the width of the 95 % interval of the mean (normal approximation, 1.96 standard errors).
    pub ci95: f64,
    /// Greedy episodes.
    pub greedy_samples: u32,
    /// Their mean reward.
    pub greedy_mean: f64,
}

/// A finished evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvaluationCompleted {
    /// The job.
    pub job: JobId,
    /// Start or end.
    pub phase: EvalPhase,
    /// The version evaluated.
    pub version: PolicyVersion,
    /// Per task set.
    pub scores: BTreeMap<String, EvalScore>,
}

/// Why a job is over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobEnd {
    /// All steps committed and evaluated.
    Finished,
    /// Someone asked for it.
    Stopped,
}

/// One entry of a model's log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ControlEntry {
    /// The group's first entry: where the model starts from.
    ModelCreated {
        /// Its name.
        model: ModelName,
        /// Version 0.
        weights: Manifest,
        /// Files beside the weights.
        files: ModelFiles,
    },
    /// A job was submitted. Jobs of a model run one after another.
    JobSubmitted {
        /// Its id.
        job: JobId,
        /// What it is.
        spec: Box<JobSpec>,
        /// When, on the submitting node's clock.
        at: Timestamp,
    },
    /// An optimizer step.
    StepCommitted(Box<StepCommitted>),
    /// An evaluation is done.
    EvaluationCompleted(EvaluationCompleted),
    /// A job is over.
    JobEnded {
        /// Which.
        job: JobId,
        /// Why.
        end: JobEnd,
    },
}

impl ControlEntry {
    /// The entry as a new line takes it over that was opened at `fork`, from the log of the line before: steps beyond the
    /// fork are numbered as the new line's, since another part may have logged others under the old numbers.
    #[must_use]
    pub fn taken_over(self, fork: PolicyVersion, before: &Line, line: &Line) -> Self {
        let renumber = |v: PolicyVersion| {
            let beyond = v > fork && v.mark() == u64::from(before.mark());
            if beyond { line.version(v.steps()) } else { v }
        };
        match self {
            Self::StepCommitted(mut step) => {
                (step.parent, step.version) = (renumber(step.parent), renumber(step.version));
                Self::StepCommitted(step)
            }
            Self::EvaluationCompleted(e) => {
                Self::EvaluationCompleted(EvaluationCompleted { version: renumber(e.version), ..e })
            }
            other => other,
        }
    }
}

/// Answer of the state machine to an entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Applied {
    /// The state changed.
    Yes,
    /// The entry was in the log already in effect (a retry); nothing changed.
    Already,
    /// The entry does not fit the state; nothing changed.
    Refused(Refusal),
}

/// Why an entry does not fit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    /// The step was made under another term than the one that logged it: a deposed leader's.
    #[error("step of term {got} in a log entry of term {log}: its leader was deposed")]
    StaleTerm {
        /// Term of the log entry.
        log: Term,
        /// Term in the step.
        got: Term,
    },
    /// The step does not follow the current version.
    #[error("step to version {got}, expected {expected}")]
    NotNext {
        /// The version that must come next.
        expected: PolicyVersion,
        /// What came.
        got: PolicyVersion,
    },
    /// The step was trained from another version than the current one.
    #[error("step from version {got}, expected {expected}")]
    WrongParent {
        /// The current version.
        expected: PolicyVersion,
        /// What came.
        got: PolicyVersion,
    },
    /// A rollout was consumed before.
    #[error("rollout {rollout} was consumed by version {by}")]
    ConsumedTwice {
        /// Which.
        rollout: RolloutId,
        /// By which step.
        by: PolicyVersion,
    },
    /// The weights lie on fewer nodes than they must.
    #[error("weights of version {version} lie on {got} nodes, expected {expected}")]
    TooFewHolders {
        /// Which step.
        version: PolicyVersion,
        /// How many are needed.
        expected: usize,
        /// How many there are.
        got: usize,
    },
    /// The job is not the one that runs.
    #[error("job {0} does not run")]
    NoSuchJob(JobId),
    /// The model is not created yet.
    #[error("the model has no base weights yet")]
    NoModel,
}

/// A job's place in the model's life.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobState {
    /// Its id.
    pub job: JobId,
    /// What it is.
    pub spec: JobSpec,
    /// When it was submitted.
    pub at: Timestamp,
    /// Steps committed.
    pub steps: u64,
    /// Groups opened per task set, as of the last step.
    pub groups_opened: Vec<u64>,
    /// Finished evaluations.
    pub evaluations: Vec<EvaluationCompleted>,
    /// Why it is over, if it is.
    pub end: Option<JobEnd>,
}

impl JobState {
    /// The evaluation of `phase`, if done.
    #[must_use]
    pub fn evaluation(&self, phase: EvalPhase) -> Option<&EvaluationCompleted> {
        self.evaluations.iter().find(|e| e.phase == phase)
    }
}

/// The consumed rollouts of a model, each with the version that used it.
///
/// It only grows, and every replica hands out snapshots of it all the time, so a clone must not copy it: it is a
/// short list of sorted, shared runs. A step appends a run, and a run is merged into the one before it once that is
/// at most twice as long; so there are O(log n) runs and each rollout is copied O(log n) times in all.
#[derive(Clone, Default)]
pub struct Consumed {
    runs: Vec<Arc<[(RolloutId, PolicyVersion)]>>,
}

impl Consumed {
    /// The version that used `rollout`, if one did.
    #[must_use]
    pub fn get(&self, rollout: &RolloutId) -> Option<PolicyVersion> {
        self.runs.iter().find_map(|run| {
            let at = run.binary_search_by_key(rollout, |(id, _)| *id).ok()?;
            Some(run[at].1)
        })
    }
    /// Whether a step used `rollout`.
    #[must_use]
    pub fn contains_key(&self, rollout: &RolloutId) -> bool {
        self.get(rollout).is_some()
    }
    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.runs.iter().map(|run| run.len()).sum()
    }
    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }
    /// All of them, ascending by id. Copies everything.
    #[must_use]
    pub fn to_sorted(&self) -> Vec<(RolloutId, PolicyVersion)> {
        let mut all: Vec<_> = self.runs.iter().flat_map(|run| run.iter().copied()).collect();
        all.sort_unstable();
        all
    }
    /// Adds rollouts that are not in it yet.
    pub fn extend(&mut self, rollouts: impl IntoIterator<Item = (RolloutId, PolicyVersion)>) {
        let mut newest: Vec<_> = rollouts.into_iter().collect();
        if newest.is_empty() {
            return;
        }
        newest.sort_unstable();
        while let Some(run) = self.runs.pop_if(|run| run.len() <= 2 * newest.len()) {
            newest.extend_from_slice(&run);
            newest.sort_unstable(); // two sorted halves: the sort finds them and merges
        }
        self.runs.push(newest.into());
    }
}

impl std::fmt::Debug for Consumed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Consumed({} rollouts)", self.len())
    }
}

impl PartialEq for Consumed {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.to_sorted() == other.to_sorted()
    }
}

impl FromIterator<(RolloutId, PolicyVersion)> for Consumed {
    fn from_iter<I: IntoIterator<Item = (RolloutId, PolicyVersion)>>(rollouts: I) -> Self {
        let mut consumed = Self::default();
        consumed.extend(rollouts);
        consumed
    }
}

// The same form as a map from rollout to version.
impl Serialize for Consumed {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_map(self.to_sorted())
    }
}

impl<'de> Deserialize<'de> for Consumed {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        BTreeMap::<RolloutId, PolicyVersion>::deserialize(d).map(Self::from_iter)
    }
}

/// The weights that a job's policy is compared with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reference {
    /// The job.
    pub job: JobId,
    /// Those before its first step.
    pub weights: Manifest,
    /// Who held them durably before they were proposed; empty for version 0.
    pub holders: Vec<NodeId>,
}

/// What a model's log adds up to.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ModelState {
    /// The group's line, and those that it came out of.
    pub lineage: Lineage,
    /// Members of the lines before it, when they were left: who may lead a node from this line into another.
    pub kin: BTreeSet<NodeId>,
    /// Name, once created.
    pub model: Option<ModelName>,
    /// Files beside the weights.
    pub files: ModelFiles,
    /// Weights of the current version.
    pub weights: Option<Manifest>,
    /// How they follow from those of the version before, if that was published.
    pub weights_delta: Option<DeltaManifest>,
    /// The current version.
    pub version: PolicyVersion,
    /// Term that committed it.
    pub version_term: Term,
    /// Newest optimizer state and the version it belongs to.
    pub optimizer_state: Option<(PolicyVersion, Manifest)>,
    /// Who held [`ModelState::weights`] durably before their step was proposed; empty for version 0.
    pub weights_holders: Vec<NodeId>,
    /// Who held [`ModelState::optimizer_state`] durably before its step was proposed.
    pub optimizer_holders: Vec<NodeId>,
    /// The weights that the running job started from, if it needs them (a KL to them, adapters on them) and they are no
    /// longer the current ones.
    pub reference: Option<Reference>,
    /// Jobs in the order of submission.
    pub jobs: Vec<JobState>,
    /// Every consumed rollout with the version that used it.
    pub consumed: Consumed,
    /// Terms under which a step was committed.
    pub terms: BTreeSet<Term>,
}

impl ModelState {
    /// The job that runs now: the first that is not over.
    #[must_use]
    pub fn running_job(&self) -> Option<&JobState> {
        self.jobs.iter().find(|j| j.end.is_none())
    }

    /// The manifests that must not get lost: weights, optimizer state, reference, files, and the task sets of jobs that are
    /// not over. The delta is not among them: it is only a shorter way.
    pub fn needed_manifests(&self) -> impl Iterator<Item = &Manifest> {
        let tasks = self.task_sets();
        let optimizer = self.optimizer_state.iter().map(|(_, m)| m);
        let reference = self.reference.iter().map(|r| &r.weights);
        self.weights.iter().chain(optimizer).chain(reference).chain(self.files.values()).chain(tasks)
    }

    /// Task sets of the jobs that are not over.
    pub fn task_sets(&self) -> impl Iterator<Item = &Manifest> {
        let tasks = self.jobs.iter().filter(|j| j.end.is_none()).flat_map(|j| &j.spec.tasks);
        tasks.flat_map(|t| std::iter::once(&t.train).chain(&t.heldout))
    }

    /// Goes back to the step `to`, as a new line does when the weights of the steps after it, `given_up`, are lost.
    /// `optimizer` is the newest step up to `to` that kept the optimizer's state.
    pub fn go_back(&mut self, to: &StepCommitted, given_up: &[StepCommitted], optimizer: Option<&StepCommitted>) {
        self.version = to.version;
        self.version_term = to.term;
        self.weights = Some(to.weights.clone());
        self.weights_delta.clone_from(&to.weights_delta);
        self.weights_holders.clone_from(&to.holders);
        self.optimizer_state = optimizer.and_then(|o| Some((o.version, o.optimizer_state.clone()?)));
        self.optimizer_holders = optimizer.map(|o| o.holders.clone()).unwrap_or_default();
        let gone: BTreeSet<PolicyVersion> = given_up.iter().map(|s| s.version).collect();
        let left = self.consumed.to_sorted().into_iter().filter(|(_, by)| !gone.contains(by));
        self.consumed = left.collect();
        for job in &mut self.jobs {
            let steps = given_up.iter().filter(|s| s.job == job.job).count() as u64;
            if steps == 0 {
                continue;
            }
            job.steps = job.steps.saturating_sub(steps);
            if job.job == to.job {
                job.groups_opened.clone_from(&to.groups_opened);
            } else {
                job.groups_opened.fill(0);
            }
            job.evaluations.retain(|e| !gone.contains(&e.version));
            // What was over because all its steps were done is not any more.
            if job.end == Some(JobEnd::Finished) {
                job.end = None;
            }
        }
    }

    fn job_mut(&mut self, job: JobId) -> Result<&mut JobState, Refusal> {
        self.jobs.iter_mut().find(|j| j.job == job).ok_or(Refusal::NoSuchJob(job))
    }

    /// Applies one entry that was logged in term `log_term`.
    pub fn apply(&mut self, log_term: Term, entry: &ControlEntry) -> Applied {
        match self.try_apply(log_term, entry) {
            Ok(applied) => applied,
            Err(refusal) => Applied::Refused(refusal),
        }
    }

    fn try_apply(&mut self, log_term: Term, entry: &ControlEntry) -> Result<Applied, Refusal> {
        match entry {
            ControlEntry::ModelCreated { model, weights, files } => {
                if self.model.is_some() {
                    return Ok(Applied::Already);
                }
                self.model = Some(model.clone());
                self.weights = Some(weights.clone());
                self.files = files.clone();
            }
            ControlEntry::JobSubmitted { job, spec, at } => {
                if self.model.is_none() {
                    return Err(Refusal::NoModel);
                }
                if self.jobs.iter().any(|j| j.job == *job) {
                    return Ok(Applied::Already);
                }
                self.jobs.push(JobState {
                    job: *job,
                    groups_opened: vec![0; spec.tasks.len()],
                    spec: (**spec).clone(),
                    at: *at,
                    steps: 0,
                    evaluations: Vec::new(),
                    end: None,
                });
            }
            ControlEntry::StepCommitted(step) => return self.apply_step(log_term, step),
            ControlEntry::EvaluationCompleted(e) => {
                let job = self.job_mut(e.job)?;
                if job.evaluation(e.phase).is_some() {
                    return Ok(Applied::Already);
                }
                job.evaluations.push(e.clone());
            }
            ControlEntry::JobEnded { job, end } => {
                let job = self.job_mut(*job)?;
                if job.end.is_some() {
                    return Ok(Applied::Already);
                }
                job.end = Some(end.clone());
                let over = job.job;
                self.reference.take_if(|r| r.job == over);
            }
        }
        Ok(Applied::Yes)
    }

    fn apply_step(&mut self, log_term: Term, step: &StepCommitted) -> Result<Applied, Refusal> {
        if self.weights.is_none() {
            return Err(Refusal::NoModel);
        }
        if step.term != log_term && !planted::has(Bug::SkipFencing) {
            return Err(Refusal::StaleTerm { log: log_term, got: step.term });
        }
        let next = self.lineage.next(self.version);
        if step.version != next {
            return Err(Refusal::NotNext { expected: next, got: step.version });
        }
        if step.parent != self.version {
            return Err(Refusal::WrongParent { expected: self.version, got: step.parent });
        }
        let mut fresh = BTreeSet::new();
        for id in &step.consumed {
            if let Some(by) = self.consumed.get(id) {
                return Err(Refusal::ConsumedTwice { rollout: *id, by });
            }
            if !fresh.insert(*id) {
                return Err(Refusal::ConsumedTwice { rollout: *id, by: step.version });
            }
        }
        if step.holders.is_empty() {
            return Err(Refusal::TooFewHolders { version: step.version, expected: 1, got: 0 });
        }
        let running = self.running_job().map(|j| j.job);
        if running != Some(step.job) {
            return Err(Refusal::NoSuchJob(step.job));
        }
        let former = self.weights.clone();
        let former_holders = self.weights_holders.clone();
        let job = self.job_mut(step.job)?;
        let starts = job.steps == 0 && job.spec.trainer.needs_first_weights();
        job.steps += 1;
        job.groups_opened.clone_from(&step.groups_opened);
        if let Some(weights) = former.filter(|_| starts) {
            self.reference = Some(Reference { job: step.job, weights, holders: former_holders });
        }
        self.version = step.version;
        self.version_term = step.term;
        self.weights = Some(step.weights.clone());
        self.weights_holders.clone_from(&step.holders);
        self.weights_delta.clone_from(&step.weights_delta);
        if let Some(m) = &step.optimizer_state {
            self.optimizer_state = Some((step.version, m.clone()));
            self.optimizer_holders.clone_from(&step.holders);
        }
        self.consumed.extend(step.consumed.iter().map(|id| (*id, step.version)));
        self.terms.insert(step.term);
        Ok(Applied::Yes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Hash;

    fn id(n: u64) -> RolloutId {
        Hash::of(&n.to_be_bytes())
    }

    #[test]
    fn consumed_keeps_every_rollout_in_few_shared_runs() {
        let mut consumed = Consumed::default();
        for step in 0..100_u64 {
            let before = consumed.clone();
            consumed.extend((0..10).map(|i| (id(step * 10 + i), PolicyVersion(step + 1))));
            assert!(!before.contains_key(&id(step * 10)), "a clone is a snapshot");
            assert!(consumed.runs.len() <= 10, "{} runs after step {step}", consumed.runs.len());
        }
        assert_eq!(consumed.len(), 1000);
        assert!((0..1000).all(|n| consumed.get(&id(n)) == Some(PolicyVersion(n / 10 + 1))));
        assert_eq!(consumed.get(&id(1000)), None);
    }

    fn step(parent: PolicyVersion, version: PolicyVersion, consumed: u64) -> ControlEntry {
        ControlEntry::StepCommitted(Box::new(StepCommitted {
            job: JobId([1; 16]),
            term: Term(3),
            parent,
            version,
            weights: Manifest::of(b"weights"),
            weights_delta: None,
            optimizer_state: None,
            holders: vec![NodeId([1; 32])],
            consumed: vec![id(consumed)],
            groups_opened: vec![],
            at: Timestamp(0),
            metrics: StepMetrics::default(),
        }))
    }

    #[test]
    fn a_step_follows_the_current_version_in_its_line() {
        let weights = Some(Manifest::of(b"0"));
        let mut state = ModelState { version: PolicyVersion(4), weights, ..ModelState::default() };
        let (at, fork) = (PolicyVersion, PolicyVersion(4));
        let refused = |state: &mut ModelState, e: &ControlEntry| match state.apply(Term(3), e) {
            Applied::Refused(why) => why,
            other => panic!("{other:?}"),
        };
        let why = refused(&mut state, &step(at(3), at(5), 1));
        assert_eq!(why, Refusal::WrongParent { expected: at(4), got: at(3) });
        // The same state in a new line wants that line's numbers.
        let before = state.lineage.line;
        state.lineage = state.lineage.opened(fork, 0, 1, NodeId([9; 32])).unwrap();
        let (line, next) = (state.lineage.line, state.lineage.next(fork));
        assert_eq!(refused(&mut state, &step(at(4), at(5), 1)), Refusal::NotNext { expected: next, got: at(5) });
        let taken = step(at(4), at(5), 1).taken_over(fork, &before, &line);
        assert_eq!(taken, step(at(4), line.version(5), 1));
        assert_eq!(step(at(5), at(6), 1).taken_over(fork, &before, &line), step(line.version(5), line.version(6), 1));
        assert_eq!(step(at(3), at(4), 1).taken_over(fork, &before, &line), step(at(3), at(4), 1), "before the fork");
        assert!(matches!(refused(&mut state, &taken), Refusal::NoSuchJob(_)), "all else is as ever");
    }

    #[test]
    fn consumed_travels_as_a_map() {
        let pairs: BTreeMap<_, _> = (0..50).map(|n| (id(n), PolicyVersion(n))).collect();
        let mut consumed = Consumed::default();
        pairs.iter().for_each(|(id, v)| consumed.extend([(*id, *v)]));
        let bytes = crate::codec::encode(&consumed);
        assert_eq!(bytes, crate::codec::encode(&pairs));
        assert_eq!(crate::codec::decode::<Consumed>("consumed", &bytes, 1 << 20), Ok(consumed));
    }
}
