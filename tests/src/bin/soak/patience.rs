//! Time that counts: what a process spent waiting for a processor is the machine's fault and not the mesh's.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

/// However little a machine gives, a wait ends after this many times its limit.
const WALL_LIMITS: u32 = 10;

/// Nanoseconds that each thread waited in a run queue so far.
type Waited = BTreeMap<u32, u64>;

/// Looks now and then how much of the time since the last look processes waited for a processor.
pub(crate) struct Meter {
    at: Instant,
    waited: Waited,
}

impl Meter {
    pub(crate) fn new(pids: &[u32]) -> Self {
        Self { at: Instant::now(), waited: waited(pids) }
    }

    /// Time since the last look, and the share of it that was waited for; see [`starved`].
    pub(crate) fn look(&mut self, pids: &[u32]) -> (Duration, f64) {
        let (now, waited) = (Instant::now(), waited(pids));
        let passed = now - self.at;
        let share = starved(&self.waited, &waited, passed);
        (self.at, self.waited) = (now, waited);
        (passed, share)
    }
}

/// A deadline in time that counts.
pub(crate) struct Patience {
    limit: Duration,
    begun: Instant,
    counted: Duration,
    meter: Meter,
}

impl Patience {
    /// Over the processes that `pids` are now; they may change.
    pub(crate) fn new(limit: Duration, pids: &[u32]) -> Self {
        Self { limit, begun: Instant::now(), counted: Duration::ZERO, meter: Meter::new(pids) }
    }

    /// Looks at the clock; whether it is all over.
    pub(crate) fn is_over(&mut self, pids: &[u32]) -> bool {
        let (passed, starved) = self.meter.look(pids);
        self.counted += passed.mul_f64(1.0 - starved);
        self.counted > self.limit || self.begun.elapsed() > self.limit * WALL_LIMITS
    }

    /// Since the start, by the clock on the wall.
    pub(crate) fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }

    /// What counted of it.
    pub(crate) fn counted(&self) -> Duration {
        self.counted
    }
}

/// The share of `passed` that the most unlucky thread waited for a processor: the mesh is as slow as its slowest part.
fn starved(before: &Waited, now: &Waited, passed: Duration) -> f64 {
    let of_thread = |(thread, ns): (&u32, &u64)| Some(Duration::from_nanos(ns.saturating_sub(*before.get(thread)?)));
    let longest = now.iter().filter_map(of_thread).max().unwrap_or_default();
    if passed.is_zero() { 0.0 } else { (longest.as_secs_f64() / passed.as_secs_f64()).min(1.0) }
}

/// From the second number of `/proc/<pid>/task/<thread>/schedstat`; threads come and go.
fn waited(pids: &[u32]) -> Waited {
    let mut all = Waited::new();
    for pid in pids {
        let tasks = std::fs::read_dir(Path::new("/proc").join(pid.to_string()).join("task"));
        for task in tasks.into_iter().flatten().flatten() {
            let thread: Option<u32> = task.file_name().to_str().and_then(|name| name.parse().ok());
            let stat = std::fs::read_to_string(task.path().join("schedstat")).ok();
            let ns: Option<u64> = stat.and_then(|s| s.split_whitespace().nth(1)?.parse().ok());
            all.extend(thread.zip(ns));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_unlucky_thread_tells_how_much_counts() {
        let second = 1_000_000_000;
        let before = Waited::from([(1, 0), (2, 5 * second)]);
        let now = Waited::from([(1, second), (2, 8 * second), (3, 9 * second)]);
        let share = |passed| starved(&before, &now, Duration::from_secs(passed));
        assert!((share(4) - 0.75).abs() < 1e-9, "thread 2 waited 3 of 4 s, and thread 3 is new: {}", share(4));
        assert!((share(2) - 1.0).abs() < 1e-9, "never more than all");
        assert!(share(0).abs() < 1e-9);
    }

    #[test]
    fn this_process_is_read() {
        assert!(!waited(&[std::process::id()]).is_empty());
        assert!(waited(&[u32::MAX]).is_empty(), "nobody's");
    }

    #[test]
    fn a_limit_ends() {
        let mut patience = Patience::new(Duration::from_millis(1), &[]);
        std::thread::sleep(Duration::from_millis(5));
        assert!(patience.is_over(&[]));
        assert!(patience.counted() >= Duration::from_millis(5) && patience.elapsed() >= patience.counted());
    }
}
