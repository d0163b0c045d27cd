//! Nothing acknowledged is lost while the mesh has time to heal between two losses, whatever fails.
#![expect(clippy::unwrap_used, reason = "a test's helper fails its test by panicking")]

mod holders;

use holders::{JOB, TestKey, World, id, model, seal};
use starling_core::maintenance::DrainError;
use starling_core::rollouts::ReplicateError;
use starling_protocol::Hash;
use starling_protocol::record::{Intake, Role};
use starling_protocol::wire::RolloutAnnouncement;
use starling_storage::blobs::has_blob;
use starling_storage::quarantine::quarantined;
use starling_storage::{Batch, Durability, Family, Store};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::sleep;

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn rollouts_of_a_lost_holder_are_copied_and_then_the_next_one_may_be_lost_too() {
    let mut world = World::with_holders(3, Role::Witness).await;
    let ids = world.acknowledge(0..700).await;
    assert_eq!(world.fewest_copies(&ids), 2);
    world.kill(id(1));
    assert_eq!(world.fewest_copies(&ids), 1, "the test is about something");
    let grace = world.config.grace;
    sleep(grace - 5 * SECOND).await;
    let sent = |w: &World| [2, 3].map(|n| w.core(id(n)).maintenance().status().rollouts_restored);
    assert_eq!(sent(&world), [0, 0], "a node that is gone for less than the grace time is not replaced");
    let took = world.until("two copies again", 60 * SECOND, |w| w.fewest_copies(&ids) == 2).await;
    let surplus = ids.iter().map(|i| world.holders_of(*i).len()).max();
    assert_eq!(surplus, Some(2), "after {took:?}");
    world.kill(id(2));
    let report = world.audit(&ids);
    assert!(report.is_clean() && report.acknowledged == 700, "{report:?}");
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_is_back_within_the_grace_time_moves_nothing() {
    let mut world = World::with_holders(3, Role::Witness).await;
    let ids = world.acknowledge(0..100).await;
    world.kill(id(1));
    sleep(10 * SECOND).await;
    world.start(id(1), Role::Witness).await;
    world.settle().await;
    sleep(60 * SECOND).await;
    assert_eq!(world.fewest_copies(&ids), 2);
    for n in 1..=3 {
        assert_eq!(world.core(id(n)).maintenance().status().rollouts_restored, 0, "node {n}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_copy_that_a_disk_lost_comes_back_without_any_change_of_membership() {
    let world = World::with_holders(3, Role::Witness).await;
    let ids = world.acknowledge(0..20).await;
    for rollout in &ids {
        let loser = world.holders_of(*rollout)[0];
        starling_storage::rollouts::delete_rollouts(&*world.stores[&loser], &[(JOB, *rollout)]).unwrap();
    }
    assert_eq!(world.fewest_copies(&ids), 1);
    world.until("two copies again", 60 * SECOND, |w| w.fewest_copies(&ids) == 2).await;
}

#[tokio::test(start_paused = true)]
async fn files_and_weights_of_a_lost_holder_are_copied() {
    let mut world = World::with_holders(4, Role::Server).await;
    // Witnesses and servers hold; here the group has all four, and two of them the bytes.
    let core = world.core(id(1));
    let weights: Vec<u8> = (0..3_000_000u32).flat_map(|i| i.to_le_bytes()).collect();
    let files = BTreeMap::from([("notes.txt".to_owned(), b"hello".to_vec())]);
    world.as_node(id(1), core.create_model(&model(), weights.clone(), files)).await.unwrap();
    let chunk = Hash::of(&weights[1 << 20..2 << 20]);
    let file = Hash::of(b"hello");
    let having = |w: &World, h: Hash| -> Vec<u8> {
        (1..=4).filter(|n| w.is_running(id(*n)) && has_blob(&*w.stores[&id(*n)], h).unwrap()).collect()
    };
    world.until("the group knows", 20 * SECOND, |w| having(w, file).len() >= 2).await;
    // Take the file away from all but node 1, then node 1's helpers are gone: one copy is left.
    for n in 2..=4 {
        starling_storage::blobs::delete_blobs(&*world.stores[&id(n)], [file, chunk]).unwrap();
    }
    world.until("two copies", 60 * SECOND, |w| having(w, file).len() >= 2 && having(w, chunk).len() >= 2).await;
    world.kill(id(1));
    sleep(5 * SECOND).await;
    world
        .until("two copies without the first", 120 * SECOND, |w| {
            having(w, file).len() >= 2 && having(w, chunk).len() >= 2
        })
        .await;
}

#[tokio::test(start_paused = true)]
async fn a_full_holder_refuses_another_takes_it_and_without_one_nothing_is_acknowledged() {
    let world = World::with_holders(3, Role::Witness).await;
    let kept = world.acknowledge(0..50).await;
    let fill = |n: u8| {
        let store = &world.stores[&id(n)];
        store.set_capacity_bytes(Some(store.size_bytes().unwrap()));
    };
    fill(1);
    let more = world.acknowledge(50..80).await;
    assert!(more.iter().all(|r| world.holders_of(*r) == [id(2), id(3)]));
    world
        .until("its record says so", 20 * SECOND, |w| {
            w.core(id(99)).membership().record(id(1)).is_some_and(|r| r.intake == Intake::Full)
        })
        .await;
    fill(2);
    let gateway = world.core(id(99));
    let sealed = seal(80, TestKey(id(99)));
    let again = seal(80, TestKey(id(99)));
    let refused = world.as_node(id(99), gateway.rollouts().replicate(&model(), JOB, sealed, 2)).await;
    let Err(ReplicateError::TooFewHolders { need: 2, got: 1, tried, .. }) = refused else { panic!("{refused:?}") };
    assert!(tried.matches("disk full").count() == 2, "{tried}");
    // Reads go on, and with room again, so do writes.
    let fetched = world.as_node(id(99), gateway.rollouts().fetch(&[announced(&world, kept[0])])).await;
    assert_eq!(fetched.len(), 1);
    for n in 1..=2 {
        world.stores[&id(n)].set_capacity_bytes(None);
    }
    world.as_node(id(99), gateway.rollouts().replicate(&model(), JOB, again, 2)).await.unwrap();
    assert!(world.audit(&[kept, more].concat()).is_clean());
}

fn announced(world: &World, rollout: starling_protocol::RolloutId) -> RolloutAnnouncement {
    RolloutAnnouncement { id: rollout, job: JOB, holders: world.holders_of(rollout) }
}

fn corrupt(world: &World, node: u8, family: Family, key: Hash) {
    let mut batch = Batch::new();
    batch.put(family, key.0, b"flipped".to_vec());
    world.stores[&id(node)].write(batch, Durability::Synced).unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_corrupt_rollout_is_never_given_out_and_comes_back_from_another_holder() {
    let world = World::with_holders(2, Role::Witness).await;
    let ids = world.acknowledge(0..1).await;
    let wanted = RolloutAnnouncement { id: ids[0], job: JOB, holders: vec![id(1), id(2)] };
    // Asked for by a peer.
    corrupt(&world, 1, Family::Rollouts, ids[0]);
    let gateway = world.core(id(99));
    let fetched = world.as_node(id(99), gateway.rollouts().fetch(std::slice::from_ref(&wanted))).await;
    assert_eq!(fetched.len(), 1, "the other holder gave it");
    world.until("it is back", 5 * SECOND, |w| w.holders_of(ids[0]).len() == 2).await;
    assert_eq!(quarantined(&*world.stores[&id(1)]).unwrap().len(), 1);
    // Read by the node itself.
    corrupt(&world, 2, Family::Rollouts, ids[0]);
    let fetched = world.as_node(id(2), world.core(id(2)).rollouts().fetch(&[wanted])).await;
    assert_eq!(fetched.len(), 1);
    assert_eq!(world.holders_of(ids[0]).len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_drained_holder_hands_off_everything_takes_nothing_new_and_may_be_stopped() {
    let mut world = World::with_holders(4, Role::Witness).await;
    let mut ids = world.acknowledge(0..300).await;
    let core = world.core(id(1));
    world.as_node(id(1), async { core.drain() }).await.unwrap();
    world.until("drained", 60 * SECOND, |w| w.core(id(1)).drain_report(Vec::new()).done).await;
    let elsewhere = |w: &World, r| w.holders_of(r).into_iter().filter(|n| *n != id(1)).count();
    assert!(ids.iter().all(|r| elsewhere(&world, *r) >= 2));
    let record = world.core(id(99)).membership().record(id(1)).unwrap();
    assert_eq!(record.intake, Intake::Draining);
    let before = starling_storage::rollouts::count(&*world.stores[&id(1)], JOB).unwrap();
    ids.extend(world.acknowledge(300..340).await);
    assert_eq!(starling_storage::rollouts::count(&*world.stores[&id(1)], JOB).unwrap(), before);
    world.kill(id(1));
    world.kill(id(2));
    assert!(world.audit(&ids).is_clean(), "its copies were not needed any more");
}

#[tokio::test(start_paused = true)]
async fn a_drain_with_nobody_left_is_refused_and_changes_nothing() {
    let world = World::with_holders(1, Role::Server).await;
    let core = world.core(id(1));
    assert_eq!(core.drain(), Err(DrainError::OnlyHolder));
    assert!(!core.drain_report(Vec::new()).draining);
    world.acknowledge(0..1).await;
}

#[tokio::test(start_paused = true)]
async fn the_only_server_of_a_model_is_not_drained_and_a_leader_hands_its_lead_over() {
    let mut world = World::with_holders(1, Role::Server).await;
    world.start(id(50), Role::Witness).await;
    world.settle().await;
    let core = world.core(id(1));
    world.as_node(id(1), core.create_model(&model(), vec![1; 100], BTreeMap::new())).await.unwrap();
    assert_eq!(core.drain(), Err(DrainError::OnlyServer(model())));
    for n in 2..=3 {
        world.start(id(n), Role::Server).await;
    }
    world.settle().await;
    let leads = |w: &World, n: u8| w.core(id(n)).groups().leadership(&model()).is_some_and(|v| v.get().is_self);
    world.until("three voters", 60 * SECOND, |w| w.core(id(1)).groups().voters(&model()).len() >= 3).await;
    world.as_node(id(1), async { core.drain() }).await.unwrap();
    world.until("drained", 60 * SECOND, |w| w.core(id(1)).drain_report(Vec::new()).done).await;
    assert!(!leads(&world, 1));
    world.until("another leads", 20 * SECOND, |w| leads(w, 2) || leads(w, 3)).await;
}
