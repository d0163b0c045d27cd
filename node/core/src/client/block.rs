//! Episodes leased ahead of what runs: what a client goes on with while a leader is out of reach.

use starling_protocol::assignment::Assignment;
use starling_protocol::{EpisodeId, ModelName, Timestamp};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// A block should last for so long at the client's pace: a leader's death is known after 3 s, another leads after 3 s more,
/// and a cut that heals is mostly over by then. The leader gives less when there is no slack.
const COVER: Duration = Duration::from_secs(10);
/// A block of which nothing was taken for so long goes back: its client has stopped.
const IDLE: Duration = Duration::from_secs(15);
/// Most episodes of a block: a task's line of 1 KiB each makes 64 KiB, and a leader gives at most a quarter of its quota.
const BLOCK_MAX: usize = 64;
/// A claim that the block can serve waits so long for its leader: on any link it answers sooner, if it is there.
pub(super) const PATIENCE: Duration = Duration::from_millis(500);
/// For so long after a failed call a leader is not asked for what the block has.
const RETRY: Duration = Duration::from_secs(2);

/// The blocks of one client, by model.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    waiting: BTreeMap<ModelName, VecDeque<Assignment>>,
    /// When episodes were begun, within [`COVER`], newest last.
    begun: VecDeque<Timestamp>,
    /// When episodes were last asked for.
    wanted: Timestamp,
    /// Leases that an answer which nobody waited for any more declared void.
    revoked: Vec<EpisodeId>,
    /// Leaders that did not answer, and when.
    silent: BTreeMap<ModelName, Timestamp>,
    /// Models whose leader has nothing to give: why, and when to ask again.
    held_back: BTreeMap<ModelName, (String, Timestamp)>,
}

impl Blocks {
    /// Takes up to `want` episodes of `models` (all when empty) whose leases are `sure`, oldest first; others are dropped.
    pub(super) fn take(
        &mut self,
        now: Timestamp,
        models: &[ModelName],
        want: usize,
        sure: impl Fn(EpisodeId) -> bool,
    ) -> Vec<Assignment> {
        if want > 0 {
            self.wanted = now;
        }
        let mut taken = Vec::new();
        for (model, waiting) in &mut self.waiting {
            waiting.retain(|a| sure(a.episode));
            if models.is_empty() || models.contains(model) {
                let n = waiting.len().min(want - taken.len());
                taken.extend(waiting.drain(..n));
            }
        }
        self.waiting.retain(|_, waiting| !waiting.is_empty());
        taken
    }

    /// Notes that `n` episodes begin.
    pub(super) fn note_begun(&mut self, now: Timestamp, n: usize) {
        self.begun.extend(std::iter::repeat_n(now, n.min(BLOCK_MAX)));
        while self.begun.len() > BLOCK_MAX || self.begun.front().is_some_and(|at| now.since(*at) > COVER) {
            self.begun.pop_front();
        }
    }

    /// How many episodes the blocks should have: what began within the time that they are to cover.
    pub(super) fn wanted_size(&self) -> usize {
        self.begun.len()
    }

    /// Lays episodes aside.
    pub(super) fn add(&mut self, assignments: impl IntoIterator<Item = Assignment>) {
        for a in assignments {
            self.waiting.entry(a.model.clone()).or_default().push_back(a);
        }
    }

    /// Takes in an answer that nobody waited for any more.
    pub(super) fn add_late(&mut self, assignments: Vec<Assignment>, revoked: Vec<EpisodeId>) {
        self.add(assignments);
        self.revoked.extend(revoked);
    }

    /// Leases that became void since the last time, for whoever runs their episodes.
    pub(super) fn take_revoked(&mut self) -> Vec<EpisodeId> {
        std::mem::take(&mut self.revoked)
    }

    /// Drops an episode whose lease is void; `false` when it is not here.
    pub(super) fn remove(&mut self, model: &ModelName, episode: EpisodeId) -> bool {
        let Some(waiting) = self.waiting.get_mut(model) else { return false };
        let before = waiting.len();
        waiting.retain(|a| a.episode != episode);
        waiting.len() < before
    }

    /// What is laid aside of each model, to be renewed.
    pub(super) fn held(&self) -> impl Iterator<Item = &Assignment> {
        self.waiting.values().flatten()
    }

    /// Takes everything out, to be given back, when the client `leaves` or has asked for nothing for a while.
    pub(super) fn give_back(&mut self, now: Timestamp, leaves: bool) -> BTreeMap<ModelName, VecDeque<Assignment>> {
        let idle = now.since(self.wanted) > IDLE;
        if leaves || idle { std::mem::take(&mut self.waiting) } else { BTreeMap::new() }
    }

    /// Notes whether the model's leader answered.
    pub(super) fn note_answer(&mut self, now: Timestamp, model: &ModelName, answered: bool) {
        if answered {
            self.silent.remove(model);
        } else {
            self.silent.insert(model.clone(), now);
        }
    }

    /// Notes why the model's leader gave less than was asked for, and when to ask it again; `None` when it gave all.
    pub(super) fn note_held_back(&mut self, model: &ModelName, why: Option<(String, Timestamp)>) {
        match why {
            Some(why) => self.held_back.insert(model.clone(), why),
            None => self.held_back.remove(model),
        };
    }

    /// Why asking the model's leader again now would bring nothing, by its own word.
    pub(super) fn held_back(&self, now: Timestamp, model: &ModelName) -> Option<&str> {
        self.held_back.get(model).filter(|(_, until)| now < *until).map(|(why, _)| why.as_str())
    }

    /// Whether the model's leader was silent a moment ago.
    pub(super) fn is_silent(&self, now: Timestamp, model: &ModelName) -> bool {
        self.silent.get(model).is_some_and(|at| now.since(*at) < RETRY)
    }
}
