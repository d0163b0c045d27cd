//! Chunks from many peers at once: what [`Transfer`] decides, done.

use super::{BlobError, Blobs};
use crate::runtime::{Stopped, blocking};
use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};
use starling_protocol::transfer::{Outcome, Transfer};
use starling_protocol::wire::{BlobCall, BlobReply};
use starling_protocol::{Hash, NodeId, Timestamp};
use starling_storage::blobs::{put_new_blobs, put_unsettled_blobs, settle_blobs};
use starling_storage::{Batch, Durability, SharedStore, Store, StoreError};
use std::time::Duration;
use tokio::time::Instant;

/// Limit of one chunk request: 1 MiB at 1 Mbit/s, with room for a busy peer.
const CHUNK_LIMIT: Duration = Duration::from_secs(10);
/// Chunks in one write: 8 MiB in one batch, which RocksDB keeps in memory until it is in a file.
const CHUNKS_PER_WRITE: usize = 8;
/// So many chunks go through the log, with one sync; more go past it, which costs several and writes them once.
const CHUNKS_LOGGED_MAX: usize = 16;
/// Chunks past the log after which what came is made durable: what a transfer that is broken off has to fetch again, at most.
const CHUNKS_PER_SETTLING: usize = 64;
/// Chunks that came and are not written yet; no more are asked for beyond. With those in flight and in the write, a
/// transfer takes (32 + 32 + 8) × 1 MiB = 72 MiB at most.
const UNWRITTEN_MAX: usize = 32;
/// What is told of one peer's failures.
const TRIED_LEN_MAX: usize = 2000;

struct Answer {
    peer: NodeId,
    chunk: Hash,
    outcome: Outcome,
    bytes: Vec<u8>,
    said: Option<String>,
}

/// Fetches `missing` from `peers` and stores them durably.
///
/// An error keeps what came; dropping it keeps all but the last 64 MiB.
pub(super) async fn fetch_chunks(blobs: &Blobs, missing: Vec<Hash>, peers: &[NodeId]) -> Result<(), BlobError> {
    let local = blobs.transport.local();
    let logged = missing.len() <= CHUNKS_LOGGED_MAX;
    let mut transfer = Transfer::new(missing, peers.iter().copied().filter(|p| *p != local));
    let mut asked = FuturesUnordered::new();
    let mut unwritten: Vec<(Hash, Vec<u8>)> = Vec::new();
    // Written, but not yet here: see `settle_blobs`.
    let mut unsettled: Vec<(Hash, u64)> = Vec::new();
    let mut writing: Option<BoxFuture<'static, Result<Result<(), StoreError>, Stopped>>> = None;
    let mut tried = String::new();
    let started = Instant::now();
    loop {
        let now = Timestamp(0) + started.elapsed();
        while unwritten.len() < UNWRITTEN_MAX
            && let Some((peer, chunk)) = transfer.poll_request(now)
        {
            asked.push(get(blobs, peer, chunk));
        }
        if writing.is_none() && !unwritten.is_empty() {
            let part: Vec<_> = unwritten.drain(..unwritten.len().min(CHUNKS_PER_WRITE)).collect();
            writing = Some(if logged {
                write_logged(blobs.store.clone(), part)
            } else {
                unsettled.extend(part.iter().map(|(hash, bytes)| (*hash, bytes.len() as u64)));
                let full = unsettled.len() >= CHUNKS_PER_SETTLING;
                write(blobs.store.clone(), part, if full { std::mem::take(&mut unsettled) } else { Vec::new() })
            });
        }
        if writing.is_none() && (transfer.is_done() || transfer.in_flight() == 0) {
            break;
        }
        let write_done = async {
            match &mut writing {
                Some(w) => w.await,
                None => std::future::pending().await,
            }
        };
        let overdue = transfer.poll_timeout(now).map(|at| started + at.since(Timestamp(0)));
        let overdue = async {
            match overdue {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            done = write_done => {
                writing = None;
                done??;
            }
            Some(a) = asked.next(), if !transfer.is_done() => {
                if transfer.handle(a.peer, a.chunk, a.outcome) {
                    unwritten.push((a.chunk, a.bytes));
                }
                if let Some(said) = a.said.filter(|_| tried.len() < TRIED_LEN_MAX) {
                    if a.outcome == Outcome::Wrong {
                        tracing::warn!(peer = %a.peer.short(), chunk = %a.chunk.short(), "wrong bytes for a chunk; this peer is not asked again");
                    }
                    tried.push_str(&format!("[{}: {said}] ", a.peer.short()));
                }
            }
            () = overdue => {}
        }
    }
    if logged {
        // The log orders all writes: one sync makes the buffered ones before it durable.
        let store = blobs.store.clone();
        blocking(move || store.write(Batch::new(), Durability::Synced)).await??;
    } else {
        write(blobs.store.clone(), Vec::new(), unsettled).await??;
    }
    match transfer.a_missing_chunk() {
        None => Ok(()),
        Some(chunk) => {
            if tried.is_empty() {
                "no peer known that could have it".clone_into(&mut tried);
            }
            Err(BlobError::Unavailable { chunk, tried })
        }
    }
}

fn write_logged(
    store: SharedStore,
    part: Vec<(Hash, Vec<u8>)>,
) -> BoxFuture<'static, Result<Result<(), StoreError>, Stopped>> {
    Box::pin(blocking(move || put_new_blobs(&*store, part, Durability::Buffered)))
}

/// Writes `part` past the log, then makes `settled` durable, if there is any.
fn write(
    store: SharedStore,
    part: Vec<(Hash, Vec<u8>)>,
    settled: Vec<(Hash, u64)>,
) -> BoxFuture<'static, Result<Result<(), StoreError>, Stopped>> {
    Box::pin(blocking(move || {
        if !part.is_empty() {
            put_unsettled_blobs(&*store, part)?;
        }
        if settled.is_empty() { Ok(()) } else { settle_blobs(&*store, &settled) }
    }))
}

async fn get(blobs: &Blobs, peer: NodeId, chunk: Hash) -> Answer {
    let since = Instant::now();
    let failed = |outcome, said: String| Answer { peer, chunk, outcome, bytes: Vec::new(), said: Some(said) };
    match blobs.ask(peer, &BlobCall::Get(chunk), CHUNK_LIMIT).await {
        Ok(BlobReply::Chunk(bytes)) => {
            // A fifth of a millisecond a chunk: not on the threads that move messages.
            let hashed = blocking(move || (Hash::of(&bytes), bytes.into_vec())).await;
            match hashed {
                Ok((got, bytes)) if got == chunk => {
                    Answer { peer, chunk, outcome: Outcome::Came { after: since.elapsed() }, bytes, said: None }
                }
                Ok(_) => failed(Outcome::Wrong, "bytes with another hash".into()),
                Err(stopped) => failed(Outcome::Failed, stopped.to_string()),
            }
        }
        Ok(BlobReply::Missing(_)) => failed(Outcome::Lacks, "does not have it".into()),
        Ok(BlobReply::Refused(why)) => failed(Outcome::Failed, why),
        Ok(BlobReply::Held | BlobReply::Lacks(_)) => failed(Outcome::Failed, "an answer to another question".into()),
        Err(e) => failed(Outcome::Failed, e.to_string()),
    }
}
