//! Why an episode was given up.

use crate::report::ReportError;
use starling_protocol::EpisodeId;
use std::time::Duration;

/// Why an episode was given up. The text goes to the host and from there to whoever looks at the job.
///
/// `stderr` is the tail of the program's standard error, with the episode's key blotted out.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AbortCause {
    /// The program could not be started. The operator's fault.
    #[error("agent `{program}` could not be started: {reason}")]
    Launch {
        /// The program.
        program: String,
        /// What the system said.
        reason: String,
    },
    /// The program failed. The agent's fault.
    #[error("agent exited with {status}{stderr}")]
    Exit {
        /// Exit code or signal, in words.
        status: String,
        /// Tail of its standard error.
        stderr: Stderr,
    },
    /// The program ended well but its result is not one. The agent's fault.
    #[error("agent's result: {reason}{stderr}")]
    Report {
        /// Which field, what was expected and what came.
        reason: ReportError,
        /// Tail of its standard error.
        stderr: Stderr,
    },
    /// The program itself reports that it failed.
    #[error("agent reported an error: {error}")]
    Agent {
        /// Its words.
        error: String,
    },
    /// The worker ended, or closed its output, in the middle of the episode. The agent's fault.
    #[error("agent worker ended during the episode: {status}{stderr}")]
    WorkerGone {
        /// Exit code or signal, in words.
        status: String,
        /// Tail of its standard error.
        stderr: Stderr,
    },
    /// The worker answered for another episode than the one that it was given. The agent's fault.
    #[error("agent worker: field `episode`: expected \"{expected}\", got {got}")]
    WrongEpisode {
        /// The one it was given.
        expected: EpisodeId,
        /// What it answered for.
        got: String,
    },
    /// It took too long.
    #[error("agent ran past its time limit of {limit:?}{stderr}")]
    TimeLimit {
        /// The limit.
        limit: Duration,
        /// Tail of its standard error.
        stderr: Stderr,
    },
    /// It wrote too much to its standard output.
    #[error("agent wrote more than {limit_bytes} bytes to its standard output in one episode")]
    OutputLimit {
        /// The limit.
        limit_bytes: u64,
    },
    /// The task line cannot be handed to a worker. The task set's fault.
    #[error("task line: expected one JSON object without line breaks, got {got}")]
    TaskLine {
        /// What it is.
        got: String,
    },
    /// The episode is of a task set that this agent does not take. The host's fault.
    #[error("task set {set:?} is not among those that this agent takes")]
    ForeignSet {
        /// The set.
        set: String,
    },
    /// The host handed out more episodes than it was asked for.
    #[error("no free slot: more episodes were handed out than asked for")]
    Surplus,
    /// The lease was lost; somebody else may run the task now.
    #[error("the lease was revoked")]
    Revoked,
    /// The runner stops.
    #[error("the agent runner is shutting down")]
    Shutdown,
    /// The end was not accepted while the lease was valid.
    #[error("the end was not accepted while the lease was valid: {last_error}")]
    EndRefused {
        /// What the host said last.
        last_error: String,
    },
}

impl AbortCause {
    /// A short name for counters.
    #[must_use]
    pub fn label(&self) -> &'static str {
        match self {
            Self::Launch { .. } => "launch",
            Self::Exit { .. } => "exit",
            Self::Report { .. } => "report",
            Self::Agent { .. } => "agent",
            Self::WorkerGone { .. } => "worker_gone",
            Self::WrongEpisode { .. } => "wrong_episode",
            Self::TimeLimit { .. } => "time_limit",
            Self::OutputLimit { .. } => "output_limit",
            Self::TaskLine { .. } => "task_line",
            Self::ForeignSet { .. } => "foreign_set",
            Self::Surplus => "surplus",
            Self::Revoked => "revoked",
            Self::Shutdown => "shutdown",
            Self::EndRefused { .. } => "end_refused",
        }
    }

    /// Whether the program is to blame, so that the next episode in its slot may have to wait.
    pub(crate) fn blames_agent(&self) -> bool {
        matches!(
            self,
            Self::Launch { .. }
                | Self::Exit { .. }
                | Self::Report { .. }
                | Self::Agent { .. }
                | Self::WorkerGone { .. }
                | Self::WrongEpisode { .. }
                | Self::TimeLimit { .. }
                | Self::OutputLimit { .. }
        )
    }
}

/// The tail of a program's standard error; shows as nothing when empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stderr(pub String);

impl std::fmt::Display for Stderr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, "; stderr ends with: {}", self.0) }
    }
}
