//! Weights that a node fetches from one, two and four holders at once, each chunk hashed, decrypted and written, all of
//! it synced; beside `iroh-blobs` doing the same from one holder, and a plain copy over TCP. The last rows take ours apart.

use super::iroh::Iroh;
use super::report::{Better, Row};
use super::trio::{Member, start_member};
use super::{delta, tcp};
use anyhow::{Context, bail, ensure};
use futures::stream::{StreamExt, TryStreamExt};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use starling_protocol::codec::{decode, encode};
use starling_protocol::manifest::{CHUNK_LEN_BYTES, Manifest};
use starling_protocol::record::Role;
use starling_protocol::wire::{BlobCall, BlobReply, CALL_LEN_BYTES_MAX, Service};
use starling_protocol::{Hash, NodeId};
use starling_storage::blobs::{delete_blobs, put_unsettled_blobs, settle_blobs};
use starling_storage::{RocksOptions, RocksStore, SharedStore, Store};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

const MIB: usize = 256;
/// Holders of each measurement.
const HOLDERS: [(&str, usize); 3] = [("one holder", 1), ("two holders", 2), ("four holders", 4)];
/// How long a call may take.
const LIMIT: Duration = Duration::from_secs(30);
/// Chunks asked for at once where the way is taken apart, as a transfer does.
const AT_ONCE: usize = 8;
const PEER: &str = "iroh-blobs, one holder";

/// The rows of `weights`. `iroh` is the peer's program, if it is not where `make bench` puts it.
///
/// # Errors
/// When a transfer fails.
pub(super) async fn measure(runs: usize, iroh: Option<&Path>) -> anyhow::Result<Vec<Row>> {
    let dir = tempfile::tempdir().context("cannot make a folder for the stores")?;
    let shutdown = CancellationToken::new();
    let network = Hash(rand::random());
    let path = dir.path().join("receiver");
    let receiver = start_member(&path, Role::Client, network, Vec::new(), shutdown.clone()).await?;
    let weights = tokio::task::block_in_place(|| random_bytes(MIB << 20));
    let mut holders = Vec::new();
    let mut manifest = None;
    for n in 0..HOLDERS[HOLDERS.len() - 1].1 {
        let path = dir.path().join(format!("holder-{n}"));
        let known = vec![receiver.address()?];
        let holder = start_member(&path, Role::Server, network, known, shutdown.clone()).await?;
        manifest = Some(holder.core.blobs().put(weights.clone()).await?);
        holders.push(holder);
    }
    let manifest = manifest.context("there is a holder")?;
    let peers: Vec<NodeId> = holders.iter().map(|h| h.core.node()).collect();
    meet(&receiver, &peers).await?;
    let mut iroh = Iroh::start(iroh, MIB << 20).await?;

    let (mut copies, mut theirs, mut ours) = (Vec::new(), Vec::new(), vec![Vec::new(); HOLDERS.len()]);
    // One round that does not count: connections, caches, files.
    for run in 0..=runs {
        let counts = run > 0;
        // Who goes first alternates: whatever the machine does beside falls on both.
        for peer_turn in [run % 2 == 0, run % 2 != 0] {
            if !peer_turn {
                for ((_, n), values) in HOLDERS.iter().zip(&mut ours) {
                    let value = fetch(&receiver, &manifest, &peers[..*n]).await?;
                    values.extend(counts.then_some(value));
                }
            } else if let Some(iroh) = &mut iroh {
                let took = iroh.fetch().await?;
                theirs.extend(counts.then(|| mib_per_s(took)));
            }
        }
        let took = tokio::task::block_in_place(|| tcp::copy(&weights))?;
        copies.extend(counts.then(|| mib_per_s(took)));
    }
    let row = |what: &str, values: &[f64], peer| Row::new(what, "MiB/s", Better::More, values, peer);
    let peer = (!theirs.is_empty()).then_some((PEER, theirs.as_slice()));
    let mut rows: Vec<Row> = HOLDERS.iter().zip(&ours).map(|((what, _), values)| row(what, values, peer)).collect();
    if peer.is_some() {
        rows.push(row("iroh-blobs", &theirs, None));
    }
    rows.push(row("tcp copy", &copies, None));
    rows.extend(take_apart(&receiver, peers[0], &manifest, &weights, dir.path(), runs).await?);
    rows.extend(tokio::task::block_in_place(delta::measure)?);
    shutdown.cancel();
    for node in holders.iter().chain([&receiver]) {
        node.stop().await;
    }
    Ok(rows)
}

/// Hash, store and network, each alone.
async fn take_apart(
    receiver: &Member,
    peer: NodeId,
    manifest: &Manifest,
    weights: &[u8],
    dir: &Path,
    runs: usize,
) -> anyhow::Result<Vec<Row>> {
    let store: SharedStore = Arc::new(RocksStore::open(dir.join("alone"), &RocksOptions::default())?);
    let (mut hashing, mut storing, mut asking) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..runs {
        hashing.push(tokio::task::block_in_place(|| {
            let since = Instant::now();
            let right = weights.chunks(CHUNK_LEN_BYTES).zip(&manifest.chunks).all(|(c, h)| Hash::of(c) == *h);
            ensure!(right, "a chunk has another hash");
            Ok(mib_per_s(since.elapsed()))
        })?);
        storing.push(tokio::task::block_in_place(|| {
            let since = Instant::now();
            for (chunks, hashes) in weights.chunks(8 * CHUNK_LEN_BYTES).zip(manifest.chunks.chunks(8)) {
                let parts = chunks.chunks(CHUNK_LEN_BYTES).zip(hashes).map(|(c, h)| (*h, c.to_vec())).collect();
                put_unsettled_blobs(&*store, parts)?;
            }
            let rows: Vec<_> = manifest.chunks.iter().map(|h| (*h, CHUNK_LEN_BYTES as u64)).collect();
            settle_blobs(&*store, &rows)?;
            let took = since.elapsed();
            delete_blobs(&*store, manifest.chunks.clone())?;
            store.reclaim()?;
            anyhow::Ok(mib_per_s(took))
        })?);
        let since = Instant::now();
        let transport = receiver.core.transport();
        futures::stream::iter(manifest.chunks.clone())
            .map(|chunk| async move {
                let body = transport.call(peer, Service::Blobs, encode(&BlobCall::Get(chunk)).into(), LIMIT).await?;
                match decode("blob reply", &body, CALL_LEN_BYTES_MAX)? {
                    BlobReply::Chunk(_) => anyhow::Ok(()),
                    other => bail!("no chunk but {other:?}"),
                }
            })
            .buffer_unordered(AT_ONCE)
            .try_collect::<()>()
            .await?;
        asking.push(mib_per_s(since.elapsed()));
    }
    let row = |what: &str, values: &[f64]| Row::new(what, "MiB/s", Better::More, values, None);
    Ok(vec![
        row("of which: hashing, one thread", &hashing),
        row("of which: into RocksDB, one thread, synced", &storing),
        row("of which: read, sent and received, 8 calls at once", &asking),
    ])
}

async fn fetch(receiver: &Member, manifest: &Manifest, peers: &[NodeId]) -> anyhow::Result<f64> {
    let since = Instant::now();
    receiver.core.blobs().hold(manifest, peers).await?;
    let value = mib_per_s(since.elapsed());
    let (store, chunks) = (receiver.store.clone(), manifest.chunks.clone());
    tokio::task::spawn_blocking(move || {
        delete_blobs(&*store, chunks)?;
        store.reclaim()
    })
    .await??;
    Ok(value)
}

#[expect(clippy::cast_precision_loss, reason = "a few hundred")]
fn mib_per_s(took: Duration) -> f64 {
    MIB as f64 / took.as_secs_f64().max(1e-9)
}

fn random_bytes(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    ChaCha8Rng::seed_from_u64(1).fill(&mut bytes[..]);
    bytes
}

async fn meet(receiver: &Member, peers: &[NodeId]) -> anyhow::Result<()> {
    let since = Instant::now();
    while peers.iter().any(|p| !receiver.core.transport().connected().contains(p)) {
        ensure!(since.elapsed() < LIMIT, "the nodes did not find each other within {LIMIT:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}
