//! Gradients of one batch: micro-batches in parallel or one by one, summed in one fixed order.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Device, Tensor};

use super::batch::MicroBatch;
use super::loss::{LossSums, Objective};
use crate::config::LlamaConfig;
use crate::error::TrainError;
use crate::kernels::elementwise::sum_squares;
use crate::kernels::rope::RopeTable;
use crate::model::{Llama, variables};
use crate::ops::{Backend, with_f32};
use crate::par;

/// What a set of micro-batches yields.
#[derive(Debug)]
pub(crate) struct BatchGradients {
    /// Per fused parameter, of the mean loss.
    pub(crate) grads: Vec<Tensor>,
    /// Loss and its companions.
    pub(crate) sums: LossSums,
}

/// Where and how gradients are computed.
#[derive(Clone, Debug)]
pub(crate) struct GradientPlan<'a> {
    /// The model's shape.
    pub(crate) cfg: &'a LlamaConfig,
    /// Its rotary table.
    pub(crate) rope: &'a Arc<RopeTable>,
    /// Operators.
    pub(crate) backend: Backend,
    /// Micro-batches at the same time, each on one thread; 1 = one by one, each on all threads of the pool.
    pub(crate) at_once: usize,
}

/// Finished micro-batches that wait for an earlier one, and the sum so far.
#[derive(Default)]
struct Merge {
    next: usize,
    early: BTreeMap<usize, (Vec<Tensor>, LossSums)>,
    sum: Option<Vec<Tensor>>,
    sums: LossSums,
    failed: Option<(usize, TrainError)>,
}

impl Merge {
    /// Takes micro-batch `index` in and adds every result whose turn has come.
    fn take(&mut self, index: usize, result: Result<(Vec<Tensor>, LossSums), TrainError>) {
        match result {
            Ok(done) => {
                self.early.insert(index, done);
            }
            Err(e) => {
                if self.failed.as_ref().is_none_or(|(first, _)| index < *first) {
                    self.failed = Some((index, e));
                }
                return;
            }
        }
        while let Some((grads, sums)) = self.early.remove(&self.next) {
            self.sums.add(&sums);
            self.next += 1;
            let merged = match self.sum.take() {
                None => Ok(grads),
                Some(sum) => sum.iter().zip(&grads).map(|(a, b)| a.add(b)).collect(),
            };
            match merged {
                Ok(sum) => self.sum = Some(sum),
                Err(e) => self.failed = Some((self.next - 1, e.into())),
            }
        }
    }
}

impl GradientPlan<'_> {
    /// Gradients of the mean over all trained tokens of `micro`, for fused parameters `params`.
    ///
    /// Runs in the caller's pool.
    ///
    /// # Errors
    /// `NonFinite` as soon as a log-probability is not a number; `Tensor` if the device fails.
    pub(crate) fn compute(&self, params: &[Tensor], micro: &[MicroBatch], objective: Objective) -> Result<BatchGradients, TrainError> {
        let vars = variables(params)?;
        let tensors: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
        let model = Llama::new(self.cfg, &tensors, Arc::clone(self.rope), self.backend)?;
        let trained: usize = micro.iter().map(|m| m.terms.len()).sum();
        let merge = Mutex::new(Merge::default());
        let next = AtomicUsize::new(0);
        let work = || {
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                let Some(part) = micro.get(i) else { break };
                let result = micro_gradients(&model, &tensors, part, objective, trained);
                let mut merge = merge.lock().unwrap_or_else(PoisonError::into_inner);
                merge.take(i, result);
                if merge.failed.is_some() {
                    break;
                }
            }
        };
        if self.at_once > 1 {
            par::for_each(self.at_once, |_| par::serial(work));
        } else {
            work();
        }
        let merge = merge.into_inner().unwrap_or_else(PoisonError::into_inner);
        match (merge.failed, merge.sum) {
            (Some((_, e)), _) => Err(e),
            (None, Some(grads)) => Ok(BatchGradients { grads, sums: merge.sums }),
            (None, None) => Err(TrainError::NothingToTrain { samples: 0 }),
        }
    }
}

/// Forward, loss and backward of one micro-batch.
#[expect(clippy::cast_precision_loss, reason = "token counts are below 2^24")]
fn micro_gradients(
    model: &Llama,
    params: &[Tensor],
    part: &MicroBatch,
    objective: Objective,
    trained: usize,
) -> Result<(Vec<Tensor>, LossSums), TrainError> {
    let out = model.logprobs(&part.packed)?;
    let values = out.to_device(&Device::Cpu)?;
    let mut sums = LossSums::default();
    let scale = 1.0 / trained as f32;
    let derivatives = with_f32(&values, "loss", |rows| {
        let mut g = Vec::with_capacity(rows.len());
        for (row, &term) in rows.chunks_exact(2).zip(&part.terms) {
            g.extend([objective.token(row[0], row[1], term, &mut sums) * scale, 0.0]);
        }
        Ok(g)
    })?;
    if !(sums.loss.is_finite() && sums.kl.is_finite() && sums.entropy.is_finite()) {
        return Err(TrainError::NonFinite { what: "loss", got: sums.loss });
    }
    let derivatives = Tensor::from_vec(derivatives, out.dims(), out.device())?;
    let mut store = out.mul(&derivatives)?.sum_all()?.backward()?;
    let grads = params
        .iter()
        .map(|p| match store.remove(p) {
            Some(g) => Ok(g),
            None => p.zeros_like(),
        })
        .collect::<candle_core::Result<Vec<_>>>()?;
    Ok((grads, sums))
}

/// Euclidean norm over all gradients, summed in f64 in a fixed order.
pub(crate) fn global_norm(grads: &[Tensor]) -> candle_core::Result<f64> {
    let parts: Vec<Mutex<candle_core::Result<f64>>> = grads.iter().map(|_| Mutex::new(Ok(0.0))).collect();
    par::for_each(grads.len(), |i| {
        let square = if grads[i].device().is_cpu() {
            with_f32(&grads[i], "norm", |g| Ok(sum_squares(g)))
        } else {
            grads[i].sqr().and_then(|s| s.sum_all()).and_then(|s| s.to_scalar::<f32>()).map(f64::from)
        };
        *parts[i].lock().unwrap_or_else(PoisonError::into_inner) = square;
    });
    let mut total = 0.0;
    for part in parts {
        total += part.into_inner().unwrap_or_else(PoisonError::into_inner)?;
    }
    Ok(total.sqrt())
}
