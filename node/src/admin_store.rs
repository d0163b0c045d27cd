//! Admin routes about what the node holds: its store, and leaving in order.

use crate::admin::{AdminError, Answer};
use crate::run::Node;
use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};
use starling_core::maintenance::DrainReport;
use starling_core::runtime::blocking;
use starling_storage::stat::{StoreStat, stat};

/// `GET /store`: the numbers of `starling store stat`, which cannot open a running node's store itself.
pub(crate) async fn store(State(node): State<Node>) -> Answer<StoreStat> {
    let store = node.core.store().clone();
    let counted = blocking(move || stat(&*store)).await.map_err(AdminError::failed)?;
    Ok(Json(counted.map_err(AdminError::failed)?))
}

/// `GET /drain`: how far it is.
pub(crate) async fn drain_report(State(node): State<Node>) -> Json<DrainReport> {
    Json(report(&node))
}

/// `POST /drain`: begin to leave.
pub(crate) async fn drain(State(node): State<Node>) -> Answer<DrainReport> {
    node.core.drain().map_err(AdminError::conflict)?;
    Ok(Json(report(&node)))
}

fn report(node: &Node) -> DrainReport {
    let open = node.gateway.running().len();
    let busy = if open > 0 { vec![format!("{open} episodes run through this node")] } else { Vec::new() };
    node.core.drain_report(busy)
}

/// For `GET /status`: what the node takes and what its maintenance does; and what of it a person should know.
pub(crate) fn holding(node: &Node) -> (Value, Vec<String>) {
    let m = node.core.maintenance();
    let (intake, status) = (m.intake(), m.status());
    let mut waits = Vec::new();
    match intake {
        starling_protocol::record::Intake::Open => {}
        starling_protocol::record::Intake::Full => {
            waits.push("the store is full: this node serves what it has and takes nothing more to hold".into());
        }
        starling_protocol::record::Intake::Draining => waits.extend(report(node).waits),
    }
    waits.extend(status.trouble.clone().map(|t| format!("keeping enough copies: {t}")));
    let v = json!({
        "intake": intake, "size_bytes": node.core.store().size_bytes().unwrap_or(0),
        "headroom_bytes": m.headroom_bytes(), "maintenance": status,
    });
    (v, waits)
}
