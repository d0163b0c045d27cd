//! Lines of a model's history, and how they follow from each other.
//!
//! A group whose quorum is lost for good goes on in a new *line*, opened by one of its survivors. Two parts that cannot
//! see each other may both open one; when they meet, the greater line (by [`Ord`]) stays. See `docs/consensus.md`.

use crate::ids::{Hash, NodeId, PolicyVersion, Term};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Bits of a version or a term that count within a line: 268 million steps, eight years of one a second.
pub(crate) const COUNT_BITS: u32 = 28;
/// Bits that tell lines of one generation apart.
const OPENER_BITS: u32 = 17;

/// One line of a model's history. The greater of two lines is the one that stays when they meet.
///
/// Everything in it is settled when it is opened, so that which of two lines is the greater never changes: a node's
/// lines only grow, and it never returns to one that it left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Line {
    /// 0 for the line of the model's creation, one more for each that was opened after a lost quorum.
    pub generation: u8,
    /// Steps committed before it was opened.
    pub steps: u64,
    /// Members that were alive when it was opened.
    pub survivors: u8,
    /// Who opened it; all zero for generation 0.
    pub opened_by: NodeId,
}

impl Line {
    /// What versions and terms of this line carry above their count: 8 bits of generation, 17 of blake3 of the opener.
    /// 0 for generation 0.
    #[must_use]
    pub fn mark(&self) -> u32 {
        if self.generation == 0 {
            return 0;
        }
        let [a, b, c, ..] = Hash::of(&self.opened_by.0).0;
        let opener = u32::from_be_bytes([0, a, b, c]) >> (24 - OPENER_BITS);
        u32::from(self.generation) << OPENER_BITS | opener
    }
    /// The version that `steps` steps make in this line.
    #[must_use]
    pub fn version(&self, steps: u64) -> PolicyVersion {
        PolicyVersion(u64::from(self.mark()) << COUNT_BITS | steps)
    }
    /// No term of this line is lower, and none of a line of a lower generation is as high.
    #[must_use]
    pub fn first_term(&self) -> Term {
        Term(u64::from(self.mark()) << COUNT_BITS)
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.generation {
            0 => f.write_str("generation 0"),
            g => write!(f, "generation {g}, opened by {} after step {}", self.opened_by.short(), self.steps),
        }
    }
}

/// Above its count: generation and opener of a version or a term.
pub(crate) fn mark_of(number: u64) -> u64 {
    number >> COUNT_BITS
}

/// The part of a version or a term that counts.
pub(crate) fn count_of(number: u64) -> u64 {
    number & ((1 << COUNT_BITS) - 1)
}

/// Its generation.
pub(crate) fn generation_of(number: u64) -> u64 {
    number >> (COUNT_BITS + OPENER_BITS)
}

/// `42` in generation 0, `g1.42` in generation 1.
pub(crate) fn write_number(number: u64, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match generation_of(number) {
        0 => f.pad(&number.to_string()),
        g => f.pad(&format!("g{g}.{}", count_of(number))),
    }
}

/// A line with those that it came out of.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lineage {
    /// The line.
    pub line: Line,
    /// The version at which each line before it was left, ascending.
    pub forks: Vec<PolicyVersion>,
}

/// A line cannot be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("generation {0} is the last one that there can be")]
pub struct LastGeneration(pub u8);

impl Lineage {
    /// The line that `opener` opens from `at`, this line's version, with so many members alive: of a generation above
    /// this one's and above `known`, the greatest that is heard of.
    ///
    /// # Errors
    /// [`LastGeneration`] after 255 of them.
    pub fn opened(
        &self,
        at: PolicyVersion,
        known: u8,
        survivors: usize,
        opener: NodeId,
    ) -> Result<Self, LastGeneration> {
        let before = self.line.generation.max(known);
        let generation = before.checked_add(1).ok_or(LastGeneration(before))?;
        let survivors = u8::try_from(survivors).unwrap_or(u8::MAX);
        // A line without a step of its own is left at a version of the one before it.
        let mut forks = self.forks.clone();
        forks.retain(|f| f.mark() != at.mark());
        forks.push(at);
        Ok(Self { line: Line { generation, steps: at.steps(), survivors, opened_by: opener }, forks })
    }
    /// Whether a step to `version` may be part of this history: it is of this line, or of one before it and not beyond
    /// the place where that was left.
    #[must_use]
    pub fn contains(&self, version: PolicyVersion) -> bool {
        version.mark() == u64::from(self.line.mark())
            || self.forks.iter().any(|f| f.mark() == version.mark() && version <= *f)
    }
    /// The version that follows `version` in this line.
    #[must_use]
    pub fn next(&self, version: PolicyVersion) -> PolicyVersion {
        self.line.version(version.steps() + 1)
    }
    /// Steps from `oldest` to `trained`; `None` if `oldest` is not part of this history.
    #[must_use]
    pub fn staleness(&self, trained: PolicyVersion, oldest: PolicyVersion) -> Option<u64> {
        self.contains(oldest).then(|| trained.steps().saturating_sub(oldest.steps()))
    }
    /// The version `steps` steps before `version`, or the first.
    #[must_use]
    pub fn back(&self, version: PolicyVersion, steps: u64) -> PolicyVersion {
        let count = version.steps().saturating_sub(steps);
        let fork = self.forks.iter().find(|f| count <= f.steps());
        fork.map_or_else(|| self.line.version(count), |f| PolicyVersion(f.0 - (f.steps() - count)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(n: u8) -> NodeId {
        NodeId([n; 32])
    }

    fn first() -> Lineage {
        Lineage::default()
    }

    #[test]
    fn generation_zero_counts_as_if_there_were_no_lines() {
        let line = first();
        assert_eq!(line.next(PolicyVersion(41)), PolicyVersion(42));
        assert_eq!((PolicyVersion(42).to_string(), Term(7).to_string()), ("42".into(), "7".into()));
        assert_eq!((line.line.mark(), line.line.first_term()), (0, Term(0)));
        assert_eq!(line.staleness(PolicyVersion(9), PolicyVersion(4)), Some(5));
        assert_eq!(line.back(PolicyVersion(9), 4), PolicyVersion(5));
        assert_eq!(line.back(PolicyVersion(3), 4), PolicyVersion(0));
    }

    #[test]
    fn versions_of_lines_that_went_apart_share_no_number_and_fit_json() {
        let (a, b) = (
            first().opened(PolicyVersion(42), 0, 1, node(1)).unwrap(),
            first().opened(PolicyVersion(42), 0, 1, node(2)).unwrap(),
        );
        let at = PolicyVersion(42);
        let (va, vb) = (a.next(at), b.next(at));
        assert!(va != vb && va > PolicyVersion(43) && vb > PolicyVersion(43));
        assert_eq!((va.to_string(), va.steps(), va.generation()), ("g1.43".into(), 43, 1));
        assert!(!a.contains(vb) && !b.contains(va));
        assert!(a.contains(at) && !a.contains(PolicyVersion(43)), "beyond the fork");
        let mut line = a;
        let mut at = va;
        while let Ok(next) = line.opened(at, 0, 1, node(line.line.generation)) {
            at = next.next(at);
            line = next;
        }
        assert_eq!(line.line.generation, u8::MAX);
        assert!(line.line.version((1 << COUNT_BITS) - 1).0 < 1 << 53);
        assert_eq!(line.forks.len(), 255);
        assert!(line.forks.is_sorted());
    }

    #[test]
    fn staleness_counts_steps_across_forks_and_knows_no_orphans() {
        let a = first().opened(PolicyVersion(42), 0, 1, node(1)).unwrap();
        let v = a.next(a.next(PolicyVersion(42)));
        assert_eq!(a.staleness(v, PolicyVersion(41)), Some(3));
        assert_eq!(a.staleness(v, PolicyVersion(43)), None, "an orphan of the line before");
        assert_eq!(a.back(v, 1), a.line.version(43));
        assert_eq!(a.back(v, 3), PolicyVersion(41));
    }

    #[test]
    fn a_line_left_without_a_step_leaves_one_fork() {
        let a = first().opened(PolicyVersion(42), 0, 1, node(1)).unwrap();
        let b = a.opened(PolicyVersion(42), 0, 1, node(2)).unwrap();
        assert_eq!((b.line.generation, &b.forks), (2, &vec![PolicyVersion(42)]));
    }

    #[test]
    fn the_greater_line_has_the_generation_then_the_steps_then_the_survivors_then_the_opener() {
        let line = |generation, steps, survivors, n| Line { generation, steps, survivors, opened_by: node(n) };
        let rising = [line(1, 9, 3, 9), line(2, 1, 1, 1), line(2, 1, 1, 2), line(2, 1, 2, 1), line(2, 2, 1, 1)];
        assert!(rising.is_sorted());
    }
}
