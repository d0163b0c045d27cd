//! Who may speak in a group, and who may call a node into one.
//!
//! The transport proves who a caller is. Whether it belongs to the group is judged by the membership in the log; a node
//! that hears no leader may know an old one, so it also listens to who invited it and to the voters that the mesh
//! announces. Announcements are not proofs: see "Who is trusted" in `docs/consensus.md`.

use std::sync::Arc;

use starling_protocol::record::Role;
use starling_protocol::wire::ModelAnnouncement;
use starling_protocol::{Lineage, ModelName, NodeId, StoreId};
use tokio::time::Instant;

use super::errors::JoinError;
use super::group::Group;
use super::groups::Groups;
use crate::transport::InboundError;
use crate::watch::lock;

/// Groups that one node may call this one into: four such nodes fill all that there may be.
const GROUPS_PER_INVITER_MAX: usize = 64;
/// Models whose announced voters are kept: 1,024 × 5 voters of 32 bytes, with names less than 300 KiB.
const ANNOUNCED_MAX: usize = 1024;

impl Groups {
    /// Notes who votes on a model, as the mesh says.
    pub fn on_announcement(&self, a: &ModelAnnouncement) {
        if a.voters.is_empty() {
            return;
        }
        let mut announced = lock(&self.announced);
        if announced.len() >= ANNOUNCED_MAX && !announced.contains_key(&a.model) {
            return;
        }
        if announced.get(&a.model).is_some_and(|(line, _)| *line > a.line) {
            return;
        }
        let voters = a.voters.iter().copied().chain(a.leader.map(|(n, _)| n)).take(16).collect();
        announced.insert(a.model.clone(), (a.line, voters));
    }

    /// Takes part in this line of `model`'s group from now on, as `from` asks, without a vote of its own accord: its
    /// leader brings the log. A node in a lesser line leaves that for good.
    ///
    /// # Errors
    /// [`JoinError`]; then nothing has changed.
    pub async fn on_join(
        self: &Arc<Self>,
        from: NodeId,
        model: &ModelName,
        lineage: &Lineage,
    ) -> Result<(), JoinError> {
        let serves = self.membership.of_record(from, |r| r.has(Role::Server)) == Some(true);
        if !serves || !self.membership.is_live(from) {
            return Err(JoinError::UnknownInviter { from });
        }
        let stranger = || JoinError::NotAMember { from, model: model.clone() };
        if let Some(group) = self.group(model) {
            let (theirs, ours) = (lineage.line, group.lineage.line);
            if theirs < ours {
                return Err(JoinError::LesserLine { from, model: model.clone(), theirs, ours });
            }
            if theirs > ours {
                if !self.may_lead_away(&group, from, lineage) {
                    return Err(stranger());
                }
                tracing::warn!(%model, from = %from.short(), %ours, %theirs, "this node leaves its line for a greater one");
                let lineage = lineage.clone();
                self.change_line(&group, move |disk| disk.join_line(&lineage, from)).await?;
                return Ok(());
            }
            let known = self.may_speak(&group, from) || (group.is_empty() && self.may_invite(model, from));
            if !known {
                return Err(stranger());
            }
            *lock(&group.inviter) = Some(from);
            return Ok(());
        }
        if !self.may_invite(model, from) {
            return Err(stranger());
        }
        let invited = lock(&self.groups).values().filter(|g| *lock(&g.inviter) == Some(from)).count();
        if invited >= GROUPS_PER_INVITER_MAX {
            return Err(JoinError::TooMany { from, max: GROUPS_PER_INVITER_MAX });
        }
        let group = self.open(model, Some(from), lineage).await?;
        *lock(&group.inviter) = Some(from);
        Ok(())
    }

    /// A model that nobody announces is new, and whoever asks creates it.
    fn may_invite(&self, model: &ModelName, from: NodeId) -> bool {
        lock(&self.announced).get(model).is_none_or(|(_, voters)| voters.contains(&from))
    }

    /// Whether `from` may lead this node from its line into a greater one. A group that works gives its members up only
    /// to one of them or of the lines that it came out of, or to what one of those opened; one without a leader to any
    /// server that invites.
    fn may_lead_away(&self, group: &Group, from: NodeId, lineage: &Lineage) -> bool {
        let metrics = group.metrics();
        let member = |node: NodeId| metrics.membership_config.membership().nodes().any(|(n, _)| *n == node);
        let works = lock(&group.leaderless_since).elapsed() < self.config.patience();
        let kin = &group.state.get().kin;
        !works || [from, lineage.line.opened_by].iter().any(|n| member(*n) || kin.contains(n))
    }

    /// Whether messages of `from` count in the group.
    pub(super) fn may_speak(&self, group: &Group, from: NodeId) -> bool {
        let metrics = group.metrics();
        let mut members = metrics.membership_config.membership().nodes().map(|(n, _)| *n).peekable();
        // A newcomer has no membership before the first entries are in: several messages of its leader.
        let newcomer = members.peek().is_none();
        if members.any(|n| n == from) {
            return true;
        }
        let heard = lock(&group.heard).is_some_and(|at| Instant::now() - at < self.config.election_timeout_max);
        let lonely = !heard && !group.leadership.get().is_self;
        let announced = || {
            let announced = lock(&self.announced);
            announced.get(&group.model).is_some_and(|(l, voters)| *l == group.lineage.line && voters.contains(&from))
        };
        (newcomer || lonely) && (*lock(&group.inviter) == Some(from) || announced())
    }

    /// Whether a message counts that `from` sends with this store.
    pub(super) fn admit(&self, group: &Group, from: NodeId, store: StoreId) -> Result<(), InboundError> {
        let metrics = group.metrics();
        let seat = metrics.membership_config.membership().get_node(&from).copied();
        if let Some(seat) = seat.filter(|seat| seat.store != store) {
            let reason = format!("{from} speaks for its store {store}, its seat in the group of {} is", group.model);
            return Err(InboundError::Unavailable(format!("{reason} that of {}", seat.store)));
        }
        if self.may_speak(group, from) {
            return Ok(());
        }
        Err(InboundError::Unavailable(format!("{from} is not a member of the group of {}", group.model)))
    }
}
