//! A page of the rollouts that this node has: who else has them, and copies for those that lie on too few nodes.

use super::Maintenance;
use super::sweep::Piece;
use crate::runtime::blocking;
use starling_protocol::repair::Holders;
use starling_protocol::rollout::SealedRollout;
use starling_protocol::{JobId, NodeId, RolloutId};
use starling_storage::{StoreError, rollouts};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Rows of the index in a page: 24 KiB, and a question of at most 16 KiB to each node of a window.
const PAGE_ROWS: usize = 512;
/// Bytes of rollouts sent in one piece of work. In memory once, whatever the number of holders.
const SENT_BYTES_MAX: usize = 16 << 20;
/// Copies of a rollout whose job this node does not know: the default of a job.
const REPLICATION_DEFAULT: usize = 2;

type Cursor = (JobId, RolloutId);

/// A rollout that lies on too few nodes.
struct Short {
    job: JobId,
    id: RolloutId,
    targets: Vec<NodeId>,
}

impl Maintenance {
    /// Checks the page after `after`; returns it with the number of rollouts looked at.
    pub(super) async fn sweep_rollouts(
        &self,
        after: Option<Cursor>,
        holders: &Holders,
        leaving: bool,
    ) -> (Piece<Cursor>, u64) {
        let store = self.parts.store.clone();
        let rows = match blocking(move || rollouts::page(&*store, after, PAGE_ROWS)).await {
            Ok(Ok(rows)) => rows,
            Ok(Err(e)) => {
                tracing::error!(error = %e, "cannot read the index of rollouts");
                self.tell_trouble(Some(format!("reading the index of rollouts: {e}")));
                return (Piece { uncertain: 1, ..Piece::default() }, 0);
            }
            Err(_stopped) => return (Piece::default(), 0),
        };
        let end = rows.last().filter(|_| rows.len() == PAGE_ROWS).map(|(job, id, _)| (*job, *id));
        let unconsumed: Vec<Cursor> =
            rows.into_iter().filter(|(_, _, by)| by.is_none()).map(|(job, id, _)| (job, id)).collect();
        let checked = unconsumed.len() as u64;
        let (short, silent) = self.find_short(unconsumed, holders, leaving).await;
        let mut piece = self.send_copies(short).await;
        piece.uncertain += silent;
        // Cut at the limit of bytes: the rest of the page comes next time.
        piece.next = piece.next.or(end);
        (piece, checked)
    }

    /// Which of `rows` this node must send where; and of how many a node that may have them did not answer.
    async fn find_short(&self, rows: Vec<Cursor>, holders: &Holders, leaving: bool) -> (Vec<Short>, u64) {
        let local = self.parts.node;
        let replication: BTreeMap<JobId, usize> = self
            .states()
            .iter()
            .flat_map(|(_, s)| s.jobs.iter().map(|j| (j.job, usize::from(j.spec.replication))).collect::<Vec<_>>())
            .collect();
        let mut windows = Vec::with_capacity(rows.len());
        let mut questions: BTreeMap<NodeId, Vec<RolloutId>> = BTreeMap::new();
        for (job, id) in rows {
            let copies = replication.get(&job).copied().unwrap_or(REPLICATION_DEFAULT);
            let window = holders.window(id, copies);
            for node in window.iter().filter(|n| **n != local && !holders.away.contains(n)) {
                questions.entry(*node).or_default().push(id);
            }
            windows.push((job, id, copies, window));
        }
        let asked = questions.into_iter().map(|(node, ids)| async move {
            let said = self.parts.rollouts.have(node, ids.clone()).await;
            (node, ids, said)
        });
        let mut have: BTreeMap<RolloutId, BTreeSet<NodeId>> = BTreeMap::new();
        let (mut consumed, mut silent) = (BTreeSet::new(), BTreeSet::new());
        for (node, ids, said) in futures::future::join_all(asked).await {
            let held = match said {
                Ok((held, used)) => {
                    consumed.extend(used);
                    held
                }
                // A node that lives and does not answer may have them. If it is dead, that will be known soon.
                Err(why) => {
                    self.tell_trouble(Some(format!("{} does not say which rollouts it has: {why}", node.short())));
                    silent.extend(ids.iter().copied());
                    ids
                }
            };
            for id in held {
                have.entry(id).or_default().insert(node);
            }
        }
        let nobody = BTreeSet::new();
        let mut short = Vec::new();
        for (job, id, copies, window) in windows {
            if consumed.contains(&id) {
                continue;
            }
            let targets = holders.targets(local, &window, have.get(&id).unwrap_or(&nobody), copies, leaving);
            if !targets.is_empty() {
                short.push(Short { job, id, targets });
            }
        }
        (short, silent.len() as u64)
    }

    /// Sends copies until the limit of bytes; then [`Piece::next`] is the last rollout dealt with.
    async fn send_copies(&self, short: Vec<Short>) -> Piece<Cursor> {
        if short.is_empty() {
            return Piece::default();
        }
        let store = self.parts.store.clone();
        let read = blocking(move || {
            let (mut loaded, mut corrupt, mut bytes) = (Vec::new(), Vec::new(), 0);
            let mut next = None;
            for s in short {
                match rollouts::get_rollout(&*store, s.id) {
                    Ok(Some(body)) => {
                        bytes += body.len();
                        loaded.push((Arc::new(SealedRollout { id: s.id, bytes: body }), s.targets));
                    }
                    Ok(None) => {}
                    Err(StoreError::Corrupt { reason, .. }) => corrupt.push((s.id, reason)),
                    Err(e) => tracing::warn!(rollout = %s.id.short(), error = %e, "cannot read a rollout"),
                }
                if bytes >= SENT_BYTES_MAX {
                    next = Some((s.job, s.id));
                    break;
                }
            }
            (loaded, corrupt, next)
        });
        let Ok((loaded, corrupt, next)) = read.await else { return Piece::default() };
        let mut piece = Piece { next, uncertain: corrupt.len() as u64, ..Piece::default() };
        for (id, reason) in corrupt {
            self.parts.rollouts.set_aside_and_repair(id, &reason);
        }
        let puts = loaded.into_iter().flat_map(|(sealed, targets)| {
            targets.into_iter().map(move |target| {
                let sealed = sealed.clone();
                async move { (target, self.parts.rollouts.put(target, sealed).await) }
            })
        });
        for (target, said) in futures::future::join_all(puts).await {
            match said {
                Ok(()) => piece.restored += 1,
                Err(why) => {
                    piece.uncertain += 1;
                    self.tell_trouble(Some(format!("{} does not take a copy of a rollout: {why}", target.short())));
                }
            }
        }
        if piece.restored > 0 {
            tracing::info!(copies = piece.restored, failed = piece.uncertain, "rollouts on too few nodes were copied");
        }
        piece
    }
}
