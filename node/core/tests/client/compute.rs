//! Devices that sample at a steady pace what their request determines, and do as the test says.

use starling_core::compute::{Compute, Engine, StepInput, StepTrainer, Stepped, TrainerStart, TrainingMemory};
use starling_core::runtime::spawn;
use starling_engine::{EngineError, FinishReason, GenerateRequest, SampledToken, SamplingParams, TokenSink};
use starling_protocol::job::TrainerSpec;
use starling_protocol::{Hash, PolicyVersion};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::sleep;

/// Time of a token.
pub(crate) const STEP: Duration = Duration::from_millis(50);

/// What a test may do to a node's devices.
#[derive(Debug, Default)]
pub(crate) struct Control {
    /// Sequences stand still.
    pub(crate) silent: AtomicBool,
    /// The last token is not followed by the end.
    pub(crate) endless: AtomicBool,
    /// Every request is refused, as by a full queue.
    pub(crate) busy: AtomicBool,
    /// Sequences whose caller went away.
    pub(crate) cancelled: AtomicUsize,
    /// Sequences begun.
    pub(crate) begun: AtomicUsize,
}

/// The `n` tokens behind `prompt`: each follows from the seed, its place in the seed's stream and the context.
pub(crate) fn sampled(prompt: &[u32], seed: u64, drawn: u32, n: usize) -> Vec<u32> {
    let mut context = prompt.to_vec();
    for i in 0..n as u64 {
        let mut bytes: Vec<u8> = context.iter().flat_map(|t| t.to_le_bytes()).collect();
        bytes.extend(seed.to_le_bytes());
        bytes.extend((u64::from(drawn) + i).to_le_bytes());
        let h = Hash::of(&bytes).0;
        context.push(u32::from(u16::from_le_bytes([h[0], h[1]])));
    }
    context.split_off(prompt.len())
}

#[derive(Debug, Default)]
pub(crate) struct FakeCompute(pub(crate) Arc<Control>);

impl Compute for FakeCompute {
    fn start_engine(&self, _: &[u8], _: &[u8], version: PolicyVersion) -> Result<Arc<dyn Engine>, String> {
        Ok(Arc::new(FakeEngine { control: self.0.clone(), version: AtomicU64::new(version.0) }))
    }
    fn start_trainer(&self, _: &[u8], _: TrainerStart, _: &TrainerSpec) -> Result<Box<dyn StepTrainer>, String> {
        Ok(Box::new(NoTrainer(Mutex::default())))
    }
    fn training_memory(&self, _: &[u8]) -> Result<TrainingMemory, String> {
        Err("no device in this test".into())
    }
}

struct FakeEngine {
    control: Arc<Control>,
    version: AtomicU64,
}

impl Engine for FakeEngine {
    fn generate(&self, request: GenerateRequest, mut sink: Box<dyn TokenSink>) -> Result<(), EngineError> {
        let control = self.control.clone();
        if control.busy.load(Ordering::Relaxed) {
            return Err(EngineError::Busy { waiting: 16, limit: 16 });
        }
        control.begun.fetch_add(1, Ordering::Relaxed);
        let version = self.version.load(Ordering::Relaxed);
        let GenerateRequest { prompt, sampling } = request;
        let SamplingParams { seed, drawn, max_tokens, stop_token_ids, top_logprobs, .. } = sampling;
        spawn(async move {
            for id in sampled(&prompt, seed, drawn, max_tokens as usize) {
                sleep(STEP).await;
                while control.silent.load(Ordering::Relaxed) {
                    sleep(STEP).await;
                }
                let top = (0..u32::from(top_logprobs)).map(|i| (id + i, -0.5)).collect();
                let token = SampledToken { id, logprob: -0.5, sampling_logprob: -0.5, policy_version: version, top };
                if !sink.token(token) {
                    control.cancelled.fetch_add(1, Ordering::Relaxed);
                    return;
                }
                if stop_token_ids.contains(&id) {
                    return sink.finish(Ok(FinishReason::Stop));
                }
            }
            if control.endless.load(Ordering::Relaxed) {
                return std::future::pending().await;
            }
            sink.finish(Ok(FinishReason::Length));
        });
        Ok(())
    }
    fn swap_weights(&self, _: &[u8], version: PolicyVersion) -> Result<(), String> {
        self.version.store(version.0, Ordering::Relaxed);
        Ok(())
    }
    fn queue(&self) -> usize {
        0
    }
}

/// Takes steps and never ends them.
struct NoTrainer(Mutex<Vec<oneshot::Sender<Result<Stepped, String>>>>);

impl StepTrainer for NoTrainer {
    fn step(&self, _: StepInput) -> oneshot::Receiver<Result<Stepped, String>> {
        let (answer, done) = oneshot::channel();
        self.0.lock().unwrap().push(answer);
        done
    }
}
