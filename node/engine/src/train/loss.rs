//! Losses as plain arithmetic on per-token log-probabilities: value and derivatives.
//!
//! The formulas, their sources and their parameters stand in [`starling_protocol::algorithm`]; this file computes them.

use std::ops::Range;

use starling_protocol::algorithm::{
    Aggregation, AlgorithmSpec, Correction, KlEstimator, Level, Objective, OldPolicy, Preset,
};

/// What a batch optimises.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Loss {
    /// The parts of the loss.
    pub(crate) spec: AlgorithmSpec,
    /// The samples say what the sampler's log-probabilities were. Without them nothing is known of ratios.
    pub(crate) has_behaviour: bool,
}

/// One trained token. What a loss does not use keeps its default.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct TokenTerm {
    /// `ln μ`: log-probability under the sampling policy.
    pub(crate) behaviour_logprob: f32,
    /// Its episode's advantage.
    pub(crate) advantage: f32,
    /// `d/(d + 1)` of a token that is `d` versions old.
    pub(crate) shortcut: f32,
    /// `ln π_old` by recomputing; `None`: the weights are those of the step's start, so it is `ln π`.
    pub(crate) old_logprob: Option<f32>,
    /// `ln π_ref`.
    pub(crate) reference_logprob: f32,
    /// GSPO: mean of its sequence's `ln r`.
    pub(crate) sequence_log_ratio: f32,
    /// Weight of its whole sequence by a correction or the outlier guard.
    pub(crate) sequence_weight: f32,
    /// Weight by the aggregation, times the minibatch's trained tokens: exactly 1 for the mean over tokens.
    pub(crate) weight: f32,
}

impl Default for TokenTerm {
    fn default() -> Self {
        Self {
            behaviour_logprob: 0.0,
            advantage: 0.0,
            shortcut: 0.0,
            old_logprob: None,
            reference_logprob: 0.0,
            sequence_log_ratio: 0.0,
            sequence_weight: 1.0,
            weight: 1.0,
        }
    }
}

/// Sums over trained tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct LossSums {
    /// Sum of weighted per-token losses.
    pub(crate) loss: f64,
    /// Tokens whose gradient a clip cut off or down.
    pub(crate) clipped: u64,
    /// Tokens with weight 0 by a correction or the outlier guard.
    pub(crate) masked: u64,
    /// Sum of the corrections' weights.
    pub(crate) correction: f64,
    /// Tokens with a log-ratio beyond ±20.
    pub(crate) out_of_range: u64,
    /// Sum of the k3 estimate `k - 1 - ln k`, `k = π/μ`.
    pub(crate) kl: f64,
    /// Sum of the job's own estimate of the divergence from the reference.
    pub(crate) reference_kl: f64,
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
        self.masked += other.masked;
        self.correction += other.correction;
        self.out_of_range += other.out_of_range;
        self.kl += other.kl;
        self.reference_kl += other.reference_kl;
        self.entropy += other.entropy;
        self.tokens += other.tokens;
    }

    /// Whether every sum is a number.
    pub(crate) fn is_finite(&self) -> bool {
        [self.loss, self.correction, self.kl, self.reference_kl, self.entropy].iter().all(|s| s.is_finite())
    }
}

/// Log-ratios are kept within this, as in verl: e^20 is finite in f32 and far outside any clip.
const LOG_RATIO_MAX: f32 = 20.0;

/// Log-ratios of one token, and whether any had to be cut.
struct Ratios(bool);

impl Ratios {
    /// `to - from`, within ±20. NaN stays NaN.
    fn log(&mut self, to: f32, from: f32) -> f32 {
        let x = to - from;
        self.0 |= x.abs() > LOG_RATIO_MAX;
        x.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    }
}

impl Loss {
    /// Cross-entropy on every trained token, whatever the advantages.
    pub(crate) fn cross_entropy() -> Self {
        Self { spec: Preset::Supervised.spec(1), has_behaviour: false }
    }

    /// Whether `ln π_old` has to be recomputed before the first of `minibatches` updates.
    pub(crate) fn needs_old_pass(&self, minibatches: usize) -> bool {
        let s = &self.spec;
        let of_sequence = matches!(s.correction, Correction::Tis { level: Level::Sequence, .. });
        let uses_old = matches!(s.objective, Objective::Clip { .. } | Objective::Gspo { .. })
            || matches!(
                s.correction,
                Correction::Tis { .. } | Correction::IcePop { .. } | Correction::Decoupled { .. }
            );
        s.outlier_guard.is_some()
            || of_sequence
            || (s.old_policy == OldPolicy::Recomputed && minibatches > 1 && uses_old)
    }

    /// Whether an update needs the current log-probabilities of whole sequences before any gradient. `moved`: the
    /// weights are no longer those of the step's start. The ratio to those is 1 until then.
    pub(crate) fn needs_current_pass(&self, moved: bool) -> bool {
        matches!(self.spec.objective, Objective::Gspo { .. }) && (moved || self.spec.old_policy == OldPolicy::Sampler)
    }

    /// Weights of whole sequences, from the log-probabilities at the step's start. `sequences` are ranges of samples.
    pub(crate) fn weigh_sequences(&self, sequences: &[Range<usize>], terms: &mut [Vec<TokenTerm>]) {
        for sequence in sequences {
            let mut log_product = 0f32;
            let mut outlier = false;
            for t in terms[sequence.clone()].iter().flatten() {
                let log_rho = Ratios(false).log(t.old_logprob.unwrap_or(t.behaviour_logprob), t.behaviour_logprob);
                log_product += log_rho;
                outlier |= self.spec.outlier_guard.is_some_and(|b| !(b.low..=b.high).contains(&log_rho.exp()));
            }
            let product = log_product.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp();
            let weight = match self.spec.correction {
                _ if outlier => 0.0,
                Correction::Tis { cap, level: Level::Sequence } => product.min(cap),
                _ => 1.0,
            };
            terms[sequence.clone()].iter_mut().flatten().for_each(|t| t.sequence_weight = weight);
        }
    }

    /// GSPO's ratio of each sequence, from the current log-probabilities of every term.
    #[expect(clippy::cast_precision_loss, reason = "token counts are below 2^24")]
    pub(crate) fn rate_sequences(
        &self,
        sequences: &[Range<usize>],
        terms: &mut [Vec<TokenTerm>],
        current: &[Vec<f32>],
    ) {
        for sequence in sequences {
            let pairs = terms[sequence.clone()].iter().flatten().zip(current[sequence.clone()].iter().flatten());
            let (sum, n) = pairs.fold((0f64, 0usize), |(sum, n), (t, &logprob)| {
                (sum + f64::from(logprob - self.old_logprob(t, logprob)), n + 1)
            });
            #[expect(clippy::cast_possible_truncation, reason = "a mean of f32 values")]
            let mean = (sum / n.max(1) as f64) as f32;
            terms[sequence.clone()].iter_mut().flatten().for_each(|t| t.sequence_log_ratio = mean);
        }
    }

    /// Sets the weights of one minibatch's terms by the aggregation.
    #[expect(clippy::cast_precision_loss, reason = "token counts are below 2^24")]
    pub(crate) fn aggregate(&self, sequences: &[Range<usize>], terms: &mut [Vec<TokenTerm>]) {
        let count = |r: &Range<usize>| terms[r.clone()].iter().map(Vec::len).sum::<usize>();
        let lengths: Vec<usize> = sequences.iter().map(count).collect();
        let tokens = lengths.iter().sum::<usize>() as f32;
        let trained = lengths.iter().filter(|l| **l > 0).count() as f32;
        for (sequence, length) in sequences.iter().zip(lengths) {
            let weight = match self.spec.aggregation {
                Aggregation::TokenMean => 1.0,
                Aggregation::SequenceMean => tokens / (trained * length as f32),
                Aggregation::SequenceSum { divisor } => tokens / (trained * divisor),
            };
            terms[sequence.clone()].iter_mut().flatten().for_each(|t| t.weight = weight);
        }
    }

    /// `ln π_old` of a token whose log-probability is `logprob` now; a constant for the gradient.
    fn old_logprob(&self, term: &TokenTerm, logprob: f32) -> f32 {
        let behaviour = term.behaviour_logprob;
        match self.spec.old_policy {
            OldPolicy::Sampler => behaviour,
            OldPolicy::Recomputed => term.old_logprob.unwrap_or(logprob),
            OldPolicy::Shortcut => behaviour + term.shortcut * (logprob - behaviour),
        }
    }

    /// Adds one token's terms to `sums`; returns the derivatives of its weighted loss by its log-probability and by the
    /// entropy of its distribution.
    pub(crate) fn token(&self, logprob: f32, entropy: f32, term: &TokenTerm, sums: &mut LossSums) -> [f32; 2] {
        let s = &self.spec;
        let mut ratios = Ratios(false);
        sums.tokens += 1;
        sums.entropy += f64::from(entropy);
        let mut log_k = 0.0;
        if self.has_behaviour {
            log_k = ratios.log(logprob, term.behaviour_logprob);
            sums.kl += f64::from(log_k).exp_m1() - f64::from(log_k);
        }
        let (mut value, mut slope) = self.objective(logprob, log_k, term, &mut ratios, sums);
        let correction = self.correction(logprob, term, &mut ratios) * term.sequence_weight;
        sums.correction += f64::from(correction);
        sums.masked += u64::from(correction == 0.0);
        value *= correction;
        slope *= correction;
        if s.kl.coefficient > 0.0 {
            let x = ratios.log(term.reference_logprob, logprob);
            let (kl, by_logprob) = match s.kl.estimator {
                KlEstimator::K1 => (-x, 1.0),
                KlEstimator::K2 => (0.5 * x * x, -x),
                KlEstimator::K3 => (x.exp_m1() - x, -x.exp_m1()),
            };
            sums.reference_kl += f64::from(kl);
            value += s.kl.coefficient * kl;
            slope += s.kl.coefficient * by_logprob;
        }
        if s.mismatch_penalty > 0.0 {
            value += s.mismatch_penalty * log_k * log_k;
            slope += 2.0 * s.mismatch_penalty * log_k;
        }
        let mut by_entropy = 0.0;
        if s.entropy_bonus > 0.0 {
            value -= s.entropy_bonus * entropy;
            by_entropy = -s.entropy_bonus * term.weight;
        }
        sums.loss += f64::from(value) * f64::from(term.weight);
        sums.out_of_range += u64::from(ratios.0);
        [slope * term.weight, by_entropy]
    }

    /// Value and slope of the policy's term.
    fn objective(
        &self,
        logprob: f32,
        log_k: f32,
        term: &TokenTerm,
        ratios: &mut Ratios,
        sums: &mut LossSums,
    ) -> (f32, f32) {
        let advantage = term.advantage;
        let clipped = |ratio: f32, low: f32, high: f32, most: f32| {
            let bounded = ratio.clamp(1.0 - low, 1.0 + high) * advantage;
            let free = if ratio > most { most * advantage } else { ratio * advantage };
            // Comparisons, not `min`: NaN has to stay NaN.
            let cut = bounded < free;
            (if cut { bounded } else { free }, cut || ratio > most)
        };
        let (gain, by_logprob, cut) = match self.spec.objective {
            Objective::Clip { low, high, ratio_max } => {
                let ratio = ratios.log(logprob, self.old_logprob(term, logprob)).exp();
                let (gain, cut) = clipped(ratio, low, high, ratio_max.unwrap_or(f32::INFINITY));
                (gain, ratio * advantage, cut)
            }
            Objective::Gspo { low, high } => {
                let ratio = ratios.log(term.sequence_log_ratio, 0.0).exp();
                let (gain, cut) = clipped(ratio, low, high, f32::INFINITY);
                (gain, ratio * advantage, cut)
            }
            Objective::Cispo { ratio_min, ratio_max } => {
                let k = log_k.exp();
                let weight = k.clamp(ratio_min, ratio_max) * advantage;
                sums.clipped += u64::from(k < ratio_min || k > ratio_max);
                (weight * logprob, weight, false)
            }
            Objective::Ratio => (log_k.exp() * advantage, log_k.exp() * advantage, false),
            Objective::Reinforce => (advantage * logprob, advantage, false),
            Objective::Supervised => (logprob, 1.0, false),
        };
        sums.clipped += u64::from(cut);
        (-gain, if cut { 0.0 } else { -by_logprob })
    }

    /// The weight against stale data; a constant for the gradient.
    fn correction(&self, logprob: f32, term: &TokenTerm, ratios: &mut Ratios) -> f32 {
        let mut rho = || ratios.log(self.old_logprob(term, logprob), term.behaviour_logprob).exp();
        match self.spec.correction {
            Correction::None | Correction::Tis { level: Level::Sequence, .. } => 1.0,
            Correction::Tis { cap, level: Level::Token } => rho().min(cap),
            Correction::IcePop { low, high } => within(rho(), low, high),
            Correction::Decoupled { cap } => within(rho(), 0.0, cap),
            Correction::DppoMask { threshold } => {
                let moved = logprob.exp() - term.behaviour_logprob.exp();
                let too_far =
                    (term.advantage > 0.0 && moved > threshold) || (term.advantage < 0.0 && moved < -threshold);
                if too_far { 0.0 } else { 1.0 }
            }
        }
    }
}

/// `ratio` from `low` to `high`, else 0.
fn within(ratio: f32, low: f32, high: f32) -> f32 {
    if (low..=high).contains(&ratio) { ratio } else { 0.0 }
}

#[cfg(test)]
#[path = "loss_tests.rs"]
mod tests;
