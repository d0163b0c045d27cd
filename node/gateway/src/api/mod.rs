//! The model APIs, a folder each: `request.rs` parses into [`crate::request::Request`] and refuses by name what is not
//! honoured, `response.rs` and `stream.rs` render what came of it.
//!
//! ```text
//! body ─▶ <api>/request.rs ─▶ Request ─▶ Calls (call.rs) ─▶ Answer (answer.rs) ─▶ <api>/response.rs or stream.rs
//! ```

pub(crate) mod anthropic;
pub(crate) mod content;
pub(crate) mod error;
pub(crate) mod fields;
pub(crate) mod openai_chat;
pub(crate) mod openai_completions;
pub(crate) mod openai_responses;
pub(crate) mod sse;

pub(crate) use error::ApiError;

use crate::call::{Caller, refuse_closed};
use crate::gateway::Gateway;
use axum::http::{HeaderMap, StatusCode};
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Who calls, and the place among the calls that are answered at a time. Refuses calls of episodes that are over.
pub(crate) fn admit(gateway: &Gateway, headers: &HeaderMap) -> Result<(Caller, OwnedSemaphorePermit), ApiError> {
    let caller = gateway.caller(headers)?;
    if let Caller::Episode(episode) = &caller {
        refuse_closed(episode, &episode.state().stage)?;
        if !gateway.0.backend.still_leased(episode.id()) {
            // The node's next `reap` closes it; until then nothing more is sampled for it.
            let message = format!("the lease of episode {} was lost; it is given to another", episode.id());
            return Err(ApiError::new(StatusCode::CONFLICT, "lease_lost", message));
        }
    }
    let permit = place(gateway, &gateway.0.in_flight)?;
    Ok((caller, permit))
}

/// One of the places among those calls that `places` counts; each may keep a whole body in memory.
pub(crate) fn place(gateway: &Gateway, places: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, ApiError> {
    Arc::clone(places).try_acquire_owned().map_err(|_full| {
        let max = gateway.0.config.in_flight_max;
        ApiError::new(
            StatusCode::TOO_MANY_REQUESTS,
            "too_many_calls",
            format!("{max} calls are being answered already"),
        )
    })
}

/// An id that nobody guesses: `prefix` and 128 random bits.
pub(crate) fn new_id(prefix: &str) -> String {
    format!("{prefix}{:032x}", rand::random::<u128>())
}
