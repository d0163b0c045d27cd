//! Which nodes hold a blob: rendezvous (highest-random-weight) hashing, Thaler and Ravishankar 1998.
//!
//! Every node computes the same order from the same member list, without any coordination, and when a
//! node leaves only the blobs it held move.

use crate::ids::{Hash, NodeId};

/// The first `count` of `nodes` for `blob`, best first; fewer when there are fewer nodes.
#[must_use]
pub fn holders(blob: Hash, nodes: impl IntoIterator<Item = NodeId>, count: usize) -> Vec<NodeId> {
    let mut scored: Vec<([u8; 32], NodeId)> = nodes
        .into_iter()
        .map(|n| {
            let mut h = blake3::Hasher::new();
            h.update(&blob.0).update(&n.0);
            (*h.finalize().as_bytes(), n)
        })
        .collect();
    scored.sort_unstable_by(|a, b| b.cmp(a));
    scored.dedup();
    scored.truncate(count);
    scored.into_iter().map(|(_, n)| n).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(n: u8) -> Vec<NodeId> {
        (0..n).map(|i| NodeId([i; 32])).collect()
    }

    #[test]
    fn only_the_blobs_of_a_lost_node_move() {
        let all = nodes(7);
        for i in 0..200u32 {
            let blob = Hash::of(&i.to_le_bytes());
            let before = holders(blob, all.clone(), 2);
            let lost = all[3];
            let after = holders(blob, all.iter().copied().filter(|n| *n != lost), 2);
            for h in before.iter().filter(|h| **h != lost) {
                assert!(after.contains(h), "blob {i} left a live holder");
            }
        }
    }

    #[test]
    fn blobs_spread_over_the_nodes() {
        let mut held = [0u32; 5];
        for i in 0..1000u32 {
            for h in holders(Hash::of(&i.to_le_bytes()), nodes(5), 2) {
                held[h.0[0] as usize] += 1;
            }
        }
        assert!(held.iter().all(|c| (300..500).contains(c)), "{held:?}");
    }
}
