//! How a node comes into a mesh: its identity key, invite tickets, and the book of peers it may dial.
//!
//! Everything here is about *who* and *where*; connections themselves are made by `starling-mesh`.

pub mod identity;
pub mod peers;
pub mod ticket;

pub use identity::{Ed25519Verifier, Identity, IdentityError, node_id_of, peer_id_of};
pub use peers::{PeerBook, PeerSource, Source};
pub use ticket::{Ticket, TicketError};
