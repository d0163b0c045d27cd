//! The alarm on the mismatch between sampler and trainer.
//!
//! The mean of `k − 1 − ln k`, `k = π/μ`, over a step's trained tokens says how far the policy that is trained is from
//! the one that sampled. It is about 0 on fresh data of the same program, some 1e-3 between two programs or versions; a
//! mean that goes on rising comes before a collapse (prime-rl's documentation calls it the first sign).

use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Steps on each side of the comparison.
const WINDOW: usize = 5;
/// A rise counts once the mean is above this share of the limit: noise around 0 doubles all the time.
const FLOOR: f64 = 0.1;

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MismatchAlarm {
    /// The step's mismatch KL is above the job's limit.
    AboveLimit,
    /// Its mean over the last five steps is above twice that of the five before, and above a tenth of the limit.
    Rising,
}

/// Watches one job, step by step.
#[derive(Clone, Debug)]
pub struct MismatchWatch {
    limit: f64,
    recent: VecDeque<f64>,
}

impl MismatchWatch {
    /// With the job's limit, nats a token.
    #[must_use]
    pub fn new(limit: f64) -> Self {
        Self { limit, recent: VecDeque::with_capacity(2 * WINDOW) }
    }

    /// Takes the next step's mismatch KL.
    pub fn observe(&mut self, mismatch_kl: f64) -> Option<MismatchAlarm> {
        if self.recent.len() == 2 * WINDOW {
            self.recent.pop_front();
        }
        self.recent.push_back(mismatch_kl);
        if mismatch_kl.is_nan() || mismatch_kl > self.limit {
            return Some(MismatchAlarm::AboveLimit);
        }
        if self.recent.len() < 2 * WINDOW {
            return None;
        }
        let mean = |from: usize| self.recent.iter().skip(from).take(WINDOW).sum::<f64>() / WINDOW as f64;
        let (before, now) = (mean(0), mean(WINDOW));
        (now > 2.0 * before && now > FLOOR * self.limit).then_some(MismatchAlarm::Rising)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_above_the_limit_and_a_steady_rise_raise_it_and_noise_does_not() {
        let mut watch = MismatchWatch::new(0.05);
        assert_eq!(watch.observe(0.06), Some(MismatchAlarm::AboveLimit));
        assert_eq!(watch.observe(f64::NAN), Some(MismatchAlarm::AboveLimit));
        let mut watch = MismatchWatch::new(0.05);
        let rise: Vec<_> = (0..14).map(|i| watch.observe(0.001 * 1.3f64.powi(i))).collect();
        assert_eq!(rise[..9], [None; 9], "two windows are not full yet");
        assert_eq!(rise[13], Some(MismatchAlarm::Rising), "3.7 times as high as five steps before, at 0.03");
        let mut watch = MismatchWatch::new(0.05);
        assert!((0..40).all(|i| watch.observe(if i % 20 < 10 { 1e-6 } else { 1e-3 }).is_none()));
    }
}
