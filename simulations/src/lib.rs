//! Deterministic simulation of whole nodes: one seed, one trace.
//!
//! Everything of a node above the wire runs unchanged, Raft included: [`starling_core`]'s logic on a simulated network,
//! disk and clock, in virtual time, on one thread. What is modelled are devices (tokens and weights are hashes that take
//! time) and agent programs.
//!
//! ```text
//! scenario.toml ─▶ scenario ─ seed ─▶ sim: nodes, faults ─ events ─▶ oracle, invariants, trace ─▶ run::Outcome ─▶ report
//! ```
//!
//! See `docs/simulation.md`.

pub mod event;
pub mod invariants;
pub mod oracle;
pub mod report;
pub mod run;
pub mod scenario;
mod sim;

#[cfg(feature = "planted-bugs")]
pub use run::run_planted;
pub use run::{Outcome, replays, run, run_all};
pub use scenario::Scenario;
pub use sim::{LeftOut, Load, Violation};
