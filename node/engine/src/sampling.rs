//! Drawing the next token from logits: temperature, top-k, top-p, with a generator of the request's own.

use rand::{Rng as _, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::error::EngineError;
use crate::kernels::logprob::{log_sum_exp, logprob_entropy};
use crate::kernels::math::{exp, max_or_nan};
use crate::kernels::simd_fn;

/// How the tokens of one request are drawn.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Logits are divided by this; 0 = always the most likely token. Finite and at least 0.
    pub temperature: f32,
    /// Only the most likely tokens whose probabilities add up to this are drawn; in (0, 1], 1 = off.
    pub top_p: f32,
    /// Only this many most likely tokens are drawn; 0 = off.
    pub top_k: u32,
    /// Seed of this request's generator (ChaCha8): the same seed, prompt and weights give the same tokens.
    pub seed: u64,
    /// Tokens drawn under this seed before the prompt's end: the generator starts behind their draws, so that an answer
    /// that was cut off and is continued here gets the tokens that it would have got.
    pub drawn: u32,
    /// Most tokens to generate, at least 1.
    pub max_tokens: u32,
    /// Generation ends with the first of these, which is emitted.
    pub stop_token_ids: Vec<u32>,
    /// How many of the most likely tokens to report beside each sampled one.
    pub top_logprobs: u8,
}

impl Default for SamplingParams {
    /// Plain sampling: temperature 1, no truncation, up to 128 tokens.
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            seed: 0,
            drawn: 0,
            max_tokens: 128,
            stop_token_ids: Vec::new(),
            top_logprobs: 0,
        }
    }
}

impl SamplingParams {
    /// Checks ranges.
    ///
    /// # Errors
    /// `InvalidOption` names the field.
    pub fn validate(&self) -> Result<(), EngineError> {
        let wrong = |field, expected, got: String| Err(EngineError::InvalidOption { field, expected, got });
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return wrong("temperature", "a finite value of at least 0", self.temperature.to_string());
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return wrong("top_p", "a value in (0, 1]", self.top_p.to_string());
        }
        if self.max_tokens == 0 {
            return wrong("max_tokens", "at least 1", "0".into());
        }
        Ok(())
    }
}

/// A drawn token, without the policy version.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Draw {
    pub(crate) id: u32,
    pub(crate) logprob: f32,
    pub(crate) sampling_logprob: f32,
    pub(crate) top: Vec<(u32, f32)>,
}

/// One request's generator and scratch.
#[derive(Debug)]
pub(crate) struct Sampler {
    params: SamplingParams,
    rng: ChaCha8Rng,
    weights: Vec<f32>,
}

simd_fn! {
    /// `out = exp((logits - max) · inv_temperature)`.
    fn tempered(logits: &[f32], max: f32, inv_temperature: f32, out: &mut [f32]) = tempered_body
}

#[inline(always)]
fn tempered_body<const FMA: bool>(logits: &[f32], max: f32, inv_temperature: f32, out: &mut [f32]) {
    for (o, &x) in out.iter_mut().zip(logits) {
        *o = exp::<FMA>((x - max) * inv_temperature);
    }
}

/// Below this the tempered distribution is the greedy one within f32: e^(-1e-3/1e-5) = 0 for any visible difference.
const GREEDY_BELOW: f32 = 1e-5;

/// 32-bit words of the generator that one token takes, whatever comes of it: see `draw_tempered`.
const WORDS_PER_DRAW: u128 = 2;

impl Sampler {
    /// A sampler that has drawn `params.drawn` tokens.
    pub(crate) fn new(params: SamplingParams) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(params.seed);
        rng.set_word_pos(u128::from(params.drawn) * WORDS_PER_DRAW);
        Self { params, rng, weights: Vec::new() }
    }

    /// The request's parameters.
    pub(crate) fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// Draws one token; `None` if a logit is NaN or infinite.
    pub(crate) fn draw(&mut self, logits: &[f32]) -> Option<Draw> {
        let max = max_or_nan(logits);
        if !max.is_finite() {
            return None;
        }
        let (index, sampling_logprob) = if self.params.temperature < GREEDY_BELOW {
            (position_of_max(logits, max), 0.0)
        } else {
            self.draw_tempered(logits, max)
        };
        let logprob = logprob_entropy(logits, index).0;
        Some(Draw { id: id(index), logprob, sampling_logprob, top: self.top(logits) })
    }

    fn draw_tempered(&mut self, logits: &[f32], max: f32) -> (usize, f32) {
        self.weights.resize(logits.len(), 0.0);
        tempered(logits, max, 1.0 / self.params.temperature, &mut self.weights);
        let k = self.params.top_k as usize;
        if (k > 0 && k < logits.len()) || self.params.top_p < 1.0 {
            self.truncate();
        }
        let mass: f64 = self.weights.iter().map(|&w| f64::from(w)).sum();
        // One 53-bit draw per token, whatever the outcome: the stream's place is the token's index.
        #[expect(clippy::cast_precision_loss, reason = "53 bits fit")]
        let u = (self.rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64 * mass;
        let mut left = u;
        let mut chosen = None;
        for (i, &w) in self.weights.iter().enumerate() {
            if w > 0.0 {
                chosen = Some(i);
                left -= f64::from(w);
                if left < 0.0 {
                    break;
                }
            }
        }
        let index = chosen.unwrap_or_else(|| position_of_max(logits, max));
        #[expect(clippy::cast_possible_truncation, reason = "f32 is the interface")]
        let logprob = (f64::from(self.weights[index]) / mass).ln() as f32;
        (index, logprob)
    }

    /// Zeroes all weights outside the top k and the top p; ties go to the lower id.
    fn truncate(&mut self) {
        let n = self.weights.len();
        let k = if self.params.top_k == 0 { n } else { (self.params.top_k as usize).min(n) };
        let mut order: Vec<u32> = (0..n).map(id).collect();
        let mut sorted = 0;
        // Sort only as far as the mass is needed: 256 candidates first, then four times as many.
        let total = |order: &[u32], w: &[f32]| order.iter().map(|&i| f64::from(w[i as usize])).sum::<f64>();
        let weights = &self.weights;
        let by_weight = |a: &u32, b: &u32| weights[*b as usize].total_cmp(&weights[*a as usize]).then(a.cmp(b));
        if k < n {
            order.select_nth_unstable_by(k - 1, by_weight);
            order.truncate(k);
        }
        let target = total(&order, weights) * f64::from(self.params.top_p);
        let mut kept = order.len();
        if self.params.top_p < 1.0 {
            let mut sum = 0.0;
            let mut want = 256;
            'scan: while sorted < order.len() {
                let end = want.min(order.len());
                if end < order.len() {
                    order[sorted..].select_nth_unstable_by(end - 1 - sorted, by_weight);
                }
                order[sorted..end].sort_unstable_by(by_weight);
                for (i, &o) in order.iter().enumerate().take(end).skip(sorted) {
                    sum += f64::from(weights[o as usize]);
                    if sum >= target {
                        kept = i + 1;
                        break 'scan;
                    }
                }
                sorted = end;
                want *= 4;
            }
        }
        let mut truncated = vec![0f32; n];
        for &i in &order[..kept] {
            truncated[i as usize] = weights[i as usize];
        }
        self.weights = truncated;
    }

    /// The most likely tokens with their log-probabilities, best first.
    fn top(&self, logits: &[f32]) -> Vec<(u32, f32)> {
        let n = usize::from(self.params.top_logprobs).min(logits.len());
        if n == 0 {
            return Vec::new();
        }
        let lse = log_sum_exp(logits);
        let by_logit = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
        let mut order: Vec<u32> = (0..logits.len()).map(id).collect();
        if n < order.len() {
            order.select_nth_unstable_by(n - 1, by_logit);
            order.truncate(n);
        }
        order.sort_unstable_by(by_logit);
        order.into_iter().map(|i| (i, logits[i as usize] - lse)).collect()
    }
}

/// A vocabulary index as a token id; vocabularies are below 2^24.
#[expect(clippy::cast_possible_truncation, reason = "LlamaConfig::validate bounds the vocabulary by 2^24")]
fn id(index: usize) -> u32 {
    index as u32
}

fn position_of_max(logits: &[f32], max: f32) -> usize {
    logits.iter().position(|&x| x >= max).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(temperature: f32, top_k: u32, top_p: f32) -> SamplingParams {
        SamplingParams { temperature, top_k, top_p, seed: 11, ..SamplingParams::default() }
    }

    fn frequencies(p: SamplingParams, logits: &[f32], draws: u16) -> Vec<f32> {
        let mut sampler = Sampler::new(p);
        let mut counts = vec![0f32; logits.len()];
        for _ in 0..draws {
            let d = sampler.draw(logits).unwrap();
            counts[d.id as usize] += 1.0;
            let want = logits[d.id as usize] - log_sum_exp(logits);
            assert!((d.logprob - want).abs() < 1e-5);
        }
        counts.iter().map(|c| c / f32::from(draws)).collect()
    }

    #[test]
    fn draws_follow_the_tempered_distribution() {
        // 20 000 draws: three standard deviations are at most 3 · sqrt(0.25 / 20000) = 0.0106.
        let logits = [0.0f32, 1.0, 2.0, -1.0];
        for temperature in [0.5f32, 1.0, 2.0] {
            let weights: Vec<f32> = logits.iter().map(|x| (x / temperature).exp()).collect();
            let sum: f32 = weights.iter().sum();
            for (f, w) in frequencies(params(temperature, 0, 1.0), &logits, 20_000).iter().zip(&weights) {
                assert!((f - w / sum).abs() < 0.011, "{f} against {}", w / sum);
            }
        }
    }

    #[test]
    fn a_sampler_that_starts_behind_draws_goes_on_as_the_unbroken_one() {
        let logits: Vec<f32> = (0u16..50).map(|i| (f32::from(i) * 0.7).sin()).collect();
        let mut unbroken = Sampler::new(params(1.0, 20, 0.9));
        let ids: Vec<u32> = (0..40).map(|_| unbroken.draw(&logits).unwrap().id).collect();
        for drawn in [1u32, 7, 8, 9, 33] {
            let mut continued = Sampler::new(SamplingParams { drawn, ..params(1.0, 20, 0.9) });
            let rest: Vec<u32> = (drawn..40).map(|_| continued.draw(&logits).unwrap().id).collect();
            assert_eq!(rest, ids[drawn as usize..], "continued behind {drawn} draws");
        }
    }

    #[test]
    fn truncation_keeps_the_likeliest_and_reports_the_renormalised_probability() {
        let logits = [0.0f32, 1.0, 2.0, -1.0];
        let f = frequencies(params(1.0, 2, 1.0), &logits, 2000);
        assert!(f[0] == 0.0 && f[3] == 0.0 && f[1] > 0.2 && f[2] > 0.6);
        // Probabilities 0.087, 0.237, 0.644, 0.032: 0.7 needs the first two.
        let f = frequencies(params(1.0, 0, 0.7), &logits, 2000);
        assert!(f[0] == 0.0 && f[3] == 0.0 && f[1] > 0.2);
        let f = frequencies(params(1.0, 0, 0.6), &logits, 200);
        assert!((f[2] - 1.0).abs() < 1e-6);
        let d = Sampler::new(params(1.0, 1, 1.0)).draw(&logits).unwrap();
        assert!(d.id == 2 && d.sampling_logprob.abs() < 1e-6 && d.logprob < -0.4);
    }

    #[test]
    fn greedy_takes_the_first_maximum_and_broken_logits_are_refused() {
        let d = Sampler::new(params(0.0, 0, 1.0)).draw(&[1.0, 3.0, 3.0]).unwrap();
        assert_eq!((d.id, d.sampling_logprob.to_bits()), (1, 0f32.to_bits()));
        assert!(Sampler::new(params(1.0, 0, 1.0)).draw(&[1.0, f32::NAN]).is_none());
        assert!(Sampler::new(params(0.0, 0, 1.0)).draw(&[1.0, f32::INFINITY]).is_none());
    }

    #[test]
    fn top_logprobs_are_sorted_and_bounded_by_the_vocabulary() {
        let p = SamplingParams { top_logprobs: 9, ..SamplingParams::default() };
        let d = Sampler::new(p).draw(&[0.0, 2.0, 1.0]).unwrap();
        assert_eq!(d.top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 2, 0]);
        assert!((d.top[0].1 + 0.407_606).abs() < 1e-5);
    }

    #[test]
    fn wide_truncation_matches_a_full_sort() {
        let logits: Vec<f32> = (0u16..3000).map(|i| (f32::from(i) * 0.7).sin()).collect();
        let mut s = Sampler::new(params(1.0, 0, 0.9));
        s.weights = logits.iter().map(|x| x.exp()).collect();
        let mut order: Vec<usize> = (0..3000).collect();
        order.sort_by(|&a, &b| s.weights[b].total_cmp(&s.weights[a]).then(a.cmp(&b)));
        let target = s.weights.iter().map(|&w| f64::from(w)).sum::<f64>() * f64::from(0.9f32);
        let mut sum = 0.0;
        let kept = order
            .iter()
            .take_while(|&&i| {
                let more = sum < target;
                sum += f64::from(s.weights[i]);
                more
            })
            .count();
        s.truncate();
        assert_eq!(s.weights.iter().filter(|w| **w > 0.0).count(), kept);
    }
}
