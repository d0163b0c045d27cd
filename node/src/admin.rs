//! HTTP for the command line and the operator: `/starling/v1`, behind the admin token.

use crate::admin_store;
use crate::commands::job::SubmitReport;
use crate::job_file::Submission;
use crate::run::Node;
use axum::Json;
use axum::extract::{DefaultBodyLimit, Path, Query, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use starling_bootstrap::ticket::Ticket;
use starling_core::consensus::ReopenError;
use starling_mesh::DialReport;
use starling_protocol::control::{ControlEntry, JobEnd};
use starling_protocol::job::JobSpec;
use starling_protocol::manifest::Manifest;
use starling_protocol::rollout::read_rollout;
use starling_protocol::{Hash, JobId, ModelName, NodeId, RolloutId};
use starling_storage::{rollouts, steps};
use std::sync::Arc;
use std::time::Duration;

/// Longest admin request: the task files of a job.
const BODY_LEN_BYTES_MAX: usize = 256 << 20;
/// A peer that went is a likely reason of what waits now for this long: twice what the group of a model gives a dead voter
/// before it replaces it, and longer than any claim, answer or put of rollouts waits.
const MISSED_FOR: Duration = Duration::from_secs(120);
/// A mesh's name in tickets, for people.
const MESH_NAME: &str = "starling";

/// An answer that is not a success.
#[derive(Debug)]
pub struct AdminError(StatusCode, String);

impl AdminError {
    pub(crate) fn bad(e: impl ToString) -> Self {
        Self(StatusCode::BAD_REQUEST, e.to_string())
    }
    pub(crate) fn missing(e: impl ToString) -> Self {
        Self(StatusCode::NOT_FOUND, e.to_string())
    }
    pub(crate) fn conflict(e: impl ToString) -> Self {
        Self(StatusCode::CONFLICT, e.to_string())
    }
    pub(crate) fn failed(e: impl ToString) -> Self {
        Self(StatusCode::SERVICE_UNAVAILABLE, e.to_string())
    }
}

impl IntoResponse for AdminError {
    fn into_response(self) -> Response {
        (self.0, Json(json!({ "error": { "message": self.1 } }))).into_response()
    }
}

pub(crate) type Answer<T = Value> = Result<Json<T>, AdminError>;

/// The routes.
pub fn router(node: Node, token: String) -> axum::Router {
    let token: Arc<str> = token.into();
    let admin = axum::Router::new()
        .route("/status", get(status))
        .route("/nodes", get(nodes))
        .route("/ticket", get(ticket))
        .route("/jobs", get(jobs).post(submit))
        .route("/jobs/{job}/stop", post(stop))
        .route("/models/{*model}", get(model_status))
        .route("/steps/{*model}", get(model_steps))
        .route("/checkpoints/{*model}", post(export))
        .route("/reopen/{*model}", post(reopen))
        .route("/store", get(admin_store::store))
        .route("/drain", get(admin_store::drain_report).post(admin_store::drain))
        .route("/rollouts", get(list_rollouts))
        .route("/rollouts/{id}", get(show_rollout))
        .layer(middleware::from_fn(move |req, next| authorize(token.clone(), req, next)))
        .layer(DefaultBodyLimit::max(BODY_LEN_BYTES_MAX))
        .with_state(node);
    axum::Router::new().nest("/starling/v1", admin)
}

async fn authorize(token: Arc<str>, req: Request, next: Next) -> Response {
    let given = req.headers().get(header::AUTHORIZATION).and_then(|v| v.to_str().ok());
    let given = given.and_then(|v| v.strip_prefix("Bearer ")).unwrap_or_default();
    // Hashes have one length and differ everywhere, so the comparison tells nothing about the token.
    if blake3::hash(given.as_bytes()) == blake3::hash(token.as_bytes()) {
        next.run(req).await
    } else {
        AdminError(StatusCode::UNAUTHORIZED, "expected `Authorization: Bearer` with the node's admin token".into())
            .into_response()
    }
}

fn model_name(text: &str) -> Result<ModelName, AdminError> {
    text.parse().map_err(AdminError::bad)
}

async fn status(State(node): State<Node>) -> Json<Value> {
    let core = &node.core;
    let models: Vec<Value> = core.models().list().iter().map(|a| core.model_status(&a.model)).map(slim).collect();
    let mut waits: Vec<String> = Vec::new();
    let mut unreachable: Vec<Value> = Vec::new();
    let live = core.membership().live();
    for r in node.mesh.reachability() {
        if core.transport().connected().contains(&r.peer) {
            continue;
        }
        if is_missed(&r, &live) {
            waits.push(format!("cannot reach {} at {}: {}", r.peer.short(), r.address, r.error));
        }
        unreachable.push(json!({ "peer": r.peer, "address": r.address, "error": r.error }));
    }
    let runner = node.runner.as_ref().map(|r| {
        let s = r.stats();
        waits.extend(s.wait.clone());
        if s.running > 0 {
            waits.push(format!("agents run {} episodes", s.running));
        }
        if s.ending > 0 {
            waits.push(format!("the ends of {} episodes are not accepted yet", s.ending));
        }
        json!({
            "running": s.running, "started": s.started, "ended": s.ended, "ending": s.ending, "aborted": s.aborted,
            "worker_restarts": s.worker_restarts, "wait": s.wait, "last_failure": s.last_failure,
        })
    });
    if live.len() <= 1 {
        waits.push("no other node of the mesh is reachable".into());
    }
    if core.models().list().is_empty() {
        waits.push("no model is known yet: submit a job".into());
    }
    waits.extend(node.backend.client().waits());
    let (holding, troubles) = admin_store::holding(&node);
    waits.extend(troubles);
    for m in &models {
        for key in ["wait", "activity"] {
            match m.get(key) {
                Some(Value::String(s)) => waits.push(s.clone()),
                Some(Value::Object(o)) => waits.extend(o.get("doing").and_then(Value::as_str).map(str::to_owned)),
                _ => {}
            }
        }
    }
    Json(json!({
        "node": core.node(),
        "version": env!("CARGO_PKG_VERSION"),
        "network": node.network,
        "pid": std::process::id(),
        "addresses": core.transport().addresses(),
        "connected": core.transport().connected(),
        "members": core.membership().live(),
        "unreachable": unreachable,
        "serving": core.hosting().list(),
        "models": models,
        "agents": runner,
        "episodes_open": node.gateway.running().len(),
        "client": node.backend.client().counts(),
        "store": holding,
        "doing": waits,
    }))
}

/// Whether something may wait for a peer that cannot be reached: others see it, or it is gone since a short while, or nobody
/// else is there. One that left for good is dialled again now and then, for ever, and is no reason of any wait.
fn is_missed(report: &DialReport, live: &[NodeId]) -> bool {
    let failing = report.at.duration_since(report.since).unwrap_or_default();
    live.len() <= 1 || live.contains(&report.peer) || failing < MISSED_FOR
}

/// Without manifests, which are long and for machines.
fn slim(mut v: Value) -> Value {
    if let Some(o) = v.as_object_mut() {
        o.remove("weights");
        o.remove("files");
    }
    v
}

async fn nodes(State(node): State<Node>) -> Json<Value> {
    let m = node.core.membership();
    let live = m.live();
    let list: Vec<Value> = m
        .records()
        .into_values()
        .map(|r| json!({ "live": live.contains(&r.node), "self": r.node == node.core.node(), "record": r }))
        .collect();
    Json(json!({ "nodes": list }))
}

async fn ticket(State(node): State<Node>) -> Answer {
    let t = Ticket {
        mesh: MESH_NAME.into(),
        network: node.network,
        nodes: vec![(node.core.node(), node.core.transport().addresses())],
        expires_ms: None,
    };
    Ok(Json(json!({ "ticket": t.encode().map_err(AdminError::failed)? })))
}

/// Opens a new generation of a model whose group has lost its quorum for good.
async fn reopen(State(node): State<Node>, Path(model): Path<String>) -> Answer {
    let model = model_name(&model)?;
    let line = node.core.groups().reopen_line(&model).await.map_err(|e| match e {
        ReopenError::NoGroup(_) => AdminError::missing(e),
        ReopenError::Refused { .. } => AdminError::conflict(e),
        ReopenError::Group(_) => AdminError::failed(e),
    })?;
    Ok(Json(json!({ "model": model, "line": line })))
}

async fn jobs(State(node): State<Node>) -> Json<Value> {
    let mut all = Vec::new();
    for a in node.core.models().list() {
        if let Some(state) = node.core.groups().state(&a.model) {
            let state = state.borrow().clone();
            all.extend(state.jobs.iter().map(|j| {
                json!({
                    "job": j.job, "name": j.spec.name, "model": a.model, "steps": j.steps, "of": j.spec.steps,
                    "end": j.end, "evaluations": j.evaluations, "submitted": j.at,
                })
            }));
        } else {
            all.push(json!({ "model": a.model, "job": a.running_job, "version": a.version, "member": false }));
        }
    }
    Json(json!({ "jobs": all }))
}

async fn submit(State(node): State<Node>, Json(s): Json<Submission>) -> Answer<SubmitReport> {
    s.spec.validate().map_err(AdminError::bad)?;
    let core = &node.core;
    let model = &s.spec.model;
    let mut created = false;
    if core.models().get(model).is_none() {
        let files = match &s.model.path {
            Some(path) => {
                let path = path.clone();
                // Seconds for a large model: not on the threads that carry heartbeats.
                let read = tokio::task::spawn_blocking(move || crate::commands::checkpoint::read_model(&path)).await;
                read.map_err(AdminError::failed)?.map_err(|e| AdminError::bad(format!("model.path: {e:#}")))?
            }
            None => crate::embedded::files(),
        };
        crate::commands::checkpoint::create(core, model, files).await.map_err(AdminError::failed)?;
        created = true;
    }
    let mut manifests = Vec::new();
    for text in s.files {
        manifests.push(core.blobs().put(text.into_bytes()).await.map_err(AdminError::failed)?);
    }
    if let Some(missing) = unnamed_file(&s.spec, &manifests) {
        return Err(AdminError::bad(format!("field `files`: the file with hash {missing} is not among them")));
    }
    if let Some(first) = manifests.first() {
        core.place_on_second(first.hash, manifests.clone()).await.map_err(AdminError::failed)?;
    }
    let at = (core.clock())();
    let job = s.spec.id(at.0);
    let entry = ControlEntry::JobSubmitted { job, spec: Box::new(s.spec.clone()), at };
    // A new group elects its leader first, which takes an election timeout or two.
    let mut said = String::new();
    for _ in 0..20 {
        match core.models().propose(model, entry.clone()).await {
            Ok(()) => return Ok(Json(SubmitReport { job, model: model.clone(), created })),
            Err(e) => said = e.to_string(),
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    Err(AdminError::failed(format!("the job was not accepted: {said}")))
}

/// A task file that the spec names and the submission does not bring.
fn unnamed_file(spec: &JobSpec, brought: &[Manifest]) -> Option<Hash> {
    let named = spec.tasks.iter().flat_map(|t| std::iter::once(&t.train).chain(&t.heldout));
    named.filter(|m| !brought.contains(m)).map(|m| m.hash).next()
}

async fn stop(State(node): State<Node>, Path(job): Path<String>) -> Answer {
    let job: JobId = job.parse().map_err(AdminError::bad)?;
    for a in node.core.models().list() {
        if a.running_job == Some(job) {
            let entry = ControlEntry::JobEnded { job, end: JobEnd::Stopped };
            node.core.models().propose(&a.model, entry).await.map_err(AdminError::failed)?;
            return Ok(Json(json!({ "job": job, "end": "stopped" })));
        }
    }
    Err(AdminError::missing(format!("job {job} does not run on this mesh")))
}

async fn model_status(State(node): State<Node>, Path(model): Path<String>) -> Answer {
    Ok(Json(slim(node.core.model_status(&model_name(&model)?))))
}

async fn model_steps(State(node): State<Node>, Path(model): Path<String>) -> Answer {
    let model = model_name(&model)?;
    let all = steps::steps(&**node.core.store(), &model).map_err(AdminError::failed)?;
    let list: Vec<Value> = all
        .iter()
        .map(|s| {
            json!({
                "version": s.version, "term": s.term, "at": s.at, "consumed": s.consumed.len(),
                "holders": s.holders, "weights": s.weights.hash, "metrics": s.metrics,
            })
        })
        .collect();
    Ok(Json(json!({ "model": model, "steps": list })))
}

/// `checkpoint export`.
#[derive(Debug, Serialize, Deserialize)]
pub struct ExportRequest {
    /// An absolute path on the node's machine.
    pub out: std::path::PathBuf,
    /// The adapters of the newest step instead of its weights.
    #[serde(default)]
    pub adapter: bool,
}

async fn export(State(node): State<Node>, Path(model): Path<String>, Json(r): Json<ExportRequest>) -> Answer {
    let model = model_name(&model)?;
    let exported = if r.adapter {
        crate::commands::checkpoint::export_adapter(&node.core, &model, &r.out).await
    } else {
        crate::commands::checkpoint::export(&node.core, &model, &r.out).await
    };
    let version = exported.map_err(|e| AdminError::failed(format!("{e:#}")))?;
    Ok(Json(json!({ "model": model, "version": version, "out": r.out })))
}

#[derive(Debug, Deserialize)]
struct ListQuery {
    job: String,
    limit: u32,
}

async fn list_rollouts(State(node): State<Node>, Query(q): Query<ListQuery>) -> Answer {
    let job: JobId = q.job.parse().map_err(AdminError::bad)?;
    let store = &**node.core.store();
    let ids = rollouts::list_all(store, job, None, q.limit as usize).map_err(AdminError::failed)?;
    let mut list = Vec::new();
    for id in ids {
        let Some(bytes) = rollouts::get_rollout(store, id).map_err(AdminError::failed)? else { continue };
        let r = read_rollout(&bytes).map_err(AdminError::failed)?;
        list.push(json!({
            "id": id, "task": r.task, "reward": r.reward, "turns": r.turns.len(), "purpose": r.purpose,
            "consumed_by": starling_storage::consumed::is_consumed(store, id).map_err(AdminError::failed)?,
        }));
    }
    Ok(Json(json!({ "job": job, "rollouts": list })))
}

async fn show_rollout(State(node): State<Node>, Path(id): Path<String>) -> Answer {
    let id: RolloutId = id.parse().map_err(AdminError::bad)?;
    let bytes = rollouts::get_rollout(&**node.core.store(), id).map_err(AdminError::failed)?;
    let bytes = bytes.ok_or_else(|| AdminError::missing(format!("rollout {id} is not in this node's store")))?;
    let rollout = read_rollout(&bytes).map_err(AdminError::failed)?;
    let format = starling_gateway::Backend::chat_format(&*node.backend, &rollout.model).await.ok();
    let texts: Vec<String> = match format {
        Some(f) => rollout.timelines.iter().map(|t| f.decode(&t.tokens)).collect(),
        None => Vec::new(),
    };
    Ok(Json(json!({ "id": id, "len_bytes": bytes.len(), "rollout": rollout, "texts": texts })))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::SystemTime;

    #[test]
    fn who_left_for_good_is_no_reason_of_a_wait() {
        let [me, other, gone] = [1, 2, 9].map(|n| NodeId([n; 32]));
        let failing_for = |s: u64| {
            let since = SystemTime::UNIX_EPOCH;
            let (address, error) = ("/ip4/10.0.0.9/tcp/4001".into(), "timeout".into());
            DialReport { peer: gone, address, error, at: since + Duration::from_secs(s), since }
        };
        assert!(is_missed(&failing_for(0), &[me, other]), "it has just gone");
        assert!(!is_missed(&failing_for(1000), &[me, other]), "it has left");
        assert!(is_missed(&failing_for(1000), &[me, other, gone]), "others reach it");
        assert!(is_missed(&failing_for(1000), &[me]), "nobody is there");
    }
}
