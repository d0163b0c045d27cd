//! Group-relative advantages in plain `f32`.

use serde::{Deserialize, Serialize};

/// How rewards of a group become advantages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdvantageRule {
    /// `(r − mean) / (std + 1e-6)`, GRPO, arXiv:2402.03300 §4.1, with the population standard deviation.
    #[default]
    Grpo,
    /// `r − mean`, as Dr. GRPO advises, arXiv:2503.20783 §3.
    MeanOnly,
}

/// Advantages of the episodes of one group, in order; `None` when the group teaches nothing:
/// it has fewer than two episodes, or all rewards are equal.
///
/// ```
/// use starling_protocol::advantage::{AdvantageRule, group_advantages};
/// // python: r = numpy.array([1., 0., 0., 1.]); (r - r.mean()) / (r.std() + 1e-6)  ->  ±0.999998
/// let a = group_advantages(AdvantageRule::Grpo, &[1.0, 0.0, 0.0, 1.0]).unwrap();
/// assert!((a[0] - 0.999998).abs() < 1e-6 && (a[1] + 0.999998).abs() < 1e-6);
/// assert!(group_advantages(AdvantageRule::Grpo, &[1.0, 1.0]).is_none());
/// ```
#[must_use]
pub fn group_advantages(rule: AdvantageRule, rewards: &[f32]) -> Option<Vec<f32>> {
    let first = *rewards.first()?;
    if rewards.len() < 2 || rewards.iter().all(|r| r.to_bits() == first.to_bits()) {
        return None;
    }
    let n = rewards.len() as f64;
    let mean = rewards.iter().map(|r| f64::from(*r)).sum::<f64>() / n;
    let scale = match rule {
        AdvantageRule::Grpo => {
            let var = rewards.iter().map(|r| (f64::from(*r) - mean).powi(2)).sum::<f64>() / n;
            1.0 / (var.sqrt() + 1e-6)
        }
        AdvantageRule::MeanOnly => 1.0,
    };
    #[expect(clippy::cast_possible_truncation, reason = "advantages are f32 by definition")]
    Some(rewards.iter().map(|r| ((f64::from(*r) - mean) * scale) as f32).collect())
}
