//! Which member a group should take in next: one change at a time, never below quorum.

use std::collections::BTreeSet;

use starling_protocol::NodeId;

/// A learner may lag this many entries behind and still become a voter.
pub(super) const LAG_ENTRIES_MAX: u64 = 64;

/// What the decision is made from.
#[derive(Clone, Debug, Default)]
pub(super) struct Situation {
    pub(super) voters: BTreeSet<NodeId>,
    pub(super) learners: BTreeSet<NodeId>,
    pub(super) live: BTreeSet<NodeId>,
    pub(super) live_servers: BTreeSet<NodeId>,
    pub(super) live_witnesses: BTreeSet<NodeId>,
    /// Voters that are known to be witnesses, alive or not.
    pub(super) witness_voters: usize,
    /// Learners whose log is nearly the leader's.
    pub(super) caught_up: BTreeSet<NodeId>,
    pub(super) voters_max: usize,
}

/// One change of membership.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// Send it the log.
    AddLearner(NodeId),
    /// Let it vote.
    Promote(NodeId),
    // Demoting voters that are gone for good belongs here too; it needs a grace time and a record of who was seen
    // when, and is not done yet.
}

fn majority(n: usize) -> usize {
    n / 2 + 1
}

/// How many voters a group of `servers` should have. An even number tolerates no more failures than the odd one
/// below it, so it is only right for two servers without a witness: there both must hold what is committed.
fn voters_wanted(servers: usize, witnesses: usize, voters_max: usize) -> usize {
    let filled = match servers {
        0 | 1 => 1,
        2 if witnesses == 0 => 2,
        2 | 3 => 3,
        n if n % 2 == 1 => n,
        n if witnesses > 0 => n + 1,
        n => n - 1,
    };
    filled.min(voters_max.max(1))
}

/// The next change, if one is due.
pub(super) fn plan(s: &Situation) -> Option<Change> {
    let is_member = |n: &&NodeId| s.voters.contains(n) || s.learners.contains(n);
    let servers = s.voters.len() - s.witness_voters.min(s.voters.len())
        + s.live_servers.iter().filter(|n| !s.voters.contains(n)).count();
    let witnesses = s.witness_voters + s.live_witnesses.iter().filter(|n| !s.voters.contains(n)).count();
    let wanted = voters_wanted(servers, witnesses, s.voters_max);
    let candidates = || s.live_servers.iter().filter(|n| !s.voters.contains(n));
    // A witness fills a seat that no server can take.
    let witness_seats = wanted.saturating_sub(servers + s.witness_voters);
    let witness_candidates =
        || s.live_witnesses.iter().filter(|n| !s.voters.contains(n)).take(if witness_seats > 0 { 1 } else { 0 });

    if let Some(newcomer) = s.live_servers.iter().chain(witness_candidates()).find(|n| !is_member(n)) {
        return Some(Change::AddLearner(*newcomer));
    }
    if s.voters.len() >= wanted {
        return None;
    }
    let live_voters = s.voters.intersection(&s.live).count();
    // The change must commit under the old configuration and the next one under the new.
    let safe = live_voters >= majority(s.voters.len()) && live_voters + 1 >= majority(s.voters.len() + 1);
    let next = candidates().chain(witness_candidates()).find(|n| s.caught_up.contains(n))?;
    safe.then_some(Change::Promote(*next))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn n(i: u8) -> NodeId {
        NodeId([i; 32])
    }
    fn set(ids: impl IntoIterator<Item = u8>) -> BTreeSet<NodeId> {
        ids.into_iter().map(n).collect()
    }

    fn situation(voters: &[u8], learners: &[u8], servers: &[u8]) -> Situation {
        let to = |ids: &[u8]| set(ids.iter().copied());
        Situation {
            voters: to(voters),
            learners: to(learners),
            live: to(servers),
            live_servers: to(servers),
            caught_up: to(learners),
            voters_max: 5,
            ..Situation::default()
        }
    }

    #[test]
    fn a_new_server_learns_first_and_votes_then() {
        assert_eq!(plan(&situation(&[1], &[], &[1, 2])), Some(Change::AddLearner(n(2))));
        assert_eq!(plan(&situation(&[1], &[2], &[1, 2])), Some(Change::Promote(n(2))));
        assert_eq!(plan(&situation(&[1, 2], &[], &[1, 2])), None);
    }

    #[test]
    fn four_servers_make_three_voters_and_five_make_five() {
        assert_eq!(plan(&situation(&[1, 2, 3], &[4], &[1, 2, 3, 4])), None);
        assert_eq!(plan(&situation(&[1, 2, 3], &[4, 5], &[1, 2, 3, 4, 5])), Some(Change::Promote(n(4))));
        assert_eq!(plan(&situation(&[1, 2, 3, 4], &[5], &[1, 2, 3, 4, 5])), Some(Change::Promote(n(5))));
        assert_eq!(plan(&situation(&[1, 2, 3, 4, 5], &[6], &[1, 2, 3, 4, 5, 6])), None);
    }

    #[test]
    fn a_learner_that_lags_does_not_vote_yet() {
        let mut s = situation(&[1, 2], &[3], &[1, 2, 3]);
        s.caught_up.clear();
        assert_eq!(plan(&s), None);
    }

    #[test]
    fn no_voter_is_added_while_the_quorum_is_thin() {
        // Two of three voters live: with a fourth, three of four would be needed, and exactly three live.
        let mut s = situation(&[1, 2, 3], &[4, 5], &[1, 2, 4, 5]);
        assert_eq!(plan(&s), Some(Change::Promote(n(4))));
        // One of two live: no change can commit.
        s = situation(&[1, 2], &[3], &[1, 3]);
        assert_eq!(plan(&s), None);
    }

    #[test]
    fn a_witness_fills_up_to_an_odd_number_and_no_further() {
        let with = |voters: &[u8], learners: &[u8], servers: &[u8], witness_voters| {
            let mut s = situation(voters, learners, servers);
            s.live_witnesses = set([9]);
            s.live.insert(n(9));
            s.witness_voters = witness_voters;
            plan(&s)
        };
        assert_eq!(with(&[1, 2], &[], &[1, 2], 0), Some(Change::AddLearner(n(9))));
        assert_eq!(with(&[1, 2], &[9], &[1, 2], 0), Some(Change::Promote(n(9))));
        assert_eq!(with(&[1, 2, 9], &[], &[1, 2], 1), None);
        assert_eq!(with(&[1], &[], &[1], 0), None);
        assert_eq!(with(&[1, 2, 3], &[], &[1, 2, 3], 0), None);
    }
}
