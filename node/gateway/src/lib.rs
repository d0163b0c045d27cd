//! The text side of an episode: an HTTP service that speaks OpenAI's and Anthropic's APIs to agents and token ids to the
//! mesh.
//!
//! ```text
//! agent ── POST /v1/episodes ─────────▶ claim a lease, open a timeline tree, hand out a key
//! agent ── POST /v1/chat/completions ─▶ request ▶ plan (known prefix) ▶ prompt ids ▶ Backend::generate
//!          or /responses, /messages, …
//!       ◀── text, tool calls ────────── tokens ▶ detokenise ▶ stop strings ▶ tool parser; turn ▶ tree
//! agent ── POST /v1/episodes/…/end ───▶ tree ▶ Rollout ▶ Backend::seal ▶ RolloutId
//! ```
//!
//! What the service needs of its node is the trait [`Backend`]. The node merges [`Gateway::router`] with its
//! other routes; the agent runner uses [`Gateway::begin_with`], [`Gateway::end`] and [`Gateway::abort`] in process.
//! Routes, fields and errors: `docs/http.md`.
#![forbid(unsafe_code)]

mod answer;
mod api;
mod backend;
mod call;
mod episode;
mod gateway;
mod http;
pub mod null;
mod request;
pub mod text;

pub use backend::{AnswerEvent, Backend, BackendError, ClaimError, ClaimRequest, GenerateStream, ModelInfo, SealError};
pub use gateway::{AbortError, BeginError, EndError, EpisodeHandle, EpisodeInfo, Gateway, GatewayConfig};
