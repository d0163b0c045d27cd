//! One episode on this gateway: its lease, its key, its timeline tree.

use crate::api::openai_responses::ResponseStore;
use crate::http::Replies;
use crate::text::ChatFormat;
use starling_protocol::assignment::Assignment;
use starling_protocol::timeline::TimelineTree;
use starling_protocol::{EpisodeId, EpisodeKey, RolloutId, Timestamp};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;

/// Prefix of every episode key.
pub(crate) const KEY_PREFIX: &str = "sk-starling-";

/// 32 random bytes in hexadecimal: nobody guesses an episode.
pub(crate) fn new_key() -> EpisodeKey {
    let bytes: [u8; 32] = rand::random();
    EpisodeKey(format!("{KEY_PREFIX}{}", starling_protocol::Hash(bytes)))
}

/// How far an episode is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Calls are taken.
    Open,
    /// Its rollout is being stored.
    Ending,
    /// Acknowledged.
    Ended(RolloutId),
    /// It ended without a rollout, and why.
    Aborted(String),
}

impl Stage {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Ending => "ending",
            Self::Ended(_) => "ended",
            Self::Aborted(_) => "aborted",
        }
    }
}

#[derive(Debug)]
pub(crate) struct EpisodeState {
    pub(crate) stage: Stage,
    pub(crate) tree: TimelineTree,
    /// Time of the first end, kept so that an end that is tried again seals the same bytes.
    pub(crate) ended: Option<Timestamp>,
    pub(crate) last_activity: Timestamp,
    pub(crate) reserved: Reserved,
    /// What `previous_response_id` can go on from.
    pub(crate) responses: ResponseStore,
    /// What was answered to calls that may be sent again.
    pub(crate) replies: Replies,
}

#[derive(Debug)]
pub(crate) struct Episode {
    pub(crate) assignment: Assignment,
    pub(crate) key: EpisodeKey,
    pub(crate) agent: String,
    pub(crate) format: Arc<ChatFormat>,
    pub(crate) started: Timestamp,
    pub(crate) calls: AtomicU64,
    pub(crate) in_flight: AtomicU32,
    /// True from the moment at which no call may be recorded any more; calls under way watch it.
    pub(crate) closed: watch::Sender<bool>,
    /// Held by the one end that seals; others wait and get its answer.
    pub(crate) ending: Arc<tokio::sync::Mutex<()>>,
    state: Mutex<EpisodeState>,
}

impl Episode {
    pub(crate) fn new(assignment: Assignment, agent: String, format: Arc<ChatFormat>, now: Timestamp) -> Self {
        Self {
            assignment,
            key: new_key(),
            agent,
            format,
            started: now,
            calls: AtomicU64::new(0),
            in_flight: AtomicU32::new(0),
            closed: watch::Sender::new(false),
            ending: Arc::default(),
            state: Mutex::new(EpisodeState {
                stage: Stage::Open,
                tree: TimelineTree::default(),
                ended: None,
                last_activity: now,
                reserved: Reserved::default(),
                responses: ResponseStore::default(),
                replies: Replies::default(),
            }),
        }
    }

    pub(crate) fn id(&self) -> EpisodeId {
        self.assignment.episode
    }

    /// Held for a few microseconds, never across an await.
    pub(crate) fn state(&self) -> MutexGuard<'_, EpisodeState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Room in the sealed rollout that calls under way may need.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reserved {
    pub(crate) answers: usize,
    pub(crate) tokens: usize,
}

/// A call under way; counts itself and what it reserved out when it goes.
#[derive(Debug)]
pub(crate) struct InFlight {
    episode: Arc<Episode>,
    reserved: Reserved,
}

impl InFlight {
    pub(crate) fn new(episode: Arc<Episode>) -> Self {
        episode.in_flight.fetch_add(1, Ordering::Relaxed);
        Self { episode, reserved: Reserved::default() }
    }

    pub(crate) fn episode(&self) -> &Arc<Episode> {
        &self.episode
    }

    pub(crate) fn reserve(&mut self, answers: usize, tokens: usize) {
        let mut state = self.episode.state();
        state.reserved.answers += answers;
        state.reserved.tokens += tokens;
        self.reserved.answers += answers;
        self.reserved.tokens += tokens;
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.episode.in_flight.fetch_sub(1, Ordering::Relaxed);
        let mut state = self.episode.state();
        state.reserved.answers -= self.reserved.answers;
        state.reserved.tokens -= self.reserved.tokens;
    }
}

/// All episodes, the last few that are over included, so that a late call learns what became of its episode.
#[derive(Debug, Default)]
pub(crate) struct EpisodeTable {
    by_id: HashMap<EpisodeId, Arc<Episode>>,
    by_key: HashMap<String, EpisodeId>,
    over: VecDeque<EpisodeId>,
}

impl EpisodeTable {
    pub(crate) fn insert(&mut self, episode: Arc<Episode>) {
        self.by_key.insert(episode.key.0.clone(), episode.id());
        if let Some(old) = self.by_id.insert(episode.id(), episode) {
            self.by_key.remove(&old.key.0);
        }
    }

    pub(crate) fn get(&self, id: EpisodeId) -> Option<Arc<Episode>> {
        self.by_id.get(&id).cloned()
    }

    pub(crate) fn by_key(&self, key: &str) -> Option<Arc<Episode>> {
        self.by_id.get(self.by_key.get(key)?).cloned()
    }

    pub(crate) fn all(&self) -> Vec<Arc<Episode>> {
        self.by_id.values().cloned().collect()
    }

    /// Notes that an episode is over, and forgets the oldest such beyond `keep`.
    pub(crate) fn over(&mut self, id: EpisodeId, keep: usize) {
        self.over.push_back(id);
        while self.over.len() > keep {
            if let Some(old) = self.over.pop_front().and_then(|id| self.by_id.remove(&id)) {
                self.by_key.remove(&old.key.0);
            }
        }
    }
}
