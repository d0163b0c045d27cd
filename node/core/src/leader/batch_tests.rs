use super::*;
use starling_protocol::advantage::batch_advantages;
use starling_protocol::algorithm::Preset;
use starling_protocol::assignment::Purpose;
use starling_protocol::rollout::{FinishReason, Rollout, Timeline, Turn};
use starling_protocol::{EpisodeId, GroupId, Hash, JobId, ModelName, NodeId, PolicyVersion, TaskRef, Term, Timestamp};

fn timeline(len: u32, trained: u32, version: u64) -> Timeline {
    let mask = |t: u32| t >= len - trained;
    Timeline {
        tokens: (0..len).collect(),
        loss_mask: (0..len).map(mask).collect(),
        behaviour_logprobs: (0..len).map(|t| if mask(t) { -1.0 } else { 0.0 }).collect(),
        policy_versions: (0..len).map(|t| PolicyVersion(if mask(t) { version } else { 0 })).collect(),
    }
}

fn turn(timeline: u32, prompt_len: u32, completion_len: u32) -> Turn {
    Turn {
        timeline,
        prompt_len,
        completion_len,
        finish: FinishReason::Stop,
        temperature: 1.0,
        duration_ms: 1,
        receipt: None,
        fork_cause: None,
    }
}

fn rollout(n: u8, reward: f32, timelines: Vec<Timeline>, turns: Vec<Turn>) -> AcceptedRollout {
    let rollout = Rollout {
        job: JobId([1; 16]),
        model: ModelName::new("m").unwrap(),
        episode: EpisodeId([n; 16]),
        group: GroupId { term: Term(1), seq: 0 },
        task: TaskRef { set: "s".into(), index: 0, id: "t".into() },
        purpose: Purpose::Train,
        lease_term: Term(1),
        gateway: NodeId([0; 32]),
        agent: "test".into(),
        timelines,
        turns,
        reward,
        metrics: BTreeMap::new(),
        started: Timestamp(0),
        ended: Timestamp(1),
    };
    AcceptedRollout { id: Hash::of(&[n]), rollout, oldest_version: PolicyVersion(3) }
}

fn batch(rule: starling_protocol::advantage::AdvantageRule) -> TrainingBatch {
    // Three turns in two timelines, the second turn on top of the first; a plain episode; one that trains nothing.
    let forked =
        rollout(1, 1.0, vec![timeline(10, 4, 4), timeline(6, 2, 3)], vec![turn(0, 4, 2), turn(0, 8, 2), turn(1, 4, 2)]);
    let plain = rollout(2, 0.0, vec![timeline(5, 2, 5)], vec![turn(0, 3, 2)]);
    let silent = rollout(3, 0.0, vec![timeline(5, 0, 0)], vec![turn(0, 3, 2)]);
    let dull = rollout(4, 0.5, vec![timeline(5, 1, 2)], vec![turn(0, 4, 1)]);
    let groups = [vec![forked, plain, silent], vec![dull.clone(), AcceptedRollout { id: Hash::of(b"5"), ..dull }]];
    let rewards: Vec<Vec<f32>> = groups.iter().map(|g| g.iter().map(|r| r.rollout.reward).collect()).collect();
    let advantages = batch_advantages(rule, &rewards);
    let group = |(i, (rollouts, advantages)): (u64, (Vec<AcceptedRollout>, Option<Vec<f32>>))| RolloutGroup {
        id: GroupId { term: Term(1), seq: i },
        task: rollouts[0].rollout.task.clone(),
        rollouts,
        advantages,
    };
    let groups = (0..).zip(groups.into_iter().zip(advantages)).map(group).collect();
    TrainingBatch { version: PolicyVersion(5), next: PolicyVersion(6), groups, groups_opened: vec![2] }
}

#[test]
fn samples_carry_their_episode_and_how_old_each_token_is() {
    let algorithm = Preset::DrGrpo.spec(24);
    let samples = samples_of(&batch(algorithm.advantage), &algorithm);
    let facts: Vec<_> = samples.iter().map(|s| (s.episode, s.tokens.len())).collect();
    assert_eq!(facts, [(Some(0), 10), (Some(0), 6), (Some(1), 5)], "the dull group and what trains nothing stay out");
    assert!((samples[0].advantage - 2.0 / 3.0).abs() < 1e-6 && (samples[2].advantage + 1.0 / 3.0).abs() < 1e-6);
    assert_eq!(samples[0].staleness, [0, 0, 0, 0, 0, 0, 1, 1, 1, 1]);
    assert_eq!(samples[1].staleness, [0, 0, 0, 0, 2, 2]);
    assert_eq!(samples[2].staleness, [0; 5]);
}

#[test]
fn supervised_training_sees_only_what_beats_its_group() {
    let algorithm = Preset::Supervised.spec(24);
    let samples = samples_of(&batch(algorithm.advantage), &algorithm);
    assert!(samples.len() == 2 && samples.iter().all(|s| s.advantage > 0.0));
}

#[test]
fn metrics_count_what_merging_saved_and_how_old_tokens_are() {
    let m = metrics_of(&batch(Preset::Grpo.spec(24).advantage), &StepReport { mfu: 0.5, ..StepReport::default() });
    assert_eq!((m.groups_uninformative, m.staleness_max), (1, 2));
    // Timelines hold 16 + 5 + 5 tokens; call by call it would be (6 + 10 + 6) + 5 + 5.
    assert_eq!((m.tokens, m.tokens_saved), (26, 6));
    // Four tokens one version behind, two two behind, two fresh, and two of the dull group three behind.
    assert!((m.staleness_mean - (4.0 + 4.0 + 0.0 + 6.0) / 10.0).abs() < 1e-12, "{}", m.staleness_mean);
    assert!((m.mfu - 0.5).abs() < 1e-12);
    assert_eq!(m.episodes, BTreeMap::from([("s".to_owned(), 5)]));
}
