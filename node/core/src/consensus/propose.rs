//! Entries into the log, reads behind it, and handing leadership over.

use openraft::ReadPolicy;
use openraft::errors::{ClientWriteError, LinearizableReadError, RaftError};
use openraft::impls::ProgressResponder;
use starling_protocol::codec::encode;
use starling_protocol::control::{Applied, ControlEntry};
use starling_protocol::{ModelName, NodeId, Term};
use tokio::time::{Instant, timeout};

use super::errors::{ProposeError, ReadError};
use super::group::Group;
use super::groups::Groups;
use super::type_config::LogPayload;

/// Longest entry: with the log's frame it must fit a call. A manifest of 64 Ki chunks takes 2 MiB.
const ENTRY_LEN_BYTES_MAX: usize = 4 << 20;

impl Groups {
    /// Logs `entry` if this node leads, and returns what the state machine made of it.
    ///
    /// Not cancel-safe: dropped, its outcome is unknown.
    ///
    /// # Errors
    /// [`ProposeError`]
    pub async fn propose(&self, model: &ModelName, entry: ControlEntry) -> Result<Applied, ProposeError> {
        let group = self.group(model).ok_or_else(|| ProposeError::NoGroup(model.clone()))?;
        self.write(&group, entry).await
    }

    /// As [`Groups::propose`], but only while this node is the leader of `term`: the check and the append are one
    /// step, so an entry of an earlier term is never logged in a later one.
    ///
    /// A quorum that is silent is waited for as long as the term lasts: the entry stays in the log of its leader, which
    /// offers it again. Callers drop the future when [`LeaderView::term`](super::LeaderView::term) has grown.
    ///
    /// # Errors
    /// [`ProposeError`]
    pub async fn propose_as(
        &self,
        model: &ModelName,
        term: Term,
        entry: ControlEntry,
    ) -> Result<Applied, ProposeError> {
        let group = self.group(model).ok_or_else(|| ProposeError::NoGroup(model.clone()))?;
        self.append(&group, Some(term), entry).await
    }

    pub(super) async fn write(&self, group: &Group, entry: ControlEntry) -> Result<Applied, ProposeError> {
        let after = self.config.propose_timeout;
        let appended = timeout(after, self.append(group, None, entry)).await;
        appended.unwrap_or_else(|_elapsed| Err(ProposeError::Unknown { after, reason: self.why_no_quorum(group) }))
    }

    async fn append(&self, group: &Group, term: Option<Term>, entry: ControlEntry) -> Result<Applied, ProposeError> {
        let got = encode(&entry).len();
        if got > ENTRY_LEN_BYTES_MAX {
            return Err(ProposeError::TooLong { got, max: ENTRY_LEN_BYTES_MAX });
        }
        let began = Instant::now();
        let unknown = |reason: String| ProposeError::Unknown { after: began.elapsed(), reason };
        let (responder, done) = ProgressResponder::complete_only();
        let mut request = group.raft.write(LogPayload(entry)).responder(responder);
        if let Some(term) = term {
            request = request.with_leader(term.0);
        }
        request.await.map_err(|fatal| unknown(fatal.to_string()))?;
        match done.await.map_err(|_dropped| unknown("the group stopped".into()))? {
            Ok(response) => Ok(response.data),
            Err(ClientWriteError::ForwardToLeader(forward)) => match forward.leader_id {
                None if group.leadership.get().wait.is_some() => Err(ProposeError::NoQuorum(self.why_no_quorum(group))),
                leader => Err(ProposeError::NotLeader(leader)),
            },
            Err(error @ ClientWriteError::LogEntryDiscarded(_)) => Err(unknown(error.to_string())),
            // Only changes of membership can fail so.
            Err(error) => Err(unknown(error.to_string())),
        }
    }

    /// Waits until this node has applied everything that was committed before the call, and knows by a quorum's
    /// word that it still leads.
    ///
    /// # Errors
    /// [`ReadError`]
    pub async fn linearizable_barrier(&self, model: &ModelName) -> Result<(), ReadError> {
        let group = self.group(model).ok_or_else(|| ReadError::NoGroup(model.clone()))?;
        // openraft's read index is what this process knows to be committed, or the first entry of its term. That is too
        // little for a leader which was restarted within its term and whose disk had not noted the newest commits. What
        // it had logged by now covers whatever it ever committed.
        let logged = group.metrics().last_log_index;
        let limit = self.config.propose_timeout;
        match timeout(limit, group.raft.ensure_linearizable(ReadPolicy::ReadIndex)).await {
            Ok(Ok(_)) => {
                let applied = group.raft.wait(Some(limit)).applied_index_at_least(logged, "all that was logged").await;
                applied.map(drop).map_err(|_late| ReadError::NoQuorum(self.why_no_quorum(&group)))
            }
            Err(_elapsed) => Err(ReadError::NoQuorum(self.why_no_quorum(&group))),
            Ok(Err(RaftError::APIError(LinearizableReadError::ForwardToLeader(f)))) => {
                Err(ReadError::NotLeader(f.leader_id))
            }
            Ok(Err(RaftError::APIError(LinearizableReadError::QuorumNotEnough(_)))) => {
                Err(ReadError::NoQuorum(self.why_no_quorum(&group)))
            }
            Ok(Err(RaftError::Fatal(_))) => Err(ReadError::NoGroup(model.clone())),
        }
    }

    /// Asks `to` to lead instead of this node. It does when its log is complete; look at [`Groups::leadership`].
    ///
    /// # Errors
    /// [`ReadError`] when this node does not lead.
    pub async fn transfer(&self, model: &ModelName, to: NodeId) -> Result<(), ReadError> {
        let group = self.group(model).ok_or_else(|| ReadError::NoGroup(model.clone()))?;
        let view = group.leadership.get();
        if !view.is_self {
            return Err(ReadError::NotLeader(view.leader));
        }
        group.raft.trigger().transfer_leader(to).await.map_err(|_stopped| ReadError::NoGroup(model.clone()))
    }
}
