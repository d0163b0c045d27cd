//! Begin, end, abort and list.

use super::{bearer, unauthorized};
use crate::api::ApiError;
use crate::api::fields::parse;
use crate::backend::ClaimRequest;
use crate::episode::{Episode, KEY_PREFIX};
use crate::gateway::{EpisodeInfo, Gateway, info};
use axum::Json;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, header};
use serde::Deserialize;
use serde_json::{Value, json};
use starling_protocol::{EpisodeId, JobId, ModelName};
use std::collections::BTreeMap;
use std::sync::Arc;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Begin {
    model: Option<ModelName>,
    job: Option<JobId>,
    agent: Option<String>,
}

/// Longest name of an agent, in bytes: it is stored with every rollout.
const AGENT_LEN_BYTES_MAX: usize = 256;

pub(super) async fn begin(
    State(gateway): State<Gateway>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Value>, ApiError> {
    gateway.require_admin(&headers)?;
    let body = gateway.body(body).await?;
    let begin: Begin = parse(&body)?;
    let agent = begin.agent.unwrap_or_else(|| "http".into());
    if agent.len() > AGENT_LEN_BYTES_MAX {
        return Err(ApiError::invalid("agent", "at most 256 bytes"));
    }
    let handle = gateway.begin(ClaimRequest { model: begin.model, job: begin.job }, agent).await?;
    let a = &handle.assignment;
    let task: Value = match serde_json::from_str(&a.task_line) {
        Ok(task) => task,
        Err(e) => {
            let cause = format!("task {:?} is not JSON: {e}", a.task.id);
            // It was opened a moment ago and nobody else knows it.
            let _ = gateway.abort(a.episode, cause.clone()).await;
            return Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "task_malformed", cause));
        }
    };
    // The address by which the caller reached us is the one that works for it.
    let host = headers.get(header::HOST).and_then(|h| h.to_str().ok());
    let base_url = host.map_or_else(|| handle.base_url.clone(), |host| format!("http://{host}/v1"));
    Ok(Json(json!({
        "episode": a.episode, "api_key": handle.key.0, "base_url": base_url, "model": a.model, "job": a.job,
        "task": task, "task_id": a.task.id, "task_set": a.task.set, "seed": a.seed, "purpose": a.purpose,
        "policy_version": a.policy_version, "sampling": a.sampling,
        "lease_expires_ms": a.lease_expires, "lease_ttl_ms": a.lease_ttl_ms,
    })))
}

/// The episode of the path, if the key is its own.
fn own(gateway: &Gateway, id: &str, headers: &HeaderMap) -> Result<Arc<Episode>, ApiError> {
    let unknown = |why: String| ApiError::new(StatusCode::NOT_FOUND, "episode_not_found", why);
    let id: EpisodeId = id.parse().map_err(|e| unknown(format!("{e}")))?;
    let key = bearer(headers)?.ok_or_else(|| unauthorized("missing_api_key", "the episode's key is required"))?;
    if gateway.is_admin(key) {
        let episode = gateway.0.episodes().get(id);
        return episode.ok_or_else(|| unknown(format!("episode {id} is not known here")));
    }
    let episode = gateway.by_key(key)?;
    if episode.id() == id {
        Ok(episode)
    } else {
        Err(ApiError::new(StatusCode::FORBIDDEN, "wrong_episode", format!("this key is not the one of episode {id}")))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct End {
    reward: f64,
    metrics: Option<BTreeMap<String, f64>>,
    task_id: Option<String>,
}

pub(super) async fn end(
    State(gateway): State<Gateway>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Value>, ApiError> {
    let episode = own(&gateway, &id, &headers)?;
    let body = gateway.body(body).await?;
    let end: End = parse(&body)?;
    let metrics = end.metrics.unwrap_or_default();
    let rollout = gateway.end_task(episode.id(), end.reward, metrics, end.task_id.as_deref()).await?;
    Ok(Json(json!({ "episode": episode.id(), "rollout": rollout })))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Abort {
    cause: Option<String>,
}

pub(super) async fn abort(
    State(gateway): State<Gateway>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Value>, ApiError> {
    let episode = own(&gateway, &id, &headers)?;
    let body = gateway.body(body).await?;
    let abort: Abort = parse(&body)?;
    let mut cause = abort.cause.unwrap_or_else(|| "the agent gave it up".into());
    if cause.len() > 1024 {
        cause.truncate(cause.floor_char_boundary(1024));
    }
    gateway.abort(episode.id(), cause).await?;
    Ok(Json(json!({ "episode": episode.id(), "state": "aborted" })))
}

/// With an episode's key its own episode, with the admin token (or where none is set) all of them.
pub(super) async fn list(State(gateway): State<Gateway>, headers: HeaderMap) -> Result<Json<Value>, ApiError> {
    let list: Vec<EpisodeInfo> = match bearer(&headers)? {
        Some(key) if key.starts_with(KEY_PREFIX) => vec![info(&*gateway.by_key(key)?)],
        _ => {
            gateway.require_admin(&headers)?;
            gateway.episodes()
        }
    };
    Ok(Json(json!({ "object": "list", "data": list })))
}
