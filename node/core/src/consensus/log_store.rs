//! openraft's log over the store. Votes and entries are synced before openraft hears of it.

use std::fmt::Debug;
use std::io;
use std::ops::{Bound, RangeBounds};

use openraft::storage::{IOFlushed, RaftLogStorage};
use openraft::{LogState, OptionalSend, RaftLogReader};
use starling_protocol::codec::encode;

use super::disk::Disk;
use super::type_config::{Entry, LogId, TypeConfig, Vote};

/// Entries sent to a follower at once: well below the limit of a call, so that the frame fits too.
const APPEND_LEN_BYTES_MAX: usize = 1 << 20;

/// The log of one group.
#[derive(Clone, Debug)]
pub(super) struct LogStore {
    disk: Disk,
}

impl LogStore {
    pub(super) fn new(disk: Disk) -> Self {
        Self { disk }
    }
}

fn bounds(range: &impl RangeBounds<u64>) -> (u64, u64) {
    let from = match range.start_bound() {
        Bound::Included(i) => *i,
        Bound::Excluded(i) => i.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let to = match range.end_bound() {
        Bound::Included(i) => i.saturating_add(1),
        Bound::Excluded(i) => *i,
        Bound::Unbounded => u64::MAX,
    };
    (from, to)
}

impl RaftLogReader<TypeConfig> for LogStore {
    async fn try_get_log_entries<RB: RangeBounds<u64> + Clone + Debug + OptionalSend>(
        &mut self,
        range: RB,
    ) -> io::Result<Vec<Entry>> {
        let (from, to) = bounds(&range);
        self.disk.run(move |d| d.entries(from, to, usize::MAX)).await
    }
    async fn read_vote(&mut self) -> io::Result<Option<Vote>> {
        self.disk.run(Disk::vote).await
    }
    async fn limited_get_log_entries(&mut self, start: u64, end: u64) -> io::Result<Vec<Entry>> {
        self.disk.run(move |d| d.entries(start, end, APPEND_LEN_BYTES_MAX)).await
    }
}

impl RaftLogStorage<TypeConfig> for LogStore {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> io::Result<LogState<TypeConfig>> {
        let read = |d: &Disk| {
            let last_purged_log_id = d.last_purged()?;
            Ok(LogState { last_purged_log_id, last_log_id: d.last_log_id()?.or(last_purged_log_id) })
        };
        self.disk.run(read).await
    }
    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }
    async fn save_vote(&mut self, vote: &Vote) -> io::Result<()> {
        let vote = *vote;
        self.disk.run(move |d| d.save_vote(&vote)).await
    }
    async fn save_committed(&mut self, committed: Option<LogId>) -> io::Result<()> {
        self.disk.run(move |d| d.save_committed(committed)).await
    }
    async fn read_committed(&mut self) -> io::Result<Option<LogId>> {
        self.disk.run(Disk::committed).await
    }
    /// Waits for the sync before it returns: then writes are in order without a queue of our own. What openraft
    /// could do meanwhile is little, and a group writes a few entries a second.
    async fn append<I>(&mut self, entries: I, callback: IOFlushed<TypeConfig>) -> io::Result<()>
    where
        I: IntoIterator<Item = Entry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let rows: Vec<_> = entries.into_iter().map(|e| (e.log_id.index, encode(&e))).collect();
        self.disk.run(move |d| d.append(&rows)).await?;
        callback.io_completed(Ok(()));
        Ok(())
    }
    async fn truncate_after(&mut self, last: Option<LogId>) -> io::Result<()> {
        let from = last.map_or(0, |l| l.index.saturating_add(1));
        self.disk.run(move |d| d.truncate_from(from)).await
    }
    async fn purge(&mut self, upto: LogId) -> io::Result<()> {
        self.disk.run(move |d| d.purge_to(upto)).await
    }
}
