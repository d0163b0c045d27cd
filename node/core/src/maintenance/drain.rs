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
    /// Models in whose groups this node still votes. Once it is done, nobody else could take its seat, and the others are
    /// a quorum without it.
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
        let holds = parts.membership.of_record(parts.node, |r| r.holds_rollouts()) == Some(true);
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
        parts.groups.set_draining();
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
        let led = self.led_models();
        let votes_in: Vec<_> =
            groups.models().into_iter().filter(|m| groups.voters(m).contains(&self.parts.node)).collect();
        for model in &votes_in {
            if led.contains(model) {
                waits.push(format!("model {model}: waiting for another voter to lead, after the step under way"));
            } else if drain.draining
                && let Some(why) = groups.why_seated(model)
            {
                waits.push(format!("model {model}: {why}"));
            }
        }
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
}
