//! Leaving in order: nothing new is taken, what others need is handed to them, and then nothing depends on this node.

use super::Maintenance;
use crate::watch::lock;
use serde::Serialize;
use starling_protocol::ModelName;
use starling_protocol::record::Role;

/// Why a node cannot be drained.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DrainError {
    /// Nobody else takes rollouts and weights.
    #[error(
        "this node is the only one that holds rollouts and weights and has room: connect another server or witness first"
    )]
    OnlyHolder,
    /// Nobody else serves a model.
    #[error("this node is the only live server in the group of model {0}: connect another server first")]
    OnlyServer(ModelName),
}

/// How far a drain is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DrainReport {
    /// Whether it was asked for.
    pub draining: bool,
    /// Whether nothing depends on this node any more: it may be stopped.
    pub done: bool,
    /// Copies of rollouts handed to others since the node started.
    pub rollouts_handed_off: u64,
    /// Manifests handed to others since the node started.
    pub manifests_handed_off: u64,
    /// What it still waits for.
    pub waits: Vec<String>,
    /// Models in whose groups this node still votes. It does no harm while the others are a quorum without it.
    pub votes_in: Vec<ModelName>,
}

/// What is known of the drain under way.
#[derive(Clone, Debug, Default)]
pub(super) struct Drain {
    draining: bool,
    /// A whole sweep since the drain began found everything on enough other nodes.
    handed_off: bool,
    uncertain: u64,
}

impl Maintenance {
    /// Whether this node is leaving.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        lock(&self.drain).draining
    }

    /// Begins to leave. Again is harmless. It lasts until the node stops; started again, it takes part as before.
    ///
    /// # Errors
    /// [`DrainError`] when nobody is left to hand things to; nothing changed then.
    pub(crate) fn begin_drain(&self) -> Result<(), DrainError> {
        let parts = &self.parts;
        let holds = parts.membership.record(parts.node).is_some_and(|r| r.holds_rollouts());
        if holds && !parts.membership.live_takers().iter().any(|n| *n != parts.node) {
            return Err(DrainError::OnlyHolder);
        }
        let servers = parts.membership.live_with(Role::Server);
        for model in parts.groups.models() {
            let members = [parts.groups.voters(&model), parts.groups.learners(&model)].concat();
            let server = |n| servers.contains(n) && members.contains(n);
            if server(&parts.node) && !servers.iter().any(|n| *n != parts.node && server(n)) {
                return Err(DrainError::OnlyServer(model));
            }
        }
        let mut drain = lock(&self.drain);
        if !drain.draining {
            tracing::info!("draining: this node takes nothing new and hands off what it holds");
            *drain = Drain { draining: true, ..Drain::default() };
        }
        drop(drain);
        self.wake.notify_one();
        Ok(())
    }

    /// How far it is. `busy` is what else this node still does for others, in words.
    pub(crate) fn drain_report(&self, busy: Vec<String>) -> DrainReport {
        let status = self.status();
        let drain = lock(&self.drain).clone();
        let mut waits = busy;
        if drain.draining && !drain.handed_off {
            let why = match (&status.trouble, drain.uncertain) {
                (Some(trouble), 1..) => format!("handing off: {trouble}"),
                _ => format!("handing off: {} rollouts checked in this round", status.checked),
            };
            waits.push(why);
        }
        let groups = &self.parts.groups;
        for model in self.led_models() {
            waits.push(format!("model {model}: waiting for another voter to lead"));
        }
        let votes_in = groups.models().into_iter().filter(|m| groups.voters(m).contains(&self.parts.node)).collect();
        DrainReport {
            draining: drain.draining,
            done: drain.draining && waits.is_empty(),
            rollouts_handed_off: status.rollouts_restored,
            manifests_handed_off: status.manifests_restored,
            waits,
            votes_in,
        }
    }

    /// A sweep is complete; `leaving` when this node was leaving during all of it.
    pub(super) fn handle_swept(&self, leaving: bool, uncertain: u64) {
        let mut drain = lock(&self.drain);
        if drain.draining {
            drain.uncertain = uncertain;
            drain.handed_off = leaving && uncertain == 0;
        }
    }

    fn led_models(&self) -> Vec<ModelName> {
        let groups = &self.parts.groups;
        let leads = |m: &ModelName| groups.leadership(m).is_some_and(|v| v.borrow().is_self);
        groups.models().into_iter().filter(leads).collect()
    }

    /// Asks another live server that votes to lead, of each model that this node leads.
    pub(super) async fn hand_over_leadership(&self) {
        let servers = self.parts.membership.live_with(Role::Server);
        for model in self.led_models() {
            let voters = self.parts.groups.voters(&model);
            let Some(to) = voters.into_iter().find(|n| *n != self.parts.node && servers.contains(n)) else { continue };
            match self.parts.groups.transfer(&model, to).await {
                Ok(()) => tracing::info!(%model, to = %to.short(), "draining: asked another voter to lead"),
                Err(e) => tracing::info!(%model, error = %e, "draining: cannot hand over leadership yet"),
            }
        }
    }
}
