//! The leader's ledger, one claim a test.

use starling_protocol::assignment::{Assignment, EvalPhase, HeldLease, Purpose};
use starling_protocol::control::JobState;
use starling_protocol::job::{CollectionRule, EvaluateSpec, JobSpec, Sampling, TaskSetSpec, TrainerSpec};
use starling_protocol::ledger::{Admission, Ledger, LoadedTasks, Surplus};
use starling_protocol::manifest::Manifest;
use starling_protocol::rollout::{Rollout, Timeline, VerifiedRollout};
use starling_protocol::task::Task;
use starling_protocol::wire::WaitReason;
use starling_protocol::{EpisodeId, GroupId, Hash, JobId, Lineage, ModelName, NodeId, PolicyVersion, Term, Timestamp};
use std::time::Duration;

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
    l.handle_claim(Timestamp(0), who, want, 0, &[]).0
}

fn renew(l: &mut Ledger, at: u64, who: NodeId, held: &[&Assignment]) -> Vec<EpisodeId> {
    let held: Vec<HeldLease> = held.iter().map(|a| HeldLease::from(*a)).collect();
    l.handle_claim(Timestamp(at), who, 0, 0, &held).1
}

/// The ledger of the leader after [`ledger`]'s, at its start.
fn next_ledger(spec: JobSpec) -> Ledger {
    let mut l = ledger(spec).counting_from(1 << 20);
    l.handle_timeout(Timestamp(0));
    l
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
    let (given, _, wait) = l.handle_claim(Timestamp(0), ALICE, 100, 0, &[]);
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
    let revoked = renew(&mut l, 500, ALICE, &[&given[0]]);
    assert!(revoked.is_empty());
    assert_eq!(l.poll_timeout(), Some(Timestamp(1000)), "the other one was not renewed");
    l.handle_timeout(Timestamp(1000));
    let revoked = renew(&mut l, 1001, ALICE, &[&given[1]]);
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

/// Dynamic sampling: what has no gradient is replaced, so that the step trains on as many groups as were asked for, even
/// where the first `(η + 1)·B` episodes have next to none.
#[test]
fn groups_without_a_gradient_are_replaced_beyond_the_quota() {
    let mut spec = spec();
    spec.collection = CollectionRule::InformativeGroups;
    let mut l = ledger(spec);
    for a in claim(&mut l, ALICE, 100) {
        l.handle_rollout(rollout(&a, 1.0));
    }
    assert_eq!((l.accepted(), l.quota()), (8, 16), "(η + 1)·B, and as much again for the four dull groups");
    assert!(l.take_batch().is_none());
    let replacements = claim(&mut l, ALICE, 100);
    assert_eq!(replacements.len(), 8);
    for (i, a) in replacements.iter().enumerate() {
        l.handle_rollout(rollout(a, if i % 2 == 0 { 1.0 } else { 0.0 }));
    }
    let batch = l.take_batch().unwrap();
    assert_eq!(batch.groups.iter().filter(|g| g.advantages.is_some()).count(), 2);
    l.handle_committed(PolicyVersion(1), &batch.consumed());
    assert_eq!((l.accepted(), l.quota()), (4, 8), "the dull ones are gone, and their room with them");
}

#[test]
fn a_model_that_always_succeeds_does_not_wait_for_ever() {
    let mut spec = spec();
    spec.collection = CollectionRule::InformativeGroups;
    let mut l = ledger(spec);
    let mut episodes = 0;
    let batch = loop {
        let given = claim(&mut l, ALICE, 100);
        assert!(!given.is_empty(), "neither work nor a batch after {episodes} episodes");
        episodes += given.len();
        for a in given {
            l.handle_rollout(rollout(&a, 1.0));
        }
        if let Some(batch) = l.take_batch() {
            break batch;
        }
    };
    assert_eq!(episodes, 8 + 4 * 4, "the quota, and four steps' worth of replacements");
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
    let early = claim(&mut l, BOB, 1);
    assert_ne!(early[0].group, r.rollout.group, "who runs the other episode may still renew it");
    let late = l.handle_claim(Timestamp(500), BOB, 1, 0, &[]).0;
    assert_eq!(late[0].group, r.rollout.group, "then the broken group is completed first");
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
    after.handle_timeout(Timestamp(0));
    let again = after.handle_claim(Timestamp(500), BOB, 8, 0, &[]).0;
    assert_eq!(again[0].group, given[0].group, "the adopted group is completed first");
    let groups = |list: &[Assignment]| list.iter().map(|a| a.group).collect::<std::collections::BTreeSet<_>>();
    assert_eq!(groups(&again).intersection(&groups(&given)).count(), 1);
    assert!(again.iter().all(|a| given.iter().all(|b| a.episode != b.episode)), "no id is given out twice");
}

#[test]
fn leases_go_on_with_the_next_leader_when_their_holders_renew_them() {
    let mut old = ledger(spec());
    let given = claim(&mut old, ALICE, 3);
    let mut l = next_ledger(spec());
    assert_eq!(renew(&mut l, 10, ALICE, &[&given[0], &given[1], &given[2]]), []);
    assert_eq!((l.running(), l.adopted_groups(), l.counts().adopted), (3, 2, 3));
    assert_eq!(renew(&mut l, 500, ALICE, &[&given[0], &given[2]]), [], "an ordinary renewal from now on");
    // The place that nobody renewed runs out, and is given out again in its group.
    let again = l.handle_claim(Timestamp(1010), BOB, 1, 0, &[]).0;
    assert_eq!((again[0].group, again[0].attempt), (given[0].group, 2));
    // Their rollouts count as if nothing had happened.
    for a in [&given[0], &again[0]] {
        assert_eq!(l.handle_rollout(rollout(a, 1.0)), Admission::Accepted);
    }
    assert_eq!(l.whole_groups(), 1);
}

#[test]
fn an_adopted_lease_has_one_holder_and_comes_over_once() {
    let mut old = ledger(spec());
    let given = claim(&mut old, ALICE, 2);
    let mut l = next_ledger(spec());
    assert_eq!(renew(&mut l, 10, ALICE, &[&given[0]]), []);
    assert_eq!(renew(&mut l, 20, BOB, &[&given[0]]), [given[0].episode], "I9: one lease an episode");
    assert!(l.handle_abort(ALICE, given[0].episode));
    assert_eq!(renew(&mut l, 30, ALICE, &[&given[0]]), [given[0].episode], "what was given up does not come back");
    // Nor does what came in already: its holder has not heard of that yet.
    assert_eq!(l.handle_rollout(rollout(&given[1], 1.0)), Admission::Accepted);
    assert_eq!(renew(&mut l, 40, ALICE, &[&given[1]]), [given[1].episode]);
    assert_eq!(l.running(), 0);
}

#[test]
fn nobody_invents_work_by_renewing_it() {
    let mut old = ledger(spec());
    let good = claim(&mut old, ALICE, 1).remove(0);
    let refused = |change: &dyn Fn(&mut Assignment)| {
        let mut l = next_ledger(spec());
        let mut a = good.clone();
        change(&mut a);
        assert_eq!(renew(&mut l, 10, ALICE, &[&a]), [a.episode], "{a:?}");
        assert_eq!((l.running(), l.adopted_groups()), (0, 0));
    };
    refused(&|a| a.job = JobId([8; 16]));
    refused(&|a| a.task.id = "other".into());
    refused(&|a| a.task.set = "other".into());
    refused(&|a| a.task.index = 9);
    refused(&|a| a.group = GroupId { term: Term(3), seq: 1 << 20 });
    refused(&|a| a.group.term = Term(4));
    refused(&|a| a.purpose = Purpose::Eval { phase: EvalPhase::Start, greedy: false, slot: 0 });
    // Groups of many names: no more than the quota's episodes and groups come over, whatever is renewed.
    let mut l = next_ledger(spec());
    let invented: Vec<Assignment> = (0..50u8)
        .map(|i| Assignment {
            episode: EpisodeId([i; 16]),
            group: GroupId { term: Term(3), seq: u64::from(i) },
            ..good.clone()
        })
        .collect();
    let revoked = renew(&mut l, 10, BOB, &invented.iter().collect::<Vec<_>>());
    assert_eq!((revoked.len(), l.adopted_groups(), l.running()), (46, 4, 4), "4 groups of 2 are the quota");
}

#[test]
fn a_task_that_the_jobs_order_has_not_come_to_is_not_adopted() {
    // One set of 100 tasks: the predecessor opened at most 4 groups behind the last step.
    let mut wide = spec();
    wide.tasks.truncate(1);
    let task = |i| Task { id: format!("t{i}"), line: "{}".into() };
    let tasks = || vec![LoadedTasks { train: (0..100).map(task).collect(), heldout: vec![] }];
    let job = JobState {
        job: JobId([9; 16]),
        groups_opened: vec![0],
        spec: wide,
        at: Timestamp(0),
        steps: 0,
        evaluations: Vec::new(),
        end: None,
    };
    let mut old = Ledger::new(job.clone(), Term(3), PolicyVersion(0), tasks());
    let given = old.handle_claim(Timestamp(0), ALICE, 8, 0, &[]).0;
    let mut l = Ledger::new(job, Term(4), PolicyVersion(0), tasks());
    assert_eq!(renew(&mut l, 1, ALICE, &given.iter().collect::<Vec<_>>()), []);
    let opened: Vec<u32> = given.iter().map(|a| a.task.index).collect();
    let elsewhere = (0..100u32).find(|i| !opened.contains(i)).unwrap();
    let mut l = next_ledger_of(&l);
    let mut a = given[0].clone();
    (a.task.index, a.task.id) = (elsewhere, format!("t{elsewhere}"));
    assert_eq!(renew(&mut l, 1, ALICE, &[&a]), [a.episode]);
    assert_eq!(renew(&mut l, 1, ALICE, &[&given[0]]), []);
}

/// A ledger of the same job and tasks as [`a_task_that_the_jobs_order_has_not_come_to_is_not_adopted`]'s, a term later.
fn next_ledger_of(l: &Ledger) -> Ledger {
    let task = |i| Task { id: format!("t{i}"), line: "{}".into() };
    let tasks = vec![LoadedTasks { train: (0..100).map(task).collect(), heldout: vec![] }];
    Ledger::new(l.job().clone(), Term(5), PolicyVersion(0), tasks)
}

#[test]
fn an_evaluations_leases_go_on_too() {
    let mut spec = spec();
    spec.evaluate = EvaluateSpec { at_start: true, at_end: false, samples: 4, greedy: 2 };
    let mut old = ledger(spec.clone());
    let given = claim(&mut old, ALICE, 3);
    let mut l = next_ledger(spec);
    assert_eq!(renew(&mut l, 10, ALICE, &[&given[0], &given[2]]), []);
    let mut wrong = given[1].clone();
    wrong.task.index += 1;
    assert_eq!(renew(&mut l, 10, ALICE, &[&wrong]), [wrong.episode]);
    let rest = claim(&mut l, BOB, 100);
    assert_eq!(rest.len(), 10, "two of twelve places run already");
    assert!(rest.iter().all(|a| a.purpose != given[0].purpose && a.purpose != given[2].purpose));
}

#[test]
fn a_batch_waits_for_the_replacement_of_an_aborted_episode_even_if_the_quota_is_all_but_full() {
    // Without staleness the quota is one batch. Three episodes of four have ended, the last one was given up.
    let mut l = ledger(JobSpec { staleness_max: 0, ..spec() });
    let episodes = claim(&mut l, ALICE, 4);
    for a in &episodes[..3] {
        assert_eq!(l.handle_rollout(rollout(a, 0.5)), Admission::Accepted);
    }
    assert!(l.handle_abort(ALICE, episodes[3].episode));
    assert!(l.take_batch().is_none(), "one group lacks an episode");
    let again = claim(&mut l, BOB, 4);
    assert_eq!(again.len(), 1);
    assert_eq!(l.handle_rollout(rollout(&again[0], 1.0)), Admission::Accepted);
    let batch = l.take_batch().expect("two whole groups");
    assert_eq!(batch.consumed().len(), 4);
}

/// A ledger at step 2 of a line that came out of generation 0 after step 1.
fn ledger_of_a_line(opener: NodeId) -> (Ledger, Lineage) {
    let lineage = Lineage::default().opened(PolicyVersion(1), 0, 1, opener).expect("generation 1");
    let l = ledger(spec());
    let tasks = |set: &str| {
        let task = |i| Task { id: format!("{set}{i}"), line: format!("{{\"id\":\"{set}{i}\"}}") };
        LoadedTasks { train: (0..5).map(task).collect(), heldout: (5..8).map(task).collect() }
    };
    let term = Term(lineage.line.first_term().0 + 2);
    let at = lineage.next(PolicyVersion(1));
    (Ledger::new(l.job().clone(), term, at, vec![tasks("a"), tasks("b")]).of_line(lineage.clone()), lineage)
}

#[test]
fn staleness_is_counted_in_steps_across_the_fork_and_orphans_are_stale() {
    let (mut l, lineage) = ledger_of_a_line(ALICE);
    let other = Lineage::default().opened(PolicyVersion(1), 0, 1, BOB).unwrap();
    // Of an old leader's groups: sampled one step ago, before the fork; two steps ago; by a step beyond the fork; by
    // another line; by a version that is not yet.
    let admitted = |l: &mut Ledger, n: u64, version: PolicyVersion| {
        let mut a = claim(&mut ledger(spec()).counting_from(n << 20), ALICE, 1).remove(0);
        a.policy_version = version;
        l.handle_rollout(rollout(&a, 1.0))
    };
    assert_eq!(admitted(&mut l, 1, PolicyVersion(1)), Admission::Accepted);
    assert_eq!(admitted(&mut l, 2, lineage.line.version(2)), Admission::Accepted);
    assert_eq!(admitted(&mut l, 3, PolicyVersion(0)), Admission::Ignored(Surplus::Stale));
    assert_eq!(admitted(&mut l, 4, PolicyVersion(2)), Admission::Ignored(Surplus::Stale));
    assert_eq!(admitted(&mut l, 5, other.line.version(2)), Admission::Ignored(Surplus::Stale));
    assert!(matches!(admitted(&mut l, 6, lineage.line.version(3)), Admission::Invalid(_)));
    assert_eq!(l.next_version(), lineage.line.version(3));
}

#[test]
fn groups_of_a_line_that_lost_are_adopted_whatever_their_terms() {
    let lines =
        [ALICE, BOB].map(|n| (n, Lineage::default().opened(PolicyVersion(1), 0, 1, n).unwrap().line.first_term()));
    let (winner, loser) = if lines[0].1 < lines[1].1 { (lines[0], lines[1]) } else { (lines[1], lines[0]) };
    let (mut l, lineage) = ledger_of_a_line(winner.0);
    let mut a = claim(&mut ledger(spec()), ALICE, 1).remove(0);
    a.group.term = Term(loser.1.0 + 7);
    a.policy_version = lineage.line.version(2);
    assert_eq!(l.handle_rollout(rollout(&a, 1.0)), Admission::Accepted);
    // One of a later term of its own line is no group of this leader's.
    a.group.term = Term(winner.1.0 + 7);
    assert!(matches!(l.handle_rollout(rollout(&a, 2.0)), Admission::Invalid(_)));
}

/// The least that fills a step of the job with blocks to spare: 32 places, of which 8 may lie in blocks.
fn roomy() -> JobSpec {
    JobSpec { groups_per_step: 8, steps: 10, ..spec() }
}

#[test]
fn a_block_is_whole_groups_from_slack_and_counts_as_running() {
    let mut l = ledger(roomy());
    assert_eq!(l.quota(), 32);
    assert_eq!(claim(&mut l, ALICE, 4).len(), 4);
    let block = l.handle_reserve(Timestamp(0), ALICE, 5, 0);
    assert_eq!(block.len(), 6, "whole groups of two");
    assert!(block.chunks(2).all(|g| g[0].group == g[1].group && g[0].attempt == 0));
    assert_eq!(l.running(), 10);
    // It has what it asked for, and all blocks together have a quarter of the quota.
    l.handle_claim(Timestamp(0), ALICE, 0, 6, &[]);
    assert!(l.handle_reserve(Timestamp(0), ALICE, 6, 6).is_empty());
    assert_eq!(l.handle_reserve(Timestamp(0), BOB, 100, 0).len(), 2);
    assert!(l.handle_reserve(Timestamp(0), ALICE, 100, 6).is_empty());
    // A block that was begun makes room for another.
    l.handle_claim(Timestamp(0), ALICE, 0, 0, &[]);
    assert_eq!(l.handle_reserve(Timestamp(0), ALICE, 2, 0).len(), 2);
}

#[test]
fn clients_that_are_held_back_ask_the_later_the_more_they_are() {
    let mut l = ledger(roomy());
    assert_eq!(claim(&mut l, ALICE, 32).len(), 32);
    assert_eq!(l.retry_after(), Duration::ZERO);
    let crowd = |i: u16| NodeId([[0xcc; 2], i.to_be_bytes()].concat().repeat(8).try_into().unwrap());
    let mut last = Duration::ZERO;
    for i in 0..1000 {
        assert!(l.handle_claim(Timestamp(0), crowd(i), 1, 0, &[]).0.is_empty());
        assert!(l.retry_after() > last);
        last = l.retry_after();
    }
    assert_eq!(last, Duration::from_secs(2));
    // When leases have run out, one of the crowd gets something, and those that ask no more are forgotten.
    assert_eq!(l.handle_claim(Timestamp(5_000), crowd(0), 1, 0, &[]).0.len(), 1);
    assert_eq!(l.retry_after(), Duration::ZERO);
}

#[test]
fn a_block_takes_nothing_that_another_client_could_begin_at_once() {
    let mut l = ledger(roomy());
    let mut all = claim(&mut l, ALICE, 23);
    assert_eq!(all.len(), 23);
    assert!(l.handle_reserve(Timestamp(0), BOB, 2, 0).is_empty(), "a quarter of the quota stays free");
    let (given, _, wait) = l.handle_claim(Timestamp(0), BOB, 20, 0, &[]);
    assert_eq!((given.len(), wait), (9, Some(WaitReason::QuotaFull { have: 32, max: 32 })));
    // Bob was held back. A step makes room, and for three seconds nobody gets a block.
    all.extend(given);
    for (i, a) in all.iter().take(16).enumerate() {
        assert_eq!(l.handle_rollout(rollout(a, if i % 2 == 0 { 0.0 } else { 1.0 })), Admission::Accepted);
    }
    let batch = l.take_batch().expect("eight whole groups");
    l.handle_committed(PolicyVersion(1), &batch.consumed());
    assert_eq!(l.running(), 16);
    assert!(l.handle_reserve(Timestamp(1), ALICE, 2, 0).is_empty());
    l.handle_claim(Timestamp(3001), ALICE, 0, 0, &[]);
    assert_eq!(l.handle_reserve(Timestamp(3001), ALICE, 2, 0).len(), 2);
}

#[test]
fn there_are_no_blocks_where_every_place_is_needed() {
    let fresh = JobSpec { staleness_max: 0, ..roomy() };
    assert!(ledger(fresh).handle_reserve(Timestamp(0), ALICE, 2, 0).is_empty());
    let last = JobSpec { steps: 1, ..roomy() };
    assert!(ledger(last).handle_reserve(Timestamp(0), ALICE, 2, 0).is_empty());
    let evaluated =
        JobSpec { evaluate: EvaluateSpec { at_start: true, samples: 1, ..EvaluateSpec::default() }, ..roomy() };
    assert!(ledger(evaluated).handle_reserve(Timestamp(0), ALICE, 2, 0).is_empty());
}

#[test]
fn a_block_ends_with_its_leases_and_is_taken_over_by_the_next_leader() {
    let mut l = ledger(roomy());
    let block = l.handle_reserve(Timestamp(0), ALICE, 8, 0);
    assert_eq!(block.len(), 8);
    assert!(l.handle_abort(ALICE, block[0].episode), "given back");
    l.handle_timeout(Timestamp(1000));
    assert_eq!(l.running(), 0);
    l.handle_claim(Timestamp(1000), BOB, 0, 0, &[]);
    assert_eq!(l.handle_reserve(Timestamp(1000), BOB, 8, 0).len(), 8, "a silent client's block does not count on");
    let mut next = next_ledger(roomy());
    assert!(renew(&mut next, 10, ALICE, &block.iter().collect::<Vec<_>>()).is_empty());
    assert_eq!(next.running(), 8);
}

/// Blocks, running and accepted episodes never exceed the quota, whatever clients claim, reserve, end, drop and forget.
#[test]
fn blocks_never_exceed_the_quota_for_any_seed() {
    for seed in 0..200_u64 {
        let mut l = ledger(roomy());
        let mut draw = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut next = |n: u64| {
            draw = draw.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (draw >> 33) % n
        };
        let mut held: Vec<(NodeId, Assignment)> = Vec::new();
        for step in 0..300 {
            let now = Timestamp(step * 40);
            let who = if next(2) == 0 { ALICE } else { BOB };
            let n = usize::try_from(next(10)).expect("small");
            match next(5) {
                0 => held.extend(l.handle_claim(now, who, n, n, &[]).0.into_iter().map(|a| (who, a))),
                1 | 2 => held.extend(l.handle_reserve(now, who, 2 * n, n).into_iter().map(|a| (who, a))),
                3 if !held.is_empty() => {
                    let (who, a) = held.swap_remove(n % held.len());
                    l.handle_abort(who, a.episode);
                }
                4 if !held.is_empty() => {
                    let (_, a) = held.swap_remove(n % held.len());
                    l.handle_rollout(rollout(&a, 1.0));
                }
                _ => l.handle_timeout(now),
            }
            let have = l.running() + l.accepted();
            assert!(have <= l.quota(), "seed {seed} step {step}: {have} of {}", l.quota());
        }
    }
}
