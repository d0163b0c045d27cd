//! The mesh: `starling_core`'s [`Transport`](starling_core::transport::Transport) over libp2p.
//!
//! One task, the driver, owns the swarm: connections, discovery, gossip. Calls and generation streams do not pass
//! through it: a caller asks the connection for a substream and then talks to the peer itself, so that many small
//! calls cost two task switches and no lock that is held for long. See `docs/mesh.md`.

mod behaviour;
mod calls;
mod codec;
mod config;
mod dial;
mod driver;
mod error;
mod links;
mod mesh;
mod on_connection;
mod on_discovery;
mod on_gossip;
mod score;
mod shared;
mod streams;
mod substreams;

pub use config::{Limits, MeshConfig};
pub use error::{DialReport, MeshError};
pub use mesh::Mesh;
