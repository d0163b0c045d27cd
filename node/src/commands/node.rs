//! `starling init`, `ticket`, `node list`.

use super::client::AdminClient;
use crate::data_dir::DataDir;
use crate::print;
use serde_json::{Value, json};
use starling_bootstrap::identity::Identity;

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
