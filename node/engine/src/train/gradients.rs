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
mod tests {
    use super::*;
    use crate::params::{fuse, rope_table};
    use crate::testing::{tiny_config, tiny_configs, varied_weights};
    use crate::train::batch::{Sample, micro_batches, terms};
    use crate::weights::Weights;
    use starling_protocol::algorithm::{AlgorithmSpec, Objective};
    use starling_protocol::lora::{LoraSpec, LoraTarget};

    fn samples() -> Vec<Sample> {
        (0u16..7)
            .map(|i| {
                let len = 5 + usize::from(i) * 6;
                Sample {
                    tokens: (0..len).map(|t| u32::try_from((t * 7 + usize::from(i) * 13) % 64).unwrap()).collect(),
                    loss_mask: (0..len).map(|t| t > 2 && t % 3 != 0).collect(),
                    behaviour_logprobs: (0u16..).take(len).map(|t| -4.2 + f32::from(t % 5) * 0.05).collect(),
                    advantage: if i % 2 == 0 { 1.0 } else { -0.5 },
                    ..Sample::default()
                }
            })
            .collect()
    }

    /// Own kernels against candle's autograd over composed operators: 1e-5 of a parameter's largest gradient is some
    /// dozens of f32 roundings of the longest sums.
    #[test]
    fn own_kernels_and_candles_autograd_agree_and_reach_every_parameter() {
        for cfg in tiny_configs() {
            let params = fuse(&cfg, &varied_weights(&cfg, 5), &Device::Cpu).unwrap();
            let micro = micro_batches(&samples(), &terms(&samples()), 60, false);
            assert!(micro.len() > 2);
            let trained = micro.iter().map(|m| m.terms.len()).sum();
            let plan = GradientPlan { cfg: &cfg, rope: &rope_table(&cfg), lanes: 4, checkpointing: false };
            let objective = Objective::Clip { low: 0.2, high: 0.28, ratio_max: None };
            let loss = Loss { spec: AlgorithmSpec { objective, ..AlgorithmSpec::default() }, has_behaviour: true };
            let own = plan.compute(Trained::Full(&params), &micro, &loss).unwrap();
            let other = plan.compute_device(Trained::Full(&params), &micro, &loss, trained).unwrap();
            assert!((own.sums.loss - other.sums.loss).abs() < 1e-5 * own.sums.loss.abs());
            assert_eq!((own.sums.tokens, own.sums.clipped), (other.sums.tokens, other.sums.clipped));
            for (i, (a, b)) in own.grads.iter().zip(&other.grads).enumerate() {
                let (a, b) = (to_host(a, "").unwrap(), to_host(b, "").unwrap());
                let largest = b.iter().fold(0f32, |m, v| m.max(v.abs()));
                assert!(largest > 0.0, "{:?}: parameter {i} has no gradient", cfg.architecture);
                for (a, b) in a.iter().zip(&b) {
                    assert!((a - b).abs() <= 1e-5 * largest, "{:?}, parameter {i}: {a} against {b}", cfg.architecture);
                }
            }
        }
    }

    /// The low-rank gradients against candle's autograd through `W + s·B·A`, and the same bits with recomputing.
    #[test]
    fn adapters_have_the_gradients_that_candles_autograd_finds_and_checkpointing_leaves_every_bit() {
        for cfg in tiny_configs() {
            let base = fuse(&cfg, &varied_weights(&cfg, 5), &Device::Cpu).unwrap();
            let spec = LoraSpec { rank: 3, alpha: 1.5, targets: LoraTarget::ALL.to_vec() };
            let layout = LoraLayout::new(&cfg, &spec);
            let start = layout.start(3, &Device::Cpu).unwrap();
            let values: Vec<Tensor> = start.iter().map(|t| (t + 0.02).unwrap()).collect();
            let adapters = Trained::Adapters { layout: &layout, base: &base, values: &values };
            let micro = micro_batches(&samples(), &terms(&samples()), 60, false);
            let trained = micro.iter().map(|m| m.terms.len()).sum();
            let rope = rope_table(&cfg);
            let plan = |checkpointing| GradientPlan { cfg: &cfg, rope: &rope, lanes: 4, checkpointing };
            let loss = Loss::cross_entropy();
            for subject in [adapters, Trained::Full(&base)] {
                let own = plan(false).compute(subject, &micro, &loss).unwrap();
                let again = plan(true).compute(subject, &micro, &loss).unwrap();
                let other = plan(false).compute_device(subject, &micro, &loss, trained).unwrap();
                assert_eq!(own.grads.len(), subject.values().len());
                for (i, ((a, c), b)) in own.grads.iter().zip(&again.grads).zip(&other.grads).enumerate() {
                    let (a, b, c) = (to_host(a, "").unwrap(), to_host(b, "").unwrap(), to_host(c, "").unwrap());
                    assert_eq!(a, c);
                    let largest = b.iter().fold(0f32, |m, v| m.max(v.abs()));
                    assert!(largest > 0.0, "{:?}: tensor {i} has no gradient", cfg.architecture);
                    for (a, b) in a.iter().zip(&b) {
                        assert!((a - b).abs() <= 1e-5 * largest, "{:?}, tensor {i}: {a} against {b}", cfg.architecture);
                    }
                }
            }
        }
    }

    /// Episodes of one prompt, some of which fork behind a trained turn.
    fn forest() -> Vec<Sample> {
        let turn = |from: u32, len: u32| (from..from + len).map(|i| i * 11 % 64);
        let trunk: Vec<u32> = turn(1, 20).collect();
        let fork: Vec<u32> = trunk.iter().copied().chain(turn(40, 9)).collect();
        let tails = [(&trunk, 3, 7), (&fork, 9, 12), (&fork, 17, 5), (&fork, 17, 8), (&trunk, 50, 1)];
        let sample = |(i, (head, from, len)): (usize, (&Vec<u32>, u32, u32))| {
            let tokens: Vec<u32> = head.iter().copied().chain(turn(from, len)).collect();
            Sample {
                loss_mask: (0..tokens.len()).map(|t| t >= 18 && t % 4 != 0).collect(),
                behaviour_logprobs: vec![-4.1; tokens.len()],
                advantage: [1.0, -0.5, 0.25, -1.0, 0.75][i],
                tokens,
                ..Sample::default()
            }
        };
        tails.into_iter().enumerate().map(sample).collect()
    }

    /// Each token's forward pass is the same sum of the same terms; gradients are other orders of sums of some dozens of
    /// f32 terms, so 1e-5 of a parameter's largest.
    #[test]
    fn shared_prefixes_leave_log_probabilities_alone_and_gradients_within_rounding() {
        for cfg in tiny_configs() {
            let params = fuse(&cfg, &varied_weights(&cfg, 5), &Device::Cpu).unwrap();
            let plan = GradientPlan { cfg: &cfg, rope: &rope_table(&cfg), lanes: 1, checkpointing: true };
            let objective = Objective::Clip { low: 0.2, high: 0.28, ratio_max: None };
            let loss = Loss { spec: AlgorithmSpec { objective, ..AlgorithmSpec::default() }, has_behaviour: true };
            let micro = |share| micro_batches(&forest(), &terms(&forest()), 512, share);
            let tokens = |share| micro(share).iter().map(|m| m.packed.tokens.len()).sum::<usize>();
            assert_eq!((tokens(false), tokens(true)), (26 + 39 + 33 + 35 + 19, 26 + 19 + 4 + 2));
            let run = |share| {
                let logprobs = plan.logprobs(&params, &micro(share)).unwrap();
                (logprobs, plan.compute(Trained::Full(&params), &micro(share), &loss).unwrap())
            };
            let ((flat_logprobs, flat), (tree_logprobs, tree)) = (run(false), run(true));
            assert_eq!(flat_logprobs, tree_logprobs);
            assert_eq!(flat.sums.tokens, tree.sums.tokens);
            for (i, (a, b)) in flat.grads.iter().zip(&tree.grads).enumerate() {
                let (a, b) = (to_host(a, "").unwrap(), to_host(b, "").unwrap());
                let largest = a.iter().fold(0f32, |m, v| m.max(v.abs()));
                assert!(largest > 0.0);
                for (a, b) in a.iter().zip(&b) {
                    assert!((a - b).abs() <= 1e-5 * largest, "{:?}, parameter {i}: {a}, {b}", cfg.architecture);
                }
            }
        }
    }

    #[test]
    fn sums_have_the_same_bits_on_one_thread_and_on_three() {
        let cfg = tiny_config();
        let params = fuse(&cfg, &Weights::random(&cfg, &Device::Cpu, 5).unwrap(), &Device::Cpu).unwrap();
        let micro = micro_batches(&samples(), &terms(&samples()), 30, false);
        let run = |threads: usize| {
            let plan = GradientPlan { cfg: &cfg, rope: &rope_table(&cfg), lanes: 3, checkpointing: false };
            let pool = par::pool(threads, 0, "test").unwrap();
            let out = pool.install(|| plan.compute(Trained::Full(&params), &micro, &Loss::cross_entropy())).unwrap();
            out.grads.iter().map(|g| to_host(g, "").unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(run(1), run(3));
    }

    #[test]
    fn one_lane_on_three_threads_agrees_with_its_own_run_on_one() {
        let cfg = tiny_config();
        let params = fuse(&cfg, &Weights::random(&cfg, &Device::Cpu, 5).unwrap(), &Device::Cpu).unwrap();
        let micro = micro_batches(&samples(), &terms(&samples()), 200, true);
        let run = |threads: usize| {
            let plan = GradientPlan { cfg: &cfg, rope: &rope_table(&cfg), lanes: 1, checkpointing: false };
            let pool = par::pool(threads, 0, "test").unwrap();
            let out = pool.install(|| plan.compute(Trained::Full(&params), &micro, &Loss::cross_entropy())).unwrap();
            out.grads.iter().map(|g| to_host(g, "").unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(run(1), run(3));
    }
}
