//! What can go wrong at start, and what is told of dials that failed.

use libp2p::{Multiaddr, TransportError};
use starling_protocol::NodeId;
use std::error::Error;
use std::io;
use std::time::SystemTime;

/// Why a mesh does not start. Nothing keeps running.
#[derive(Debug, thiserror::Error)]
pub enum MeshError {
    /// An address cannot be listened on. The configuration's fault, or another program has the port.
    #[error("cannot listen on {address}: {reason}")]
    Listen {
        /// Which.
        address: Multiaddr,
        /// Why.
        reason: String,
    },
    /// The transports or protocols cannot be set up: which, and why.
    #[error("cannot set up {what}: {reason}")]
    Setup {
        /// Which part.
        what: &'static str,
        /// Why.
        reason: String,
    },
    /// The driver ended before it was ready.
    #[error("the mesh stopped while it was starting")]
    Stopped,
}

/// An address that could not be dialled, as `starling status` shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DialReport {
    /// Whose address.
    pub peer: NodeId,
    /// The address, or what was looked for when there is none.
    pub address: String,
    /// Why it failed.
    pub error: String,
    /// When, the last time.
    pub at: SystemTime,
    /// When it failed first, of the failures since the last connection with this peer.
    pub since: SystemTime,
}

/// A dial error in plain words: the deepest cause, without the names of the layers above it.
pub(crate) fn plain(error: &TransportError<io::Error>) -> String {
    match error {
        TransportError::MultiaddrNotSupported(_) => "this kind of address is not supported".into(),
        TransportError::Other(e) => plain_io(e),
    }
}

pub(crate) fn plain_io(error: &io::Error) -> String {
    // libp2p wraps errors many layers deep: the last one says what happened.
    let mut deepest: &(dyn Error + 'static) = error;
    loop {
        // An io::Error hides the error it was made of from `source`.
        let next = match deepest.downcast_ref::<io::Error>() {
            Some(io) => io.get_ref().map(|e| e as &(dyn Error + 'static)),
            None => deepest.source(),
        };
        match next {
            Some(next) => deepest = next,
            None => break,
        }
    }
    let text = deepest.to_string();
    let lower = text.to_lowercase();
    if lower.contains("timeout") || lower.contains("timed out") {
        "timeout: nothing answered".into()
    } else if lower.contains("connection refused") {
        "connection refused: nothing listens there".into()
    } else {
        text
    }
}
