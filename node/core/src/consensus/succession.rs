//! Whom leadership goes to: a clearly better device, or anyone fit when the leader leaves.
//!
//! Sans-IO: [`Reigns`] remembers who led and how long that lasted, [`heir`] decides. Every member keeps its own
//! [`Reigns`], so that a new leader knows whom not to ask.

use std::collections::BTreeMap;
use std::time::Duration;

use starling_protocol::{NodeId, PolicyVersion};

/// So many times as fast as the leader's must a device be. A change costs an election, a load of the weights and moments,
/// and a pipeline that starts empty, some seconds in all; and two short measurements of one device differ by some tens
/// of percent when it also serves. At 1.5 the gain is beyond both.
const CLEARLY_BETTER: f64 = 1.5;
/// A reign that ends after fewer steps was a short one.
const SHORT_REIGN_STEPS: u64 = 3;
/// For so long a node is not asked again after a short reign: about what a restart takes, so that one crash costs little.
const BARRED_MIN: Duration = Duration::from_secs(60);
/// The time doubles with each short reign in a row, up to this.
const BARRED_MAX: Duration = Duration::from_secs(3600);

/// Who led, as one member saw it.
#[derive(Clone, Debug, Default)]
pub(super) struct Reigns {
    /// The last known leader, and the version at which it began to lead.
    now: Option<(NodeId, PolicyVersion)>,
    /// Until when nodes are not asked, and how many short reigns in a row each has had. Nodes that led only: few.
    short: BTreeMap<NodeId, (Duration, u32)>,
}

impl Reigns {
    /// Notes who leads at `now` (on any clock that does not go back) while `version` is the newest committed one. A
    /// leader that is lost and elected again has reigned on.
    pub(super) fn note(&mut self, now: Duration, leader: Option<NodeId>, version: PolicyVersion) {
        let Some(leader) = leader else { return };
        match self.now {
            Some((current, _)) if current == leader => return,
            Some((former, since)) if version.steps().saturating_sub(since.steps()) < SHORT_REIGN_STEPS => {
                let times = self.short.get(&former).map_or(0, |(_, times)| *times);
                let time = BARRED_MIN.saturating_mul(1 << times.min(16)).min(BARRED_MAX);
                self.short.insert(former, (now + time, times + 1));
            }
            Some((former, _)) => drop(self.short.remove(&former)),
            None => {}
        }
        self.now = Some((leader, version));
    }

    /// Whether `node` lost the leadership so soon that it is not asked again yet.
    pub(super) fn is_barred(&self, now: Duration, node: NodeId) -> bool {
        self.short.get(&node).is_some_and(|(until, _)| now < *until)
    }
}

/// A voter that may be asked to lead: it lives, its device is large enough, its log is complete, and it does not leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Heir {
    pub(super) node: NodeId,
    /// Training tokens a second, once measured.
    pub(super) speed: Option<u32>,
    /// It has been alive without a break, and its disk takes more.
    pub(super) steady: bool,
    /// See [`Reigns::is_barred`].
    pub(super) barred: bool,
}

/// Whether a device of `speed` is so much better than one of `leader` that leadership should move to it.
pub(super) fn clearly_better(speed: Option<u32>, leader: Option<u32>) -> bool {
    speed.zip(leader).is_some_and(|(speed, leader)| f64::from(speed) >= CLEARLY_BETTER * f64::from(leader))
}

/// Whom a leader with a device of `own` speed should ask to lead; `leaves` when it must not go on for long.
///
/// A leader that leaves takes the best there is. One that stays asks only a steady voter that is clearly better and did not
/// lose the leadership a short while ago.
pub(super) fn heir(own: Option<u32>, leaves: bool, heirs: &[Heir]) -> Option<NodeId> {
    let wanted = |h: &&Heir| leaves || h.steady && !h.barred && clearly_better(h.speed, own);
    let worth = |h: &&Heir| (h.steady, !h.barred, h.speed, std::cmp::Reverse(h.node));
    heirs.iter().filter(wanted).max_by_key(worth).map(|h| h.node)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn n(i: u8) -> NodeId {
        NodeId([i; 32])
    }
    fn of(i: u8, speed: u32) -> Heir {
        Heir { node: n(i), speed: Some(speed), steady: true, barred: false }
    }
    fn seconds(s: u64) -> Duration {
        Duration::from_secs(s)
    }

    #[test]
    fn leadership_moves_to_a_clearly_better_device_and_to_the_best_of_them() {
        assert_eq!(heir(Some(100), false, &[of(2, 149)]), None, "not clearly better");
        assert_eq!(heir(Some(100), false, &[of(2, 150)]), Some(n(2)));
        assert_eq!(heir(Some(100), false, &[of(2, 300), of(3, 400), of(4, 400)]), Some(n(3)), "ties to the lowest id");
    }

    #[test]
    fn what_was_not_measured_is_not_better_and_a_leader_that_did_not_measure_itself_stays() {
        assert_eq!(heir(Some(1), false, &[Heir { speed: None, ..of(2, 0) }]), None);
        assert_eq!(heir(None, false, &[of(2, 1000)]), None);
    }

    #[test]
    fn one_that_comes_and_goes_or_lost_the_leadership_a_moment_ago_is_not_asked() {
        assert_eq!(heir(Some(100), false, &[Heir { steady: false, ..of(2, 900) }]), None);
        assert_eq!(heir(Some(100), false, &[Heir { barred: true, ..of(2, 900) }]), None);
    }

    #[test]
    fn a_leader_that_leaves_takes_the_best_there_is() {
        let slow = of(2, 10);
        let unmeasured = Heir { speed: None, ..of(3, 0) };
        let barred = Heir { barred: true, ..of(4, 900) };
        let shaky = Heir { steady: false, ..of(5, 900) };
        assert_eq!(heir(Some(100), true, &[slow, unmeasured, barred, shaky]), Some(n(2)));
        assert_eq!(heir(Some(100), true, &[unmeasured, barred, shaky]), Some(n(3)));
        assert_eq!(heir(Some(100), true, &[barred, shaky]), Some(n(4)));
        assert_eq!(heir(Some(100), true, &[shaky]), Some(n(5)));
        assert_eq!(heir(Some(100), true, &[]), None);
    }

    #[test]
    fn short_reigns_bar_a_node_for_longer_each_time_and_a_long_one_clears_it() {
        let mut reigns = Reigns::default();
        let v = PolicyVersion;
        reigns.note(seconds(0), Some(n(1)), v(0));
        reigns.note(seconds(100), Some(n(2)), v(10));
        assert!(!reigns.is_barred(seconds(100), n(1)), "ten steps are no short reign");
        // Lost for a moment and back: one reign.
        reigns.note(seconds(101), None, v(10));
        reigns.note(seconds(102), Some(n(2)), v(10));
        reigns.note(seconds(103), Some(n(1)), v(12));
        assert!(reigns.is_barred(seconds(103), n(2)) && reigns.is_barred(seconds(162), n(2)));
        assert!(!reigns.is_barred(seconds(163), n(2)));
        reigns.note(seconds(200), Some(n(2)), v(20));
        reigns.note(seconds(201), Some(n(1)), v(20));
        assert!(reigns.is_barred(seconds(320), n(2)) && !reigns.is_barred(seconds(321), n(2)), "twice as long");
        reigns.note(seconds(400), Some(n(2)), v(30));
        reigns.note(seconds(500), Some(n(1)), v(40));
        reigns.note(seconds(600), Some(n(2)), v(50));
        reigns.note(seconds(601), Some(n(1)), v(50));
        assert!(!reigns.is_barred(seconds(661), n(2)), "the long reign cleared the two short ones");
    }

    /// Whatever is measured, leadership comes to rest: moved along by the rule alone, it never comes back to a node.
    #[test]
    fn leadership_never_goes_in_circles() {
        let all = [of(1, 100), of(2, 160), of(3, 155), of(4, 260), of(5, 250)];
        let (mut leader, mut seen) = (all[0], vec![n(1)]);
        while let Some(next) = {
            let others: Vec<_> = all.iter().copied().filter(|h| h.node != leader.node).collect();
            heir(leader.speed, false, &others)
        } {
            assert!(!seen.contains(&next), "{next} leads again");
            seen.push(next);
            leader = all[usize::from(next.0[0]) - 1];
        }
        assert_eq!(leader.node, n(4));
    }
}
