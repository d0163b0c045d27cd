//! Leases: who runs what, until when, and what there is to run next.

use super::{CLAIM_MAX, EVAL_RUNNING_MAX, Ledger, OpenGroup};
use crate::assignment::{Assignment, HeldLease, Purpose};
use crate::ids::{EpisodeId, GroupId, NodeId, TaskRef};
use crate::job::Sampling;
use crate::time::Timestamp;
use crate::wire::WaitReason;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

#[derive(Clone, Debug)]
pub(super) struct Lease {
    pub(super) holder: NodeId,
    pub(super) expires: Timestamp,
    pub(super) place: Place,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Place {
    Group(GroupId),
    Eval(usize),
}

impl Ledger {
    /// Renews the caller's leases, takes over those that a former leader gave it, and gives it up to `want` more
    /// episodes.
    ///
    /// Returns the assignments, those of `running` that are no longer leased to `holder`, and why there are
    /// fewer assignments than wanted. `stocked` of the running ones have not begun: see [`Ledger::handle_reserve`].
    pub fn handle_claim(
        &mut self,
        now: Timestamp,
        holder: NodeId,
        want: usize,
        stocked: usize,
        running: &[HeldLease],
    ) -> (Vec<Assignment>, Vec<EpisodeId>, Option<WaitReason>) {
        self.handle_timeout(now);
        let expires = now + Duration::from_millis(self.job.spec.lease_ttl_ms);
        let mut revoked = Vec::new();
        for held in running {
            let goes_on = match self.leases.get_mut(&held.episode) {
                Some(lease) if lease.holder == holder => {
                    lease.expires = expires;
                    true
                }
                Some(_) => false,
                None => self.adopt(holder, expires, held),
            };
            if !goes_on {
                revoked.push(held.episode);
            }
        }
        let mut given = Vec::new();
        let mut wait = None;
        while given.len() < want.min(CLAIM_MAX) {
            match self.next_place(now) {
                Ok(place) => given.push(self.lease(now, holder, place)),
                Err(reason) => {
                    wait = Some(reason);
                    break;
                }
            }
        }
        let refused = matches!(wait, Some(WaitReason::QuotaFull { .. } | WaitReason::EvaluationFull));
        self.note_claim(now, holder, stocked as u64, refused);
        (given, revoked, wait)
    }

    pub(super) fn next_place(&mut self, now: Timestamp) -> Result<Place, WaitReason> {
        if let Some(e) = &self.evaluation {
            if self.leases.len() >= EVAL_RUNNING_MAX {
                return Err(WaitReason::EvaluationFull);
            }
            let free = e.slots.iter().position(|s| s.reward.is_none() && s.running.is_none());
            return free.map(Place::Eval).ok_or(WaitReason::EvaluationFull);
        }
        if self.job.steps >= self.job.spec.steps {
            return Err(WaitReason::NoJob);
        }
        let size = self.group_size();
        // Groups that lack episodes come first, so that a crash delays its group and not the batch after it.
        // What a former leader's groups lack may still run: its holder is heard first.
        let keeps = self.adoption.keeps_places(now, Duration::from_millis(self.job.spec.lease_ttl_ms));
        let lacks = |g: &OpenGroup| g.rollouts.len() + g.running.len() < size;
        let lacking = self.groups.iter().find(|(id, g)| lacks(g) && !(keeps && self.is_adopted(id)));
        if let Some((id, _)) = lacking {
            return Ok(Place::Group(*id));
        }
        let (have, max) = (self.accepted() + self.running(), self.quota());
        if have + size as u64 > max {
            return Err(WaitReason::QuotaFull { have, max });
        }
        Ok(Place::Group(self.open_group()))
    }

    pub(super) fn open_group(&mut self) -> GroupId {
        // The set that is furthest behind its share; exact over any window, ties to the first.
        let share = |i: usize| (self.groups_opened[i] as f64 + 1.0) / self.job.spec.tasks[i].weight;
        let set = (0..self.tasks.len()).min_by(|a, b| share(*a).total_cmp(&share(*b))).unwrap_or(0);
        let index = self.orders[set].nth(self.groups_opened[set]);
        self.groups_opened[set] += 1;
        let id = GroupId { term: self.term, seq: self.group_seq };
        self.group_seq += 1;
        let task = TaskRef {
            set: self.job.spec.tasks[set].name.clone(),
            index,
            id: self.tasks[set].train[index as usize].id.clone(),
        };
        let group = OpenGroup { task, attempts: 0, running: BTreeSet::new(), rollouts: BTreeMap::new() };
        self.groups.insert(id, group);
        id
    }

    pub(super) fn lease(&mut self, now: Timestamp, holder: NodeId, place: Place) -> Assignment {
        let seed = self.draw();
        let mut episode = [0; 16];
        episode.copy_from_slice(&seed[..16]);
        let episode = EpisodeId(episode);
        let mut sampling = self.job.spec.sampling;
        let (group, attempt, task, line, purpose) = match place {
            Place::Group(id) => {
                let set = self.set_index(&self.groups[&id].task.set);
                #[expect(clippy::expect_used, reason = "next_place returned a group that is in the map")]
                let g = self.groups.get_mut(&id).expect("group is open");
                g.running.insert(episode);
                g.attempts += 1;
                let line = self.tasks[set].train[g.task.index as usize].line.clone();
                (id, g.attempts - 1, g.task.clone(), line, Purpose::Train)
            }
            Place::Eval(slot) => {
                #[expect(clippy::expect_used, reason = "next_place returned a slot of the evaluation")]
                let e = self.evaluation.as_mut().expect("an evaluation runs");
                let s = &mut e.slots[slot];
                s.running = Some(episode);
                s.attempts += 1;
                if s.greedy {
                    sampling = Sampling { temperature: 0.0, ..sampling };
                }
                let t = &self.tasks[s.set].heldout[s.index as usize];
                let name = self.job.spec.tasks[s.set].name.clone();
                let task = TaskRef { set: name, index: s.index, id: t.id.clone() };
                let slot = u32::try_from(slot).unwrap_or(u32::MAX);
                let purpose = Purpose::Eval { phase: e.phase, greedy: s.greedy, slot };
                (GroupId::default(), s.attempts - 1, task, t.line.clone(), purpose)
            }
        };
        let ttl = self.job.spec.lease_ttl_ms;
        let expires = now + Duration::from_millis(ttl);
        self.leases.insert(episode, Lease { holder, expires, place });
        self.counts.assigned += 1;
        Assignment {
            job: self.job.job,
            model: self.job.spec.model.clone(),
            episode,
            group,
            attempt,
            task,
            task_line: line,
            purpose,
            policy_version: self.version,
            term: self.term,
            seed: u64::from_le_bytes([seed[16], seed[17], seed[18], seed[19], seed[20], seed[21], seed[22], seed[23]]),
            sampling,
            lease_expires: expires,
            lease_ttl_ms: ttl,
            replication: self.job.spec.replication,
        }
    }

    /// Ids and seeds follow from job, term and count: replays are exact, and two leaders never draw the same, nor one
    /// that starts over (see [`Ledger::counting_from`]).
    pub(super) fn draw(&mut self) -> [u8; 32] {
        let mut h = blake3::Hasher::new();
        h.update(b"starling/episode/1").update(&self.job.job.0).update(&self.job.spec.seed.to_le_bytes());
        h.update(&self.term.0.to_le_bytes()).update(&self.episode_seq.to_le_bytes());
        self.episode_seq += 1;
        *h.finalize().as_bytes()
    }

    pub(super) fn set_index(&self, name: &str) -> usize {
        self.job.spec.tasks.iter().position(|t| t.name == name).unwrap_or(0)
    }

    pub(super) fn release(&mut self, episode: EpisodeId) -> Option<Lease> {
        let lease = self.leases.remove(&episode)?;
        match lease.place {
            Place::Group(id) => {
                if let Some(g) = self.groups.get_mut(&id) {
                    g.running.remove(&episode);
                }
            }
            Place::Eval(slot) => {
                if let Some(s) = self.evaluation.as_mut().and_then(|e| e.slots.get_mut(slot))
                    && s.running == Some(episode)
                {
                    s.running = None;
                }
            }
        }
        Some(lease)
    }

    /// The holder gives an episode up; its place is free for a replacement. `false` when `holder` had no lease on it.
    pub fn handle_abort(&mut self, holder: NodeId, episode: EpisodeId) -> bool {
        if self.leases.get(&episode).is_none_or(|l| l.holder != holder) {
            return false;
        }
        self.release(episode);
        self.counts.aborted += 1;
        true
    }

    /// Ends leases that ran out.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        self.adoption.saw(now);
        let over: Vec<EpisodeId> = self.leases.iter().filter(|(_, l)| l.expires <= now).map(|(id, _)| *id).collect();
        for id in over {
            self.release(id);
            self.counts.expired += 1;
        }
    }

    /// When [`Ledger::handle_timeout`] has something to do.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        self.leases.values().map(|l| l.expires).min()
    }
}
