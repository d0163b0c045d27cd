//! Which change of membership a group needs next: one at a time, and none that makes its quorum thinner.
//!
//! Sans-IO: [`Sightings`] turns the members' coming and going into who is steadily there and who is gone, [`plan`]
//! decides. A node that comes and goes faster than both times is neither, and causes no change.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use starling_protocol::NodeId;

/// A learner may lag this many entries behind and still become a voter.
pub(super) const LAG_ENTRIES_MAX: u64 = 64;

/// Since when each node is seen as it is seen now. Kept by one leader for one term: a new one waits the full times
/// again, which errs on the side of no change.
#[derive(Clone, Debug, Default)]
pub(super) struct Sightings {
    /// Whether the node is alive, and since when.
    seen: BTreeMap<NodeId, (bool, Duration)>,
}

impl Sightings {
    /// Notes at `now` (on any clock that does not go back) who of `known` is alive. Others are forgotten.
    pub(super) fn note(&mut self, now: Duration, known: &BTreeSet<NodeId>, live: &BTreeSet<NodeId>) {
        self.seen.retain(|node, _| known.contains(node));
        for node in known {
            let alive = live.contains(node);
            let entry = self.seen.entry(*node).or_insert((alive, now));
            if entry.0 != alive {
                *entry = (alive, now);
            }
        }
    }
    fn which(&self, now: Duration, alive: bool, for_at_least: Duration) -> BTreeSet<NodeId> {
        let lasting = |(a, since): &(bool, Duration)| *a == alive && now.saturating_sub(*since) >= for_at_least;
        self.seen.iter().filter(|(_, s)| lasting(s)).map(|(n, _)| *n).collect()
    }
    /// Alive without a break for `time`.
    pub(super) fn steady(&self, now: Duration, time: Duration) -> BTreeSet<NodeId> {
        self.which(now, true, time)
    }
    /// Dead without a break for `time`.
    pub(super) fn gone(&self, now: Duration, time: Duration) -> BTreeSet<NodeId> {
        self.which(now, false, time)
    }
}

/// What the decision is made from.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Situation {
    /// The node that decides; it keeps its vote.
    pub(super) leader: NodeId,
    pub(super) voters: BTreeSet<NodeId>,
    pub(super) learners: BTreeSet<NodeId>,
    /// Nodes that answer now.
    pub(super) live: BTreeSet<NodeId>,
    /// Nodes that have answered long enough to be worth a change.
    pub(super) steady: BTreeSet<NodeId>,
    /// Members that have been silent for the grace time.
    pub(super) gone: BTreeSet<NodeId>,
    /// Nodes known as servers; a node is either a server or a witness here.
    pub(super) servers: BTreeSet<NodeId>,
    /// Nodes known as witnesses.
    pub(super) witnesses: BTreeSet<NodeId>,
    /// Learners whose log is nearly the leader's.
    pub(super) caught_up: BTreeSet<NodeId>,
    /// Members that live with another store than the one that has their seat. Not in `live`: they answer nothing in it.
    pub(super) forgetful: BTreeSet<NodeId>,
    /// Nodes that are about to leave: their seats go to others while they still answer.
    pub(super) draining: BTreeSet<NodeId>,
    /// Nodes whose device is so much better than the leader's that leadership would move to them if they voted.
    pub(super) better: BTreeSet<NodeId>,
    /// Training tokens a second, of nodes that measured it.
    pub(super) speeds: BTreeMap<NodeId, u32>,
    pub(super) voters_max: usize,
}

/// One change of membership.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// Send it the log.
    AddLearner(NodeId),
    /// Let it vote.
    Promote(NodeId),
    /// It votes no more and stays as a learner: a seat that another fills better.
    Demote(NodeId),
    /// It is gone: no vote, no log.
    Remove(NodeId),
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
    let max = voters_max.max(1);
    // A limit that is even would only cost: the odd number below it bears as many failures.
    filled.min(if max > 2 && max.is_multiple_of(2) { max - 1 } else { max })
}

impl Situation {
    /// How many voters may still die before nothing commits; below 0 nothing commits now.
    pub(super) fn margin(&self) -> isize {
        let live = self.voters.intersection(&self.live).count();
        live.cast_signed() - majority(self.voters.len()).cast_signed()
    }

    /// [`Situation::margin`] once the draining nodes have left without a change of membership.
    #[cfg(test)]
    pub(super) fn lasting_margin(&self) -> isize {
        let live = self.voters.intersection(&self.live).filter(|n| !self.draining.contains(*n)).count();
        live.cast_signed() - majority(self.voters.len()).cast_signed()
    }

    /// What the group looks like after a change that went well.
    fn after(mut self, change: Change) -> Self {
        match change {
            Change::AddLearner(n) => {
                self.learners.insert(n);
                self.caught_up.insert(n);
            }
            Change::Promote(n) => {
                self.learners.remove(&n);
                self.voters.insert(n);
            }
            Change::Demote(n) => {
                self.voters.remove(&n);
                self.learners.insert(n);
                self.caught_up.insert(n);
            }
            Change::Remove(n) => {
                self.voters.remove(&n);
                self.learners.remove(&n);
            }
        }
        self
    }

    /// Whether `node` goes on voting once every change that is due has been made.
    pub(super) fn keeps_seat(mut self, node: NodeId) -> bool {
        // Each node is added, promoted and demoted at most once; the bound is for a plan that would go in circles.
        for _ in 0..3 * (self.servers.len() + self.witnesses.len()) {
            let Some(change) = plan(&self) else { break };
            self = self.after(change);
        }
        self.voters.contains(&node)
    }
}

/// The next change, if one is due.
///
/// Every change leaves [`Situation::margin`] as large as it was or larger: a live node is promoted, a dead one leaves,
/// or any one leaves an even number. The exception is a draining node that leaves an odd number when another leaves
/// with it: the margin without those two does not shrink, and the quorum that is there now stays one.
pub(super) fn plan(s: &Situation) -> Option<Change> {
    if s.margin() < 0 {
        return None; // nothing would commit
    }
    let is_member = |n: &NodeId| s.voters.contains(n) || s.learners.contains(n);
    let is_gone = |n: &NodeId| s.gone.contains(n) || s.forgetful.contains(n);
    let gone = s.voters.iter().filter(|n| is_gone(n)).copied();
    let draining = s.voters.intersection(&s.draining).filter(|n| !is_gone(n)).copied();
    let leaving: Vec<_> = gone.chain(draining).collect();
    let staying: BTreeSet<_> = s.voters.iter().filter(|n| !leaving.contains(n)).copied().collect();
    let staying_witnesses: Vec<_> = staying.intersection(&s.witnesses).copied().collect();
    let servers_staying = staying.len() - staying_witnesses.len();
    let may_vote = |n: &&NodeId| {
        s.steady.contains(*n) && s.live.contains(*n) && !s.voters.contains(*n) && !s.draining.contains(*n)
    };
    let new_servers: Vec<_> = s.servers.iter().filter(may_vote).copied().collect();
    let new_witnesses: Vec<_> = s.witnesses.iter().filter(may_vote).copied().collect();
    let servers = servers_staying + new_servers.len();
    let witnesses = staying_witnesses.len() + new_witnesses.len();
    let wanted = voters_wanted(servers, witnesses, s.voters_max);
    // A witness fills a seat that no server can take.
    let witness_seats = wanted.saturating_sub(servers + staying_witnesses.len());
    let new_witnesses = || new_witnesses.iter().take(usize::from(witness_seats > 0));

    // Every server gets the log: it serves the model, and can replace a voter at once.
    if let Some(newcomer) = new_servers.iter().chain(new_witnesses()).find(|n| !is_member(n)) {
        return Some(Change::AddLearner(*newcomer));
    }
    let ready = |n: &&NodeId| s.learners.contains(*n) && s.caught_up.contains(*n);
    let server_seats = wanted.min(servers).saturating_sub(servers_staying);
    // The better device first: it may come to lead.
    let mut new_servers = new_servers;
    new_servers.sort_by_key(|n| std::cmp::Reverse((s.better.contains(n), s.speeds.get(n).copied().unwrap_or(0))));
    let ready_servers: Vec<_> = new_servers.iter().filter(ready).take(server_seats).collect();
    let ready_witnesses: Vec<_> = new_witnesses().filter(ready).collect();
    // Voters come in pairs, so that their number is even for no longer than it takes: two that are ready, or one for
    // one that leaves its seat, or the one that makes an even number odd.
    let witness_leaves = s.voters.len() >= wanted && !staying_witnesses.is_empty() && !ready_servers.is_empty();
    let leaves_a_seat = !leaving.is_empty() || witness_leaves;
    let in_pairs = ready_servers.len() + ready_witnesses.len() >= 2 || s.voters.len().is_multiple_of(2);
    let may_promote = in_pairs || leaves_a_seat || wanted == 2;
    if may_promote && let Some(next) = ready_servers.into_iter().chain(ready_witnesses).next() {
        return Some(Change::Promote(*next));
    }
    // One that lost its store never comes back to its seat, and comes in again as a newcomer.
    if let Some(forgetful) = s.voters.union(&s.learners).find(|n| s.forgetful.contains(*n)) {
        return Some(Change::Remove(*forgetful));
    }
    // One that is gone keeps its seat while nobody takes it and its leaving would leave an even number: that would
    // bear no more failures, and its return helps. A draining leader hands over first.
    let even = s.voters.len().is_multiple_of(2);
    let others = || leaving.iter().filter(|n| **n != s.leader);
    if even || leaving.len() >= 2 {
        if let Some(gone) = others().find(|n| s.gone.contains(*n)) {
            return Some(Change::Remove(*gone));
        }
        // It answers still, and an odd number loses a vote with it.
        if let Some(draining) = others().next()
            && (even || s.margin() > 0)
        {
            return Some(Change::Demote(*draining));
        }
    }
    // Leadership moves to voters only: a device that deserves it takes a seat, and the slowest gives one up below.
    let has_better = s.voters.iter().any(|n| s.better.contains(n));
    let someone_else = staying.iter().any(|n| *n != s.leader);
    if !even
        && !has_better
        && someone_else
        && staying.len() >= wanted
        && let Some(better) = new_servers.iter().filter(ready).find(|n| s.better.contains(*n))
    {
        return Some(Change::Promote(*better));
    }
    // Too many, and an even number: one may leave without loss, a witness before a server, the slowest server first.
    let surplus = staying.len() > wanted && even;
    let mut staying_servers: Vec<_> = staying.iter().rev().filter(|n| s.servers.contains(*n)).collect();
    staying_servers.sort_by_key(|n| s.speeds.get(*n).copied().unwrap_or(0));
    let by_worth = staying_witnesses.iter().chain(staying_servers);
    if surplus && let Some(out) = by_worth.copied().find(|n| *n != s.leader && !s.better.contains(n)) {
        return Some(Change::Demote(out));
    }
    s.learners.intersection(&s.gone).next().map(|n| Change::Remove(*n))
}

#[cfg(test)]
#[path = "autopilot_tests.rs"]
mod tests;
