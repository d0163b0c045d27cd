//! Scalar building blocks that the compiler can vectorise: fused multiply-add, exponential, reductions.

/// Lanes of the reductions: fixed, so that a sum has one order on every instruction set.
pub(crate) const LANES: usize = 16;

/// `a * b + c`, fused where the instruction set fuses it.
#[inline(always)]
pub(crate) fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// `e^x` with a relative error below 2e-7 for x in [-87, 88]; outside it saturates, NaN stays NaN.
///
/// Range reduction by `ln 2` in two parts and the degree-5 polynomial of Cephes' `expf`.
#[inline(always)]
pub(crate) fn exp<const FMA: bool>(x: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits.
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    // Written with comparisons, as `f32::max` would turn NaN into a number.
    let x = if x < -87.0 { -87.0 } else { x };
    let x = if x > 88.0 { 88.0 } else { x };
    let t = fma::<FMA>(x, std::f32::consts::LOG2_E, MAGIC);
    let n = t - MAGIC;
    let r = fma::<FMA>(n, -LN2_HI, x);
    let r = fma::<FMA>(n, -LN2_LO, r);
    let p = fma::<FMA>(1.987_569_1e-4, r, 1.398_199_9e-3);
    let p = fma::<FMA>(p, r, 8.333_452e-3);
    let p = fma::<FMA>(p, r, 4.166_579_6e-2);
    let p = fma::<FMA>(p, r, 1.666_666_5e-1);
    let p = fma::<FMA>(p, r, 0.5);
    let y = fma::<FMA>(p, r * r, r) + 1.0;
    let scale = f32::from_bits((t.to_bits() << 23).wrapping_add(0x3f80_0000));
    y * scale
}

/// Adds the lanes in a fixed tree order.
#[inline(always)]
pub(crate) fn lane_sum(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Sum of `f(i-th element)` over a slice in a fixed lane order.
#[inline(always)]
pub(crate) fn sum_map(xs: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0f32; LANES];
    let mut chunks = xs.chunks_exact(LANES);
    for c in &mut chunks {
        for l in 0..LANES {
            lanes[l] += f(c[l]);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane += f(x);
    }
    lane_sum(lanes)
}

/// Dot product in a fixed lane order; the shorter length counts.
#[inline(always)]
pub(crate) fn dot<const FMA: bool>(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let len = a.len().min(b.len());
    let (a, b) = (&a[..len], &b[..len]);
    let mut ca = a.chunks_exact(LANES);
    let mut cb = b.chunks_exact(LANES);
    for (x, y) in (&mut ca).zip(&mut cb) {
        for l in 0..LANES {
            lanes[l] = fma::<FMA>(x[l], y[l], lanes[l]);
        }
    }
    for ((lane, &x), &y) in lanes.iter_mut().zip(ca.remainder()).zip(cb.remainder()) {
        *lane = fma::<FMA>(x, y, *lane);
    }
    lane_sum(lanes)
}

/// `y += a * x`.
#[inline(always)]
pub(crate) fn axpy<const FMA: bool>(a: f32, x: &[f32], y: &mut [f32]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y = fma::<FMA>(a, x, *y);
    }
}

/// The largest lane, in a tree order.
#[inline(always)]
fn lane_max(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = if lanes[i + width] > lanes[i] { lanes[i + width] } else { lanes[i] };
        }
        width /= 2;
    }
    lanes[0]
}

/// The largest element; NaN if any element is NaN or infinite, -inf for an empty slice.
#[inline(always)]
pub(crate) fn max_or_nan(xs: &[f32]) -> f32 {
    let mut largest = [f32::NEG_INFINITY; LANES];
    // NaN and infinity times 0 are NaN, and NaN stays in a sum.
    let mut broken = [0f32; LANES];
    let (chunks, rest) = xs.as_chunks::<LANES>();
    for c in chunks {
        for l in 0..LANES {
            largest[l] = if c[l] > largest[l] { c[l] } else { largest[l] };
            broken[l] += c[l] * 0.0;
        }
    }
    for (l, &x) in rest.iter().enumerate() {
        largest[l] = if x > largest[l] { x } else { largest[l] };
        broken[l] += x * 0.0;
    }
    lane_max(largest) + lane_sum(broken)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_ulps_over_its_range() {
        let mut worst = 0f64;
        let mut x = -86.9f32;
        while x < 87.9 {
            let want = f64::from(x).exp();
            worst = worst.max((f64::from(exp::<true>(x)) / want - 1.0).abs());
            worst = worst.max((f64::from(exp::<false>(x)) / want - 1.0).abs());
            x += 0.0137;
        }
        assert!(worst < 2e-7, "worst relative error {worst}");
        assert!(exp::<true>(f32::NAN).is_nan());
        assert!(exp::<true>(-1e30) < 2e-38);
    }

    #[test]
    fn broken_inputs_make_the_maximum_nan() {
        let mut xs = vec![1f32; 37];
        assert_eq!(max_or_nan(&xs).to_bits(), 1f32.to_bits());
        xs[3] = f32::NAN;
        assert!(max_or_nan(&xs).is_nan());
        xs[3] = 0.0;
        xs[36] = f32::INFINITY;
        assert!(max_or_nan(&xs).is_nan());
    }
}
