//! The forward pass for generation on the CPU: plain slices, packed weights, no tensor per operation.

use std::sync::{Arc, Mutex, PoisonError};

use super::kv::{BlockStore, KvCache, KvLayout};
use super::runner::Segment;
use crate::config::LlamaConfig;
use crate::cpu::CpuModel;
use crate::kernels::attention::{BLOCK, attend};
use crate::kernels::matmul::Lhs;
use crate::kernels::rope::rotate;
use crate::kernels::{elementwise, norm};
use crate::par;

/// Weights up to this size are read by every thread for its own sequences; larger ones are split over the threads.
const SHARED_READ_BYTES: u64 = 32 << 20;
/// Sequences per task below which splitting further costs more than it balances.
const ROWS_PER_TASK_MIN: usize = 16;

/// Generation on the CPU.
pub(crate) struct CpuRunner {
    model: Arc<CpuModel>,
    layout: KvLayout,
    store: BlockStore,
    caches: Vec<Option<KvCache>>,
    by_sequence: bool,
    scratch: Mutex<Vec<Scratch>>,
}

/// Activations of one task, kept between steps.
#[derive(Default)]
struct Scratch {
    x: Vec<f32>,
    h: Vec<f32>,
    qkv: Vec<f32>,
    mixed: Vec<f32>,
    gate_up: Vec<f32>,
    inner: Vec<f32>,
    picked: Vec<f32>,
}

/// One sequence's part of a forward pass.
struct Work<'a> {
    segment: &'a Segment<'a>,
    cache: KvCache,
}

impl CpuRunner {
    /// A runner with `slots` sequences at most.
    pub(crate) fn new(cfg: &LlamaConfig, model: Arc<CpuModel>, slots: usize) -> Self {
        let layout = KvLayout { shape: model.shape, layers: model.layers.len() };
        Self {
            model,
            layout,
            store: BlockStore::new(layout),
            caches: (0..slots).map(|_| None).collect(),
            by_sequence: cfg.parameter_count() * 4 <= SHARED_READ_BYTES,
            scratch: Mutex::default(),
        }
    }

    /// Takes other weights; running sequences keep their keys and values, remembered prefixes go.
    pub(crate) fn swap(&mut self, model: Arc<CpuModel>) {
        self.model = model;
        self.store.forget();
    }

    /// Opens a slot; returns how many prompt tokens need no computing.
    pub(crate) fn open(&mut self, slot: usize, prompt: &[u32]) -> usize {
        let cache = self.store.start(prompt);
        let known = cache.len;
        self.caches[slot] = Some(cache);
        known
    }

    /// Prompt tokens that `open` would find.
    pub(crate) fn known(&self, prompt: &[u32]) -> usize {
        self.store.known(prompt)
    }

    /// Shares the computed prompt of a slot with later requests.
    pub(crate) fn remember(&mut self, slot: usize, prompt: &[u32]) {
        if let Some(Some(cache)) = self.caches.get(slot) {
            self.store.remember(prompt, cache);
        }
    }

    /// Frees a slot.
    pub(crate) fn close(&mut self, slot: usize) {
        if let Some(cache) = self.caches[slot].take() {
            self.store.release(cache);
        }
    }

    /// Runs the segments; `logits` receives `[wanted segments, vocab]` in segment order. Runs in the caller's pool.
    pub(crate) fn forward(&mut self, segments: &[Segment<'_>], logits: &mut Vec<f32>) {
        let mut work: Vec<Work<'_>> = Vec::with_capacity(segments.len());
        for segment in segments {
            let mut cache = self.caches[segment.slot].take().unwrap_or_default();
            self.store.reserve(&mut cache, segment.tokens.len());
            work.push(Work { segment, cache });
        }
        let vocab = self.model.vocab;
        let wanted = |w: &[Work<'_>]| w.iter().filter(|w| w.segment.wanted).count();
        logits.clear();
        logits.resize(wanted(&work) * vocab, 0.0);
        let tasks = self.tasks(segments);
        if tasks <= 1 {
            self.run(&mut work, logits);
        } else {
            let total: usize = segments.iter().map(|s| s.tokens.len()).sum();
            let mut parts = Vec::with_capacity(tasks);
            let (mut rest, mut rest_logits) = (work.as_mut_slice(), logits.as_mut_slice());
            for task in 0..tasks {
                // Consecutive segments up to an even share of what is left.
                let share = total.div_ceil(tasks);
                let mut tokens = 0;
                let mut take = 0;
                while take < rest.len() && (tokens < share || task + 1 == tasks) {
                    tokens += rest[take].segment.tokens.len();
                    take += 1;
                }
                let (part, tail) = rest.split_at_mut(take);
                let (part_logits, tail_logits) = rest_logits.split_at_mut(wanted(part) * vocab);
                parts.push(Mutex::new((part, part_logits)));
                (rest, rest_logits) = (tail, tail_logits);
            }
            par::for_each(tasks, |i| {
                let mut part = parts[i].lock().unwrap_or_else(PoisonError::into_inner);
                let (work, logits) = &mut *part;
                par::serial(|| self.run(work, logits));
            });
        }
        for w in work {
            self.caches[w.segment.slot] = Some(w.cache);
        }
    }

    /// How many groups of sequences to run side by side.
    fn tasks(&self, segments: &[Segment<'_>]) -> usize {
        let workers = par::workers();
        if !self.by_sequence || workers == 1 {
            return 1;
        }
        let rows: usize = segments.iter().map(|s| s.tokens.len()).sum();
        let most = if rows >= 2 * workers * ROWS_PER_TASK_MIN { 2 * workers } else { workers };
        most.min(segments.len())
    }

    /// The forward pass of some sequences.
    fn run(&self, work: &mut [Work<'_>], logits: &mut [f32]) {
        if work.is_empty() {
            return;
        }
        let mut s = self.scratch.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
        let m = &*self.model;
        let rows: usize = work.iter().map(|w| w.segment.tokens.len()).sum();
        s.x.resize(rows * m.hidden, 0.0);
        let tokens = work.iter().flat_map(|w| w.segment.tokens);
        for (row, &token) in s.x.chunks_exact_mut(m.hidden).zip(tokens) {
            m.embed(token, row);
        }
        s.h.resize(rows * m.hidden, 0.0);
        s.qkv.resize(rows * m.shape.qkv_len(), 0.0);
        s.mixed.resize(rows * m.shape.q_len(), 0.0);
        s.gate_up.resize(rows * 2 * m.inner, 0.0);
        s.inner.resize(rows * m.inner, 0.0);
        for (l, layer) in m.layers.iter().enumerate() {
            norm::forward(&s.x, &layer.norm1, m.eps, &mut s.h);
            layer.project(&s.h, m.hidden, &mut s.qkv);
            layer.norm_heads(&mut s.qkv, m.shape, m.eps);
            self.attention(l, work, &mut s.qkv, &mut s.mixed);
            layer.output.mul(Lhs::rows(&s.mixed, m.shape.q_len()), &mut s.x, true);
            norm::forward(&s.x, &layer.norm2, m.eps, &mut s.h);
            layer.gate_up.mul(Lhs::rows(&s.h, m.hidden), &mut s.gate_up, false);
            elementwise::swiglu(&s.gate_up, m.inner, &mut s.inner);
            layer.down.mul(Lhs::rows(&s.inner, m.inner), &mut s.x, true);
        }
        s.picked.clear();
        let mut row = 0;
        for w in work.iter_mut() {
            row += w.segment.tokens.len();
            w.cache.len += w.segment.tokens.len();
            if w.segment.wanted {
                s.picked.extend_from_slice(&s.x[(row - 1) * m.hidden..row * m.hidden]);
            }
        }
        if !logits.is_empty() {
            let normed = &mut s.h[..s.picked.len()];
            norm::forward(&s.picked, &m.norm, m.eps, normed);
            m.head.mul(Lhs::rows(normed, m.hidden), logits, false);
        }
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner).push(s);
    }

    /// Rotates, stores keys and values, attends: `qkv [rows, q | k | v]` to `mixed [rows, q]`.
    fn attention(&self, layer: usize, work: &mut [Work<'_>], qkv: &mut [f32], mixed: &mut [f32]) {
        let (shape, layout) = (self.layout.shape, self.layout);
        let (ql, kl, width) = (shape.q_len(), shape.kv_len(), shape.qkv_len());
        let mut rows = qkv.chunks_exact_mut(width);
        for w in work.iter_mut() {
            for t in 0..w.segment.tokens.len() {
                let Some(row) = rows.next() else { return };
                let position = w.cache.len + t;
                let (cos, sin) = self.model.rope.row(position);
                rotate(&mut row[..ql + kl], shape.head_dim, cos, sin, false);
                let (k, v) = row[ql..].split_at(kl);
                w.cache.store(layout, layer, position, k, v);
            }
        }
        let mut jobs = Vec::with_capacity(work.len());
        let (mut rest, mut first) = (mixed, 0);
        for w in work.iter() {
            let n = w.segment.tokens.len();
            let (out, tail) = rest.split_at_mut(n * ql);
            rest = tail;
            jobs.push(Mutex::new((w, first, out)));
            first += n;
        }
        let qkv = &*qkv;
        par::for_each(jobs.len(), |i| {
            let mut job = jobs[i].lock().unwrap_or_else(PoisonError::into_inner);
            let (w, first, out) = &mut *job;
            let (keys, values) = w.cache.layer(layout, layer);
            let start = w.cache.len;
            let first = *first;
            // Tokens of one long prompt are shared out too.
            par::chunks_mut(out, 16 * ql, |chunk, out| {
                let mut scores = vec![0f32; keys.len() * BLOCK];
                for (j, out) in out.chunks_exact_mut(ql).enumerate() {
                    let t = chunk * 16 + j;
                    let len = start + t + 1;
                    let n = len.div_ceil(BLOCK);
                    let q = &qkv[(first + t) * width..(first + t) * width + ql];
                    attend(q, &keys[..n], &values[..n], len, shape, &mut scores, out);
                }
            });
        });
    }
}
