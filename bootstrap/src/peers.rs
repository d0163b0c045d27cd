//! The book of peers: where each may be dialled, how we know, and when that last worked.
//!
//! Bounded, ordered and serialisable, so that a node keeps it in its store and finds the mesh again after a restart
//! without any bootstrap node.

use libp2p::Multiaddr;
use serde::{Deserialize, Serialize};
use starling_protocol::NodeId;
use std::collections::BTreeMap;

/// Most peers in the book: about 1 KiB each with all their addresses, so 4 MiB.
pub const PEERS_MAX: usize = 4096;
/// Most addresses of one peer: two transports × two IP versions × a few interfaces, and a relay.
pub const ADDRESSES_MAX: usize = 16;

/// Who told us an address. Later variants never replace what an earlier one said.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// The configuration.
    Config,
    /// An invite ticket.
    Ticket,
    /// This book, as it was kept at the last run.
    Cache,
    /// The peer itself, over a connection.
    Identify,
    /// A signed node record.
    Record,
    /// Another peer's routing table.
    Kademlia,
    /// The local network.
    Mdns,
}

/// Anything that knows peers at start.
pub trait PeerSource {
    /// What kind of source this is.
    fn source(&self) -> Source;
    /// The peers, with their addresses (no `/p2p` at the end).
    fn peers(&self) -> Vec<(NodeId, Vec<Multiaddr>)>;
}

/// One address of a peer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownAddress {
    /// The address, without `/p2p` at the end.
    pub address: Multiaddr,
    /// Who said so first.
    pub source: Source,
    /// When a connection to it last worked, in milliseconds since the epoch; 0 for never.
    pub last_seen_ms: u64,
    /// Dials that failed since then.
    pub failures: u32,
}

/// Peers and their addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerBook {
    peers: BTreeMap<NodeId, Vec<KnownAddress>>,
}

impl PeerBook {
    /// An empty book.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Notes an address; says whether it is new. A full book drops what was seen longest ago.
    pub fn add(&mut self, node: NodeId, address: Multiaddr, source: Source) -> bool {
        if !self.peers.contains_key(&node) && self.peers.len() >= PEERS_MAX {
            self.forget_oldest_peer();
        }
        let list = self.peers.entry(node).or_default();
        if let Some(known) = list.iter_mut().find(|k| k.address == address) {
            known.source = known.source.min(source);
            return false;
        }
        if list.len() >= ADDRESSES_MAX {
            // The least useful one goes: never seen, told by the weakest source, failed most often.
            let worst = (0..list.len()).max_by_key(|i| (rank(&list[*i]), *i));
            worst.map(|i| list.remove(i));
        }
        list.push(KnownAddress { address, source, last_seen_ms: 0, failures: 0 });
        true
    }

    /// Adds all peers of `source`.
    pub fn add_all(&mut self, source: &dyn PeerSource) {
        for (node, addresses) in source.peers() {
            for address in addresses {
                self.add(node, address, source.source());
            }
        }
    }

    /// A connection to this address works.
    pub fn seen(&mut self, node: NodeId, address: &Multiaddr, now_ms: u64) {
        if let Some(known) = self.find(node, address) {
            known.last_seen_ms = known.last_seen_ms.max(now_ms);
            known.failures = 0;
        }
    }

    /// A dial to this address failed.
    pub fn failed(&mut self, node: NodeId, address: &Multiaddr) {
        if let Some(known) = self.find(node, address) {
            known.failures = known.failures.saturating_add(1);
        }
    }

    /// Forgets all failures: after a restart, everything is worth a try.
    pub fn forgive(&mut self) {
        self.peers.values_mut().flatten().for_each(|k| k.failures = 0);
    }

    /// Forgets an address that is certainly wrong (another node answers there).
    pub fn remove(&mut self, node: NodeId, address: &Multiaddr) {
        if let Some(list) = self.peers.get_mut(&node) {
            list.retain(|k| k.address != *address);
        }
    }

    /// Where to dial `node`, the best first.
    #[must_use]
    pub fn addresses(&self, node: NodeId) -> Vec<Multiaddr> {
        let mut list: Vec<&KnownAddress> = self.peers.get(&node).into_iter().flatten().collect();
        list.sort_by_key(|k| rank(k));
        list.into_iter().map(|k| k.address.clone()).collect()
    }

    /// What is known of `node`.
    #[must_use]
    pub fn known(&self, node: NodeId) -> &[KnownAddress] {
        self.peers.get(&node).map_or(&[], Vec::as_slice)
    }

    /// All peers in the book, ascending.
    pub fn nodes(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.peers.keys().copied()
    }

    /// The peers that were connected at some time, most recently seen first.
    #[must_use]
    pub fn seen_nodes(&self) -> Vec<NodeId> {
        let mut seen: Vec<(u64, NodeId)> =
            self.peers.iter().map(|(n, l)| (last_seen(l), *n)).filter(|(t, _)| *t > 0).collect();
        seen.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
        seen.into_iter().map(|(_, n)| n).collect()
    }

    /// How many peers are in the book.
    #[must_use]
    pub fn len(&self) -> usize {
        self.peers.len()
    }

    /// Whether the book is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.peers.is_empty()
    }

    fn find(&mut self, node: NodeId, address: &Multiaddr) -> Option<&mut KnownAddress> {
        self.peers.get_mut(&node)?.iter_mut().find(|k| k.address == *address)
    }

    fn forget_oldest_peer(&mut self) {
        let oldest = self.peers.iter().min_by_key(|(n, l)| (last_seen(l), **n)).map(|(n, _)| *n);
        if let Some(node) = oldest {
            self.peers.remove(&node);
        }
    }
}

impl PeerSource for PeerBook {
    fn source(&self) -> Source {
        Source::Cache
    }
    fn peers(&self) -> Vec<(NodeId, Vec<Multiaddr>)> {
        self.peers.keys().map(|n| (*n, self.addresses(*n))).collect()
    }
}

fn last_seen(list: &[KnownAddress]) -> u64 {
    list.iter().map(|k| k.last_seen_ms).max().unwrap_or(0)
}

/// Smaller is better: works now, then seen last, then by source.
fn rank(k: &KnownAddress) -> (u32, std::cmp::Reverse<u64>, Source) {
    (k.failures, std::cmp::Reverse(k.last_seen_ms), k.source)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(port: u16) -> Multiaddr {
        format!("/ip4/10.0.0.1/tcp/{port}").parse().unwrap()
    }

    #[test]
    fn addresses_that_work_come_first_and_failures_last() {
        let (mut book, node) = (PeerBook::new(), NodeId([1; 32]));
        for port in 1..=3 {
            assert!(book.add(node, address(port), Source::Kademlia));
        }
        assert!(!book.add(node, address(3), Source::Config), "known");
        book.failed(node, &address(1));
        book.seen(node, &address(2), 50);
        assert_eq!(book.addresses(node), [address(2), address(3), address(1)]);
        book.seen(node, &address(1), 60);
        assert_eq!(book.addresses(node)[0], address(1));
        book.remove(node, &address(1));
        assert_eq!(book.addresses(node), [address(2), address(3)]);
    }

    #[test]
    fn the_book_is_bounded_and_keeps_what_works() {
        let (mut book, node) = (PeerBook::new(), NodeId([1; 32]));
        book.add(node, address(1), Source::Identify);
        book.seen(node, &address(1), 5);
        for port in 2..200 {
            book.add(node, address(port), Source::Kademlia);
        }
        assert_eq!(book.known(node).len(), ADDRESSES_MAX);
        assert_eq!(book.addresses(node)[0], address(1));
        for i in 0..u16::try_from(PEERS_MAX + 10).unwrap() {
            let mut id = [9; 32];
            id[..2].copy_from_slice(&i.to_be_bytes());
            book.add(NodeId(id), address(1), Source::Kademlia);
        }
        assert_eq!(book.len(), PEERS_MAX);
        assert_eq!(book.seen_nodes(), [node]);
    }

    #[test]
    fn the_book_survives_the_store() {
        let (mut book, node) = (PeerBook::new(), NodeId([1; 32]));
        book.add(node, address(1), Source::Ticket);
        book.seen(node, &address(1), 5);
        let bytes = starling_protocol::codec::encode(&book);
        let back: PeerBook = starling_protocol::codec::decode("peer book", &bytes, 1 << 20).unwrap();
        assert_eq!(back, book);
        let mut fresh = PeerBook::new();
        fresh.add_all(&back);
        assert_eq!(fresh.known(node)[0].source, Source::Cache);
    }
}
