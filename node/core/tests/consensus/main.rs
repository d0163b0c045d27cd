//! Groups over the memory network and memory stores, in virtual time.
#![expect(clippy::unwrap_used, reason = "a test's helper fails its test by panicking")]
#![allow(clippy::large_futures, reason = "a test runs one node a task; the stack is large enough")]

mod agreement;
mod chaos;
mod disk;
mod lines;
mod members;
mod support;
