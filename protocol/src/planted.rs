//! Bugs planted on purpose, to prove that the simulator's checkers see them.
//!
//! Without the feature `planted-bugs` none of this exists in a binary: [`has`] is a constant. With it, a thread may plant
//! one bug for the runs that follow on it.

/// A known way to break a promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Bug {
    /// A holder answers a Put before its disk has synced.
    AcknowledgeBeforePersist,
    /// A deposed leader's step is passed on to the new leader, and the log takes it.
    SkipFencing,
    /// A leader marks a batch as consumed when it begins to train on it.
    ConsumeBeforeCommit,
    /// A gateway is content with one holder fewer than was promised.
    ForgetHolder,
    /// The quota counts timelines, where an episode counts once.
    CountTimelines,
    /// A restarted voter does not remember its last vote.
    ForgetVote,
    /// Log entries are not synced before they are acknowledged.
    LoseLogTail,
    /// Rollouts are admitted whatever versions sampled them.
    AdmitStale,
    /// Receipts are not verified.
    SkipReceipts,
    /// A claim that is repeated in a later term gets an episode that is leased to another.
    ReissueEpisode,
    /// A node that joins a greater line keeps the marks of what only its own line consumed.
    KeepOldMarks,
}

impl Bug {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::AcknowledgeBeforePersist,
        Self::SkipFencing,
        Self::ConsumeBeforeCommit,
        Self::ForgetHolder,
        Self::CountTimelines,
        Self::ForgetVote,
        Self::LoseLogTail,
        Self::AdmitStale,
        Self::SkipReceipts,
        Self::ReissueEpisode,
        Self::KeepOldMarks,
    ];
}

#[cfg(feature = "planted-bugs")]
std::thread_local! {
    static PLANTED: std::cell::Cell<Option<Bug>> = const { std::cell::Cell::new(None) };
}

/// Plants a bug on this thread, or none.
#[cfg(feature = "planted-bugs")]
pub fn plant(bug: Option<Bug>) {
    PLANTED.set(bug);
}

/// Whether the bug is planted on this thread.
#[cfg(feature = "planted-bugs")]
#[must_use]
pub fn has(bug: Bug) -> bool {
    PLANTED.get() == Some(bug)
}

/// Whether the bug is planted on this thread: never.
#[cfg(not(feature = "planted-bugs"))]
#[must_use]
pub const fn has(_bug: Bug) -> bool {
    false
}
