//! Rollouts per second, sealed, sent to two holders and synced there, beside what one RocksDB syncs of the same bytes:
//! put by as many threads, each on its own, and by one thread that gathers what waits.

use super::http::MODEL;
use super::load::{Done, Load};
use super::report::{Better, Row};
use super::trio::{REPLICATION, Trio};
use anyhow::{anyhow, ensure};
use starling_protocol::assignment::Purpose;
use starling_protocol::rollout::{
    FinishReason, Receipt, Rollout, SealedRollout, Timeline, Turn, TurnReceipt, receipt_body,
};
use starling_protocol::signed::{Domain, Signature, Signer};
use starling_protocol::{EpisodeId, GroupId, JobId, ModelName, PolicyVersion, TaskRef, Term};
use starling_storage::{Batch, Durability, Family, RocksOptions, RocksStore, SharedStore, Store, StoreError, rollouts};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};

/// Length of an envelope, within a few bytes.
const ENVELOPE_BYTES: usize = 2048;
/// Envelopes of one run: 12 MiB.
const ENVELOPES: u32 = 6000;
const LOAD: Load = Load { at_once: 256, time_max: Duration::from_secs(3), count_max: ENVELOPES as u64 };
/// Envelopes in one write of the batching writer; as many as we send at once.
const BATCH_MAX: usize = 128;
const PEER: &str = "RocksDB, 256 synced writers";
const BATCHING: &str = "RocksDB, one batching writer";

/// The rows of `replicate`.
///
/// # Errors
/// When a rollout is refused, or one that was acknowledged is not on both holders.
pub(super) async fn measure(runs: usize) -> anyhow::Result<Vec<Row>> {
    let trio = Trio::start().await?;
    let model = ModelName::new(MODEL)?;
    let signer = trio.gateway.identity.clone();
    let tokens = tokens_for(ENVELOPE_BYTES, &model, &*signer)?;
    let open = |name: &str| -> anyhow::Result<SharedStore> {
        Ok(Arc::new(RocksStore::open(trio.dir().join(name), &RocksOptions::default())?))
    };
    let single = open("single")?;
    let batching = start_writer(open("batching")?);

    let mut acknowledged = 0;
    // No envelope is ever stored twice.
    let mut series = 0_u32;
    let mut next = || {
        series += 1;
        tokio::task::block_in_place(|| seal_many(series, tokens, &model, &*signer)).map(Arc::new)
    };
    let mut values: [Vec<f64>; 3] = Default::default();
    // One round that does not count. Who goes first moves on: whatever the machine does beside falls on all.
    for run in 0..=runs {
        for turn in 0..values.len() {
            let who = (run + turn) % values.len();
            let sealed = next()?;
            let done = match who {
                0 => {
                    let done = replicate(&trio, &model, sealed).await?;
                    acknowledged += done.count;
                    done
                }
                1 => tokio::task::block_in_place(|| store_each(&*single, &sealed))?,
                _ => store_in_batches(&batching, sealed).await?,
            };
            values[who].extend((run > 0).then(|| done.per_second()));
        }
    }
    trio.check_held(JobId::default(), acknowledged).await?;
    drop(batching);
    trio.stop().await;
    let [ours, each, batched] = values;
    let row =
        |what: &str, peer, theirs: &[f64]| Row::new(what, "rollouts/s", Better::More, &ours, Some((peer, theirs)));
    Ok(vec![row("durable", PEER, &each), row("durable, beside one writer", BATCHING, &batched)])
}

/// As many threads as there are rollouts at once, each of which puts one envelope a write, synced.
fn store_each(store: &dyn Store, sealed: &[SealedRollout]) -> anyhow::Result<Done> {
    let next = AtomicUsize::new(0);
    let begin = Instant::now();
    let write_some = || {
        let mut count = 0;
        while begin.elapsed() < LOAD.time_max
            && let Some(one) = sealed.get(next.fetch_add(1, Ordering::Relaxed))
        {
            let mut batch = Batch::new();
            batch.put(Family::Rollouts, one.id.0, one.bytes.as_slice());
            store.write(batch, Durability::Synced)?;
            count += 1;
        }
        anyhow::Ok(count)
    };
    let count = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..LOAD.at_once).map(|_| scope.spawn(write_some)).collect();
        let counts = threads.into_iter().map(|t| t.join().map_err(|_panic| anyhow!("a writer panicked"))?);
        counts.sum::<anyhow::Result<u64>>()
    })?;
    Ok(Done { count, took: begin.elapsed() })
}

async fn replicate(trio: &Trio, model: &ModelName, sealed: Arc<Vec<SealedRollout>>) -> anyhow::Result<Done> {
    let (node, model) = (trio.gateway.core.clone(), model.clone());
    LOAD.run(move |i| {
        let (node, model, sealed) = (node.clone(), model.clone(), sealed.clone());
        async move {
            let one = nth(&sealed, i)?;
            let need = usize::from(REPLICATION);
            let holders = node.rollouts().replicate(&model, JobId::default(), one, need).await?;
            ensure!(holders.len() == need, "only {} nodes hold a rollout", holders.len());
            Ok(())
        }
    })
    .await
}

type Put = (SealedRollout, oneshot::Sender<Result<(), StoreError>>);

async fn store_in_batches(peer: &mpsc::Sender<Put>, sealed: Arc<Vec<SealedRollout>>) -> anyhow::Result<Done> {
    let peer = peer.clone();
    LOAD.run(move |i| {
        let (peer, sealed) = (peer.clone(), sealed.clone());
        async move {
            let (answer, stored) = oneshot::channel();
            peer.send((nth(&sealed, i)?, answer)).await.map_err(|_ended| anyhow!("the peer's writer ended"))?;
            Ok(stored.await??)
        }
    })
    .await
}

fn nth(sealed: &[SealedRollout], i: u64) -> anyhow::Result<SealedRollout> {
    sealed.get(usize::try_from(i)?).cloned().ok_or_else(|| anyhow!("no envelope {i}"))
}

/// One thread that writes whatever waits, with one fsync; it ends with its last sender.
fn start_writer(store: SharedStore) -> mpsc::Sender<Put> {
    let (send, mut queue) = mpsc::channel::<Put>(LOAD.at_once);
    tokio::task::spawn_blocking(move || {
        while let Some(first) = queue.blocking_recv() {
            let mut batch = vec![first];
            while batch.len() < BATCH_MAX
                && let Ok(put) = queue.try_recv()
            {
                batch.push(put);
            }
            let items: Vec<_> = batch.iter().map(|(s, _)| (s.id, s.bytes.as_slice(), JobId::default())).collect();
            let mut failed = rollouts::put_rollouts(&*store, &items, Durability::Synced).err();
            for (_, answer) in batch {
                // The first caller gets the cause and ends the run.
                let _ = answer.send(failed.take().map_or(Ok(()), Err));
            }
        }
    });
    send
}

/// Tokens of a timeline whose envelope is `len` bytes long.
fn tokens_for(len: usize, model: &ModelName, signer: &dyn Signer) -> anyhow::Result<usize> {
    let (short, long) = (seal(0, 0, 64, model, signer)?.bytes.len(), seal(0, 0, 192, model, signer)?.bytes.len());
    ensure!(long > short, "a longer rollout has a longer envelope");
    Ok(64 + len.saturating_sub(short) * 128 / (long - short))
}

fn seal_many(series: u32, tokens: usize, model: &ModelName, signer: &dyn Signer) -> anyhow::Result<Vec<SealedRollout>> {
    (0..ENVELOPES).map(|i| seal(series, i, tokens, model, signer)).collect()
}

/// A rollout of one turn as a gateway seals it, with a server's receipt; both signed by `signer`.
fn seal(series: u32, i: u32, tokens: usize, model: &ModelName, signer: &dyn Signer) -> anyhow::Result<SealedRollout> {
    let prompt = tokens / 2;
    // Byte-level ids that differ from rollout to rollout.
    let token = |t: usize| u32::try_from(t).unwrap_or(0).wrapping_mul(31).wrapping_add(i.wrapping_mul(7)) % 120;
    let timeline = Timeline {
        tokens: (0..tokens).map(token).collect(),
        loss_mask: (0..tokens).map(|t| t >= prompt).collect(),
        behaviour_logprobs: (0..tokens).map(|t| if t >= prompt { -0.5 } else { 0.0 }).collect(),
        policy_versions: (0..tokens).map(|t| PolicyVersion(u64::from(t >= prompt))).collect(),
    };
    let body = receipt_body(
        model,
        &timeline.tokens[..prompt],
        &timeline.tokens[prompt..],
        &timeline.behaviour_logprobs[prompt..],
        &timeline.policy_versions[prompt..],
    );
    let turn = Turn {
        timeline: 0,
        prompt_len: u32::try_from(prompt)?,
        completion_len: u32::try_from(tokens - prompt)?,
        finish: FinishReason::Length,
        temperature: 1.0,
        duration_ms: 1,
        receipt: Some(TurnReceipt {
            unreceipted_len: 0,
            receipt: Receipt { signature: Signature::new(signer, Domain::Receipt, &body) },
        }),
        fork_cause: None,
    };
    let mut episode = [0; 16];
    episode[..4].copy_from_slice(&series.to_be_bytes());
    episode[4..8].copy_from_slice(&i.to_be_bytes());
    let now = crate::run::wall_clock();
    let rollout = Rollout {
        job: JobId::default(),
        model: model.clone(),
        episode: EpisodeId(episode),
        group: GroupId { term: Term(1), seq: u64::from(i / 8) },
        task: TaskRef { set: "bench".into(), index: 0, id: "bench".into() },
        purpose: Purpose::Train,
        lease_term: Term(1),
        gateway: signer.node_id(),
        agent: "bench".into(),
        timelines: vec![timeline],
        turns: vec![turn],
        reward: 1.0,
        metrics: BTreeMap::new(),
        started: now,
        ended: now,
    };
    Ok(rollout.seal(signer)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use starling_bootstrap::identity::{Ed25519Verifier, Identity};
    use starling_protocol::rollout::verify_rollout;

    #[test]
    fn envelopes_verify_differ_and_have_their_length() {
        let signer = Identity::from_seed([1; 32]);
        let model = ModelName::new(MODEL).unwrap();
        let tokens = tokens_for(ENVELOPE_BYTES, &model, &signer).unwrap();
        let one = seal(1, 0, tokens, &model, &signer).unwrap();
        let two = seal(1, 1, tokens, &model, &signer).unwrap();
        assert_ne!(one.id, two.id);
        assert!(one.bytes.len().abs_diff(ENVELOPE_BYTES) < 32, "{} bytes", one.bytes.len());
        verify_rollout(one.id, &one.bytes, &Ed25519Verifier).unwrap();
    }
}
