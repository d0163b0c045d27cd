//! The HTTP service against a node that follows a script.
#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a test fails by panicking; a measurement prints")]

mod chat;
mod completions;
mod cost;
mod cycle;
mod messages;
mod refusals;
mod responses;
mod streaming;
mod support;
