//! `POST /v1/chat/completions`.

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
use request::ChatRequest;
pub(crate) use response::Usage;
use std::sync::Arc;

/// Answers whole or as a stream.
pub(crate) async fn complete(
    State(gateway): State<Gateway>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let (caller, permit) = admit(&gateway, &headers)?;
    let body = gateway.body(body).await?;
    let request = ChatRequest::parse(&body)?;
    let options = request.options()?;
    let request = request.into_request()?;
    let mut calls = Calls::one(Arc::clone(&gateway.0), caller, request, permit).await?;
    let id = new_id("chatcmpl-");
    if options.stream {
        let renderer = stream::ChatStream::new(id, options.include_usage);
        return Ok(sse::stream(calls, renderer, gateway.0.config.heartbeat));
    }
    calls.finish().await?;
    Ok(Json(response::whole(&id, &calls)).into_response())
}
