//! A leader whose disk fails gives the leadership up, and stands again when its disk works.

use std::time::Duration;

use starling_protocol::PolicyVersion;
use starling_protocol::control::Applied;
use starling_storage::{Durability, blobs};
use tokio::time::sleep;

use crate::support::*;

#[tokio::test(start_paused = true)]
async fn a_leader_whose_disk_is_full_hands_over_and_stands_again_later() {
    for seed in 40..43 {
        let world = World::with_group(seed, 3).await;
        let (old, term) = world.leader().await;
        world.groups(old).propose(&model(), submit()).await.unwrap();
        world.disks[&old].is_full();
        let refused = blobs::put_blob(&world.nodes[&old].store, b"new weights", Durability::Synced);
        assert!(refused.is_err());
        let others: Vec<_> = world.nodes.keys().copied().filter(|n| *n != old).collect();
        let (new, new_term) = world.leader_among(&others).await;
        assert!(new_term > term && !world.view(old).is_self, "seed {seed}");
        // It votes on: the log is small, and its place is reserved. So the step needs no one else.
        let third = others.into_iter().find(|n| *n != new).unwrap();
        world.network.isolate(third);
        assert_eq!(world.groups(new).propose_as(&model(), new_term, step(new_term, 1, &[1])).await, Ok(Applied::Yes));
        // With the new leader cut off too there is a quorum without it, but one of the two must not lead.
        world.network.heal_all();
        world.network.isolate(new);
        // It lacks the step, which the one with the full disk has: that one must help, and still not act as a leader.
        world
            .until("the third leads", Duration::from_secs(40), |w| {
                assert!(!w.view(old).is_self, "seed {seed}: the full disk leads");
                w.view(third).is_self
            })
            .await;
        world.groups(third).linearizable_barrier(&model()).await.unwrap();
        assert_eq!(world.state(third).version, PolicyVersion(1), "seed {seed}: what was committed is there");
        world.network.heal_all();
        sleep(Duration::from_secs(3)).await;
        world.disks[&old].works();
        sleep(Duration::from_secs(12)).await;
        let (now, _) = world.leader().await;
        world.groups(now).transfer(&model(), old).await.unwrap();
        world.until("it leads again", Duration::from_secs(3), |w| w.view(old).is_self).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_cannot_log_stops_leading_says_why_and_comes_back() {
    for seed in 43..46 {
        let world = World::with_group(seed, 3).await;
        let (old, term) = world.leader().await;
        world.groups(old).propose(&model(), submit()).await.unwrap();
        world.disks[&old].fails();
        let lost = world.groups(old).propose_as(&model(), term, step(term, 1, &[1])).await;
        assert!(lost.is_err(), "seed {seed}: {lost:?}");
        world.until("it says why", Duration::from_secs(5), |w| w.view(old).wait.is_some()).await;
        let wait = world.view(old).wait.unwrap();
        assert!(!world.view(old).is_self && wait.contains("the disk is gone"), "seed {seed}: {wait}");
        let others: Vec<_> = world.nodes.keys().copied().filter(|n| *n != old).collect();
        let (new, new_term) = world.leader_among(&others).await;
        let next = world.state(new).version.0 + 1;
        assert_eq!(
            world.groups(new).propose_as(&model(), new_term, step(new_term, next, &[2])).await,
            Ok(Applied::Yes),
            "seed {seed}"
        );
        world.disks[&old].works();
        world
            .until("it follows again, with the step", Duration::from_secs(20), |w| {
                w.view(old).leader.is_some() && w.state(old).version == PolicyVersion(next)
            })
            .await;
        assert_eq!(world.view(old).wait, None, "seed {seed}");
    }
}
