//! The node's logic above the wire: membership, Raft groups, rollouts, weights, the optimizer leader's loop.
//!
//! It sees the network as a [`transport::Transport`], the disk as a `starling_storage::Store`, and time as
//! tokio's clock, so that the same code runs in a node and in the simulator.

pub mod blobs;
pub mod client;
pub mod compute;
pub mod consensus;
pub mod disk_health;
pub mod hosting;
pub mod leader;
pub mod maintenance;
pub mod membership;
pub mod memory_network;
pub mod models;
pub mod node;
pub mod rollouts;
pub mod runtime;
pub mod transport;
pub mod watch;

pub use node::{CoreConfig, Dispatch, NodeCore};

/// The `id` of a task line, for [`starling_protocol::task::read_task_set`].
///
/// # Errors
/// In words: what was expected, what came.
pub fn task_id(line: &str) -> Result<String, String> {
    let value: serde_json::Value = serde_json::from_str(line).map_err(|e| format!("expected a JSON object: {e}"))?;
    match value.get("id") {
        Some(serde_json::Value::String(id)) => Ok(id.clone()),
        Some(serde_json::Value::Number(n)) => Ok(n.to_string()),
        Some(other) => Err(format!("field `id`: expected a string or a number, got {other}")),
        None if value.is_object() => Err("field `id`: missing".into()),
        None => Err("expected a JSON object".into()),
    }
}
