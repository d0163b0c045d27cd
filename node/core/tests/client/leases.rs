//! Leases: renewed by their own length, and taken over by the next leader.

use crate::world::{CLIENT, World, id, model, request};
use starling_protocol::control::ControlEntry;
use starling_protocol::job::{CollectionRule, EvaluateSpec, JobSpec, Sampling, TaskSetSpec, TrainerSpec};
use starling_protocol::{EpisodeId, JobId};
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// A job of four episodes a step whose tasks lie on the leader; returns the time at which it was in the log.
async fn submit(world: &World, lease_ttl_ms: u64) -> Instant {
    submit_of(world, lease_ttl_ms, 2).await
}

async fn submit_of(world: &World, lease_ttl_ms: u64, groups_per_step: u32) -> Instant {
    let leader = &world.nodes[&world.leader().unwrap()];
    let train = leader.scope.run(leader.core.blobs().put(b"{\"id\":\"a\"}\n{\"id\":\"b\"}\n".to_vec())).await.unwrap();
    // Every server has them, as `starling job submit` sees to.
    for server in crate::world::SERVERS {
        let node = &world.nodes[&server];
        node.scope.run(node.core.blobs().put(b"{\"id\":\"a\"}\n{\"id\":\"b\"}\n".to_vec())).await.unwrap();
    }
    let spec = JobSpec {
        name: "test".into(),
        model: model(),
        seed: 1,
        steps: 5,
        groups_per_step,
        group_size: 2,
        collection: CollectionRule::Groups,
        staleness_max: 1,
        replication: 2,
        lease_ttl_ms,
        optimizer_state_every: 0,
        sampling: Sampling::default(),
        trainer: TrainerSpec::default(),
        tasks: vec![TaskSetSpec { name: "s".into(), weight: 1.0, train, heldout: None }],
        evaluate: EvaluateSpec::default(),
    };
    let at = (leader.core.clock())();
    let entry = ControlEntry::JobSubmitted { job: JobId([5; 16]), spec: Box::new(spec), at };
    world.as_client(world.nodes[&CLIENT].core.models().propose(&model(), entry)).await.unwrap();
    Instant::now()
}

async fn claim(world: &World, want: usize) -> Vec<EpisodeId> {
    let mut given = Vec::new();
    while given.len() < want {
        let claimed = world.as_client(world.client.claim(&[], want - given.len(), &given)).await;
        assert!(claimed.revoked.is_empty());
        given.extend(claimed.assignments.iter().map(|a| a.episode));
        sleep(Duration::from_millis(10)).await;
    }
    given
}

#[tokio::test(start_paused = true)]
async fn a_new_jobs_first_episode_does_not_wait_for_the_announcements_beat() {
    let world = World::start().await;
    sleep(Duration::from_millis(2100)).await; // right behind a beat
    let submitted = submit(&world, 60_000).await;
    claim(&world, 1).await;
    // The leader reads tasks and weights; the beat is 2 s.
    assert!(submitted.elapsed() < Duration::from_millis(500), "{:?}", submitted.elapsed());
}

#[tokio::test(start_paused = true)]
async fn renewals_come_three_times_within_the_shortest_lease() {
    let world = World::start().await;
    let nothing = tokio::time::timeout(Duration::from_secs(60), world.client.renewal_due()).await;
    assert!(nothing.is_err(), "nothing is leased");
    submit(&world, 1500).await;
    let due = async {
        world.client.renewal_due().await;
        Instant::now()
    };
    // It waits already when the lease comes.
    let (due, claimed) = tokio::join!(due, async {
        claim(&world, 1).await;
        Instant::now()
    });
    let after = due - claimed;
    assert!((Duration::from_millis(450)..=Duration::from_millis(500)).contains(&after), "{after:?}");
    let held = claim(&world, 2).await;
    for _ in 0..10 {
        world.client.renewal_due().await;
        assert!(world.as_client(world.client.claim(&[], 0, &held)).await.revoked.is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn leases_survive_their_leader() {
    let world = World::start().await;
    submit(&world, 60_000).await;
    let held = claim(&world, 4).await;
    let old = world.leader().unwrap();
    world.kill(old);
    world.eventually("another leads", |w| w.leader().is_some_and(|l| l != old)).await;
    let ledger = |w: &World, field: &str| {
        let leader = w.leader().filter(|l| *l != old)?;
        w.nodes[&leader].core.model_status(&model())["ledger"][field].as_u64()
    };
    world.eventually("its ledger is open", |w| ledger(w, "running").is_some()).await;
    assert_eq!(ledger(&world, "running"), Some(0));
    let claimed = world.as_client(world.client.claim(&[], 0, &held)).await;
    assert!(claimed.renewed && claimed.revoked.is_empty(), "{claimed:?}");
    assert_eq!((ledger(&world, "running"), ledger(&world, "leases_adopted")), (Some(4), Some(4)));
    assert!(held.iter().all(|e| world.client.lease(*e).is_some()));
}

#[tokio::test(start_paused = true)]
async fn a_client_goes_on_from_its_block_while_its_leader_is_out_of_reach_and_gives_it_back_in_the_end() {
    let world = World::start().await;
    submit_of(&world, 60_000, 8).await;
    let leader = world.leader().unwrap();
    let ledger = || world.nodes[&leader].core.model_status(&model())["ledger"]["running"].as_u64().unwrap();
    let mut held = claim(&world, 4).await;
    assert_eq!(ledger(), 4, "nothing is known of its pace yet");
    held.extend(claim(&world, 1).await);
    assert_eq!(ledger(), 9, "five run, and a block of as many as began");
    // From the block first, so what the leader gives now refills it; a quarter of the quota at most.
    held.extend(claim(&world, 3).await);
    assert_eq!(ledger(), 13, "eight run, and five lie in the block: as many as began before this claim");

    for (from, to) in [(CLIENT, leader), (leader, CLIENT)] {
        world.network.cut_one_way(id(from), id(to));
    }
    let mut out_of_reach = 0;
    let wait = loop {
        let claimed = world.as_client(world.client.claim(&[], 1, &held)).await;
        assert!(claimed.revoked.is_empty());
        out_of_reach += claimed.assignments.len();
        held.extend(claimed.assignments.iter().map(|a| a.episode));
        if claimed.assignments.is_empty() {
            break claimed.wait;
        }
    };
    assert_eq!(out_of_reach, 5, "the whole block, and nothing beyond it");
    assert!(wait.is_some(), "and it says why");
    assert_eq!(held.len(), held.iter().collect::<std::collections::BTreeSet<_>>().len(), "nothing began twice");

    world.network.heal_all();
    world
        .eventually("the leader hears of all of them", |w| {
            w.nodes[&CLIENT].core.transport().connected().contains(&id(leader))
        })
        .await;
    held.extend(claim(&world, 1).await);
    assert_eq!(held.len(), 14);
    let with_block = ledger();
    assert!(with_block > 14, "a new block: {with_block}");
    world.as_client(async { world.nodes[&CLIENT].core.drain() }).await.unwrap();
    let claimed = world.as_client(world.client.claim(&[], 4, &held)).await;
    assert!(claimed.assignments.is_empty() && claimed.revoked.is_empty());
    assert_eq!(ledger(), 14, "what had not begun went back");
}

/// A claim asks one voter after another, each for seconds: that is a wait with a reason long before the last one failed.
#[tokio::test(start_paused = true)]
async fn a_claim_that_nobody_answers_is_told_while_it_lasts() {
    let world = World::start().await;
    submit(&world, 60_000).await;
    claim(&world, 1).await;
    assert!(world.client.waits().is_empty(), "{:?}", world.client.waits());
    world.network.isolate(id(CLIENT));
    let begun = Instant::now();
    let mut asking = Box::pin(world.as_client(world.client.claim(&[], 1, &[])));
    let told = tokio::select! {
        biased;
        claimed = &mut asking => panic!("nobody can be reached: {claimed:?}"),
        told = async {
            while world.client.waits().is_empty() {
                sleep(Duration::from_millis(50)).await;
            }
            begun.elapsed()
        } => told,
    };
    assert!(told < Duration::from_secs(2), "{told:?}");
    let waits = world.client.waits();
    assert_eq!(waits, ["tiny: no answer yet from its leader, which was asked for episodes, for 1 s"]);
    let claimed = asking.await;
    assert!(claimed.assignments.is_empty() && claimed.wait.is_some(), "{claimed:?}");
    assert!(world.client.waits().is_empty(), "what came of it is the claim's to tell: {:?}", world.client.waits());
}

/// An ended episode whose holders do not answer is not acknowledged, and that is told too.
#[tokio::test(start_paused = true)]
async fn an_ended_episode_that_nobody_takes_is_told_while_it_lasts() {
    let world = World::start().await;
    submit(&world, 60_000).await;
    let held = claim(&world, 1).await;
    let assignment = world.client.lease(held[0]).unwrap().assignment;
    let mut answer = world.generate(request(15, 5)).await;
    answer.read_all(&world).await;
    let rollout = answer.rollout(&assignment, 5);
    world.network.isolate(id(CLIENT));
    let mut sealing = Box::pin(world.as_client(world.client.seal(rollout)));
    tokio::select! {
        biased;
        sealed = &mut sealing => panic!("one node is not enough: {sealed:?}"),
        () = sleep(Duration::from_millis(1500)) => {}
    }
    let waits = world.client.waits();
    assert_eq!(waits, ["tiny: no answer yet from enough nodes that are to hold an ended episode, for 1 s"]);
    drop(sealing);
    assert!(world.client.waits().is_empty(), "{:?}", world.client.waits());
}

#[tokio::test(start_paused = true)]
async fn everyone_who_claims_for_an_episode_hears_that_its_lease_was_lost() {
    let world = World::start().await;
    submit(&world, 1000).await;
    let held = claim(&world, 2).await;
    sleep(Duration::from_secs(3)).await; // nobody renews them
    for asked in ["the node, which looks after its gateway's episodes", "the runner of the agents"] {
        let claimed = world.as_client(world.client.claim(&[], 0, &held)).await;
        let lost: std::collections::BTreeSet<_> = claimed.revoked.iter().collect();
        assert_eq!(lost, held.iter().collect(), "{asked}");
        assert_eq!(claimed.revoked.len(), held.len(), "{asked}");
    }
    // What was given back here is no loss.
    let next = claim(&world, 1).await;
    let assignment = world.client.lease(next[0]).unwrap().assignment;
    world.as_client(world.client.abort(&assignment, "enough".into())).await;
    assert!(world.as_client(world.client.claim(&[], 0, &next)).await.revoked.is_empty());
}
