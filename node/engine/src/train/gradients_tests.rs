//! Gradients against candle's autograd, with and without adapters, checkpointing and shared prefixes.

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
