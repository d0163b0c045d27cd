//! Chunks from many peers: slow, dead and lying ones, breaks, and deltas.
#![expect(clippy::unwrap_used, reason = "a test's helper fails its test by panicking")]

mod holders;

use async_trait::async_trait;
use bytes::Bytes;
use holders::{World, id};
use starling_core::blobs::{BlobError, Blobs};
use starling_core::transport::{FrameStream, Inbound, InboundError, Verdict};
use starling_protocol::codec::{decode, encode};
use starling_protocol::manifest::{DeltaManifest, Manifest};
use starling_protocol::record::Role;
use starling_protocol::wire::{BlobCall, BlobReply, CALL_LEN_BYTES_MAX, Service, Topic};
use starling_protocol::{Hash, NodeId};
use starling_storage::blobs::{delete_blobs, missing_chunks, read_manifest};
use starling_storage::quarantine::quarantined;
use starling_storage::suite::noise;
use starling_storage::{Batch, Durability, Family, MemoryStore, SharedStore, Store};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

const MIB: usize = 1 << 20;

/// A peer that answers every question for a chunk with what `Self::1` makes of it, and counts them.
struct Peer {
    asked: AtomicU64,
    delay: Duration,
    answer: BlobReply,
}

#[async_trait]
impl Inbound for Peer {
    async fn on_call(&self, _: NodeId, service: Service, body: Bytes) -> Result<Bytes, InboundError> {
        if service != Service::Blobs {
            return Ok(Bytes::new());
        }
        let call: BlobCall = decode("call", &body, CALL_LEN_BYTES_MAX).unwrap();
        assert!(matches!(call, BlobCall::Get(_)));
        self.asked.fetch_add(1, Ordering::Relaxed);
        sleep(self.delay).await;
        Ok(encode(&self.answer).into())
    }
    async fn on_generate(&self, _: NodeId, _: FrameStream) {}
    fn on_gossip(&self, _: NodeId, _: &Topic, _: &[u8]) -> Verdict {
        Verdict::Ignore
    }
    fn on_connection(&self, _: NodeId, _: bool) {}
}

/// Two holders of 24 MiB, and an empty node's blobs on the same network.
async fn world(bytes: &[u8]) -> (World, Manifest, Blobs, SharedStore) {
    let world = World::with_holders(2, Role::Witness).await;
    let mut manifest = None;
    for n in 1..=2 {
        manifest = Some(world.as_node(id(n), world.core(id(n)).blobs().put(bytes.to_vec())).await.unwrap());
    }
    let store: SharedStore = Arc::new(MemoryStore::new());
    let blobs = Blobs::new(store.clone(), world.network.transport(id(50)).shared());
    (world, manifest.unwrap(), blobs, store)
}

fn attach(world: &World, n: u8, delay: Duration, answer: BlobReply) -> Arc<Peer> {
    let peer = Arc::new(Peer { asked: AtomicU64::new(0), delay, answer });
    world.network.attach(id(n), peer.clone());
    world.network.connect(id(n), id(50));
    peer
}

fn attach_receiver(world: &World) {
    attach(world, 50, Duration::ZERO, BlobReply::Held);
    for n in 1..=2 {
        world.network.connect(id(50), id(n));
    }
}

#[tokio::test(start_paused = true)]
async fn neither_a_silent_nor_a_slow_peer_holds_the_others_up() {
    let bytes = noise(1, 24 * MIB);
    let (world, manifest, blobs, store) = world(&bytes).await;
    attach_receiver(&world);
    let silent = attach(&world, 60, Duration::from_secs(3600), BlobReply::Held);
    let since = Instant::now();
    blobs.hold(&manifest, &[id(60), id(1), id(2)]).await.unwrap();
    assert!(since.elapsed() < Duration::from_secs(1), "{:?}", since.elapsed());
    assert!(silent.asked.load(Ordering::Relaxed) > 0);
    assert_eq!(read_manifest(&store, &manifest).unwrap(), Some(bytes));
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_gives_wrong_bytes_is_not_asked_again_and_nothing_of_it_is_stored() {
    let bytes = noise(1, 24 * MIB);
    let (world, manifest, blobs, store) = world(&bytes).await;
    attach_receiver(&world);
    let liar = attach(&world, 60, Duration::ZERO, BlobReply::Chunk(serde_bytes_of(b"wrong")));
    blobs.hold(&manifest, &[id(60), id(1)]).await.unwrap();
    assert!(liar.asked.load(Ordering::Relaxed) <= 8, "at most what was under way when the first answer came");
    assert_eq!(store.get(Family::Blobs, &Hash::of(b"wrong").0).unwrap(), None);
    let other = Manifest::of(&noise(2, 1000));
    let err = blobs.hold(&other, &[id(60)]).await.unwrap_err();
    assert!(err.to_string().contains("bytes with another hash"), "{err}");
}

fn serde_bytes_of(bytes: &[u8]) -> serde_bytes::ByteBuf {
    serde_bytes::ByteBuf::from(bytes)
}

#[tokio::test(start_paused = true)]
async fn what_came_before_a_break_is_not_fetched_again() {
    let bytes = noise(1, 24 * MIB);
    let (world, manifest, blobs, store) = world(&bytes).await;
    attach_receiver(&world);
    // Node 2 has half of it, node 1 goes away.
    delete_blobs(&*world.stores[&id(2)], manifest.chunks[12..].to_vec()).unwrap();
    world.network.cut(id(50), id(1));
    let err = blobs.hold(&manifest, &[id(2)]).await.unwrap_err();
    assert!(matches!(err, BlobError::Unavailable { .. }) && err.to_string().contains("does not have it"), "{err}");
    assert_eq!(missing_chunks(&store, &manifest).unwrap(), manifest.chunks[12..]);
    // Dropped in the middle.
    world.network.heal(id(50), id(1));
    let _ = timeout(Duration::from_millis(12), blobs.hold(&manifest, &[id(1)])).await;
    let before = world.network.calls();
    let left = missing_chunks(&store, &manifest).unwrap().len() as u64;
    blobs.hold(&manifest, &[id(1)]).await.unwrap();
    assert!(world.network.calls() - before <= left + 40, "{} calls for {left} chunks", world.network.calls() - before);
    assert_eq!(read_manifest(&store, &manifest).unwrap(), Some(bytes));
}

#[tokio::test(start_paused = true)]
async fn a_corrupt_chunk_is_fetched_again_and_kept_aside() {
    let bytes = noise(1, 3 * MIB);
    let (world, manifest, blobs, store) = world(&bytes).await;
    attach_receiver(&world);
    blobs.hold(&manifest, &[id(1)]).await.unwrap();
    let mut batch = Batch::new();
    batch.put(Family::Blobs, manifest.chunks[1].0, b"flipped".to_vec());
    store.write(batch.clone(), Durability::Synced).unwrap();
    assert_eq!(blobs.fetch(&manifest, &[id(1)]).await.unwrap(), bytes);
    assert_eq!(quarantined(&store).unwrap(), [(format!("blobs/{}", manifest.chunks[1]), 7)]);
    // A holder whose copy is corrupt does not give it out, and gets it back by itself.
    world.stores[&id(1)].write(batch, Durability::Synced).unwrap();
    delete_blobs(&store, [manifest.chunks[1]]).unwrap();
    assert!(blobs.hold(&manifest, &[id(1)]).await.is_err());
    sleep(Duration::from_secs(1)).await;
    blobs.hold(&manifest, &[id(1)]).await.unwrap();
    assert_eq!(blobs.fetch(&manifest, &[]).await.unwrap(), bytes);
}

/// New weights that differ from `old` a little, as after a step.
fn next_version(old: &[u8]) -> Vec<u8> {
    old.iter().enumerate().map(|(i, b)| if i % 4 == 0 { b ^ 5 } else { *b }).collect()
}

#[tokio::test(start_paused = true)]
async fn a_follower_with_the_base_fetches_the_delta_only() {
    let old = noise(1, 24 * MIB);
    let new = next_version(&old);
    let (world, base, blobs, store) = world(&old).await;
    attach_receiver(&world);
    let (full, delta) = publish(&world, &base, new.clone()).await;
    let delta = delta.expect("it is shorter");
    blobs.hold(&base, &[id(1)]).await.unwrap();
    let before = world.network.calls();
    let got = blobs.fetch_either_way(&full, Some(&delta), &[id(1)]).await.unwrap();
    assert!(got == new);
    assert!(world.network.calls() - before < 12, "{} calls", world.network.calls() - before);
    assert!(read_manifest(&store, &full).unwrap().is_some(), "and it can give the whole to others");
}

async fn publish(world: &World, base: &Manifest, new: Vec<u8>) -> (Manifest, Option<DeltaManifest>) {
    let core = world.core(id(1));
    world
        .as_node(id(1), async {
            let full = core.blobs().put(new.clone()).await.unwrap();
            (full, core.blobs().put_delta(base, new).await.unwrap())
        })
        .await
}

#[tokio::test(start_paused = true)]
async fn without_the_base_or_with_a_lying_delta_all_chunks_are_fetched() {
    let old = noise(1, 8 * MIB);
    let new = next_version(&old);
    let (world, base, blobs, _store) = world(&old).await;
    attach_receiver(&world);
    let (full, delta) = publish(&world, &base, new.clone()).await;
    let delta = delta.unwrap();
    // No base here.
    assert!(blobs.fetch_either_way(&full, Some(&delta), &[id(1)]).await.unwrap() == new);
    // The delta of something else.
    let third = next_version(&noise(9, 8 * MIB));
    let (other, _) = publish(&world, &base, third.clone()).await;
    blobs.hold(&base, &[id(1)]).await.unwrap();
    assert!(blobs.fetch_either_way(&other, Some(&delta), &[id(1)]).await.unwrap() == third);
    // Weights that have nothing to do with each other make no delta.
    assert_eq!(publish(&world, &base, noise(7, 8 * MIB)).await.1, None);
}
