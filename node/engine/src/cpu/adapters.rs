//! Where the backward pass leaves weight gradients: in full, or as those of low-rank adapters.
//!
//! With `W' = W + s·B·A` and `y = x W'ᵀ`, the gradient `g` of `y` gives `dB = s·gᵀ(x Aᵀ)` and `dA = s·(g B)ᵀ x`: products
//! of the adapter's rank, where `dW = gᵀ x` would take a third of the whole step.

use std::ops::Range;

use candle_core::{Result, Tensor};

use super::forward::sized;
use crate::kernels::matmul::{Lhs, Packed};
use crate::tensors::with_f32;
use crate::train::lora::LoraLayout;

/// Both factors of every adapter, packed for the backward pass.
#[derive(Debug)]
pub(crate) struct AdapterPacks {
    scale: f32,
    rank: usize,
    modules: Vec<ModulePacks>,
    /// Modules of each fused parameter.
    by_param: Vec<Range<usize>>,
}

#[derive(Debug)]
struct ModulePacks {
    row: usize,
    outputs: usize,
    /// `Aᵀ [in, rank]`.
    down: Packed,
    /// `B [out, rank]`.
    up: Packed,
}

impl AdapterPacks {
    /// Packs `values`, `A` and `B` of each module in turn, for a model of `params` fused parameters.
    pub(crate) fn new(layout: &LoraLayout, values: &[Tensor], params: usize) -> Result<Self> {
        let rank = layout.rank();
        let pack = |(m, v): (&crate::train::lora::AdaptedModule, &[Tensor])| {
            Ok(ModulePacks {
                row: m.row,
                outputs: m.outputs,
                down: with_f32(&v[0], "adapter", |a| Ok(Packed::from_weight(a, rank, m.inputs)))?,
                up: with_f32(&v[1], "adapter", |b| Ok(Packed::from_rows(b, m.outputs, rank)))?,
            })
        };
        let modules = layout.modules.iter().zip(values.chunks_exact(2)).map(pack).collect::<Result<_>>()?;
        let mut by_param = vec![0..0; params];
        for (param, range) in layout.by_param() {
            by_param[param] = range;
        }
        Ok(Self { scale: layout.scale(), rank, modules, by_param })
    }
}

/// Buffers of adapter gradients, kept between products.
#[derive(Debug, Default)]
pub(crate) struct AdapterScratch {
    projected: Vec<f32>,
    returned: Vec<f32>,
    vector: Vec<f32>,
    pack: Packed,
}

/// Takes the gradients of fused parameters as the backward pass finds them, and adds them up.
#[derive(Debug)]
pub(crate) enum GradientSink<'a> {
    /// One buffer a fused parameter.
    Full(&'a mut [Vec<f32>]),
    /// Two buffers a module, `A` and `B`; what is frozen is thrown away.
    Adapters(&'a AdapterPacks, &'a mut [Vec<f32>]),
}

impl GradientSink<'_> {
    /// A matrix `[n, k]` that took `x [tokens, k]` to rows with the gradient `g [tokens, n]`.
    pub(crate) fn matrix(
        &mut self,
        param: usize,
        (g, n): (&[f32], usize),
        (x, k): (&[f32], usize),
        pack: &mut Packed,
        s: &mut AdapterScratch,
    ) {
        match self {
            Self::Full(grads) => {
                pack.repack_rows(x, x.len() / k, k);
                pack.mul(Lhs::transposed(g, n), &mut grads[param], true);
            }
            Self::Adapters(packs, grads) => packs.add(param, (g, n), (x, k), pack, s, grads),
        }
    }

    /// The buffer of a vector's gradient, to be added to.
    pub(crate) fn vector<'s>(&'s mut self, param: usize, len: usize, s: &'s mut AdapterScratch) -> &'s mut [f32] {
        match self {
            Self::Full(grads) => &mut grads[param],
            Self::Adapters(..) => sized(&mut s.vector, len),
        }
    }

    /// The embeddings' or output layer's buffer, if they are trained.
    pub(crate) fn vocabulary(&mut self, param: usize) -> Option<&mut [f32]> {
        match self {
            Self::Full(grads) => Some(&mut grads[param]),
            Self::Adapters(..) => None,
        }
    }
}

impl AdapterPacks {
    fn add(
        &self,
        param: usize,
        (g, n): (&[f32], usize),
        (x, k): (&[f32], usize),
        pack: &mut Packed,
        s: &mut AdapterScratch,
        grads: &mut [Vec<f32>],
    ) {
        let (modules, rank) = (self.by_param[param].clone(), self.rank);
        let tokens = x.len() / k;
        if modules.is_empty() || tokens == 0 {
            return;
        }
        // One packed copy of `x` for all modules that read it.
        pack.repack_rows(x, tokens, k);
        for i in modules {
            let m = &self.modules[i];
            let projected = sized(&mut s.projected, tokens * rank);
            m.down.mul(Lhs::rows(x, k), projected, false);
            let returned = sized(&mut s.returned, tokens * rank);
            m.up.mul(Lhs { data: &g[m.row..], row_stride: n, k_stride: 1 }, returned, false);
            for v in projected.iter_mut().chain(returned.iter_mut()) {
                *v *= self.scale;
            }
            pack.mul(Lhs::transposed(returned, rank), &mut grads[2 * i], true);
            s.pack.repack_rows(projected, tokens, rank);
            debug_assert_eq!(grads[2 * i + 1].len(), m.outputs * rank, "B's gradient");
            s.pack.mul(Lhs { data: &g[m.row..], row_stride: 1, k_stride: n }, &mut grads[2 * i + 1], true);
        }
    }
}
