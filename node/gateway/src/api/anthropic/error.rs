//! Errors in Anthropic's shape: `{"type": "error", "error": {"type", "message"}, "request_id"}`.

use crate::api::ApiError;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// What Anthropic calls an error of this status.
fn kind(error: &ApiError) -> &'static str {
    match error.status.as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        409 => "conflict_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        504 => "timeout_error",
        400..=499 => "invalid_request_error",
        _ => "api_error",
    }
}

/// The message begins with our code, which this shape has no field for, and names the field.
pub(super) fn body(error: &ApiError, request_id: &str) -> Value {
    let message = match &error.param {
        Some(param) if !error.message.contains(&**param) => {
            format!("{}: `{param}`: {}", error.code, error.message)
        }
        _ => format!("{}: {}", error.code, error.message),
    };
    json!({ "type": "error", "error": { "type": kind(error), "message": message }, "request_id": request_id })
}

pub(super) fn response(error: &ApiError, request_id: &str) -> Response {
    let body = body(error, request_id);
    // The status and `retry-after` are the same for all APIs.
    let (mut parts, _) = error.clone().into_response().into_parts();
    parts.headers.remove(axum::http::header::CONTENT_LENGTH);
    (parts.status, parts.headers, axum::Json(body)).into_response()
}
