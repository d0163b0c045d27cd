//! The forward pass for generation by candle operators, for devices without own kernels.
//!
//! Keys and values live in one slab per layer, `[slots · length, kv_heads · head_dim]`; each step writes all new
//! rows with one scatter and reads padded sequences with one gather, whatever the number of sequences.

use std::sync::Arc;

use candle_core::{D, DType, Device, Result, Tensor};

use super::runner::Segment;
use crate::composed::{index, project_qkv, repeat_heads, rms_norm, rotate, softmax, swiglu};
use crate::config::LlamaConfig;
use crate::error::CheckpointError;
use crate::kernels::attention::AttentionShape;
use crate::kernels::rope::RopeTable;
use crate::params::{attention_shape, fuse, head_index, last_norm_index, layer_params, norm_eps};
use crate::weights::Weights;

/// Positions per slot to start with; doubled when a sequence outgrows them.
const FIRST_LENGTH: usize = 256;

/// Fused weights on the device.
pub(crate) struct DeviceWeights {
    params: Vec<Tensor>,
    device: Device,
}

impl DeviceWeights {
    /// Moves checked weights to the device.
    pub(crate) fn new(
        cfg: &LlamaConfig,
        weights: &Weights,
        device: &Device,
    ) -> std::result::Result<Self, CheckpointError> {
        Ok(Self { params: fuse(cfg, weights, device)?, device: device.clone() })
    }
}

/// Generation on any device.
pub(crate) struct DeviceRunner {
    weights: Arc<DeviceWeights>,
    shape: AttentionShape,
    rope: Arc<RopeTable>,
    eps: f32,
    cfg: LlamaConfig,
    lengths: Vec<usize>,
    slab_length: usize,
    slabs: Vec<(Tensor, Tensor)>,
}

/// Indices of one step, on the device.
struct Plan {
    ids: Tensor,
    cos: Tensor,
    sin: Tensor,
    /// Slab rows of the new tokens, expanded to the row width.
    write: Tensor,
    /// Slab rows of each sequence, padded: `[sequences · keys]`.
    read: Tensor,
    /// Rows of the new tokens, padded: `[sequences · queries]`.
    pad: Tensor,
    /// Places of the new tokens in the padded queries.
    unpad: Tensor,
    /// `[sequences, 1, queries, keys]`, additive.
    mask: Tensor,
    sequences: usize,
    queries: usize,
    keys: usize,
}

impl DeviceRunner {
    /// A runner with `slots` sequences at most.
    pub(crate) fn new(cfg: &LlamaConfig, weights: Arc<DeviceWeights>, rope: Arc<RopeTable>, slots: usize) -> Self {
        Self {
            weights,
            shape: attention_shape(cfg),
            rope,
            eps: norm_eps(cfg),
            cfg: cfg.clone(),
            lengths: vec![0; slots],
            slab_length: 0,
            slabs: Vec::new(),
        }
    }

    /// Takes other weights; keys and values stay.
    pub(crate) fn swap(&mut self, weights: Arc<DeviceWeights>) {
        self.weights = weights;
    }

    /// Opens a slot with nothing known.
    pub(crate) fn open(&mut self, slot: usize) -> usize {
        self.lengths[slot] = 0;
        0
    }

    /// Frees a slot.
    pub(crate) fn close(&mut self, slot: usize) {
        self.lengths[slot] = 0;
    }

    /// Makes every slot at least `length` positions long.
    fn grow(&mut self, length: usize) -> Result<()> {
        if length <= self.slab_length {
            return Ok(());
        }
        let new = length.max(FIRST_LENGTH).next_power_of_two().min(self.rope.positions().max(length));
        let (slots, width, old) = (self.lengths.len(), self.shape.kv_len(), self.slab_length);
        let device = &self.weights.device;
        let widen = |slab: Option<&Tensor>| -> Result<Tensor> {
            let Some(slab) = slab else { return Tensor::zeros((slots * new, width), DType::F32, device) };
            let more = Tensor::zeros((slots, new - old, width), DType::F32, device)?;
            Tensor::cat(&[&slab.reshape((slots, old, width))?, &more], 1)?.reshape((slots * new, width))
        };
        let mut slabs = Vec::with_capacity(self.cfg.num_hidden_layers);
        for l in 0..self.cfg.num_hidden_layers {
            let (k, v) = (self.slabs.get(l).map(|s| &s.0), self.slabs.get(l).map(|s| &s.1));
            slabs.push((widen(k)?, widen(v)?));
        }
        self.slabs = slabs;
        self.slab_length = new;
        Ok(())
    }

    /// The indices of a step.
    fn plan(&self, segments: &[Segment<'_>]) -> Result<Plan> {
        let queries = segments.iter().map(|s| s.tokens.len()).max().unwrap_or(0);
        let keys = segments.iter().map(|s| self.lengths[s.slot] + s.tokens.len()).max().unwrap_or(0);
        let mut ids = Vec::new();
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        let (mut write, mut read, mut pad, mut unpad, mut mask) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for (b, s) in segments.iter().enumerate() {
            let (first, start, n) = (ids.len(), self.lengths[s.slot], s.tokens.len());
            ids.extend_from_slice(s.tokens);
            for t in 0..n {
                let (c, d) = self.rope.row(start + t);
                cos.extend_from_slice(c);
                sin.extend_from_slice(d);
                write.push(index(s.slot * self.slab_length + start + t)?);
                unpad.push(index(b * queries + t)?);
            }
            for k in 0..keys {
                read.push(index(s.slot * self.slab_length + k.min(start + n - 1))?);
            }
            for q in 0..queries {
                pad.push(index(first + q.min(n - 1))?);
                mask.extend((0..keys).map(|k| if k <= start + q.min(n - 1) { 0f32 } else { -1e30 }));
            }
        }
        let device = &self.weights.device;
        let (rows, half, sequences) = (ids.len(), self.shape.head_dim / 2, segments.len());
        let width = self.shape.kv_len();
        let vec = |v: Vec<u32>| {
            let n = v.len();
            Tensor::from_vec(v, n, device)
        };
        Ok(Plan {
            ids: vec(ids)?,
            cos: Tensor::from_vec(cos, (rows, 1, half), device)?,
            sin: Tensor::from_vec(sin, (rows, 1, half), device)?,
            write: vec(write)?.unsqueeze(1)?.broadcast_as((rows, width))?.contiguous()?,
            read: vec(read)?,
            pad: vec(pad)?,
            unpad: vec(unpad)?,
            mask: Tensor::from_vec(mask, (sequences, 1, queries, keys), device)?,
            sequences,
            queries,
            keys,
        })
    }

    /// Runs the segments; `logits` receives `[wanted segments, vocab]` in segment order.
    pub(crate) fn forward(&mut self, segments: &[Segment<'_>], logits: &mut Vec<f32>) -> Result<()> {
        logits.clear();
        let longest = segments.iter().map(|s| self.lengths[s.slot] + s.tokens.len()).max().unwrap_or(0);
        if longest == 0 {
            return Ok(());
        }
        self.grow(longest)?;
        let plan = self.plan(segments)?;
        let params = &self.weights.params;
        let mut x = params[0].index_select(&plan.ids, 0)?;
        for (p, slab) in layer_params(&self.cfg, params).zip(&self.slabs) {
            let qkv = project_qkv(&self.cfg, self.shape, self.eps, p, &rms_norm(&x, &p[0], self.eps)?)?;
            let mixed = self.attention(&plan, &qkv, slab)?;
            x = x.add(&mixed.matmul(&p[2].t()?)?)?;
            let inner = swiglu(&rms_norm(&x, &p[3], self.eps)?.matmul(&p[4].t()?)?)?;
            x = x.add(&inner.matmul(&p[5].t()?)?)?;
        }
        let mut rows = Vec::new();
        let mut row = 0;
        for s in segments {
            row += s.tokens.len();
            self.lengths[s.slot] += s.tokens.len();
            if s.wanted {
                rows.push(index(row - 1)?);
            }
        }
        if rows.is_empty() {
            return Ok(());
        }
        let n = rows.len();
        let picked = x.index_select(&Tensor::from_vec(rows, n, &self.weights.device)?, 0)?;
        let (norm, head) = (&params[last_norm_index(&self.cfg)], &params[head_index(&self.cfg)]);
        let out = rms_norm(&picked, norm, self.eps)?.matmul(&head.t()?)?;
        *logits = out.flatten_all()?.to_vec1::<f32>()?;
        Ok(())
    }

    /// Attention of all new tokens over their sequences' slabs.
    fn attention(&self, plan: &Plan, qkv: &Tensor, slab: &(Tensor, Tensor)) -> Result<Tensor> {
        let (rows, d, shape) = (qkv.dim(0)?, self.shape.head_dim, self.shape);
        let (ql, kl) = (shape.q_len(), shape.kv_len());
        let part = |from: usize, n: usize| qkv.narrow(1, from, n * d)?.reshape((rows, n, d));
        let q = rotate(&part(0, shape.heads)?, &plan.cos, &plan.sin)?;
        let k = rotate(&part(ql, shape.kv_heads)?, &plan.cos, &plan.sin)?.reshape((rows, kl))?.contiguous()?;
        let v = part(ql + kl, shape.kv_heads)?.reshape((rows, kl))?.contiguous()?;
        slab.0.scatter_set(&plan.write, &k, 0)?;
        slab.1.scatter_set(&plan.write, &v, 0)?;
        let heads = |x: &Tensor| {
            let x = x.index_select(&plan.read, 0)?.reshape((plan.sequences, plan.keys, shape.kv_heads, d))?;
            repeat_heads(&x.transpose(1, 2)?.contiguous()?, shape)
        };
        let q = q.reshape((rows, ql))?.index_select(&plan.pad, 0)?;
        let q = q.reshape((plan.sequences, plan.queries, shape.heads, d))?.transpose(1, 2)?.contiguous()?;
        let scores = (q.matmul(&heads(&slab.0)?.transpose(D::Minus1, D::Minus2)?)? * f64::from(shape.scale()))?;
        let out = softmax(&scores.broadcast_add(&plan.mask)?)?.matmul(&heads(&slab.1)?)?;
        let out = out.transpose(1, 2)?.reshape((plan.sequences * plan.queries, ql))?;
        out.index_select(&plan.unpad, 0)
    }
}
