//! The routes under `/v1`.

mod episodes;
mod models;
mod repeats;

pub(crate) use repeats::Replies;

use crate::api::{ApiError, anthropic, new_id, openai_chat, openai_completions, openai_responses};
use crate::call::Caller;
use crate::episode::{Episode, KEY_PREFIX};
use crate::gateway::Gateway;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::Response;
use axum::routing::{get, post};
use std::sync::Arc;

pub(crate) fn router(gateway: Gateway) -> Router {
    let calls = Router::new()
        .route("/v1/chat/completions", post(openai_chat::complete))
        .route("/v1/completions", post(openai_completions::complete))
        .route("/v1/responses", post(openai_responses::create))
        .route("/v1/messages", post(anthropic::create))
        .route_layer(axum::middleware::from_fn_with_state(gateway.clone(), repeats::once));
    Router::new()
        .merge(calls)
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        .route("/v1/episodes", post(episodes::begin).get(episodes::list))
        .route("/v1/episodes/{id}/end", post(episodes::end))
        .route("/v1/episodes/{id}/abort", post(episodes::abort))
        .route("/v1/models", get(models::list))
        // A model's name may have slashes.
        .route("/v1/models/{*id}", get(models::show))
        .layer(axum::middleware::map_response(name_request))
        .with_state(gateway)
}

/// Where OpenAI's clients look for what to quote in a complaint; Anthropic's answers have their own.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

async fn name_request(mut response: Response) -> Response {
    if let Ok(id) = HeaderValue::from_str(&new_id("req_")) {
        response.headers_mut().entry(REQUEST_ID).or_insert(id);
    }
    response
}

/// Where Anthropic's clients put the key.
const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// The key of `Authorization: Bearer …`, or of `x-api-key` where there is no such header.
fn bearer(headers: &HeaderMap) -> Result<Option<&str>, ApiError> {
    let Some(value) = headers.get(header::AUTHORIZATION) else {
        let Some(key) = headers.get(X_API_KEY) else { return Ok(None) };
        let not_text = |_| unauthorized("invalid_api_key", "`x-api-key`: expected a key");
        return key.to_str().map(|key| Some(key.trim())).map_err(not_text);
    };
    let key = value.to_str().ok().and_then(|v| {
        let (scheme, key) = v.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
    });
    key.map(Some).ok_or_else(|| unauthorized("invalid_api_key", "expected `Authorization: Bearer <key>`"))
}

fn unauthorized(code: &'static str, message: &str) -> ApiError {
    ApiError::new(StatusCode::UNAUTHORIZED, code, message)
}

impl Gateway {
    pub(crate) fn caller(&self, headers: &HeaderMap) -> Result<Caller, ApiError> {
        match bearer(headers)? {
            Some(key) if key.starts_with(KEY_PREFIX) => Ok(Caller::Episode(self.by_key(key)?)),
            Some(key) if self.0.config.open_inference || self.is_admin(key) => Ok(Caller::Open),
            None if self.0.config.open_inference => Ok(Caller::Open),
            Some(_) => Err(unauthorized("invalid_api_key", "this is not the key of an episode")),
            None => Err(unauthorized("missing_api_key", "an episode's key is required")),
        }
    }

    /// Whose responses a caller outside an episode may go on from: those that came with the same key.
    pub(crate) fn scope(&self, headers: &HeaderMap) -> starling_protocol::Hash {
        let key = bearer(headers).ok().flatten().unwrap_or_default();
        starling_protocol::Hash::of(key.as_bytes())
    }

    fn by_key(&self, key: &str) -> Result<Arc<Episode>, ApiError> {
        let missing = || unauthorized("invalid_api_key", "this key belongs to no episode, or to one long over");
        self.0.episodes().by_key(key).ok_or_else(missing)
    }

    fn is_admin(&self, key: &str) -> bool {
        // Compared by hash, so that the time taken says nothing about the token.
        let hash = |s: &str| starling_protocol::Hash::of(s.as_bytes());
        self.0.config.admin_token.as_ref().is_some_and(|token| hash(token) == hash(key))
    }

    /// Whoever holds the admin token, or anyone where none is set.
    fn require_admin(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let key = bearer(headers)?;
        if self.0.config.admin_token.is_none() || key.is_some_and(|key| self.is_admin(key)) {
            return Ok(());
        }
        Err(unauthorized("admin_token_required", "this route needs the node's admin token"))
    }

    pub(crate) async fn body(&self, body: Body) -> Result<Bytes, ApiError> {
        let max = self.0.config.body_len_bytes_max;
        axum::body::to_bytes(body, max).await.map_err(|e| {
            let too_long = std::error::Error::source(&e).is_some_and(|s| s.to_string().contains("limit"));
            if too_long {
                let message = format!("the body is longer than {max} bytes");
                ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_long", message)
            } else {
                ApiError::new(StatusCode::BAD_REQUEST, "invalid_body", format!("the body cannot be read: {e}"))
            }
        })
    }
}
