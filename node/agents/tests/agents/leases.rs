use crate::support::{Run, episode, id, wait_for};
use starling_agents::AgentMode::PerEpisode;
use starling_agents::{EpisodeStart, RunnerConfig};
use std::time::Duration;

const OK: &str = "echo '{\"reward\": 1}'";

fn unchanged(_config: &mut RunnerConfig) {}

fn leased(n: u8, lease_ttl: Duration) -> EpisodeStart {
    EpisodeStart { lease_ttl, ..episode(n) }
}

#[tokio::test]
async fn leases_are_renewed_at_a_third_of_their_length() {
    let run = Run::start(PerEpisode, "exec sleep 600", [leased(1, Duration::from_millis(600))], unchanged);
    run.host.until("renewals", |b| b.claims.iter().filter(|c| c.2 == 1).count() >= 6).await;
    let claims = run.host.books().claims.clone();
    let renewals: Vec<_> = claims.iter().filter(|c| c.2 == 1).collect();
    assert!(renewals.iter().all(|c| c.1 == 0), "no free slot: only leases are due");
    let apart = (renewals[5].0 - renewals[0].0) / 5;
    assert!(apart >= Duration::from_millis(195), "{apart:?}");
    run.stop().await;
}

#[tokio::test]
async fn a_refused_end_is_tried_again() {
    let run = Run::start(PerEpisode, OK, [episode(1)], unchanged);
    run.host.books().refuse_ends = 3;
    run.host.until("an end", |b| b.ended.contains_key(&id(1))).await;
    assert_eq!(run.host.books().end_calls, 4);
    run.stop().await;
}

#[tokio::test]
async fn an_end_that_is_refused_until_the_lease_is_over_becomes_an_abort() {
    let run = Run::start(PerEpisode, OK, [leased(1, Duration::from_secs(1)), episode(2)], unchanged);
    {
        let mut books = run.host.books();
        (books.refuse_ends, books.no_renewals) = (u32::MAX, true);
    }
    run.host.until("an abort", |b| b.aborted.contains_key(&id(1))).await;
    run.host.books().refuse_ends = 0;
    let cause = run.host.books().aborted[&id(1)].clone();
    assert_eq!(cause, "the end was not accepted while the lease was valid: no holder for the rollout");
    run.host.until("the other end", |b| b.ended.contains_key(&id(2))).await;
    run.stop().await;
}

#[tokio::test]
async fn ends_that_hang_do_not_hold_slots_but_bound_what_is_open() {
    let run = Run::start(PerEpisode, OK, (1..=20).map(episode), |c| c.slots = 2);
    run.host.books().refuse_ends = u32::MAX;
    let ending = || (run.stats().running, run.stats().ending) == (0, 4);
    wait_for("twice the slots", ending, || format!("{:?}", run.stats())).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(run.host.books().open.len(), 4);
    run.host.books().refuse_ends = 0;
    run.host.until("all ends", |b| b.ended.len() == 20).await;
    run.stop().await;
}

#[tokio::test]
async fn a_wait_is_named_and_asked_about_at_a_slow_beat() {
    let run = Run::start(PerEpisode, OK, [], |c| c.slots = 4);
    tokio::time::sleep(Duration::from_millis(1600)).await;
    assert_eq!(run.stats().wait.as_deref(), Some("no more episodes in the queue"));
    // 0, 50, 150, 350, 750, 1250 ms.
    let claims = run.host.books().claims.len();
    assert!((2..=7).contains(&claims), "{claims}");
    run.host.books().queue.extend((1..=4).map(episode));
    run.host.until("all ends", |b| b.ended.len() == 4).await;
    run.stop().await;
}
