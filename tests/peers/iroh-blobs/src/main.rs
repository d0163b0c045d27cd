//! What `starling bench weights` measures beside us: a blob that one iroh endpoint fetches from another, both of this
//! process, both with a store on disk, over the loopback device and without relays.
//!
//! `starling-peer-iroh-blobs BYTES` prints `ready` once the blob lies in the holder's store. For each line on standard
//! input it fetches it into an empty store, over a connection that stands, and prints the seconds that took until all
//! of it was verified and synced to the disk.

use anyhow::{Context, Result, ensure};
use iroh::endpoint::presets;
use iroh::protocol::Router;
use iroh::{Endpoint, EndpointAddr, RelayMode};
use iroh_blobs::store::fs::FsStore;
use iroh_blobs::{ALPN, BlobsProtocol};
use std::fs::File;
use std::io::BufRead;
use std::path::Path;
use std::time::Instant;

async fn endpoint() -> Result<Endpoint> {
    let builder = Endpoint::builder(presets::Minimal).relay_mode(RelayMode::Disabled);
    Ok(builder.clear_ip_transports().bind_addr("127.0.0.1:0")?.bind().await?)
}

/// Syncs every file under `dir`: iroh's store leaves that to the operating system.
fn sync_all(dir: &Path) -> Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            sync_all(&path)?;
        } else {
            File::open(&path)?.sync_all()?;
        }
    }
    Ok(())
}

#[tokio::main]
async fn main() -> Result<()> {
    let len = std::env::args().nth(1).context("expected the blob's length in bytes")?;
    let len: usize = len.parse().with_context(|| format!("expected the blob's length in bytes, got {len}"))?;
    let dir = tempfile::tempdir()?;
    let held = FsStore::load(dir.path().join("holder")).await?;
    let tag = held.blobs().add_bytes(random(len)).await?;
    let holder = endpoint().await?;
    let address = holder.bound_sockets().into_iter().next().context("the holder listens nowhere")?;
    let address = EndpointAddr::new(holder.id()).with_ip_addr(address);
    let router = Router::builder(holder).accept(ALPN, BlobsProtocol::new(&held, None)).spawn();

    let fetcher = endpoint().await?;
    println!("ready");
    for (run, line) in std::io::stdin().lock().lines().enumerate() {
        line?;
        let path = dir.path().join(format!("fetched-{run}"));
        let store = FsStore::load(&path).await?;
        let connection = fetcher.connect(address.clone(), ALPN).await?;
        let begin = Instant::now();
        store.remote().fetch(connection.clone(), tag.hash).await?;
        sync_all(&path)?;
        let took = begin.elapsed();
        ensure!(store.blobs().has(tag.hash).await?, "the blob is not whole");
        connection.close(0_u32.into(), b"done");
        store.shutdown().await?;
        std::fs::remove_dir_all(&path)?;
        println!("{}", took.as_secs_f64());
    }
    fetcher.close().await;
    router.shutdown().await?;
    Ok(())
}

/// Bytes that do not compress, of one xorshift.
fn random(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}
