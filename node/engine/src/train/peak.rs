//! What this machine's threads reach in a product as large as training has them: the measure of a step's arithmetic.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use crate::kernels::matmul::{Lhs, Packed};
use crate::par;

/// Rows, reduction and columns of the product: 134 million operations, and 3 MiB of operands a thread.
const SHAPE: (usize, usize, usize) = (256, 512, 512);
/// Products a thread, and tries of which the best counts, since other processes only ever slow one down.
const PRODUCTS: usize = 4;
const TRIES: usize = 3;

/// Floating-point operations a second of the caller's pool, every thread with products of its own.
#[expect(clippy::cast_precision_loss, reason = "counts are below 2^53")]
pub(super) fn flops_per_s() -> f64 {
    let (rows, inner, columns) = SHAPE;
    let threads = par::workers();
    let weight = Packed::from_weight(&vec![0.5; columns * inner], columns, inner);
    let left = vec![0.25f32; rows * inner];
    let outputs: Vec<Mutex<Vec<f32>>> = (0..threads).map(|_| Mutex::new(vec![0.0; rows * columns])).collect();
    let mut best = f64::INFINITY;
    for _ in 0..TRIES {
        let start = Instant::now();
        par::for_each(threads, |t| {
            let mut out = outputs[t].lock().unwrap_or_else(PoisonError::into_inner);
            par::serial(|| (0..PRODUCTS).for_each(|_| weight.mul(Lhs::rows(&left, inner), &mut out, false)));
        });
        best = best.min(start.elapsed().as_secs_f64());
    }
    (2 * rows * inner * columns * PRODUCTS * threads) as f64 / best.max(1e-9)
}
