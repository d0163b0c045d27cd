//! `starling status`.

use super::client::AdminClient;
use crate::print;
use crate::units::show_bytes;
use serde_json::Value;
use starling_protocol::{PolicyVersion, Term};

/// `status`.
///
/// # Errors
/// When no node runs.
pub async fn status(client: &AdminClient, json: bool) -> anyhow::Result<()> {
    let v: Value = client.get("/status").await?;
    print(json, &v, || {
        let list = |k: &str| v[k].as_array().cloned().unwrap_or_default();
        let mut out = format!("node      {}\n", v["node"].as_str().unwrap_or_default());
        for a in list("addresses") {
            out.push_str(&format!("listening {}\n", a.as_str().unwrap_or_default()));
        }
        out.push_str(&format!("members   {} live, {} connected\n", list("members").len(), list("connected").len()));
        let store = &v["store"];
        let bytes = |k: &str| store[k].as_u64().map_or("no limit".into(), show_bytes);
        let takes = store["intake"].as_str().unwrap_or_default();
        let (used, room) = (bytes("size_bytes"), bytes("headroom_bytes"));
        out.push_str(&format!("store     {used} used, {room} left, {takes}\n"));
        for u in list("unreachable") {
            out.push_str(&format!("cannot reach {}: {}\n", u["address"], u["error"]));
        }
        for m in list("models") {
            let leads = if m["is_leader"] == true { ", led by this node" } else { "" };
            let version = m["version"].as_u64().map_or("-".into(), |v| PolicyVersion(v).to_string());
            let term = m["term"].as_u64().map_or("-".into(), |t| Term(t).to_string());
            out.push_str(&format!("model     {} version {version} term {term}{leads}\n", m["model"]));
            for j in m["jobs"].as_array().into_iter().flatten() {
                let end = j["end"].as_str().unwrap_or("running");
                out.push_str(&format!("job       {} {}/{} {end}\n", j["name"], j["steps"], j["of"]));
            }
        }
        if !v["agents"].is_null() {
            let a = &v["agents"];
            out.push_str(&format!(
                "agents    {} running, {} ended, aborted {}\n",
                a["running"], a["ended"], a["aborted"]
            ));
        }
        for d in list("doing") {
            out.push_str(&format!("now       {}\n", d.as_str().unwrap_or_default()));
        }
        out.trim_end().to_owned()
    })
}
