//! Servers that die, are cut off or fall silent in the middle of an answer.

use crate::compute::{STEP, sampled};
use crate::world::{CLIENT, SERVERS, World, id, model, request};
use starling_core::client::GenerationError;
use starling_protocol::ModelName;
use starling_protocol::rollout::FinishReason;
use starling_protocol::wire::Generate;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// A pause that an agent does not notice: two steps of the engine, a few hops, and what the network takes to say so.
const AT_ONCE: Duration = Duration::from_millis(250);

fn unbroken(seed: u64, n: usize) -> Vec<u32> {
    sampled(&request(seed, 1).prompt, seed, 0, n)
}

#[tokio::test(start_paused = true)]
async fn an_unbroken_answer_has_one_receipt_for_all_of_it() {
    let world = World::start().await;
    let mut answer = world.generate(request(5, 12)).await;
    answer.read_all(&world).await;
    assert_eq!(answer.ids(), unbroken(5, 12));
    assert_eq!(answer.end.as_ref().unwrap().0, FinishReason::Length);
    assert_eq!(answer.unreceipted(12), 0);
    assert_eq!(answer.frames[0].top.len(), 2);
    assert_eq!(world.asked(), [1]);
    assert_eq!(world.client.counts().servers_lost, 0);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_dies_mid_answer_is_replaced_at_once_and_its_tokens_are_context() {
    let world = World::start().await;
    let mut answer = world.generate(request(6, 20)).await;
    answer.read(&world, 8).await;
    let had = answer.frames.len();
    world.kill(1);
    answer.read_all(&world).await;
    assert_eq!(answer.ids(), unbroken(6, 20), "the continued answer is the unbroken one");
    assert!(answer.longest_pause < AT_ONCE, "{:?}", answer.longest_pause);
    assert_eq!(answer.unreceipted(20), had);
    assert_eq!(answer.end.unwrap().0, FinishReason::Length);
    assert!(answer.frames.iter().all(|t| t.top.len() == 2), "alternatives as before");
    assert_eq!(world.client.counts().servers_lost, 1);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_dies_before_its_first_token_costs_no_receipt() {
    let world = World::start().await;
    world.set_silent(1, true);
    let mut answer = world.generate(request(7, 10)).await;
    sleep(STEP).await;
    world.kill(1);
    answer.read_all(&world).await;
    assert_eq!(answer.ids(), unbroken(7, 10));
    assert_eq!(answer.unreceipted(10), 0);
    assert!(answer.longest_pause < AT_ONCE, "{:?}", answer.longest_pause);
}

#[tokio::test(start_paused = true)]
async fn two_losses_in_one_answer_leave_both_servers_tokens_as_context() {
    let world = World::start().await;
    let mut answer = world.generate(request(8, 30)).await;
    answer.read(&world, 5).await;
    world.kill(1);
    answer.read(&world, 15).await;
    let had = answer.frames.len();
    world.kill(2);
    answer.read_all(&world).await;
    assert_eq!(answer.ids(), unbroken(8, 30));
    assert_eq!((answer.unreceipted(30), world.asked()), (had, vec![1, 2, 3]));
    assert_eq!(world.client.counts().servers_lost, 2);
}

#[tokio::test(start_paused = true)]
async fn a_server_whose_frames_no_longer_arrive_is_hedged_long_before_its_connection_ends() {
    let world = World::start().await;
    let mut answer = world.generate(request(9, 40)).await;
    answer.read(&world, 10).await;
    world.network.cut_one_way(id(1), id(CLIENT));
    answer.read_all(&world).await;
    assert_eq!(answer.ids(), unbroken(9, 40));
    // 2 s of silence, then a new stream: SWIM still believes in it, since others reach it, and the transport's idle
    // timeout is 10 s.
    assert!(answer.longest_pause < Duration::from_secs(2) + AT_ONCE, "{:?}", answer.longest_pause);
    assert!(answer.longest_pause >= Duration::from_secs(2));
    assert_eq!(world.client.counts().hedges_won, 1);
    assert!(answer.unreceipted(40) >= 10);
}

#[tokio::test(start_paused = true)]
async fn a_silent_server_is_hedged_and_the_loser_is_cancelled() {
    let world = World::start().await;
    let mut answer = world.generate(request(10, 40)).await;
    answer.read(&world, 10).await;
    let had = answer.frames.len();
    world.set_silent(1, true);
    answer.read(&world, had + 5).await;
    world.set_silent(1, false);
    answer.read_all(&world).await;
    assert_eq!(answer.ids(), unbroken(10, 40));
    assert!(answer.longest_pause < Duration::from_secs(2) + AT_ONCE, "{:?}", answer.longest_pause);
    let counts = world.client.counts();
    assert_eq!((counts.hedges, counts.hedges_won), (1, 1));
    assert!(answer.unreceipted(40) >= had);
    world
        .eventually("the silent server hears that nobody wants more", |w| {
            w.nodes[&1].control.cancelled.load(Ordering::Relaxed) == 1
        })
        .await;
}

#[tokio::test(start_paused = true)]
async fn a_stalled_server_that_speaks_first_goes_on_with_its_receipt() {
    let world = World::start().await;
    let mut answer = world.generate(request(11, 20)).await;
    answer.read(&world, 5).await;
    SERVERS.iter().for_each(|n| world.set_silent(*n, true));
    let speak = async {
        sleep(Duration::from_millis(2500)).await;
        world.set_silent(1, false);
    };
    tokio::join!(answer.read_all(&world), speak);
    let counts = world.client.counts();
    assert_eq!((counts.hedges, counts.hedges_won), (1, 0));
    assert_eq!((answer.ids(), answer.unreceipted(20)), (unbroken(11, 20), 0));
    world.set_silent(2, false);
    world.eventually("the hedge is cancelled", |w| w.nodes[&2].control.cancelled.load(Ordering::Relaxed) == 1).await;
}

#[tokio::test(start_paused = true)]
async fn a_busy_server_is_passed_over() {
    let world = World::start().await;
    world.nodes[&1].control.busy.store(true, Ordering::Relaxed);
    let mut answer = world.generate(request(12, 5)).await;
    answer.read_all(&world).await;
    assert_eq!((answer.ids(), answer.unreceipted(5), world.asked()), (unbroken(12, 5), 0, vec![2]));
}

#[tokio::test(start_paused = true)]
async fn all_servers_gone_is_a_wait_with_a_reason_that_ends_when_one_is_back() {
    let mut world = World::start().await;
    let mut answer = world.generate(request(13, 20)).await;
    answer.read(&world, 5).await;
    SERVERS.iter().for_each(|n| world.kill(*n));
    let since = Instant::now();
    let mut waiting = Box::pin(answer.read(&world, 20));
    let told = async {
        while world.client.waits().is_empty() {
            sleep(Duration::from_millis(50)).await;
        }
        since.elapsed()
    };
    let told = tokio::select! {
        biased;
        () = &mut waiting => panic!("there is no server"),
        told = told => told,
    };
    assert!(told < Duration::from_secs(5), "{told:?}");
    let waits = world.client.waits();
    assert!(waits[0].starts_with("1 answer waits for a server of model tiny"), "{waits:?}");
    tokio::select! {
        biased;
        () = &mut waiting => panic!("there is no server"),
        () = sleep(Duration::from_secs(20)) => {}
    }
    drop(waiting);
    world.restart(1).await;
    world.restart(2).await;
    answer.read_all(&world).await;
    assert_eq!(answer.ids(), unbroken(13, 20));
    assert!(answer.unreceipted(20) >= 5);
    assert!(world.client.waits().is_empty());
}

#[tokio::test(start_paused = true)]
async fn an_answer_without_servers_fails_after_a_minute_by_name() {
    let world = World::start().await;
    let mut answer = world.generate(request(14, 20)).await;
    answer.read(&world, 5).await;
    SERVERS.iter().for_each(|n| world.kill(*n));
    let since = Instant::now();
    let error = loop {
        if let Err(e) = world.as_client(answer.generation.next()).await.unwrap() {
            break e;
        }
    };
    assert!(matches!(&error, GenerationError::NoServer { .. }), "{error}");
    assert!(error.to_string().contains("no live one has it loaded"), "{error}");
    let waited = since.elapsed().as_secs();
    assert!((59..=62).contains(&waited), "{waited} s");
    assert!(world.as_client(answer.generation.next()).await.is_none());
    assert!(world.client.waits().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_server_lost_behind_the_last_token_needs_no_successor() {
    let world = World::start().await;
    world.nodes[&1].control.endless.store(true, Ordering::Relaxed);
    let mut answer = world.generate(request(15, 6)).await;
    answer.read(&world, 6).await;
    world.kill(1);
    answer.read_all(&world).await;
    let (finish, receipt) = answer.end.clone().unwrap();
    assert_eq!((finish, receipt), (FinishReason::Length, None));
    assert_eq!((answer.unreceipted(6), world.asked()), (6, vec![1]));
}

#[tokio::test(start_paused = true)]
async fn what_no_server_could_answer_is_refused_at_once() {
    let world = World::start().await;
    let refused = |request: Generate| async { world.as_client(world.client.generate(request)).await.unwrap_err() };
    let unknown = ModelName::new("unknown").unwrap();
    let got = refused(Generate { model: unknown.clone(), ..request(1, 1) }).await;
    assert_eq!(got, GenerationError::NoModel(unknown));
    let got = refused(request(1, 0)).await.to_string();
    assert!(got.contains("max_tokens"), "{got}");
    let got = refused(Generate { prompt: vec![1; 1 << 18], ..request(1, 1) }).await.to_string();
    assert!(got.contains("262145 tokens"), "{got}");
    assert_eq!(world.nodes[&CLIENT].core.models().get(&model()).unwrap().model, model());
}
