//! What a benchmark prints, and the arithmetic behind it.

use super::machine::Machine;
use serde::Serialize;
use std::fmt::Write;

/// One benchmark.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) bench: &'static str,
    pub(super) machine: Machine,
    pub(super) rows: Vec<Row>,
}

/// One number, beside what it is compared with.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Row {
    pub(super) what: String,
    pub(super) unit: &'static str,
    pub(super) ours: f64,
    pub(super) peer: Option<f64>,
    pub(super) peer_name: Option<&'static str>,
    /// Above 1 when ours is better.
    pub(super) ratio: Option<f64>,
    /// Runs that `ours` and `peer` are the medians of.
    pub(super) runs: usize,
}

/// Which way is up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Better {
    /// Rates.
    More,
    /// Times.
    Less,
}

impl Row {
    /// From the values of each run.
    pub(super) fn new(
        what: impl Into<String>,
        unit: &'static str,
        better: Better,
        ours: &[f64],
        peer: Option<(&'static str, &[f64])>,
    ) -> Self {
        let mine = median(ours);
        let other = peer.map(|(_, values)| median(values));
        let ratio = other.map(|other| match better {
            Better::More => mine / other,
            Better::Less => other / mine,
        });
        Self {
            what: what.into(),
            unit,
            ours: rounded(mine),
            peer: other.map(rounded),
            peer_name: peer.map(|(name, _)| name),
            ratio: ratio.filter(|r| r.is_finite()).map(rounded),
            runs: ours.len(),
        }
    }
}

impl Row {
    /// The worst of the runs of a time, where less is better.
    pub(super) fn worst(
        what: impl Into<String>,
        unit: &'static str,
        ours: &[f64],
        peer: Option<(&'static str, &[f64])>,
    ) -> Self {
        let worst = |values: &[f64]| values.iter().copied().fold(f64::NAN, f64::max);
        let other = peer.map(|(name, values)| (name, [worst(values)]));
        let peer = other.as_ref().map(|(name, value)| (*name, value.as_slice()));
        Self { runs: ours.len(), ..Self::new(what, unit, Better::Less, &[worst(ours)], peer) }
    }
}

impl Report {
    /// For people.
    pub(super) fn table(&self) -> String {
        let mut out = format!("{}\n{}\n", self.bench, self.machine);
        let width = self.rows.iter().map(|r| r.what.chars().count()).max().unwrap_or(0).max(4);
        let _ =
            writeln!(out, "  {:width$}  {:>10}  {:>10}  {:>7}  {:10}  peer", "what", "ours", "peer", "ratio", "unit");
        for r in &self.rows {
            let number = |v: Option<f64>| v.map_or_else(|| "-".to_owned(), |v| v.to_string());
            let _ = writeln!(
                out,
                "  {:width$}  {:>10}  {:>10}  {:>7}  {:10}  {}",
                r.what,
                r.ours,
                number(r.peer),
                number(r.ratio),
                r.unit,
                r.peer_name.unwrap_or("none")
            );
        }
        out
    }
}

/// The middle value, or the mean of the two in the middle; not a number when there is none.
pub(super) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.get(middle) {
        None => f64::NAN,
        Some(upper) if sorted.len() % 2 == 1 => *upper,
        Some(upper) => f64::midpoint(sorted[middle - 1], *upper),
    }
}

/// The smallest value that at least `percent` of a hundred values do not exceed; not a number when there is none.
pub(super) fn percentile(values: &[f64], percent: usize) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or(f64::NAN)
}

/// To four digits: more are noise.
fn rounded(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    // Through text, so that what is printed is short.
    format!("{value:.3e}").parse().unwrap_or(value)
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "exact in binary")]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_of_the_sorted_values() {
        assert_eq!(median(&[5.0, 1.0, 3.0]), 3.0);
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), 2.5);
        assert_eq!(median(&[7.0]), 7.0);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn percentiles_take_the_nearest_rank() {
        let hundred: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(percentile(&hundred, 50), 50.0);
        assert_eq!(percentile(&hundred, 99), 99.0);
        assert_eq!(percentile(&[2.0, 1.0, 3.0], 99), 3.0);
        assert!(percentile(&[], 50).is_nan());
    }

    #[test]
    fn the_ratio_is_above_one_when_ours_is_better() {
        let rate = Row::new("x", "1/s", Better::More, &[200.0], Some(("p", &[100.0])));
        assert_eq!(rate.ratio, Some(2.0));
        let slow_rate = Row::new("x", "1/s", Better::More, &[50.0], Some(("p", &[100.0])));
        assert_eq!(slow_rate.ratio, Some(0.5));
        let time = Row::new("x", "ms", Better::Less, &[50.0], Some(("p", &[100.0])));
        assert_eq!(time.ratio, Some(2.0));
        let slow_time = Row::new("x", "ms", Better::Less, &[200.0], Some(("p", &[100.0])));
        assert_eq!(slow_time.ratio, Some(0.5));
    }

    #[test]
    fn a_row_takes_medians_and_counts_runs() {
        let row = Row::new("x", "1/s", Better::More, &[1.0, 9.0, 4.0], Some(("p", &[8.0, 2.0, 100.0])));
        assert_eq!((row.ours, row.peer, row.ratio, row.runs), (4.0, Some(8.0), Some(0.5), 3));
        let alone = Row::new("x", "1/s", Better::More, &[1.0], None);
        assert_eq!((alone.peer, alone.peer_name, alone.ratio), (None, None, None));
        let nothing = Row::new("x", "1/s", Better::More, &[1.0], Some(("p", &[0.0])));
        assert_eq!(nothing.ratio, None);
    }

    #[test]
    fn the_worst_time_is_the_longest() {
        let row = Row::worst("x", "ms", &[1.0, 4.0, 2.0], Some(("p", &[8.0, 2.0])));
        assert_eq!((row.ours, row.peer, row.ratio, row.runs), (4.0, Some(8.0), Some(2.0), 3));
    }

    #[test]
    fn numbers_keep_four_digits() {
        assert_eq!(rounded(123_456.0), 123_500.0);
        assert_eq!(rounded(0.012_345_6), 0.012_35);
        assert_eq!(rounded(0.0), 0.0);
    }
}
