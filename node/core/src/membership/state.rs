//! What can be said of a member, and which of two claims counts.

/// A member's state as an ordered number: the incarnation, and in the low two bits [`ALIVE`] to [`LEFT`].
///
/// SWIM's precedence (Das, Gupta, Motivala, "SWIM", DSN 2002, §4.2) is then one comparison: of two claims the greater
/// counts. With one difference: a node that was declared dead may object like a suspect, by a higher incarnation,
/// because after a partition all of the other side is dead by mistake. Claims from anywhere in any order end in the
/// same state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Version(pub(super) u64);

const ALIVE: u64 = 0;
const SUSPECT: u64 = 1;
const DEAD: u64 = 2;
const LEFT: u64 = 3;

impl Version {
    fn of(incarnation: u64, state: u64) -> Self {
        Self(incarnation.min(u64::MAX >> 2) << 2 | state)
    }
    pub(super) fn alive(incarnation: u64) -> Self {
        Self::of(incarnation, ALIVE)
    }
    pub(super) fn suspect(self) -> Self {
        Self::of(self.incarnation(), SUSPECT)
    }
    pub(super) fn dead(self) -> Self {
        Self::of(self.incarnation(), DEAD)
    }
    pub(super) fn left(self) -> Self {
        Self::of(self.incarnation(), LEFT)
    }
    /// Milliseconds since the epoch when the node's run started, plus one for each objection. A restarted node comes
    /// with a later time, so it wins over the memory of its former self.
    pub(super) fn incarnation(self) -> u64 {
        self.0 >> 2
    }
    /// Counts as alive: suspects do, until their time is over.
    pub(super) fn lives(self) -> bool {
        self.0 & 3 <= SUSPECT
    }
    pub(super) fn is_suspect(self) -> bool {
        self.0 & 3 == SUSPECT
    }
    /// Said goodbye, or is gone by a judgement that the node itself would not contest.
    pub(super) fn has_left(self) -> bool {
        self.0 & 3 == LEFT
    }
    /// The same without suspicion, which passes and must not make two tables look different.
    pub(super) fn settled(self) -> Self {
        if self.is_suspect() { Self::alive(self.incarnation()) } else { self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_two_claims_the_worse_of_one_incarnation_and_any_of_a_later_one_counts() {
        let alive = Version::alive(7);
        let order = [alive, alive.suspect(), alive.dead(), alive.left(), Version::alive(8)];
        assert!(order.is_sorted());
        assert_eq!(order.map(Version::incarnation), [7, 7, 7, 7, 8]);
        assert_eq!(order.map(Version::lives), [true, true, false, false, true]);
        assert_eq!(alive.suspect().settled(), alive);
        assert_eq!(alive.dead().settled(), alive.dead());
        assert_eq!(Version::alive(u64::MAX).incarnation(), u64::MAX >> 2, "a number beyond the range does not wrap");
    }
}
