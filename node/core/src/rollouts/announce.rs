//! Tells the mesh of stored rollouts, many in one message.

use starling_protocol::ModelName;
use starling_protocol::codec::encode;
use starling_protocol::wire::{Gossip, RolloutAnnouncement, Topic};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::transport::SharedTransport;

/// Announcements waiting: 115 bytes each.
pub(super) const ANNOUNCE_QUEUE: usize = 4096;
/// Announcements in one gossip message: 128 × 115 bytes stay under 16 KiB with up to two holders.
const ANNOUNCE_BATCH: usize = 96;
/// Announcements are collected this long.
const ANNOUNCE_BEAT: Duration = Duration::from_millis(20);

pub(super) async fn announcer(
    transport: SharedTransport,
    mut queue: mpsc::Receiver<(ModelName, RolloutAnnouncement)>,
    shutdown: CancellationToken,
) {
    loop {
        let first = tokio::select! {
            biased;
            () = shutdown.cancelled() => return,
            a = queue.recv() => match a { Some(a) => a, None => return },
        };
        tokio::time::sleep(ANNOUNCE_BEAT).await;
        let mut by_model: BTreeMap<ModelName, Vec<RolloutAnnouncement>> = BTreeMap::new();
        by_model.entry(first.0).or_default().push(first.1);
        while let Ok((model, a)) = queue.try_recv() {
            by_model.entry(model).or_default().push(a);
        }
        for (model, list) in by_model {
            let topic = Topic::Rollouts(model);
            // Without subscribing: who only runs agents need not hear of everyone's rollouts.
            for part in list.chunks(ANNOUNCE_BATCH) {
                transport.publish(topic.clone(), encode(&Gossip::Rollouts(part.to_vec())));
            }
        }
    }
}
