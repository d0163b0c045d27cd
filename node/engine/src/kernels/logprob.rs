//! Log-probability of a target under a row of logits, with the entropy of the row, and the gradients of both.

use super::math::{LANES, exp, fma, lane_sum, max_or_nan};
use super::simd_fn;

simd_fn! {
    /// `(log p(target), entropy)` in nats of `softmax(logits)`; NaN if any logit is not finite.
    pub(crate) fn logprob_entropy(logits: &[f32], target: usize) -> (f32, f32) = logprob_entropy_body
}

/// Sum of `e^(x - max)` and of `e^(x - max) · (x - max)`, in a fixed lane order.
#[inline(always)]
fn exp_sums<const FMA: bool>(logits: &[f32], max: f32) -> (f32, f32) {
    let mut s0 = [0f32; LANES];
    let mut s1 = [0f32; LANES];
    let mut chunks = logits.chunks_exact(LANES);
    for c in &mut chunks {
        for l in 0..LANES {
            let x = c[l] - max;
            let e = exp::<FMA>(x);
            s0[l] += e;
            s1[l] = fma::<FMA>(e, x, s1[l]);
        }
    }
    for (l, &v) in chunks.remainder().iter().enumerate() {
        let x = v - max;
        let e = exp::<FMA>(x);
        s0[l] += e;
        s1[l] = fma::<FMA>(e, x, s1[l]);
    }
    (lane_sum(s0), lane_sum(s1))
}

#[inline(always)]
fn logprob_entropy_body<const FMA: bool>(logits: &[f32], target: usize) -> (f32, f32) {
    let max = max_or_nan(logits);
    let (sum, weighted) = exp_sums::<FMA>(logits, max);
    let log_sum = sum.ln();
    (logits[target] - max - log_sum, log_sum - weighted / sum)
}

simd_fn! {
    /// Logits to their gradient, in place, for the gradients `g_logprob` and `g_entropy` of the two outputs.
    pub(crate) fn logprob_entropy_grad(logits: &mut [f32], target: usize, g_logprob: f32, g_entropy: f32) = grad_body
}

/// d logp / d x_i = [i = target] - p_i and d H / d x_i = -p_i (log p_i + H).
#[inline(always)]
fn grad_body<const FMA: bool>(logits: &mut [f32], target: usize, g_logprob: f32, g_entropy: f32) {
    let max = max_or_nan(logits);
    let (sum, weighted) = exp_sums::<FMA>(logits, max);
    let log_sum = sum.ln();
    let entropy = log_sum - weighted / sum;
    let inv = 1.0 / sum;
    let shift = g_entropy * (entropy - log_sum) + g_logprob;
    for x in logits.iter_mut() {
        let centred = *x - max;
        let p = exp::<FMA>(centred) * inv;
        *x = -p * fma::<FMA>(g_entropy, centred, shift);
    }
    logits[target] += g_logprob;
}

/// `log Σ e^logit` and whether every logit is finite.
pub(crate) fn log_sum_exp(logits: &[f32]) -> f32 {
    log_sum_exp_simd(logits)
}

simd_fn! {
    fn log_sum_exp_simd(logits: &[f32]) -> f32 = log_sum_exp_body
}

#[inline(always)]
fn log_sum_exp_body<const FMA: bool>(logits: &[f32]) -> f32 {
    let max = max_or_nan(logits);
    let (sum, _) = exp_sums::<FMA>(logits, max);
    max + sum.ln()
}
