//! `starling init`, `ticket`, `node list`, `node drain`.

use super::client::AdminClient;
use crate::data_dir::DataDir;
use crate::print;
use serde_json::{Value, json};
use starling_bootstrap::identity::Identity;
use std::time::Duration;

/// How often a drain is asked how far it is.
const DRAIN_BEAT: Duration = Duration::from_millis(500);

/// `init`.
///
/// # Errors
/// When the folder or the key cannot be made or read.
pub fn init(data: &DataDir, json: bool) -> anyhow::Result<()> {
    let identity = Identity::load_or_create(data.path())?;
    data.admin_token()?;
    let v = json!({ "node": identity.node_id(), "peer_id": identity.peer_id().to_string(), "data": data.path() });
    print(json, &v, || format!("node {}\nin   {}", identity.node_id(), data.path().display()))
}

/// `ticket`.
///
/// # Errors
/// When no node runs.
pub async fn ticket(client: &AdminClient, json: bool) -> anyhow::Result<()> {
    let v: Value = client.get("/ticket").await?;
    print(json, &v, || v["ticket"].as_str().unwrap_or_default().to_owned())
}

/// `node list`.
///
/// # Errors
/// When no node runs.
pub async fn list(client: &AdminClient, json: bool) -> anyhow::Result<()> {
    let v: Value = client.get("/nodes").await?;
    print(json, &v, || {
        let line = |n: &Value| {
            let r = &n["record"];
            let join = |k: &str| {
                let parts = r[k].as_array().into_iter().flatten().filter_map(Value::as_str);
                parts.collect::<Vec<_>>().join(",")
            };
            let id = r["node"].as_str().unwrap_or_default();
            let state = if n["self"] == true {
                "this"
            } else if n["live"] == true {
                "live"
            } else {
                "gone"
            };
            format!("{}  {state}  {:<14} {}", &id[..id.len().min(16)], join("roles"), join("addresses"))
        };
        v["nodes"].as_array().into_iter().flatten().map(line).collect::<Vec<_>>().join("\n")
    })
}

/// `node drain`: returns when nothing depends on the node any more. What it waits for goes to standard error.
///
/// # Errors
/// When no node runs, or nobody is left to hand things to.
pub async fn drain(client: &AdminClient, json: bool) -> anyhow::Result<()> {
    let mut v: Value = client.post("/drain", &json!({})).await?;
    let mut told = String::new();
    while v["done"] != true {
        let waits: Vec<&str> = v["waits"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let now = waits.join("; ");
        if now != told {
            eprintln!("draining: {now}");
            told = now;
        }
        tokio::time::sleep(DRAIN_BEAT).await;
        v = client.get("/drain").await?;
    }
    print(json, &v, || {
        let mut out = format!(
            "drained: {} copies of rollouts and {} of weights and files handed off; the node may be stopped",
            v["rollouts_handed_off"], v["manifests_handed_off"]
        );
        for m in v["votes_in"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            out.push_str(&format!("\nit still votes in the group of {m}, which needs a quorum without it"));
        }
        out
    })
}
