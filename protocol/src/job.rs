//! What a job is: the model, the tasks, and how they are trained on.

use crate::algorithm::AlgorithmSpec;
use crate::ids::{JobId, ModelName, NAME_LEN_BYTES_MAX};
use crate::lora::LoraSpec;
use crate::manifest::Manifest;
use serde::{Deserialize, Serialize};

/// Sampling settings of a request, or a job's defaults for requests that leave them out.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// 0 is greedy; 1 samples from the model's own distribution. Range 0 to 2.
    pub temperature: f32,
    /// Nucleus mass kept, in (0, 1]; 1 keeps all.
    pub top_p: f32,
    /// Number of most likely tokens kept; 0 keeps all.
    pub top_k: u32,
    /// Most tokens in one turn.
    pub max_tokens: u32,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 1.0, top_p: 1.0, top_k: 0, max_tokens: 256 }
    }
}

/// When a step's batch is complete.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CollectionRule {
    /// `groups_per_step` whole groups, whatever their rewards.
    #[default]
    Groups,
    /// `groups_per_step` whole groups whose rewards differ (dynamic sampling, DAPO, arXiv:2503.14476 §3.2); groups with
    /// equal rewards are replaced, consumed along with them and reported, but neither counted nor trained on.
    InformativeGroups,
}

/// How the learning rate goes over a job's steps, after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleShape {
    /// It stays.
    #[default]
    Constant,
    /// In a straight line down to `final_fraction`.
    Linear,
    /// In half a cosine down to `final_fraction`: Loshchilov and Hutter, arXiv:1608.03983.
    Cosine,
}

/// The learning rate over a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Schedule {
    /// After the warm-up.
    pub shape: ScheduleShape,
    /// The first so many steps go up in a straight line; 0 for none.
    pub warmup_steps: u64,
    /// Share of the learning rate that it goes down to; 0 to 1.
    pub final_fraction: f64,
}

impl Schedule {
    /// Share of the learning rate for step `step` (from 0) of `steps`; above 0, at most 1.
    ///
    /// With `w` warm-up steps: `(step + 1)/(w + 1)` below `w`; then the shape, from 1 at step `w` to `final_fraction`
    /// where the step after the last would be.
    ///
    /// ```
    /// use starling_protocol::job::{Schedule, ScheduleShape};
    /// let s = Schedule { shape: ScheduleShape::Cosine, warmup_steps: 1, final_fraction: 0.1 };
    /// let all: Vec<f64> = (0..4).map(|i| s.factor(i, 4)).collect();
    /// assert!(all.iter().zip([0.5, 1.0, 0.775, 0.325]).all(|(a, b)| (a - b).abs() < 1e-12));
    /// ```
    #[must_use]
    pub fn factor(&self, step: u64, steps: u64) -> f64 {
        if step < self.warmup_steps {
            return (step as f64 + 1.0) / (self.warmup_steps as f64 + 1.0);
        }
        let after = steps.saturating_sub(self.warmup_steps).max(1);
        let gone = ((step - self.warmup_steps) as f64 / after as f64).min(1.0);
        let left = match self.shape {
            ScheduleShape::Constant => return 1.0,
            ScheduleShape::Linear => 1.0 - gone,
            ScheduleShape::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * gone).cos()),
        };
        self.final_fraction + (1.0 - self.final_fraction) * left
    }
}

/// Optimizer and loss settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainerSpec {
    /// AdamW learning rate, at its height.
    pub learning_rate: f64,
    /// How it goes over the job.
    pub schedule: Schedule,
    /// AdamW weight decay.
    pub weight_decay: f64,
    /// AdamW first and second moment decay.
    pub betas: (f64, f64),
    /// Global gradient norm limit.
    pub max_grad_norm: f64,
    /// Optimizer updates per committed step. An episode is never split between two.
    pub minibatches: u32,
    /// A step whose mismatch KL is above it raises the alarm, nats a token: [`crate::alarm`].
    pub mismatch_kl_alarm: f64,
    /// From rewards to the gradient.
    pub algorithm: AlgorithmSpec,
    /// Adapters that are trained in place of the weights; `None`: the weights are trained.
    pub lora: Option<LoraSpec>,
    /// A layer's activations are computed again in the backward pass instead of being kept: Chen et al., arXiv:1604.06174.
    pub gradient_checkpointing: bool,
}

impl TrainerSpec {
    /// Whether training needs the weights from before the job's first step: to compare with, or under the adapters.
    #[must_use]
    pub fn needs_first_weights(&self) -> bool {
        self.lora.is_some() || self.algorithm.needs_reference()
    }
}

impl Default for TrainerSpec {
    fn default() -> Self {
        Self {
            learning_rate: 1e-6,
            schedule: Schedule::default(),
            weight_decay: 0.0,
            betas: (0.9, 0.95),
            max_grad_norm: 1.0,
            minibatches: 1,
            mismatch_kl_alarm: 0.05,
            algorithm: AlgorithmSpec::default(),
            lora: None,
            gradient_checkpointing: false,
        }
    }
}

/// One task set of a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskSetSpec {
    /// Its name in the job, in metrics and in task references.
    pub name: String,
    /// Share of the groups relative to the other sets; above 0.
    pub weight: f64,
    /// The training tasks, JSON lines.
    pub train: Manifest,
    /// Tasks never trained on, for evaluation.
    pub heldout: Option<Manifest>,
}

/// Evaluation on the held-out tasks, before the first and after the last step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvaluateSpec {
    /// Before the first step.
    pub at_start: bool,
    /// After the last step.
    pub at_end: bool,
    /// Episodes per set sampled with the job's own sampling.
    pub samples: u32,
    /// Episodes per set at temperature 0.
    pub greedy: u32,
}

/// A job as it stands in the model's log. Made from `job.toml` by the node that submits it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobSpec {
    /// For people.
    pub name: String,
    /// The model that is trained.
    pub model: ModelName,
    /// Seed of task order and episodes.
    pub seed: u64,
    /// The job ends after this many committed steps.
    pub steps: u64,
    /// Groups in a step.
    pub groups_per_step: u32,
    /// Episodes in a group; at least 2.
    pub group_size: u32,
    /// When a step's batch is complete.
    pub collection: CollectionRule,
    /// Most versions between the weights trained and the oldest that sampled (η), 0 to 4.
    pub staleness_max: u32,
    /// Nodes that hold a rollout before its episode's end is acknowledged.
    pub replication: u8,
    /// An episode without a sign of life is given to another after this time, in milliseconds.
    pub lease_ttl_ms: u64,
    /// The optimizer's state is kept with every n-th step, 0 for never.
    pub optimizer_state_every: u64,
    /// Defaults of requests.
    pub sampling: Sampling,
    /// Optimizer and loss.
    pub trainer: TrainerSpec,
    /// At least one.
    pub tasks: Vec<TaskSetSpec>,
    /// Held-out evaluation.
    pub evaluate: EvaluateSpec,
}

/// A job setting that cannot be.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("job: field `{field}`: expected {expected}, got {got}")]
pub struct JobError {
    /// Path of the field in `job.toml`.
    pub field: String,
    /// What it must be.
    pub expected: &'static str,
    /// What it is.
    pub got: String,
}

/// One check of a field.
pub(crate) fn need(ok: bool, field: &str, expected: &'static str, got: impl ToString) -> Result<(), JobError> {
    if ok { Ok(()) } else { Err(JobError { field: field.into(), expected, got: got.to_string() }) }
}

impl JobSpec {
    /// Episodes in a full step.
    #[must_use]
    pub fn episodes_per_step(&self) -> u64 {
        u64::from(self.groups_per_step) * u64::from(self.group_size)
    }

    /// The id of this job when submitted at `at_ms` (milliseconds since the epoch).
    #[must_use]
    pub fn id(&self, at_ms: u64) -> JobId {
        let hash = blake3::hash(&crate::codec::encode(&(self, at_ms)));
        let mut id = [0; 16];
        id.copy_from_slice(&hash.as_bytes()[..16]);
        JobId(id)
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`JobError`] for the first field that cannot be.
    pub fn validate(&self) -> Result<(), JobError> {
        let t = &self.trainer;
        need(
            !self.name.is_empty() && self.name.len() <= NAME_LEN_BYTES_MAX,
            "name",
            "1 to 128 bytes",
            self.name.len(),
        )?;
        need((1..=1_000_000).contains(&self.steps), "steps", "1 to 1000000", self.steps)?;
        need((1..=4096).contains(&self.groups_per_step), "groups_per_step", "1 to 4096", self.groups_per_step)?;
        need((2..=256).contains(&self.group_size), "group_size", "2 to 256", self.group_size)?;
        need(self.staleness_max <= 4, "staleness_max", "0 to 4", self.staleness_max)?;
        need((1..=16).contains(&self.replication), "replication", "1 to 16", self.replication)?;
        need(
            (1000..=86_400_000).contains(&self.lease_ttl_ms),
            "lease_ttl_s",
            "1 to 86400 seconds",
            self.lease_ttl_ms / 1000,
        )?;
        let s = &self.sampling;
        need((0.0..=2.0).contains(&s.temperature), "sampling.temperature", "0 to 2", s.temperature)?;
        need(s.top_p > 0.0 && s.top_p <= 1.0, "sampling.top_p", "above 0, at most 1", s.top_p)?;
        need((1..=1 << 20).contains(&s.max_tokens), "sampling.max_tokens", "1 to 1048576", s.max_tokens)?;
        need(
            t.learning_rate > 0.0 && t.learning_rate < 1.0,
            "trainer.learning_rate",
            "above 0, below 1",
            t.learning_rate,
        )?;
        need((0.0..1.0).contains(&t.weight_decay), "trainer.weight_decay", "0 to 1", t.weight_decay)?;
        need((0.0..1.0).contains(&t.betas.0), "trainer.betas[0]", "0 to 1", t.betas.0)?;
        need((0.0..1.0).contains(&t.betas.1), "trainer.betas[1]", "0 to 1", t.betas.1)?;
        need(
            t.max_grad_norm > 0.0 && t.max_grad_norm.is_finite(),
            "trainer.max_grad_norm",
            "a finite number above 0",
            t.max_grad_norm,
        )?;
        need((1..=64).contains(&t.minibatches), "trainer.minibatches", "1 to 64", t.minibatches)?;
        let c = &t.schedule;
        need(c.warmup_steps < self.steps, "trainer.schedule.warmup_steps", "fewer than `steps`", c.warmup_steps)?;
        need((0.0..=1.0).contains(&c.final_fraction), "trainer.schedule.final_fraction", "0 to 1", c.final_fraction)?;
        need(
            t.mismatch_kl_alarm > 0.0 && t.mismatch_kl_alarm.is_finite(),
            "trainer.mismatch_kl_alarm",
            "a finite number above 0",
            t.mismatch_kl_alarm,
        )?;
        t.algorithm.validate()?;
        if let Some(lora) = &t.lora {
            lora.validate()?;
            // The adapters are part of it, so a leader without it could not go on from the newest step.
            need(
                self.optimizer_state_every == 1,
                "optimizer_state_every",
                "1 with `trainer.lora`, whose adapters it holds",
                self.optimizer_state_every,
            )?;
        }
        need(!self.tasks.is_empty() && self.tasks.len() <= 64, "tasks", "1 to 64 task sets", self.tasks.len())?;
        for (i, set) in self.tasks.iter().enumerate() {
            let at = |f: &str| format!("tasks[{i}].{f}");
            need(
                !set.name.is_empty() && set.name.len() <= NAME_LEN_BYTES_MAX,
                &at("name"),
                "1 to 128 bytes",
                set.name.len(),
            )?;
            need(set.weight > 0.0 && set.weight.is_finite(), &at("weight"), "a finite number above 0", set.weight)?;
            need(
                !self.tasks[..i].iter().any(|o| o.name == set.name),
                &at("name"),
                "a name that no other set of the job has",
                &set.name,
            )?;
        }
        let evaluates = self.evaluate.at_start || self.evaluate.at_end;
        need(
            !evaluates || self.tasks.iter().all(|t| t.heldout.is_some()),
            "tasks[].heldout",
            "a held-out file in every set, since the job evaluates",
            "none",
        )?;
        need(
            !evaluates || (1..=65536).contains(&(self.evaluate.samples.saturating_add(self.evaluate.greedy))),
            "evaluate.samples",
            "1 to 65536 episodes with evaluate.greedy",
            self.evaluate.samples,
        )
    }
}
