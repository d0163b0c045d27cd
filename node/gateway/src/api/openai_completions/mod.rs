//! `POST /v1/completions`: text that is gone on with, without a chat template.

mod request;
mod response;
mod stream;

use super::{ApiError, admit, new_id, sse};
use crate::call::Calls;
use crate::gateway::Gateway;
use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use request::CompletionRequest;
use std::sync::Arc;

/// Answers whole or as a stream.
pub(crate) async fn complete(
    State(gateway): State<Gateway>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let (caller, permit) = admit(&gateway, &headers)?;
    let body = gateway.body(body).await?;
    let request::Checked { model, prompts, settings, options } = CompletionRequest::parse(&body)?.check()?;
    let calls = Calls::of_prompts(Arc::clone(&gateway.0), caller, &model, prompts, settings, permit);
    let mut calls = calls.await.map_err(|e| e.about("prompt"))?;
    let id = new_id("cmpl-");
    if options.stream {
        let heartbeat = gateway.0.config.heartbeat;
        return Ok(sse::stream(calls, stream::CompletionStream::new(id, options), heartbeat));
    }
    calls.finish().await?;
    Ok(Json(response::whole(&id, &calls, &options)).into_response())
}
