//! `job.toml`: what a person writes, read into what a node submits.
//!
//! Two stages: [`JobFile`] is what was typed, with unknown keys refused; [`JobFile::into_submission`] reads the
//! task files it names.

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use starling_protocol::ModelName;
use starling_protocol::job::{CollectionRule, EvaluateSpec, JobSpec, Sampling, TaskSetSpec, TrainerSpec};
use starling_protocol::manifest::Manifest;
use starling_protocol::task::read_task_set;
use std::path::{Path, PathBuf};

/// What stands in `job.toml`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobFile {
    /// For people.
    pub name: String,
    /// The model.
    pub model: ModelSource,
    /// Seed of task order and sampling.
    #[serde(default)]
    pub seed: u64,
    /// Optimizer steps.
    pub steps: u64,
    /// Groups in a step.
    #[serde(default = "default_groups")]
    pub groups_per_step: u32,
    /// Episodes in a group.
    #[serde(default = "default_group_size")]
    pub group_size: u32,
    /// `groups` or `informative_groups`.
    #[serde(default)]
    pub collection: CollectionRule,
    /// Versions that a rollout may lag.
    #[serde(default = "default_staleness")]
    pub staleness_max: u32,
    /// Holders of a rollout.
    #[serde(default = "default_replication")]
    pub replication: u8,
    /// Seconds without a sign of life after which an episode goes to another.
    #[serde(default = "default_lease")]
    pub lease_ttl_s: u64,
    /// Optimizer state is kept with every n-th step.
    #[serde(default = "default_state_every")]
    pub optimizer_state_every: u64,
    /// Defaults of requests.
    #[serde(default)]
    pub sampling: SamplingTable,
    /// Optimizer and loss.
    #[serde(default)]
    pub trainer: TrainerTable,
    /// At least one.
    pub tasks: Vec<TaskTable>,
    /// Held-out evaluation.
    #[serde(default)]
    pub evaluate: EvaluateTable,
}

/// Where the model comes from.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSource {
    /// Its name in the mesh.
    pub name: ModelName,
    /// A Hugging Face folder on the submitting machine. Left out: the model exists in the mesh already, or is
    /// made from the one that the binary carries.
    pub path: Option<PathBuf>,
}

/// `[sampling]`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SamplingTable {
    temperature: f32,
    top_p: f32,
    top_k: u32,
    max_tokens: u32,
}

impl Default for SamplingTable {
    fn default() -> Self {
        let s = Sampling::default();
        Self { temperature: s.temperature, top_p: s.top_p, top_k: s.top_k, max_tokens: s.max_tokens }
    }
}

/// `[trainer]`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainerTable {
    learning_rate: f64,
    weight_decay: f64,
    betas: [f64; 2],
    max_grad_norm: f64,
    clip_low: f32,
    clip_high: f32,
    minibatches: u32,
    advantage: starling_protocol::advantage::AdvantageRule,
}

impl Default for TrainerTable {
    fn default() -> Self {
        let t = TrainerSpec::default();
        Self {
            learning_rate: t.learning_rate,
            weight_decay: t.weight_decay,
            betas: [t.betas.0, t.betas.1],
            max_grad_norm: t.max_grad_norm,
            clip_low: t.clip_low,
            clip_high: t.clip_high,
            minibatches: t.minibatches,
            advantage: t.advantage,
        }
    }
}

/// `[[tasks]]`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TaskTable {
    name: String,
    #[serde(default = "default_weight")]
    weight: f64,
    train: PathBuf,
    heldout: Option<PathBuf>,
}

/// `[evaluate]`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EvaluateTable {
    at_start: bool,
    at_end: bool,
    samples: u32,
    greedy: u32,
}

impl TaskTable {
    /// Reads its files without the leading `prefix` of their paths: for a job whose files were moved along.
    pub fn rebase(&mut self, prefix: &str) {
        for path in std::iter::once(&mut self.train).chain(&mut self.heldout) {
            if let Ok(rest) = path.strip_prefix(prefix) {
                *path = rest.to_owned();
            }
        }
    }
}

fn default_groups() -> u32 {
    16
}
fn default_group_size() -> u32 {
    8
}
fn default_staleness() -> u32 {
    1
}
fn default_replication() -> u8 {
    2
}
fn default_lease() -> u64 {
    60
}
fn default_state_every() -> u64 {
    1
}
fn default_weight() -> f64 {
    1.0
}

/// A job ready to be submitted: its spec and the task files that the spec's manifests describe.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Submission {
    /// The model.
    pub model: ModelSource,
    /// What goes into the log.
    pub spec: JobSpec,
    /// Contents of the task files, JSON lines.
    pub files: Vec<String>,
}

impl JobFile {
    /// Parses the text of a `job.toml`.
    ///
    /// # Errors
    /// toml's message, with line, column and the keys expected.
    pub fn parse(text: &str) -> anyhow::Result<Self> {
        Ok(toml::from_str(text)?)
    }

    /// Reads the task files, relative to `base`, checks everything and makes the submission.
    ///
    /// # Errors
    /// Names the file and line, or the field.
    pub fn into_submission(self, base: &Path) -> anyhow::Result<Submission> {
        let mut files = Vec::new();
        let mut read = |path: &Path| -> anyhow::Result<Manifest> {
            let path = base.join(path);
            let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            read_task_set(text.as_bytes(), starling_core::task_id).with_context(|| path.display().to_string())?;
            let manifest = Manifest::of(text.as_bytes());
            files.push(text);
            Ok(manifest)
        };
        let mut tasks = Vec::new();
        for t in &self.tasks {
            let train = read(&t.train)?;
            let heldout = t.heldout.as_deref().map(&mut read).transpose()?;
            tasks.push(TaskSetSpec { name: t.name.clone(), weight: t.weight, train, heldout });
        }
        let t = &self.trainer;
        let spec = JobSpec {
            name: self.name,
            model: self.model.name.clone(),
            seed: self.seed,
            steps: self.steps,
            groups_per_step: self.groups_per_step,
            group_size: self.group_size,
            collection: self.collection,
            staleness_max: self.staleness_max,
            replication: self.replication,
            lease_ttl_ms: self.lease_ttl_s.saturating_mul(1000),
            optimizer_state_every: self.optimizer_state_every,
            sampling: Sampling {
                temperature: self.sampling.temperature,
                top_p: self.sampling.top_p,
                top_k: self.sampling.top_k,
                max_tokens: self.sampling.max_tokens,
            },
            trainer: TrainerSpec {
                learning_rate: t.learning_rate,
                weight_decay: t.weight_decay,
                betas: (t.betas[0], t.betas[1]),
                max_grad_norm: t.max_grad_norm,
                clip_low: t.clip_low,
                clip_high: t.clip_high,
                minibatches: t.minibatches,
                advantage: t.advantage,
            },
            tasks,
            evaluate: EvaluateSpec {
                at_start: self.evaluate.at_start,
                at_end: self.evaluate.at_end,
                samples: self.evaluate.samples,
                greedy: self.evaluate.greedy,
            },
        };
        spec.validate()?;
        let mut model = self.model;
        if let Some(path) = &mut model.path {
            *path = base.join(&*path).canonicalize().with_context(|| format!("model.path {}", path.display()))?;
            if !path.join("config.json").is_file() {
                bail!("model.path {}: expected a Hugging Face folder with config.json", path.display());
            }
        }
        Ok(Submission { model, spec, files })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_key_is_refused_by_name() {
        let err = JobFile::parse("name='a'\nsteps=1\nlearning_rte=1\nmodel={name='m'}\ntasks=[]").unwrap_err();
        assert!(err.to_string().contains("learning_rte"), "{err}");
    }

    #[test]
    fn a_bad_value_names_its_field() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("t.jsonl"), "{\"id\":\"a\"}\n").unwrap();
        let text = "name='a'\nsteps=1\ngroup_size=1\nmodel={name='m'}\n[[tasks]]\nname='t'\ntrain='t.jsonl'\n";
        let err = JobFile::parse(text).unwrap().into_submission(dir.path()).unwrap_err();
        assert_eq!(err.to_string(), "job: field `group_size`: expected 2 to 256, got 1");
        let text = text.replace("t.jsonl", "none.jsonl");
        let err = JobFile::parse(&text).unwrap().into_submission(dir.path()).unwrap_err();
        assert!(err.to_string().contains("none.jsonl"), "{err}");
    }
}
