//! Weights that a node fetches from one, two and four holders at once, each chunk hashed and written, the whole synced.
//! Beside it: the same bytes hashed and written to a file by one thread, which is what any verified transfer has to do
//! at least. The rows below take the way apart.

use super::report::{Better, Row};
use super::trio::{Member, start_member};
use anyhow::{Context, bail, ensure};
use futures::stream::{StreamExt, TryStreamExt};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use starling_protocol::codec::{decode, encode};
use starling_protocol::manifest::{CHUNK_LEN_BYTES, Manifest};
use starling_protocol::record::Role;
use starling_protocol::wire::{BlobCall, BlobReply, CALL_LEN_BYTES_MAX, Service};
use starling_protocol::{Hash, NodeId};
use starling_storage::blobs::{delete_blobs, put_new_blobs};
use starling_storage::{Batch, Durability, RocksOptions, RocksStore, SharedStore, Store};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

const MIB: usize = 256;
/// Holders of each measurement.
const HOLDERS: [usize; 3] = [1, 2, 4];
/// How long a call may take.
const LIMIT: Duration = Duration::from_secs(30);
/// Chunks asked for at once where the way is taken apart, as a transfer does.
const AT_ONCE: usize = 8;
const PEER: &str = "hashed and written to a file, synced";

/// The rows of `transfer`.
///
/// # Errors
/// When a transfer fails.
pub(super) async fn measure(runs: usize) -> anyhow::Result<Vec<Row>> {
    let dir = tempfile::tempdir().context("cannot make a folder for the stores")?;
    let shutdown = CancellationToken::new();
    let network = Hash(rand::random());
    let path = dir.path().join("receiver");
    let receiver = start_member(&path, Role::Client, network, Vec::new(), shutdown.clone()).await?;
    let weights = tokio::task::block_in_place(|| random_bytes(MIB << 20));
    let mut holders = Vec::new();
    let mut manifest = None;
    for n in 0..HOLDERS[HOLDERS.len() - 1] {
        let path = dir.path().join(format!("holder-{n}"));
        let known = vec![receiver.address()?];
        let holder = start_member(&path, Role::Server, network, known, shutdown.clone()).await?;
        manifest = Some(holder.core.blobs().put(weights.clone()).await?);
        holders.push(holder);
    }
    let manifest = manifest.context("there is a holder")?;
    let peers: Vec<NodeId> = holders.iter().map(|h| h.core.node()).collect();
    meet(&receiver, &peers).await?;

    let (mut floor, mut times) = (Vec::new(), vec![Vec::new(); HOLDERS.len()]);
    // One round that does not count: connections, caches, files.
    for run in 0..=runs {
        let path = dir.path().join("file");
        let wrote = tokio::task::block_in_place(|| write_file(&path, &weights))?;
        let mut took = Vec::new();
        for n in HOLDERS {
            took.push(fetch(&receiver, &manifest, &peers[..n]).await?);
        }
        if run > 0 {
            floor.push(wrote);
            times.iter_mut().zip(took).for_each(|(all, one)| all.push(one));
        }
    }
    let mut rows: Vec<Row> = HOLDERS
        .iter()
        .zip(&times)
        .map(|(n, values)| {
            let what = format!("{MIB} MiB of weights from {n} holder{}", if *n == 1 { "" } else { "s" });
            Row::new(what, "MiB/s", Better::More, values, Some((PEER, &floor)))
        })
        .collect();
    rows.extend(take_apart(&receiver, peers[0], &manifest, &weights, dir.path(), runs).await?);
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
            Ok(rate(since))
        })?);
        storing.push(tokio::task::block_in_place(|| {
            let since = Instant::now();
            for (chunks, hashes) in weights.chunks(8 * CHUNK_LEN_BYTES).zip(manifest.chunks.chunks(8)) {
                let parts = chunks.chunks(CHUNK_LEN_BYTES).zip(hashes).map(|(c, h)| (*h, c.to_vec())).collect();
                put_new_blobs(&*store, parts, Durability::Buffered)?;
            }
            store.write(Batch::new(), Durability::Synced)?;
            let value = rate(since);
            delete_blobs(&*store, manifest.chunks.clone())?;
            anyhow::Ok(value)
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
        asking.push(rate(since));
    }
    let row = |what: &str, values: &[f64]| Row::new(what, "MiB/s", Better::More, values, None);
    Ok(vec![
        row("of which: hashing, one thread", &hashing),
        row("of which: into RocksDB, one thread, one sync", &storing),
        row("of which: read, sent and received, 8 calls at once", &asking),
    ])
}

async fn fetch(receiver: &Member, manifest: &Manifest, peers: &[NodeId]) -> anyhow::Result<f64> {
    let since = Instant::now();
    receiver.core.blobs().hold(manifest, peers).await?;
    let value = rate(since);
    let (store, chunks) = (receiver.store.clone(), manifest.chunks.clone());
    tokio::task::spawn_blocking(move || {
        delete_blobs(&*store, chunks)?;
        store.reclaim()
    })
    .await??;
    Ok(value)
}

fn write_file(path: &Path, bytes: &[u8]) -> anyhow::Result<f64> {
    let since = Instant::now();
    let mut file = std::fs::File::create(path)?;
    for chunk in bytes.chunks(CHUNK_LEN_BYTES) {
        std::hint::black_box(Hash::of(chunk));
        file.write_all(chunk)?;
    }
    file.sync_all()?;
    Ok(rate(since))
}

#[expect(clippy::cast_precision_loss, reason = "a few hundred")]
fn rate(since: Instant) -> f64 {
    MIB as f64 / since.elapsed().as_secs_f64()
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
