//! Errors. They print in OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`; Anthropic's is in
//! [`super::anthropic`].

use crate::backend::{BackendError, SealError};
use crate::gateway::{AbortError, BeginError, EndError};
use crate::text::FormatError;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;
use std::borrow::Cow;

/// A refused or failed request. `code` is what programs match on; see the table in `docs/http.md`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) code: &'static str,
    pub(crate) message: String,
    pub(crate) param: Option<Cow<'static, str>>,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code, message: message.into(), param: None }
    }

    /// 400, about one field.
    pub(crate) fn field(code: &'static str, param: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        let param = Some(param.into());
        Self { status: StatusCode::BAD_REQUEST, code, message: message.into(), param }
    }

    /// 400: a value out of range or of the wrong kind.
    pub(crate) fn invalid(param: impl Into<Cow<'static, str>>, expected: &str) -> Self {
        let param = param.into();
        let message = format!("`{param}`: expected {expected}");
        Self::field("invalid_value", param, message)
    }

    /// 400: a field or value of OpenAI's API that this service does not honour.
    pub(crate) fn unsupported(param: impl Into<Cow<'static, str>>, why: &str) -> Self {
        let param = param.into();
        let message = format!("`{param}` is not supported by this server: {why}");
        Self::field("unsupported_parameter", param, message)
    }

    /// Names the field in which this API has its conversation, where the error is about the conversation.
    pub(crate) fn about(mut self, field: &'static str) -> Self {
        if self.param.as_deref() == Some("messages") {
            self.param = Some(field.into());
        }
        self
    }

    fn kind(&self) -> &'static str {
        match self.status.as_u16() {
            401 | 403 => "authentication_error",
            429 => "rate_limit_error",
            400..=499 => "invalid_request_error",
            _ => "server_error",
        }
    }

    pub(crate) fn body(&self) -> serde_json::Value {
        json!({ "error": {
            "message": self.message, "type": self.kind(), "param": self.param, "code": self.code,
        } })
    }

    /// From a JSON syntax or shape error of `what`, with the field's path.
    pub(crate) fn json(e: &serde_path_to_error::Error<serde_json::Error>) -> Self {
        let reason = e.inner().to_string();
        // A `?` is a place that has no name: the body ended, or is no JSON, before one came.
        let path = e.path().to_string();
        let path = Some(path.trim_end_matches(['.', '?']).to_owned()).filter(|p| !p.is_empty());
        // serde names a field that is missing or unknown only in its message.
        let quoted = reason.split('`').nth(1).map(str::to_owned);
        if let (Some(name), true) = (&quoted, reason.starts_with("unknown field")) {
            let name = match path.as_deref().map(|p| p.strip_suffix(name.as_str()).unwrap_or(p)) {
                Some(parent) if !parent.is_empty() => format!("{}.{name}", parent.trim_end_matches('.')),
                _ => name.clone(),
            };
            let message = format!("`{name}` is not a field that this server knows");
            return Self::field("unknown_parameter", name, message);
        }
        if let (Some(name), true) = (&quoted, reason.starts_with("missing field")) {
            let name = path.map_or_else(|| name.clone(), |p| format!("{p}.{name}"));
            return Self::field("missing_required_parameter", name.clone(), format!("`{name}` is required"));
        }
        match path {
            Some(path) => {
                let message = format!("`{path}`: {reason}");
                Self::field("invalid_value", path, message)
            }
            None => Self::new(StatusCode::BAD_REQUEST, "invalid_json", format!("the body is not valid JSON: {reason}")),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, axum::Json(self.body())).into_response();
        if self.status == StatusCode::SERVICE_UNAVAILABLE || self.status == StatusCode::TOO_MANY_REQUESTS {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

impl From<FormatError> for ApiError {
    fn from(e: FormatError) -> Self {
        match e {
            FormatError::Render(_) => Self::field("template_refused", "messages", e.to_string()),
            FormatError::File { .. } | FormatError::Template(_) | FormatError::Encode(_) => {
                Self::new(StatusCode::INTERNAL_SERVER_ERROR, "chat_format_failed", e.to_string())
            }
        }
    }
}

impl From<BackendError> for ApiError {
    fn from(e: BackendError) -> Self {
        let message = e.to_string();
        match e {
            BackendError::NoModel(_) => {
                let error = Self::field("model_not_found", "model", message);
                Self { status: StatusCode::NOT_FOUND, ..error }
            }
            BackendError::Unavailable(_) => Self::new(StatusCode::SERVICE_UNAVAILABLE, "engine_unavailable", message),
            BackendError::Failed(_) => Self::new(StatusCode::INTERNAL_SERVER_ERROR, "engine_failed", message),
        }
    }
}

impl From<BeginError> for ApiError {
    fn from(e: BeginError) -> Self {
        use crate::backend::ClaimError;
        match e {
            BeginError::Claim(ClaimError::Wait(reason)) => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "no_work", reason)
            }
            BeginError::Claim(e @ ClaimError::NoModel(_)) => {
                Self { status: StatusCode::NOT_FOUND, ..Self::field("model_not_found", "model", e.to_string()) }
            }
            BeginError::Claim(e @ ClaimError::NoJob(_)) => {
                Self { status: StatusCode::NOT_FOUND, ..Self::field("job_not_found", "job", e.to_string()) }
            }
            BeginError::Format(e) => e.into(),
        }
    }
}

impl From<EndError> for ApiError {
    fn from(e: EndError) -> Self {
        let message = e.to_string();
        match e {
            EndError::Unknown(_) => Self::new(StatusCode::NOT_FOUND, "episode_not_found", message),
            EndError::NotFinite { field, .. } => Self::field("not_finite", field, message),
            EndError::WrongTask { .. } => Self::field("wrong_task", "task_id", message),
            EndError::Aborted { .. } => Self::new(StatusCode::CONFLICT, "episode_aborted", message),
            EndError::LeaseLost(_) | EndError::Seal(SealError::LeaseLost(_)) => {
                Self::new(StatusCode::CONFLICT, "lease_lost", message)
            }
            EndError::Seal(SealError::Storage(_)) => Self::new(StatusCode::SERVICE_UNAVAILABLE, "not_durable", message),
            EndError::Seal(SealError::Invalid(_)) => {
                Self::new(StatusCode::INTERNAL_SERVER_ERROR, "rollout_invalid", message)
            }
        }
    }
}

impl From<AbortError> for ApiError {
    fn from(e: AbortError) -> Self {
        match e {
            AbortError::Unknown(_) => Self::new(StatusCode::NOT_FOUND, "episode_not_found", e.to_string()),
            AbortError::Ended(_) => Self::new(StatusCode::CONFLICT, "episode_ended", e.to_string()),
        }
    }
}
