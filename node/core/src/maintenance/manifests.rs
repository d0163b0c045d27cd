//! What the models' states name: who else has it, and copies for what lies on too few nodes.

use super::sweep::Piece;
use super::{BLOB_REPLICATION, Maintenance};
use crate::runtime::blocking;
use starling_protocol::Hash;
use starling_protocol::manifest::Manifest;
use starling_protocol::repair::Holders;
use starling_storage::blobs::missing_chunks;
use std::collections::{BTreeMap, BTreeSet};

impl Maintenance {
    /// Checks the first manifest after `after`, in the order of their hashes: one question of 32 bytes a chunk to each
    /// node of its window, answered from an index, and at most one transfer to each of two nodes.
    pub(super) async fn sweep_manifest(&self, after: Option<Hash>, holders: &Holders, leaving: bool) -> Piece<Hash> {
        let needed: BTreeMap<Hash, Manifest> = self
            .states()
            .iter()
            .flat_map(|(_, s)| s.needed_manifests().map(|m| (m.hash, m.clone())).collect::<Vec<_>>())
            .collect();
        let mut rest = needed.into_iter().filter(|(hash, _)| after.is_none_or(|a| *hash > a));
        let Some((hash, manifest)) = rest.next() else { return Piece::default() };
        let mut piece = Piece { next: rest.next().map(|_| hash), ..Piece::default() };
        let (store, m) = (self.parts.store.clone(), manifest.clone());
        match blocking(move || missing_chunks(&*store, &m)).await {
            Ok(Ok(missing)) if missing.is_empty() => {}
            // Those that have it look after it.
            Ok(Ok(_)) | Err(_) => return piece,
            Ok(Err(e)) => {
                self.tell_trouble(Some(format!("reading the index of chunks: {e}")));
                piece.uncertain += 1;
                return piece;
            }
        }
        let local = self.parts.node;
        let window = holders.window(hash, BLOB_REPLICATION);
        let others = window.iter().copied().filter(|n| *n != local && !holders.away.contains(n));
        let asked = others.map(|node| {
            let chunks = manifest.chunks.clone();
            async move { (node, self.parts.blobs.lacks(node, chunks).await) }
        });
        let mut have = BTreeSet::new();
        for (node, said) in futures::future::join_all(asked).await {
            match said {
                Ok(lacks) if lacks.is_empty() => drop(have.insert(node)),
                Ok(_) => {}
                Err(why) => {
                    self.tell_trouble(Some(format!("{} does not say which chunks it has: {why}", node.short())));
                    piece.uncertain += 1;
                    have.insert(node);
                }
            }
        }
        for target in holders.targets(local, &window, &have, BLOB_REPLICATION, leaving) {
            match self.parts.blobs.place(target, vec![manifest.clone()], None).await {
                Ok(()) => {
                    tracing::info!(manifest = %hash.short(), to = %target.short(), "chunks on too few nodes were copied");
                    piece.restored += 1;
                }
                Err(why) => {
                    self.tell_trouble(Some(format!("{} does not take chunks: {why}", target.short())));
                    piece.uncertain += 1;
                }
            }
        }
        piece
    }
}
