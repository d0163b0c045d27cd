//! The leader's ledger, one claim a test.

use starling_protocol::assignment::{Assignment, EvalPhase, Purpose};
use starling_protocol::control::JobState;
use starling_protocol::job::{CollectionRule, EvaluateSpec, JobSpec, Sampling, TaskSetSpec, TrainerSpec};
use starling_protocol::ledger::{Admission, Ledger, LoadedTasks, Surplus};
use starling_protocol::manifest::Manifest;
use starling_protocol::rollout::{Rollout, Timeline, VerifiedRollout};
use starling_protocol::task::Task;
use starling_protocol::wire::WaitReason;
use starling_protocol::{Hash, JobId, ModelName, NodeId, PolicyVersion, Term, Timestamp};

const ALICE: NodeId = NodeId([1; 32]);
const BOB: NodeId = NodeId([2; 32]);

fn spec() -> JobSpec {
    let set = |name: &str, weight| TaskSetSpec {
        name: name.into(),
        weight,
        train: Manifest::of(name.as_bytes()),
        heldout: Some(Manifest::of(b"heldout")),
    };
    JobSpec {
        name: "test".into(),
        model: ModelName::new("m").expect("a valid name"),
        seed: 1,
        steps: 2,
        groups_per_step: 2,
        group_size: 2,
        collection: CollectionRule::Groups,
        staleness_max: 1,
        replication: 2,
        lease_ttl_ms: 1000,
        optimizer_state_every: 1,
        sampling: Sampling::default(),
        trainer: TrainerSpec::default(),
        tasks: vec![set("a", 1.0), set("b", 3.0)],
        evaluate: EvaluateSpec::default(),
    }
}

fn ledger(spec: JobSpec) -> Ledger {
    let tasks = |set: &str| {
        let task = |i| Task { id: format!("{set}{i}"), line: format!("{{\"id\":\"{set}{i}\"}}") };
        LoadedTasks { train: (0..5).map(task).collect(), heldout: (5..8).map(task).collect() }
    };
    let job = JobState {
        job: JobId([9; 16]),
        groups_opened: vec![0; 2],
        spec,
        at: Timestamp(0),
        steps: 0,
        evaluations: Vec::new(),
        end: None,
    };
    Ledger::new(job, Term(3), PolicyVersion(0), vec![tasks("a"), tasks("b")])
}

fn claim(l: &mut Ledger, who: NodeId, want: usize) -> Vec<Assignment> {
    l.handle_claim(Timestamp(0), who, want, &[]).0
}

fn rollout(a: &Assignment, reward: f32) -> VerifiedRollout {
    let mut r = Rollout::begin(a, ALICE, "test".into(), Timestamp(0));
    r.reward = reward;
    r.timelines.push(Timeline {
        tokens: vec![1, 2],
        loss_mask: vec![false, true],
        behaviour_logprobs: vec![0.0, -1.0],
        policy_versions: vec![PolicyVersion(0), a.policy_version],
    });
    VerifiedRollout { id: Hash::of(format!("{:?}{reward}", a.episode).as_bytes()), rollout: r }
}

#[test]
fn groups_are_opened_in_proportion_to_the_weights() {
    let mut spec = spec();
    spec.groups_per_step = 40;
    let mut l = ledger(spec);
    let given = claim(&mut l, ALICE, 80);
    let of_b = given.iter().filter(|a| a.task.set == "b").count();
    assert_eq!((given.len(), of_b), (80, 60));
    // Exact over a window as well, not only in the end.
    assert_eq!(given[..8].iter().filter(|a| a.task.set == "b").count(), 6);
}

#[test]
fn the_quota_holds_claims_back_and_says_so() {
    let mut l = ledger(spec());
    let (given, _, wait) = l.handle_claim(Timestamp(0), ALICE, 100, &[]);
    assert_eq!(given.len(), 8, "(η + 1)·B = 2 · 2 · 2");
    assert_eq!(wait, Some(WaitReason::QuotaFull { have: 8, max: 8 }));
}

#[test]
fn an_aborted_episode_is_replaced_in_its_own_group() {
    let mut l = ledger(spec());
    let given = claim(&mut l, ALICE, 2);
    assert!(!l.handle_abort(BOB, given[0].episode), "only the holder may give it up");
    assert!(l.handle_abort(ALICE, given[0].episode));
    let again = claim(&mut l, BOB, 1);
    assert_eq!((again[0].group, again[0].attempt), (given[0].group, 2));
    assert_ne!(again[0].episode, given[0].episode);
}

#[test]
fn a_lease_that_is_not_renewed_runs_out_and_the_late_rollout_still_counts_once() {
    let mut l = ledger(spec());
    let given = claim(&mut l, ALICE, 2);
    let (_, revoked, _) = l.handle_claim(Timestamp(500), ALICE, 0, &[given[0].episode]);
    assert!(revoked.is_empty());
    assert_eq!(l.poll_timeout(), Some(Timestamp(1000)), "the other one was not renewed");
    l.handle_timeout(Timestamp(1000));
    let (_, revoked, _) = l.handle_claim(Timestamp(1001), ALICE, 0, &[given[1].episode]);
    assert_eq!(revoked, vec![given[1].episode]);
    let late = rollout(&given[1], 1.0);
    assert_eq!(l.handle_rollout(late.clone()), Admission::Accepted);
    assert_eq!(l.handle_rollout(late), Admission::Ignored(Surplus::Known));
}

#[test]
fn a_batch_is_whole_groups_with_advantages_and_is_consumed_once() {
    let mut l = ledger(spec());
    let given = claim(&mut l, ALICE, 8);
    for (i, a) in given.iter().enumerate() {
        assert!(l.take_batch().is_none() || i >= 4);
        let reward = if i % 2 == 0 { 1.0 } else { 0.0 };
        assert_eq!(l.handle_rollout(rollout(a, reward)), Admission::Accepted);
        if i == 3 {
            let batch = l.take_batch().unwrap();
            assert_eq!(batch.groups.len(), 2);
            let advantages = batch.groups[0].advantages.clone().unwrap();
            assert!((advantages.iter().sum::<f32>()).abs() < 1e-6);
            assert!(l.take_batch().is_none(), "one batch at a time");
            l.handle_committed(PolicyVersion(1), &batch.consumed());
            let again = rollout(&given[0], 1.0);
            assert_eq!(l.handle_rollout(again), Admission::Ignored(Surplus::Consumed));
        }
    }
    assert_eq!(l.version(), PolicyVersion(1));
}

#[test]
fn groups_with_equal_rewards_do_not_count_where_informative_ones_are_asked_for() {
    let mut spec = spec();
    spec.collection = CollectionRule::InformativeGroups;
    let mut l = ledger(spec);
    for a in claim(&mut l, ALICE, 4) {
        l.handle_rollout(rollout(&a, 1.0));
    }
    assert!(l.take_batch().is_none());
    let rest = claim(&mut l, ALICE, 4);
    for (i, a) in rest.iter().enumerate() {
        l.handle_rollout(rollout(a, if i % 2 == 0 { 1.0 } else { 0.0 }));
    }
    let batch = l.take_batch().unwrap();
    assert_eq!(batch.groups.iter().filter(|g| g.advantages.is_some()).count(), 2);
    assert_eq!(batch.groups.len(), 4, "the others are used up along with them");
}

#[test]
fn a_model_that_always_succeeds_does_not_wait_for_ever() {
    let mut spec = spec();
    spec.collection = CollectionRule::InformativeGroups;
    let mut l = ledger(spec);
    for a in claim(&mut l, ALICE, 8) {
        l.handle_rollout(rollout(&a, 1.0));
    }
    let batch = l.take_batch().expect("the quota is spent and nothing runs");
    assert!(batch.groups.iter().all(|g| g.advantages.is_none()));
}

#[test]
fn a_rollout_from_the_future_or_of_another_job_is_invalid() {
    let mut l = ledger(spec());
    let given = claim(&mut l, ALICE, 1);
    let mut ahead = rollout(&given[0], 1.0);
    ahead.rollout.timelines[0].policy_versions[1] = PolicyVersion(5);
    assert!(matches!(l.handle_rollout(ahead), Admission::Invalid(_)));
    let mut foreign = rollout(&given[0], 1.0);
    foreign.rollout.job = JobId([1; 16]);
    assert!(matches!(l.handle_rollout(foreign), Admission::Invalid(_)));
}

#[test]
fn an_earlier_terms_rollout_is_adopted_with_its_group() {
    let mut old = ledger(spec());
    let a = claim(&mut old, ALICE, 1).remove(0);
    let mut r = rollout(&a, 1.0);
    r.rollout.group.term = Term(2);
    let mut l = ledger(spec());
    assert_eq!(l.handle_rollout(r.clone()), Admission::Accepted);
    let next = claim(&mut l, BOB, 1);
    assert_eq!(next[0].group, r.rollout.group, "the broken group is completed first");
}

#[test]
fn an_evaluation_comes_first_and_its_scores_have_intervals() {
    let mut spec = spec();
    spec.evaluate = EvaluateSpec { at_start: true, at_end: false, samples: 4, greedy: 2 };
    let mut l = ledger(spec);
    let given = claim(&mut l, ALICE, 100);
    assert_eq!(given.len(), 12, "2 sets of 4 sampled and 2 greedy");
    for a in &given {
        let Purpose::Eval { phase, greedy, slot } = a.purpose else { panic!("expected an evaluation") };
        assert_eq!((phase, a.sampling.temperature == 0.0), (EvalPhase::Start, greedy));
        assert!(l.finished_evaluation().is_none());
        let reward = if slot % 2 == 0 { 1.0 } else { 0.0 };
        assert_eq!(l.handle_rollout(rollout(a, reward)), Admission::Accepted);
    }
    let done = l.finished_evaluation().unwrap();
    let score = &done.scores["a"];
    assert_eq!((score.samples, score.greedy_samples), (4, 2));
    // python: 1.96 * numpy.std([1,0,1,0], ddof=1) / 2 -> 0.5658
    assert!((score.mean - 0.5).abs() < 1e-9 && (score.ci95 - 0.5658).abs() < 1e-3);
    l.handle_evaluated(done);
    assert!(matches!(claim(&mut l, ALICE, 1)[0].purpose, Purpose::Train));
}

#[test]
fn a_leader_that_starts_over_in_its_term_draws_new_ids_and_adopts_its_own_groups() {
    let mut before = ledger(spec()).counting_from(1 << 20);
    let given = claim(&mut before, ALICE, 3);
    let mut after = ledger(spec()).counting_from(2 << 20);
    assert_eq!(after.handle_rollout(rollout(&given[0], 1.0)), Admission::Accepted);
    assert_eq!((after.accepted(), after.adopted_groups()), (1, 1));
    let again = claim(&mut after, BOB, 8);
    assert_eq!(again[0].group, given[0].group, "the adopted group is completed first");
    let groups = |list: &[Assignment]| list.iter().map(|a| a.group).collect::<std::collections::BTreeSet<_>>();
    assert_eq!(groups(&again).intersection(&groups(&given)).count(), 1);
    assert!(again.iter().all(|a| given.iter().all(|b| a.episode != b.episode)), "no id is given out twice");
}
