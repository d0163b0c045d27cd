//! Takes every event: into the trace's hash, the oracle, the checkers, and the record that a report is made from.

use super::kept::{Kept, LeftOut};
use crate::event::{Event, NodeIx};
use crate::invariants::{self, End, Invariant};
use crate::oracle::Oracle;
use crate::scenario::Job;
use hashbrown::HashMap;
use starling_core::memory_network::{Fate, MessageKind};
use starling_protocol::{Hash, NodeId};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

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

/// Bytes of the trace that are hashed at once: blake3 works on many of its chunks of 1 KiB side by side.
const PENDING_BYTES: usize = 64 << 10;

struct State {
    /// Only ever asked: its order means nothing.
    ids: HashMap<NodeId, NodeIx>,
    hasher: blake3::Hasher,
    /// What the hasher does not have yet.
    pending: Vec<u8>,
    events: u64,
    messages: u64,
    oracle: Oracle,
    checkers: Vec<Box<dyn Invariant>>,
    violations: Vec<Violation>,
    kept: Option<Kept>,
    /// Nodes that stored a rollout since the last of their syncs that was kept.
    unsynced: BTreeSet<NodeIx>,
}

/// Shared by everything that makes events. All of it runs on one thread: the lock is never contended.
#[derive(Clone)]
pub(crate) struct Recorder {
    start: Instant,
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
    pub(crate) left_out: LeftOut,
}

impl Recorder {
    pub(crate) fn new(start: Instant, ids: impl Iterator<Item = (NodeId, NodeIx)>, job: &Job, keep: bool) -> Self {
        let state = State {
            ids: ids.collect(),
            hasher: blake3::Hasher::new(),
            pending: Vec::with_capacity(PENDING_BYTES),
            events: 0,
            messages: 0,
            oracle: Oracle::default(),
            checkers: invariants::all(job),
            violations: Vec::new(),
            kept: keep.then(Kept::default),
            unsynced: BTreeSet::new(),
        };
        Self { start, state: Arc::new(Mutex::new(state)), alarm: Arc::default() }
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
        self.lock().ids.get(&node).copied()
    }
    /// A node goes by this identity from now on; events about its earlier ones stay its own.
    pub(crate) fn rename(&self, node: NodeIx, id: NodeId) {
        self.lock().ids.insert(id, node);
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
        state.pending.extend_from_slice(&at.as_nanos().to_le_bytes());
        // Canonical: serde writes fields in their order, and an event has ordered collections only.
        if let Err(e) = serde_json::to_writer(&mut state.pending, &event) {
            tracing::error!(error = %e, "an event does not serialize");
        }
        state.hash_pending(PENDING_BYTES);
        state.oracle.on_event(at, &event);
        for checker in &mut state.checkers {
            if let Err(conflict) = checker.on_event(at, &event, &state.oracle) {
                let (at_s, event) = (at.as_secs_f64(), state.events);
                state.violations.push(Violation { invariant: checker.name(), at_s, event, conflict });
            }
        }
        if let Some(kept) = &mut state.kept
            && is_kept(&event, &mut state.unsynced)
        {
            kept.take(at, event);
        }
        if !state.violations.is_empty() {
            self.alarm.notify_one();
        }
    }

    /// Takes a network message into the trace: who, what, how long, what became of it.
    pub(crate) fn message(&self, from: NodeId, to: NodeId, kind: MessageKind, len: usize, fate: Fate) {
        let at = self.now();
        let state = &mut *self.lock();
        state.messages += 1;
        let index = |n: &NodeId| state.ids.get(n).map_or(u32::MAX, |i| i.0);
        let mut line = [0; 33];
        line[..16].copy_from_slice(&at.as_nanos().to_le_bytes());
        line[16..20].copy_from_slice(&index(&from).to_le_bytes());
        line[20..24].copy_from_slice(&index(&to).to_le_bytes());
        line[24..32].copy_from_slice(&(len as u64).to_le_bytes());
        #[expect(clippy::cast_possible_truncation, reason = "seven kinds, five fates")]
        let kind = MessageKind::ALL.iter().position(|k| *k == kind).unwrap_or_default() as u8;
        line[32] = kind * 8 + fate as u8;
        state.pending.extend_from_slice(&line);
        state.hash_pending(PENDING_BYTES);
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
        state.hash_pending(0);
        let (kept, left_out) = state.kept.take().unwrap_or_default().finish();
        Recorded {
            events: state.events,
            messages: state.messages,
            trace: Hash(*state.hasher.finalize().as_bytes()),
            oracle: std::mem::take(&mut state.oracle),
            violations: std::mem::take(&mut state.violations),
            kept,
            left_out,
        }
    }
}

impl State {
    /// Hashes what is pending once it is so much.
    fn hash_pending(&mut self, from_bytes: usize) {
        if self.pending.len() >= from_bytes {
            self.hasher.update(&self.pending);
            self.pending.clear();
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
        // Waits that have their reason and are short say nothing.
        Event::Waits { since, .. } => since.as_secs() >= 2,
        _ => true,
    }
}
