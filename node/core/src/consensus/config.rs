//! How the groups behave.

use std::time::Duration;

use openraft::SnapshotPolicy;
use starling_protocol::ModelName;

/// Entries kept behind a snapshot, so that a node that was away for a moment needs none.
const ENTRIES_KEPT: u64 = 200;
/// Entries sent at once, if they are small.
const APPEND_ENTRIES_MAX: u64 = 64;

/// How the groups behave. Heartbeat and the longest election timeout must be equal on all nodes.
#[derive(Clone, Debug)]
pub struct GroupConfig {
    /// How often a leader without entries to send shows that it is there. A message must be answered within three
    /// quarters of it. Default 250 ms.
    pub heartbeat: Duration,
    /// Shortest of the random times after which a node stands that the turns did not make a leader. Default 1 s.
    pub election_timeout_min: Duration,
    /// Longest election timeout; also the lease: how long a leader may act without its quorum, and how long after its
    /// last heartbeat no other is elected. Default 2 s.
    pub election_timeout_max: Duration,
    /// Entries between two snapshots. Default 500.
    pub snapshot_after_entries: u64,
    /// How long a proposal may take before its outcome is given up as unknown. Default 5 s.
    pub propose_timeout: Duration,
    /// How long creating a group may take. Default 15 s.
    pub create_timeout: Duration,
    /// Most voters. Default 5.
    pub voters_max: usize,
    /// How often a leader looks whether the membership is what it should be. Default 1 s.
    pub autopilot_every: Duration,
    /// How long a node must have been alive without a break before the leader takes it in or lets it vote. Default 2 s.
    pub add_after: Duration,
    /// How long a member must have been dead without a break before the leader gives its place away: longer than a
    /// restart or a move between two networks takes. Default 60 s.
    pub remove_after: Duration,
    /// How long a voter must have been alive without a break before leadership moves to it for its device's sake. Default
    /// 10 s: a node whose connection comes and goes is noticed within 3 s each time, so it never gets there.
    pub transfer_after: Duration,
    /// How long a quorum must have been lost before this node agrees to a new generation without it; `None`: never.
    /// A part that opens one wins over a part that trained on, so it must be longer than any partition that is to heal
    /// by itself. Default 15 min.
    pub generation_after: Option<Duration>,
    /// Whether this node votes but never leads.
    pub witness: bool,
}

impl Default for GroupConfig {
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_millis(250),
            election_timeout_min: Duration::from_secs(1),
            election_timeout_max: Duration::from_secs(2),
            snapshot_after_entries: 500,
            propose_timeout: Duration::from_secs(5),
            create_timeout: Duration::from_secs(15),
            voters_max: 5,
            autopilot_every: Duration::from_secs(1),
            add_after: Duration::from_secs(2),
            remove_after: Duration::from_secs(60),
            transfer_after: Duration::from_secs(10),
            generation_after: Some(Duration::from_secs(15 * 60)),
            witness: false,
        }
    }
}

impl GroupConfig {
    /// The defaults with these times: `election_timeout` is the longest, as on all other nodes, and half of it the
    /// shortest. It must be at least four heartbeats.
    #[must_use]
    pub fn with_times(heartbeat: Duration, election_timeout: Duration) -> Self {
        Self {
            heartbeat,
            election_timeout_min: election_timeout / 2,
            election_timeout_max: election_timeout,
            ..Self::default()
        }
    }

    pub(super) fn raft(&self, model: &ModelName) -> openraft::Config {
        let ms = |d: Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
        openraft::Config {
            cluster_name: model.to_string(),
            heartbeat_interval: ms(self.heartbeat),
            election_timeout_min: ms(self.election_timeout_min),
            election_timeout_max: ms(self.election_timeout_max),
            // Per part of a snapshot.
            install_snapshot_timeout: 10_000,
            max_payload_entries: APPEND_ENTRIES_MAX,
            snapshot_policy: SnapshotPolicy::LogsSinceLast(self.snapshot_after_entries),
            max_in_snapshot_log_to_keep: ENTRIES_KEPT,
            enable_elect: !self.witness,
            enable_pre_vote: Some(true),
            ..openraft::Config::default()
        }
    }
    /// How long nothing may be heard before it is worth a word: a usual election is over by then.
    pub(super) fn patience(&self) -> Duration {
        2 * self.election_timeout_max
    }
}
