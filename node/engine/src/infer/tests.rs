//! Behaviour of the engine as its callers see it.

use std::sync::mpsc;
use std::time::Duration;

use candle_core::Device;

use super::*;
use crate::kernels::q8::PackedQ8;
use crate::score::sequence_logprobs;
use crate::testing::{tiny_config, tiny_configs, varied_weights};

type Outcome = (Vec<SampledToken>, Option<Result<FinishReason, EngineError>>);

struct Collect {
    tokens: Vec<SampledToken>,
    most: usize,
    done: mpsc::Sender<Outcome>,
}

impl TokenSink for Collect {
    fn token(&mut self, t: SampledToken) -> bool {
        self.tokens.push(t);
        self.tokens.len() < self.most
    }

    fn finish(self: Box<Self>, r: Result<FinishReason, EngineError>) {
        let _ = self.done.send((self.tokens, Some(r)));
    }
}

fn engine(opts: InferenceOptions) -> InferenceEngine {
    let cfg = tiny_config();
    let weights = Weights::random(&cfg, &Device::Cpu, 3).unwrap();
    InferenceEngine::spawn(cfg, weights, 1, opts, Device::Cpu).unwrap()
}

fn start(engine: &InferenceEngine, prompt: &[u32], sampling: SamplingParams) -> mpsc::Receiver<Outcome> {
    let (done, rx) = mpsc::channel();
    let sink = Collect { tokens: Vec::new(), most: usize::MAX, done };
    engine.generate(GenerateRequest { prompt: prompt.to_vec(), sampling }, Box::new(sink)).unwrap();
    rx
}

fn wait(rx: &mpsc::Receiver<Outcome>) -> (Vec<SampledToken>, FinishReason) {
    let (tokens, result) = rx.recv_timeout(Duration::from_secs(30)).unwrap();
    (tokens, result.unwrap().unwrap())
}

fn prompt(len: u32, salt: u32) -> Vec<u32> {
    (0..len).map(|i| (i * 5 + salt * 3 + 1) % 64).collect()
}

fn seeded(seed: u64, max_tokens: u32) -> SamplingParams {
    SamplingParams { seed, max_tokens, ..SamplingParams::default() }
}

#[test]
fn a_seeded_request_gives_the_same_bits_alone_in_a_crowd_and_in_small_chunks() {
    let alone = wait(&start(&engine(InferenceOptions::default()), &prompt(37, 1), seeded(7, 40))).0;
    assert_eq!(alone.len(), 40);
    for opts in [
        InferenceOptions { threads: 1, ..InferenceOptions::default() },
        InferenceOptions { max_batch: 5, max_batch_tokens: 9, threads: 3, nice: 1, ..InferenceOptions::default() },
        InferenceOptions { max_batch: 40, max_batch_tokens: 64, ..InferenceOptions::default() },
    ] {
        let crowd = engine(opts);
        // Some share the prompt's prefix, some do not.
        let others: Vec<_> = (0..20).map(|i| start(&crowd, &prompt(30 + i, i % 3), seeded(u64::from(i), 25))).collect();
        let rx = start(&crowd, &prompt(37, 1), seeded(7, 40));
        assert_eq!(wait(&rx).0, alone);
        for rx in &others {
            wait(rx);
        }
        let again = wait(&start(&crowd, &prompt(37, 1), seeded(7, 40))).0;
        assert_eq!(again, alone, "with the prompt's prefix remembered");
    }
}

#[test]
fn an_answer_continued_by_another_engine_is_the_unbroken_one_bit_for_bit() {
    let sampling = SamplingParams { top_k: 30, top_p: 0.9, temperature: 0.8, top_logprobs: 3, ..seeded(7, 40) };
    let unbroken = wait(&start(&engine(InferenceOptions::default()), &prompt(37, 1), sampling.clone()));
    for lost in [1usize, 7, 39] {
        let other = engine(InferenceOptions { max_batch: 5, max_batch_tokens: 9, ..InferenceOptions::default() });
        let ids = unbroken.0[..lost].iter().map(|t| t.id);
        let behind: Vec<u32> = prompt(37, 1).into_iter().chain(ids).collect();
        let drawn = u32::try_from(lost).unwrap();
        let (rest, finish) =
            wait(&start(&other, &behind, SamplingParams { drawn, max_tokens: 40 - drawn, ..sampling.clone() }));
        assert_eq!((&rest[..], finish), (&unbroken.0[lost..], unbroken.1), "continued behind {lost} tokens");
    }
}

#[test]
fn scored_logprobs_are_the_sampled_ones_bit_for_bit() {
    for cfg in tiny_configs() {
        let weights = varied_weights(&cfg, 3);
        let e = InferenceEngine::spawn(cfg.clone(), weights.clone(), 1, InferenceOptions::default(), Device::Cpu);
        let p = prompt(21, 2);
        let (tokens, _) = wait(&start(&e.unwrap(), &p, seeded(5, 30)));
        let all: Vec<u32> = p.iter().copied().chain(tokens.iter().map(|t| t.id)).collect();
        let scored = sequence_logprobs(&cfg, &weights, &Device::Cpu, &all).unwrap();
        assert_eq!(tokens.len(), 30);
        for (t, s) in tokens.iter().zip(&scored[p.len()..]) {
            assert_eq!(t.logprob.to_bits(), s.to_bits(), "{:?}", cfg.architecture);
            assert_eq!(t.policy_version, 1);
        }
    }
}

#[test]
fn the_device_path_draws_the_same_tokens() {
    for cfg in tiny_configs() {
        let weights = varied_weights(&cfg, 3);
        let prepared = Prepared::Device(Arc::new(device::DeviceWeights::new(&cfg, &weights, &Device::Cpu).unwrap()));
        let mut device = Runner::new(&cfg, prepared, 3);
        let mut cpu = Runner::new(&cfg, Prepared::new(&cfg, &weights, &Device::Cpu, WeightFormat::F32).unwrap(), 3);
        let (a, b, c) = (prompt(20, 1), prompt(3, 2), prompt(33, 3));
        for r in [&mut device, &mut cpu] {
            (0..3).zip([&a, &b, &c]).for_each(|(slot, p)| assert_eq!(r.open(slot, p), 0));
        }
        let passes: [Vec<(usize, &[u32])>; 3] = [
            vec![(0, a.as_slice()), (2, &c[..10])],
            vec![(1, b.as_slice()), (0, &[5]), (2, &c[10..])],
            vec![(2, &[9]), (0, &[6]), (1, &[7])],
        ];
        for pass in passes {
            let segments: Vec<_> =
                pass.iter().map(|&(slot, tokens)| runner::Segment { slot, tokens, wanted: true }).collect();
            let (mut x, mut y) = (Vec::new(), Vec::new());
            device.forward(&segments, &mut x).unwrap();
            cpu.forward(&segments, &mut y).unwrap();
            assert_eq!(x.len(), segments.len() * 64);
            // Logits are of order 0.1 to 1 here; f32 sums of some dozens of terms differ by 1e-6.
            assert!(x.iter().zip(&y).all(|(x, y)| (x - y).abs() < 1e-5), "{:?}", cfg.architecture);
        }
    }
}

#[test]
fn stop_tokens_are_emitted_and_end_the_sequence() {
    let e = engine(InferenceOptions::default());
    let all = wait(&start(&e, &prompt(4, 0), seeded(1, 30))).0;
    let stop = all[4].id;
    let first = all.iter().position(|t| t.id == stop).unwrap();
    let sampling = SamplingParams { stop_token_ids: vec![stop], ..seeded(1, 30) };
    let (tokens, reason) = wait(&start(&e, &prompt(4, 0), sampling));
    assert_eq!(reason, FinishReason::Stop);
    assert_eq!(tokens, all[..=first]);
}

#[test]
fn max_tokens_is_cut_to_the_room_behind_the_prompt() {
    let e = engine(InferenceOptions::default());
    let (tokens, reason) = wait(&start(&e, &prompt(120, 0), seeded(1, 1000)));
    assert_eq!((tokens.len(), reason), (8, FinishReason::Length));
}

#[test]
fn invalid_requests_are_refused_by_field() {
    let e = engine(InferenceOptions::default());
    let refuse = |prompt: Vec<u32>, sampling: SamplingParams| {
        let (done, _rx) = mpsc::channel();
        let sink = Collect { tokens: Vec::new(), most: 1, done };
        e.generate(GenerateRequest { prompt, sampling }, Box::new(sink)).unwrap_err()
    };
    assert!(matches!(refuse(vec![], seeded(0, 1)), EngineError::EmptyPrompt));
    assert!(matches!(refuse(vec![1, 64], seeded(0, 1)), EngineError::TokenOutOfRange { index: 1, got: 64, .. }));
    assert!(matches!(refuse(vec![1; 128], seeded(0, 1)), EngineError::TooLong { got: 128, limit: 127, .. }));
    for (field, sampling) in [
        ("temperature", SamplingParams { temperature: f32::NAN, ..seeded(0, 1) }),
        ("temperature", SamplingParams { temperature: -1.0, ..seeded(0, 1) }),
        ("top_p", SamplingParams { top_p: 0.0, ..seeded(0, 1) }),
        ("max_tokens", seeded(0, 0)),
    ] {
        assert!(refuse(vec![1], sampling).to_string().contains(field));
    }
}

#[test]
fn a_full_queue_is_busy_and_later_serves_everyone() {
    let e = engine(InferenceOptions {
        max_batch: 1,
        max_batch_tokens: 4,
        threads: 1,
        nice: 0,
        ..InferenceOptions::default()
    });
    let mut accepted = Vec::new();
    let mut busy = false;
    for i in 0..200 {
        let (done, rx) = mpsc::channel();
        let sink = Collect { tokens: Vec::new(), most: usize::MAX, done };
        let request = GenerateRequest { prompt: prompt(100, i), sampling: seeded(1, 20) };
        match e.generate(request, Box::new(sink)) {
            Ok(()) => accepted.push(rx),
            Err(EngineError::Busy { waiting, limit }) => {
                assert_eq!((waiting, limit), (16, 16));
                busy = true;
                break;
            }
            Err(e) => panic!("{e}"),
        }
    }
    assert!(busy);
    accepted.iter().for_each(|rx| assert_eq!(wait(rx).0.len(), 20));
}

#[test]
fn new_weights_take_over_between_two_tokens() {
    let cfg = tiny_config();
    let e = engine(InferenceOptions::default());
    let (started, first_token) = mpsc::channel();
    struct Slow(Vec<u64>, mpsc::Sender<Vec<u64>>, mpsc::Sender<()>);
    impl TokenSink for Slow {
        fn token(&mut self, t: SampledToken) -> bool {
            self.0.push(t.policy_version);
            let _ = self.2.send(());
            std::thread::sleep(Duration::from_millis(2));
            true
        }
        fn finish(self: Box<Self>, r: Result<FinishReason, EngineError>) {
            r.unwrap();
            self.1.send(self.0).unwrap();
        }
    }
    let (done, rx) = mpsc::channel();
    let request = GenerateRequest { prompt: prompt(20, 0), sampling: seeded(1, 100) };
    e.generate(request, Box::new(Slow(Vec::new(), done, started))).unwrap();
    first_token.recv().unwrap();
    e.swap_weights(Weights::random(&cfg, &Device::Cpu, 4).unwrap(), 2).unwrap();
    let versions = rx.recv_timeout(Duration::from_secs(30)).unwrap();
    assert!(versions.is_sorted() && versions[0] == 1 && versions[99] == 2, "{versions:?}");
    // The prompt's blocks belong to version 1: a later request must not see them.
    let (tokens, _) = wait(&start(&e, &prompt(20, 0), seeded(1, 5)));
    let fresh = InferenceEngine::spawn(
        cfg.clone(),
        Weights::random(&cfg, &Device::Cpu, 4).unwrap(),
        2,
        InferenceOptions::default(),
        Device::Cpu,
    );
    assert_eq!(tokens, wait(&start(&fresh.unwrap(), &prompt(20, 0), seeded(1, 5))).0);
    let mut wrong = cfg;
    wrong.hidden_size += 8;
    assert!(e.swap_weights(Weights::random(&wrong, &Device::Cpu, 4).unwrap(), 3).is_err());
    assert_eq!(e.stats().policy_version, 2);
}

#[test]
fn broken_weights_end_the_sequence_with_an_error_and_the_engine_goes_on() {
    let cfg = tiny_config();
    let good = Weights::random(&cfg, &Device::Cpu, 3).unwrap();
    let broken = good.iter().map(|(n, t)| {
        let t = if n == "model.norm.weight" { (t * f64::NAN).unwrap() } else { t.clone() };
        (n.to_owned(), t)
    });
    let e = engine(InferenceOptions::default());
    e.swap_weights(Weights::from_ordered(broken.collect()), 9).unwrap();
    let (tokens, result) = start(&e, &prompt(4, 0), seeded(1, 5)).recv_timeout(Duration::from_secs(30)).unwrap();
    assert!(tokens.is_empty());
    assert!(matches!(result, Some(Err(EngineError::NonFiniteLogits { policy_version: 9 }))));
    e.swap_weights(good, 10).unwrap();
    assert_eq!(wait(&start(&e, &prompt(4, 0), seeded(1, 5))).0.len(), 5);
}

#[test]
fn a_caller_that_is_gone_or_panics_frees_its_slot() {
    let e = engine(InferenceOptions {
        max_batch: 1,
        max_batch_tokens: 8,
        threads: 1,
        nice: 0,
        ..InferenceOptions::default()
    });
    struct Panics;
    impl TokenSink for Panics {
        fn token(&mut self, _t: SampledToken) -> bool {
            panic!("a sink of a careless caller")
        }
        fn finish(self: Box<Self>, _r: Result<FinishReason, EngineError>) {}
    }
    e.generate(GenerateRequest { prompt: vec![1], sampling: seeded(0, 100) }, Box::new(Panics)).unwrap();
    let (done, gone) = mpsc::channel();
    let sink = Collect { tokens: Vec::new(), most: 2, done };
    e.generate(GenerateRequest { prompt: vec![1], sampling: seeded(0, 100) }, Box::new(sink)).unwrap();
    assert_eq!(wait(&start(&e, &[2], seeded(0, 3))).0.len(), 3);
    assert!(gone.recv_timeout(Duration::from_secs(30)).is_err(), "no call of finish, the sink is dropped");
}

#[test]
fn dropping_the_last_handle_stops_what_runs() {
    let e = engine(InferenceOptions {
        max_batch: 1,
        max_batch_tokens: 8,
        threads: 1,
        nice: 0,
        ..InferenceOptions::default()
    });
    let running: Vec<_> = (0..3).map(|i| start(&e, &prompt(3, i), seeded(1, 120))).collect();
    let other = e.clone();
    drop(e);
    assert_eq!(wait(&running[0]).0.len(), 120);
    drop(other);
    let (_, result) = running[2].recv_timeout(Duration::from_secs(30)).unwrap();
    assert!(matches!(result, Some(Err(EngineError::Stopped) | Ok(FinishReason::Length))));
}

#[test]
fn generation_from_rounded_weights_has_the_bits_of_f32_with_these_weights() {
    for cfg in tiny_configs() {
        let name = cfg.architecture;
        let exact = varied_weights(&cfg, 5);
        let rounded = exact.iter().map(|(name, t)| {
            let [n, k] = *t.dims() else { return (name.to_owned(), t.clone()) };
            let packed = PackedQ8::from_weight(&t.flatten_all().unwrap().to_vec1::<f32>().unwrap(), n, k);
            let mut values = vec![0f32; n * k];
            values.chunks_exact_mut(k).enumerate().for_each(|(i, row)| packed.row(i, row));
            (name.to_owned(), candle_core::Tensor::from_vec(values, (n, k), &Device::Cpu).unwrap())
        });
        let rounded = Weights::from_ordered(rounded.collect());
        let options = InferenceOptions { weight_format: WeightFormat::Q8_0, ..InferenceOptions::default() };
        let engine = InferenceEngine::spawn(cfg.clone(), exact.clone(), 1, options, Device::Cpu).unwrap();
        let check = |weights: &Weights| {
            let rxs: Vec<_> = (0..11).map(|i| start(&engine, &prompt(37 + i, i), seeded(u64::from(i), 20))).collect();
            for (i, rx) in (0..).zip(rxs) {
                let tokens = wait(&rx).0;
                let ids: Vec<u32> = prompt(37 + i, i).into_iter().chain(tokens.iter().map(|t| t.id)).collect();
                let scored = sequence_logprobs(&cfg, weights, &Device::Cpu, &ids).unwrap();
                let sampled: Vec<f32> = tokens.iter().map(|t| t.logprob).collect();
                assert_eq!(sampled, scored[scored.len() - sampled.len()..], "{name:?}");
                // The unrounded weights are others, and near.
                let unrounded = sequence_logprobs(&cfg, &exact, &Device::Cpu, &ids).unwrap();
                assert_ne!(unrounded, scored, "{name:?}");
                assert!(unrounded.iter().zip(&scored).all(|(a, b)| (a - b).abs() < 0.3), "{name:?}");
            }
        };
        check(&rounded);
        // New weights come in the same format.
        engine.swap_weights(exact.clone(), 2).unwrap();
        check(&rounded);
    }
    assert!("q4".parse::<WeightFormat>().is_err());
}
