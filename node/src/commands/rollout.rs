//! `starling rollout`.

use super::client::AdminClient;
use crate::{BadInput, print};
use serde_json::Value;
use starling_protocol::{JobId, PolicyVersion, RolloutId};

/// `rollout list`.
///
/// # Errors
/// [`BadInput`] for the id, or when no node runs.
pub async fn list(client: &AdminClient, job: &str, limit: u32, json: bool) -> anyhow::Result<()> {
    let job: JobId = job.parse().map_err(BadInput::wrap)?;
    let v: Value = client.get(&format!("/rollouts?job={job}&limit={limit}")).await?;
    print(json, &v, || {
        let line = |r: &Value| {
            let by = r["consumed_by"].as_u64().map_or("-".into(), |v| PolicyVersion(v).to_string());
            let id = r["id"].as_str().unwrap_or_default();
            format!("{id}  reward {}  turns {}  version {by}  {}", r["reward"], r["turns"], r["task"]["id"])
        };
        let lines: Vec<String> = v["rollouts"].as_array().into_iter().flatten().map(line).collect();
        if lines.is_empty() { "no rollouts of that job here".into() } else { lines.join("\n") }
    })
}

/// `rollout show`.
///
/// # Errors
/// [`BadInput`] for the id, or when this node does not hold it.
pub async fn show(client: &AdminClient, id: &str, json: bool) -> anyhow::Result<()> {
    let id: RolloutId = id.parse().map_err(BadInput::wrap)?;
    let v: Value = client.get(&format!("/rollouts/{id}")).await?;
    print(json, &v, || {
        let r = &v["rollout"];
        let mut out = format!(
            "rollout  {id}\ntask     {} of {}\nreward   {}\nagent    {}\nturns    {}\n",
            r["task"]["id"],
            r["task"]["set"],
            r["reward"],
            r["agent"],
            r["turns"].as_array().map_or(0, Vec::len)
        );
        for (i, t) in v["texts"].as_array().into_iter().flatten().enumerate() {
            out.push_str(&format!("\ntimeline {i}\n{}\n", t.as_str().unwrap_or_default()));
        }
        out
    })
}
