//! Carries out what the autopilot plans, while this node leads.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use openraft::ChangeMembers;
use starling_protocol::record::Role;
use starling_protocol::{ModelName, NodeId, StoreId};
use tokio::time::{Instant, sleep, timeout};

use super::autopilot::{Change, LAG_ENTRIES_MAX, Sightings, Situation, plan};
use super::group::Group;
use super::groups::Groups;
use crate::watch::lock;

impl Groups {
    /// While this node leads: keeps the group's membership what it should be, one change at a time.
    pub(super) async fn pilot(self: Arc<Self>, group: Arc<Group>) {
        loop {
            tokio::select! {
                biased;
                () = group.closed.cancelled() => return,
                () = sleep(self.config.autopilot_every) => {}
            }
            if !group.leadership.get().is_self {
                *lock(&group.sightings) = Sightings::default();
                continue;
            }
            if let Err(reason) = finish_change(&group, self.config.create_timeout).await {
                tracing::warn!(model = %group.model, reason, "a change that a former leader began is not finished");
                continue;
            }
            let situation = self.situation(&group);
            let Some(change) = situation.and_then(|s| plan(&s)) else { continue };
            let limit = self.config.create_timeout;
            let done = tokio::select! {
                biased;
                () = group.closed.cancelled() => return,
                done = timeout(limit, self.carry_out(&group, change)) => done,
            };
            match done {
                Ok(Ok(())) => tracing::info!(model = %group.model, ?change, "membership changed"),
                Ok(Err(reason)) => tracing::warn!(model = %group.model, ?change, reason, "membership not changed"),
                Err(_elapsed) => tracing::warn!(model = %group.model, ?change, "membership change takes long"),
            }
        }
    }

    /// `None` while another change is under way.
    fn situation(&self, group: &Group) -> Option<Situation> {
        let (m, now) = (group.metrics(), self.started.elapsed());
        let mut s = self.picture(group, self.node);
        let known: BTreeSet<_> = s.voters.iter().chain(&s.learners).chain(&s.live).copied().collect();
        {
            let mut sightings = lock(&group.sightings);
            sightings.note(now, &known, &s.live);
            s.steady = sightings.steady(now, self.config.add_after);
            s.gone = sightings.gone(now, self.config.remove_after);
        }
        if m.membership_config.membership().get_joint_config().len() != 1
            || m.membership_config != m.committed_membership_config
        {
            return None;
        }
        let last = m.last_log_index.unwrap_or_default();
        let near = |matched: &u64| matched.saturating_add(LAG_ENTRIES_MAX) >= last;
        let caught_up = m.replication.iter().flatten();
        let caught_up = caught_up.filter(|(_, id)| id.as_ref().is_some_and(|id| near(&id.index)));
        s.caught_up = caught_up.map(|(n, _)| *n).collect();
        s.better = self.better_than_self(group, &known);
        Some(s)
    }

    /// Live members, and others that could become one, whose word counts; and members that live with another store than the one that has their seat: those have
    /// forgotten what they promised, and answer nothing in it.
    pub(super) fn answering(&self, group: &Group) -> (BTreeSet<NodeId>, BTreeSet<NodeId>) {
        let m = group.metrics();
        let membership = m.membership_config.membership();
        let forgot = |n: &NodeId| {
            let seat = membership.get_node(n).map(|seat| seat.store);
            let now = self.membership.of_record(*n, |r| r.store).filter(|s| *s != StoreId::default());
            *n != self.node && seat.zip(now).is_some_and(|(seat, now)| seat != now)
        };
        // Thousands of clients may live beside them.
        let members = membership.nodes().map(|(n, _)| *n).filter(|n| self.membership.is_live(*n));
        members.chain(self.membership.live_holders()).partition(|n| !forgot(n))
    }

    /// The group as this node sees it, led by `leader`: who lives is steady, and no learner lags.
    fn picture(&self, group: &Group, leader: NodeId) -> Situation {
        let m = group.metrics();
        let membership = m.membership_config.membership();
        let voters: BTreeSet<_> = membership.voter_ids().collect();
        let learners: BTreeSet<_> = membership.learner_ids().collect();
        let (live, forgetful) = self.answering(group);
        let known: BTreeSet<_> = voters.iter().chain(&learners).chain(&live).copied().collect();
        // Without a record, or with neither role (its operator changed it), a member counts as a server, which votes
        // and is missed like one; it takes a record with the role to be taken in.
        let role = |n: &NodeId, role| self.membership.of_record(*n, |r| r.has(role)) == Some(true);
        let is_member = |n: &NodeId| voters.contains(n) || learners.contains(n);
        let witness = |n: &&NodeId| role(n, Role::Witness) && !role(n, Role::Server);
        let server = |n: &&NodeId| role(n, Role::Server) || is_member(n) && !witness(n);
        let speed = |n: &NodeId| self.fitness_at(*n, &group.model).tokens_per_s().map(|s| (*n, s));
        Situation {
            leader,
            steady: live.clone(),
            gone: BTreeSet::new(),
            forgetful,
            caught_up: learners.clone(),
            draining: known.iter().filter(|n| self.drains(**n)).copied().collect(),
            better: BTreeSet::new(),
            speeds: known.iter().filter_map(speed).collect(),
            servers: known.iter().filter(server).copied().collect(),
            witnesses: known.iter().filter(witness).copied().collect(),
            voters_max: self.config.voters_max,
            voters,
            learners,
            live,
        }
    }

    /// Why this node, which leaves, must not stop yet for the sake of its vote in `model`'s group.
    pub(crate) fn why_seated(&self, model: &ModelName) -> Option<String> {
        let group = self.group(model)?;
        let leader = group.leadership.get().leader.filter(|l| *l != self.node);
        let s = self.picture(&group, self.node);
        if !s.voters.contains(&self.node) {
            return None;
        }
        let others = s.voters.iter().filter(|n| **n != self.node && s.live.contains(*n));
        let (alive, of) = (others.clone().count(), s.voters.len());
        let next = others.clone().find(|n| !s.draining.contains(*n));
        let leader = leader.or(next.copied()).unwrap_or(self.node);
        if !(Situation { leader, ..s }).keeps_seat(self.node) {
            return Some("this node votes until another has taken its seat".to_owned());
        }
        let needed = of / 2 + 1;
        let short = format!("without this node {alive} of {of} voters are alive, {needed} must answer");
        (alive < needed).then_some(short)
    }

    async fn carry_out(&self, group: &Group, change: Change) -> Result<(), String> {
        let (members, retain) = match change {
            Change::AddLearner(node) => {
                let seat = self.ask_to_join(group, node, Instant::now()).await?;
                let added = group.raft.add_learner(node, seat, false).await;
                return added.map(drop).map_err(|e| e.to_string());
            }
            Change::Promote(node) => (ChangeMembers::AddVoterIds(BTreeSet::from([node])), true),
            Change::Demote(node) => (ChangeMembers::RemoveVoters(BTreeSet::from([node])), true),
            Change::Remove(node) if group.metrics().membership_config.voter_ids().any(|v| v == node) => {
                (ChangeMembers::RemoveVoters(BTreeSet::from([node])), false)
            }
            Change::Remove(node) => (ChangeMembers::RemoveNodes(BTreeSet::from([node])), false),
        };
        group.raft.change_membership(members, retain).await.map(drop).map_err(|e| e.to_string())
    }
}

/// A change of voters has two steps; a leader that was lost, or that waited too long, between them left the second to do.
async fn finish_change(group: &Group, limit: Duration) -> Result<(), String> {
    let m = group.metrics();
    let [_, goal] = m.membership_config.membership().get_joint_config().as_slice() else { return Ok(()) };
    if m.membership_config != m.committed_membership_config {
        return Ok(()); // the first step is under way
    }
    let second = group.raft.change_membership(ChangeMembers::ReplaceAllVoters(goal.clone()), true);
    tokio::select! {
        biased;
        () = group.closed.cancelled() => Ok(()),
        done = timeout(limit, second) => match done {
            Ok(changed) => changed.map(drop).map_err(|e| e.to_string()),
            Err(_elapsed) => Err(format!("not within {limit:?}")),
        },
    }
}
