//! Whether a series of measurements grows.

/// Theil and Sen's estimate of the slope: the median of the slopes between all pairs of points (x, y). A third of the points
/// may be arbitrarily wrong without moving it far, which is what caches that fill and empty need. `None` for fewer than
/// two different x.
///
/// Source: P. K. Sen, "Estimates of the regression coefficient based on Kendall's tau", JASA 63, 1968.
pub(crate) fn theil_sen(points: &[(f64, f64)]) -> Option<f64> {
    let mut slopes = Vec::with_capacity(points.len() * points.len().saturating_sub(1) / 2);
    for (i, (x1, y1)) in points.iter().enumerate() {
        for (x2, y2) in &points[i + 1..] {
            if (x2 - x1).abs() > f64::EPSILON {
                slopes.push((y2 - y1) / (x2 - x1));
            }
        }
    }
    median(&mut slopes)
}

/// The middle value; of an even number the mean of the two middle ones.
pub(crate) fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        n if n % 2 == 1 => Some(values[middle]),
        _ => Some(f64::midpoint(values[middle - 1], values[middle])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(slope: f64) -> Vec<(f64, f64)> {
        (0..300).map(|i| (f64::from(i), 100.0 + slope * f64::from(i))).collect()
    }

    #[test]
    fn a_line_has_its_slope() {
        assert!((theil_sen(&line(0.25)).unwrap() - 0.25).abs() < 1e-9);
    }

    #[test]
    fn a_fifth_of_wild_points_does_not_matter() {
        let mut points = line(0.0);
        points.iter_mut().step_by(5).for_each(|p| p.1 += 1e6);
        assert!(theil_sen(&points).unwrap().abs() < 1e-9);
    }

    #[test]
    fn a_step_early_on_is_no_growth() {
        let points: Vec<_> = (0..300).map(|i| (f64::from(i), if i < 50 { 0.0 } else { 70.0 })).collect();
        assert!(theil_sen(&points).unwrap().abs() < 1e-9);
    }

    #[test]
    fn nothing_can_be_said_of_one_moment() {
        assert_eq!(theil_sen(&[]), None);
        assert_eq!(theil_sen(&[(1.0, 2.0)]), None);
        assert_eq!(theil_sen(&[(1.0, 2.0), (1.0, 9.0)]), None);
    }
}
