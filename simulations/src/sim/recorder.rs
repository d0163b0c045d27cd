//! Takes every event: into the trace's hash, the oracle, the checkers, and the record that a report is made from.

use crate::event::{Event, NodeIx};
use crate::invariants::{self, End, Invariant};
use crate::oracle::Oracle;
use crate::scenario::Job;
use starling_protocol::{Hash, NodeId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Most events kept for a report: about 100 bytes each.
const KEPT_MAX: usize = 400_000;

/// A broken property.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Violation {
    /// Which.
    pub invariant: &'static str,
    /// Seconds from the start of the run.
    pub at_s: f64,
    /// How many events had happened.
    pub event: u64,
    /// The states that conflict.
    pub conflict: String,
}

struct State {
    hasher: blake3::Hasher,
    line: Vec<u8>,
    events: u64,
    messages: u64,
    oracle: Oracle,
    checkers: Vec<Box<dyn Invariant>>,
    violations: Vec<Violation>,
    kept: Option<Vec<(Duration, Event)>>,
    /// Nodes that stored a rollout since the last of their syncs that was kept.
    unsynced: BTreeSet<NodeIx>,
}

/// Shared by everything that makes events. All of it runs on one thread: the lock is never contended.
#[derive(Clone)]
pub(crate) struct Recorder {
    start: Instant,
    ids: Arc<Mutex<BTreeMap<NodeId, NodeIx>>>,
    state: Arc<Mutex<State>>,
    /// Rings at the first violation.
    pub(crate) alarm: Arc<Notify>,
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Recorder")
    }
}

/// What a recorder has in the end.
pub(crate) struct Recorded {
    pub(crate) events: u64,
    pub(crate) messages: u64,
    pub(crate) trace: Hash,
    pub(crate) oracle: Oracle,
    pub(crate) violations: Vec<Violation>,
    pub(crate) kept: Vec<(Duration, Event)>,
}

impl Recorder {
    pub(crate) fn new(start: Instant, ids: BTreeMap<NodeId, NodeIx>, job: &Job, keep: bool) -> Self {
        let state = State {
            hasher: blake3::Hasher::new(),
            line: Vec::new(),
            events: 0,
            messages: 0,
            oracle: Oracle::default(),
            checkers: invariants::all(job),
            violations: Vec::new(),
            kept: keep.then(Vec::new),
            unsynced: BTreeSet::new(),
        };
        Self { start, ids: Arc::new(Mutex::new(ids)), state: Arc::new(Mutex::new(state)), alarm: Arc::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Time since the start of the run.
    pub(crate) fn now(&self) -> Duration {
        self.start.elapsed()
    }
    /// The run's number of a node.
    pub(crate) fn index(&self, node: NodeId) -> Option<NodeIx> {
        self.ids.lock().unwrap_or_else(PoisonError::into_inner).get(&node).copied()
    }
    /// A node goes by this identity from now on; events about its earlier ones stay its own.
    pub(crate) fn rename(&self, node: NodeIx, id: NodeId) {
        self.ids.lock().unwrap_or_else(PoisonError::into_inner).insert(id, node);
    }
    /// The run's numbers of nodes.
    pub(crate) fn indices(&self, nodes: &[NodeId]) -> Vec<NodeIx> {
        nodes.iter().filter_map(|n| self.index(*n)).collect()
    }
    /// Looks at the truth.
    pub(crate) fn oracle<T>(&self, look: impl FnOnce(&Oracle) -> T) -> T {
        look(&self.lock().oracle)
    }
    /// Names the weights that a model begins with.
    pub(crate) fn first_weights(&self, model: starling_protocol::ModelName, weights: Hash) {
        self.lock().oracle.first_weights.insert(model, weights);
    }
    /// Whether a property is broken.
    pub(crate) fn is_violated(&self) -> bool {
        !self.lock().violations.is_empty()
    }

    /// Takes an event.
    pub(crate) fn record(&self, event: Event) {
        let at = self.now();
        let state = &mut *self.lock();
        state.events += 1;
        state.line.clear();
        state.line.extend_from_slice(&at.as_nanos().to_le_bytes());
        // Canonical: serde writes fields in their order, and an event has ordered collections only.
        if let Err(e) = serde_json::to_writer(&mut state.line, &event) {
            tracing::error!(error = %e, "an event does not serialize");
        }
        state.hasher.update(&state.line);
        state.oracle.on_event(at, &event);
        for checker in &mut state.checkers {
            if let Err(conflict) = checker.on_event(at, &event, &state.oracle) {
                let (at_s, event) = (at.as_secs_f64(), state.events);
                state.violations.push(Violation { invariant: checker.name(), at_s, event, conflict });
            }
        }
        if let Some(kept) = &mut state.kept
            && kept.len() < KEPT_MAX
            && is_kept(&event, &mut state.unsynced)
        {
            kept.push((at, event));
        }
        if !state.violations.is_empty() {
            self.alarm.notify_one();
        }
    }

    /// Takes a network message into the trace: who, what, how long, what became of it.
    pub(crate) fn message(&self, parts: &[u8]) {
        let at = self.now();
        let state = &mut *self.lock();
        state.messages += 1;
        state.hasher.update(&at.as_nanos().to_le_bytes());
        state.hasher.update(parts);
    }

    /// Closes the run.
    pub(crate) fn finish(&self, end: &End<'_>) -> Recorded {
        let at_s = self.now().as_secs_f64();
        let state = &mut *self.lock();
        if state.violations.is_empty() {
            for checker in &mut state.checkers {
                if let Err(conflict) = checker.at_end(end, &state.oracle) {
                    let (invariant, event) = (checker.name(), state.events);
                    state.violations.push(Violation { invariant, at_s, event, conflict });
                }
            }
        }
        Recorded {
            events: state.events,
            messages: state.messages,
            trace: Hash(*state.hasher.finalize().as_bytes()),
            oracle: std::mem::take(&mut state.oracle),
            violations: std::mem::take(&mut state.violations),
            kept: state.kept.take().unwrap_or_default(),
        }
    }
}

/// Whether a report needs it. Of syncs only those that make a rollout durable: at most one for each that is stored.
fn is_kept(event: &Event, unsynced: &mut BTreeSet<NodeIx>) -> bool {
    match event {
        Event::Stored { node, .. } => {
            unsynced.insert(*node);
            true
        }
        Event::Synced { node } => unsynced.remove(node),
        Event::Gauge { .. } => false,
        _ => true,
    }
}
