//! A group whose quorum is lost for good goes on in a new line; a node whose line met a greater one joins that.
//!
//! Both end the run of the group on this node, change what the store says in one synced batch, and start it again: a
//! crash leaves the one line or the other. See "Quorum loss for good" in `docs/consensus.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use starling_protocol::codec::encode;
use starling_protocol::wire::{LeaderCall, LeaderReply, Standing};
use starling_protocol::{Line, ModelName, NodeId, PolicyVersion, Term};
use tokio::time::{Instant, sleep};

use super::disk::Disk;
use super::errors::{GroupError, ReopenError};
use super::group::Group;
use super::groups::Groups;
use super::supervise::PROBE_EVERY;
use super::survey::{Outlook, Survey};
use super::type_config::Seat;
use super::view::LeaderView;
use crate::watch::lock;

/// How often a member without a leader asks the others where they stand: one small call to each live member.
pub(super) const SURVEY_EVERY: Duration = Duration::from_secs(2);

impl Groups {
    /// Looks after a group that has no leader: finds out what is to become of it, and opens a new line if that is due
    /// and this node's to do.
    pub(super) async fn tend_line(self: Arc<Self>, group: Arc<Group>) {
        loop {
            tokio::select! {
                biased;
                () = group.closed.cancelled() => return,
                () = sleep(SURVEY_EVERY) => {}
            }
            if group.leadership.get().leader.is_some() || self.leaderless(&group) < self.config.patience() {
                *lock(&group.outlook) = None;
                continue;
            }
            let survey = tokio::select! {
                biased;
                () = group.closed.cancelled() => return,
                survey = self.survey(&group) => survey,
            };
            match survey.outlook(false) {
                Outlook::Wait(why) => *lock(&group.outlook) = Some(why),
                Outlook::Open { survivors, known } => match self.open_line(&group, survivors, known).await {
                    Ok(_) => return,
                    Err(error) => {
                        tracing::warn!(model = %group.model, %error, "no new generation was opened");
                        *lock(&group.outlook) = Some(format!("a new generation was not opened: {error}"));
                        if group.closed.is_cancelled() {
                            return; // this run is over all the same; the next one goes on
                        }
                    }
                },
            }
        }
    }

    fn leaderless(&self, group: &Group) -> Duration {
        lock(&group.leaderless_since).elapsed()
    }

    /// Where this node stands in the group.
    async fn standing(&self, group: &Group) -> Standing {
        // Of a store that cannot be read nothing can be told: it has nothing to go on from.
        let last = group.disk.run(|d| Ok(d.last_log_id()?.or(d.last_purged()?))).await.unwrap_or_default();
        let last = last.map(|id| (Term(id.committed_leader_id().term), id.index));
        let (state, view) = (group.state.get(), group.leadership.get());
        let left = self.config.generation_after.map(|after| after.saturating_sub(self.leaderless(group)));
        Standing {
            line: group.lineage.line,
            version: last.map_or(PolicyVersion(0), |_| state.version),
            last,
            leader: view.leader,
            able: lock(&group.unfit).is_none(),
            willing_in_ms: left.map(|d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX)),
        }
    }

    /// Answers [`LeaderCall::Survey`] of `from`; `None` when this node is not in the group.
    pub async fn on_survey(&self, from: NodeId, model: &ModelName) -> Option<Standing> {
        let group = self.group(model)?;
        // A leader that has lost its quorum goes on telling its followers that it is there. It would not ask if it could lead.
        if group.metrics().current_leader == Some(from) {
            *lock(&group.powerless) = Some((from, Instant::now()));
        }
        Some(self.standing(&group).await)
    }

    /// Asks every live member where it stands.
    async fn survey(&self, group: &Group) -> Survey {
        let m = group.metrics();
        let live: BTreeSet<_> = self.membership.live().into_iter().collect();
        let members = m.membership_config.membership().nodes().map(|(n, _)| *n);
        let others: Vec<NodeId> = members.filter(|n| *n != self.node && live.contains(n)).collect();
        let body = Bytes::from(encode(&LeaderCall::Survey { model: group.model.clone() }));
        let asked = others.into_iter().map(|node| {
            let body = body.clone();
            async move {
                let said = match self.leader_call(node, body).await {
                    // A member that left the group, or lost its disk with its key kept, has no part in it.
                    Ok(LeaderReply::Standing(standing)) => Ok(standing?),
                    Ok(other) => Err(format!("unexpected reply {other:?}")),
                    Err(why) => Err(why),
                };
                Some((node, said))
            }
        });
        let answers = futures::future::join_all(asked).await;
        let own = self.standing(group).await;
        // One in a lesser line has left none, and is yet to come: it is no member of this one.
        let lesser = |s: &Result<Standing, String>| s.as_ref().is_ok_and(|s| s.line < own.line);
        let others: BTreeMap<_, _> = answers.into_iter().flatten().filter(|(_, s)| !lesser(s)).collect();
        Survey { node: self.node, own, voters: m.membership_config.voter_ids().collect(), others }
    }

    async fn open_line(self: &Arc<Self>, group: &Arc<Group>, survivors: usize, known: u8) -> Result<Line, GroupError> {
        let opener = (self.node, Seat { store: self.store_id });
        let lineage = self.change_line(group, move |disk| disk.open_line(opener, known, survivors)).await?;
        tracing::warn!(model = %group.model, line = %lineage.line, survivors, "this node opened a new generation");
        Ok(lineage.line)
    }

    /// Opens a new line now, as an operator asks: without the wait, and though a member may be set never to do it.
    ///
    /// # Errors
    /// [`ReopenError`]: also while a majority of the voters is alive, and on a node that has not the newest state.
    pub async fn reopen_line(self: &Arc<Self>, model: &ModelName) -> Result<Line, ReopenError> {
        let group = self.group(model).ok_or_else(|| ReopenError::NoGroup(model.clone()))?;
        let refused = |reason: String| ReopenError::Refused { model: model.clone(), reason };
        if let Some(leader) = group.leadership.get().leader {
            return Err(refused(format!("its leader is {}", leader.short())));
        }
        match self.survey(&group).await.outlook(true) {
            Outlook::Wait(why) => Err(refused(why)),
            Outlook::Open { survivors, known } => Ok(self.open_line(&group, survivors, known).await?),
        }
    }

    /// Ends this run of the group, changes its line by `change` in the store, and runs it again in the line that the
    /// store then has: the new one if the change succeeded, else the old one. Cancel-safe: once begun it goes on.
    pub(super) async fn change_line<T: Send + 'static>(
        self: &Arc<Self>,
        group: &Arc<Group>,
        change: impl FnOnce(&Disk) -> io::Result<T> + Send + 'static,
    ) -> Result<T, GroupError> {
        let changed = self.scope.spawn(self.clone().change_line_now(group.clone(), change));
        changed.await.unwrap_or_else(|_the_node_ends| Err(GroupError::Changed { model: group.model.clone() }))
    }

    async fn change_line_now<T: Send + 'static>(
        self: Arc<Self>,
        group: Arc<Group>,
        change: impl FnOnce(&Disk) -> io::Result<T> + Send + 'static,
    ) -> Result<T, GroupError> {
        let _one_at_a_time = self.opening.lock().await;
        let model = group.model.clone();
        if !self.group(&model).is_some_and(|now| Arc::ptr_eq(&now, &group)) || group.closed.is_cancelled() {
            return Err(GroupError::Changed { model });
        }
        group.closed.cancel();
        group.disk.retire().await;
        let term = group.leadership.get().term;
        let wait = Some(format!("the group of {model} changes its line"));
        group.publish(LeaderView { term, wait, ..LeaderView::default() });
        if let Err(error) = group.raft.shutdown().await {
            tracing::debug!(%model, %error, "group did not stop in order");
        }
        let disk = Disk::new(Arc::new(self.store.clone()), model.clone());
        let changed = disk.run(change).await.map_err(|source| GroupError::Store { model: model.clone(), source });
        if let Err(error) = self.run(&model, group.leadership.clone(), group.state.clone()).await {
            tracing::warn!(%model, %error, "the group does not start over yet");
            drop(self.scope.spawn(self.clone().run_later(group)));
        }
        changed
    }

    /// Starts a group over that could not be started at once, until it can.
    async fn run_later(self: Arc<Self>, ended: Arc<Group>) {
        loop {
            tokio::select! {
                biased;
                () = self.shutdown.cancelled() => return,
                () = sleep(PROBE_EVERY) => {}
            }
            let _one_at_a_time = self.opening.lock().await;
            match self.run(&ended.model, ended.leadership.clone(), ended.state.clone()).await {
                Ok(_) => return,
                Err(error) => tracing::warn!(model = %ended.model, %error, "the group does not start over yet"),
            }
        }
    }
}
