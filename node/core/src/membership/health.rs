//! How long to wait before calling a node dead.
//!
//! A node that is itself slow must not accuse others: Lifeguard (Dadgar, Phillips, Currey, "Lifeguard: Local Health
//! Awareness for More Accurate Failure Detection", arXiv:1707.00788). Its three parts are here: the local health
//! multiplier (§IV-A), a suspicion time that starts long and shrinks as others confirm (§IV-B), and that a suspect is
//! told of it first (§IV-C, in `Swim::news_for`).

use std::time::Duration;

/// Largest multiplier less one, as in the paper (§V).
const SCORE_MAX: u32 = 8;
/// The longest suspicion is this many times the shortest. The paper takes 6; three are enough where a healthy mesh
/// confirms within a few periods, and a small mesh that nobody can confirm in waits less.
const PATIENCE: u32 = 3;
/// Confirmations after which the suspicion time is the shortest.
const CONFIRMATIONS: u8 = 2;
/// Accusers that count: the first and those who confirm.
const ACCUSERS_MAX: usize = CONFIRMATIONS as usize + 1;
/// From this many live nodes on a suspicion can be confirmed in time.
const CONFIRMED_FROM: usize = 6;

/// The local health multiplier.
#[derive(Debug, Default)]
pub(super) struct Health(u32);

impl Health {
    pub(super) fn worse(&mut self, by: u32) {
        self.0 = self.0.saturating_add(by).min(SCORE_MAX);
    }
    pub(super) fn better(&mut self) {
        self.0 = self.0.saturating_sub(1);
    }
    /// Periods and time limits of own probes are multiplied by this.
    pub(super) fn multiplier(&self) -> u32 {
        self.0 + 1
    }
}

/// A suspect's time to object. Half of a large mesh may be suspected at once, so it is small: 40 bytes. Times are
/// milliseconds since this node's start, accusers are places in its directory.
#[derive(Clone, Debug)]
pub(super) struct Suspicion {
    started_ms: u64,
    /// When it is over.
    pub(super) deadline_ms: u64,
    shortest_ms: u32,
    accusers: [u32; ACCUSERS_MAX],
    accused: u8,
    needed: u8,
}

impl Suspicion {
    /// `base` is the shortest time for up to ten nodes; it grows with the logarithm of `live`, as the time does that
    /// a rumour takes to reach everyone and an objection to come back (SWIM §4.2). The first accuser may be nobody
    /// that this node knows.
    pub(super) fn new(now_ms: u64, base: Duration, live: usize, accuser: Option<u32>) -> Self {
        let needed = if live >= CONFIRMED_FROM { CONFIRMATIONS } else { 0 };
        let shortest_ms = u32::try_from(base.mul_f64(size_factor(live)).as_millis()).unwrap_or(u32::MAX);
        let patience = if needed == 0 { 1 } else { PATIENCE };
        let deadline_ms = now_ms + u64::from(shortest_ms) * u64::from(patience);
        let mut accusers = [0; ACCUSERS_MAX];
        accusers[0] = accuser.unwrap_or_default();
        let accused = u8::from(accuser.is_some());
        Self { started_ms: now_ms, deadline_ms, shortest_ms, accusers, accused, needed }
    }
    /// Who suspects it, the first accuser first; no more than count.
    pub(super) fn accusers(&self) -> &[u32] {
        &self.accusers[..usize::from(self.accused)]
    }
    /// When it may be over at the earliest.
    pub(super) fn earliest_ms(&self) -> u64 {
        self.started_ms + u64::from(self.shortest_ms)
    }
    /// Whether another accuser would change nothing.
    pub(super) fn is_convicted(&self) -> bool {
        self.accused > self.needed
    }
    /// Returns whether the accusation is independent of those before and shortens the time.
    pub(super) fn confirm(&mut self, accuser: u32) -> bool {
        if self.is_convicted() || self.accusers().contains(&accuser) {
            return false;
        }
        self.accusers[usize::from(self.accused)] = accuser;
        self.accused += 1;
        let confirmed = f64::from(self.accused); // one accuser is no confirmation: log 1 = 0
        let share = confirmed.ln() / (f64::from(self.needed) + 1.0).ln().max(f64::MIN_POSITIVE);
        let spare_ms = f64::from(self.shortest_ms) * f64::from(PATIENCE - 1);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "some seconds")]
        let left_ms = (spare_ms * (1.0 - share.min(1.0))) as u64;
        self.deadline_ms = self.deadline_ms.min(self.earliest_ms() + left_ms);
        true
    }
}

/// Times that must grow with the mesh grow by this: log10 of the nodes, at least one.
pub(super) fn size_factor(live: usize) -> f64 {
    (live as f64).log10().max(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_suspect_has_more_time_while_one_node_alone_accuses_it() {
        let (now, base) = (5_000, Duration::from_secs(2));
        let mut suspicion = Suspicion::new(now, base, 1000, Some(1));
        assert_eq!(suspicion.deadline_ms - now, 6_000 * u64::from(PATIENCE));
        assert!(!suspicion.confirm(1), "the same accuser again");
        assert!(suspicion.confirm(2));
        let one = suspicion.deadline_ms - now;
        assert!(6_000 < one && one < 6_000 * u64::from(PATIENCE));
        assert!(suspicion.confirm(3));
        assert_eq!(suspicion.deadline_ms, suspicion.earliest_ms());
        assert_eq!(suspicion.deadline_ms - now, 6_000);
        assert!(!suspicion.confirm(4), "enough");
        assert_eq!(suspicion.accusers(), [1, 2, 3]);
        assert_eq!(Suspicion::new(now, base, 4, Some(1)).deadline_ms - now, 2_000, "nobody could confirm");
    }

    #[test]
    fn a_suspect_of_an_unknown_accuser_has_no_less_time() {
        let mut suspicion = Suspicion::new(0, Duration::from_secs(2), 1000, None);
        let alone = suspicion.deadline_ms;
        assert!(suspicion.confirm(1));
        assert_eq!(suspicion.deadline_ms, alone, "the first that counts confirms nothing");
    }

    #[test]
    fn health_stays_in_its_bounds() {
        let mut health = Health::default();
        health.better();
        assert_eq!(health.multiplier(), 1);
        health.worse(u32::MAX);
        assert_eq!(health.multiplier(), 9);
    }
}
