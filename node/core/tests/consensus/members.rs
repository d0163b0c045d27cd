//! Who comes into a group, and who leaves it.

use std::collections::BTreeMap;
use std::time::Duration;

use starling_core::consensus::{JoinError, TypeConfig};
use starling_protocol::codec::encode;
use starling_protocol::control::ControlEntry;
use starling_protocol::manifest::Manifest;
use starling_protocol::record::Role;
use starling_protocol::wire::{ModelAnnouncement, Service};
use starling_protocol::{Line, Lineage, ModelName, NodeId, PolicyVersion, StoreId};
use tokio::time::sleep;

use crate::support::*;

#[tokio::test(start_paused = true)]
async fn servers_that_join_become_voters_one_by_one() {
    let mut world = World::with_group(8, 1).await;
    for n in 2..=6 {
        world.start(id(n), Role::Server).await;
        sleep(Duration::from_secs(3)).await;
    }
    world
        .until("five vote and one learns", Duration::from_secs(60), |w| {
            let leader = w.leaders().first().map(|(n, _)| *n);
            leader.is_some_and(|l| w.groups(l).voters(&model()).len() == 5 && w.groups(l).learners(&model()).len() == 1)
        })
        .await;
    world
        .until("all have the state", Duration::from_secs(5), |w| {
            w.nodes.keys().all(|n| w.groups(*n).state(&model()).is_some() && w.state(*n).model.is_some())
        })
        .await;
    // Two of five may go at once.
    let (leader, term) = world.leader().await;
    let learner = world.groups(leader).learners(&model())[0];
    let other = world.nodes.keys().copied().find(|n| *n != leader && *n != learner).unwrap();
    world.crash(leader, false);
    world.crash(other, false);
    let (_, new_term) = world.leader().await;
    assert!(new_term > term);
}

#[tokio::test(start_paused = true)]
async fn a_witness_votes_and_does_not_lead() {
    for seed in 0..5 {
        let mut world = World::new(seed);
        world.start(id(1), Role::Server).await;
        world.start(id(2), Role::Server).await;
        world.start(id(3), Role::Witness).await;
        world.settle().await;
        let first = ControlEntry::ModelCreated { model: model(), weights: Manifest::of(b"0"), files: BTreeMap::new() };
        world.groups(id(1)).create(&model(), &[id(1), id(2), id(3)], first).await.unwrap();
        let (leader, _) = world.leader().await;
        // The other server lags while the witness gets an entry; then the leader dies for good.
        let other = if leader == id(1) { id(2) } else { id(1) };
        world.network.isolate(other);
        world.groups(leader).propose(&model(), submit()).await.unwrap();
        world.network.heal_all();
        world.crash(leader, false);
        world.until("the other server leads, with the entry", Duration::from_secs(60), |w| w.view(other).is_self).await;
        assert!(!world.view(id(3)).is_self, "seed {seed}");
        world.groups(other).linearizable_barrier(&model()).await.unwrap();
        assert_eq!(world.state(other).jobs.len(), 1, "seed {seed}: what was committed is there");
    }
}

#[tokio::test(start_paused = true)]
async fn a_voter_that_stays_dead_is_replaced_and_comes_back_as_a_learner() {
    for seed in 30..33 {
        let mut world = World::with_group(seed, 4).await;
        // Four were asked to vote; an even number is one too many.
        world
            .until("three of four vote", Duration::from_secs(30), |w| {
                w.leaders().first().is_some_and(|(l, _)| w.groups(*l).voters(&model()).len() == 3)
            })
            .await;
        let (leader, _) = world.leader().await;
        let voters = world.groups(leader).voters(&model());
        let learner = world.nodes.keys().copied().find(|n| !voters.contains(n)).unwrap();
        let victim = voters.iter().copied().find(|n| *n != leader).unwrap();
        world.crash(victim, false);
        // A restart is no reason for a change, not even several.
        for _ in 0..5 {
            sleep(Duration::from_secs(20)).await;
            world.start(victim, Role::Server).await;
            sleep(Duration::from_secs(6)).await;
            world.crash(victim, false);
        }
        let (leader, _) = world.leader().await;
        assert_eq!(world.groups(leader).voters(&model()), voters, "seed {seed}: churn");
        let replaced = move |w: &World| {
            let leader = w.leaders().first().map(|(n, _)| *n);
            leader.is_some_and(|l| {
                let voters = w.groups(l).voters(&model());
                voters.len() == 3 && voters.contains(&learner) && !voters.contains(&victim)
            })
        };
        world.until("the learner has its seat", Duration::from_secs(90), replaced).await;
        // One more may die now.
        let second = world.nodes.keys().copied().find(|n| *n != leader).unwrap();
        world.crash(second, false);
        let (leader, _) = world.leader().await;
        world.groups(leader).linearizable_barrier(&model()).await.unwrap();
        world.start(second, Role::Server).await;
        world.start(victim, Role::Server).await;
        world
            .until("the lost one learns", Duration::from_secs(30), |w| {
                w.leaders().first().is_some_and(|(l, _)| w.groups(*l).learners(&model()) == [victim])
            })
            .await;
    }
}

#[tokio::test(start_paused = true)]
async fn only_members_speak_and_only_they_invite() {
    let mut world = World::with_group(31, 3).await;
    let (leader, term) = world.leader().await;
    // A stranger: alive, a witness that nobody needs, and so no member.
    let stranger = id(9);
    world.start(stranger, Role::Witness).await;
    world.settle().await;
    let groups = world.groups(leader);
    let outcome = groups.on_join(stranger, &model(), &Lineage::default()).await;
    assert!(matches!(outcome, Err(JoinError::UnknownInviter { .. })), "{outcome:?}");
    world.start(id(8), Role::Server).await;
    world
        .until("the new server is a member", Duration::from_secs(20), |w| {
            w.groups(leader).learners(&model()).contains(&id(8))
        })
        .await;
    assert_eq!(world.view(leader).term, term, "nobody stood for election meanwhile");
    assert!(groups.on_join(id(8), &model(), &Lineage::default()).await.is_ok(), "a learner is a member");

    // Known by announcement, unknown by log: only who is announced may call a node into it.
    let other = ModelName::new("other").unwrap();
    let a = ModelAnnouncement {
        model: other.clone(),
        line: Line::default(),
        voters: vec![id(2)],
        leader: None,
        version: PolicyVersion(0),
        running_job: None,
    };
    groups.on_announcement(&a);
    let refused = groups.on_join(id(3), &other, &Lineage::default()).await;
    assert!(matches!(refused, Err(JoinError::NotAMember { from, .. }) if from == id(3)), "{refused:?}");
    assert!(groups.on_join(id(2), &other, &Lineage::default()).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn one_inviter_cannot_fill_a_node_with_groups() {
    let mut world = World::new(32);
    for n in 1..=3 {
        world.start(id(n), Role::Server).await;
    }
    world.settle().await;
    let groups = world.groups(id(1));
    let name = |who: u8, n: u32| ModelName::new(format!("m{who}-{n}")).unwrap();
    for n in 0..64 {
        groups.on_join(id(2), &name(2, n), &Lineage::default()).await.unwrap();
    }
    let refused = groups.on_join(id(2), &name(2, 64), &Lineage::default()).await;
    assert!(matches!(refused, Err(JoinError::TooMany { max: 64, .. })), "{refused:?}");
    groups.on_join(id(2), &name(2, 0), &Lineage::default()).await.unwrap();
    groups.on_join(id(3), &name(3, 0), &Lineage::default()).await.unwrap();
    // The bound holds over a restart.
    world.crash(id(1), false);
    world.start(id(1), Role::Server).await;
    world.settle().await;
    let refused = world.groups(id(1)).on_join(id(2), &name(2, 64), &Lineage::default()).await;
    assert!(matches!(refused, Err(JoinError::TooMany { .. })), "{refused:?}");
}

#[tokio::test(start_paused = true)]
async fn a_voter_that_lost_its_store_and_kept_its_key_promises_nothing_in_its_old_seat() {
    for seed in 40..43 {
        let mut world = World::with_group(seed, 3).await;
        let (leader, _) = world.leader().await;
        let others: Vec<_> = world.nodes.keys().copied().filter(|n| *n != leader).collect();
        let (victim, third) = (others[0], others[1]);
        let old_store = world.groups(victim).store_id();
        world.groups(leader).propose(&model(), submit()).await.unwrap();
        // The two that remember the entry are gone, and two of three voters answer pings.
        world.crash(victim, true);
        world.crash(leader, false);
        world.lose_store(victim);
        world.start(victim, Role::Server).await;
        assert_ne!(world.groups(victim).store_id(), old_store);
        for _ in 0..60 {
            sleep(Duration::from_secs(1)).await;
            assert_eq!(world.leaders(), [], "seed {seed}: a vote that another store had given was given again");
        }
        let wait = world.view(third).wait.unwrap_or_default();
        assert!(wait.contains("lost its store"), "seed {seed}: {wait}");
        // With a quorum of those who remember, its seat is taken from it, and it gets another.
        world.start(leader, Role::Server).await;
        let store = world.groups(victim).store_id();
        let back = |w: &World| {
            let leads = w.leaders().first().map(|(n, _)| *n);
            leads.is_some_and(|l| l != victim && w.groups(l).voters(&model()).len() == 3)
                && w.groups(victim).state(&model()).is_some_and(|s| s.get().jobs.len() == 1)
        };
        world.until("it votes again, with the entry", Duration::from_secs(60), back).await;
        // The change of membership is complete, and the seat outlasts a restart.
        sleep(Duration::from_secs(3)).await;
        world.crash(victim, false);
        world.start(victim, Role::Server).await;
        assert_eq!(world.groups(victim).store_id(), store);
        world.crash(leader, false);
        let among = [victim, third];
        world
            .until("the two go on", Duration::from_secs(30), |w| w.leaders().iter().any(|(n, _)| among.contains(n)))
            .await;
    }
}

/// A Raft message of `sender` about votes, as its bytes on the wire: 1 asks for a vote, 2 asks whether it would be given.
fn ballot(kind: u8, sender: NodeId, from: StoreId, to: StoreId) -> bytes::Bytes {
    let request =
        openraft::raft::VoteRequest::<TypeConfig>::new(openraft::alias::VoteOf::<TypeConfig>::new(99, sender), None);
    encode(&(model(), Line::default(), from, to, kind, request)).into()
}

#[tokio::test(start_paused = true)]
async fn raft_messages_of_strangers_of_other_stores_and_in_foreign_names_are_refused() {
    let mut world = World::with_group(44, 3).await;
    let (leader, term) = world.leader().await;
    let member = world.nodes.keys().copied().find(|n| *n != leader).unwrap();
    // Alive, known to all, and no member: nobody needs a witness.
    let stranger = id(9);
    world.start(stranger, Role::Witness).await;
    world.settle().await;
    let (at_member, at_leader) = (world.groups(member).store_id(), world.groups(leader).store_id());
    let elsewhere = world.groups(stranger).store_id();
    let send = async |from: NodeId, body| {
        let transport = world.network.transport(from).shared();
        let reply = transport.call(leader, Service::Raft, body, Duration::from_secs(1)).await;
        reply.map(|_| "answered".to_owned()).unwrap_or_else(|e| e.to_string())
    };
    assert_eq!(send(member, ballot(2, member, at_member, at_leader)).await, "answered", "a member is heard");
    for kind in [1, 2] {
        let refused = send(stranger, ballot(kind, stranger, elsewhere, at_leader)).await;
        assert!(refused.contains("is not a member of the group"), "{refused}");
        let refused = send(stranger, ballot(kind, member, at_member, at_leader)).await;
        assert!(refused.contains("is not a member of the group"), "{refused}");
        let refused = send(member, ballot(kind, stranger, at_member, at_leader)).await;
        assert!(refused.contains("sent by"), "{refused}");
        let refused = send(member, ballot(kind, member, elsewhere, at_leader)).await;
        assert!(refused.contains("speaks for its store"), "{refused}");
        let refused = send(member, ballot(kind, member, at_member, at_member)).await;
        assert!(refused.contains("must be taken in again"), "{refused}");
    }
    let refused = send(member, bytes::Bytes::from_static(b"noise")).await;
    assert!(refused.contains("Raft call"), "{refused}");
    assert_eq!(world.leader().await, (leader, term), "nobody's term moved");
}
