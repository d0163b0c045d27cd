//! How a step's batch becomes a loss: the words of `[algorithm]` in `job.toml`, their formulas, and the presets.
//!
//! Per trained token, with `μ` the sampling policy, `π_old` the policy that the ratio is taken against, `π` the policy
//! that is trained, and `A` the advantage of the token's episode:
//!
//! ```text
//! loss = Σ weight · ( correction · objective(π/π_old, A) + β · KL(π, π_ref) + τ · ln²(π/μ) − c · entropy )
//!        aggregation  stale data   clip, gspo, cispo, …    kl               mismatch_penalty entropy_bonus
//! ```
//!
//! A *sequence* here is an episode: the trained tokens of all its timelines, so that an episode that was split weighs
//! as much as one that was not. Corrections weigh the objective only and carry no gradient; a token that one of them
//! drops still counts in the aggregation's denominators. `starling-engine` computes the value and the derivative.

use crate::advantage::AdvantageRule;
use crate::job::{CollectionRule, JobError, need};
use serde::{Deserialize, Serialize};

/// The term that follows the advantage. `r = π/π_old`, `k = π/μ`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Objective {
    /// `−min(r·A, clip(r, 1 − low, 1 + high)·A)`: PPO-clip, arXiv:1707.06347 §3, with DAPO's two bounds,
    /// arXiv:2503.14476 §3.1. With `ratio_max` two-sided: `−min(min(r, ratio_max)·A, clip(r, …)·A)`, which also bounds
    /// the loss of a bad token that became likely: INTELLECT-2, arXiv:2505.07291 §3.4, `ratio_max` 4 there.
    Clip {
        /// The ratio counts down to `1 − low`; in (0, 1).
        #[serde(default = "clip_default")]
        low: f32,
        /// The ratio counts up to `1 + high`.
        #[serde(default = "clip_default")]
        high: f32,
        /// Above `1 + high`.
        #[serde(default)]
        ratio_max: Option<f32>,
    },
    /// PPO-clip on the sequence's ratio `s = exp(mean ln r)`: GSPO, arXiv:2507.18071 §4.1.
    Gspo {
        /// `s` counts down to `1 − low`.
        #[serde(default = "gspo_low_default")]
        low: f32,
        /// `s` counts up to `1 + high`.
        #[serde(default = "gspo_high_default")]
        high: f32,
    },
    /// `−sg(clip(k, ratio_min, ratio_max))·A·ln π`: CISPO, arXiv:2506.13585 §3.1. Every token keeps a gradient.
    Cispo {
        /// Lower clip; 0, none, in the paper's runs.
        #[serde(default)]
        ratio_min: f32,
        /// Upper clip `1 + ε_high`; the paper names no value, ScaleRL (arXiv:2510.13786) found 4 to 8 alike.
        #[serde(default = "cispo_max_default")]
        ratio_max: f32,
    },
    /// `−k·A`: importance sampling without a bound; to go with a mask.
    Ratio,
    /// `−A·ln π`: REINFORCE, as RLOO takes it (arXiv:2402.14740). Assumes data of the trained policy.
    Reinforce,
    /// `−ln π` on the episodes with a positive advantage: cross-entropy on the better answers of each group, RAFT,
    /// arXiv:2304.06767.
    Supervised,
}

fn clip_default() -> f32 {
    0.2
}
fn gspo_low_default() -> f32 {
    3e-4
}
fn gspo_high_default() -> f32 {
    4e-4
}
fn cispo_max_default() -> f32 {
    5.0
}

/// What stands for `π_old`, the policy whose neighbourhood the ratio is kept in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OldPolicy {
    /// `μ`: the ratio also counts how much older the sampler was. Costs nothing.
    #[default]
    Sampler,
    /// The weights at the step's start, recomputed: one forward pass more where a step has several minibatches.
    Recomputed,
    /// `ln π_old ≈ ln μ + α·(ln π − ln μ)`, `α = d/(d + 1)` for a token that is `d` versions old, as `π` is on its way to
    /// the next version: the proximal shortcut, A-3PO, arXiv:2512.06547. Costs nothing.
    Shortcut,
}

/// A range of ratios.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bounds {
    /// Lowest that is kept.
    pub low: f32,
    /// Highest that is kept.
    pub high: f32,
}

/// Whether a correction looks at a token or at its whole sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Each token's own ratio.
    #[default]
    Token,
    /// The product of its sequence's ratios.
    Sequence,
}

/// A weight against data that an older policy, or another program, sampled. `ρ = π_old/μ`; never a gradient.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Correction {
    /// 1.
    #[default]
    None,
    /// `min(ρ, cap)`: truncated importance sampling, Yao et al. 2025 ("Your efficient RL framework secretly brings you
    /// off-policy RL training"); cap 2 in verl and slime.
    Tis {
        /// Largest weight.
        #[serde(default = "tis_cap_default")]
        cap: f32,
        /// Of a token or a sequence.
        #[serde(default)]
        level: Level,
    },
    /// `ρ` where `low ≤ ρ ≤ high`, else 0: IcePop (Ring-1T, arXiv:2510.18855); 0.5 and 5 there.
    IcePop {
        /// Lowest ratio that trains.
        #[serde(default = "ice_pop_low_default")]
        low: f32,
        /// Highest ratio that trains.
        #[serde(default = "ice_pop_high_default")]
        high: f32,
    },
    /// `ρ`, and 0 above `cap`: decoupled PPO, Hilton et al. arXiv:2110.00641, as AReaL runs it, arXiv:2505.24298 §5.2.
    Decoupled {
        /// Tokens with a higher ratio do not train.
        #[serde(default = "decoupled_cap_default")]
        cap: f32,
    },
    /// 0 where `A > 0` and `π − μ > threshold`, or `A < 0` and `μ − π > threshold`, else 1: the binary total-variation
    /// mask of DPPO, arXiv:2602.04879. It leaves out what has already moved far the way that the advantage pushes.
    DppoMask {
        /// Largest difference of probabilities, in (0, 1].
        #[serde(default = "dppo_default")]
        threshold: f32,
    },
}

fn tis_cap_default() -> f32 {
    2.0
}
fn ice_pop_low_default() -> f32 {
    0.5
}
fn ice_pop_high_default() -> f32 {
    5.0
}
fn decoupled_cap_default() -> f32 {
    5.0
}
fn dppo_default() -> f32 {
    0.2
}

/// Weight of a token. `N` trained tokens, `E` sequences with trained tokens, `T` of them in the token's own sequence; of
/// one minibatch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Aggregation {
    /// `1/N`: every token alike, DAPO, arXiv:2503.14476 §3.3.
    #[default]
    TokenMean,
    /// `1/(E·T)`: every sequence alike, GRPO, arXiv:2402.03300 eq. 3, and GSPO.
    SequenceMean,
    /// `1/(E·divisor)`: sums of tokens, over a constant: Dr. GRPO, arXiv:2503.20783 §3.2, and RLOO with 1.
    SequenceSum {
        /// A constant, such as the most tokens of an answer.
        divisor: f32,
    },
}

/// An estimate of the divergence from the reference policy, after Schulman 2020 ("Approximating KL divergence"); with
/// `x = ln π_ref − ln π`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// `−x`: unbiased; its own gradient is zero in the mean, so as a loss it is noise and only the number is of use.
    K1,
    /// `x²/2`: on data of the trained policy, its gradient is that of the divergence.
    K2,
    /// `eˣ − x − 1`: unbiased, never negative, GRPO's.
    #[default]
    K3,
}

/// A pull towards the model that the job started from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ReferenceKl {
    /// Which estimate.
    pub estimator: KlEstimator,
    /// `β`. Above 0 the leader holds the job's first weights beside the current ones and runs them forward over each
    /// batch; 0 does neither.
    pub coefficient: f32,
}

/// Everything between a batch of rewards and the gradient.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AlgorithmSpec {
    /// Where the others' defaults came from; for people.
    pub preset: Preset,
    /// How rewards become advantages.
    pub advantage: AdvantageRule,
    /// The policy's term.
    pub objective: Objective,
    /// What the ratio is taken against.
    pub old_policy: OldPolicy,
    /// Weight against stale data.
    pub correction: Correction,
    /// Sequences with any token's `ρ` (at the step's start) outside do not train: 1e-4 and 100 in SkyRL.
    pub outlier_guard: Option<Bounds>,
    /// Weights of tokens.
    pub aggregation: Aggregation,
    /// Pull towards the job's first weights.
    pub kl: ReferenceKl,
    /// `τ` of `τ·ln²k` on every trained token, `k = π/μ`; prime-rl's 1e-3 goes with the DPPO mask.
    pub mismatch_penalty: f32,
    /// `c` of `−c·H`, H the entropy of the distribution that the token was drawn from.
    pub entropy_bonus: f32,
}

impl Default for AlgorithmSpec {
    fn default() -> Self {
        Preset::Grpo.spec(256)
    }
}

/// Published algorithms by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Preset {
    /// Group-normalised advantages, PPO-clip against the sampler, arXiv:2402.03300. Differs: every token weighs alike, and
    /// no KL.
    #[default]
    Grpo,
    /// GRPO without the two biases, arXiv:2503.20783: no standard deviation, no length normalisation.
    DrGrpo,
    /// Leave-one-out baseline and REINFORCE, arXiv:2402.14740.
    Rloo,
    /// Batch-normalised rewards, PPO-clip, k2, arXiv:2501.03262. Differs: the KL is in the loss and not in the reward,
    /// which has the same gradient, token by token.
    #[serde(alias = "reinforce++")]
    ReinforcePlusPlus,
    /// PPO-clip against the step's first weights, arXiv:1707.06347. Differs: the batch's mean is the baseline, not a
    /// critic.
    Ppo,
    /// Clip-higher, dynamic sampling, token mean, arXiv:2503.14476.
    Dapo,
    /// Sequence ratios, arXiv:2507.18071.
    Gspo,
    /// Clipped weights, arXiv:2506.13585.
    Cispo,
    /// PPO-clip against the step's first weights, weighted back to the sampler, arXiv:2505.24298.
    DecoupledPpo,
    /// A mask on differences of probabilities, arXiv:2602.04879, with the penalty of prime-rl.
    Dppo,
    /// Cross-entropy on the better answers, arXiv:2304.06767.
    Supervised,
}

impl Preset {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::Grpo,
        Self::DrGrpo,
        Self::Rloo,
        Self::ReinforcePlusPlus,
        Self::Ppo,
        Self::Dapo,
        Self::Gspo,
        Self::Cispo,
        Self::DecoupledPpo,
        Self::Dppo,
        Self::Supervised,
    ];

    /// What the name stands for; `max_tokens` is the job's longest answer, Dr. GRPO's constant.
    #[must_use]
    pub fn spec(self, max_tokens: u32) -> AlgorithmSpec {
        let clip = |low, high| Objective::Clip { low, high, ratio_max: None };
        let grpo = AlgorithmSpec {
            preset: self,
            advantage: AdvantageRule::Grpo,
            objective: clip(0.2, 0.2),
            old_policy: OldPolicy::Sampler,
            correction: Correction::None,
            outlier_guard: None,
            aggregation: Aggregation::TokenMean,
            kl: ReferenceKl::default(),
            mismatch_penalty: 0.0,
            entropy_bonus: 0.0,
        };
        match self {
            Self::Grpo => grpo,
            Self::DrGrpo => AlgorithmSpec {
                advantage: AdvantageRule::MeanOnly,
                #[expect(clippy::cast_precision_loss, reason = "a scale")]
                aggregation: Aggregation::SequenceSum { divisor: max_tokens.max(1) as f32 },
                ..grpo
            },
            Self::Rloo => AlgorithmSpec {
                advantage: AdvantageRule::LeaveOneOut,
                objective: Objective::Reinforce,
                aggregation: Aggregation::SequenceSum { divisor: 1.0 },
                ..grpo
            },
            Self::ReinforcePlusPlus => AlgorithmSpec {
                advantage: AdvantageRule::Batch,
                kl: ReferenceKl { estimator: KlEstimator::K2, coefficient: 1e-3 },
                ..grpo
            },
            Self::Ppo => AlgorithmSpec { advantage: AdvantageRule::Batch, old_policy: OldPolicy::Recomputed, ..grpo },
            Self::Dapo => AlgorithmSpec { objective: clip(0.2, 0.28), ..grpo },
            Self::Gspo => AlgorithmSpec {
                objective: Objective::Gspo { low: gspo_low_default(), high: gspo_high_default() },
                old_policy: OldPolicy::Recomputed,
                aggregation: Aggregation::SequenceMean,
                ..grpo
            },
            Self::Cispo => {
                AlgorithmSpec { objective: Objective::Cispo { ratio_min: 0.0, ratio_max: cispo_max_default() }, ..grpo }
            }
            Self::DecoupledPpo => AlgorithmSpec {
                old_policy: OldPolicy::Recomputed,
                correction: Correction::Decoupled { cap: decoupled_cap_default() },
                ..grpo
            },
            Self::Dppo => AlgorithmSpec {
                advantage: AdvantageRule::MeanOnly,
                objective: Objective::Ratio,
                correction: Correction::DppoMask { threshold: dppo_default() },
                mismatch_penalty: 1e-3,
                ..grpo
            },
            Self::Supervised => AlgorithmSpec { objective: Objective::Supervised, ..grpo },
        }
    }

    /// The collection rule of a job that names none: DAPO's dynamic sampling, else whole groups.
    #[must_use]
    pub fn collection(self) -> CollectionRule {
        if self == Self::Dapo { CollectionRule::InformativeGroups } else { CollectionRule::Groups }
    }
}

impl AlgorithmSpec {
    /// Whether the trainer needs the job's first weights.
    #[must_use]
    pub fn needs_reference(&self) -> bool {
        self.kl.coefficient > 0.0
    }

    /// Checks every number, and that the parts go together.
    ///
    /// # Errors
    /// [`JobError`] for the first field that cannot be.
    pub fn validate(&self) -> Result<(), JobError> {
        let above_0 = |v: f32| v > 0.0 && v.is_finite();
        match self.objective {
            Objective::Clip { low, high, ratio_max } => {
                need(low > 0.0 && low < 1.0, "algorithm.objective.clip.low", "above 0, below 1", low)?;
                need(above_0(high), "algorithm.objective.clip.high", "a finite number above 0", high)?;
                if let Some(max) = ratio_max {
                    let at = "algorithm.objective.clip.ratio_max";
                    need(max > 1.0 + high && max.is_finite(), at, "a finite number above 1 + high", max)?;
                }
            }
            Objective::Gspo { low, high } => {
                need(low > 0.0 && low < 1.0, "algorithm.objective.gspo.low", "above 0, below 1", low)?;
                need(above_0(high), "algorithm.objective.gspo.high", "a finite number above 0", high)?;
            }
            Objective::Cispo { ratio_min, ratio_max } => {
                need((0.0..=1.0).contains(&ratio_min), "algorithm.objective.cispo.ratio_min", "0 to 1", ratio_min)?;
                let ok = ratio_max >= 1.0 && ratio_max.is_finite();
                need(ok, "algorithm.objective.cispo.ratio_max", "a finite number of at least 1", ratio_max)?;
            }
            Objective::Ratio | Objective::Reinforce | Objective::Supervised => {}
        }
        match self.correction {
            Correction::None => {}
            Correction::Tis { cap, .. } => {
                need(above_0(cap), "algorithm.correction.tis.cap", "a finite number above 0", cap)?;
            }
            Correction::IcePop { low, high } => {
                let ok = low >= 0.0 && high > low && high.is_finite();
                need(ok, "algorithm.correction.ice_pop", "0 ≤ low < high, finite", format!("{low} and {high}"))?;
            }
            Correction::Decoupled { cap } => {
                need(above_0(cap), "algorithm.correction.decoupled.cap", "a finite number above 0", cap)?;
            }
            Correction::DppoMask { threshold } => {
                let ok = threshold > 0.0 && threshold <= 1.0;
                need(ok, "algorithm.correction.dppo_mask.threshold", "above 0, at most 1", threshold)?;
            }
        }
        if let Some(Bounds { low, high }) = self.outlier_guard {
            let ok = (0.0..1.0).contains(&low) && high > 1.0 && high.is_finite();
            need(ok, "algorithm.outlier_guard", "0 ≤ low < 1 < high, finite", format!("{low} and {high}"))?;
        }
        if let Aggregation::SequenceSum { divisor } = self.aggregation {
            need(above_0(divisor), "algorithm.aggregation.sequence_sum.divisor", "a finite number above 0", divisor)?;
        }
        let unit = |v: f32| (0.0..=10.0).contains(&v);
        need(unit(self.kl.coefficient), "algorithm.kl.coefficient", "0 to 10", self.kl.coefficient)?;
        need(unit(self.mismatch_penalty), "algorithm.mismatch_penalty", "0 to 10", self.mismatch_penalty)?;
        need(unit(self.entropy_bonus), "algorithm.entropy_bonus", "0 to 10", self.entropy_bonus)?;
        self.validate_together()
    }

    /// Combinations that would silently do nothing, or something else than their names say.
    fn validate_together(&self) -> Result<(), JobError> {
        let weighs_back = matches!(
            self.correction,
            Correction::Tis { .. } | Correction::IcePop { .. } | Correction::Decoupled { .. }
        );
        need(
            !(weighs_back && self.old_policy == OldPolicy::Sampler),
            "algorithm.correction",
            "`none` or `dppo_mask` with old_policy = \"sampler\", against which the others are 1; or another old_policy",
            self.correction.name(),
        )?;
        let uses_k = matches!(self.objective, Objective::Cispo { .. } | Objective::Ratio);
        need(
            !(weighs_back && uses_k),
            "algorithm.correction",
            "`none` or `dppo_mask` with the objectives cispo and ratio, which hold π/μ already",
            self.correction.name(),
        )?;
        let sequence = self.objective_is_sequence()
            || self.outlier_guard.is_some()
            || matches!(self.correction, Correction::Tis { level: Level::Sequence, .. });
        need(
            !(sequence && self.old_policy == OldPolicy::Shortcut),
            "algorithm.old_policy",
            "`recomputed` with gspo, outlier_guard or tis of a sequence, which need the pass that `shortcut` saves",
            "shortcut",
        )?;
        let plain = self.correction == Correction::None && self.outlier_guard.is_none();
        need(
            self.objective != Objective::Supervised || plain,
            "algorithm.objective",
            "another than `supervised` with a correction or an outlier_guard: it looks at no ratio",
            "supervised",
        )
    }

    fn objective_is_sequence(&self) -> bool {
        matches!(self.objective, Objective::Gspo { .. })
    }
}

impl Correction {
    fn name(&self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Tis { .. } => "tis",
            Self::IcePop { .. } => "ice_pop",
            Self::Decoupled { .. } => "decoupled",
            Self::DppoMask { .. } => "dppo_mask",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_is_valid_and_survives_the_log() {
        for preset in Preset::ALL {
            let spec = preset.spec(64);
            spec.validate().unwrap();
            assert_eq!(spec.preset, preset);
            let bytes = crate::codec::encode(&spec);
            assert_eq!(crate::codec::decode::<AlgorithmSpec>("spec", &bytes, 4096).unwrap(), spec);
        }
    }

    #[test]
    fn combinations_that_cannot_work_are_refused_by_name() {
        let base = AlgorithmSpec::default();
        let tis = Correction::Tis { cap: 2.0, level: Level::Token };
        let field = |change: &dyn Fn(&mut AlgorithmSpec)| {
            let mut spec = base.clone();
            change(&mut spec);
            spec.validate().unwrap_err().field
        };
        assert_eq!(field(&|s| s.correction = tis), "algorithm.correction");
        assert_eq!(
            field(&|s| {
                (s.correction, s.old_policy) = (tis, OldPolicy::Recomputed);
                s.objective = Objective::Ratio;
            }),
            "algorithm.correction"
        );
        assert_eq!(
            field(&|s| {
                s.old_policy = OldPolicy::Shortcut;
                s.outlier_guard = Some(Bounds { low: 1e-4, high: 100.0 });
            }),
            "algorithm.old_policy"
        );
        assert_eq!(
            field(&|s| {
                s.objective = Objective::Supervised;
                s.correction = Correction::DppoMask { threshold: 0.2 };
            }),
            "algorithm.objective"
        );
        assert_eq!(
            field(&|s| s.objective = Objective::Clip { low: 0.2, high: 0.3, ratio_max: Some(1.3) }),
            "algorithm.objective.clip.ratio_max"
        );
        assert_eq!(field(&|s| s.entropy_bonus = f32::NAN), "algorithm.entropy_bonus");
        assert_eq!(
            field(&|s| s.aggregation = Aggregation::SequenceSum { divisor: 0.0 }),
            "algorithm.aggregation.sequence_sum.divisor"
        );
    }
}
