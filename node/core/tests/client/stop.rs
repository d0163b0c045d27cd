//! Answers that their reader cuts short.

use crate::compute::STEP;
use crate::world::{CLIENT, World, id, request};
use starling_protocol::rollout::FinishReason;
use std::time::Duration;
use tokio::time::{Instant, sleep};

#[tokio::test(start_paused = true)]
async fn a_stop_gets_a_receipt_for_exactly_the_kept_tokens() {
    let world = World::start().await;
    let mut answer = world.generate(request(1, 40)).await;
    answer.read(&world, 7).await;
    answer.generation.stop(6);
    answer.read_all(&world).await;
    assert_eq!(answer.end.as_ref().unwrap().0, FinishReason::Stop);
    assert_eq!(answer.unreceipted(6), 0);
}

#[tokio::test(start_paused = true)]
async fn a_stop_that_crosses_the_end_gets_the_second_receipt() {
    let world = World::start().await;
    let mut answer = world.generate(request(2, 7)).await;
    answer.read(&world, 7).await;
    sleep(STEP).await; // the end is here, and has not been read
    answer.generation.stop(5);
    answer.read_all(&world).await;
    assert_eq!((answer.end.as_ref().unwrap().0, answer.unreceipted(5)), (FinishReason::Stop, 0));
}

#[tokio::test(start_paused = true)]
async fn a_stop_in_a_continued_answer_is_signed_for_what_its_server_sampled() {
    let world = World::start().await;
    let mut answer = world.generate(request(3, 40)).await;
    answer.read(&world, 5).await;
    world.kill(1);
    answer.read(&world, 12).await;
    answer.generation.stop(11);
    answer.read_all(&world).await;
    let unreceipted = answer.unreceipted(11);
    assert!((5..11).contains(&unreceipted), "{unreceipted}");
    assert_eq!(answer.end.unwrap().0, FinishReason::Stop);
}

#[tokio::test(start_paused = true)]
async fn a_stop_within_a_lost_servers_tokens_needs_no_server() {
    let world = World::start().await;
    let mut answer = world.generate(request(4, 40)).await;
    answer.read(&world, 5).await;
    world.kill(1);
    answer.generation.stop(4);
    let since = Instant::now();
    answer.read_all(&world).await;
    assert_eq!(answer.end.clone().unwrap(), (FinishReason::Stop, None));
    assert_eq!(answer.unreceipted(4), 4);
    assert!(since.elapsed() < Duration::from_millis(100));
    assert_eq!(world.asked(), [1]);
}

#[tokio::test(start_paused = true)]
async fn a_stop_that_the_server_cannot_hear_ends_without_a_receipt_in_two_seconds() {
    let world = World::start().await;
    let mut answer = world.generate(request(5, 400)).await;
    answer.read(&world, 5).await;
    world.network.cut_one_way(id(CLIENT), id(1));
    answer.generation.stop(5);
    let since = Instant::now();
    answer.read_all(&world).await;
    assert_eq!(answer.end.clone().unwrap(), (FinishReason::Stop, None));
    assert!(since.elapsed() < Duration::from_millis(2100), "{:?}", since.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_stop_token_ends_a_continued_answer() {
    let world = World::start().await;
    let stop = crate::compute::sampled(&request(6, 1).prompt, 6, 0, 12)[11];
    let mut request = request(6, 40);
    request.stop_token_ids = vec![stop];
    let mut answer = world.generate(request).await;
    answer.read(&world, 4).await;
    world.kill(1);
    answer.read_all(&world).await;
    assert_eq!((answer.frames.len(), answer.end.clone().unwrap().0), (12, FinishReason::Stop));
    assert!(answer.unreceipted(12) < 12);
}
