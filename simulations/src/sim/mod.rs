//! A run: every node's logic on a simulated network, disk and clock, on one thread, from one seed.
//!
//! ```text
//! setup ─ models, jobs ─▶ safety phase ─ faults, checkers after every event ─▶ heal ─▶ liveness ─▶ audit of all disks
//! ```

mod agent;
mod clock;
mod compute;
mod disk;
mod faults;
mod kept;
mod key;
mod member;
mod node;
mod observer;
mod recorder;
mod setup;
mod watcher;
mod world;

pub use kept::LeftOut;
pub(crate) use recorder::Recorded;
pub use recorder::Violation;
pub use world::Load;
pub(crate) use world::{Ended, World};
