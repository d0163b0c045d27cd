//! The events that a report is made from: as many as a page can show at once, however long the run.

use crate::event::Event;
use std::collections::VecDeque;
use std::time::Duration;

/// Events of each of two kinds that are kept from the beginning of a run, and from its end. All together 100,000 of
/// about 100 bytes: a page of 10 MB, which a browser opens in seconds.
const FIRST_MAX: usize = 10_000;
const LAST_MAX: usize = 40_000;

/// Events that were not kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct LeftOut {
    /// How many.
    pub events: u64,
    /// When the first and the last of them happened.
    pub between: Option<(Duration, Duration)>,
}

/// The first and the last of a sequence.
#[derive(Debug, Default)]
struct Ends {
    first: Vec<(u64, Duration, Event)>,
    last: VecDeque<(u64, Duration, Event)>,
}

/// See the module's text. What makes the picture (who lives, leads, is cut off, applies what) has room of its own: the
/// episodes of a crowd do not push it out.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    frame: Ends,
    episodes: Ends,
    taken: u64,
    left_out: LeftOut,
}

impl Kept {
    pub(crate) fn take(&mut self, at: Duration, event: Event) {
        let ends = if is_of_an_episode(&event) { &mut self.episodes } else { &mut self.frame };
        self.taken += 1;
        if ends.first.len() < FIRST_MAX {
            ends.first.push((self.taken, at, event));
            return;
        }
        ends.last.push_back((self.taken, at, event));
        if ends.last.len() > LAST_MAX
            && let Some((_, gone, _)) = ends.last.pop_front()
        {
            self.left_out.events += 1;
            let (from, to) = self.left_out.between.unwrap_or((gone, gone));
            self.left_out.between = Some((from.min(gone), to.max(gone)));
        }
    }

    /// What was kept, in the order in which it happened.
    pub(crate) fn finish(self) -> (Vec<(Duration, Event)>, LeftOut) {
        let all = [self.frame, self.episodes].into_iter().flat_map(|e| e.first.into_iter().chain(e.last));
        let mut all: Vec<_> = all.collect();
        all.sort_unstable_by_key(|(taken, _, _)| *taken);
        (all.into_iter().map(|(_, at, event)| (at, event)).collect(), self.left_out)
    }
}

/// Of these there are many for each episode.
fn is_of_an_episode(event: &Event) -> bool {
    match event {
        Event::Stored { .. }
        | Event::Synced { .. }
        | Event::Deleted { .. }
        | Event::MarkedConsumed { .. }
        | Event::Unmarked { .. }
        | Event::Granted { .. }
        | Event::Released { .. }
        | Event::Sealed { .. }
        | Event::Acknowledged { .. }
        | Event::Gauge { .. }
        | Event::Waits { .. } => true,
        Event::Started { .. }
        | Event::Crashed { .. }
        | Event::Fault { .. }
        | Event::Healed
        | Event::Leads { .. }
        | Event::Applied { .. }
        | Event::Entered { .. }
        | Event::Rotted { .. }
        | Event::Served { .. } => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::NodeIx;

    #[test]
    fn a_long_run_keeps_its_beginning_its_end_and_its_frame() {
        let mut kept = Kept::default();
        let n = 100_000;
        kept.take(Duration::ZERO, Event::Healed);
        for i in 1..=n {
            kept.take(Duration::from_secs(i), Event::Synced { node: NodeIx(0) });
            if i == n / 2 {
                kept.take(Duration::from_secs(i), Event::Started { node: NodeIx(1) });
            }
        }
        let (events, left_out) = kept.finish();
        assert_eq!(events.len(), FIRST_MAX + LAST_MAX + 2);
        assert_eq!(left_out.events, n - (FIRST_MAX + LAST_MAX) as u64);
        let gone = (Duration::from_secs(FIRST_MAX as u64 + 1), Duration::from_secs(n - LAST_MAX as u64));
        assert_eq!(left_out.between, Some(gone));
        assert!(events.is_sorted_by_key(|(at, _)| *at));
        assert!(events.iter().any(|(_, e)| matches!(e, Event::Started { .. })), "in the middle, and kept");
    }
}
