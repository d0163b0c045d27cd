//! What a change of leader keeps, and when leadership moves: optimizer moments, computed steps, drains, better devices.
#![expect(clippy::unwrap_used, reason = "a test's helper fails its test by panicking")]

mod holders;

use holders::{JOB, TestKey, World, id, model};
use starling_core::compute::{Compute, Engine, StepInput, StepTrainer, Stepped, TrainerStart, TrainingMemory};
use starling_core::maintenance::MaintenanceConfig;
use starling_core::runtime::spawn;
use starling_engine::{
    Architecture, Device, EngineError, GenerateRequest, LlamaConfig, StepReport, TokenSink, Trainer, TrainerConfig,
    Weights,
};
use starling_protocol::assignment::Assignment;
use starling_protocol::control::{ControlEntry, ModelState};
use starling_protocol::job::{CollectionRule, EvaluateSpec, JobSpec, Sampling, TaskSetSpec, TrainerSpec};
use starling_protocol::lora::{LoraSpec, LoraTarget};
use starling_protocol::record::{Fitness, Role};
use starling_protocol::rollout::{FinishReason, Receipt, Rollout, Timeline, Turn, TurnReceipt, receipt_body};
use starling_protocol::signed::{Domain, Signature};
use starling_protocol::wire::{LeaderCall, LeaderReply};
use starling_protocol::{Hash, NodeId, PolicyVersion, RolloutId, Timestamp};
use starling_storage::blobs::{get_blob, has_blob};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::sleep;

const SECOND: Duration = Duration::from_secs(1);

/// A device whose engine serves nobody and whose steps take their time.
#[derive(Debug)]
struct TestCompute {
    node: NodeId,
    /// Of a step.
    takes: Duration,
    /// Steps are really computed; else the weights name the node that made them.
    real: bool,
    memory: TrainingMemory,
}

const ROOMY: TrainingMemory = TrainingMemory { needed_bytes: 1, free_bytes: Some(2) };

fn device(node: u8, takes: Duration) -> Arc<dyn Compute> {
    Arc::new(TestCompute { node: id(node), takes, real: false, memory: ROOMY })
}

struct Mute;

impl Engine for Mute {
    fn generate(&self, _: GenerateRequest, _: Box<dyn TokenSink>) -> Result<(), EngineError> {
        Err(EngineError::Stopped)
    }
    fn swap_weights(&self, _: &[u8], _: PolicyVersion) -> Result<(), String> {
        Ok(())
    }
    fn queue(&self) -> usize {
        0
    }
}

impl Compute for TestCompute {
    fn start_engine(&self, _: &[u8], _: &[u8], _: PolicyVersion) -> Result<Arc<dyn Engine>, String> {
        Ok(Arc::new(Mute))
    }
    fn start_trainer(
        &self,
        config: &[u8],
        start: TrainerStart,
        spec: &TrainerSpec,
    ) -> Result<Box<dyn StepTrainer>, String> {
        if !self.real {
            let (node, takes) = (self.node, self.takes);
            return Ok(Box::new(FakeTrainer { node, takes, weights: Arc::new(Mutex::new(start.weights)) }));
        }
        let config = LlamaConfig::from_json(config).map_err(|e| e.to_string())?;
        // Adapters lie on the job's first weights.
        let first = start.reference.filter(|_| spec.lora.is_some());
        let bytes = first.as_ref().unwrap_or(&start.weights);
        let weights = Weights::from_safetensors(&config, bytes, &Device::Cpu).map_err(|e| e.to_string())?;
        let (lora, seed, betas) = (spec.lora.clone(), start.seed, spec.betas);
        let options = TrainerConfig { learning_rate: 0.01, betas, threads: 1, lora, seed, ..TrainerConfig::default() };
        let mut trainer = Trainer::new(config, &weights, options, Device::Cpu).map_err(|e| e.to_string())?;
        if let Some(state) = start.optimizer_state {
            trainer.load_optimizer_state(&state).map_err(|e| e.to_string())?;
        }
        Ok(Box::new(RealTrainer(Mutex::new(trainer))))
    }
    fn training_memory(&self, _: &[u8]) -> Result<TrainingMemory, String> {
        Ok(self.memory)
    }
}

struct RealTrainer(Mutex<Trainer>);

impl StepTrainer for RealTrainer {
    fn step(&self, input: StepInput) -> oneshot::Receiver<Result<Stepped, String>> {
        let (answer, done) = oneshot::channel();
        let mut trainer = self.0.lock().unwrap();
        let report = trainer.step(&input.samples).unwrap();
        let weights = trainer.weights().unwrap().to_safetensors().unwrap();
        let optimizer_state = input.with_optimizer_state.then(|| trainer.optimizer_state().unwrap());
        let _gone = answer.send(Ok(Stepped { weights, optimizer_state, report }));
        done
    }
}

struct FakeTrainer {
    node: NodeId,
    takes: Duration,
    weights: Arc<Mutex<Vec<u8>>>,
}

impl StepTrainer for FakeTrainer {
    fn step(&self, input: StepInput) -> oneshot::Receiver<Result<Stepped, String>> {
        let (answer, done) = oneshot::channel();
        let (node, takes, weights) = (self.node, self.takes, self.weights.clone());
        drop(spawn(async move {
            sleep(takes).await;
            let mut weights = weights.lock().unwrap();
            *weights = Hash::of(&[&node.0[..], &weights[..]].concat()).0.repeat(64);
            let optimizer_state = input.with_optimizer_state.then(|| b"moments".to_vec());
            let stepped = Stepped { weights: weights.clone(), optimizer_state, report: StepReport::default() };
            let _gone = answer.send(Ok(stepped));
        }));
        done
    }
}

fn tiny() -> LlamaConfig {
    LlamaConfig {
        architecture: Architecture::Llama,
        rope_scaling: None,
        vocab_size: 16,
        hidden_size: 8,
        intermediate_size: 16,
        num_hidden_layers: 1,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 4,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        max_position_embeddings: 64,
        tie_word_embeddings: true,
        bos_token_id: None,
        eos_token_ids: Vec::new(),
    }
}

/// Servers with these devices and a client, who know each other and have a model with a job.
async fn world(devices: Vec<Arc<dyn Compute>>, moments_every: u64, config: MaintenanceConfig) -> World {
    world_that_trains(TrainerSpec::default(), devices, moments_every, config).await
}

async fn world_that_trains(
    trainer: TrainerSpec,
    devices: Vec<Arc<dyn Compute>>,
    moments_every: u64,
    config: MaintenanceConfig,
) -> World {
    let mut world = World::new();
    world.config = config;
    for (n, device) in (1..).zip(devices) {
        world.start_with(id(n), Role::Server, device).await;
    }
    world.start(id(99), Role::Client).await;
    world.settle().await;
    let creator = world.core(id(1));
    let weights = Weights::random(&tiny(), &Device::Cpu, 7).unwrap().to_safetensors().unwrap();
    let files = BTreeMap::from([("config.json".to_owned(), tiny().to_json().into_bytes())]);
    world.as_node(id(1), creator.create_model(&model(), weights, files)).await.unwrap();
    let lines = b"{\"id\":\"a\"}\n{\"id\":\"b\"}\n".to_vec();
    let train = world.as_node(id(1), creator.blobs().put(lines)).await.unwrap();
    world.as_node(id(1), creator.place_on_second(train.hash, vec![train.clone()])).await.unwrap();
    let spec = JobSpec {
        name: "test".into(),
        model: model(),
        seed: 1,
        steps: 1000,
        groups_per_step: 1,
        group_size: 2,
        collection: CollectionRule::Groups,
        staleness_max: 1,
        replication: 2,
        lease_ttl_ms: 60_000,
        optimizer_state_every: moments_every,
        sampling: Sampling::default(),
        trainer,
        tasks: vec![TaskSetSpec { name: "s".into(), weight: 1.0, train, heldout: None }],
        evaluate: EvaluateSpec::default(),
    };
    let entry = ControlEntry::JobSubmitted { job: JOB, spec: Box::new(spec), at: Timestamp(1) };
    world.until("the model is known", 20 * SECOND, |w| leader(w).is_some()).await;
    world.as_node(id(1), world.core(id(1)).models().propose(&model(), entry)).await.unwrap();
    world
}

fn servers(w: &World) -> Vec<NodeId> {
    (1..=9).map(id).filter(|n| w.is_running(*n)).collect()
}

fn leader(w: &World) -> Option<NodeId> {
    let leads = |n: &NodeId| w.core(*n).groups().leadership(&model()).is_some_and(|v| v.get().is_self);
    servers(w).into_iter().find(leads)
}

fn state(w: &World, node: NodeId) -> Arc<ModelState> {
    w.core(node).groups().state(&model()).unwrap().get()
}

/// The record of `assignment`; its id is above `above`, so that the order of a batch does not depend on chance.
fn seal(assignment: &Assignment, reward: f32, above: RolloutId) -> starling_protocol::rollout::SealedRollout {
    let (key, version) = (TestKey(id(99)), assignment.policy_version);
    let step = u32::try_from(version.0 % 8).unwrap();
    let timeline = Timeline {
        tokens: vec![1, 2, 3 + step, 4 + u32::from(reward > 0.5)],
        loss_mask: vec![false, false, true, true],
        behaviour_logprobs: vec![0.0, 0.0, -2.5, -2.5],
        policy_versions: vec![PolicyVersion(0), PolicyVersion(0), version, version],
    };
    let t = &timeline;
    let body =
        receipt_body(&model(), &t.tokens[..2], &t.tokens[2..], &t.behaviour_logprobs[2..], &t.policy_versions[2..]);
    let receipt = TurnReceipt {
        unreceipted_len: 0,
        receipt: Receipt { signature: Signature::new(&key, Domain::Receipt, &body) },
    };
    let turn = Turn {
        timeline: 0,
        prompt_len: 2,
        completion_len: 2,
        finish: FinishReason::Length,
        temperature: 1.0,
        duration_ms: 1,
        receipt: Some(receipt),
        fork_cause: None,
    };
    let mut rollout = Rollout::begin(assignment, id(99), "test".into(), Timestamp(1));
    (rollout.timelines, rollout.turns, rollout.reward, rollout.ended) =
        (vec![timeline], vec![turn], reward, Timestamp(2));
    let mut sealed = (0..1000_u16).map(|nonce| {
        rollout.metrics.insert("nonce".to_owned(), f32::from(nonce));
        rollout.clone().seal(&key).unwrap()
    });
    sealed.find(|s| s.id > above && s.id.0[0] < 240).unwrap()
}

/// Runs one group's two episodes, one rewarded, as the client, until all servers know of the step that used them up;
/// returns one of their rollouts.
async fn run_group(w: &World) -> RolloutId {
    let client = w.core(id(99));
    let mut given: Vec<Assignment> = Vec::new();
    for _ in 0..600 {
        let want = u32::try_from(2 - given.len()).unwrap();
        let call = LeaderCall::Claim { model: model(), want, ahead: 0, stocked: 0, running: Vec::new() };
        if let Ok(LeaderReply::Assigned { assignments, .. }) =
            w.as_node(id(99), client.ask_leader(&model(), &call)).await
        {
            given.extend(assignments);
        }
        if given.len() == 2 {
            break;
        }
        sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(given.len(), 2, "no episodes within a minute");
    let mut last = Hash([0; 32]);
    for (assignment, reward) in given.iter().zip([0.0, 1.0]) {
        let sealed = seal(assignment, reward, last);
        last = sealed.id;
        w.as_node(id(99), client.rollouts().replicate(&model(), JOB, sealed, 2)).await.unwrap();
    }
    // A server that is no member yet has no state.
    let consumed = |w: &World, n: NodeId| {
        let state = w.core(n).groups().state(&model());
        state.is_none_or(|s| s.get().consumed.contains_key(&last))
    };
    w.until("trained on", 60 * SECOND, |w| servers(w).iter().all(|n| consumed(w, *n))).await;
    last
}

/// Weights of versions 1 to 4; the leader dies for good after version 2 if it is to.
async fn train(trainer: TrainerSpec, moments_every: u64, interrupted: bool) -> Vec<Hash> {
    let real = |n| Arc::new(TestCompute { node: id(n), takes: SECOND, real: true, memory: ROOMY }) as Arc<dyn Compute>;
    let devices = (1..=3).map(real).collect();
    let mut w = world_that_trains(trainer, devices, moments_every, MaintenanceConfig::default()).await;
    let mut weights = Vec::new();
    for step in 1..=4 {
        if interrupted && step == 3 {
            let old = leader(&w).unwrap();
            w.kill(old);
            w.until("another leads", 20 * SECOND, |w| leader(w).is_some()).await;
        }
        run_group(&w).await;
        let now = state(&w, servers(&w)[0]);
        assert_eq!(now.version, PolicyVersion(step));
        weights.push(now.weights.as_ref().unwrap().hash);
    }
    weights
}

#[tokio::test(start_paused = true)]
async fn a_new_leader_goes_on_with_the_moments_of_the_old_one_bit_by_bit() {
    let train = |every, interrupted| train(TrainerSpec::default(), every, interrupted);
    let whole = train(1, false).await;
    assert_eq!(train(1, true).await, whole, "as if nothing had happened");
    // Without the moments the first steps are the same and the later ones are not.
    let without = train(0, true).await;
    assert_eq!(without[..2], whole[..2]);
    assert_ne!(without[2], whole[2]);
}

#[tokio::test(start_paused = true)]
async fn a_new_leader_goes_on_with_the_adapters_of_the_old_one_bit_by_bit() {
    let lora = Some(LoraSpec { rank: 2, alpha: 4.0, targets: LoraTarget::ALL.to_vec() });
    let trainer = || TrainerSpec { lora: lora.clone(), ..TrainerSpec::default() };
    let whole = train(trainer(), 1, false).await;
    assert_eq!(train(trainer(), 1, true).await, whole, "as if nothing had happened");
    assert_ne!(train(TrainerSpec::default(), 1, false).await[0], whole[0]);
}

#[tokio::test(start_paused = true)]
async fn a_deposed_leaders_step_is_discarded_and_its_rollouts_train_again() {
    let config = MaintenanceConfig { orphans_kept: 20 * SECOND, ..MaintenanceConfig::default() };
    let w = world((1..=3).map(|n| device(n, 3 * SECOND)).collect(), 1, config).await;
    run_group(&w).await;
    let old = leader(&w).unwrap();
    // What it will make of the next batch, as `FakeTrainer` computes it.
    let mut base = Vec::new();
    for chunk in &state(&w, old).weights.as_ref().unwrap().chunks {
        base.extend(get_blob(&*w.stores[&old], *chunk).unwrap().unwrap());
    }
    let discarded = Hash::of(&Hash::of(&[&old.0[..], &base[..]].concat()).0.repeat(64));
    let kept = |w: &World| w.stores.values().any(|s| has_blob(&**s, discarded).unwrap());
    // It is cut off while it trains, a moment before its step is there.
    let cut = async {
        sleep(Duration::from_millis(2500)).await;
        w.network.isolate(old);
        w.until("its step is computed", 2 * SECOND, kept).await;
        sleep(30 * SECOND).await;
        w.network.heal_all();
    };
    let (rollout, ()) = tokio::join!(run_group(&w), cut);
    let new = state(&w, old);
    assert_eq!(new.version, PolicyVersion(2));
    assert_ne!(new.version_term, state_term(&w, 1), "another leader's step");
    assert_eq!(new.consumed.get(&rollout), Some(PolicyVersion(2)), "the rollouts were trained on after all");
    assert_ne!(new.weights.as_ref().unwrap().hash, discarded);
    w.until("its chunks are collected", 120 * SECOND, |w| !kept(w)).await;
}

/// The term that committed `version`, by the first server's own record.
fn state_term(w: &World, version: u64) -> starling_protocol::Term {
    let store = &*w.stores[&servers(w)[0]];
    starling_storage::steps::step(store, &model(), PolicyVersion(version)).unwrap().unwrap().term
}

fn seated(w: &World, node: NodeId) -> bool {
    leader(w).is_some_and(|l| w.core(l).groups().voters(&model()).contains(&node))
}

#[tokio::test(start_paused = true)]
async fn a_draining_leader_commits_its_step_hands_over_and_leaves_its_seat() {
    let w = world((1..=4).map(|n| device(n, 5 * SECOND)).collect(), 1, MaintenanceConfig::default()).await;
    w.until("three vote and one learns", 60 * SECOND, |w| {
        leader(w).is_some_and(|l| w.core(l).groups().voters(&model()).len() == 3)
    })
    .await;
    let old = leader(&w).unwrap();
    let drain = async {
        sleep(2 * SECOND).await; // the step takes 5 s
        w.as_node(old, async { w.core(old).drain() }).await.unwrap();
        sleep(SECOND).await;
        assert_eq!(leader(&w), Some(old), "it still trains");
        let report = w.core(old).drain_report(Vec::new());
        assert!(!report.done && report.waits.iter().any(|s| s.contains("another voter to lead")), "{report:?}");
    };
    tokio::join!(run_group(&w), drain);
    let step = starling_storage::steps::step(&*w.stores[&old], &model(), PolicyVersion(1)).unwrap().unwrap();
    assert!(step.holders.contains(&old), "its step counts: {:?}", step.holders);
    w.until("another leads", 10 * SECOND, |w| leader(w).is_some_and(|l| l != old)).await;
    w.until("its seat is another's", 60 * SECOND, |w| leader(w).is_some() && !seated(w, old)).await;
    assert_eq!(w.core(leader(&w).unwrap()).groups().voters(&model()).len(), 3);
    w.until("drained", 60 * SECOND, |w| w.core(old).drain_report(Vec::new()).done).await;
    assert!(w.core(old).drain_report(Vec::new()).votes_in.is_empty());
    run_group(&w).await;
}

#[tokio::test(start_paused = true)]
async fn leadership_moves_to_a_much_faster_device_that_joins_and_stays_there() {
    let mut w = world((1..=3).map(|n| device(n, 2 * SECOND)).collect(), 1, MaintenanceConfig::default()).await;
    run_group(&w).await;
    let fast = id(4);
    w.start_with(fast, Role::Server, device(4, SECOND / 2)).await;
    for _ in 0..20 {
        run_group(&w).await;
        sleep(3 * SECOND).await;
    }
    assert_eq!(leader(&w), Some(fast));
    let measured = Fitness::Trains { tokens_per_s: 512 };
    assert_eq!(w.core(fast).groups().fitness(&model()), measured);
    assert_eq!(w.core(id(1)).membership().record(fast).unwrap().models[0].fitness, measured);
    assert_eq!(w.core(fast).groups().voters(&model()).len(), 3, "it took a seat, and another gave one up");
    let terms = state(&w, fast).terms.len();
    for _ in 0..5 {
        run_group(&w).await;
    }
    assert_eq!((leader(&w), state(&w, fast).terms.len()), (Some(fast), terms), "and there it stays");
}

#[tokio::test(start_paused = true)]
async fn a_device_that_is_too_small_votes_and_does_not_lead() {
    let mut devices: Vec<_> = (1..=2).map(|n| device(n, SECOND)).collect();
    let memory = TrainingMemory { needed_bytes: 3, free_bytes: Some(2) };
    devices.push(Arc::new(TestCompute { node: id(3), takes: SECOND, real: false, memory }));
    let mut w = world(devices, 1, MaintenanceConfig::default()).await;
    w.until("it knows", 20 * SECOND, |w| w.core(id(3)).groups().fitness(&model()) == Fitness::TooSmall).await;
    w.until("one of the others leads", 20 * SECOND, |w| leader(w).is_some_and(|l| l != id(3))).await;
    for _ in 0..3 {
        run_group(&w).await;
        let old = leader(&w).unwrap();
        assert_ne!(old, id(3));
        w.kill(old);
        w.until("the other one leads", 30 * SECOND, |w| leader(w).is_some()).await;
        assert_ne!(leader(&w), Some(id(3)));
        w.start_with(old, Role::Server, device(old.0[0], SECOND)).await;
        w.settle().await;
    }
    assert!(w.core(leader(&w).unwrap()).groups().voters(&model()).contains(&id(3)));
}
