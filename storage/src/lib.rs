//! What a node keeps on disk, behind one trait with two implementations.
//!
//! [`Store`] is bytes in column families ([`Family`]) with atomic batches and two promises of
//! durability ([`Durability`]). [`RocksStore`] keeps them in RocksDB; [`MemoryStore`] is its twin for the
//! simulator and can lose what was not synced. Both pass the contract suite in `suite.rs`.
//!
//! The modules above the trait give the bytes a meaning and check it on the way in and out:
//!
//! | module | keeps | key |
//! |---|---|---|
//! | [`blobs`] | chunks of weights and files | blake3 of the bytes |
//! | [`rollouts`] | sealed envelopes, indexed by job | blake3 of the envelope |
//! | [`consumed`] | which step used a rollout up | rollout id |
//! | [`acknowledged`] | what this gateway promised to keep | rollout id |
//! | [`mod@store_id`] | which store this is | |
//! | [`quarantine`] | what was found corrupt | family, key |
//! | [`steps`] | committed steps, for audits | model, version |
//! | [`raft_log`] | log and metadata of a Raft group | model, index |
//! | [`mod@audit`] | nothing; compares the stores of many nodes | |
//! | [`mod@fsck`] | nothing; reads all of one store and mends it | |
//! | [`delta`] | nothing; new weights from old ones | |
//!
//! All functions block: call them from a blocking thread. None keeps state of its own, so a store may be
//! shared freely; a write that returned with [`Durability::Synced`] is there after any crash.

pub mod acknowledged;
pub mod audit;
pub mod blobs;
pub mod consumed;
pub mod delta;
mod disk;
pub mod error;
pub mod fsck;
pub mod memory;
pub mod quarantine;
pub mod raft_log;
pub mod rocks;
pub mod rollouts;
pub mod schema;
pub mod stat;
pub mod steps;
pub mod store;
pub mod store_id;
#[doc(hidden)]
pub mod suite;

pub use acknowledged::Acknowledged;
pub use audit::{AuditReport, audit};
pub use error::StoreError;
pub use fsck::{Finding, FsckReport, fsck};
pub use memory::MemoryStore;
pub use raft_log::{RaftLog, RaftMeta};
pub use rocks::{RocksOptions, RocksStore};
pub use store::{Batch, Durability, Family, KeyValue, Op, SharedStore, Store};
