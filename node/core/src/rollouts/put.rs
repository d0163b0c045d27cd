//! What waits to be stored on another holder: one queue a holder, sent in batches.

use super::ask;
use crate::runtime::spawn;
use crate::transport::SharedTransport;
use serde_bytes::ByteBuf;
use starling_protocol::rollout::{ROLLOUT_LEN_BYTES_MAX, SealedRollout};
use starling_protocol::wire::{RolloutCall, RolloutReply};
use starling_protocol::{NodeId, RolloutId};
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

/// Envelopes waiting for one holder: at 2 KiB each, 2 MiB of memory a holder.
pub(super) const HOLDER_QUEUE: usize = 1024;
/// Envelopes in one Put.
const BATCH_MAX: usize = 128;
/// Put calls in flight to one holder: one is being synced while the next one fills.
const PUTS_IN_FLIGHT: usize = 2;

/// One envelope and who waits for the answer.
pub(super) struct Put {
    pub(super) sealed: Arc<SealedRollout>,
    pub(super) answer: oneshot::Sender<Result<(), String>>,
}

/// Sends what waits for one holder in batches, so that many episodes share one fsync.
pub(super) async fn put_batches(
    transport: SharedTransport,
    holder: NodeId,
    mut queue: mpsc::Receiver<Put>,
    shutdown: CancellationToken,
) {
    let in_flight = Arc::new(tokio::sync::Semaphore::new(PUTS_IN_FLIGHT));
    let mut carried: Option<Put> = None;
    loop {
        let Ok(permit) = in_flight.clone().acquire_owned().await else { return };
        let first = match carried.take() {
            Some(p) => p,
            None => tokio::select! {
                biased;
                () = shutdown.cancelled() => return,
                p = queue.recv() => match p { Some(p) => p, None => return },
            },
        };
        let mut len = first.sealed.bytes.len();
        let mut batch = vec![first];
        while batch.len() < BATCH_MAX
            && let Ok(p) = queue.try_recv()
        {
            len += p.sealed.bytes.len();
            if len > ROLLOUT_LEN_BYTES_MAX {
                carried = Some(p);
                break;
            }
            batch.push(p);
        }
        let transport = transport.clone();
        spawn(async move {
            let _permit = permit;
            let bodies = batch.iter().map(|p| ByteBuf::from(p.sealed.bytes.clone())).collect();
            match ask(&transport, holder, &RolloutCall::Put(bodies)).await {
                Ok(RolloutReply::Stored(ids)) => {
                    let stored: BTreeSet<RolloutId> = ids.into_iter().collect();
                    for p in batch {
                        let ok = stored.contains(&p.sealed.id);
                        let _ = p.answer.send(if ok { Ok(()) } else { Err("it did not verify there".into()) });
                    }
                }
                other => {
                    let why = match other {
                        Ok(RolloutReply::Refused(why)) | Err(why) => why,
                        Ok(_) => "an answer to another question".into(),
                    };
                    for p in batch {
                        let _ = p.answer.send(Err(why.clone()));
                    }
                }
            }
        });
    }
}
