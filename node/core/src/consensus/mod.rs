//! Agreement: one Raft group (openraft) per model, on what its log says.
//!
//! [`Groups`] is the entry. A group's leader is the model's optimizer leader, its term the fencing token. Nothing
//! but a committed entry is authority: an isolated leader goes on calling itself one, so [`LeaderView::is_self`]
//! asks for a quorum that answered a short while ago, and a proposal is fenced by the term in which it was made.
//!
//! ```text
//! propose ─▶ raft ─▶ log_store (synced) ─▶ network ─▶ quorum ─▶ state_machine ─▶ ModelState::apply ─▶ feed
//! ```
//!
//! See `docs/consensus.md`.

mod autopilot;
mod config;
mod disk;
mod errors;
mod gate;
mod group;
mod groups;
mod handover;
mod lines;
mod log_store;
mod network;
mod pilot;
mod propose;
mod state_machine;
mod succession;
mod supervise;
mod survey;
mod type_config;
mod view;

pub use config::GroupConfig;
pub use disk::stored_states;
pub use errors::{CreateError, GroupError, JoinError, ProposeError, ReadError, ReopenError};
pub use groups::Groups;
pub use type_config::{LogPayload, Seat, TypeConfig};
pub use view::LeaderView;
