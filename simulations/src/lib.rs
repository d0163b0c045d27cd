//! Deterministic simulation of the protocol's state machines: one seed, one trace.
//!
//! [`world::World`] runs the leader's ledger, the control log's state and a crowd of clients over a lossy,
//! reordering network in virtual time, with leaders that are replaced in the middle of anything. After every
//! event each file of [`invariants`] checks its property; a violation names the seed that reproduces it.
//!
//! The network, disk and Raft of a whole node join this world with the simulator of their own; what is here
//! is the part that needs neither.

pub mod invariants;
pub mod world;

pub use world::{Outcome, World};
