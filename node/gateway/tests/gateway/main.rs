//! The HTTP service against a node that follows a script.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod chat;
mod cycle;
mod refusals;
mod streaming;
mod support;
