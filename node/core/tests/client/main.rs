//! Whole nodes over the memory network, in virtual time: what a client sees of its servers and leaders.
#![expect(clippy::unwrap_used, reason = "a test's helper fails its test by panicking")]
#![allow(clippy::large_futures, reason = "a test runs one node a task; the stack is large enough")]

mod compute;
mod failover;
mod leases;
mod stop;
mod world;
