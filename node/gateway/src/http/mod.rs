//! The routes under `/v1`.

mod chat;
mod episodes;
mod models;

use crate::call::Caller;
use crate::episode::{Episode, KEY_PREFIX};
use crate::gateway::Gateway;
use crate::openai::ApiError;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, StatusCode, header};
use axum::routing::{get, post};
use std::sync::Arc;

pub(crate) fn router(gateway: Gateway) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat::complete))
        .route("/v1/episodes", post(episodes::begin).get(episodes::list))
        .route("/v1/episodes/{id}/end", post(episodes::end))
        .route("/v1/episodes/{id}/abort", post(episodes::abort))
        .route("/v1/models", get(models::list))
        // A model's name may have slashes.
        .route("/v1/models/{*id}", get(models::show))
        .with_state(gateway)
}

/// The key of `Authorization: Bearer …`.
fn bearer(headers: &HeaderMap) -> Result<Option<&str>, ApiError> {
    let Some(value) = headers.get(header::AUTHORIZATION) else { return Ok(None) };
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
    fn caller(&self, headers: &HeaderMap) -> Result<Caller, ApiError> {
        match bearer(headers)? {
            Some(key) if key.starts_with(KEY_PREFIX) => Ok(Caller::Episode(self.by_key(key)?)),
            Some(key) if self.0.config.open_inference || self.is_admin(key) => Ok(Caller::Open),
            None if self.0.config.open_inference => Ok(Caller::Open),
            Some(_) => Err(unauthorized("invalid_api_key", "this is not the key of an episode")),
            None => Err(unauthorized("missing_api_key", "an episode's key is required")),
        }
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

    async fn body(&self, body: Body) -> Result<Bytes, ApiError> {
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

/// Parses a JSON body; an empty one is an empty object.
fn parse<'de, T: serde::Deserialize<'de>>(body: &'de [u8]) -> Result<T, ApiError> {
    let body = if body.is_empty() { b"{}" } else { body };
    let mut json = serde_json::Deserializer::from_slice(body);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|e| ApiError::json(&e))?;
    match json.end() {
        Ok(()) => Ok(value),
        Err(e) => Err(ApiError::new(StatusCode::BAD_REQUEST, "invalid_json", format!("after the body: {e}"))),
    }
}
