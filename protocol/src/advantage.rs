//! Advantages of episodes, in plain `f32`.
//!
//! A group is the *episodes* of one task, however many timelines each has. A group of one, or one whose rewards are
//! all equal, has no advantages: it is counted, reported and not trained on, whatever the rule.

use serde::{Deserialize, Serialize};

/// How rewards become advantages. `r` is an episode's reward, `mean` and `std` (population) are taken over its group,
/// `mean_B` and `std_B` over the episodes of all groups of the batch that have advantages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdvantageRule {
    /// `(r − mean) / (std + 1e-6)`: GRPO, arXiv:2402.03300 §4.1.
    #[default]
    Grpo,
    /// `r − mean`: Dr. GRPO, arXiv:2503.20783 §3.
    MeanOnly,
    /// `r − mean of the other episodes = n/(n−1) · (r − mean)`: RLOO, arXiv:2402.14740 §3.2.
    LeaveOneOut,
    /// `(r − mean_B) / (std_B + 1e-6)`: REINFORCE++, arXiv:2501.03262, and PPO's whitened advantages. Differs: the
    /// statistics are over episodes, not tokens.
    Batch,
    /// `(r − mean) / (std_B(r − mean) + 1e-6)`: REINFORCE++ with the group's mean as its baseline, arXiv:2501.03262.
    GroupMeanBatchStd,
}

/// Added to a standard deviation.
const EPSILON: f64 = 1e-6;
/// Advantages are kept within this, so that a reward of any finite size cannot make a loss overflow: times the largest
/// ratio, `e^20`, it is 5e14.
pub const ADVANTAGE_MAX: f32 = 1e6;

/// Whether a group with these rewards has advantages: two episodes at least, and not all rewards equal.
#[must_use]
pub fn is_informative(rewards: &[f32]) -> bool {
    rewards.first().is_some_and(|first| rewards.iter().any(|r| (r - first).abs() > 0.0))
}

/// Advantages of the episodes of each group, in order; `None` for a group that [`is_informative`] denies.
///
/// The groups' order and the episodes' order within them do not matter but for rounding in the last bit. Every result
/// is finite and within ±[`ADVANTAGE_MAX`], if the rewards are finite.
///
/// ```
/// use starling_protocol::advantage::{AdvantageRule, batch_advantages};
/// // python: r = numpy.array([1., 0., 0., 1.]); (r - r.mean()) / (r.std() + 1e-6)  ->  ±0.999998
/// let a = batch_advantages(AdvantageRule::Grpo, &[vec![1.0, 0.0, 0.0, 1.0], vec![1.0, 1.0]]);
/// let first = a[0].as_ref().unwrap();
/// assert!((first[0] - 0.999998).abs() < 1e-6 && (first[1] + 0.999998).abs() < 1e-6);
/// assert!(a[1].is_none());
/// ```
#[must_use]
pub fn batch_advantages(rule: AdvantageRule, groups: &[Vec<f32>]) -> Vec<Option<Vec<f32>>> {
    let centred: Vec<Option<Vec<f64>>> = groups
        .iter()
        .map(|rewards| {
            let rewards: Vec<f64> = is_informative(rewards).then(|| rewards.iter().map(|r| f64::from(*r)).collect())?;
            let mean = if rule == AdvantageRule::Batch { 0.0 } else { mean(&rewards) };
            Some(rewards.into_iter().map(|r| r - mean).collect())
        })
        .collect();
    let all: Vec<f64> = centred.iter().flatten().flatten().copied().collect();
    let batch_mean = if rule == AdvantageRule::Batch { mean(&all) } else { 0.0 };
    let batch_scale = 1.0 / (deviation(&all, batch_mean) + EPSILON);
    let finish = |group: Vec<f64>| -> Vec<f32> {
        let n = group.len() as f64;
        let scale = match rule {
            AdvantageRule::Grpo => 1.0 / (deviation(&group, 0.0) + EPSILON),
            AdvantageRule::MeanOnly => 1.0,
            AdvantageRule::LeaveOneOut => n / (n - 1.0),
            AdvantageRule::Batch | AdvantageRule::GroupMeanBatchStd => batch_scale,
        };
        group.iter().map(|r| bounded((r - batch_mean) * scale)).collect()
    };
    centred.into_iter().map(|group| group.map(finish)).collect()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / (values.len().max(1)) as f64
}

/// Population standard deviation around `mean`.
fn deviation(values: &[f64], mean: f64) -> f64 {
    (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (values.len().max(1)) as f64).sqrt()
}

#[expect(clippy::cast_possible_truncation, reason = "advantages are f32 by definition")]
fn bounded(advantage: f64) -> f32 {
    (advantage as f32).clamp(-ADVANTAGE_MAX, ADVANTAGE_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: [AdvantageRule; 5] = [
        AdvantageRule::Grpo,
        AdvantageRule::MeanOnly,
        AdvantageRule::LeaveOneOut,
        AdvantageRule::Batch,
        AdvantageRule::GroupMeanBatchStd,
    ];

    /// Rewards of `n` episodes from a seed, in [-2, 2], some of them equal.
    fn rewards(seed: usize, n: usize) -> Vec<f32> {
        let hash = blake3::hash(&seed.to_le_bytes());
        hash.as_bytes().iter().take(n).map(|b| f32::from(b % 9) / 2.0 - 2.0).collect()
    }

    fn one(rule: AdvantageRule, rewards: &[f32]) -> Option<Vec<f32>> {
        batch_advantages(rule, &[rewards.to_vec()]).remove(0)
    }

    fn close(got: &[f32], want: &[f32]) {
        assert_eq!(got.len(), want.len());
        assert!(got.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-5), "{got:?}, expected {want:?}");
    }

    /// Python (numpy), r = [3, 1, 0, 0] and [2, 0]:
    ///   grpo:  (r - r.mean()) / r.std()                        mean 1, std 1.2247449
    ///   rloo:  (r.sum() - r) / (n - 1) is the others' mean
    ///   batch: all six have mean 1 and std 1.1547005
    ///   group_mean_batch_std: the centred six have std sqrt((4 + 0 + 1 + 1 + 1 + 1) / 6) = 1.1547005
    #[test]
    fn rules_match_numpy() {
        let groups = [vec![3.0, 1.0, 0.0, 0.0], vec![2.0, 0.0]];
        let of = |rule| batch_advantages(rule, &groups).into_iter().map(Option::unwrap).collect::<Vec<_>>();
        close(&of(AdvantageRule::Grpo)[0], &[1.632_992, 0.0, -0.816_496, -0.816_496]);
        close(&of(AdvantageRule::MeanOnly)[0], &[2.0, 0.0, -1.0, -1.0]);
        close(&of(AdvantageRule::LeaveOneOut)[0], &[8.0 / 3.0, 0.0, -4.0 / 3.0, -4.0 / 3.0]);
        close(&of(AdvantageRule::LeaveOneOut)[1], &[2.0, -2.0]);
        close(&of(AdvantageRule::Batch)[0], &[1.732_049, 0.0, -0.866_025, -0.866_025]);
        close(&of(AdvantageRule::Batch)[1], &[0.866_025, -0.866_025]);
        close(&of(AdvantageRule::GroupMeanBatchStd)[1], &[0.866_025, -0.866_025]);
    }

    #[test]
    fn a_group_of_one_and_equal_rewards_have_no_advantages_and_do_not_move_the_batch() {
        for rule in RULES {
            for dull in [vec![], vec![1.0], vec![0.5; 4], vec![0.0, -0.0]] {
                let with = batch_advantages(rule, &[vec![1.0, 0.0], dull.clone()]);
                assert_eq!(with[1], None, "{rule:?} {dull:?}");
                assert_eq!(with[0], one(rule, &[1.0, 0.0]), "{rule:?} {dull:?}");
            }
        }
    }

    #[test]
    fn advantages_follow_their_episodes_under_any_order_and_sum_to_zero() {
        for seed in 0..200 {
            let groups: Vec<Vec<f32>> = (0..3).map(|g| rewards(seed * 3 + g, 2 + (seed + g) % 7)).collect();
            for rule in RULES {
                let straight = batch_advantages(rule, &groups);
                let reversed: Vec<Vec<f32>> = groups.iter().rev().map(|g| g.iter().rev().copied().collect()).collect();
                let back = batch_advantages(rule, &reversed);
                let mut all = 0.0;
                for (a, b) in straight.iter().zip(back.iter().rev()) {
                    assert_eq!(a.is_some(), b.is_some(), "seed {seed} {rule:?}");
                    let (Some(a), Some(b)) = (a, b) else { continue };
                    close(a, &b.iter().rev().copied().collect::<Vec<_>>());
                    let sum: f32 = a.iter().sum();
                    all += sum;
                    assert!(
                        rule == AdvantageRule::Batch || sum.abs() < 1e-4,
                        "seed {seed} {rule:?}: group sums to {sum}"
                    );
                }
                assert!(all.abs() < 1e-3, "seed {seed} {rule:?}: batch sums to {all}");
            }
        }
    }

    #[test]
    fn rewards_of_any_finite_size_give_bounded_advantages() {
        for rule in RULES {
            for r in [vec![f32::MAX, f32::MIN, f32::MIN], vec![f32::MIN_POSITIVE, 0.0], vec![1e38, 1.0, 1.0]] {
                let a = one(rule, &r).unwrap();
                assert!(a.iter().all(|a| a.is_finite() && a.abs() <= ADVANTAGE_MAX), "{rule:?} {r:?}: {a:?}");
            }
        }
    }
}
