//! Blocks: episodes that a client has leased ahead of what it runs, so that it goes on while its leader is out of reach.
//!
//! A block is a few ordinary leases whose episodes have not begun. They count as running, are renewed, taken over by the
//! next leader, given back or run out like any other; so nothing here can exceed the quota. What this file decides is who
//! gets one: a block takes places that would do more good in a client that can begin at once, so it is given from slack
//! only.

use super::Ledger;
use crate::assignment::Assignment;
use crate::ids::NodeId;
use crate::time::Timestamp;
use std::time::Duration;

/// The share of the quota that all blocks together may have, and that stays free beside them: a quarter. At η = 1 that is half
/// a step's episodes for blocks, and one and a half steps' for everything else, so no batch ever waits for a block.
const SHARE: u64 = 4;
/// A claim that was held back keeps blocks away for so long: several of the claims that such a client makes.
const HUNGRY_FOR: Duration = Duration::from_secs(3);
/// A client that was held back asks again after so long for each of them: all together ask 500 times a second.
const RETRY_EACH: Duration = Duration::from_millis(2);
/// But after this time at the latest.
const RETRY_MAX: Duration = Duration::from_secs(10);

/// What a client said of its block at its last claim.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    /// Leased and not begun.
    size: u64,
    /// Until when it counts unless the client is heard again.
    until: Timestamp,
}

impl Ledger {
    /// When clients that are held back should ask again, from their last claim: the more they are, the later. A crowd of
    /// clients beyond what the quota can employ is nothing that a leader should be busy with.
    #[must_use]
    pub fn retry_after(&self) -> Duration {
        (RETRY_EACH * u32::try_from(self.hungry.len()).unwrap_or(u32::MAX)).min(RETRY_MAX)
    }

    /// Notes how the claim of `holder` went: `stocked` episodes lie in its block, and it was refused some for want of places
    /// or not.
    pub(super) fn note_claim(&mut self, now: Timestamp, holder: NodeId, stocked: u64, refused: bool) {
        let until = now + Duration::from_millis(self.job.spec.lease_ttl_ms);
        self.blocks.retain(|_, b| b.until > now);
        self.blocks.remove(&holder);
        if stocked > 0 {
            self.blocks.insert(holder, Block { size: stocked, until });
        }
        let hungry_for = HUNGRY_FOR.max(self.retry_after() * 2);
        self.hungry.retain(|_, at| now < *at + hungry_for);
        if refused {
            self.hungry.insert(holder, now);
        } else {
            self.hungry.remove(&holder);
        }
    }

    /// Leases whole new groups to `holder` until its block of `stocked` has `ahead` episodes, as far as there is slack.
    ///
    /// Nothing while another client is held back by the quota, while the job evaluates, near its end, or when it allows no
    /// staleness (each place is then one of the batch that is being collected).
    pub fn handle_reserve(&mut self, now: Timestamp, holder: NodeId, ahead: usize, stocked: usize) -> Vec<Assignment> {
        let mut given = Vec::new();
        let spec = &self.job.spec;
        let steps_left = spec.steps.saturating_sub(self.job.steps);
        if self.evaluation.is_some() || spec.staleness_max == 0 || steps_left < 2 || !self.hungry.is_empty() {
            return given;
        }
        let size = self.group_size() as u64;
        let (quota, share) = (self.quota(), self.quota() / SHARE);
        while stocked + given.len() < ahead {
            let blocks: u64 = self.blocks.values().map(|b| b.size).sum();
            // Places of open groups that nobody runs now will be filled again: they are no slack.
            let places = self.groups.len() as u64 * size;
            if blocks + size > share || places + size + share > quota {
                break;
            }
            let group = self.open_group();
            for _ in 0..size {
                given.push(self.lease(now, holder, super::leases::Place::Group(group)));
            }
            let until = now + Duration::from_millis(self.job.spec.lease_ttl_ms);
            self.blocks.entry(holder).and_modify(|b| b.size += size).or_insert(Block { size, until });
        }
        given
    }
}
