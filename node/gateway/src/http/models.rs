//! `GET /v1/models`.

use crate::api::ApiError;
use crate::backend::{BackendError, ModelInfo};
use crate::gateway::Gateway;
use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};
use starling_protocol::ModelName;

fn entry(model: &ModelInfo) -> Value {
    json!({
        "id": model.name, "object": "model", "created": model.created.0 / 1000, "owned_by": "starling",
        "version": model.version,
    })
}

pub(super) async fn list(State(gateway): State<Gateway>) -> Json<Value> {
    let models: Vec<Value> = gateway.0.backend.models().iter().map(entry).collect();
    Json(json!({ "object": "list", "data": models }))
}

pub(super) async fn show(State(gateway): State<Gateway>, Path(id): Path<String>) -> Result<Json<Value>, ApiError> {
    let name = ModelName::new(id).map_err(|e| ApiError::invalid("model", e.expected))?;
    let models = gateway.0.backend.models();
    match models.iter().find(|m| m.name == name) {
        Some(model) => Ok(Json(entry(model))),
        None => Err(BackendError::NoModel(name).into()),
    }
}
