//! Keeps watch over a group: who leads, why nobody does, and when a witness must help out.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use openraft::{Instant as _, ServerState};
use starling_protocol::record::Fitness;
use starling_protocol::{ModelName, NodeId, Term};
use tokio::time::{Instant, sleep};

use super::group::Group;
use super::groups::Groups;
use super::lines::SURVEY_EVERY;
use super::view::LeaderView;
use crate::runtime::blocking;
use crate::watch::lock;

/// Why a node does not lead whose device cannot hold the trainer.
const TOO_SMALL: &str = "its device has too little memory for weights, gradients and optimizer moments";
/// Why a witness never leads.
pub(super) const WITNESS: &str = "it is a witness";
/// How often a disk that failed is tried again; it must take writes once before this node stands again.
pub(super) const PROBE_EVERY: Duration = Duration::from_secs(5);

/// A leader's survey says for so long that it has no quorum: it asks again sooner.
const POWERLESS_FOR: Duration = Duration::from_secs(SURVEY_EVERY.as_secs() * 3);

impl Groups {
    /// Why an entry of this node is not committed, as far as it can see: for whoever waits.
    #[must_use]
    pub fn why_nothing_passes(&self, model: &ModelName) -> String {
        self.group(model)
            .map_or_else(|| format!("this node is not in the group of {model}"), |g| self.why_no_quorum(&g))
    }

    pub(super) fn why_no_quorum(&self, group: &Group) -> String {
        let metrics = group.metrics();
        let voters: BTreeSet<_> = metrics.membership_config.voter_ids().collect();
        if voters.is_empty() {
            return format!("waiting for the leader of {} to bring its log", group.model);
        }
        let (live, forgetful) = self.answering(group);
        let lost = |n: &NodeId| if forgetful.contains(n) { " (lost its store)" } else { "" };
        let missing: Vec<_> = voters.difference(&live).map(|n| format!("{}{}", n.short(), lost(n))).collect();
        let (alive, needed) = (voters.len() - missing.len(), voters.len() / 2 + 1);
        let missing = if missing.is_empty() { String::new() } else { format!("; missing: {}", missing.join(", ")) };
        format!("group of {}: {alive} of {} voters are alive, {needed} must answer{missing}", group.model, voters.len())
    }

    /// Keeps [`LeaderView`] up to date for as long as the group runs.
    pub(super) async fn watch_over(self: Arc<Self>, group: Arc<Group>) {
        let mut metrics = group.raft.metrics();
        let tick = self.config.heartbeat.min(self.config.election_timeout_min / 4);
        let (mut nudged, mut turn) = (Instant::now(), 0_usize);
        // The newest term whose leader was heard, and when this node last asked for votes after it.
        let mut led = Term(0);
        let mut stood = Instant::now();
        loop {
            let now = Instant::now();
            // `is_self` must fall when the lease ends, because others stand right after.
            let lease_ends = group.leadership.get().quorum_acked_at.map(|at| at + self.config.election_timeout_max);
            let stands = self.stands_at(&group, led, stood);
            let next = lease_ends.into_iter().chain(stands).filter(|at| *at > now).min();
            let next = next.map_or(tick, |at| tick.min(at - now));
            let alive = tokio::select! {
                biased;
                () = group.closed.cancelled() => break,
                changed = metrics.changed() => changed.is_ok(),
                () = sleep(next) => true,
            };
            if group.closed.is_cancelled() {
                break; // another run may have taken over
            }
            let now = Instant::now();
            self.judge_fitness(&group);
            let mut view = self.look(&group, now);
            let m = group.metrics();
            if !alive || m.running_state.is_err() {
                let stopped = m.running_state.err().map_or_else(|| "it was shut down".to_owned(), |e| e.to_string());
                let why = self.store.failing().unwrap_or(stopped);
                view = LeaderView { wait: Some(format!("the group of {} stopped: {why}", group.model)), ..view };
                view.is_self = false;
                view.leader = None;
                group.publish(view);
                return self.revive(&group).await;
            }
            if view.leader.is_some() {
                *lock(&group.leaderless_since) = now;
                led = view.term;
            }
            let leaderless = now - *lock(&group.leaderless_since);
            if view.leader.is_none() && view.wait.is_none() && leaderless >= self.config.patience() {
                let outlook = lock(&group.outlook).clone().map_or_else(String::new, |o| format!("; {o}"));
                view.wait = Some(self.why_no_quorum(&group) + &outlook);
            }
            lock(&group.reigns).note(self.started.elapsed(), view.leader, group.state.get().version);
            group.publish(view);
            if self.stands_at(&group, led, stood).is_some_and(|at| at <= now) {
                stood = now;
                tracing::debug!(model = %group.model, term = led.0, "no leader is heard: this node asks for votes");
                let _stopped = group.raft.trigger().elect(true).await;
            }
            if now - nudged < self.config.election_timeout_max {
                continue;
            }
            nudged = now;
            if m.state == ServerState::Leader && lock(&group.unfit).is_some() {
                turn = turn.wrapping_add(1);
                self.hand_over(&group, turn).await;
            } else if lock(&group.unfit).is_some() || self.is_draining() {
                self.help_out(&group, leaderless).await;
            }
        }
        if let Err(error) = group.raft.shutdown().await {
            tracing::debug!(model = %group.model, %error, "group did not stop in order");
        }
    }

    /// Says whether this node may lead, and stops it from standing when it may not.
    fn judge_fitness(&self, group: &Group) {
        let unfit = if self.config.witness {
            Some(WITNESS.to_owned())
        } else if self.fitness(&group.model) == Fitness::TooSmall {
            Some(TOO_SMALL.to_owned())
        } else {
            self.store.failing().map(|why| format!("its disk does not take writes: {why}"))
        };
        let before = std::mem::replace(&mut *lock(&group.unfit), unfit.clone());
        // A node that drains goes on with what it leads until it is handed over, and does not stand again.
        let stands = unfit.is_none() && !self.is_draining();
        if group.stands.swap(stands, Ordering::Relaxed) != stands {
            group.raft.runtime_config().elect(stands);
        }
        if before != unfit {
            match unfit {
                Some(why) => tracing::warn!(model = %group.model, why, "this node does not stand for election"),
                None => tracing::info!(model = %group.model, "this node stands for election again"),
            }
        }
    }

    /// When this node asks for votes because it hears no leader, if it does: as soon as the lease of the one of term
    /// `led` is over, but one member after the other, the best device first, so that they do not split the votes.
    /// `stood` is when it last asked.
    ///
    /// It asks by a pre-vote, which a quorum that still hears a leader refuses, and which binds nobody. openraft's own
    /// random timeout begins with the end of the lease too and is longer than all turns: it is for what goes wrong here.
    fn stands_at(&self, group: &Group, led: Term, stood: Instant) -> Option<Instant> {
        let m = group.metrics();
        // In a newer term somebody stands already.
        if m.state != ServerState::Follower || m.current_term != led.0 || !group.stands.load(Ordering::Relaxed) {
            return None;
        }
        let order = self.standing_order(group);
        let turn = u32::try_from(order.iter().position(|n| *n == self.node)?).ok()?;
        let turns = u32::try_from(order.len()).ok()?;
        // The last heartbeat did not reach all at the same time.
        let first = (*lock(&group.heard))? + self.config.election_timeout_max + self.config.heartbeat / 4;
        // Half a heartbeat is enough for a round on links for which the heartbeat was chosen.
        let pause = self.config.heartbeat / 2;
        let rounds = (0..).map(|round| first + pause * (turn + round * turns));
        let over = first + self.config.election_timeout_min;
        rounds.take_while(|at| *at < over).find(|at| *at > stood)
    }

    /// Waits until the disk takes writes again, and starts the group over.
    async fn revive(self: &Arc<Self>, group: &Group) {
        loop {
            tokio::select! {
                biased;
                () = group.closed.cancelled() => return,
                () = sleep(PROBE_EVERY) => {}
            }
            if self.store.failing().is_some() {
                continue; // probed by `probe_disk`
            }
            match self.reopen(group).await {
                Ok(()) => return,
                Err(error) => tracing::warn!(model = %group.model, %error, "the group does not start over yet"),
            }
        }
    }

    /// Tries the disk again after a write has failed, for as long as the node runs.
    pub(super) async fn probe_disk(self: Arc<Self>) {
        loop {
            tokio::select! {
                biased;
                () = self.shutdown.cancelled() => return,
                () = sleep(PROBE_EVERY) => {}
            }
            if self.store.failing().is_some() {
                let store = self.store.clone();
                match blocking(move || store.probe()).await {
                    Ok(Ok(())) => tracing::info!("the store takes writes again"),
                    Ok(Err(error)) => tracing::debug!(%error, "the store still does not take writes"),
                    Err(_stopped) => return,
                }
            }
        }
    }

    /// What can be said now, without memory.
    fn look(&self, group: &Group, now: Instant) -> LeaderView {
        let m = group.metrics();
        let lease = self.config.election_timeout_max;
        let term = Term(m.current_term);
        if m.state == ServerState::Leader && m.current_leader == Some(self.node) {
            // A sole voter is its own quorum; openraft notes that only when it has something to send.
            let alone = m.membership_config.voter_ids().eq([self.node]);
            let age = if alone { Some(Duration::ZERO) } else { m.last_quorum_acked.map(|at| at.elapsed()) };
            let unfit = lock(&group.unfit).clone();
            let is_self = unfit.is_none() && age.is_some_and(|a| a < lease);
            // One that may not lead does not show itself as the leader: nobody should wait for its steps.
            let leader = is_self.then_some(self.node);
            let wait =
                unfit.map(|why| format!("this node has the leadership of {} and must not use it: {why}", group.model));
            return LeaderView { leader, term, is_self, quorum_acked_at: age.and_then(|a| now.checked_sub(a)), wait };
        }
        let heard = lock(&group.heard).is_some_and(|at| now - at < lease);
        let powerless =
            lock(&group.powerless).filter(|(_, at)| now.duration_since(*at) < POWERLESS_FOR).map(|(n, _)| n);
        let leader = m.current_leader.filter(|l| heard && *l != self.node && powerless != Some(*l));
        LeaderView { leader, term, is_self: false, quorum_acked_at: None, wait: None }
    }

    /// Gives leadership to the live server with the newest log; the next call tries again if it did not take it.
    async fn hand_over(&self, group: &Group, turn: usize) {
        let m = group.metrics();
        let heirs = m.replication.iter().flatten().filter(|(n, _)| {
            **n != self.node && self.may_lead(**n, &group.model) && m.membership_config.voter_ids().any(|v| v == **n)
        });
        // All that are complete are equally good; in turns, so that one that refuses is not the only one asked.
        let mut heirs: Vec<_> = heirs.map(|(n, matched)| (*matched, *n)).collect();
        heirs.sort_unstable();
        let newest = heirs.last().map(|(matched, _)| *matched);
        heirs.retain(|(matched, _)| Some(*matched) == newest);
        if let Some((_, to)) = heirs.get(turn % heirs.len().max(1)) {
            let why = lock(&group.unfit).clone().unwrap_or_default();
            tracing::info!(model = %group.model, to = %to.short(), why, "this node hands leadership over");
            let _stopped = group.raft.trigger().transfer_leader(*to).await;
        }
    }

    /// A voter that must not lead but holds the newest log must have the leadership for a moment: no other can be
    /// elected while it refuses its vote to older logs. It hands over at once, and does nothing else with it.
    async fn help_out(&self, group: &Group, leaderless: Duration) {
        let m = group.metrics();
        let live: BTreeSet<_> = self.membership.live().into_iter().collect();
        let voters: BTreeSet<_> = m.membership_config.voter_ids().collect();
        let quorum = voters.intersection(&live).count() > voters.len() / 2;
        if voters.contains(&self.node) && quorum && leaderless >= 2 * self.config.patience() {
            tracing::info!(model = %group.model, "no other can be elected: this node stands, to hand over");
            let _stopped = group.raft.trigger().elect(false).await;
        }
    }
}
