//! How long a server may be silent before another one is asked as well.

use std::time::Duration;

/// The deadline behind a frame is never below this. What a healthy server does between two tokens of a stream: a chunk of
/// other prompts (8,192 tokens at 5,000 tokens/s: 1.6 s) or the exchange of its weights (1 ms per million parameters).
/// A dead one is known to SWIM after 2 to 3 s, so a lower floor would gain little and cost receipts.
const GAP_FLOOR: Duration = Duration::from_secs(2);
/// The deadline of the first frame is never below this: a dial, the queue, and the prompt.
const FIRST_FLOOR: Duration = Duration::from_secs(5);
/// No deadline is above this, however slow the server was: an answer that waits a minute is worth a second request.
const CEILING: Duration = Duration::from_secs(60);

/// Mean and mean deviation of a time, smoothed as TCP does it for its retransmission timer (RFC 6298 §2): the deadline,
/// mean + 4 deviations, follows a server that is slow and one that is uneven, and a hedge stays rare on both.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Estimate {
    /// Seconds; `None` before the first sample.
    mean: Option<f64>,
    deviation: f64,
}

impl Estimate {
    fn sample(&mut self, took: Duration) {
        let took = took.as_secs_f64();
        match &mut self.mean {
            None => {
                self.mean = Some(took);
                self.deviation = took / 2.0;
            }
            Some(mean) => {
                self.deviation += ((took - *mean).abs() - self.deviation) / 4.0;
                *mean += (took - *mean) / 8.0;
            }
        }
    }

    fn deadline(&self, floor: Duration) -> Duration {
        let seconds = self.mean.unwrap_or_default() + 4.0 * self.deviation;
        Duration::try_from_secs_f64(seconds).unwrap_or(CEILING).clamp(floor, CEILING)
    }
}

/// What this node measured of one server.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Pace {
    first: Estimate,
    gap: Estimate,
}

impl Pace {
    /// A frame came after so long; `first` when it was the first one of its stream. A server that was given up counts
    /// with the time for which it was silent, so one that was only slow is waited for longer the next time.
    pub(super) fn sample(&mut self, first: bool, took: Duration) {
        if first { self.first.sample(took) } else { self.gap.sample(took) }
    }

    /// How long it may be silent now.
    pub(super) fn deadline(&self, first: bool) -> Duration {
        if first { self.first.deadline(FIRST_FLOOR) } else { self.gap.deadline(GAP_FLOOR) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn a_fast_server_has_the_floor_and_a_slow_one_its_own_deadline() {
        let mut fast = Pace::default();
        let mut slow = Pace::default();
        assert_eq!((fast.deadline(true), fast.deadline(false)), (FIRST_FLOOR, GAP_FLOOR));
        for i in 0..50 {
            fast.sample(false, ms(30));
            slow.sample(false, ms(if i % 2 == 0 { 500 } else { 2500 }));
        }
        assert_eq!(fast.deadline(false), GAP_FLOOR);
        // Mean 1.5 s, mean deviation 1 s.
        let deadline = slow.deadline(false).as_secs_f64();
        assert!((5.0..6.0).contains(&deadline), "{deadline}");
        assert_eq!(slow.deadline(true), FIRST_FLOOR, "the first frame is measured for itself");
    }

    #[test]
    fn a_stall_lifts_the_deadline_and_is_forgotten_again() {
        let mut pace = Pace::default();
        (0..50).for_each(|_| pace.sample(false, ms(30)));
        pace.sample(false, ms(3000));
        assert!(pace.deadline(false) > ms(3000), "the same stall again would not be hedged");
        (0..50).for_each(|_| pace.sample(false, ms(30)));
        assert_eq!(pace.deadline(false), GAP_FLOOR);
        pace.sample(false, Duration::from_secs(100_000));
        assert_eq!(pace.deadline(false), CEILING);
    }
}
