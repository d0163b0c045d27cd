//! `POST /v1/messages` and `POST /v1/messages/count_tokens`.

mod error;
mod request;
mod response;
mod stream;

use super::{ApiError, admit, new_id, sse};
use crate::call::{Calls, Target};
use crate::gateway::Gateway;
use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::response::{IntoResponse, Response};
use request::MessageRequest;
use serde_json::json;
use std::sync::Arc;

const VERSION: HeaderName = HeaderName::from_static("anthropic-version");
const BETA: HeaderName = HeaderName::from_static("anthropic-beta");
const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");
const WARNING: HeaderName = HeaderName::from_static("warning");
/// The version of the API whose requests and events these are.
const KNOWN_VERSION: &str = "2023-06-01";

/// Answers whole or as a stream.
pub(crate) async fn create(State(gateway): State<Gateway>, headers: HeaderMap, body: Body) -> Response {
    let id = new_id("req_");
    let result = answer(&gateway, &headers, body, &id).await;
    finish(result, &headers, &id)
}

/// Refuses a request before it comes here, as this API does.
pub(crate) fn refuse(error: ApiError, headers: &HeaderMap) -> Response {
    finish(Err(error), headers, &new_id("req_"))
}

/// Counts the tokens of a prompt; samples nothing.
pub(crate) async fn count_tokens(State(gateway): State<Gateway>, headers: HeaderMap, body: Body) -> Response {
    let id = new_id("req_");
    let result = count(&gateway, &headers, body).await;
    finish(result, &headers, &id)
}

async fn answer(gateway: &Gateway, headers: &HeaderMap, body: Body, request_id: &str) -> Result<Response, ApiError> {
    check_version(headers)?;
    let (caller, permit) = admit(gateway, headers)?;
    let body = gateway.body(body).await?;
    let request::Checked { request, stream } = MessageRequest::parse(&body)?.check()?;
    let mut calls = Calls::one(Arc::clone(&gateway.0), caller, request, permit).await?;
    let id = new_id("msg_");
    if stream {
        let renderer = stream::MessageStream::new(id, request_id.to_owned());
        return Ok(sse::stream(calls, renderer, gateway.0.config.heartbeat));
    }
    calls.finish().await?;
    Ok(Json(response::whole(&id, &calls)).into_response())
}

async fn count(gateway: &Gateway, headers: &HeaderMap, body: Body) -> Result<Response, ApiError> {
    check_version(headers)?;
    let (caller, _permit) = admit(gateway, headers)?;
    let body = gateway.body(body).await?;
    let (model, chat) = MessageRequest::parse(&body)?.check_count()?;
    let target = Target::find(&gateway.0, caller, &model).await?;
    let input_tokens = target.count(&gateway.0, chat)?;
    Ok(Json(json!({ "input_tokens": input_tokens })).into_response())
}

fn check_version(headers: &HeaderMap) -> Result<(), ApiError> {
    match headers.get(VERSION) {
        Some(version) if version != KNOWN_VERSION => {
            Err(ApiError::invalid("anthropic-version", &format!("the version {KNOWN_VERSION} in this header")))
        }
        _ => Ok(()),
    }
}

/// Errors in this API's shape, and the headers that go with every answer. What a beta header asks for is not there; its
/// fields are refused by name, so the header alone changes nothing and is only warned of.
fn finish(result: Result<Response, ApiError>, headers: &HeaderMap, id: &str) -> Response {
    let mut response = result.unwrap_or_else(|e| error::response(&e, id));
    let mut insert = |name, value: &str| {
        if let Ok(value) = HeaderValue::from_str(value) {
            response.headers_mut().insert(name, value);
        }
    };
    insert(REQUEST_ID, id);
    if headers.contains_key(BETA) {
        insert(WARNING, "299 starling \"anthropic-beta: no beta features are here; the header was not heeded\"");
    }
    response
}
