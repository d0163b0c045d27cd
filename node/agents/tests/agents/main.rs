//! The runner with real programs and a host that keeps books.
#![expect(clippy::unwrap_used, reason = "in a test a failure is a panic")]

mod killed_node;
mod leases;
mod per_episode;
mod support;
mod worker;
