//! Finite differences for every kernel that has a backward.

use std::ops::Range;

use super::attention::AttentionShape;
use super::attention_grad::{packed_backward, packed_forward};
use super::logprob::{logprob_entropy, logprob_entropy_grad};
use super::matmul::{Lhs, Packed};
use super::rope::RopeTable;
use super::{at_every_level, elementwise, norm};
use crate::packing::Segment;

/// A smooth, varied input.
fn wave(len: usize, phase: f32) -> Vec<f32> {
    (0u16..).take(len).map(|i| (f32::from(i) * 0.731 + phase).sin() * 0.8).collect()
}

fn slice(rows: Range<usize>) -> Vec<Range<usize>> {
    std::iter::once(rows).collect()
}

/// Compares `grad`, the gradient of `Σ wave · f(x)`, with central differences of `f`.
///
/// Step 1e-2 in f32: truncation is of order 1e-4 and rounding of order 1e-5 of the largest gradient, so 3e-3 of it
/// leaves a margin above both.
fn check(what: &str, x: &[f32], grad: &[f32], f: impl Fn(&[f32]) -> Vec<f32>) {
    assert_eq!(x.len(), grad.len(), "{what}");
    let value = |x: &[f32]| -> f64 {
        let y = f(x);
        y.iter().zip(wave(y.len(), 0.4)).map(|(&y, w)| f64::from(y) * f64::from(w)).sum()
    };
    let largest = grad.iter().fold(1e-3f32, |a, g| a.max(g.abs()));
    for (i, &got) in grad.iter().enumerate() {
        let at = |step: f32| {
            let mut moved = x.to_vec();
            moved[i] += step;
            value(&moved)
        };
        let want = (at(1e-2) - at(-1e-2)) / 2e-2;
        assert!((f64::from(got) - want).abs() < 3e-3 * f64::from(largest), "{what}[{i}]: expected {want}, got {got}");
    }
}

#[test]
fn rms_norm_has_the_gradients_of_its_forward() {
    // 70 rows cross the block over which the weight's gradient is summed.
    let (rows, n) = (70, 19);
    let (x, w, g) = (wave(rows * n, 0.1), wave(n, 1.3), wave(rows * n, 0.4));
    let forward = |x: &[f32], w: &[f32]| {
        let mut y = vec![0f32; x.len()];
        norm::forward(x, w, 1e-5, &mut y);
        y
    };
    let (mut dx, mut dw, mut y) = (vec![0f32; rows * n], vec![0f32; n], vec![0f32; rows * n]);
    norm::backward(&x, &w, &g, 1e-5, &mut dx, &mut dw, &mut y);
    assert_eq!(y, forward(&x, &w));
    check("x", &x, &dx, |x| forward(x, &w));
    check("w", &w, &dw, |w| forward(&x, w));
}

#[test]
fn norms_of_heads_have_the_gradients_of_their_forward_and_leave_values_alone() {
    // 70 tokens cross the block over which the weights' gradient is summed.
    let (tokens, shape) = (70, AttentionShape { heads: 3, kv_heads: 1, head_dim: 6 });
    let (x, w) = (wave(tokens * shape.qkv_len(), 0.1), wave(2 * shape.head_dim, 1.3));
    let forward = |x: &[f32], w: &[f32]| {
        let mut y = x.to_vec();
        norm::heads_forward(&mut y, w, 1e-5, shape);
        y
    };
    let y = forward(&x, &w);
    for (x, y) in x.chunks_exact(shape.qkv_len()).zip(y.chunks_exact(shape.qkv_len())) {
        let v = shape.q_len() + shape.kv_len();
        assert_eq!(x[v..], y[v..]);
        assert_ne!(x[..v], y[..v]);
    }
    let (mut g, mut dw) = (wave(x.len(), 0.4), vec![0f32; w.len()]);
    norm::heads_backward(&x, &w, 1e-5, shape, &mut g, &mut dw);
    check("x", &x, &g, |x| forward(x, &w));
    check("w", &w, &dw, |w| forward(&x, w));
}

#[test]
fn a_bias_has_the_sum_of_the_gradients() {
    let (rows, n) = (70, 19);
    let (b, g) = (wave(n, 0.7), wave(rows * n, 0.4));
    let mut db = vec![0f32; n];
    elementwise::add_column_sums(&g, n, &mut db);
    check("bias", &b, &db, |b| {
        let mut y = vec![0f32; rows * n];
        elementwise::fill_rows(b, &mut y);
        y
    });
}

#[test]
fn swiglu_has_the_gradient_of_its_forward() {
    let (rows, inner) = (3, 19);
    let (x, g) = (wave(rows * 2 * inner, 0.2), wave(rows * inner, 0.4));
    let forward = |x: &[f32]| {
        let mut y = vec![0f32; rows * inner];
        elementwise::swiglu(x, inner, &mut y);
        y
    };
    let (mut dx, mut y) = (vec![0f32; x.len()], vec![0f32; rows * inner]);
    elementwise::swiglu_grad(&x, &g, inner, &mut dx, &mut y);
    check("x", &x, &dx, forward);
}

#[test]
fn products_have_the_gradients_that_the_backward_pass_takes() {
    // 300 rows cross the reduction blocks of the transposed product.
    let (rows, k, n) = (300, 5, 9);
    let (x, w, g) = (wave(rows * k, 0.2), wave(n * k, 0.9), wave(rows * n, 0.4));
    let forward = |x: &[f32], w: &[f32]| {
        let mut y = vec![0f32; rows * n];
        Packed::from_weight(w, n, k).mul(Lhs::rows(x, k), &mut y, false);
        y
    };
    let mut dx = vec![0f32; rows * k];
    Packed::from_rows(&w, n, k).mul(Lhs::rows(&g, n), &mut dx, false);
    check("x", &x, &dx, |x| forward(x, &w));
    let mut dw = vec![0f32; n * k];
    Packed::from_rows(&x, rows, k).mul(Lhs::transposed(&g, n), &mut dw, true);
    check("w", &w, &dw, |w| forward(&x, w));
}

#[test]
fn logprob_and_entropy_have_the_gradients_of_their_forward() {
    let (logits, g) = (wave(37, 0.2), wave(2, 0.4));
    for target in [0, 16, 36] {
        let mut dx = logits.clone();
        logprob_entropy_grad(&mut dx, target, g[0], g[1]);
        check("logits", &logits, &dx, |x| {
            let (logprob, entropy) = logprob_entropy(x, target);
            vec![logprob, entropy]
        });
    }
}

#[test]
fn rotated_attention_has_the_gradient_of_its_forward_over_packed_sequences() {
    // Lengths 1, 18 (crosses a block of 16) and 7; widths with and without whole registers, one head per group and two.
    for (heads, kv_heads, head_dim) in [(4, 2, 6), (2, 2, 16), (3, 1, 10)] {
        let shape = AttentionShape { heads, kv_heads, head_dim };
        let rope = RopeTable::new(head_dim, 10_000.0, None, 32);
        // Behind them a fork after ten tokens of the second, and one after three of that.
        let rows = [0..1, 1..19, 19..26, 26..31, 31..40];
        let prefixes = [vec![], vec![], vec![], slice(1..11), [slice(1..11), slice(26..29)].concat()];
        let segments: Vec<Segment> =
            rows.into_iter().zip(prefixes).map(|(rows, prefix)| Segment { prefix, rows }).collect();
        let (x, g) = (wave(40 * shape.qkv_len(), 0.3), wave(40 * shape.q_len(), 0.4));
        let mut dx = vec![0f32; x.len()];
        packed_backward(&x, &g, &segments, shape, &rope, &mut dx);
        check("qkv", &x, &dx, |x| {
            let mut y = vec![0f32; 40 * shape.q_len()];
            packed_forward(x, &segments, shape, &rope, &mut y);
            y
        });
    }
}

#[test]
fn every_instruction_set_computes_the_same_within_rounding() {
    let shape = AttentionShape { heads: 2, kv_heads: 1, head_dim: 24 };
    let rope = RopeTable::new(24, 10_000.0, None, 32);
    let of_rows = |rows, prefix| Segment { prefix, rows };
    let segments = [of_rows(0..3, vec![]), of_rows(3..12, vec![]), of_rows(12..20, slice(3..9))];
    let run = || {
        let mut out = Vec::new();
        let x = wave(20 * shape.qkv_len(), 0.3);
        let mut y = vec![0f32; 20 * shape.q_len()];
        packed_forward(&x, &segments, shape, &rope, &mut y);
        let mut dx = vec![0f32; x.len()];
        packed_backward(&x, &y, &segments, shape, &rope, &mut dx);
        // Rows of 48, products of 20 x 48 x 70: whole and partial tiles.
        let mut product = vec![0f32; 20 * 70];
        Packed::from_weight(&wave(70 * 48, 0.2), 70, 48).mul(Lhs::rows(&y, 48), &mut product, false);
        let mut transposed = vec![1f32; 48 * 70];
        Packed::from_rows(&product, 20, 70).mul(Lhs::transposed(&y, 48), &mut transposed, true);
        let (logprob, entropy) = logprob_entropy(&product[..70], 3);
        out.extend(y.into_iter().chain(dx).chain(product).chain(transposed).chain([logprob, entropy]));
        out
    };
    let best = run();
    at_every_level(|level| {
        for (i, (a, b)) in run().iter().zip(&best).enumerate() {
            assert!((a - b).abs() <= 2e-5 * b.abs().max(1.0), "{level:?}, value {i}: {a} against {b}");
        }
    });
}
