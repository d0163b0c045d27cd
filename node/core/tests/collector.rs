//! What is deleted, when, and above all what is not.
#![expect(clippy::unwrap_used, reason = "a test's helper fails its test by panicking")]

use starling_core::maintenance::{Collected, Collector, Known, MaintenanceConfig};
use starling_protocol::control::{Applied, ControlEntry, ModelState, StepCommitted};
use starling_protocol::job::{CollectionRule, EvaluateSpec, JobSpec, Sampling, TaskSetSpec, TrainerSpec};
use starling_protocol::manifest::Manifest;
use starling_protocol::{Hash, JobId, ModelName, PolicyVersion, RolloutId, Term, Timestamp};
use starling_storage::blobs::{has_blob, put_manifest_bytes};
use starling_storage::consumed::mark_consumed;
use starling_storage::rollouts::{has_rollout, put_rollouts};
use starling_storage::steps::put_step;
use starling_storage::suite::{example_step, noise};
use starling_storage::{Batch, Durability, MemoryStore, SharedStore, Store, audit};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

const JOB: JobId = JobId([7; 16]);
const HOUR: Duration = Duration::from_secs(3600);
/// Of the first step; one follows each hour.
const FIRST: Timestamp = Timestamp(1_000_000_000);

fn model() -> ModelName {
    ModelName::new("tiny").unwrap()
}

fn config() -> MaintenanceConfig {
    MaintenanceConfig { rollouts_kept: 3 * HOUR, versions_kept: 2, orphans_kept: HOUR, ..MaintenanceConfig::default() }
}

/// A replica's store and state after `steps` steps, each of which consumed two rollouts, and left two unconsumed.
struct Replica {
    store: Arc<MemoryStore>,
    state: ModelState,
    consumed: Vec<RolloutId>,
    unconsumed: Vec<RolloutId>,
    weights: Vec<Manifest>,
    tasks: Manifest,
}

fn put(store: &dyn Store, n: u64) -> RolloutId {
    let bytes = noise(n, 64);
    put_rollouts(store, &[(Hash::of(&bytes), &bytes, JOB)], Durability::Synced).unwrap();
    Hash::of(&bytes)
}

fn replica(steps: u64) -> Replica {
    let store = Arc::new(MemoryStore::new());
    let mut state = ModelState::default();
    let blob = |n: u64| put_manifest_bytes(&*store, &noise(n, 1000)).unwrap();
    let (mut weights, tasks) = (vec![blob(1000)], blob(1));
    let files = BTreeMap::from([("config.json".to_owned(), blob(2))]);
    let mut apply = |entry| assert_eq!(state.apply(Term(1), &entry), Applied::Yes);
    apply(ControlEntry::ModelCreated { model: model(), weights: weights[0].clone(), files });
    apply(ControlEntry::JobSubmitted { job: JOB, spec: Box::new(spec(tasks.clone())), at: FIRST });
    let mut consumed = Vec::new();
    for version in 1..=steps {
        let ids = vec![put(&*store, 10 * version), put(&*store, 10 * version + 1)];
        weights.push(blob(1000 + version));
        let step = StepCommitted {
            weights: weights.last().unwrap().clone(),
            optimizer_state: Some(blob(2000 + version)),
            at: FIRST + HOUR * u32::try_from(version - 1).unwrap(),
            ..example_step(version, ids.clone())
        };
        let mut batch = Batch::new();
        put_step(&mut batch, &model(), &step, Term(1));
        mark_consumed(&mut batch, ids.clone(), PolicyVersion(version));
        store.write(batch, Durability::Synced).unwrap();
        apply(ControlEntry::StepCommitted(Box::new(step)));
        consumed.extend(ids);
    }
    let unconsumed = vec![put(&*store, 5), put(&*store, 6)];
    Replica { store, state, consumed, unconsumed, weights, tasks }
}

fn spec(tasks: Manifest) -> JobSpec {
    JobSpec {
        name: "test".into(),
        model: model(),
        seed: 0,
        steps: 1000,
        groups_per_step: 1,
        group_size: 2,
        collection: CollectionRule::Groups,
        staleness_max: 1,
        replication: 2,
        lease_ttl_ms: 60_000,
        optimizer_state_every: 1,
        sampling: Sampling::default(),
        trainer: TrainerSpec::default(),
        tasks: vec![TaskSetSpec { name: "sums".into(), weight: 1.0, train: tasks, heldout: None }],
        evaluate: EvaluateSpec::default(),
    }
}

impl Replica {
    fn known(&self, now: Timestamp) -> Known {
        Known { models: vec![(model(), Arc::new(self.state.clone()))], complete: true, now }
    }
    fn collect(&self, collector: &mut Collector, known: &Known) -> Collected {
        collector.step(&*self.store, known, &config(), false).unwrap()
    }
    fn held(&self, ids: &[RolloutId]) -> Vec<bool> {
        ids.iter().map(|id| has_rollout(&*self.store, *id).unwrap()).collect()
    }
    fn has(&self, m: &Manifest) -> bool {
        m.chunks.iter().all(|c| has_blob(&*self.store, *c).unwrap())
    }
}

#[test]
fn a_consumed_rollout_goes_after_its_time_and_an_unconsumed_one_never() {
    let r = replica(4);
    let mut collector = Collector::default();
    let before = FIRST + 3 * HOUR - Duration::from_millis(1);
    assert_eq!(r.collect(&mut collector, &r.known(before)).rollouts, 0);
    assert_eq!(r.collect(&mut collector, &r.known(FIRST + 4 * HOUR)).rollouts, 4, "of the first two steps");
    assert_eq!(r.held(&r.consumed), [false, false, false, false, true, true, true, true]);
    let much_later = FIRST + 10_000 * HOUR;
    assert_eq!(r.collect(&mut collector, &r.known(much_later)).rollouts, 4);
    assert_eq!(r.held(&r.unconsumed), [true, true]);
    let all = [r.consumed.clone(), r.unconsumed.clone()].concat();
    let report = audit(&[r.store.clone() as SharedStore], all).unwrap();
    assert!(report.is_clean(), "{report:?}");
    assert_eq!((report.consumed_and_deleted, report.held), (8, 2));
}

#[test]
fn without_the_log_that_says_so_nothing_is_deleted() {
    let r = replica(4);
    let mut known = r.known(FIRST + 10_000 * HOUR);
    known.models.clear();
    known.complete = false;
    let mut collector = Collector::default();
    for _ in 0..3 {
        assert_eq!(r.collect(&mut collector, &known), Collected { wrapped: true, ..Collected::default() });
    }
    assert!(r.held(&r.consumed).iter().all(|h| *h));
    assert!(r.weights.iter().all(|m| r.has(m)));
}

#[test]
fn a_replica_that_came_by_a_snapshot_goes_by_the_next_step_that_it_knows() {
    let r = replica(4);
    let mut batch = Batch::new();
    for version in 1..=3 {
        batch.delete(
            starling_storage::Family::Models,
            starling_storage::schema::step_key(&model(), PolicyVersion(version)),
        );
    }
    r.store.write(batch, Durability::Synced).unwrap();
    let mut collector = Collector::default();
    assert_eq!(r.collect(&mut collector, &r.known(FIRST + 5 * HOUR)).rollouts, 0, "the fourth is two hours old");
    assert_eq!(r.collect(&mut collector, &r.known(FIRST + 6 * HOUR)).rollouts, 8);
}

#[test]
fn old_weights_and_orphans_go_when_they_were_of_no_use_for_long_enough() {
    let r = replica(6);
    let orphan = put_manifest_bytes(&*r.store, b"nobody names it").unwrap();
    let mut collector = Collector::default();
    let start = FIRST + 6 * HOUR;
    assert_eq!(r.collect(&mut collector, &r.known(start)).blobs, 0, "seen for the first time");
    assert_eq!(r.collect(&mut collector, &r.known(start + HOUR - Duration::from_millis(1))).blobs, 0);
    let done = r.collect(&mut collector, &r.known(start + HOUR));
    // Versions 0 to 3 of seven, three optimizer states, the orphan.
    assert_eq!(done.blobs, 4 + 3 + 1);
    assert_eq!(done.blob_bytes, 7 * 1000 + 15);
    assert!(!r.has(&orphan));
    assert_eq!(r.weights.iter().map(|m| r.has(m)).collect::<Vec<_>>(), [false, false, false, false, true, true, true]);
    assert!(r.has(&r.tasks) && r.has(&r.state.files["config.json"]));
    assert!(r.has(&r.state.optimizer_state.as_ref().unwrap().1));
}

#[test]
fn a_chunk_that_becomes_of_use_again_is_kept() {
    let mut r = replica(1);
    let early = put_manifest_bytes(&*r.store, b"stored before the entry that names it").unwrap();
    let mut collector = Collector::default();
    r.collect(&mut collector, &r.known(FIRST));
    let spec = JobSpec { name: "second".into(), ..spec(early.clone()) };
    let entry = ControlEntry::JobSubmitted { job: JobId([8; 16]), spec: Box::new(spec), at: FIRST };
    assert_eq!(r.state.apply(Term(1), &entry), Applied::Yes);
    r.collect(&mut collector, &r.known(FIRST + 2 * HOUR));
    assert!(r.has(&early));
}
