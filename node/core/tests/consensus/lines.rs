//! A quorum that is lost for good, and lines that meet again.

use std::collections::BTreeSet;
use std::time::Duration;

use starling_core::consensus::{JoinError, ReopenError};
use starling_protocol::control::{Applied, Refusal};
use starling_protocol::manifest::Manifest;
use starling_protocol::record::Role;
use starling_protocol::{NodeId, PolicyVersion, Term};
use starling_storage::{SharedStore, blobs, consumed, given_up, steps};
use tokio::time::sleep;

use crate::support::*;

const AFTER: Duration = Duration::from_secs(30);
/// The wait, an election, and the beats between.
const OPENED: Duration = Duration::from_secs(45);

/// Servers that agree to a new generation after [`AFTER`], with a job and `steps` steps, each of one rollout.
async fn world(seed: u64, servers: u8, steps: u64) -> (World, NodeId, Term) {
    let mut world = World::new(seed);
    world.config.generation_after = Some(AFTER);
    world.grow(servers).await;
    let (leader, term) = world.leader().await;
    world.groups(leader).propose(&model(), submit()).await.unwrap();
    for n in 1..=steps {
        train(&world, leader, term, &[n]).await;
    }
    world
        .until("all have the steps", Duration::from_secs(5), |w| {
            w.nodes.keys().all(|n| w.state(*n).version == PolicyVersion(steps))
        })
        .await;
    (world, leader, term)
}

async fn train(world: &World, leader: NodeId, term: Term, consumed: &[u64]) -> PolicyVersion {
    let entry = next_step(&world.state(leader), term, consumed);
    assert_eq!(world.groups(leader).propose_as(&model(), term, entry).await, Ok(Applied::Yes));
    world.state(leader).version
}

fn generation(world: &World, node: NodeId) -> u8 {
    world.groups(node).lineage(&model()).unwrap().line.generation
}

/// What the store of `node` says of steps and consumed rollouts is what its state says.
fn assert_store_is_the_states(world: &World, node: NodeId) {
    let store: SharedStore = world.stores[&node].clone();
    let state = world.state(node);
    assert_eq!(consumed::all_consumed(&store).unwrap(), state.consumed.to_sorted(), "marks of {node}");
    for step in steps::steps(&store, &model()).unwrap() {
        assert!(state.lineage.contains(step.version), "{node} keeps the step to {}", step.version);
    }
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_lost_its_quorum_does_not_keep_its_follower_from_a_new_generation() {
    for (seed, nth) in [(53, 0), (54, 1), (55, 3)] {
        let (mut world, leader, _) = world(seed, 5, 2).await;
        let follower = world.nodes.keys().copied().filter(|n| *n != leader).nth(nth).unwrap();
        let lost: Vec<_> = world.nodes.keys().copied().filter(|n| ![leader, follower].contains(n)).collect();
        lost.iter().for_each(|n| world.crash(*n, true));
        // The leader goes on sending heartbeats, and the follower hears them.
        let leads =
            |w: &World| [leader, follower].iter().any(|n| w.view(*n).is_self && w.view(*n).term.generation() == 1);
        world.until("one of the two leads a new generation", OPENED, leads).await;
        world
            .until("the other is in it", Duration::from_secs(30), |w| {
                [leader, follower].iter().all(|n| generation(w, *n) == 1 && w.state(*n).version == PolicyVersion(2))
            })
            .await;
    }
}

#[tokio::test(start_paused = true)]
async fn the_survivor_of_a_lost_quorum_goes_on_and_takes_new_servers_in() {
    for seed in 50..53 {
        let (mut world, old_leader, old_term) = world(seed, 3, 4).await;
        let survivor = world.nodes.keys().copied().find(|n| *n != old_leader).unwrap();
        let lost: Vec<_> = world.nodes.keys().copied().filter(|n| *n != survivor).collect();
        lost.iter().for_each(|n| world.crash(*n, true));
        world
            .until("the wait says what comes", Duration::from_secs(15), |w| {
                w.view(survivor).wait.is_some_and(|why| why.contains("a new generation will be opened by this node in"))
            })
            .await;
        let wait = world.view(survivor).wait.unwrap();
        assert!(wait.contains("1 of 3 voters are alive, 2 must answer; missing: "), "{wait}");
        assert_eq!(generation(&world, survivor), 0);
        let took = world.until("it leads again", OPENED, |w| w.view(survivor).is_self).await;
        assert!(took > AFTER / 3, "seed {seed}: it waited {took:?}");
        let term = world.view(survivor).term;
        assert!(term > old_term && term.generation() == 1, "seed {seed}: term {term}");
        assert_eq!(world.state(survivor).version, PolicyVersion(4), "the last committed step stays");
        let twice = next_step(&world.state(survivor), term, &[3]);
        let twice = world.groups(survivor).propose_as(&model(), term, twice).await;
        assert!(matches!(twice, Ok(Applied::Refused(Refusal::ConsumedTwice { .. }))), "{twice:?}");
        let orphan = world.groups(survivor).propose_as(&model(), term, step(term, 5, &[5])).await;
        assert!(
            matches!(orphan, Ok(Applied::Refused(Refusal::NotNext { .. }))),
            "a number of the old line: {orphan:?}"
        );
        assert_eq!(train(&world, survivor, term, &[5]).await.to_string(), "g1.5");

        world.start(id(8), Role::Server).await;
        world.start(id(9), Role::Server).await;
        let version = world.state(survivor).version;
        world
            .until("the new servers vote", Duration::from_secs(30), |w| {
                w.groups(survivor).voters(&model()).len() == 3
                    && [8, 9].iter().all(|n| w.groups(id(*n)).models().len() == 1 && w.state(id(*n)).version == version)
            })
            .await;
        // A restart of everyone finds the same line.
        for node in [survivor, id(8), id(9)] {
            world.crash(node, true);
        }
        for node in [survivor, id(8), id(9)] {
            world.start(node, Role::Server).await;
        }
        let (leader, term) = world.leader().await;
        assert_eq!(train(&world, leader, term, &[6]).await.to_string(), "g1.6");
        for node in [survivor, id(8), id(9)] {
            world.until("all have it", Duration::from_secs(5), |w| w.state(node) == w.state(leader)).await;
            assert_store_is_the_states(&world, node);
        }
        // Those that were lost come back after all: they are taken in.
        for node in lost {
            world.start(node, Role::Server).await;
        }
        let old: Vec<_> = world.nodes.keys().copied().collect();
        world
            .until("all are in the line", Duration::from_secs(60), |w| {
                old.iter().all(|n| generation(w, *n) == 1 && w.state(*n).version.to_string() == "g1.6")
            })
            .await;
    }
}

#[tokio::test(start_paused = true)]
async fn of_two_lines_that_meet_one_stays_and_what_only_the_other_consumed_is_free_again() {
    for seed in 53..57 {
        let (mut world, _, _) = world(seed, 5, 3).await;
        let (a, b) = (id(1), id(2));
        world.network.partition(&[a]);
        world.network.partition(&[b]);
        for n in 3..=5 {
            world.crash(id(n), true);
        }
        world.until("both lead", OPENED, |w| w.view(a).is_self && w.view(b).is_self).await;
        let lines = [a, b].map(|n| world.groups(n).lineage(&model()).unwrap());
        assert!(lines.iter().all(|l| l.line.generation == 1) && lines[0] != lines[1]);
        let winner = if lines[0].line > lines[1].line { a } else { b };
        let loser = if winner == a { b } else { a };
        // Both consume rollout 10; the loser alone 11 and 12.
        train(&world, winner, world.view(winner).term, &[10]).await;
        train(&world, loser, world.view(loser).term, &[10, 11]).await;
        let orphan = train(&world, loser, world.view(loser).term, &[12]).await;
        let lost_term = world.view(loser).term;
        world.network.heal_all();
        world
            .until("the loser is in the winner's line", Duration::from_secs(60), |w| {
                w.groups(loser).lineage(&model()) == w.groups(winner).lineage(&model())
                    && w.state(loser).version == w.state(winner).version
            })
            .await;
        assert_eq!(generation(&world, winner), 1, "nobody opened another");
        assert_eq!(world.state(loser), world.state(winner), "seed {seed}");
        for node in [winner, loser] {
            assert_store_is_the_states(&world, node);
            assert!(!world.state(node).consumed.contains_key(&rollout(11)), "seed {seed}");
            assert_ne!(world.state(node).version, orphan);
        }
        let (leader, term) = world.leader().await;
        assert_ne!(term.mark(), lost_term.mark(), "seed {seed}: the winner's terms go on");
        train(&world, leader, term, &[11, 12]).await;
        let late = world.groups(loser).propose_as(&model(), lost_term, step(lost_term, 9, &[13])).await;
        assert!(late.is_err(), "seed {seed}: {late:?}");
        // Nor does it return to the line that it left.
        let lost = lines.iter().min_by_key(|l| l.line).unwrap();
        let refused = world.groups(loser).on_join(winner, &model(), lost).await;
        assert!(matches!(refused, Err(JoinError::LesserLine { .. })), "{refused:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_majority_that_trained_on_yields_to_a_greater_generation() {
    for seed in 57..60 {
        let (world, _, _) = world(seed, 3, 3).await;
        let alone = id(3);
        world.network.isolate(alone);
        let (leader, term) = world.leader_among(&[id(1), id(2)]).await;
        train(&world, leader, term, &[20]).await;
        world.until("the minority opened a generation", OPENED, |w| w.view(alone).is_self).await;
        assert_eq!(train(&world, leader, term, &[21]).await, PolicyVersion(5), "the majority trains on");
        train(&world, alone, world.view(alone).term, &[22]).await;
        world.network.heal_all();
        world
            .until("all are in generation 1", Duration::from_secs(60), |w| {
                w.nodes.keys().all(|n| generation(w, *n) == 1 && w.state(*n).version.to_string() == "g1.4")
            })
            .await;
        let (leader, term) = world.leader().await;
        train(&world, leader, term, &[20, 21]).await;
        let newest = world.state(leader);
        world.until("all converge", Duration::from_secs(20), |w| w.nodes.keys().all(|n| w.state(*n) == newest)).await;
        for node in world.nodes.keys() {
            assert_store_is_the_states(&world, *node);
        }
        world.until("all vote", Duration::from_secs(60), |w| w.groups(leader).voters(&model()).len() == 3).await;
    }
}

#[tokio::test(start_paused = true)]
async fn steps_whose_weights_are_lost_are_given_up_if_older_ones_are_there() {
    let (mut world, leader, _) = world(63, 3, 5).await;
    let survivor = world.nodes.keys().copied().find(|n| *n != leader).unwrap();
    for version in [2_u64, 3] {
        blobs::put_manifest_bytes(&*world.stores[&survivor], &version.to_be_bytes()).unwrap();
    }
    let lost: Vec<_> = world.nodes.keys().copied().filter(|n| *n != survivor).collect();
    lost.iter().for_each(|n| world.crash(*n, false));
    world.until("it leads", OPENED, |w| w.view(survivor).is_self).await;
    let state = world.state(survivor);
    assert_eq!((state.version, state.lineage.line.steps), (PolicyVersion(3), 3));
    assert_eq!(state.weights, Some(Manifest::of(&3_u64.to_be_bytes())));
    assert_eq!((state.jobs[0].steps, &state.jobs[0].groups_opened), (3, &vec![3]));
    assert!(state.consumed.contains_key(&rollout(3)) && !state.consumed.contains_key(&rollout(4)));
    assert_store_is_the_states(&world, survivor);
    let store: SharedStore = world.stores[&survivor].clone();
    let noted = given_up::all_given_up(&store).unwrap();
    assert_eq!(BTreeSet::from_iter(noted), BTreeSet::from([rollout(4), rollout(5)]));
    assert_eq!(train(&world, survivor, world.view(survivor).term, &[4, 5]).await.to_string(), "g1.4");
    world.crash(survivor, true);
    world.start(survivor, Role::Server).await;
    world.until("it leads again", OPENED, |w| w.view(survivor).is_self).await;
    assert_eq!(world.state(survivor).version.to_string(), "g1.4");
    assert_store_is_the_states(&world, survivor);
}

#[tokio::test(start_paused = true)]
async fn a_crash_at_any_write_of_an_opening_leaves_one_line_or_the_other() {
    let mut generations = BTreeSet::new();
    for writes in 0..6 {
        let (mut world, leader, _) = world(60, 3, 3).await;
        let survivor = world.nodes.keys().copied().find(|n| *n != leader).unwrap();
        let lost: Vec<_> = world.nodes.keys().copied().filter(|n| *n != survivor).collect();
        lost.iter().for_each(|n| world.crash(*n, true));
        // Candidates with pre-vote write nothing while they wait.
        sleep(Duration::from_secs(15)).await;
        world.disks[&survivor].fails_after(writes);
        let mut waited = Duration::ZERO;
        while !world.disks[&survivor].has_failed() && waited < OPENED {
            sleep(Duration::from_millis(100)).await;
            waited += Duration::from_millis(100);
        }
        world.crash(survivor, true);
        world.disks[&survivor].works();
        world.start(survivor, Role::Server).await;
        let now = generation(&world, survivor);
        generations.insert(now);
        assert!(now <= 1, "after {writes} writes");
        assert_eq!(world.state(survivor).lineage, world.groups(survivor).lineage(&model()).unwrap());
        world.until("it leads", OPENED, |w| w.view(survivor).is_self).await;
        assert_eq!(generation(&world, survivor), 1, "after {writes} writes: opened once");
        // What it had applied and not synced was in its log.
        assert_eq!(world.state(survivor).version.steps(), 3, "after {writes} writes");
        let twice = next_step(&world.state(survivor), world.view(survivor).term, &[3]);
        let twice = world.groups(survivor).propose_as(&model(), world.view(survivor).term, twice).await;
        assert!(matches!(twice, Ok(Applied::Refused(Refusal::ConsumedTwice { .. }))), "{twice:?}");
        train(&world, survivor, world.view(survivor).term, &[9]).await;
        assert_store_is_the_states(&world, survivor);
    }
    assert_eq!(generations, BTreeSet::from([0, 1]), "both sides of the change were hit");
}

#[tokio::test(start_paused = true)]
async fn a_crash_at_any_write_of_a_move_leaves_one_line_or_the_other() {
    let mut generations = BTreeSet::new();
    for writes in 0..8 {
        let (mut world, _, _) = world(61, 3, 3).await;
        let alone = id(3);
        world.network.isolate(alone);
        let (leader, term) = world.leader_among(&[id(1), id(2)]).await;
        train(&world, leader, term, &[20]).await;
        world.until("the minority opened a generation", OPENED, |w| w.view(alone).is_self).await;
        // The one that follows moves; its leader is gone, so that nothing but the move is written.
        let mover = if leader == id(1) { id(2) } else { id(1) };
        world.until("it has the step", Duration::from_secs(2), |w| w.state(mover).version == PolicyVersion(4)).await;
        world.crash(leader, true);
        sleep(Duration::from_secs(10)).await;
        world.disks[&mover].fails_after(writes);
        world.network.heal_all();
        let mut waited = Duration::ZERO;
        while !world.disks[&mover].has_failed() && waited < Duration::from_secs(20) {
            sleep(Duration::from_millis(50)).await;
            waited += Duration::from_millis(50);
        }
        world.crash(mover, true);
        world.disks[&mover].works();
        world.start(mover, Role::Server).await;
        let now = generation(&world, mover);
        generations.insert(now);
        let (state, store): (_, SharedStore) = (world.state(mover), world.stores[&mover].clone());
        let marked = consumed::is_consumed(&store, rollout(20)).unwrap();
        match now {
            // What the state says is as durable as the mark: both may be gone, and are in the log.
            0 => assert_eq!(state.version == PolicyVersion(4), marked.is_some(), "after {writes} writes"),
            _ => assert_eq!((state.version == PolicyVersion(4), marked), (false, None), "after {writes} writes"),
        }
        world
            .until("it is in the new line", Duration::from_secs(60), |w| {
                generation(w, mover) == 1 && w.state(mover) == w.state(alone)
            })
            .await;
        assert_store_is_the_states(&world, mover);
    }
    assert_eq!(generations, BTreeSet::from([0, 1]), "both sides of the change were hit");
}

#[tokio::test(start_paused = true)]
async fn an_operator_reopens_at_once_but_not_while_a_majority_is_alive() {
    let mut world = World::new(62);
    world.config.generation_after = None;
    world.grow(3).await;
    let (leader, term) = world.leader().await;
    world.groups(leader).propose(&model(), submit()).await.unwrap();
    train(&world, leader, term, &[1]).await;
    let refused = world.groups(leader).reopen_line(&model()).await;
    assert!(
        matches!(&refused, Err(ReopenError::Refused { reason, .. }) if reason.contains("its leader is")),
        "{refused:?}"
    );
    let followers: Vec<_> = world.nodes.keys().copied().filter(|n| *n != leader).collect();
    world.crash(leader, true);
    world.crash(followers[0], true);
    let alone = followers[1];
    world
        .until("the wait says why nothing comes", Duration::from_secs(15), |w| {
            w.view(alone)
                .wait
                .is_some_and(|why| why.contains("held back by this node, whose generation-after is never"))
        })
        .await;
    sleep(Duration::from_secs(3600)).await;
    assert_eq!(generation(&world, alone), 0, "never means never");
    let line = world.groups(alone).reopen_line(&model()).await.unwrap();
    assert_eq!((line.generation, line.steps, line.opened_by), (1, 1, alone));
    world.until("it leads", Duration::from_secs(10), |w| w.view(alone).is_self).await;
    let again = world.groups(alone).reopen_line(&model()).await;
    assert!(matches!(again, Err(ReopenError::Refused { .. })), "{again:?}");
    train(&world, alone, world.view(alone).term, &[2]).await;
    assert_eq!(world.state(alone).version.to_string(), "g1.2");
    assert_eq!(world.state(alone).lineage.line, line);
}
