//! The HTTP service against a node that follows a script.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod chat;
mod completions;
mod cycle;
mod messages;
mod refusals;
mod repeats;
mod responses;
mod streaming;
mod support;
