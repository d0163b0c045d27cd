//! Signatures over typed messages. The key material lives in `bootstrap`; this crate only knows the shape.

use crate::ids::NodeId;
use serde::{Deserialize, Serialize};

/// Signs as one node. Implemented by the node's identity.
pub trait Signer: Send + Sync {
    /// The public key that verifies what [`Signer::sign`] returns.
    fn node_id(&self) -> NodeId;
    /// ed25519 signature (RFC 8032) of `message`, 64 bytes.
    fn sign(&self, message: &[u8]) -> Vec<u8>;
}

/// Verifies any node's signature.
pub trait Verifier: Send + Sync {
    /// Whether `signature` is `node`'s over `message`.
    fn verify(&self, node: NodeId, message: &[u8], signature: &[u8]) -> bool;

    /// Whether all signatures are good; a third of the time of verifying each where there are many.
    ///
    /// A signer can make a signature that passes here and not in [`Verifier::verify`] (ed25519 with a part of small order),
    /// but nobody can make one for another. So this is for what is passed on, not for what is counted.
    fn verify_all(&self, signed: &[SignedMessage<'_>]) -> bool {
        signed.iter().all(|s| self.verify(s.node, &s.message, s.signature))
    }
}

/// A message that should be signed.
#[derive(Clone, Debug)]
pub struct SignedMessage<'a> {
    /// By whom.
    pub node: NodeId,
    /// As [`Domain::message`] makes it.
    pub message: Vec<u8>,
    /// ed25519 (RFC 8032), 64 bytes.
    pub signature: &'a [u8],
}

/// What a signature is for. Signing covers the domain, so a signature of one kind never passes for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Domain {
    /// A sealed rollout.
    Rollout,
    /// A server's receipt for one turn.
    Receipt,
    /// A node record.
    NodeRecord,
}

impl Domain {
    fn prefix(self) -> &'static [u8] {
        match self {
            Self::Rollout => b"starling/rollout/1\0",
            Self::Receipt => b"starling/receipt/1\0",
            Self::NodeRecord => b"starling/node-record/1\0",
        }
    }
    /// The bytes that are signed for `body`: domain, then blake3 of the body.
    #[must_use]
    pub fn message(self, body: &[u8]) -> Vec<u8> {
        let mut m = self.prefix().to_vec();
        m.extend_from_slice(blake3::hash(body).as_bytes());
        m
    }
}

/// An ed25519 signature with its signer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signature {
    /// Who signed.
    pub signer: NodeId,
    /// 64 bytes, RFC 8032.
    #[serde(with = "serde_bytes")]
    pub bytes: Vec<u8>,
}

impl Signature {
    /// Signs `body` for `domain`.
    #[must_use]
    pub fn new(signer: &dyn Signer, domain: Domain, body: &[u8]) -> Self {
        Self { signer: signer.node_id(), bytes: signer.sign(&domain.message(body)) }
    }
    /// Whether this is a valid signature of `body` for `domain` by [`Signature::signer`].
    #[must_use]
    pub fn verifies(&self, verifier: &dyn Verifier, domain: Domain, body: &[u8]) -> bool {
        verifier.verify(self.signer, &domain.message(body), &self.bytes)
    }
    /// What [`Verifier::verify_all`] needs to know of this signature of `body` for `domain`.
    #[must_use]
    pub fn of(&self, domain: Domain, body: &[u8]) -> SignedMessage<'_> {
        SignedMessage { node: self.signer, message: domain.message(body), signature: &self.bytes }
    }
}
