//! Entries into the log, reads behind it, and handing leadership over.

use openraft::ReadPolicy;
use openraft::errors::{ClientWriteError, LinearizableReadError, RaftError};
use openraft::impls::ProgressResponder;
use starling_protocol::codec::encode;
use starling_protocol::control::{Applied, ControlEntry};
use starling_protocol::{ModelName, NodeId, Term};
use tokio::time::timeout;

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
        self.write(&group, None, entry).await
    }

    /// As [`Groups::propose`], but only while this node is the leader of `term`: the check and the append are one
    /// step, so an entry of an earlier term is never logged in a later one.
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
        self.write(&group, Some(term), entry).await
    }

    pub(super) async fn write(
        &self,
        group: &Group,
        term: Option<Term>,
        entry: ControlEntry,
    ) -> Result<Applied, ProposeError> {
        let got = encode(&entry).len();
        if got > ENTRY_LEN_BYTES_MAX {
            return Err(ProposeError::TooLong { got, max: ENTRY_LEN_BYTES_MAX });
        }
        let after = self.config.propose_timeout;
        let unknown = |reason: String| ProposeError::Unknown { after, reason };
        let (responder, done) = ProgressResponder::complete_only();
        let mut request = group.raft.write(LogPayload(entry)).responder(responder);
        if let Some(term) = term {
            request = request.with_leader(term.0);
        }
        let result = timeout(after, async {
            request.await.map_err(|fatal| unknown(fatal.to_string()))?;
            done.await.map_err(|_dropped| unknown("the group stopped".into()))
        });
        match result.await {
            Err(_elapsed) => Err(unknown(self.why_no_quorum(group))),
            Ok(Err(error)) => Err(error),
            Ok(Ok(Ok(response))) => Ok(response.data),
            Ok(Ok(Err(ClientWriteError::ForwardToLeader(forward)))) => match forward.leader_id {
                None if group.leadership.get().wait.is_some() => Err(ProposeError::NoQuorum(self.why_no_quorum(group))),
                leader => Err(ProposeError::NotLeader(leader)),
            },
            Ok(Ok(Err(error @ ClientWriteError::LogEntryDiscarded(_)))) => Err(unknown(error.to_string())),
            // Only changes of membership can fail so.
            Ok(Ok(Err(error))) => Err(unknown(error.to_string())),
        }
    }

    /// Waits until this node has applied everything that was committed before the call, and knows by a quorum's
    /// word that it still leads.
    ///
    /// # Errors
    /// [`ReadError`]
    pub async fn linearizable_barrier(&self, model: &ModelName) -> Result<(), ReadError> {
        let group = self.group(model).ok_or_else(|| ReadError::NoGroup(model.clone()))?;
        match timeout(self.config.propose_timeout, group.raft.ensure_linearizable(ReadPolicy::ReadIndex)).await {
            Ok(Ok(_)) => Ok(()),
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
