//! `POST /v1/responses`.

mod request;
mod response;
mod store;
mod stream;

use super::{ApiError, admit, new_id, sse};
use crate::call::{Caller, Calls};
use crate::gateway::Gateway;
use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use request::ResponseRequest;
use std::sync::Arc;
pub(crate) use store::ResponseStore;
use store::Shelf;

/// Answers whole or as a stream.
pub(crate) async fn create(
    State(gateway): State<Gateway>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let (caller, permit) = admit(&gateway, &headers)?;
    let body = gateway.body(body).await?;
    let request = ResponseRequest::parse(&body)?;
    let shelf = match &caller {
        Caller::Episode(episode) => Shelf::Episode(Arc::clone(&gateway.0), Arc::clone(episode)),
        Caller::Open => Shelf::Open(Arc::clone(&gateway.0), gateway.scope(&headers)),
    };
    let checked = request.check(&shelf)?;
    let conversation = checked.stored.then(|| checked.conversation.clone());
    let calls = Calls::one(Arc::clone(&gateway.0), caller, checked.request, permit);
    let mut calls = calls.await.map_err(|e| e.about("input"))?;
    let shape = response::Shape::new(new_id("resp_"), checked.echo, &calls);
    let after = store::After { shelf, conversation, id: shape.id.clone() };
    if checked.stream {
        let renderer = stream::ResponseStream::new(shape, after);
        return Ok(sse::stream(calls, renderer, gateway.0.config.heartbeat));
    }
    calls.finish().await?;
    after.keep(calls.single().1);
    Ok(Json(shape.complete(&calls, &response::Ids::default())).into_response())
}
