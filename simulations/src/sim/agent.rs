//! Agents of a client node, modelled: they claim, call the model, think, fork, crash, hang, lie, and end. What they
//! do goes through the node's own client; only the agent program is modelled.

use super::key::SimKey;
use super::recorder::Recorder;
use crate::event::{Event, NodeIx, oldest_version};
use crate::scenario::Job;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use starling_core::NodeCore;
use starling_core::client::{Client, ClientConfig, GenerationEvent, SealError};
use starling_core::runtime::spawn;
use starling_protocol::assignment::Assignment;
use starling_protocol::rollout::Rollout;
use starling_protocol::timeline::{CanonicalMessage, Completion, TimelineTree, TurnInfo};
use starling_protocol::wire::Generate;
use starling_protocol::{EpisodeId, Hash, RolloutId};
use starling_storage::acknowledged;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

/// Pauses between claims that bring too little: as the agent runner's.
const CLAIM_PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(500));
/// Longest pause between attempts to end an episode.
const END_PAUSE_MAX: Duration = Duration::from_secs(1);
/// The runner's time limit for an agent program, in lengths of its lease.
const LIMIT_LEASES: u32 = 2;

/// Starts the node's agents in its scope; they end with it.
pub(crate) fn start(core: &Arc<NodeCore>, node: NodeIx, slots: usize, job: Arc<Job>, recorder: &Recorder) {
    let client = Client::new(core.clone(), ClientConfig::default());
    let runner = Runner { client, node, slots, job, recorder: recorder.clone(), running: BTreeMap::new() };
    drop(spawn(runner.run()));
}

struct Runner {
    client: Client,
    node: NodeIx,
    slots: usize,
    job: Arc<Job>,
    recorder: Recorder,
    running: BTreeMap<EpisodeId, CancellationToken>,
}

impl Runner {
    async fn run(mut self) {
        let (done, mut ended) = mpsc::channel(self.slots);
        let mut pause = CLAIM_PAUSE.0;
        let mut claim_at = Instant::now();
        let mut idle_since = Instant::now();
        loop {
            let want = self.slots - self.running.len().min(self.slots);
            let client = self.client.clone();
            let renew = tokio::select! {
                biased;
                Some(episode) = ended.recv() => {
                    self.over(episode);
                    continue;
                }
                () = client.renewal_due(), if !self.running.is_empty() => true,
                () = sleep_until(claim_at), if want > 0 => false,
            };
            let running: Vec<EpisodeId> = self.running.keys().copied().collect();
            let claimed = self.client.claim(&[], if renew { 0 } else { want }, &running).await;
            for episode in claimed.revoked {
                if let Some(stop) = self.running.get(&episode) {
                    stop.cancel();
                }
            }
            let got = claimed.assignments.len();
            for assignment in claimed.assignments {
                self.begin(assignment, &done);
            }
            if got > 0 || !self.running.is_empty() {
                idle_since = Instant::now();
            }
            let since = idle_since.elapsed();
            self.recorder.record(Event::Waits { node: self.node, since, reason: claimed.wait });
            if !renew {
                pause = if got >= want { Duration::ZERO } else { (pause * 2).clamp(CLAIM_PAUSE.0, CLAIM_PAUSE.1) };
                claim_at = Instant::now() + pause;
            }
        }
    }

    fn over(&mut self, episode: EpisodeId) {
        if self.running.remove(&episode).is_some() {
            self.recorder.record(Event::Released { node: self.node, episode });
        }
    }

    fn begin(&mut self, assignment: Assignment, done: &mpsc::Sender<EpisodeId>) {
        let episode = assignment.episode;
        let (node, model, term) = (self.node, assignment.model.clone(), assignment.term);
        self.recorder.record(Event::Granted { node, episode, model, term });
        let stop = CancellationToken::new();
        self.running.insert(episode, stop.clone());
        let agent = Agent {
            client: self.client.clone(),
            node,
            rng: ChaCha8Rng::seed_from_u64(assignment.seed),
            job: self.job.clone(),
            recorder: self.recorder.clone(),
            tree: TimelineTree::default(),
            started: (self.client.core().clock())(),
            assignment,
        };
        let done = done.clone();
        drop(spawn(async move {
            let limit = Duration::from_millis(agent.assignment.lease_ttl_ms) * LIMIT_LEASES;
            let (client, assignment) = (agent.client.clone(), agent.assignment.clone());
            let outcome = tokio::select! {
                biased;
                () = stop.cancelled() => Outcome::Revoked,
                o = agent.play() => o,
                () = sleep(limit) => Outcome::Aborted("time limit"),
            };
            if let Outcome::Aborted(cause) = outcome {
                client.abort(&assignment, cause.to_owned()).await;
            }
            let _gone = done.send(episode).await;
        }));
    }
}

enum Outcome {
    Ended,
    Revoked,
    Aborted(&'static str),
}

/// One episode's agent.
struct Agent {
    client: Client,
    node: NodeIx,
    rng: ChaCha8Rng,
    job: Arc<Job>,
    recorder: Recorder,
    tree: TimelineTree,
    started: starling_protocol::Timestamp,
    assignment: Assignment,
}

impl Agent {
    async fn play(mut self) -> Outcome {
        let turns = self.rng.random_range(self.job.turns.0..=self.job.turns.1);
        let crashes_at = self.rng.random_bool(self.job.agent_crash).then(|| self.rng.random_range(0..turns));
        let hangs = self.rng.random_bool(self.job.agent_hang);
        let forks = self.rng.random_bool(self.job.agent_fork);
        let task = self.assignment.task_line.clone();
        let mut messages = vec![("user", task)];
        for turn in 0..turns {
            if crashes_at == Some(turn) {
                return Outcome::Aborted("the agent crashed");
            }
            let Some(answer) = self.call(&messages).await else {
                return Outcome::Aborted("the model cannot be reached");
            };
            messages.push(("assistant", answer));
            let thinks = Duration::from_millis(self.rng.random_range(1..120));
            sleep(thinks).await;
            messages.push(("tool", format!("result {turn}")));
        }
        if forks {
            let sub = [("user", format!("sub-agent of {}", self.assignment.task.id))];
            if self.call(&sub).await.is_none() {
                return Outcome::Aborted("the model cannot be reached");
            }
        }
        if hangs {
            std::future::pending::<()>().await;
        }
        self.end().await
    }

    /// One model call, recorded in the episode's tree. `None` when no server answered.
    async fn call(&mut self, messages: &[(&'static str, String)]) -> Option<String> {
        let canonical: Vec<CanonicalMessage<'_>> = messages.iter().map(|(role, text)| message(role, text)).collect();
        let plan = self.tree.begin_call(Hash::of(b"no tools"), &canonical);
        let mut prompt = plan.history_tokens.clone();
        let new: Vec<u32> =
            messages[plan.known_messages..].iter().flat_map(|(_, text)| text.bytes().map(u32::from)).collect();
        prompt.extend_from_slice(&new);
        let max_tokens = self.rng.random_range(self.job.tokens.0..=self.job.tokens.1);
        let request = Generate {
            model: self.assignment.model.clone(),
            prompt,
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            seed: self.rng.random(),
            drawn: 0,
            max_tokens,
            stop_token_ids: Vec::new(),
            top_logprobs: 0,
        };
        let started = Instant::now();
        let mut generation = self.client.generate(request).await.ok()?;
        let mut completion = Completion::default();
        let (finish, receipt) = loop {
            match generation.next().await? {
                Ok(GenerationEvent::Tokens(tokens)) => {
                    for t in tokens {
                        completion.tokens.push(t.id);
                        completion.logprobs.push(t.logprob);
                        completion.versions.push(t.version);
                    }
                }
                Ok(GenerationEvent::End { finish, receipt }) => break (finish, receipt),
                Err(error) => {
                    tracing::debug!(%error, "an answer failed");
                    return None;
                }
            }
        };
        let text = completion.tokens.iter().map(|t| format!("{t:02x}")).collect::<String>();
        let info = TurnInfo {
            finish,
            temperature: 1.0,
            duration_ms: u32::try_from(started.elapsed().as_millis()).unwrap_or(u32::MAX),
            receipt,
        };
        self.tree.end_call(&plan, &new, completion, &message("assistant", &text), info);
        Some(text)
    }

    async fn end(mut self) -> Outcome {
        let core = self.client.core().clone();
        let mut rollout = Rollout::begin(&self.assignment, core.node(), "simulated".into(), self.started);
        rollout.ended = (core.clock())();
        (rollout.timelines, rollout.turns) = self.tree.timelines();
        // Any function of the tokens will do, if groups differ.
        let sum: u32 = rollout.timelines.iter().flat_map(|t| &t.tokens).sum();
        #[expect(clippy::cast_precision_loss, reason = "below 100")]
        let reward = (sum % 100) as f32 / 100.0;
        rollout.reward = reward;
        if self.rng.random_bool(self.job.forged) {
            return self.forge(rollout).await;
        }
        let id = match rollout.seal(&SimKey(core.node())) {
            Ok(sealed) => sealed.id,
            Err(error) => {
                tracing::warn!(%error, "a rollout that cannot be sealed");
                return Outcome::Aborted("not a rollout");
            }
        };
        self.tell_sealed(id, &rollout, false);
        let mut pause = CLAIM_PAUSE.0;
        loop {
            let live = core.membership().live_holders().len();
            let promised = usize::from(self.assignment.replication).min(live);
            match self.client.seal(rollout.clone()).await {
                Ok(rollout) => {
                    self.acknowledged(rollout, promised);
                    return Outcome::Ended;
                }
                Err(SealError::Storage(error)) => {
                    tracing::debug!(%error, "not acknowledged yet");
                    sleep(pause).await;
                    pause = (pause * 2).min(END_PAUSE_MAX);
                }
                Err(SealError::LeaseLost(_)) => return Outcome::Revoked,
                Err(SealError::Invalid(error)) => {
                    tracing::warn!(%error, "a rollout that cannot be sealed");
                    return Outcome::Aborted("not a rollout");
                }
            }
        }
    }

    fn tell_sealed(&self, id: RolloutId, rollout: &Rollout, forged: bool) {
        let (node, model) = (self.node, self.assignment.model.clone());
        self.recorder.record(Event::Sealed { node, rollout: id, model, oldest: oldest_version(rollout), forged });
    }

    fn acknowledged(&self, rollout: RolloutId, promised: usize) {
        let store = self.client.core().store();
        let holders = acknowledged::promise(&**store, rollout).ok().flatten().map(|a| a.holders);
        self.recorder.record(Event::Acknowledged {
            node: self.node,
            rollout,
            holders: self.recorder.indices(&holders.unwrap_or_default()),
            promised: u32::try_from(promised).unwrap_or(u32::MAX),
        });
    }

    /// A dishonest client: tokens that no server sampled, under receipts for others.
    async fn forge(mut self, mut rollout: Rollout) -> Outcome {
        rollout.reward = 1.0;
        for t in &mut rollout.timelines {
            for (id, trains) in t.tokens.iter_mut().zip(&t.loss_mask) {
                if *trains {
                    *id = self.rng.random_range(0..256);
                }
            }
        }
        if let Ok(sealed) = rollout.seal(&SimKey(self.client.core().node())) {
            self.tell_sealed(sealed.id, &rollout, true);
        }
        // It is stored like any other: holders check the envelope only. The leader must refuse it.
        match self.client.seal(rollout).await {
            Ok(_) => Outcome::Ended,
            Err(_) => Outcome::Aborted("a forgery was refused"),
        }
    }
}

fn message<'a>(role: &'a str, text: &'a str) -> CanonicalMessage<'a> {
    CanonicalMessage { role: role.into(), text: text.into(), ..CanonicalMessage::default() }
}
