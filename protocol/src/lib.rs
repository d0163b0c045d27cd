//! The sans-IO core of Starling: ids, wire types, state machines and checks.
//!
//! Nothing here opens a socket or a file, reads a clock or draws a random number. Time comes in as
//! [`Timestamp`], randomness as seeds, and what must happen comes out as values. The same code runs
//! in a node, in the simulator and in a property test.
//!
//! The way of an episode through the types, one direction:
//!
//! ```text
//! TaskSet ─▶ Ledger ─▶ Assignment ─▶ TimelineTree ─▶ Rollout ─▶ SealedRollout ─▶ VerifiedRollout
//!        ─▶ RolloutGroup ─▶ TrainingBatch ─▶ StepCommitted
//! ```
#![forbid(unsafe_code)]

pub mod advantage;
pub mod alarm;
pub mod algorithm;
pub mod assignment;
pub mod codec;
pub mod control;
pub mod ids;
pub mod job;
pub mod ledger;
pub mod lineage;
pub mod lora;
pub mod manifest;
pub mod placement;
pub mod planted;
pub mod record;
pub mod repair;
pub mod rollout;
pub mod signed;
pub mod task;
pub mod time;
pub mod timeline;
pub mod transfer;
pub mod wire;

pub use ids::{
    EpisodeId, EpisodeKey, GroupId, Hash, JobId, ModelName, NodeId, PolicyVersion, RolloutId, StoreId, TaskRef, Term,
};
pub use lineage::{Line, Lineage};
pub use time::Timestamp;
