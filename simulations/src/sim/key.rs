//! Identities without cryptography: a signature is a hash that names its signer. No node of a simulation breaks
//! cryptography; a dishonest one sends what does not verify.

use starling_protocol::signed::{Signer, Verifier};
use starling_protocol::{Hash, NodeId};

/// A node's key; also verifies any other's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SimKey(pub(crate) NodeId);

impl SimKey {
    /// The key of the node called `name`: ids are spread evenly, as public keys are.
    pub(crate) fn named(name: &str) -> Self {
        Self(NodeId(Hash::of(name.as_bytes()).0))
    }
}

fn signature(node: NodeId, message: &[u8]) -> Vec<u8> {
    let mut h = blake3::Hasher::new();
    h.update(&node.0);
    h.update(message);
    let mut out = vec![0; 64];
    h.finalize_xof().fill(&mut out);
    out
}

impl Signer for SimKey {
    fn node_id(&self) -> NodeId {
        self.0
    }
    fn sign(&self, message: &[u8]) -> Vec<u8> {
        signature(self.0, message)
    }
}

impl Verifier for SimKey {
    fn verify(&self, node: NodeId, message: &[u8], given: &[u8]) -> bool {
        signature(node, message) == given
    }
}
