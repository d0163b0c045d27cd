//! Verified records and places, shared by the nodes of one process.

use std::sync::{Arc, Mutex};

use hashbrown::HashMap;
use starling_protocol::NodeId;
use starling_protocol::record::{RecordError, SignedRecord};
use starling_protocol::signed::Verifier;

use super::directory::Directory;
use super::table::Known;
use crate::watch::lock;

/// The newest verified record of each node and a place for its id, for simulations: 10,000 nodes that know each other
/// would hold 10⁸ copies of both and verify each record. Only nodes that use the same [`Verifier`] may share one.
#[derive(Debug, Default)]
pub struct SharedRecords {
    newest: Mutex<HashMap<NodeId, Arc<Known>>>,
    directory: Arc<Directory>,
}

impl SharedRecords {
    pub(super) fn directory(&self) -> Arc<Directory> {
        self.directory.clone()
    }

    /// The verified record: the one that is there already if it is the same to the last byte.
    pub(super) fn verify(&self, signed: &SignedRecord, verifier: &dyn Verifier) -> Result<Arc<Known>, RecordError> {
        let node = signed.signature.signer;
        if let Some(known) = lock(&self.newest).get(&node).filter(|k| k.signed == *signed) {
            return Ok(known.clone());
        }
        let known = verified(signed, verifier)?;
        let mut newest = lock(&self.newest);
        if newest.get(&node).is_none_or(|k| k.record.sequence < known.record.sequence) {
            newest.insert(node, known.clone());
        }
        Ok(known)
    }
}

/// Checks a record that nobody here has checked before.
pub(super) fn verified(signed: &SignedRecord, verifier: &dyn Verifier) -> Result<Arc<Known>, RecordError> {
    let record = signed.verify(verifier)?;
    Ok(Arc::new(Known { record, signed: signed.clone() }))
}
