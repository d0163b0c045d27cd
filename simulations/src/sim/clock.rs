//! A node's wall clock: it may be wrong, and go wrong.

use starling_core::leader::Clock;
use starling_protocol::Timestamp;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::time::Instant;

/// What every right clock shows at the start of a run, milliseconds since the epoch.
const EPOCH_MS: u64 = 1_700_000_000_000;

/// A clock that can be set and made to run at another rate. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct SimClock(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    /// When the rate was last changed, and what the clock showed then.
    since: Instant,
    shown_ms: f64,
    rate: f64,
}

impl SimClock {
    /// A right clock; `start` is the start of the run.
    pub(crate) fn new(start: Instant) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
        let shown_ms = EPOCH_MS as f64;
        Self(Arc::new(Mutex::new(State { since: start, shown_ms, rate: 1.0 })))
    }

    fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// What it shows.
    pub(crate) fn now(&self) -> Timestamp {
        self.with(|s| {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a time after 1970")]
            Timestamp(s.now_ms().max(0.0) as u64)
        })
    }
    /// Sets it forwards or back.
    pub(crate) fn jump(&self, by_ms: i64) {
        #[expect(clippy::cast_precision_loss, reason = "at most 10^9")]
        self.with(|s| s.shown_ms += by_ms as f64);
    }
    /// Makes it run at `rate`.
    pub(crate) fn set_rate(&self, rate: f64) {
        self.with(|s| {
            s.shown_ms = s.now_ms();
            s.since = Instant::now();
            s.rate = rate;
        });
    }
    /// As the node's logic takes it.
    pub(crate) fn shared(&self) -> Clock {
        let clock = self.clone();
        Arc::new(move || clock.now())
    }
}

impl State {
    fn now_ms(&self) -> f64 {
        self.shown_ms + self.since.elapsed().as_secs_f64() * 1000.0 * self.rate
    }
}
