//! Which peer to ask for which chunk next, when many have them.
//!
//! Every source is asked for a few chunks at once. A source that answers fast is asked for more, since its places get
//! free sooner; one that is slow for fewer. When all chunks are asked for, sources that have nothing to do are asked
//! for what others owe for unusually long, so that a slow or dead one holds nothing up. A source that sends wrong bytes is not asked
//! again, one that fails twice neither.

use crate::ids::{Hash, NodeId};
use crate::time::Timestamp;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// Chunks asked of one source at once, at most: 8 × 1 MiB keep 640 Mbit/s busy over a round trip of 100 ms.
pub const PER_SOURCE_MAX: usize = 8;
/// Chunks asked of one source at once, at the start.
const PER_SOURCE_START: usize = 4;
/// Chunks asked for at once, of all sources: 32 MiB of memory at most.
pub const IN_FLIGHT_MAX: usize = 32;
/// A chunk that took longer than this came over a link that is busy enough: asking for more at once only makes each
/// one later.
const SLOW: Duration = Duration::from_secs(1);
/// What a chunk is expected to take before the first one came.
const TYPICAL_START: Duration = Duration::from_millis(500);
/// A chunk is asked of a second source after twice what one typically takes, and not before this.
const OVERDUE_MIN: Duration = Duration::from_millis(50);
/// Answers missed in a row after which a source is not asked any more.
const FAILURES_MAX: u32 = 2;

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The chunk came and its hash is right.
    Came {
        /// From the request to the last byte.
        after: Duration,
    },
    /// The source does not have it.
    Lacks,
    /// No answer, or no useful one.
    Failed,
    /// Bytes with another hash.
    Wrong,
}

#[derive(Clone, Debug)]
struct Source {
    node: NodeId,
    window: usize,
    in_flight: usize,
    failures: u32,
    dropped: bool,
}

#[derive(Clone, Debug, Default)]
struct Chunk {
    /// Asked and not answered yet, with the time of asking.
    asked: BTreeMap<NodeId, Timestamp>,
    /// Asked in vain.
    tried: BTreeSet<NodeId>,
}

/// A transfer under way.
#[derive(Clone, Debug)]
pub struct Transfer {
    sources: Vec<Source>,
    /// What has not come yet.
    wanted: BTreeMap<Hash, Chunk>,
    /// Of these, what nobody is asked for now.
    queue: VecDeque<Hash>,
    in_flight: usize,
    /// Smoothed time from a request to its chunk.
    typical: Duration,
}

impl Transfer {
    /// Fetches `chunks`, in this order, from `sources`.
    #[must_use]
    pub fn new(chunks: impl IntoIterator<Item = Hash>, sources: impl IntoIterator<Item = NodeId>) -> Self {
        let mut wanted = BTreeMap::new();
        let queue = chunks.into_iter().filter(|c| wanted.insert(*c, Chunk::default()).is_none()).collect();
        let mut seen = BTreeSet::new();
        let sources = sources.into_iter().filter(|n| seen.insert(*n));
        let source = |node| Source { node, window: PER_SOURCE_START, in_flight: 0, failures: 0, dropped: false };
        Self { sources: sources.map(source).collect(), wanted, queue, in_flight: 0, typical: TYPICAL_START }
    }

    /// Whether everything came.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.wanted.is_empty()
    }

    /// Requests that wait for an answer.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// A chunk that has not come.
    #[must_use]
    pub fn a_missing_chunk(&self) -> Option<Hash> {
        self.wanted.keys().next().copied()
    }

    /// The next request to make, if one is due; it counts as made. Nothing is due, nothing in flight and not done means
    /// that no source is left that could have the rest.
    pub fn poll_request(&mut self, now: Timestamp) -> Option<(NodeId, Hash)> {
        if self.in_flight >= IN_FLIGHT_MAX {
            return None;
        }
        let mut free: Vec<usize> = (0..self.sources.len())
            .filter(|i| !self.sources[*i].dropped && self.sources[*i].in_flight < self.sources[*i].window)
            .collect();
        free.sort_by_key(|i| self.sources[*i].in_flight);
        for i in free {
            let node = self.sources[i].node;
            let may = |c: &Hash| self.wanted.get(c).is_some_and(|w| !w.tried.contains(&node));
            let at = self.queue.iter().position(may);
            let chunk = match at.and_then(|at| self.queue.remove(at)) {
                Some(chunk) => chunk,
                // What one other source owes, unless that was asked to be asked as well.
                None if self.queue.is_empty() => {
                    let due = self.overdue_after();
                    let owed = |(_, w): &(&Hash, &Chunk)| {
                        w.asked.len() == 1
                            && !w.tried.contains(&node)
                            && w.asked.iter().all(|(n, at)| *n != node && *at + due <= now)
                    };
                    match self.wanted.iter().find(owed) {
                        Some((chunk, _)) => *chunk,
                        None => continue,
                    }
                }
                None => continue,
            };
            self.wanted.entry(chunk).or_default().asked.insert(node, now);
            self.sources[i].in_flight += 1;
            self.in_flight += 1;
            return Some((node, chunk));
        }
        None
    }

    /// When a request may be due that is not due now, if no answer comes before.
    #[must_use]
    pub fn poll_timeout(&self, now: Timestamp) -> Option<Timestamp> {
        let due = self.overdue_after();
        let once = self.wanted.values().filter(|w| w.asked.len() == 1);
        once.flat_map(|w| w.asked.values()).map(|at| *at + due).filter(|at| *at > now).min()
    }

    fn overdue_after(&self) -> Duration {
        (self.typical * 2).max(OVERDUE_MIN)
    }

    /// Takes the answer to a request; tells whether it brought a chunk that was still wanted.
    pub fn handle(&mut self, node: NodeId, chunk: Hash, outcome: Outcome) -> bool {
        self.in_flight = self.in_flight.saturating_sub(1);
        if let Some(s) = self.sources.iter_mut().find(|s| s.node == node) {
            s.in_flight = s.in_flight.saturating_sub(1);
            match outcome {
                Outcome::Came { after } => {
                    s.failures = 0;
                    self.typical = (self.typical * 7 + after) / 8;
                    s.window = if after < SLOW { s.window + 1 } else { s.window - 1 }.clamp(1, PER_SOURCE_MAX);
                }
                Outcome::Lacks => {}
                Outcome::Failed => {
                    s.failures += 1;
                    s.window = 1;
                    s.dropped |= s.failures >= FAILURES_MAX;
                }
                Outcome::Wrong => s.dropped = true,
            }
        }
        let Some(w) = self.wanted.get_mut(&chunk) else { return false };
        w.asked.remove(&node);
        if matches!(outcome, Outcome::Came { .. }) {
            self.wanted.remove(&chunk);
            return true;
        }
        w.tried.insert(node);
        if w.asked.is_empty() {
            self.queue.push_front(chunk);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn n(i: u8) -> NodeId {
        NodeId([i; 32])
    }
    fn chunks(count: u32) -> Vec<Hash> {
        (0..count).map(|i| Hash::of(&i.to_le_bytes())).collect()
    }
    const FAST: Outcome = Outcome::Came { after: Duration::from_millis(5) };

    const NOW: Timestamp = Timestamp(1_000);
    const LATER: Timestamp = Timestamp(10_000);

    /// Requests that are due at `now`.
    fn due_at(t: &mut Transfer, now: Timestamp) -> Vec<(NodeId, Hash)> {
        std::iter::from_fn(|| t.poll_request(now)).collect()
    }
    fn due(t: &mut Transfer) -> Vec<(NodeId, Hash)> {
        due_at(t, NOW)
    }

    #[test]
    fn work_spreads_over_the_sources_and_stays_within_the_bounds() {
        let mut t = Transfer::new(chunks(100), (1..=4).map(n));
        let first = due(&mut t);
        assert_eq!(first.len(), 16);
        for i in 1..=4 {
            assert_eq!(first.iter().filter(|(node, _)| *node == n(i)).count(), 4);
        }
        let (mut asked, mut requests) = (first, 16);
        while let Some((node, chunk)) = asked.pop() {
            assert!(t.handle(node, chunk, FAST), "{chunk} came twice");
            let more = due(&mut t);
            requests += more.len();
            asked.extend(more);
            assert!(t.in_flight() <= IN_FLIGHT_MAX && asked.len() == t.in_flight());
        }
        assert!(t.is_done());
        assert_eq!(requests, 100, "nothing is asked for twice while all answer");
    }

    #[test]
    fn a_source_that_never_answers_holds_nothing_up() {
        let mut t = Transfer::new(chunks(20), [n(1), n(2)]);
        let mut open = due(&mut t);
        let mut now = NOW;
        loop {
            if let Some(at) = open.iter().position(|(node, _)| *node == n(2)) {
                let (node, chunk) = open.remove(at);
                t.handle(node, chunk, FAST);
            } else if let Some(next) = t.poll_timeout(now) {
                now = next;
            } else {
                break;
            }
            open.extend(due_at(&mut t, now));
        }
        assert!(t.is_done(), "the other source was asked for what the silent one owed");
        assert!(now.since(NOW) < Duration::from_secs(1), "{now:?}");
    }

    #[test]
    fn a_wrong_chunk_ends_with_its_source_and_is_asked_of_another() {
        let mut t = Transfer::new(chunks(1), [n(1), n(2)]);
        let (first, chunk) = t.poll_request(NOW).unwrap();
        assert_eq!(t.poll_request(NOW), None);
        let second = t.poll_request(LATER).unwrap();
        assert_eq!((second.1, second.0 != first), (chunk, true), "it is overdue: the other is asked too");
        assert!(!t.handle(first, chunk, Outcome::Wrong));
        assert_eq!((t.poll_request(LATER), t.poll_timeout(Timestamp(u64::MAX))), (None, None));
        assert!(t.handle(second.0, chunk, FAST));
        assert!(t.is_done());
    }

    #[test]
    fn without_a_source_left_it_is_stuck_and_says_at_which_chunk() {
        let mut t = Transfer::new(chunks(2), [n(1)]);
        for (node, chunk) in due(&mut t) {
            t.handle(node, chunk, Outcome::Lacks);
        }
        assert_eq!((t.poll_request(LATER), t.in_flight(), t.is_done()), (None, 0, false));
        assert!(t.a_missing_chunk().is_some());
        assert_eq!(Transfer::new(chunks(1), []).poll_request(NOW), None);
    }

    #[test]
    fn two_failures_in_a_row_end_with_a_source_and_one_does_not() {
        let mut t = Transfer::new(chunks(30), [n(1), n(2)]);
        let ask = |t: &mut Transfer, node| due(t).into_iter().filter(|(n, _)| *n == node).collect::<Vec<_>>();
        let of_1 = ask(&mut t, n(1));
        t.handle(n(1), of_1[0].1, Outcome::Failed);
        t.handle(n(1), of_1[1].1, FAST);
        t.handle(n(1), of_1[2].1, Outcome::Failed);
        t.handle(n(1), of_1[3].1, FAST);
        assert!(!ask(&mut t, n(1)).is_empty());
        let mut t = Transfer::new(chunks(30), [n(1), n(2)]);
        for (node, chunk) in ask(&mut t, n(1)) {
            t.handle(node, chunk, Outcome::Failed);
        }
        assert!(ask(&mut t, n(1)).is_empty());
    }

    #[test]
    fn equal_chunks_are_fetched_once() {
        let chunk = Hash::of(b"x");
        let mut t = Transfer::new([chunk, chunk], [n(1)]);
        assert_eq!(due(&mut t), [(n(1), chunk)]);
        assert!(t.handle(n(1), chunk, FAST));
        assert!(t.is_done());
    }
}
