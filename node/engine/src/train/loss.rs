//! Losses as plain arithmetic on per-token log-probabilities: value and derivative.

/// What a batch optimises.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Objective {
    /// PPO-clip with given advantages (GRPO, arXiv:2402.03300; clip-higher as in DAPO, arXiv:2503.14476).
    PolicyGradient {
        /// Lower clip: the ratio counts down to `1 - clip_low`.
        clip_low: f32,
        /// Upper clip: the ratio counts up to `1 + clip_high`.
        clip_high: f32,
    },
    /// Cross-entropy of the trained tokens.
    CrossEntropy,
}

/// One trained token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct TokenTerm {
    /// Log-probability under the sampling policy.
    pub(crate) behaviour_logprob: f32,
    /// Its sample's advantage.
    pub(crate) advantage: f32,
}

/// Sums over trained tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct LossSums {
    /// Sum of per-token losses.
    pub(crate) loss: f64,
    /// Tokens whose gradient the clip cut off.
    pub(crate) clipped: u64,
    /// Sum of the k3 estimate `k - 1 - ln k`, `k = π/μ`.
    pub(crate) kl: f64,
    /// Sum of entropies in nats.
    pub(crate) entropy: f64,
    /// Trained tokens.
    pub(crate) tokens: u64,
}

impl LossSums {
    /// Adds another part's sums.
    pub(crate) fn add(&mut self, other: &Self) {
        self.loss += other.loss;
        self.clipped += other.clipped;
        self.kl += other.kl;
        self.entropy += other.entropy;
        self.tokens += other.tokens;
    }
}

/// Log-ratios are kept within this, as in verl: e^20 is finite in f32 and far outside any clip.
const LOG_RATIO_MAX: f32 = 20.0;

impl Objective {
    /// Adds one token's terms to `sums`; returns the derivative of its loss by its log-probability.
    ///
    /// Policy gradient: loss `-min(r A, clip(r, 1-ε_low, 1+ε_high) A)` with `r = exp(logprob - behaviour_logprob)`.
    pub(crate) fn token(self, logprob: f32, entropy: f32, term: TokenTerm, sums: &mut LossSums) -> f32 {
        sums.tokens += 1;
        sums.entropy += f64::from(entropy);
        match self {
            Self::CrossEntropy => {
                sums.loss -= f64::from(logprob);
                -1.0
            }
            Self::PolicyGradient { clip_low, clip_high } => {
                // Comparisons, not `clamp` on the sum: NaN has to stay NaN.
                let log_ratio = (logprob - term.behaviour_logprob).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX);
                let ratio = log_ratio.exp();
                let advantage = term.advantage;
                let bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high);
                let clipped = bounded * advantage < ratio * advantage;
                let surrogate = if clipped { bounded * advantage } else { ratio * advantage };
                sums.loss -= f64::from(surrogate);
                sums.clipped += u64::from(clipped);
                sums.kl += f64::from(log_ratio).exp_m1() - f64::from(log_ratio);
                if clipped { 0.0 } else { -ratio * advantage }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PPO: Objective = Objective::PolicyGradient { clip_low: 0.2, clip_high: 0.3 };

    fn run(logprob: f32, behaviour_logprob: f32, advantage: f32) -> (f64, f32, u64) {
        let mut sums = LossSums::default();
        let g = PPO.token(logprob, 1.0, TokenTerm { behaviour_logprob, advantage }, &mut sums);
        (sums.loss, g, sums.clipped)
    }

    #[test]
    fn on_policy_the_loss_is_minus_the_advantage() {
        assert_eq!(run(-1.5, -1.5, 2.0), (-2.0, -2.0, 0));
    }

    #[test]
    fn each_side_is_clipped_only_where_it_would_gain() {
        // r = e^0.5 = 1.6487: above 1.3. A > 0 is clipped, A < 0 is not.
        let (loss, g, clipped) = run(-1.0, -1.5, 1.0);
        assert!((loss + 1.3).abs() < 1e-6 && g.abs() < 1e-9 && clipped == 1);
        let (loss, g, clipped) = run(-1.0, -1.5, -1.0);
        assert!((loss - 1.648_721).abs() < 1e-5 && (g - 1.648_721).abs() < 1e-5 && clipped == 0);
        // r = e^-0.5 = 0.6065: below 0.8. A < 0 is clipped, A > 0 is not.
        let (loss, _, clipped) = run(-2.0, -1.5, -1.0);
        assert!((loss - 0.8).abs() < 1e-6 && clipped == 1);
        assert_eq!(run(-2.0, -1.5, 1.0).2, 0);
    }

    #[test]
    fn nan_stays_nan_and_far_ratios_stay_finite() {
        assert!(run(f32::NAN, -1.0, 1.0).0.is_nan());
        assert!(run(0.0, -300.0, -1.0).0.is_finite());
    }
}
