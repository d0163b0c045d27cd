//! Runs: one seed, many seeds, the same seed twice.

use crate::event::Event;
use crate::oracle::Counts;
use crate::scenario::Scenario;
use crate::sim::{Ended, LeftOut, Load, Recorded, Violation, World};
use serde::Serialize;
use starling_core::memory_network::{MessageKind, NodeCounters};
use starling_protocol::Hash;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Stack of a run's thread: unoptimised futures of whole nodes are large.
const STACK_BYTES: usize = 16 << 20;

/// What one run came to.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The scenario's name.
    pub scenario: String,
    /// The seed.
    pub seed: u64,
    /// Events and network messages.
    pub events: u64,
    /// Network messages among them.
    pub messages: u64,
    /// blake3 over all of them with their times: equal for equal seeds (I12).
    pub trace: Hash,
    /// Broken properties; empty if all is well.
    pub violations: Vec<Violation>,
    /// Totals.
    pub counts: Counts,
    /// How much virtual time passed.
    pub virtual_time: Duration,
    /// From the heal to convergence, if it came.
    pub healed_in: Option<Duration>,
    /// From a death that lasted to all others knowing it, if they came to.
    pub detected_in: Option<Duration>,
    /// What a node sends in a second of the quiet time before the first fault.
    pub steady: Option<Load>,
    /// What passed through each node.
    pub traffic: Vec<Traffic>,
    /// What a node sent in a second, over the whole run: joining, faults and healing too.
    pub whole_run: Option<Load>,
    /// What happened, if it was to be kept.
    pub record: Vec<(Duration, Event)>,
    /// What of it there was no room for.
    pub left_out: LeftOut,
    /// Names of the nodes, by their number in events.
    pub names: Vec<String>,
}

/// A node's traffic over the run.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Traffic {
    /// Messages it sent, by kind.
    pub messages: BTreeMap<&'static str, u64>,
    /// Bytes it sent, by kind.
    pub bytes: BTreeMap<&'static str, u64>,
}

impl From<NodeCounters> for Traffic {
    fn from(c: NodeCounters) -> Self {
        let mut t = Self::default();
        for kind in MessageKind::ALL {
            let part = c.of(kind);
            t.messages.insert(kind.name(), part.messages_sent);
            t.bytes.insert(kind.name(), part.bytes_sent);
        }
        t
    }
}

/// Runs `scenario` with `seed`, on a thread and runtime of its own. `keep` keeps the events for a report.
#[must_use]
pub fn run(scenario: &Arc<Scenario>, seed: u64, keep: bool) -> Outcome {
    run_after(scenario, seed, keep, || ())
}

/// The same with a bug planted into the node's logic: a checker must find it.
#[cfg(feature = "planted-bugs")]
#[must_use]
pub fn run_planted(scenario: &Arc<Scenario>, seed: u64, bug: starling_protocol::planted::Bug) -> Outcome {
    run_after(scenario, seed, false, move || starling_protocol::planted::plant(Some(bug)))
}

fn run_after(scenario: &Arc<Scenario>, seed: u64, keep: bool, prepare: impl FnOnce() + Send + 'static) -> Outcome {
    let name = scenario.name.clone();
    let scenario = scenario.clone();
    let thread = std::thread::Builder::new().name(format!("sim-{seed}")).stack_size(STACK_BYTES);
    let running = thread.spawn(move || {
        prepare();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        runtime.map(|r| r.block_on(async { Box::pin(World::new(scenario, seed, keep).run()).await }))
    });
    let ended = running.map_err(|e| e.to_string()).and_then(|t| match t.join() {
        Ok(Ok(ended)) => Ok(ended),
        Ok(Err(e)) => Err(e.to_string()),
        Err(panic) => Err(panic_text(&*panic)),
    });
    match ended {
        Ok(ended) => outcome(name, seed, ended),
        // A panic of a node's logic is a finding like any other.
        Err(conflict) => Outcome {
            scenario: name,
            seed,
            events: 0,
            messages: 0,
            trace: Hash::of(conflict.as_bytes()),
            violations: vec![Violation { invariant: "no panic", at_s: 0.0, event: 0, conflict }],
            counts: Counts::default(),
            virtual_time: Duration::ZERO,
            healed_in: None,
            detected_in: None,
            steady: None,
            traffic: Vec::new(),
            whole_run: None,
            record: Vec::new(),
            left_out: LeftOut::default(),
            names: Vec::new(),
        },
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("the run panicked").to_owned()
}

fn outcome(scenario: String, seed: u64, ended: Ended) -> Outcome {
    let Recorded { events, messages, trace, oracle, mut violations, kept, left_out } = ended.recorded;
    // What all disks together say in the end, whatever the events said before.
    if violations.is_empty()
        && let Some(audit) = ended.audit.filter(|a| !a.is_clean())
    {
        let conflict = format!(
            "lost {:?}, consumed twice {:?}, forked versions {:?}, of deposed leaders {:?}",
            audit.lost, audit.consumed_twice, audit.forked_versions, audit.deposed
        );
        let at_s = ended.virtual_time.as_secs_f64();
        violations.push(Violation { invariant: "the audit of all disks", at_s, event: events, conflict });
    }
    Outcome {
        scenario,
        seed,
        events: events + messages,
        messages,
        trace,
        violations,
        counts: oracle.counts,
        virtual_time: ended.virtual_time,
        healed_in: ended.healed_in,
        detected_in: ended.detected_in,
        steady: ended.steady,
        whole_run: whole_run(&ended.traffic, ended.virtual_time),
        traffic: ended.traffic.into_iter().map(Traffic::from).collect(),
        record: kept,
        left_out,
        names: ended.names,
    }
}

fn whole_run(traffic: &[NodeCounters], lasted: Duration) -> Option<Load> {
    let sent = |c: &NodeCounters| (c.messages_sent, c.bytes_sent);
    let (messages, bytes) = traffic.iter().map(sent).fold((0, 0), |(a, b), (m, n)| (a + m, b + n));
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    let per = |sum: u64| sum as f64 / (traffic.len() as f64 * lasted.as_secs_f64());
    (messages > 0 && !lasted.is_zero()).then(|| Load { messages: per(messages), bytes: per(bytes) })
}

/// Runs every (scenario, seed) of `plan` on `threads` threads, and tells each outcome as it comes. Stops early when
/// `go_on` says no. Outcomes come back in the plan's order.
pub fn run_all(plan: &[(Arc<Scenario>, u64)], threads: usize, go_on: impl Fn(&Outcome) -> bool + Sync) -> Vec<Outcome> {
    let next = AtomicUsize::new(0);
    let done: Mutex<BTreeMap<usize, Outcome>> = Mutex::default();
    std::thread::scope(|s| {
        for _ in 0..threads.max(1) {
            s.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    let Some((scenario, seed)) = plan.get(i) else { return };
                    let outcome = run(scenario, *seed, false);
                    if !go_on(&outcome) {
                        next.store(plan.len(), Ordering::Relaxed);
                    }
                    done.lock().unwrap_or_else(PoisonError::into_inner).insert(i, outcome);
                }
            });
        }
    });
    done.into_inner().unwrap_or_else(PoisonError::into_inner).into_values().collect()
}

/// I12: whether a second run of the same seed leaves the same trace. Returns both hashes.
#[must_use]
pub fn replays(scenario: &Arc<Scenario>, seed: u64) -> (Hash, Hash) {
    (run(scenario, seed, false).trace, run(scenario, seed, false).trace)
}
