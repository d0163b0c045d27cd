use super::*;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

fn n(i: u8) -> NodeId {
    NodeId([i; 32])
}
fn set(ids: &[u8]) -> BTreeSet<NodeId> {
    ids.iter().map(|i| n(*i)).collect()
}

/// Everyone named is a server, alive if in `live`; who is not is gone.
fn situation(voters: &[u8], learners: &[u8], live: &[u8]) -> Situation {
    let (voters, learners, live) = (set(voters), set(learners), set(live));
    let all: BTreeSet<_> = voters.iter().chain(&learners).chain(&live).copied().collect();
    Situation {
        leader: *voters.intersection(&live).next().unwrap_or(&n(0)),
        steady: live.clone(),
        gone: all.difference(&live).copied().collect(),
        caught_up: learners.clone(),
        servers: all,
        voters,
        learners,
        live,
        voters_max: 5,
        ..Situation::default()
    }
}

fn with_witness(mut s: Situation, witness: u8) -> Situation {
    s.servers.remove(&n(witness));
    s.witnesses.insert(n(witness));
    s.live.insert(n(witness));
    s.steady.insert(n(witness));
    s
}

fn apply(s: &mut Situation, change: Change) {
    match change {
        Change::Promote(node) => assert!(s.learners.contains(&node), "{node} was no learner"),
        Change::Demote(node) => assert!(s.voters.contains(&node)),
        Change::Remove(node) => assert!(s.voters.contains(&node) || s.learners.contains(&node)),
        Change::AddLearner(_) => {}
    }
    *s = s.clone().after(change);
}

/// Carries out changes until none is due; returns them.
fn settle(s: &mut Situation) -> Vec<Change> {
    let mut changes = Vec::new();
    while let Some(change) = plan(s) {
        apply(s, change);
        changes.push(change);
        assert!(changes.len() < 100, "no end: {changes:?}");
    }
    changes
}

#[test]
fn a_new_server_learns_first_and_votes_then() {
    assert_eq!(plan(&situation(&[1], &[], &[1, 2])), Some(Change::AddLearner(n(2))));
    assert_eq!(plan(&situation(&[1], &[2], &[1, 2])), Some(Change::Promote(n(2))));
    assert_eq!(plan(&situation(&[1, 2], &[], &[1, 2])), None);
}

#[test]
fn four_servers_make_three_voters_and_five_make_five() {
    assert_eq!(plan(&situation(&[1, 2, 3], &[4], &[1, 2, 3, 4])), None);
    assert_eq!(plan(&situation(&[1, 2, 3], &[4, 5], &[1, 2, 3, 4, 5])), Some(Change::Promote(n(4))));
    assert_eq!(plan(&situation(&[1, 2, 3, 4], &[5], &[1, 2, 3, 4, 5])), Some(Change::Promote(n(5))));
    assert_eq!(plan(&situation(&[1, 2, 3, 4, 5], &[6], &[1, 2, 3, 4, 5, 6])), None);
}

#[test]
fn voters_come_in_pairs() {
    // Five servers, but the fifth is not ready: four voters would bear no more failures than three.
    let mut s = situation(&[1, 2, 3], &[4, 5], &[1, 2, 3, 4, 5]);
    s.caught_up.remove(&n(5));
    assert_eq!(plan(&s), None);
    // The fifth dies for good after the fourth got its vote: back to three, and the leader is not the one who goes.
    let mut s = situation(&[1, 2, 3, 4], &[5], &[1, 2, 3, 4]);
    s.leader = n(4);
    assert_eq!(settle(&mut s), [Change::Demote(n(3)), Change::Remove(n(5))]);
}

#[test]
fn a_learner_that_lags_does_not_vote_yet() {
    let mut s = situation(&[1, 2], &[3], &[1, 2, 3]);
    s.caught_up.clear();
    assert_eq!(plan(&s), None);
}

#[test]
fn without_a_quorum_nothing_is_changed() {
    assert_eq!(plan(&situation(&[1, 2], &[3], &[1, 3])), None);
    assert_eq!(plan(&situation(&[1, 2, 3, 4, 5], &[6], &[1, 2, 6])), None);
}

#[test]
fn a_learner_takes_the_seat_of_a_voter_that_is_gone() {
    let mut s = situation(&[1, 2, 3], &[4], &[1, 2, 4]);
    assert_eq!(settle(&mut s), [Change::Promote(n(4)), Change::Remove(n(3))]);
    assert_eq!(s.voters, set(&[1, 2, 4]));
}

#[test]
fn a_voter_that_is_gone_keeps_its_seat_while_its_leaving_helps_nobody() {
    assert_eq!(plan(&situation(&[1, 2, 3], &[], &[1, 2])), None);
    // Two that are gone are another matter: three of three bear one more failure.
    let mut s = situation(&[1, 2, 3, 4, 5], &[], &[1, 2, 3]);
    assert_eq!(settle(&mut s), [Change::Remove(n(4)), Change::Remove(n(5))]);
    assert_eq!(s.margin(), 1);
}

#[test]
fn a_learner_that_is_gone_is_removed() {
    assert_eq!(plan(&situation(&[1, 2, 3], &[4], &[1, 2, 3])), Some(Change::Remove(n(4))));
}

#[test]
fn a_witness_fills_up_to_an_odd_number_and_no_further() {
    let with = |voters: &[u8], learners: &[u8], live: &[u8]| plan(&with_witness(situation(voters, learners, live), 9));
    assert_eq!(with(&[1, 2], &[], &[1, 2]), Some(Change::AddLearner(n(9))));
    assert_eq!(with(&[1, 2], &[9], &[1, 2]), Some(Change::Promote(n(9))));
    assert_eq!(with(&[1, 2, 9], &[], &[1, 2]), None);
    assert_eq!(with(&[1], &[], &[1]), None);
    assert_eq!(with(&[1, 2, 3], &[], &[1, 2, 3]), None);
}

#[test]
fn a_witness_leaves_its_seat_to_a_server() {
    let mut s = with_witness(situation(&[1, 2, 9], &[], &[1, 2, 3, 9]), 9);
    assert_eq!(settle(&mut s), [Change::AddLearner(n(3)), Change::Promote(n(3)), Change::Demote(n(9))]);
    assert_eq!(s.voters, set(&[1, 2, 3]));
    // And takes it again when that server is gone.
    s.live.remove(&n(3));
    s.steady.remove(&n(3));
    s.gone.insert(n(3));
    assert_eq!(settle(&mut s), [Change::Promote(n(9)), Change::Remove(n(3))]);
}

#[test]
fn a_draining_voter_leaves_its_seat_once_another_votes() {
    let mut s = situation(&[1, 2, 3], &[4], &[1, 2, 3, 4]);
    s.draining = set(&[3]);
    assert!(!s.clone().keeps_seat(n(3)) && s.clone().keeps_seat(n(2)));
    assert_eq!(settle(&mut s), [Change::Promote(n(4)), Change::Demote(n(3))]);
    assert_eq!(s.learners, set(&[3]), "it goes on as a learner, and is not taken back");
    // A witness takes it where no server can.
    let mut s = with_witness(situation(&[1, 2, 3], &[], &[1, 2, 3]), 9);
    s.draining = set(&[3]);
    let changes = [Change::AddLearner(n(9)), Change::Promote(n(9)), Change::Demote(n(3))];
    assert_eq!(settle(&mut s), changes);
}

#[test]
fn a_draining_voter_keeps_a_seat_that_nobody_else_can_take() {
    let mut s = situation(&[1, 2, 3], &[], &[1, 2, 3]);
    s.draining = set(&[3]);
    assert_eq!(plan(&s), None, "two voters bear no more failures than three of which one leaves");
    assert!(s.clone().keeps_seat(n(3)));
    // Of two voters it is another matter: both must answer.
    let mut s = situation(&[1, 2], &[], &[1, 2]);
    s.draining = set(&[2]);
    assert_eq!(settle(&mut s), [Change::Demote(n(2))]);
    // And two that leave together leave a group that bears one more failure, or one that needs nobody else.
    let mut s = situation(&[1, 2, 3, 4, 5], &[], &[1, 2, 3, 4, 5]);
    s.draining = set(&[4, 5]);
    assert_eq!(settle(&mut s), [Change::Demote(n(4)), Change::Demote(n(5))]);
    let mut s = situation(&[1, 2, 3], &[], &[1, 2, 3]);
    s.draining = set(&[2, 3]);
    assert_eq!(settle(&mut s), [Change::Demote(n(2)), Change::Demote(n(3))]);
    // But not while the two others that answer are needed.
    let mut s = situation(&[1, 2, 3, 4, 5], &[], &[1, 2, 3]);
    (s.draining, s.gone) = (set(&[2, 3]), BTreeSet::new());
    assert_eq!(plan(&s), None);
}

#[test]
fn a_draining_leader_keeps_its_vote_until_another_leads() {
    let mut s = situation(&[1, 2, 3], &[4], &[1, 2, 3, 4]);
    s.draining = set(&[1]);
    assert_eq!(settle(&mut s), [Change::Promote(n(4))]);
    s.leader = n(2);
    assert_eq!(settle(&mut s), [Change::Demote(n(1))]);
}

#[test]
fn who_lost_its_store_leaves_its_seat_at_once_and_comes_in_again() {
    let mut s = situation(&[1, 2, 3], &[], &[1, 2]);
    (s.forgetful, s.gone) = (set(&[3]), BTreeSet::new());
    assert_eq!(plan(&s), Some(Change::Remove(n(3))));
    apply(&mut s, Change::Remove(n(3)));
    // Now it is a server like any other.
    s.forgetful.clear();
    s.live.insert(n(3));
    s.steady.insert(n(3));
    assert_eq!(settle(&mut s), [Change::AddLearner(n(3)), Change::Promote(n(3))]);
    // A learner takes the seat first, where there is one.
    let mut s = situation(&[1, 2, 3], &[4], &[1, 2, 4]);
    (s.forgetful, s.gone) = (set(&[3]), BTreeSet::new());
    assert_eq!(settle(&mut s), [Change::Promote(n(4)), Change::Remove(n(3))]);
    // Nothing can be changed without a quorum of those who remember.
    let mut s = situation(&[1, 2, 3], &[], &[1]);
    (s.forgetful, s.gone) = (set(&[2, 3]), BTreeSet::new());
    assert_eq!(plan(&s), None);
}

#[test]
fn a_draining_server_is_not_taken_in() {
    let mut s = situation(&[1, 2, 3], &[5], &[1, 2, 3, 4, 5]);
    s.draining = set(&[4, 5]);
    assert_eq!(plan(&s), None);
}

#[test]
fn a_much_better_learner_takes_the_seat_of_the_slowest_voter() {
    let mut s = situation(&[1, 2, 3], &[4], &[1, 2, 3, 4]);
    s.speeds = BTreeMap::from([(n(1), 100), (n(2), 50), (n(3), 100), (n(4), 900)]);
    assert_eq!(plan(&s), None, "the leader decides what is better");
    s.better = set(&[4]);
    assert_eq!(settle(&mut s), [Change::Promote(n(4)), Change::Demote(n(2))]);
    // One that is better votes already: leadership can move to it, and a second change gains nothing.
    let mut s = situation(&[1, 2, 3], &[4], &[1, 2, 3, 4]);
    s.better = set(&[2, 4]);
    assert_eq!(plan(&s), None);
}

#[test]
fn the_faster_of_two_learners_takes_a_free_seat() {
    let mut s = situation(&[1, 2, 3], &[4, 5], &[1, 2, 4, 5]);
    s.speeds = BTreeMap::from([(n(4), 10), (n(5), 20)]);
    assert_eq!(plan(&s), Some(Change::Promote(n(5))));
}

#[test]
fn a_node_that_flaps_is_neither_steady_nor_gone() {
    let seconds = Duration::from_secs;
    let mut sightings = Sightings::default();
    let known = set(&[1, 2]);
    for t in 0..600 {
        let live = if t % 8 < 4 { set(&[1, 2]) } else { set(&[1]) };
        sightings.note(seconds(t), &known, &live);
        assert!(!sightings.steady(seconds(t), seconds(5)).contains(&n(2)), "second {t}");
        assert!(sightings.gone(seconds(t), seconds(30)).is_empty(), "second {t}");
    }
    for t in 600..640 {
        sightings.note(seconds(t), &known, &set(&[1]));
    }
    assert_eq!(sightings.gone(seconds(639), seconds(30)), set(&[2]));
    assert!(sightings.steady(seconds(639), seconds(5)).contains(&n(1)));
}

/// Anything that can be, sensible or not.
fn random(rng: &mut ChaCha8Rng) -> Situation {
    let mut s = Situation { voters_max: rng.random_range(1..=7), leader: n(1), ..Situation::default() };
    s.voters.insert(n(1));
    s.live.insert(n(1));
    s.servers.insert(n(1));
    s.steady.insert(n(1));
    for i in 2..=rng.random_range(1..=12_u8) {
        let node = n(i);
        if rng.random_bool(0.25) {
            s.witnesses.insert(node)
        } else {
            s.servers.insert(node)
        };
        match rng.random_range(0..3) {
            0 => drop(s.voters.insert(node)),
            1 => drop(s.learners.insert(node)),
            _ => {}
        }
        if rng.random_bool(0.7) {
            s.live.insert(node);
            if rng.random_bool(0.8) {
                s.steady.insert(node);
            }
        } else if rng.random_bool(0.7) {
            s.gone.insert(node);
        } else if rng.random_bool(0.3) {
            s.forgetful.insert(node);
        }
        if s.learners.contains(&node) && rng.random_bool(0.7) {
            s.caught_up.insert(node);
        }
        if s.live.contains(&node) && rng.random_bool(0.2) {
            s.draining.insert(node);
        } else if s.servers.contains(&node) && s.live.contains(&node) && rng.random_bool(0.2) {
            s.better.insert(node);
            s.speeds.insert(node, rng.random_range(1000..2000));
        } else if rng.random_bool(0.5) {
            s.speeds.insert(node, rng.random_range(1..1000));
        }
    }
    if rng.random_bool(0.1) {
        s.draining.insert(n(1));
    }
    s
}

#[test]
fn in_any_situation_changes_are_safe_few_and_final() {
    for seed in 0..20_000 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut s = random(&mut rng);
        let before = s.clone();
        let nodes = s.servers.len() + s.witnesses.len();
        let mut changes = Vec::new();
        while let Some(change) = plan(&s) {
            assert_eq!(plan(&s), Some(change), "seed {seed}: another answer to the same question");
            let (margin, lasting, learners) = (s.margin(), s.lasting_margin(), s.learners.clone());
            apply(&mut s, change);
            changes.push(change);
            let leaves = matches!(change, Change::Demote(node) if s.draining.contains(&node));
            let kept = if leaves { s.margin() >= 0 && s.lasting_margin() >= lasting } else { s.margin() >= margin };
            assert!(margin >= 0 && kept, "seed {seed}: {change:?} thins the quorum of {before:?}");
            assert!(s.voters.contains(&n(1)), "seed {seed}: the leader lost its vote");
            if let Change::Promote(node) = change {
                assert!(learners.contains(&node) && s.live.contains(&node), "seed {seed}: {change:?}");
            }
            // Each node is added, promoted, and demoted or removed at most once.
            assert!(changes.len() <= 3 * nodes, "seed {seed}: {changes:?} from {before:?}");
        }
        let undone = |c: &Change| match c {
            Change::Promote(node) => {
                changes.contains(&Change::Demote(*node)) || changes.contains(&Change::Remove(*node))
            }
            Change::AddLearner(node) => changes.contains(&Change::Remove(*node)),
            Change::Demote(_) | Change::Remove(_) => false,
        };
        assert_eq!(changes.iter().find(|c| undone(c)), None, "seed {seed}: {changes:?} from {before:?}");
        let certain = before.gone.union(&before.steady).count() + before.forgetful.len() == nodes
            && !s.draining.contains(&s.leader);
        if s.margin() >= 0 && certain && s.learners.iter().all(|l| s.caught_up.contains(l)) {
            let odd_or_two = s.voters.len() % 2 == 1 || s.voters.len() == 2;
            assert!(odd_or_two, "seed {seed}: {} voters: {s:?} after {changes:?}", s.voters.len());
        }
    }
}
