//! Low-rank adapters (Hu et al., arXiv:2106.09685): where they lie, how they start, and the weights that they make.
//!
//! Everything computes with merged weights `W + (alpha / rank) · B · A`, as the servers do, so that a trainer's
//! log-probabilities are the sampler's bit for bit. Only the gradients know of the two factors
//! ([`crate::cpu::adapters`]).

use std::ops::Range;

use candle_core::{Device, Result, Tensor};
use rand::{Rng as _, SeedableRng};
use rand_chacha::ChaCha8Rng;
use starling_protocol::lora::LoraSpec;

use crate::config::LlamaConfig;
use crate::kernels::matmul::{Lhs, Packed};
use crate::params::fused_spans;
use crate::tensors::with_f32;

/// One adapted matrix: a Hugging Face tensor, which is some rows of a fused parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AdaptedModule {
    /// `model.layers.N.self_attn.q_proj` and the like.
    pub(crate) name: String,
    /// The fused parameter.
    pub(crate) param: usize,
    /// Its first row there.
    pub(crate) row: usize,
    /// Rows.
    pub(crate) outputs: usize,
    /// Columns.
    pub(crate) inputs: usize,
}

/// Adapters of one model, in the order of its tensors. Their values are a list `A, B, A, B, …` beside it.
#[derive(Clone, Debug)]
pub(crate) struct LoraLayout {
    pub(crate) spec: LoraSpec,
    pub(crate) modules: Vec<AdaptedModule>,
}

impl LoraLayout {
    /// The modules that `spec` names.
    pub(crate) fn new(cfg: &LlamaConfig, spec: &LoraSpec) -> Self {
        let mut shapes = cfg.tensor_shapes().into_iter();
        let mut modules = Vec::new();
        for (param, span) in fused_spans(cfg).into_iter().enumerate() {
            let mut row = 0;
            for (name, shape) in shapes.by_ref().take(span) {
                let module = name.strip_suffix(".weight").filter(|_| shape.len() == 2);
                let wanted = |m: &&str| spec.targets.iter().any(|t| m.rsplit('.').next() == Some(t.name()));
                if let Some(name) = module.filter(wanted) {
                    modules.push(AdaptedModule {
                        name: name.to_owned(),
                        param,
                        row,
                        outputs: shape[0],
                        inputs: shape[1],
                    });
                }
                row += shape[0];
            }
        }
        Self { spec: spec.clone(), modules }
    }

    /// `alpha / rank` in the arithmetic's precision.
    #[expect(clippy::cast_possible_truncation, reason = "f32 is the arithmetic's precision")]
    pub(crate) fn scale(&self) -> f32 {
        self.spec.scale() as f32
    }

    /// Columns of `B`.
    pub(crate) fn rank(&self) -> usize {
        self.spec.rank as usize
    }

    /// PEFT's names and the shapes of all values, in order.
    pub(crate) fn tensors(&self) -> Vec<(String, [usize; 2])> {
        let of = |m: &AdaptedModule| {
            let name = |factor: &str| format!("base_model.model.{}.lora_{factor}.weight", m.name);
            [(name("A"), [self.rank(), m.inputs]), (name("B"), [m.outputs, self.rank()])]
        };
        self.modules.iter().flat_map(of).collect()
    }

    /// Consecutive modules of one parameter.
    pub(crate) fn by_param(&self) -> Vec<(usize, Range<usize>)> {
        let mut out: Vec<(usize, Range<usize>)> = Vec::new();
        for (i, m) in self.modules.iter().enumerate() {
            match out.last_mut() {
                Some((param, range)) if *param == m.param => range.end = i + 1,
                _ => out.push((m.param, i..i + 1)),
            }
        }
        out
    }

    /// `A` uniform in ±1/√in (Kaiming with a slope of √5, as PEFT has it), `B` zero: the model starts as it was. Equal
    /// seeds give equal bits everywhere.
    pub(crate) fn start(&self, seed: u64, device: &Device) -> Result<Vec<Tensor>> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut out = Vec::with_capacity(2 * self.modules.len());
        for m in &self.modules {
            let a = uniform(&mut rng, self.rank() * m.inputs, m.inputs);
            out.push(Tensor::from_vec(a, (self.rank(), m.inputs), device)?);
            out.push(Tensor::zeros((m.outputs, self.rank()), candle_core::DType::F32, device)?);
        }
        Ok(out)
    }

    /// The fused parameters that the model computes with; those without adapters are shared with `base`.
    pub(crate) fn merge(&self, base: &[Tensor], values: &[Tensor]) -> Result<Vec<Tensor>> {
        if !base.iter().all(|b| b.device().is_cpu()) {
            return self.merge_composed(base, values);
        }
        let mut out = base.to_vec();
        for (param, modules) in self.by_param() {
            out[param] = self.merge_by_kernels(&base[param], modules, values)?;
        }
        Ok(out)
    }

    /// The same by candle's operators, whose autograd sees how the parameters come about.
    pub(crate) fn merge_composed(&self, base: &[Tensor], values: &[Tensor]) -> Result<Vec<Tensor>> {
        let mut out = base.to_vec();
        for (param, modules) in self.by_param() {
            out[param] = self.merge_by_operators(&base[param], modules, values)?;
        }
        Ok(out)
    }

    fn merge_by_kernels(&self, base: &Tensor, modules: Range<usize>, values: &[Tensor]) -> Result<Tensor> {
        let mut data = with_f32(base, "weights", |w| Ok(w.to_vec()))?;
        let (rank, scale) = (self.rank(), self.scale());
        for i in modules {
            let m = &self.modules[i];
            let a = with_f32(&values[2 * i], "adapter", |a| Ok(Packed::from_rows(a, rank, m.inputs)))?;
            let b: Vec<f32> = with_f32(&values[2 * i + 1], "adapter", |b| Ok(b.iter().map(|v| v * scale).collect()))?;
            let rows = &mut data[m.row * m.inputs..(m.row + m.outputs) * m.inputs];
            a.mul(Lhs::rows(&b, rank), rows, true);
        }
        Tensor::from_vec(data, base.dims(), &Device::Cpu)
    }

    fn merge_by_operators(&self, base: &Tensor, modules: Range<usize>, values: &[Tensor]) -> Result<Tensor> {
        let mut parts = Vec::new();
        let mut row = 0;
        for i in modules {
            let m = &self.modules[i];
            if m.row > row {
                parts.push(base.narrow(0, row, m.row - row)?);
            }
            let product = (values[2 * i + 1].matmul(&values[2 * i])? * f64::from(self.scale()))?;
            parts.push(base.narrow(0, m.row, m.outputs)?.add(&product)?);
            row = m.row + m.outputs;
        }
        let rows = base.dim(0)?;
        if row < rows {
            parts.push(base.narrow(0, row, rows - row)?);
        }
        Tensor::cat(&parts, 0)
    }
}

/// Values in ±1/√`inputs` from 53-bit uniforms.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "f64 to f32 rounding is the purpose; 53 bits fit"
)]
fn uniform(rng: &mut ChaCha8Rng, count: usize, inputs: usize) -> Vec<f32> {
    let bound = 1.0 / (inputs as f64).sqrt();
    let mut draw = || (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
    (0..count).map(|_| ((2.0 * draw() - 1.0) * bound) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::fuse;
    use crate::tensors::to_host;
    use crate::testing::{tiny_config, tiny_configs, varied_weights};
    use starling_protocol::lora::LoraTarget;

    fn layout(targets: &[LoraTarget]) -> LoraLayout {
        LoraLayout::new(&tiny_config(), &LoraSpec { rank: 3, alpha: 6.0, targets: targets.to_vec() })
    }

    #[test]
    fn adapters_lie_on_the_rows_of_their_fused_parameter_under_pefts_names() {
        let l = layout(&[LoraTarget::VProj, LoraTarget::DownProj]);
        let names: Vec<_> = l.tensors().into_iter().map(|(n, s)| (n, s[0], s[1])).collect();
        let name = |n: &str| format!("base_model.model.model.layers.{n}.weight");
        assert_eq!(
            names[..2],
            [(name("0.self_attn.v_proj.lora_A"), 3, 32), (name("0.self_attn.v_proj.lora_B"), 16, 3)]
        );
        assert_eq!(names[3], (name("0.mlp.down_proj.lora_B"), 32, 3));
        assert_eq!(l.modules.len(), 4);
        // q has 32 rows, k has 16.
        assert_eq!((l.modules[0].param, l.modules[0].row), (2, 48));
        assert_eq!(l.by_param(), [(2, 0..1), (6, 1..2), (8, 2..3), (12, 3..4)]);
    }

    #[test]
    fn fresh_adapters_change_nothing_are_bounded_and_follow_from_the_seed() {
        let (l, cfg) = (layout(&LoraTarget::ALL), tiny_config());
        let base = fuse(&cfg, &varied_weights(&cfg, 5), &Device::Cpu).unwrap();
        let start = |seed| l.start(seed, &Device::Cpu).unwrap();
        let host = |t: &Tensor| to_host(t, "").unwrap();
        for (a, b) in l.merge(&base, &start(1)).unwrap().iter().zip(&base) {
            assert_eq!(host(a), host(b));
        }
        let a = host(&start(1)[0]);
        let bound = 1.0 / 32f32.sqrt();
        assert!(a.iter().all(|v| v.abs() <= bound) && a.iter().any(|v| v.abs() > 0.8 * bound));
        assert_eq!(a, host(&start(1)[0]));
        assert_ne!(a, host(&start(2)[0]));
        assert_ne!(a, host(&start(1)[2]));
    }

    /// Own products against candle's: sums of three terms, so a few roundings of values below 2.
    #[test]
    fn merging_by_own_kernels_and_by_candle_agrees() {
        for cfg in tiny_configs() {
            let spec = LoraSpec { rank: 3, alpha: 6.0, targets: vec![LoraTarget::KProj, LoraTarget::UpProj] };
            let l = LoraLayout::new(&cfg, &spec);
            let base = fuse(&cfg, &varied_weights(&cfg, 5), &Device::Cpu).unwrap();
            let values: Vec<Tensor> = l.start(1, &Device::Cpu).unwrap().iter().map(|t| (t + 0.25).unwrap()).collect();
            let (own, other) = (l.merge(&base, &values).unwrap(), l.merge_composed(&base, &values).unwrap());
            for (param, (own, other)) in own.iter().zip(&other).enumerate() {
                let (own, other) = (to_host(own, "").unwrap(), to_host(other, "").unwrap());
                assert!(own.iter().zip(&other).all(|(a, b)| (a - b).abs() < 1e-6));
                let adapted = l.modules.iter().any(|m| m.param == param);
                assert_eq!(adapted, own != to_host(&base[param], "").unwrap());
            }
        }
    }
}
