//! Token sequences packed one after another, without padding.

use std::sync::Arc;

/// Sequences for one forward pass, and the places whose next token is asked for.
#[derive(Clone, Debug, Default)]
pub(crate) struct PackedSequences {
    /// All tokens.
    pub(crate) tokens: Vec<u32>,
    /// Bounds of the sequences: 0 first, `tokens.len()` last.
    pub(crate) offsets: Arc<Vec<usize>>,
    /// Rows of the hidden states that predict a target.
    pub(crate) rows: Vec<u32>,
    /// The token after each of `rows`.
    pub(crate) targets: Arc<Vec<u32>>,
}

impl PackedSequences {
    /// Packs `(tokens, wanted)`: `wanted[t]` asks for the log-probability of token `t` (t > 0) given those before.
    ///
    /// A sequence's last wanted token, and all after it, predict nothing and are left out.
    pub(crate) fn new<'a>(sequences: impl IntoIterator<Item = (&'a [u32], &'a [bool])>) -> Self {
        let mut packed = Self::default();
        let mut offsets = vec![0];
        let mut targets = Vec::new();
        for (tokens, wanted) in sequences {
            let Some(last) = wanted.iter().rposition(|&w| w).filter(|&l| l > 0) else { continue };
            let base = packed.tokens.len();
            for t in 1..=last {
                if wanted[t] {
                    packed.rows.push(u32::try_from(base + t - 1).unwrap_or(u32::MAX));
                    targets.push(tokens[t]);
                }
            }
            packed.tokens.extend_from_slice(&tokens[..last]);
            offsets.push(packed.tokens.len());
        }
        packed.offsets = Arc::new(offsets);
        packed.targets = Arc::new(targets);
        packed
    }
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
        assert_eq!(*p.offsets, [0, 2, 4]);
        assert_eq!(p.rows, [1, 2, 3]);
        assert_eq!(*p.targets, [7, 3, 4]);
    }
}
