//! Token sequences packed one after another, without padding, prefixes that they share only once.

use std::ops::Range;
use std::sync::Arc;

/// Consecutive rows of a packed batch that one sequence was the first to bring.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Segment {
    /// Rows of former segments with the tokens before these, in order of their positions.
    pub(crate) prefix: Vec<Range<usize>>,
    /// Its own.
    pub(crate) rows: Range<usize>,
}

impl Segment {
    /// Position of the first of its own tokens.
    pub(crate) fn start(&self) -> usize {
        self.prefix.iter().map(ExactSizeIterator::len).sum()
    }

    /// The row of each position, from the sequence's begin.
    pub(crate) fn path(&self) -> impl Iterator<Item = usize> {
        self.prefix.iter().cloned().flatten().chain(self.rows.clone())
    }
}

/// Sequences for one forward pass, and the places whose next token is asked for.
///
/// A forest: what comes out for a token depends on those before it only, so a prefix that several sequences have is
/// computed once, whoever they belong to.
#[derive(Clone, Debug, Default)]
pub(crate) struct PackedSequences {
    /// All tokens.
    pub(crate) tokens: Vec<u32>,
    /// Which of them see which: one segment after another, without gaps.
    pub(crate) segments: Arc<Vec<Segment>>,
    /// Rows of the hidden states that predict a target.
    pub(crate) rows: Vec<u32>,
    /// The token after each of `rows`.
    pub(crate) targets: Arc<Vec<u32>>,
    /// Tokens that were there already.
    pub(crate) shared: usize,
}

impl PackedSequences {
    /// Packs `(tokens, wanted)` one by one, sharing nothing: see [`Packer::push`].
    pub(crate) fn new<'a>(sequences: impl IntoIterator<Item = (&'a [u32], &'a [bool])>) -> Self {
        let mut packer = Packer::new(false);
        for (tokens, wanted) in sequences {
            packer.push(tokens, wanted);
        }
        packer.finish()
    }

    /// Bounds of the sequences, 0 first, the number of tokens last; `None` if some share a prefix.
    pub(crate) fn offsets(&self) -> Option<Vec<usize>> {
        let alone = self.segments.iter().all(|s| s.prefix.is_empty());
        alone.then(|| std::iter::once(0).chain(self.segments.iter().map(|s| s.rows.end)).collect())
    }
}

/// Packs sequences one by one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Packer {
    share: bool,
    packed: PackedSequences,
    segments: Vec<Segment>,
    targets: Vec<u32>,
    /// Rows of each sequence so far.
    paths: Vec<Vec<Range<usize>>>,
}

impl Packer {
    /// An empty one; with `share`, prefixes of former sequences are used again.
    pub(crate) fn new(share: bool) -> Self {
        Self { share, ..Self::default() }
    }

    /// Tokens so far.
    pub(crate) fn tokens(&self) -> usize {
        self.packed.tokens.len()
    }

    /// Tokens that [`Packer::push`] would add.
    pub(crate) fn cost(&self, tokens: &[u32], wanted: &[bool]) -> usize {
        let used = &tokens[..used(wanted)];
        used.len() - self.longest_prefix(used).1
    }

    /// Adds a sequence: `wanted[t]` asks for the log-probability of token `t` (t > 0) given those before.
    ///
    /// Its last wanted token, and all after it, predict nothing and are left out.
    pub(crate) fn push(&mut self, tokens: &[u32], wanted: &[bool]) {
        let used = used(wanted);
        if used == 0 {
            return;
        }
        let (prefix, known) = self.longest_prefix(&tokens[..used]);
        let first = self.packed.tokens.len();
        let rows = first..first + used - known;
        self.packed.tokens.extend_from_slice(&tokens[known..used]);
        self.packed.shared += known;
        let path: Vec<usize> = prefix.iter().cloned().flatten().chain(rows.clone()).collect();
        for t in (1..=used).filter(|t| wanted[*t]) {
            self.packed.rows.push(u32::try_from(path[t - 1]).unwrap_or(u32::MAX));
            self.targets.push(tokens[t]);
        }
        let ranges = prefix.iter().chain(std::iter::once(&rows)).filter(|r| !r.is_empty());
        self.paths.push(ranges.cloned().collect());
        if !rows.is_empty() {
            self.segments.push(Segment { prefix, rows });
        }
    }

    /// What was packed.
    pub(crate) fn finish(self) -> PackedSequences {
        PackedSequences { segments: Arc::new(self.segments), targets: Arc::new(self.targets), ..self.packed }
    }

    /// Rows of the longest prefix of `tokens` that a former sequence has, and its length.
    fn longest_prefix(&self, tokens: &[u32]) -> (Vec<Range<usize>>, usize) {
        let mut best = (Vec::new(), 0);
        for path in self.paths.iter().filter(|_| self.share) {
            let (mut ranges, mut known) = (Vec::new(), 0);
            for range in path {
                let there = &self.packed.tokens[range.clone()];
                let same = there.iter().zip(&tokens[known..]).take_while(|(a, b)| a == b).count();
                if same > 0 {
                    ranges.push(range.start..range.start + same);
                }
                known += same;
                if same < there.len() {
                    break;
                }
            }
            if known > best.1 {
                best = (ranges, known);
            }
        }
        best
    }
}

/// Tokens that predict something: those before the last wanted one.
fn used(wanted: &[bool]) -> usize {
    wanted.iter().rposition(|&w| w).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_point_at_the_token_before_each_target() {
        let p = PackedSequences::new([
            ([5u32, 6, 7, 8].as_slice(), [false, false, true, false].as_slice()),
            ([1].as_slice(), [false].as_slice()),
            ([2, 3, 4].as_slice(), [false, true, true].as_slice()),
        ]);
        assert_eq!(p.tokens, [5, 6, 2, 3]);
        assert_eq!(p.offsets().unwrap(), [0, 2, 4]);
        assert_eq!(p.rows, [1, 2, 3]);
        assert_eq!(*p.targets, [7, 3, 4]);
    }

    /// A trunk, a fork from it, a fork from the fork, one that is all known, and one that shares nothing.
    #[test]
    fn each_prefix_is_there_once_and_every_sequence_keeps_its_tokens_and_targets() {
        let sequences: [&[u32]; 6] = [
            &[1, 2, 3, 4, 5, 9],
            &[1, 2, 3, 6, 7, 9],
            &[1, 2, 3, 6, 8, 8, 9],
            &[1, 2, 3, 4],
            &[2, 2, 9],
            &[1, 2, 3, 4, 5, 9, 1, 9],
        ];
        let mut packer = Packer::new(true);
        let mut costs = Vec::new();
        for s in sequences {
            let wanted: Vec<bool> = (0..s.len()).map(|t| t > 1).collect();
            costs.push(packer.cost(s, &wanted));
            packer.push(s, &wanted);
        }
        let p = packer.finish();
        assert_eq!(costs, [5, 2, 2, 0, 2, 2]);
        assert_eq!(p.tokens, [1, 2, 3, 4, 5, 6, 7, 8, 8, 2, 2, 9, 1]);
        assert_eq!((p.tokens.len() + p.shared, p.shared), (5 + 5 + 6 + 3 + 2 + 7, 15));
        assert_eq!(p.segments[2], Segment { prefix: vec![0..3, 5..6], rows: 7..9 });
        assert_eq!(p.segments[4], Segment { prefix: std::iter::once(0..5).collect(), rows: 11..13 });
        assert_eq!(p.offsets(), None);
        let mut at = p.rows.iter().zip(p.targets.iter());
        for s in sequences {
            for t in 2..s.len() {
                let (&row, &target) = at.next().unwrap();
                assert_eq!(target, s[t]);
                let segment = p.segments.iter().find(|x| x.rows.contains(&(row as usize))).unwrap();
                let path: Vec<u32> = segment.path().take_while(|r| *r != row as usize).map(|r| p.tokens[r]).collect();
                assert_eq!((path.as_slice(), p.tokens[row as usize]), (&s[..t - 1], s[t - 1]));
            }
        }
        assert!(at.next().is_none());
    }
}
