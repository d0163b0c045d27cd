//! What an operator does at the start: models are created, jobs submitted.

use super::compute::config_of;
use super::recorder::Recorder;
use crate::scenario::Job;
use starling_core::NodeCore;
use starling_protocol::control::ControlEntry;
use starling_protocol::job::{CollectionRule, EvaluateSpec, JobSpec, Sampling, TaskSetSpec, TrainerSpec};
use starling_protocol::{Hash, ModelName};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;

/// Tasks of a job.
const TASKS: u32 = 64;
/// Pause before the operator tries again.
const RETRY: Duration = Duration::from_millis(500);

/// Names of a scenario's models.
pub(crate) fn model_names(job: &Job) -> Vec<ModelName> {
    (1..=job.models).filter_map(|i| ModelName::new(format!("model-{i}")).ok()).collect()
}

/// Creates `model` and submits its job through `core`, again and again until both are in: the operator's machine does
/// not give up. Returns the job's specification.
pub(crate) async fn submit(core: Arc<NodeCore>, model: ModelName, job: Arc<Job>, seed: u64, recorder: Recorder) {
    let mut weights = vec![0; job.weights_kib as usize * 1024];
    let mut h = blake3::Hasher::new();
    h.update(model.as_str().as_bytes());
    h.finalize_xof().fill(&mut weights);
    recorder.first_weights(model.clone(), Hash::of(&weights));
    let files = BTreeMap::from([("config.json".to_owned(), config_of(&model))]);
    while core.models().get(&model).is_none_or(|a| a.leader.is_none()) {
        if let Err(why) = core.create_model(&model, weights.clone(), files.clone()).await {
            tracing::debug!(%model, why, "the model is not created yet");
        }
        sleep(RETRY).await;
    }
    let lines: String = (0..TASKS).map(|i| format!("{{\"id\":\"task-{i}\",\"question\":{i}}}\n")).collect();
    let train = loop {
        let Ok(manifest) = core.blobs().put(lines.clone().into_bytes()).await else {
            sleep(RETRY).await;
            continue;
        };
        match core.place_on_second(manifest.hash, vec![manifest.clone()]).await {
            Ok(_) => break manifest,
            Err(why) => tracing::debug!(why, "tasks are not placed yet"),
        }
        sleep(RETRY).await;
    };
    let spec = JobSpec {
        name: format!("job of {model}"),
        model: model.clone(),
        seed,
        steps: job.steps,
        groups_per_step: job.groups_per_step,
        group_size: job.group_size,
        collection: CollectionRule::Groups,
        staleness_max: job.staleness_max,
        replication: job.replication,
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "1 s to a day")]
        lease_ttl_ms: (job.lease_ttl_s * 1000.0) as u64,
        optimizer_state_every: job.optimizer_state_every,
        sampling: Sampling { max_tokens: job.tokens.1, ..Sampling::default() },
        trainer: TrainerSpec::default(),
        tasks: vec![TaskSetSpec { name: "tasks".into(), weight: 1.0, train, heldout: None }],
        evaluate: EvaluateSpec::default(),
    };
    let at = (core.clock())();
    let entry = ControlEntry::JobSubmitted { job: spec.id(at.0), spec: Box::new(spec), at };
    while let Err(why) = core.models().propose(&model, entry.clone()).await {
        tracing::debug!(%model, %why, "the job is not accepted yet");
        sleep(RETRY).await;
    }
}
