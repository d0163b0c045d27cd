//! Gradients of one batch: micro-batches in parallel or one by one, summed in one fixed order.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Device, Tensor, Var};

use super::batch::MicroBatch;
use super::lora::LoraLayout;
use super::loss::{Loss, LossSums};
use crate::config::LlamaConfig;
use crate::cpu::CpuModel;
use crate::cpu::adapters::{AdapterPacks, GradientSink};
use crate::cpu::backward::BackwardScratch;
use crate::cpu::forward::Tape;
use crate::cpu::model::BackwardPacks;
use crate::device_model::DeviceModel;
use crate::error::TrainError;
use crate::kernels::elementwise::{add_assign, sum_squares};
use crate::kernels::rope::RopeTable;
use crate::par;
use crate::tensors::{to_host, with_f32};

/// What a set of micro-batches yields.
#[derive(Debug)]
pub(crate) struct BatchGradients {
    /// Per trained tensor, of the mean loss.
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
    /// Partial sums: consecutive micro-batches are added up in one of these, and the sums in order at the end.
    ///
    /// With several, each runs on one thread, and the bits depend on their number, not on that of the threads. With
    /// one, every operation runs on all threads. CPU only.
    pub(crate) lanes: usize,
    /// Activations are computed again in the backward pass. CPU only.
    pub(crate) checkpointing: bool,
}

/// What is trained.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Trained<'a> {
    /// These fused parameters.
    Full(&'a [Tensor]),
    /// Adapters: their values, on these frozen fused parameters.
    Adapters {
        /// Where they lie.
        layout: &'a LoraLayout,
        /// Frozen.
        base: &'a [Tensor],
        /// Trained.
        values: &'a [Tensor],
    },
}

impl<'a> Trained<'a> {
    /// The tensors that have gradients.
    pub(crate) fn values(self) -> &'a [Tensor] {
        match self {
            Self::Full(values) | Self::Adapters { values, .. } => values,
        }
    }

    /// The fused parameters that the model computes with.
    pub(crate) fn params(self) -> candle_core::Result<Vec<Tensor>> {
        match self {
            Self::Full(params) => Ok(params.to_vec()),
            Self::Adapters { layout, base, values } => layout.merge(base, values),
        }
    }

    /// The same for other values, by operators that candle's autograd sees.
    fn composed_params(self, values: &[Tensor]) -> candle_core::Result<Vec<Tensor>> {
        match self {
            Self::Full(_) => Ok(values.to_vec()),
            Self::Adapters { layout, base, .. } => layout.merge_composed(base, values),
        }
    }
}

/// One partial sum.
#[derive(Default)]
struct Lane {
    grads: Vec<Vec<f32>>,
    sums: LossSums,
    failed: Option<TrainError>,
}

/// Activations and gradient buffers of the threads, kept from lane to lane.
type Buffers = Mutex<Vec<(Tape, BackwardScratch)>>;

impl GradientPlan<'_> {
    /// Gradients of the mean over all trained tokens of `micro`.
    ///
    /// Runs in the caller's pool.
    ///
    /// # Errors
    /// `NonFinite` as soon as a log-probability is not a number; `Tensor` if the device fails.
    pub(crate) fn compute(
        &self,
        subject: Trained<'_>,
        micro: &[MicroBatch],
        loss: &Loss,
    ) -> Result<BatchGradients, TrainError> {
        let trained: usize = micro.iter().map(|m| m.terms.len()).sum();
        if subject.values().iter().all(|p| p.device().is_cpu()) {
            self.compute_cpu(subject, micro, loss, trained)
        } else {
            self.compute_device(subject, micro, loss, trained)
        }
    }

    /// Log-probability of every row of `micro`, in order, without gradients. Runs in the caller's pool.
    ///
    /// # Errors
    /// `NonFinite` if one is not a number; `Tensor` if the device fails.
    pub(crate) fn logprobs(&self, params: &[Tensor], micro: &[MicroBatch]) -> Result<Vec<f32>, TrainError> {
        let rows = if params.iter().all(|p| p.device().is_cpu()) {
            let model = CpuModel::new(self.cfg, params, Arc::clone(self.rope))?;
            let lanes = self.lanes.clamp(1, micro.len().max(1));
            let results: Vec<Mutex<Vec<f32>>> = (0..lanes).map(|_| Mutex::default()).collect();
            let run = |lane: usize| {
                let mut tape = Tape::new(true);
                let part = &micro[micro.len() * lane / lanes..micro.len() * (lane + 1) / lanes];
                let rows = part.iter().flat_map(|m| model.logprobs(&m.packed, &mut tape)).collect();
                *results[lane].lock().unwrap_or_else(PoisonError::into_inner) = rows;
            };
            if lanes > 1 {
                par::for_each(lanes, |lane| par::serial(|| run(lane)));
            } else {
                run(0);
            }
            results.into_iter().flat_map(|r| r.into_inner().unwrap_or_else(PoisonError::into_inner)).collect()
        } else {
            let model = DeviceModel::new(self.cfg, params.to_vec(), Arc::clone(self.rope))?;
            let mut rows = Vec::new();
            for part in micro {
                rows.extend(to_host(&model.logprobs(&part.packed)?.detach(), "logprobs")?);
            }
            rows
        };
        let logprobs: Vec<f32> = rows.chunks_exact(2).map(|r| r[0]).collect();
        match logprobs.iter().find(|l| !l.is_finite()) {
            Some(l) => Err(TrainError::NonFinite { what: "log-probability", got: f64::from(*l) }),
            None => Ok(logprobs),
        }
    }

    /// By our own kernels.
    fn compute_cpu(
        &self,
        subject: Trained<'_>,
        micro: &[MicroBatch],
        loss: &Loss,
        trained: usize,
    ) -> Result<BatchGradients, TrainError> {
        let params = subject.params()?;
        let model = CpuModel::new(self.cfg, &params, Arc::clone(self.rope))?;
        let packs = BackwardPacks::new(self.cfg, &params)?;
        let adapters = match subject {
            Trained::Full(_) => None,
            Trained::Adapters { layout, values, .. } => Some(AdapterPacks::new(layout, values, params.len())?),
        };
        drop(params);
        let values = subject.values();
        let lanes = self.lanes.clamp(1, micro.len().max(1));
        let results: Vec<Mutex<Lane>> = (0..lanes).map(|_| Mutex::default()).collect();
        let buffers = Buffers::default();
        let run = |lane: usize| {
            let part = &micro[micro.len() * lane / lanes..micro.len() * (lane + 1) / lanes];
            let buffer = buffers.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let mut buffer = buffer.unwrap_or_else(|| (Tape::new(self.checkpointing), BackwardScratch::default()));
            let derive = |rows: &[f32], m: &MicroBatch| derivatives(rows, m, loss, trained);
            let done = run_lane(&model, (&packs, adapters.as_ref()), part, &mut buffer, derive, values);
            buffers.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
            *results[lane].lock().unwrap_or_else(PoisonError::into_inner) = done;
        };
        if lanes > 1 {
            par::for_each(lanes, |lane| par::serial(|| run(lane)));
        } else {
            run(0);
        }
        let mut total = Lane::default();
        for lane in results {
            let lane = lane.into_inner().unwrap_or_else(PoisonError::into_inner);
            if let Some(e) = lane.failed {
                return Err(e);
            }
            total.sums.add(&lane.sums);
            if total.grads.is_empty() {
                total.grads = lane.grads;
            } else {
                total.grads.iter_mut().zip(&lane.grads).for_each(|(a, b)| add_assign(a, b));
            }
        }
        let tensors = total.grads.into_iter().zip(values).map(|(g, p)| Tensor::from_vec(g, p.dims(), &Device::Cpu));
        Ok(BatchGradients { grads: tensors.collect::<candle_core::Result<_>>()?, sums: total.sums })
    }

    /// By candle's autograd, one micro-batch after the other.
    pub(crate) fn compute_device(
        &self,
        subject: Trained<'_>,
        micro: &[MicroBatch],
        loss: &Loss,
        trained: usize,
    ) -> Result<BatchGradients, TrainError> {
        let vars = subject.values().iter().map(Var::from_tensor).collect::<candle_core::Result<Vec<_>>>()?;
        let tensors: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
        let mut total = LossSums::default();
        let mut sum: Vec<Option<Tensor>> = vec![None; tensors.len()];
        for part in micro {
            // Merged anew for each graph: candle's backward pass ends at the variables.
            let params = subject.composed_params(&tensors)?;
            let model = DeviceModel::new(self.cfg, params, Arc::clone(self.rope))?;
            let out = model.logprobs(&part.packed)?;
            let (g, sums) = derivatives(&to_host(&out, "loss")?, part, loss, trained)?;
            total.add(&sums);
            let weights = Tensor::from_vec(g, out.dims(), out.device())?;
            let mut store = out.mul(&weights)?.sum_all()?.backward()?;
            for (sum, p) in sum.iter_mut().zip(&tensors) {
                let Some(g) = store.remove(p) else { continue };
                *sum = Some(match sum.take() {
                    Some(s) => s.add(&g)?,
                    None => g,
                });
            }
        }
        let grads = sum.into_iter().zip(&tensors).map(|(g, p)| g.map_or_else(|| p.zeros_like(), Ok));
        Ok(BatchGradients { grads: grads.collect::<candle_core::Result<_>>()?, sums: total })
    }
}

/// Forward, loss and backward of consecutive micro-batches, added up.
fn run_lane(
    model: &CpuModel,
    (packs, adapters): (&BackwardPacks, Option<&AdapterPacks>),
    micro: &[MicroBatch],
    (tape, scratch): &mut (Tape, BackwardScratch),
    derivatives: impl Fn(&[f32], &MicroBatch) -> Result<(Vec<f32>, LossSums), TrainError>,
    values: &[Tensor],
) -> Lane {
    let grads = values.iter().map(|p| vec![0f32; p.elem_count()]).collect();
    let mut lane = Lane { grads, ..Lane::default() };
    for part in micro {
        let rows = model.logprobs(&part.packed, tape);
        match derivatives(&rows, part) {
            Ok((g, sums)) => {
                lane.sums.add(&sums);
                let mut sink = match adapters {
                    None => GradientSink::Full(&mut lane.grads),
                    Some(adapters) => GradientSink::Adapters(adapters, &mut lane.grads),
                };
                model.gradients(packs, &part.packed, tape, &g, scratch, &mut sink);
            }
            Err(e) => {
                lane.failed = Some(e);
                break;
            }
        }
    }
    lane
}

/// The mean loss's derivatives by each row's log-probability and entropy, `[rows, 2]`, and the loss sums, from
/// `[rows, 2]` model outputs.
#[expect(clippy::cast_precision_loss, reason = "token counts are below 2^24")]
fn derivatives(
    rows: &[f32],
    part: &MicroBatch,
    loss: &Loss,
    trained: usize,
) -> Result<(Vec<f32>, LossSums), TrainError> {
    let mut sums = LossSums::default();
    let scale = 1.0 / trained as f32;
    let rows = rows.chunks_exact(2).zip(&part.terms);
    let g = rows.flat_map(|(row, term)| loss.token(row[0], row[1], term, &mut sums).map(|g| g * scale)).collect();
    if sums.is_finite() { Ok((g, sums)) } else { Err(TrainError::NonFinite { what: "loss", got: sums.loss }) }
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

#[cfg(test)]
#[path = "gradients_tests.rs"]
mod tests;
