//! How long to wait before calling a node dead.
//!
//! A node that is itself slow must not accuse others: Lifeguard (Dadgar, Phillips, Currey, "Lifeguard: Local Health
//! Awareness for More Accurate Failure Detection", arXiv:1707.00788). Its three parts are here: the local health
//! multiplier (§IV-A), a suspicion time that starts long and shrinks as others confirm (§IV-B), and that a suspect is
//! told of it first (§IV-C, in `Swim::news_for`).

use std::time::Duration;

use starling_protocol::NodeId;
use tokio::time::Instant;

/// Largest multiplier less one, as in the paper (§V).
const SCORE_MAX: u32 = 8;
/// The longest suspicion is this many times the shortest. The paper takes 6; three are enough where a healthy mesh
/// confirms within a few periods, and a small mesh that nobody can confirm in waits less.
const PATIENCE: u32 = 3;
/// Confirmations after which the suspicion time is the shortest.
const CONFIRMATIONS: usize = 2;
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

/// A suspect's time to object.
#[derive(Debug)]
pub(super) struct Suspicion {
    started: Instant,
    shortest: Duration,
    /// Who suspects it, the first accuser first; no more than count.
    pub(super) accusers: Vec<NodeId>,
    needed: usize,
    /// When it is over.
    pub(super) deadline: Instant,
}

impl Suspicion {
    /// `base` is the shortest time for up to ten nodes; it grows with the logarithm of `live`, as the time does that
    /// a rumour takes to reach everyone and an objection to come back (SWIM §4.2).
    pub(super) fn new(now: Instant, base: Duration, live: usize, accuser: NodeId) -> Self {
        let needed = if live >= CONFIRMED_FROM { CONFIRMATIONS } else { 0 };
        let shortest = base.mul_f64(size_factor(live));
        let longest = if needed == 0 { shortest } else { shortest * PATIENCE };
        Self { started: now, shortest, accusers: vec![accuser], needed, deadline: now + longest }
    }
    /// Returns whether the accusation is independent of those before and shortens the time.
    pub(super) fn confirm(&mut self, accuser: NodeId) -> bool {
        let counts = self.accusers.len() <= self.needed && !self.accusers.contains(&accuser);
        if counts {
            self.accusers.push(accuser);
            let confirmed = self.accusers.len() as f64; // one accuser is no confirmation: log 1 = 0
            let share = confirmed.ln() / (self.needed as f64 + 1.0).ln();
            let longest = self.shortest * PATIENCE;
            self.deadline = self.started + longest - (longest - self.shortest).mul_f64(share.min(1.0));
        }
        counts
    }
}

/// Times that must grow with the mesh grow by this: log10 of the nodes, at least one.
pub(super) fn size_factor(live: usize) -> f64 {
    (live as f64).log10().max(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_suspect_has_more_time_while_one_node_alone_accuses_it() {
        let (now, base) = (Instant::now(), Duration::from_secs(2));
        let id = |n| NodeId([n; 32]);
        let mut suspicion = Suspicion::new(now, base, 1000, id(1));
        assert_eq!(suspicion.deadline - now, base * 3 * PATIENCE);
        assert!(!suspicion.confirm(id(1)), "the same accuser again");
        assert!(suspicion.confirm(id(2)));
        let one = suspicion.deadline - now;
        assert!(base * 3 < one && one < base * 3 * PATIENCE);
        assert!(suspicion.confirm(id(3)));
        assert_eq!(suspicion.deadline - now, base * 3);
        assert!(!suspicion.confirm(id(4)), "enough");
        assert_eq!(Suspicion::new(now, base, 4, id(1)).deadline - now, base, "nobody could confirm");
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
