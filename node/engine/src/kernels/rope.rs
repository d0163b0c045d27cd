//! Rotary position embedding with the half-split (NeoX, Hugging Face) pairing.

use crate::config::Llama3Scaling;

/// Cosines and sines for positions `0..positions`, each `[positions, head_dim / 2]`.
#[derive(Debug)]
pub(crate) struct RopeTable {
    half: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RopeTable {
    /// Angles `position · theta^(-2i / head_dim)`, the frequencies scaled if asked for, the product taken in f32 as
    /// `transformers` does.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        reason = "positions and dimensions are below 2^24; f32 is the reference's precision"
    )]
    pub(crate) fn new(head_dim: usize, theta: f64, scaling: Option<&Llama3Scaling>, positions: usize) -> Self {
        let half = head_dim / 2;
        let freqs = (0..half).map(|i| 1.0 / theta.powf(2.0 * i as f64 / head_dim as f64));
        let freqs: Vec<f32> = freqs.map(|f| scaling.map_or(f, |s| s.scale(f)) as f32).collect();
        let mut cos = Vec::with_capacity(positions * half);
        let mut sin = Vec::with_capacity(positions * half);
        for p in 0..positions {
            for &f in &freqs {
                let angle = f64::from(p as f32 * f);
                cos.push(angle.cos() as f32);
                sin.push(angle.sin() as f32);
            }
        }
        Self { half, cos, sin }
    }

    /// Positions covered.
    pub(crate) fn positions(&self) -> usize {
        self.cos.len().checked_div(self.half).unwrap_or(usize::MAX)
    }

    /// The row of cosines and the row of sines of one position.
    #[inline(always)]
    pub(crate) fn row(&self, position: usize) -> (&[f32], &[f32]) {
        let at = position * self.half;
        (&self.cos[at..at + self.half], &self.sin[at..at + self.half])
    }
}

/// Rotates each head of `x [heads, head_dim]` in place; `inverse` turns back (the transpose, for gradients).
#[inline(always)]
pub(crate) fn rotate(x: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32], inverse: bool) {
    let half = head_dim / 2;
    for head in x.chunks_exact_mut(head_dim) {
        let (lo, hi) = head.split_at_mut(half);
        for i in 0..half {
            let s = if inverse { -sin[i] } else { sin[i] };
            let (a, b) = (lo[i], hi[i]);
            lo[i] = a * cos[i] - b * s;
            hi[i] = b * cos[i] + a * s;
        }
    }
}
