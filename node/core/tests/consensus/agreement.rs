//! One leader, one log: what is committed stays, what is deposed does not count.

use std::collections::BTreeMap;
use std::time::Duration;

use starling_core::consensus::ProposeError;
use starling_protocol::control::{Applied, ControlEntry, Refusal};
use starling_protocol::manifest::Manifest;
use starling_protocol::record::Role;
use starling_protocol::{PolicyVersion, Term};
use tokio::time::sleep;

use crate::support::*;

#[tokio::test(start_paused = true)]
async fn one_leader_is_elected_and_all_learn_the_first_entry() {
    let world = World::with_group(1, 3).await;
    let (leader, term) = world.leader().await;
    world
        .until("all have the first entry and see the leader", Duration::from_secs(3), |w| {
            w.nodes.keys().all(|n| {
                w.state(*n).model == Some(model()) && w.view(*n).leader == Some(leader) && w.view(*n).term == term
            })
        })
        .await;
    assert_eq!(world.leaders(), [(leader, term)]);
    assert!(world.nodes.keys().all(|n| world.view(*n).wait.is_none()));
    assert_eq!(world.groups(leader).voters(&model()), [id(1), id(2), id(3)]);
    assert!(world.view(leader).quorum_age().unwrap() < Duration::from_secs(1));
}

#[tokio::test(start_paused = true)]
async fn a_single_server_leads_its_group_alone() {
    let world = World::with_group(2, 1).await;
    let (leader, term) = world.leader().await;
    world.groups(leader).propose(&model(), submit()).await.unwrap();
    sleep(Duration::from_secs(30)).await;
    assert_eq!(world.leaders(), [(leader, term)], "no one else answers, and no one else needs to");
    assert_eq!(world.groups(leader).propose_as(&model(), term, step(term, 1, &[1])).await, Ok(Applied::Yes));
    world.groups(leader).linearizable_barrier(&model()).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_deposed_leaders_step_is_never_applied() {
    for seed in 0..5 {
        let world = World::with_group(seed, 3).await;
        let (old, old_term) = world.leader().await;
        world.groups(old).propose(&model(), submit()).await.unwrap();
        world.network.isolate(old);

        // Proposed at once, before the old leader can know: accepted, but it cannot commit.
        let pending = tokio::spawn({
            let groups = world.groups(old);
            async move { groups.propose_as(&model(), old_term, step(old_term, 1, &[1, 2])).await }
        });
        let rest: Vec<_> = world.nodes.keys().copied().filter(|n| *n != old).collect();
        let (new, new_term) = world.leader_among(&rest).await;
        assert!(new_term > old_term);
        assert!(!world.view(old).is_self, "two leaders at a time");
        assert_eq!(
            world.groups(new).propose_as(&model(), new_term, step(new_term, 1, &[3, 4])).await,
            Ok(Applied::Yes),
            "seed {seed}"
        );

        // The old leader knows by now that its quorum is gone: refused, and nothing is logged.
        let late = world.groups(old).propose_as(&model(), old_term, step(old_term, 1, &[5])).await;
        assert!(matches!(late, Err(ProposeError::NotLeader(_) | ProposeError::NoQuorum(_))), "{late:?}");

        world.network.heal_all();
        let outcome = pending.await.unwrap();
        assert!(matches!(outcome, Err(ProposeError::Unknown { .. } | ProposeError::NotLeader(_))), "{outcome:?}");
        world
            .until("all converge", Duration::from_secs(5), |w| {
                w.nodes.keys().all(|n| w.state(*n).version == PolicyVersion(1))
            })
            .await;
        sleep(Duration::from_secs(5)).await;
        for node in world.nodes.keys() {
            let state = world.state(*node);
            assert_eq!(state.version_term, new_term);
            assert!(state.consumed.contains_key(&rollout(3)));
            assert!(!state.consumed.contains_key(&rollout(1)) && !state.consumed.contains_key(&rollout(5)));
        }
        // With the right term number, but made under the old one: the log's own term decides.
        let (leader, term) = world.leader().await;
        let stale = world.groups(leader).propose(&model(), step(old_term, 2, &[6])).await;
        assert_eq!(stale, Ok(Applied::Refused(Refusal::StaleTerm { log: term, got: old_term })));
    }
}

#[tokio::test(start_paused = true)]
async fn a_rollout_is_consumed_once() {
    let world = World::with_group(3, 3).await;
    let (leader, term) = world.leader().await;
    let groups = world.groups(leader);
    groups.propose(&model(), submit()).await.unwrap();
    assert_eq!(groups.propose_as(&model(), term, step(term, 1, &[1, 2])).await, Ok(Applied::Yes));
    let twice = groups.propose_as(&model(), term, step(term, 2, &[2, 3])).await;
    let refusal = Refusal::ConsumedTwice { rollout: rollout(2), by: PolicyVersion(1) };
    assert_eq!(twice, Ok(Applied::Refused(refusal)));
    assert_eq!(groups.propose_as(&model(), term, step(term, 2, &[3])).await, Ok(Applied::Yes));
    assert_eq!(groups.propose_as(&model(), Term(term.0 + 1), step(term, 3, &[4])).await.map_err(drop), Err(()));
}

#[tokio::test(start_paused = true)]
async fn a_restart_of_all_nodes_keeps_the_state() {
    for power in [false, true] {
        let mut world = World::with_group(4, 3).await;
        let (leader, term) = world.leader().await;
        let groups = world.groups(leader);
        groups.propose(&model(), submit()).await.unwrap();
        for version in 1..=20 {
            groups.propose_as(&model(), term, step(term, version, &[version])).await.unwrap();
        }
        let before = world.state(leader);
        let nodes: Vec<_> = world.nodes.keys().copied().collect();
        nodes.iter().for_each(|n| world.crash(*n, power));
        sleep(Duration::from_secs(1)).await;
        for node in nodes {
            world.start(node, Role::Server).await;
        }
        let (leader, new_term) = world.leader().await;
        assert!(new_term >= term, "terms never fall");
        world.groups(leader).linearizable_barrier(&model()).await.unwrap();
        assert_eq!(world.state(leader), before, "power failure: {power}");
        let twice = world.groups(leader).propose_as(&model(), new_term, step(new_term, 21, &[7])).await;
        assert!(matches!(twice, Ok(Applied::Refused(Refusal::ConsumedTwice { .. }))), "{twice:?}");
        let next = world.groups(leader).propose_as(&model(), new_term, step(new_term, 21, &[21])).await;
        assert_eq!(next, Ok(Applied::Yes));
    }
}

#[tokio::test(start_paused = true)]
async fn an_isolated_leader_stops_leading_and_says_what_is_missing() {
    let world = World::with_group(5, 3).await;
    let (old, _) = world.leader().await;
    world.network.isolate(old);
    let stopped = world.until("it stops", Duration::from_secs(3), |w| !w.view(old).is_self).await;
    assert!(stopped <= world.config.election_timeout_max + Duration::from_millis(300), "{stopped:?}");
    let named = world.until("the wait has a name", Duration::from_secs(7), |w| w.view(old).wait.is_some()).await;
    assert!(stopped + named <= Duration::from_secs(7));
    let wait = world.view(old).wait.unwrap();
    assert!(wait.contains("1 of 3 voters are alive, 2 must answer; missing: "), "{wait}");
    let error = world.groups(old).propose(&model(), submit()).await.unwrap_err();
    assert!(matches!(error, ProposeError::NoQuorum(_)), "{error:?}");
    assert!(world.groups(old).linearizable_barrier(&model()).await.is_err());
    world.network.heal_all();
    world.until("it follows", Duration::from_secs(8), |w| w.view(old).leader.is_some()).await;
    assert_eq!(world.view(old).wait, None);
}

#[tokio::test(start_paused = true)]
async fn a_one_way_cut_of_the_leader_makes_room_for_another() {
    let world = World::with_group(6, 3).await;
    let (old, term) = world.leader().await;
    let rest: Vec<_> = world.nodes.keys().copied().filter(|n| *n != old).collect();
    // It still hears them, they do not hear it.
    rest.iter().for_each(|n| world.network.cut_one_way(old, *n));
    let (new, new_term) = world.leader_among(&rest).await;
    assert!(new != old && new_term > term);
    assert!(!world.view(old).is_self);
}

#[tokio::test(start_paused = true)]
async fn a_node_that_was_away_for_long_catches_up_by_a_snapshot() {
    let mut world = World::new(7);
    world.config.snapshot_after_entries = 100;
    for n in 1..=3 {
        world.start(id(n), Role::Server).await;
    }
    world.settle().await;
    let first = ControlEntry::ModelCreated { model: model(), weights: Manifest::of(b"0"), files: BTreeMap::new() };
    world.groups(id(1)).create(&model(), &[id(1), id(2), id(3)], first).await.unwrap();
    let (leader, term) = world.leader().await;
    let away = world.nodes.keys().copied().find(|n| *n != leader).unwrap();
    world.groups(leader).propose(&model(), submit()).await.unwrap();
    world.crash(away, true);
    for version in 1..=600 {
        let applied = world.groups(leader).propose_as(&model(), term, step(term, version, &[version])).await;
        assert_eq!(applied, Ok(Applied::Yes), "version {version}");
    }
    world.start(away, Role::Server).await;
    world.until("it catches up", Duration::from_secs(20), |w| w.state(away).version == PolicyVersion(600)).await;
    assert_eq!(world.state(away), world.state(leader));
    // What it installed survives the next restart, and the steps after it are applied on top.
    world.groups(leader).propose_as(&model(), term, step(term, 601, &[601])).await.unwrap();
    world.crash(away, true);
    world.start(away, Role::Server).await;
    world.until("it comes back", Duration::from_secs(20), |w| w.state(away).version == PolicyVersion(601)).await;
    assert_eq!(world.state(away), world.state(leader));
    assert_eq!(world.state(away).consumed.len(), 601);
}

#[tokio::test(start_paused = true)]
async fn leadership_moves_when_asked() {
    let world = World::with_group(9, 3).await;
    let (old, term) = world.leader().await;
    let to = world.nodes.keys().copied().find(|n| *n != old).unwrap();
    world.groups(old).transfer(&model(), to).await.unwrap();
    let took = world.until("it leads", Duration::from_secs(2), |w| w.view(to).is_self).await;
    assert!(took < Duration::from_secs(1), "{took:?}");
    assert!(world.view(to).term > term && !world.view(old).is_self);
}
