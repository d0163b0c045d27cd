//! `job.toml`: what a person writes, read into what a node submits.
//!
//! Two stages: [`JobFile`] is what was typed, with unknown keys refused; [`JobFile::into_submission`] reads the
//! task files it names.

use anyhow::{Context, bail};
use serde::de::value::MapAccessDeserializer;
use serde::de::{IntoDeserializer, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use starling_protocol::ModelName;
use starling_protocol::advantage::AdvantageRule;
use starling_protocol::algorithm::{
    Aggregation, AlgorithmSpec, Bounds, Correction, Objective, OldPolicy, Preset, ReferenceKl,
};
use starling_protocol::job::{CollectionRule, EvaluateSpec, JobSpec, Sampling, Schedule, TaskSetSpec, TrainerSpec};
use starling_protocol::lora::{LoraSpec, LoraTarget};
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
    /// `groups` or `informative_groups`; left out, as the algorithm has it.
    #[serde(default)]
    pub collection: Option<CollectionRule>,
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
    /// Optimizer.
    #[serde(default)]
    pub trainer: TrainerTable,
    /// Advantages and loss.
    #[serde(default)]
    pub algorithm: AlgorithmChoice,
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
    /// A Hugging Face folder or a GGUF file on the submitting machine. Left out: the model exists in the mesh already, or is
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
    minibatches: u32,
    schedule: Schedule,
    mismatch_kl_alarm: f64,
    gradient_checkpointing: bool,
    lora: Option<LoraTable>,
}

/// `[trainer.lora]`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct LoraTable {
    rank: u32,
    alpha: Option<f64>,
    targets: Option<Vec<LoraTarget>>,
}

impl LoraTable {
    /// What is left out: a scale of 1, and every linear layer.
    fn spec(&self) -> LoraSpec {
        LoraSpec {
            rank: self.rank,
            alpha: self.alpha.unwrap_or(f64::from(self.rank)),
            targets: self.targets.clone().unwrap_or_else(|| LoraTarget::ALL.to_vec()),
        }
    }
}

impl Default for TrainerTable {
    fn default() -> Self {
        let t = TrainerSpec::default();
        Self {
            learning_rate: t.learning_rate,
            weight_decay: t.weight_decay,
            betas: [t.betas.0, t.betas.1],
            max_grad_norm: t.max_grad_norm,
            minibatches: t.minibatches,
            schedule: t.schedule,
            mismatch_kl_alarm: t.mismatch_kl_alarm,
            gradient_checkpointing: t.gradient_checkpointing,
            lora: None,
        }
    }
}

/// `algorithm = "dapo"`, or `[algorithm]` with what differs from a preset.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AlgorithmChoice(AlgorithmTable);

/// `[algorithm]`. What is left out is as in the preset.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct AlgorithmTable {
    preset: Preset,
    advantage: Option<AdvantageRule>,
    objective: Option<Objective>,
    old_policy: Option<OldPolicy>,
    correction: Option<Correction>,
    outlier_guard: Option<Bounds>,
    aggregation: Option<Aggregation>,
    kl: Option<ReferenceKl>,
    mismatch_penalty: Option<f32>,
    entropy_bonus: Option<f32>,
}

impl<'de> Deserialize<'de> for AlgorithmChoice {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        // By hand, as an untagged enum would forget where in the file the mistake is.
        struct NameOrTable;
        impl<'de> Visitor<'de> for NameOrTable {
            type Value = AlgorithmChoice;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an algorithm's name, or a table of its parts")
            }
            fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<Self::Value, E> {
                let preset = Preset::deserialize(name.into_deserializer())?;
                Ok(AlgorithmChoice(AlgorithmTable { preset, ..AlgorithmTable::default() }))
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                AlgorithmTable::deserialize(MapAccessDeserializer::new(map)).map(AlgorithmChoice)
            }
        }
        d.deserialize_any(NameOrTable)
    }
}

impl AlgorithmChoice {
    /// The preset with what the file says otherwise.
    fn spec(&self, max_tokens: u32) -> AlgorithmSpec {
        let t = &self.0;
        let base = t.preset.spec(max_tokens);
        AlgorithmSpec {
            preset: t.preset,
            advantage: t.advantage.unwrap_or(base.advantage),
            objective: t.objective.unwrap_or(base.objective),
            old_policy: t.old_policy.unwrap_or(base.old_policy),
            correction: t.correction.unwrap_or(base.correction),
            outlier_guard: t.outlier_guard.or(base.outlier_guard),
            aggregation: t.aggregation.unwrap_or(base.aggregation),
            kl: t.kl.unwrap_or(base.kl),
            mismatch_penalty: t.mismatch_penalty.unwrap_or(base.mismatch_penalty),
            entropy_bonus: t.entropy_bonus.unwrap_or(base.entropy_bonus),
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
            collection: self.collection.unwrap_or(self.algorithm.0.preset.collection()),
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
                minibatches: t.minibatches,
                schedule: t.schedule,
                mismatch_kl_alarm: t.mismatch_kl_alarm,
                algorithm: self.algorithm.spec(self.sampling.max_tokens),
                lora: t.lora.as_ref().map(LoraTable::spec),
                gradient_checkpointing: t.gradient_checkpointing,
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
            if !path.is_file() && !path.join("config.json").is_file() {
                bail!("model.path {}: expected a Hugging Face folder with config.json, or a GGUF file", path.display());
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

    fn job(algorithm: &str) -> anyhow::Result<JobSpec> {
        let dir = tempfile::tempdir()?;
        std::fs::write(dir.path().join("t.jsonl"), "{\"id\":\"a\"}\n")?;
        let head = "name='a'\nsteps=1\nmodel={name='m'}\nsampling={max_tokens=24}\n";
        let text = format!("{head}{algorithm}\n[[tasks]]\nname='t'\ntrain='t.jsonl'\n");
        Ok(JobFile::parse(&text)?.into_submission(dir.path())?.spec)
    }

    #[test]
    fn an_algorithm_is_a_name_or_a_table_over_a_preset() {
        assert_eq!(job("").unwrap().trainer.algorithm, Preset::Grpo.spec(24));
        let dapo = job("algorithm = 'dapo'").unwrap();
        assert_eq!(dapo.trainer.algorithm, Preset::Dapo.spec(24));
        assert_eq!(dapo.collection, CollectionRule::InformativeGroups);
        assert_eq!(job("collection='groups'\nalgorithm='dapo'").unwrap().collection, CollectionRule::Groups);
        let dr = job("algorithm = 'dr_grpo'").unwrap().trainer.algorithm;
        assert_eq!(dr.aggregation, Aggregation::SequenceSum { divisor: 24.0 });
        let table = "[algorithm]\npreset = 'reinforce++'\nobjective = { clip = { high = 0.3 } }\n\
                     old_policy = 'recomputed'\ncorrection = { tis = {} }\naggregation = 'sequence_mean'\n\
                     outlier_guard = { low = 1e-4, high = 100 }\nkl = { estimator = 'k3', coefficient = 0.01 }\n\
                     entropy_bonus = 0.001";
        let got = job(table).unwrap().trainer.algorithm;
        assert_eq!(got.advantage, AdvantageRule::Batch);
        assert_eq!(got.objective, Objective::Clip { low: 0.2, high: 0.3, ratio_max: None });
        assert!(matches!(got.correction, Correction::Tis { cap: 2.0, .. }));
        assert_eq!(got.outlier_guard, Some(Bounds { low: 1e-4, high: 100.0 }));
        assert!(got.needs_reference());
        got.validate().unwrap();
    }

    #[test]
    fn adapters_are_on_every_linear_layer_unless_said_otherwise() {
        let lora = job("[trainer.lora]\nrank = 8").unwrap().trainer.lora.unwrap();
        assert_eq!(lora, LoraSpec { rank: 8, alpha: 8.0, targets: LoraTarget::ALL.to_vec() });
        let some = job("[trainer.lora]\nrank = 8\nalpha = 16.0\ntargets = ['q_proj', 'v_proj']").unwrap();
        let lora = some.trainer.lora.clone().unwrap();
        assert_eq!((lora.scale(), lora.targets), (2.0, vec![LoraTarget::QProj, LoraTarget::VProj]));
        assert!(some.trainer.needs_first_weights() && !job("").unwrap().trainer.needs_first_weights());
    }

    #[test]
    fn a_wrong_algorithm_names_line_key_and_what_is_expected() {
        for (text, wanted) in [
            ("algorithm = 'grppo'", &["line 5", "grppo", "dr_grpo"][..]),
            ("algorithm = 3", &["line 5", "an algorithm's name, or a table"]),
            ("[algorithm]\nclip = 0.2", &["line 6", "clip", "objective"]),
            ("[algorithm]\nobjective = { clip = { hihg = 0.3 } }", &["line 6", "hihg", "ratio_max"]),
            ("[algorithm]\ncorrection = { tis = { cap = 'two' } }", &["line 6", "two", "f32"]),
            ("[algorithm]\naggregation = { sequence_sum = {} }", &["line 6", "divisor"]),
            ("[trainer]\nclip_low = 0.2", &["line 6", "clip_low", "minibatches"]),
            ("[trainer]\nschedule = { shape = 'cosin' }", &["line 6", "cosin", "cosine"]),
            ("[trainer.lora]\nrank = 8\ntargets = ['q_porj']", &["line 7", "q_porj", "down_proj"]),
            ("[trainer.lora]\nalpha = 8", &["line 5", "rank"]),
            ("[trainer.lora]\nrank = 0", &["trainer.lora.rank", "1 to 512", "got 0"]),
            ("[trainer.lora]\nrank = 8\nalpha = -1.0", &["trainer.lora.alpha", "above 0", "got -1"]),
            ("[trainer.lora]\nrank = 8\ntargets = []", &["trainer.lora.targets", "at least one"]),
            ("[trainer.lora]\nrank = 8\ntargets = ['q_proj', 'q_proj']", &["trainer.lora.targets", "once", "q_proj"]),
            ("optimizer_state_every = 2\n[trainer.lora]\nrank = 8", &["optimizer_state_every", "1 with", "got 2"]),
        ] {
            let err = job(text).unwrap_err().to_string();
            assert!(wanted.iter().all(|w| err.contains(w)), "{text}\n{err}");
        }
        let err = job("[algorithm]\ncorrection = { tis = {} }").unwrap_err().to_string();
        assert!(err.contains("algorithm.correction") && err.contains("old_policy"), "{err}");
    }
}
