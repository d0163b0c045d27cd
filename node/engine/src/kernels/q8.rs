//! A right-hand side in ggml's Q8_0 (blocks of 32 values along the reduction, one scale each) for generation.
//!
//! A weight counts as `quant · scale`, rounded to f32, whichever way a product is computed; the sums are those of
//! [`Packed`](super::matmul::Packed). So each output has the bits of the f32 product with the rounded weights.

use std::cell::RefCell;

use super::matmul::{Lhs, PANEL, TILE_ROWS, Target, scatter_panels, tile};
use super::simd_fn;
use crate::par;

/// Values that share a scale.
const BLOCK: usize = 32;

/// `B = W^T [k, n]` in column panels: quants `[ceil(n/32)][k][32]`, scales `[ceil(n/32)][ceil(k/32)][32]`.
#[derive(Clone, Debug)]
pub(crate) struct PackedQ8 {
    k: usize,
    n: usize,
    quants: Vec<i8>,
    scales: Vec<f32>,
}

/// One panel's quants and scales.
#[derive(Clone, Copy)]
struct Panel<'a> {
    quants: &'a [i8],
    scales: &'a [f32],
}

thread_local! {
    /// A panel in f32, kept between products.
    static UNPACKED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// A block as `quantize_row_q8_0_ref` of ggml rounds it: its scale (the largest magnitude / 127, in f16) and its quants,
/// which are taken before the scale is rounded.
fn quantize(block: &[f32], quants: &mut [i8; BLOCK]) -> f32 {
    let largest = block.iter().fold(0f32, |m, v| m.max(v.abs()));
    let scale = largest / 127.0;
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    for (q, &v) in quants.iter_mut().zip(block) {
        #[expect(clippy::cast_possible_truncation, reason = "within -127 to 127")]
        let rounded = (v * inverse).round() as i8;
        *q = rounded;
    }
    half::f16::from_f32(scale).to_f32()
}

impl PackedQ8 {
    /// Rounds and packs a row-major `W [n, k]` (a Hugging Face linear weight).
    pub(crate) fn from_weight(w: &[f32], n: usize, k: usize) -> Self {
        assert_eq!(w.len(), n * k, "weight length");
        let (panels, blocks) = (n.div_ceil(PANEL), k.div_ceil(BLOCK));
        let mut quants = vec![0i8; panels * k * PANEL];
        let mut scales = vec![0f32; panels * blocks * PANEL];
        for (row, values) in w.chunks_exact(k.max(1)).enumerate() {
            let (panel, c) = (row / PANEL, row % PANEL);
            for (b, block) in values.chunks(BLOCK).enumerate() {
                let mut rounded = [0i8; BLOCK];
                scales[(panel * blocks + b) * PANEL + c] = quantize(block, &mut rounded);
                for (i, &q) in rounded.iter().enumerate().take(block.len()) {
                    quants[(panel * k + b * BLOCK + i) * PANEL + c] = q;
                }
            }
        }
        Self { k, n, quants, scales }
    }

    /// Row `row` of `W`, rounded, into `out [k]`.
    pub(crate) fn row(&self, row: usize, out: &mut [f32]) {
        let (panel, c) = (self.panel(row / PANEL), row % PANEL);
        for (p, o) in out.iter_mut().enumerate() {
            *o = f32::from(panel.quants[p * PANEL + c]) * panel.scales[p / BLOCK * PANEL + c];
        }
    }

    fn panel(&self, i: usize) -> Panel<'_> {
        let (quants, scales) = (self.k * PANEL, self.k.div_ceil(BLOCK) * PANEL);
        Panel { quants: &self.quants[i * quants..(i + 1) * quants], scales: &self.scales[i * scales..(i + 1) * scales] }
    }

    /// `out [m, n] = lhs [m, k] · B`, or `out += …` if `accumulate`. `out.len()` fixes `m`.
    pub(crate) fn mul(&self, lhs: Lhs<'_>, out: &mut [f32], accumulate: bool) {
        if self.n == 0 || self.k == 0 || out.is_empty() {
            if !accumulate {
                out.fill(0.0);
            }
            return;
        }
        let m = out.len() / self.n;
        assert_eq!(out.len(), m * self.n, "output length");
        let last = (m - 1) * lhs.row_stride + (self.k - 1) * lhs.k_stride;
        assert!(last < lhs.data.len(), "left-hand side too short");
        let workers = par::workers();
        if m >= 2 * TILE_ROWS * workers {
            let rows = m.div_ceil(workers * 2).next_multiple_of(TILE_ROWS);
            par::chunks_mut(out, rows * self.n, |block, out| {
                let lhs = Lhs { data: &lhs.data[block * rows * lhs.row_stride..], ..lhs };
                for i in 0..self.n.div_ceil(PANEL) {
                    let cols = PANEL.min(self.n - i * PANEL);
                    let target = Target { out: &mut out[i * PANEL..], stride: self.n, cols, accumulate };
                    self.panel_product(i, lhs, m.min((block + 1) * rows) - block * rows, target);
                }
            });
        } else {
            scatter_panels(m, self.n, out, accumulate, |i, out| {
                self.panel_product(i, lhs, m, Target { out, stride: PANEL, cols: PANEL, accumulate: false });
            });
        }
    }

    /// All rows of the left-hand side with one panel.
    fn panel_product(&self, i: usize, lhs: Lhs<'_>, m: usize, target: Target<'_>) {
        let panel = self.panel(i);
        #[cfg(target_arch = "x86_64")]
        if m <= TILE_ROWS && target.cols == PANEL && super::simd_level() == super::SimdLevel::Avx512 {
            return few_rows(m, self.k, lhs, panel, target);
        }
        UNPACKED.with_borrow_mut(|unpacked| {
            unpacked.resize(self.k * PANEL, 0.0);
            unpack(panel.quants, panel.scales, unpacked);
            let Target { out, stride, cols, accumulate } = target;
            for r in (0..m).step_by(TILE_ROWS) {
                let lhs = Lhs { data: &lhs.data[r * lhs.row_stride..], ..lhs };
                let out = &mut out[r * stride..];
                tile(TILE_ROWS.min(m - r), self.k, lhs, unpacked, &mut Target { out, stride, cols, accumulate });
            }
        });
    }
}

simd_fn! {
    /// A panel in f32: `out [k][32]` from quants `[k][32]` and scales `[ceil(k/32)][32]`.
    fn unpack(quants: &[i8], scales: &[f32], out: &mut [f32]) = unpack_body
}

#[inline(always)]
fn unpack_body<const FMA: bool>(quants: &[i8], scales: &[f32], out: &mut [f32]) {
    let blocks = quants.chunks(BLOCK * PANEL).zip(out.chunks_mut(BLOCK * PANEL));
    for ((quants, out), scales) in blocks.zip(scales.as_chunks::<PANEL>().0) {
        for (q, o) in quants.as_chunks::<PANEL>().0.iter().zip(out.as_chunks_mut::<PANEL>().0) {
            for l in 0..PANEL {
                o[l] = f32::from(q[l]) * scales[l];
            }
        }
    }
}

/// Up to eight rows: the panel is unpacked in registers, so that only its quants travel from memory.
#[cfg(target_arch = "x86_64")]
fn few_rows(rows: usize, k: usize, lhs: Lhs<'_>, panel: Panel<'_>, target: Target<'_>) {
    assert!(panel.quants.len() >= k * PANEL && panel.scales.len() >= k.div_ceil(BLOCK) * PANEL, "panel shape");
    assert!((rows - 1) * lhs.row_stride + (k - 1) * lhs.k_stride < lhs.data.len(), "tile out of range");
    assert!((rows - 1) * target.stride + PANEL <= target.out.len(), "tile output out of range");
    // SAFETY: the caller has seen AVX-512 F and BW; the assertions hold for these rows.
    unsafe {
        match rows {
            8 => fill_avx512::<8>(k, lhs, panel, target),
            7 => fill_avx512::<7>(k, lhs, panel, target),
            6 => fill_avx512::<6>(k, lhs, panel, target),
            5 => fill_avx512::<5>(k, lhs, panel, target),
            4 => fill_avx512::<4>(k, lhs, panel, target),
            3 => fill_avx512::<3>(k, lhs, panel, target),
            2 => fill_avx512::<2>(k, lhs, panel, target),
            _ => fill_avx512::<1>(k, lhs, panel, target),
        }
    }
}

/// R rows by two registers.
///
/// # Safety
/// The processor has AVX-512 F and BW, and the assertions of [`few_rows`] hold for `rows = R`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn fill_avx512<const R: usize>(k: usize, lhs: Lhs<'_>, panel: Panel<'_>, target: Target<'_>) {
    use std::arch::x86_64::{
        _mm_loadu_si128, _mm512_add_ps, _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps, _mm512_fmadd_ps, _mm512_loadu_ps,
        _mm512_mul_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps,
    };
    let mut sums = [[_mm512_setzero_ps(); 2]; R];
    let mut quants = panel.quants.as_ptr();
    let mut scales = panel.scales.as_ptr();
    let mut a = lhs.data.as_ptr();
    let mut left = k;
    while left > 0 {
        // SAFETY: by this function's contract a block has 32 scales.
        let (s0, s1) = unsafe { (_mm512_loadu_ps(scales), _mm512_loadu_ps(scales.add(16))) };
        for _ in 0..left.min(BLOCK) {
            // SAFETY: by this function's contract the two loads and the R reads are inside the slices.
            unsafe {
                let q0 = _mm512_cvtepi8_epi32(_mm_loadu_si128(quants.cast()));
                let q1 = _mm512_cvtepi8_epi32(_mm_loadu_si128(quants.add(16).cast()));
                let b0 = _mm512_mul_ps(_mm512_cvtepi32_ps(q0), s0);
                let b1 = _mm512_mul_ps(_mm512_cvtepi32_ps(q1), s1);
                for (r, sum) in sums.iter_mut().enumerate() {
                    let x = _mm512_set1_ps(*a.wrapping_add(r.wrapping_mul(lhs.row_stride)));
                    sum[0] = _mm512_fmadd_ps(x, b0, sum[0]);
                    sum[1] = _mm512_fmadd_ps(x, b1, sum[1]);
                }
            }
            quants = quants.wrapping_add(PANEL);
            a = a.wrapping_add(lhs.k_stride);
        }
        scales = scales.wrapping_add(PANEL);
        left -= left.min(BLOCK);
    }
    for (r, sum) in sums.iter().enumerate() {
        let row = target.out.as_mut_ptr().wrapping_add(r.wrapping_mul(target.stride));
        for (half, &value) in sum.iter().enumerate() {
            let at = row.wrapping_add(16 * half);
            // SAFETY: 32 floats of each row are inside `target.out`.
            unsafe {
                let old = if target.accumulate { _mm512_loadu_ps(at) } else { _mm512_setzero_ps() };
                _mm512_storeu_ps(at, if target.accumulate { _mm512_add_ps(old, value) } else { value });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::at_every_level;
    use crate::kernels::matmul::Packed;

    fn wave(len: usize, f: f32) -> Vec<f32> {
        (0u16..).take(len).map(|i| (f32::from(i) * f).sin()).collect()
    }

    fn rounded(packed: &PackedQ8) -> Vec<f32> {
        let mut w = vec![0f32; packed.n * packed.k];
        w.chunks_exact_mut(packed.k).enumerate().for_each(|(i, row)| packed.row(i, row));
        w
    }

    #[test]
    fn products_have_the_bits_of_f32_products_with_the_rounded_weights() {
        let pool = par::pool(3, 0, "test").unwrap();
        for (m, k, n) in [(1, 1, 1), (1, 64, 96), (3, 40, 33), (8, 32, 32), (9, 33, 70), (17, 5, 70), (130, 129, 31)] {
            let (a, w) = (wave(m * k, 0.37), wave(n * k, 0.11));
            let packed = PackedQ8::from_weight(&w, n, k);
            let exact = Packed::from_weight(&rounded(&packed), n, k);
            at_every_level(|level| {
                for accumulate in [false, true] {
                    let product = |run: &dyn Fn(&mut [f32])| {
                        let mut out = vec![1f32; m * n];
                        run(&mut out);
                        out.iter().map(|v| v.to_bits()).collect::<Vec<_>>()
                    };
                    let lhs = Lhs::rows(&a, k);
                    let want = product(&|out| exact.mul(lhs, out, accumulate));
                    assert_eq!(product(&|out| packed.mul(lhs, out, accumulate)), want, "{level:?} {m} {k} {n}");
                }
            });
            let lhs = Lhs::rows(&a, k);
            let (mut one, mut three) = (vec![0f32; m * n], vec![0f32; m * n]);
            packed.mul(lhs, &mut one, false);
            pool.install(|| packed.mul(lhs, &mut three, false));
            assert_eq!(one, three, "{m} {k} {n}");
        }
    }

    #[test]
    fn a_block_is_rounded_as_ggml_does_it() {
        // gguf 0.19.0: quantize([i * 0.37 - 5.5 for i in range(32)], Q8_0), scale and quants.
        let block: Vec<f32> = (0u16..32).map(|i| f32::from(i) * 0.37 - 5.5).collect();
        let mut quants = [0i8; BLOCK];
        let scale = quantize(&block, &mut quants);
        assert_eq!(
            (scale.to_bits(), quants),
            (
                0x3d40_8000,
                [
                    -117, -109, -101, -93, -86, -78, -70, -62, -54, -46, -38, -30, -23, -15, -7, 1, 9, 17, 25, 33, 40,
                    48, 56, 64, 72, 80, 88, 96, 103, 111, 119, 127
                ]
            )
        );
        let mut zeros = [1i8; BLOCK];
        assert_eq!((quantize(&[0.0; BLOCK], &mut zeros).to_bits(), zeros), (0, [0; BLOCK]));
    }
}
