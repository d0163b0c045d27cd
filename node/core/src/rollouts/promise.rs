//! What is about to be acknowledged, recorded: many in one write, as they come.

use crate::runtime::blocking;
use starling_storage::{Acknowledged, Durability, SharedStore, acknowledged};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

/// Records waiting: some 150 bytes each.
pub(super) const PROMISE_QUEUE: usize = 1024;
/// Records in one write.
const BATCH_MAX: usize = 256;

/// One record and who waits for it.
pub(super) struct Promise {
    pub(super) record: Acknowledged,
    pub(super) answer: oneshot::Sender<Result<(), String>>,
}

/// Writes what waits. While one write runs, the next one gathers.
pub(super) async fn record_promises(
    store: SharedStore,
    mut queue: mpsc::Receiver<Promise>,
    shutdown: CancellationToken,
) {
    loop {
        let mut batch = Vec::new();
        tokio::select! {
            biased;
            () = shutdown.cancelled() => return,
            n = queue.recv_many(&mut batch, BATCH_MAX) => if n == 0 { return },
        }
        let (records, answers): (Vec<_>, Vec<_>) = batch.into_iter().map(|p| (p.record, p.answer)).unzip();
        let store = store.clone();
        // An audit trail: the rollouts themselves are synced on their holders.
        let recorded =
            blocking(move || acknowledged::record_acknowledged(&*store, &records, Durability::Buffered)).await;
        let recorded = recorded.map_err(|e| e.to_string()).and_then(|written| written.map_err(|e| e.to_string()));
        for answer in answers {
            let _ = answer.send(recorded.clone());
        }
    }
}
