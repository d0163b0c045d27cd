//! Invite tickets: one line of text that says which mesh, and where its first nodes are.
//!
//! `starling1` + base32 (RFC 4648, lower case, no padding) of: version byte, postcard body, 4 bytes of blake3 over both.

use crate::identity::peer_id_of;
use crate::peers::{PeerSource, Source};
use libp2p::Multiaddr;
use libp2p::multiaddr::Protocol;
use serde::{Deserialize, Serialize};
use starling_protocol::codec::{DecodeError, decode, encode};
use starling_protocol::{Hash, NodeId};
use std::fmt;
use std::str::FromStr;

/// What every ticket starts with.
pub const TICKET_PREFIX: &str = "starling1";
/// Longest ticket in bytes of text: 16 nodes × 8 addresses × about 60 bytes, in base32.
pub const TICKET_LEN_BYTES_MAX: usize = 12 << 10;
/// Most nodes in a ticket.
pub const TICKET_NODES_MAX: usize = 16;
/// Longest mesh name in bytes.
pub const MESH_NAME_LEN_BYTES_MAX: usize = 64;

const VERSION: u8 = 1;
const CHECKSUM_LEN: usize = 4;

/// An invitation to a mesh. Not a secret: it proves nothing, it only says where to knock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket {
    /// The mesh's name, for people.
    pub mesh: String,
    /// The mesh itself.
    pub network: Hash,
    /// Nodes to knock at, with their addresses as multiaddr text.
    pub nodes: Vec<(NodeId, Vec<String>)>,
    /// No longer valid after this time, in milliseconds since the epoch.
    pub expires_ms: Option<u64>,
}

/// Why a text is no ticket. Nothing was changed by it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TicketError {
    /// Not a ticket at all.
    #[error("ticket: expected it to start with `{TICKET_PREFIX}`, got {got:?}")]
    Prefix {
        /// Its first characters.
        got: String,
    },
    /// Too much text.
    #[error("ticket: expected at most {TICKET_LEN_BYTES_MAX} bytes, got {got}")]
    TooLong {
        /// Its length.
        got: usize,
    },
    /// A character that base32 has not.
    #[error("ticket: expected a-z or 2-7 at character {position}, got {got:?}")]
    Character {
        /// Counted from 1, prefix included, white space not.
        position: usize,
        /// What is there.
        got: char,
    },
    /// The text ends too early.
    #[error("ticket: cut off after {got} characters; copy it whole")]
    Truncated {
        /// How many there are.
        got: usize,
    },
    /// Some character is wrong, or the end is missing.
    #[error("ticket: checksum does not match (mistyped or cut off?): expected {expected}, got {got}")]
    Checksum {
        /// Computed from the content.
        expected: String,
        /// Written in the ticket.
        got: String,
    },
    /// From another version of the program.
    #[error("ticket: version: expected {VERSION}, got {got}")]
    Version {
        /// Its version.
        got: u8,
    },
    /// The checksum matches and the content is nonsense.
    #[error("ticket: body: {0}")]
    Body(#[from] DecodeError),
    /// The mesh's name is empty or too long.
    #[error("ticket: mesh: expected 1 to {MESH_NAME_LEN_BYTES_MAX} bytes, got {got}")]
    MeshName {
        /// Its length.
        got: usize,
    },
    /// No node, or too many.
    #[error("ticket: nodes: expected 1 to {TICKET_NODES_MAX}, got {got}")]
    Nodes {
        /// How many.
        got: usize,
    },
    /// A node id that no node can have.
    #[error("ticket: nodes: expected an ed25519 public key, got {node}")]
    NotANode {
        /// What is there.
        node: NodeId,
    },
    /// A node without an address.
    #[error("ticket: addresses of {node}: expected at least one, got none")]
    NoAddresses {
        /// Whose.
        node: NodeId,
    },
    /// An address that is none.
    #[error(
        "ticket: addresses of {node}: expected a multiaddr like /ip4/203.0.113.7/udp/4001/quic-v1, got {address:?}: {reason}"
    )]
    Address {
        /// Whose.
        node: NodeId,
        /// What is there.
        address: String,
        /// What is wrong with it.
        reason: String,
    },
}

impl Ticket {
    /// The ticket as text.
    ///
    /// # Errors
    /// [`TicketError`] when a field is not what [`Ticket::parse`] would take, so that no ticket is given out that
    /// nobody can use.
    pub fn encode(&self) -> Result<String, TicketError> {
        self.check()?;
        let mut bytes = vec![VERSION];
        bytes.extend(encode(self));
        let sum = checksum(&bytes);
        bytes.extend(sum);
        let text = format!("{TICKET_PREFIX}{}", base32().encode(&bytes));
        if text.len() > TICKET_LEN_BYTES_MAX {
            return Err(TicketError::TooLong { got: text.len() });
        }
        Ok(text)
    }

    /// Reads a ticket. White space (line breaks of a mail) and upper case do no harm.
    ///
    /// # Errors
    /// [`TicketError`], naming the field, what was expected and what came.
    pub fn parse(text: &str) -> Result<Self, TicketError> {
        if text.len() > 2 * TICKET_LEN_BYTES_MAX {
            return Err(TicketError::TooLong { got: text.len() });
        }
        let text: String = text.chars().filter(|c| !c.is_whitespace()).map(|c| c.to_ascii_lowercase()).collect();
        if text.len() > TICKET_LEN_BYTES_MAX {
            return Err(TicketError::TooLong { got: text.len() });
        }
        let Some(body) = text.strip_prefix(TICKET_PREFIX) else {
            return Err(TicketError::Prefix { got: text.chars().take(16).collect() });
        };
        let base = TICKET_PREFIX.len();
        if let Some((i, got)) = body.chars().enumerate().find(|(_, c)| !matches!(c, 'a'..='z' | '2'..='7')) {
            return Err(TicketError::Character { position: base + i + 1, got });
        }
        // Only lengths of 1, 3 and 6 modulo 8, and stray bits at the end, remain: the end is missing.
        let bytes = base32().decode(body.as_bytes()).ok().ok_or(TicketError::Truncated { got: text.len() })?;
        let (content, sum) = match bytes.split_last_chunk::<CHECKSUM_LEN>() {
            Some((content, sum)) if content.len() > 1 => (content, sum),
            _ => return Err(TicketError::Truncated { got: text.len() }),
        };
        let expected = checksum(content);
        if expected != *sum {
            let hex = |b: &[u8]| data_encoding::HEXLOWER.encode(b);
            return Err(TicketError::Checksum { expected: hex(&expected), got: hex(sum) });
        }
        if content[0] != VERSION {
            return Err(TicketError::Version { got: content[0] });
        }
        let ticket: Self = decode("ticket", &content[1..], TICKET_LEN_BYTES_MAX)?;
        ticket.check()?;
        Ok(ticket)
    }

    /// Whether the ticket says that it is no longer valid.
    #[must_use]
    pub fn is_expired(&self, now_ms: u64) -> bool {
        self.expires_ms.is_some_and(|end| now_ms > end)
    }

    fn check(&self) -> Result<(), TicketError> {
        if self.mesh.is_empty() || self.mesh.len() > MESH_NAME_LEN_BYTES_MAX {
            return Err(TicketError::MeshName { got: self.mesh.len() });
        }
        if self.nodes.is_empty() || self.nodes.len() > TICKET_NODES_MAX {
            return Err(TicketError::Nodes { got: self.nodes.len() });
        }
        for (node, addresses) in &self.nodes {
            peer_id_of(*node).map_err(|e| TicketError::NotANode { node: e.node })?;
            if addresses.is_empty() {
                return Err(TicketError::NoAddresses { node: *node });
            }
            for address in addresses {
                parse_address(*node, address).map_err(|reason| TicketError::Address {
                    node: *node,
                    address: address.chars().take(120).collect(),
                    reason,
                })?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.encode().map_err(|_invalid| fmt::Error)?)
    }
}

impl FromStr for Ticket {
    type Err = TicketError;
    fn from_str(s: &str) -> Result<Self, TicketError> {
        Self::parse(s)
    }
}

impl PeerSource for Ticket {
    fn source(&self) -> Source {
        Source::Ticket
    }
    fn peers(&self) -> Vec<(NodeId, Vec<Multiaddr>)> {
        let parsed = |node: NodeId, list: &[String]| list.iter().filter_map(|a| parse_address(node, a).ok()).collect();
        self.nodes.iter().map(|(node, list)| (*node, parsed(*node, list))).collect()
    }
}

/// An address of `node`: multiaddr text, with or without its `/p2p/<peer id>` at the end, which is taken off.
///
/// # Errors
/// In words, when it is no multiaddr, starts with no host, or ends with another node's peer id.
pub fn parse_address(node: NodeId, text: &str) -> Result<Multiaddr, String> {
    let mut address: Multiaddr = text.parse().map_err(|e: libp2p::multiaddr::Error| e.to_string())?;
    if let Some(Protocol::P2p(peer)) = address.iter().last() {
        if Some(peer) != peer_id_of(node).ok() {
            return Err(format!("it names another peer, {peer}"));
        }
        address.pop();
    }
    match address.iter().next() {
        Some(
            Protocol::Ip4(_)
            | Protocol::Ip6(_)
            | Protocol::Dns(_)
            | Protocol::Dns4(_)
            | Protocol::Dns6(_)
            | Protocol::Dnsaddr(_),
        ) => Ok(address),
        _ => Err("it names no host; expected /ip4, /ip6 or /dns first".into()),
    }
}

fn checksum(content: &[u8]) -> [u8; CHECKSUM_LEN] {
    let mut sum = [0; CHECKSUM_LEN];
    sum.copy_from_slice(&blake3::hash(content).as_bytes()[..CHECKSUM_LEN]);
    sum
}

fn base32() -> data_encoding::Encoding {
    let mut spec = data_encoding::BASE32_NOPAD.specification();
    spec.symbols = "abcdefghijklmnopqrstuvwxyz234567".into();
    #[expect(clippy::expect_used, reason = "a constant")]
    spec.encoding().expect("32 symbols")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::Identity;
    use proptest::prelude::*;

    fn ticket() -> Ticket {
        let node = Identity::from_seed([7; 32]).node_id();
        Ticket {
            mesh: "demo".into(),
            network: Hash::of(b"demo"),
            nodes: vec![(node, vec!["/ip4/127.0.0.1/udp/4001/quic-v1".into(), "/ip4/127.0.0.1/tcp/4001".into()])],
            expires_ms: Some(1_000),
        }
    }

    fn raw(version: u8, body: &[u8]) -> String {
        let mut bytes = vec![version];
        bytes.extend(body);
        bytes.extend(checksum(&bytes));
        format!("{TICKET_PREFIX}{}", base32().encode(&bytes))
    }

    #[test]
    fn a_ticket_round_trips_wrapped_and_in_upper_case() {
        let t = ticket();
        let text = t.encode().unwrap();
        assert_eq!(Ticket::parse(&text).unwrap(), t);
        let wrapped: String =
            text.chars().enumerate().flat_map(|(i, c)| (i % 40 == 39).then_some('\n').into_iter().chain([c])).collect();
        assert_eq!(Ticket::parse(&format!("  {}\n", wrapped.to_uppercase())).unwrap(), t);
        assert!(!t.is_expired(1_000));
        assert!(t.is_expired(1_001));
    }

    #[test]
    fn errors_name_the_field_and_what_was_expected() {
        let t = ticket();
        let text = t.encode().unwrap();
        let error = |s: &str| Ticket::parse(s).unwrap_err().to_string();
        assert!(error("hello world").contains("start with `starling1`, got \"helloworld\""));
        assert!(error("starling1ab1c").contains("at character 12, got '1'"), "{}", error("starling1ab1c"));
        assert!(error("starling1").contains("cut off after 9"));
        assert!(error(&text[..text.len() - 8]).contains("checksum"));
        let typo = format!("{}{}", &text[..20], if &text[20..21] == "a" { "b" } else { "a" }) + &text[21..];
        assert!(error(&typo).contains("checksum"));
        assert!(error(&raw(9, &encode(&t))).contains("version: expected 1, got 9"));
        assert!(error(&raw(1, &[0xff; 3])).contains("body"));
        let with = |change: fn(&mut Ticket)| {
            let mut t = ticket();
            change(&mut t);
            (error(&raw(1, &encode(&t))), t.encode().unwrap_err().to_string())
        };
        for (change, expected) in [
            ((|t: &mut Ticket| t.nodes.clear()) as fn(&mut Ticket), "nodes: expected 1 to 16, got 0"),
            (|t| t.nodes[0].1.clear(), "expected at least one, got none"),
            (|t| t.nodes[0].1[0] = "/ip4/1.2.3/tcp/1".into(), "expected a multiaddr"),
            (|t| t.nodes[0].1[0] = "/tcp/1".into(), "names no host"),
            (|t| t.nodes[0].0 = NodeId([2; 32]), "ed25519"),
            (|t| t.mesh.clear(), "mesh: expected 1 to 64 bytes, got 0"),
            (
                |t| t.nodes[0].1[0] = format!("/ip4/1.2.3.4/tcp/1/p2p/{}", Identity::from_seed([8; 32]).peer_id()),
                "another peer",
            ),
        ] {
            let (parsed, encoded) = with(change);
            assert!(parsed.contains(expected), "{parsed}");
            assert_eq!(parsed, encoded);
        }
        assert!(error(&format!("starling1{}", "a".repeat(TICKET_LEN_BYTES_MAX))).contains("at most"));
    }

    #[test]
    fn a_ticket_is_a_peer_source_without_peer_ids_in_its_addresses() {
        let mut t = ticket();
        let peer = Identity::from_seed([7; 32]).peer_id();
        t.nodes[0].1[0] = format!("/ip4/127.0.0.1/udp/4001/quic-v1/p2p/{peer}");
        let peers = Ticket::parse(&t.encode().unwrap()).unwrap().peers();
        assert_eq!(peers[0].1[0].to_string(), "/ip4/127.0.0.1/udp/4001/quic-v1");
    }

    proptest! {
        #[test]
        fn noise_never_panics(s in ".{0,200}", b in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Ticket::parse(&s);
            let _ = Ticket::parse(&format!("starling1{s}"));
            let _ = Ticket::parse(&raw(1, &b));
            let _ = Ticket::parse(&format!("{TICKET_PREFIX}{}", base32().encode(&b)));
        }

        #[test]
        fn one_wrong_character_is_always_noticed(at in 0_usize..10_000, to in proptest::sample::select(b"abcdefghijklmnopqrstuvwxyz234567".to_vec())) {
            let text = ticket().encode().unwrap();
            let at = TICKET_PREFIX.len() + at % (text.len() - TICKET_PREFIX.len());
            let mut bytes = text.clone().into_bytes();
            prop_assume!(bytes[at] != to);
            bytes[at] = to;
            prop_assert!(Ticket::parse(std::str::from_utf8(&bytes).unwrap()).is_err());
        }
    }
}
