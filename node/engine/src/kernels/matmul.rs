//! Matrix product with a packed right-hand side, for many rows (training) and few (decoding) alike.
//!
//! Each output is one accumulator that walks the reduction dimension in order, so a row's bits depend on
//! that row and the matrix only: not on the number of rows, of threads, or on the row's place.

use crate::par;

/// Columns of one packed panel: two AVX-512 registers.
pub(crate) const PANEL: usize = 32;
/// Rows computed together: 8 x 2 accumulators cover the latency of the multiply-add units.
pub(crate) const TILE_ROWS: usize = 8;
/// Rows of a transposed left-hand side that are gathered together: one cache line.
const GATHER_ROWS: usize = 16;
/// Length of the reduction blocks then: 16 KiB of the left-hand side, and 32 KiB of a panel.
const GATHER_K: usize = 256;
/// Bytes of left-hand side kept hot while all panels pass by: a quarter of a 2 MiB second-level cache.
const HOT_BYTES: usize = 512 * 1024;

/// A right-hand side `B [k, n]` stored as column panels `[ceil(n/32)][k][32]`, zero-padded.
#[derive(Clone, Debug, Default)]
pub(crate) struct Packed {
    k: usize,
    n: usize,
    data: Vec<f32>,
}

/// A strided left-hand side: element (r, p) is at `r * row_stride + p * k_stride`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lhs<'a> {
    /// The elements.
    pub(crate) data: &'a [f32],
    /// Distance between rows.
    pub(crate) row_stride: usize,
    /// Distance along the reduction dimension.
    pub(crate) k_stride: usize,
}

impl<'a> Lhs<'a> {
    /// A row-major `[m, k]` matrix.
    pub(crate) fn rows(data: &'a [f32], k: usize) -> Self {
        Self { data, row_stride: k, k_stride: 1 }
    }

    /// The transpose of a row-major `[k, m]` matrix.
    pub(crate) fn transposed(data: &'a [f32], m: usize) -> Self {
        Self { data, row_stride: 1, k_stride: m }
    }
}

impl Packed {
    /// Packs `B = W^T` for a row-major `W [n, k]` (a Hugging Face linear weight).
    pub(crate) fn from_weight(w: &[f32], n: usize, k: usize) -> Self {
        assert_eq!(w.len(), n * k, "weight length");
        let mut data = vec![0f32; n.div_ceil(PANEL) * k * PANEL];
        if k > 0 {
            par::chunks_mut(&mut data, k * PANEL, |panel, out| {
                let first = panel * PANEL;
                let cols = PANEL.min(n - first);
                // Sixteen by sixteen blocks: both sides stay within a few cache lines.
                for p0 in (0..k).step_by(16) {
                    let p1 = (p0 + 16).min(k);
                    for c in 0..cols {
                        let row = &w[(first + c) * k + p0..(first + c) * k + p1];
                        for (p, &v) in row.iter().enumerate() {
                            out[(p0 + p) * PANEL + c] = v;
                        }
                    }
                }
            });
        }
        Self { k, n, data }
    }

    /// Packs a row-major `B [k, n]`.
    pub(crate) fn from_rows(b: &[f32], k: usize, n: usize) -> Self {
        let mut packed = Self::default();
        packed.repack_rows(b, k, n);
        packed
    }

    /// Replaces the content by a row-major `B [k, n]`, keeping the allocation.
    pub(crate) fn repack_rows(&mut self, b: &[f32], k: usize, n: usize) {
        assert_eq!(b.len(), n * k, "matrix length");
        (self.k, self.n) = (k, n);
        let len = n.div_ceil(PANEL) * k * PANEL;
        self.data.truncate(len);
        self.data.resize(len, 0.0);
        if k == 0 {
            return;
        }
        par::chunks_mut(&mut self.data, k * PANEL, |panel, out| {
            let first = panel * PANEL;
            let cols = PANEL.min(n - first);
            for (p, row) in out.chunks_exact_mut(PANEL).enumerate() {
                row[..cols].copy_from_slice(&b[p * n + first..p * n + first + cols]);
                row[cols..].fill(0.0);
            }
        });
    }

    /// `out [m, n] = lhs [m, k] · B`, or `out += …` if `accumulate`. `out.len()` fixes `m`.
    pub(crate) fn mul(&self, lhs: Lhs<'_>, out: &mut [f32], accumulate: bool) {
        if self.n == 0 || out.is_empty() {
            return;
        }
        let m = out.len() / self.n;
        assert_eq!(out.len(), m * self.n, "output length");
        if self.k == 0 {
            if !accumulate {
                out.fill(0.0);
            }
            return;
        }
        let last = (m - 1) * lhs.row_stride + (self.k - 1) * lhs.k_stride;
        assert!(last < lhs.data.len(), "left-hand side too short");
        let workers = par::workers();
        let hot = (HOT_BYTES / (4 * self.k)).clamp(TILE_ROWS, 4096) / TILE_ROWS * TILE_ROWS;
        if workers == 1 || m >= 2 * TILE_ROWS * workers {
            let share = m.div_ceil(workers * 2).next_multiple_of(TILE_ROWS);
            let rows = if workers == 1 { hot } else { hot.min(share) };
            par::chunks_mut(out, rows * self.n, |block, out| {
                let block_lhs = Lhs { data: &lhs.data[block * rows * lhs.row_stride..], ..lhs };
                self.mul_block(block_lhs, out, accumulate);
            });
        } else {
            self.mul_by_columns(lhs, m, out, accumulate);
        }
    }

    /// One thread's rows of a transposed left-hand side, whose columns are gathered into a small buffer first.
    ///
    /// The reduction is cut into blocks, so that buffer and panel stay in the first-level cache.
    fn mul_block_gathered(&self, lhs: Lhs<'_>, out: &mut [f32], accumulate: bool) {
        let m = out.len() / self.n;
        let mut gathered = [0f32; GATHER_K * GATHER_ROWS];
        for p0 in (0..self.k).step_by(GATHER_K) {
            let k = GATHER_K.min(self.k - p0);
            for r0 in (0..m).step_by(GATHER_ROWS) {
                let rows = GATHER_ROWS.min(m - r0);
                gather(&lhs.data[p0 * lhs.k_stride + r0..], lhs.k_stride, rows, &mut gathered[..k * GATHER_ROWS]);
                for (i, panel) in self.data.chunks_exact(self.k * PANEL).enumerate() {
                    let panel = &panel[p0 * PANEL..(p0 + k) * PANEL];
                    let first = i * PANEL;
                    let cols = PANEL.min(self.n - first);
                    for r in (0..rows).step_by(TILE_ROWS) {
                        let part = Lhs { data: &gathered[r..], row_stride: 1, k_stride: GATHER_ROWS };
                        let out = &mut out[(r0 + r) * self.n + first..];
                        let mut target = Target { out, stride: self.n, cols, accumulate: accumulate || p0 > 0 };
                        tile(TILE_ROWS.min(rows - r), k, part, panel, &mut target);
                    }
                }
            }
        }
    }

    /// One thread's rows, all panels.
    fn mul_block(&self, lhs: Lhs<'_>, out: &mut [f32], accumulate: bool) {
        if lhs.row_stride == 1 && lhs.k_stride > 1 {
            return self.mul_block_gathered(lhs, out, accumulate);
        }
        let m = out.len() / self.n;
        for (i, panel) in self.data.chunks_exact(self.k * PANEL).enumerate() {
            let first = i * PANEL;
            let cols = PANEL.min(self.n - first);
            for r in (0..m).step_by(TILE_ROWS) {
                let part = Lhs { data: &lhs.data[r * lhs.row_stride..], ..lhs };
                let out = &mut out[r * self.n + first..];
                tile(TILE_ROWS.min(m - r), self.k, part, panel, &mut Target { out, stride: self.n, cols, accumulate });
            }
        }
    }

    /// Few rows: each task takes some panels, so that every weight is read by one core only.
    fn mul_by_columns(&self, lhs: Lhs<'_>, m: usize, out: &mut [f32], accumulate: bool) {
        scatter_panels(m, self.n, out, accumulate, |i, part| {
            let panel = &self.data[i * self.k * PANEL..(i + 1) * self.k * PANEL];
            for r in (0..m).step_by(TILE_ROWS) {
                let rest = Lhs { data: &lhs.data[r * lhs.row_stride..], ..lhs };
                let out = &mut part[r * PANEL..];
                let mut target = Target { out, stride: PANEL, cols: PANEL, accumulate: false };
                tile(TILE_ROWS.min(m - r), self.k, rest, panel, &mut target);
            }
        });
    }
}

/// Has `product(i, part)` compute `part [m, 32]` of each panel of `n` columns, and brings the parts to `out [m, n]`.
pub(crate) fn scatter_panels(
    m: usize,
    n: usize,
    out: &mut [f32],
    accumulate: bool,
    product: impl Fn(usize, &mut [f32]) + Sync + Send,
) {
    let panels = n.div_ceil(PANEL);
    let mut by_panel = vec![0f32; panels * m * PANEL];
    // A task takes neighbouring panels: one stream from memory, and not a hand-over for each.
    let each = par::rows_per_chunk(panels);
    par::chunks_mut(&mut by_panel, each * m * PANEL, |task, parts| {
        for (i, part) in parts.chunks_exact_mut(m * PANEL).enumerate() {
            product(task * each + i, part);
        }
    });
    for (i, part) in by_panel.chunks_exact(m * PANEL).enumerate() {
        let first = i * PANEL;
        let cols = PANEL.min(n - first);
        for (r, row) in part.chunks_exact(PANEL).enumerate() {
            let target = &mut out[r * n + first..r * n + first + cols];
            if accumulate {
                target.iter_mut().zip(row).for_each(|(t, &v)| *t += v);
            } else {
                target.copy_from_slice(&row[..cols]);
            }
        }
    }
}

/// Copies `rows` neighbours from each row of a strided matrix into rows of sixteen.
fn gather(from: &[f32], stride: usize, rows: usize, to: &mut [f32]) {
    let to = to.as_chunks_mut::<GATHER_ROWS>().0;
    if rows == GATHER_ROWS {
        for (p, to) in to.iter_mut().enumerate() {
            if let Some(line) = from[p * stride..].first_chunk::<GATHER_ROWS>() {
                *to = *line;
            }
        }
    } else {
        for (p, to) in to.iter_mut().enumerate() {
            to[..rows].copy_from_slice(&from[p * stride..p * stride + rows]);
        }
    }
}

/// Where a tile of outputs goes.
pub(crate) struct Target<'a> {
    /// Begins with the tile's first output.
    pub(crate) out: &'a mut [f32],
    /// Distance between rows.
    pub(crate) stride: usize,
    /// Columns that exist.
    pub(crate) cols: usize,
    /// Whether to add.
    pub(crate) accumulate: bool,
}

/// Computes `rows x cols` outputs of one panel; `lhs.data` starts at the tile's first row.
#[inline]
pub(crate) fn tile(rows: usize, k: usize, lhs: Lhs<'_>, panel: &[f32], target: &mut Target<'_>) {
    assert!(rows >= 1 && k >= 1 && panel.len() >= k * PANEL && target.cols <= PANEL, "tile shape");
    assert!((rows - 1) * lhs.row_stride + (k - 1) * lhs.k_stride < lhs.data.len(), "tile out of range");
    assert!((rows - 1) * target.stride + target.cols <= target.out.len(), "tile output out of range");
    match rows {
        8 => fill::<8>(k, lhs, panel, target),
        7 => fill::<7>(k, lhs, panel, target),
        6 => fill::<6>(k, lhs, panel, target),
        5 => fill::<5>(k, lhs, panel, target),
        4 => fill::<4>(k, lhs, panel, target),
        3 => fill::<3>(k, lhs, panel, target),
        2 => fill::<2>(k, lhs, panel, target),
        _ => fill::<1>(k, lhs, panel, target),
    }
}

/// `out[r][c] (+)= Σ_p lhs(r, p) · panel[p][c]` for R rows.
#[inline]
fn fill<const R: usize>(k: usize, lhs: Lhs<'_>, panel: &[f32], target: &mut Target<'_>) {
    #[cfg(target_arch = "x86_64")]
    match super::simd_level() {
        // SAFETY: the processor has AVX-512 F; `tile` has checked that every address is inside the slices.
        super::SimdLevel::Avx512 => return unsafe { fill_avx512::<R>(k, lhs, panel, target) },
        // SAFETY: the processor has AVX2 and FMA.
        super::SimdLevel::Avx2 => return unsafe { fill_avx2::<R>(k, lhs, panel, target) },
        super::SimdLevel::Baseline => {}
    }
    fill_body::<R, { super::BASELINE_FMA }>(k, lhs, panel, target);
}

/// The portable loop, the definition of what the others compute.
#[inline(always)]
fn fill_body<const R: usize, const FMA: bool>(k: usize, lhs: Lhs<'_>, panel: &[f32], target: &mut Target<'_>) {
    const WIDTH: usize = 16;
    for c0 in (0..target.cols).step_by(WIDTH) {
        let mut sums = [[0f32; WIDTH]; R];
        for (p, b) in panel.chunks_exact(PANEL).take(k).enumerate() {
            let b = &b[c0..c0 + WIDTH];
            for (r, sum) in sums.iter_mut().enumerate() {
                let a = lhs.data[r * lhs.row_stride + p * lhs.k_stride];
                for l in 0..WIDTH {
                    sum[l] = super::math::fma::<FMA>(a, b[l], sum[l]);
                }
            }
        }
        let cols = WIDTH.min(target.cols - c0);
        for (r, sum) in sums.iter().enumerate() {
            let out = &mut target.out[r * target.stride + c0..r * target.stride + c0 + cols];
            if target.accumulate {
                out.iter_mut().zip(sum).for_each(|(o, &v)| *o += v);
            } else {
                out.copy_from_slice(&sum[..cols]);
            }
        }
    }
}

/// The portable loop with AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn fill_avx2<const R: usize>(k: usize, lhs: Lhs<'_>, panel: &[f32], target: &mut Target<'_>) {
    fill_body::<R, true>(k, lhs, panel, target);
}

/// AVX-512: R rows by two registers, stored straight to the output.
///
/// # Safety
/// `tile`'s assertions hold for `rows = R`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn fill_avx512<const R: usize>(k: usize, lhs: Lhs<'_>, panel: &[f32], target: &mut Target<'_>) {
    use std::arch::x86_64::{
        __mmask16, _mm512_add_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps,
        _mm512_set1_ps, _mm512_setzero_ps,
    };
    let mut sums = [[_mm512_setzero_ps(); 2]; R];
    let mut b = panel.as_ptr();
    let mut a = lhs.data.as_ptr();
    for _ in 0..k {
        // SAFETY: by this function's contract the two loads and the R reads are inside the slices.
        unsafe {
            let b0 = _mm512_loadu_ps(b);
            let b1 = _mm512_loadu_ps(b.add(16));
            for (r, sum) in sums.iter_mut().enumerate() {
                let x = _mm512_set1_ps(*a.wrapping_add(r.wrapping_mul(lhs.row_stride)));
                sum[0] = _mm512_fmadd_ps(x, b0, sum[0]);
                sum[1] = _mm512_fmadd_ps(x, b1, sum[1]);
            }
        }
        b = b.wrapping_add(PANEL);
        a = a.wrapping_add(lhs.k_stride);
    }
    let lanes = |cols: usize| -> __mmask16 { if cols >= 16 { !0 } else { (1u16 << cols) - 1 } };
    let masks = [lanes(target.cols), lanes(target.cols.saturating_sub(16))];
    for (r, sum) in sums.iter().enumerate() {
        let row = target.out.as_mut_ptr().wrapping_add(r.wrapping_mul(target.stride));
        for (half, &mask) in masks.iter().enumerate() {
            let at = row.wrapping_add(16 * half);
            let mut value = sum[half];
            // SAFETY: lanes outside the row's `cols` are masked off; the others are inside `target.out`.
            unsafe {
                if target.accumulate {
                    value = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, at), value);
                }
                _mm512_mask_storeu_ps(at, mask, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn naive(lhs: Lhs<'_>, b: &[f32], m: usize, k: usize, n: usize) -> Vec<f64> {
        let mut out = vec![0f64; m * n];
        for r in 0..m {
            for c in 0..n {
                for p in 0..k {
                    out[r * n + c] +=
                        f64::from(lhs.data[r * lhs.row_stride + p * lhs.k_stride]) * f64::from(b[p * n + c]);
                }
            }
        }
        out
    }

    fn wave(len: usize, f: f32) -> Vec<f32> {
        (0u16..).take(len).map(|i| (f32::from(i) * f).sin()).collect()
    }

    #[test]
    fn products_match_a_naive_loop_for_odd_shapes_strides_and_threads() {
        let pool = par::pool(2, 0, "test").unwrap();
        for (m, k, n) in [(1, 1, 1), (3, 7, 33), (8, 16, 32), (17, 5, 70), (40, 129, 31), (2, 128, 264)] {
            let (a, b) = (wave(m * k, 0.37), wave(k * n, 0.11));
            let mut w = vec![0f32; n * k];
            for p in 0..k {
                for c in 0..n {
                    w[c * k + p] = b[p * n + c];
                }
            }
            for lhs in [Lhs::rows(&a, k), Lhs::transposed(&a, m)] {
                let want = naive(lhs, &b, m, k, n);
                for packed in [Packed::from_rows(&b, k, n), Packed::from_weight(&w, n, k)] {
                    let mut one = vec![1f32; m * n];
                    packed.mul(lhs, &mut one, true);
                    let mut two = vec![0f32; m * n];
                    pool.install(|| packed.mul(lhs, &mut two, false));
                    for i in 0..m * n {
                        assert!((f64::from(two[i]) - want[i]).abs() < 1e-5 * (k as f64), "{m} {k} {n}");
                        assert!((f64::from(one[i]) - 1.0 - want[i]).abs() < 1e-5 * (k as f64), "{m} {k} {n}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_rows_bits_do_not_depend_on_its_neighbours() {
        let (k, n, m) = (72, 100, 23);
        let (a, w) = (wave(m * k, 0.7), wave(n * k, 0.3));
        let packed = Packed::from_weight(&w, n, k);
        let mut all = vec![0f32; m * n];
        packed.mul(Lhs::rows(&a, k), &mut all, false);
        for r in 0..m {
            let mut one = vec![0f32; n];
            packed.mul(Lhs::rows(&a[r * k..(r + 1) * k], k), &mut one, false);
            assert_eq!(one, all[r * n..(r + 1) * n]);
        }
    }
}
