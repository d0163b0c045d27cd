//! `starling job`.

use super::client::AdminClient;
use crate::job_file::JobFile;
use crate::{BadInput, print};
use anyhow::Context;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use starling_protocol::{JobId, ModelName};
use std::path::Path;

/// What a submission became.
#[derive(Debug, Serialize, Deserialize)]
pub struct SubmitReport {
    /// The job's id.
    pub job: JobId,
    /// Its model.
    pub model: ModelName,
    /// Whether the model was created with it.
    pub created: bool,
}

/// `job submit`.
///
/// # Errors
/// [`BadInput`] for the file, or the node's refusal.
pub async fn submit(client: &AdminClient, file: &Path, json: bool) -> anyhow::Result<()> {
    let read = || {
        let text = std::fs::read_to_string(file)?;
        let base = file.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        JobFile::parse(&text)?.into_submission(base)
    };
    let submission = read().with_context(|| file.display().to_string()).map_err(BadInput::wrap)?;
    let report: SubmitReport = client.post("/jobs", &submission).await?;
    print(json, &report, || {
        let how = if report.created { "created" } else { "already in the mesh" };
        format!("job {} trains {} ({how})", report.job, report.model)
    })
}

/// `job list`.
///
/// # Errors
/// When the node cannot be asked.
pub async fn list(client: &AdminClient, json: bool) -> anyhow::Result<()> {
    let v: Value = client.get("/jobs").await?;
    print(json, &v, || {
        let jobs = v["jobs"].as_array().cloned().unwrap_or_default();
        let line = |j: &Value| {
            let end = j["end"].as_str().unwrap_or("running");
            let text = |k: &str| j[k].as_str().unwrap_or("-").to_owned();
            format!(
                "{}  {:<20} {:<20} {:>5}/{:<5} {end}",
                text("job"),
                text("name"),
                text("model"),
                j["steps"],
                j["of"]
            )
        };
        if jobs.is_empty() { "no jobs".into() } else { jobs.iter().map(line).collect::<Vec<_>>().join("\n") }
    })
}

/// `job stop`.
///
/// # Errors
/// [`BadInput`] for the id, or the node's refusal.
pub async fn stop(client: &AdminClient, job: &str, json: bool) -> anyhow::Result<()> {
    let job: JobId = job.parse().map_err(BadInput::wrap)?;
    let v: Value = client.post(&format!("/jobs/{job}/stop"), &serde_json::json!({})).await?;
    print(json, &v, || format!("job {job} is stopped"))
}
