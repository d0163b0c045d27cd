//! Every loss against numpy in float64 (`tests/goldens/make_algorithm_goldens.py`), against differences, and at the edges.

use super::*;
use serde_json::Value;
use starling_protocol::algorithm::{Bounds, ReferenceKl};

const GOLDENS: &str = include_str!("../../../../tests/goldens/algorithms.json");

fn floats(v: &Value) -> Vec<f64> {
    v.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

/// Tokens of four sequences, the second in two samples: log-probabilities, entropies, samples' terms, sequences.
struct Tokens {
    logprobs: Vec<f32>,
    entropies: Vec<f32>,
    terms: Vec<Vec<TokenTerm>>,
    sequences: Vec<Range<usize>>,
}

#[expect(clippy::cast_possible_truncation, reason = "the script rounded these to f32")]
fn tokens(root: &Value) -> Tokens {
    let input = |name: &str| floats(&root["inputs"][name]).iter().map(|x| *x as f32).collect::<Vec<f32>>();
    let (mu, old, reference) = (input("mu"), input("old"), input("ref"));
    let (advantage, behind) = (input("advantage"), input("behind"));
    let term = |i: usize| TokenTerm {
        behaviour_logprob: mu[i],
        advantage: advantage[i],
        shortcut: behind[i] / (behind[i] + 1.0),
        old_logprob: Some(old[i]),
        reference_logprob: reference[i],
        ..TokenTerm::default()
    };
    let all: Vec<TokenTerm> = (0..mu.len()).map(term).collect();
    assert_eq!(root["lengths"], serde_json::json!([4, 6, 1, 7]));
    let cuts = [0, 4, 6, 10, 11, 18];
    let terms = cuts.windows(2).map(|w| all[w[0]..w[1]].to_vec()).collect();
    Tokens { logprobs: input("logprob"), entropies: input("entropy"), terms, sequences: vec![0..1, 1..3, 3..4, 4..5] }
}

impl Tokens {
    /// Everything that comes before single tokens, at log-probabilities `logprobs`.
    fn prepared(&self, loss: &Loss, logprobs: &[f32]) -> Vec<TokenTerm> {
        let mut terms = self.terms.clone();
        if loss.needs_old_pass(2) {
            loss.weigh_sequences(&self.sequences, &mut terms);
        }
        if loss.needs_current_pass(true) {
            let mut flat = logprobs.iter().copied();
            let current: Vec<Vec<f32>> = terms.iter().map(|t| flat.by_ref().take(t.len()).collect()).collect();
            loss.rate_sequences(&self.sequences, &mut terms, &current);
        }
        loss.aggregate(&self.sequences, &mut terms);
        terms.concat()
    }

    /// The mean loss, its derivatives, and the sums.
    fn run(&self, loss: &Loss) -> (f64, Vec<[f64; 2]>, LossSums) {
        let mut sums = LossSums::default();
        let terms = self.prepared(loss, &self.logprobs);
        let n = f64::from(u32::try_from(terms.len()).unwrap());
        let rows = self.logprobs.iter().zip(&self.entropies).zip(&terms);
        let grads = rows.map(|((&l, &h), t)| loss.token(l, h, t, &mut sums).map(|g| f64::from(g) / n)).collect();
        (sums.loss / n, grads, sums)
    }
}

fn loss_of(case: &Value) -> Loss {
    Loss { spec: serde_json::from_value(case["spec"].clone()).unwrap(), has_behaviour: true }
}

/// Ratios of f32 logarithms carry some 1e-7 of relative error each and there are a few in a row; 1e-5 of the largest
/// value is a margin of ten.
#[test]
fn loss_and_gradient_per_token_match() {
    let root: Value = serde_json::from_str(GOLDENS).unwrap();
    let tokens = tokens(&root["tokens"]);
    let cases = root["tokens"]["cases"].as_object().unwrap();
    assert!(cases.len() >= 30, "{} cases", cases.len());
    for (name, case) in cases {
        let loss = loss_of(case);
        loss.spec.validate().unwrap();
        let (value, grads, sums) = tokens.run(&loss);
        let want = case["loss"].as_f64().unwrap();
        assert!((value - want).abs() < 1e-5 * want.abs().max(1.0), "{name}: loss {value}, expected {want}");
        let masked = f64::from(u32::try_from(sums.masked).unwrap()) / 18.0;
        assert!((masked - case["masked"].as_f64().unwrap()).abs() < 1e-6, "{name}: masked {masked}");
        for (column, field) in [(0, "by_logprob"), (1, "by_entropy")] {
            let want = floats(&case[field]);
            let largest = want.iter().fold(1e-3, |m: f64, w| m.max(w.abs()));
            for (i, (got, want)) in grads.iter().zip(&want).enumerate() {
                let got = got[column];
                assert!((got - want).abs() < 1e-5 * largest, "{name}: {field}[{i}] {got}, expected {want}");
            }
        }
    }
}

/// The derivative against differences of the value, where the value has no constants for the gradient in it.
#[test]
fn derivatives_are_those_of_the_value() {
    let root: Value = serde_json::from_str(GOLDENS).unwrap();
    let tokens = tokens(&root["tokens"]);
    let (mut checked, mut kinks) = (0, 0);
    for (name, case) in root["tokens"]["cases"].as_object().unwrap() {
        let loss = loss_of(case);
        let s = &loss.spec;
        let constants = matches!(s.objective, Objective::Cispo { .. } | Objective::Gspo { .. })
            || s.old_policy == OldPolicy::Shortcut;
        if constants {
            continue;
        }
        checked += 1;
        let terms = tokens.prepared(&loss, &tokens.logprobs);
        for (i, term) in terms.iter().enumerate() {
            let value = |l: f32, h: f32| {
                let mut sums = LossSums::default();
                loss.token(l, h, term, &mut sums);
                sums.loss
            };
            let (l, h) = (tokens.logprobs[i], tokens.entropies[i]);
            let [by_logprob, by_entropy] = loss.token(l, h, term, &mut LossSums::default());
            // A clip, a mask or a sign may turn within the step; there the difference is of two different formulas.
            let step = 1.0 / 512.0;
            let at = |l: f32| loss.token(l, h, term, &mut LossSums::default())[0];
            if [at(l - step), at(l + step)].iter().any(|g| (g - by_logprob).abs() > 0.02) {
                kinks += 1;
                continue;
            }
            // 2^-9 is exact in f32 at these sizes; the error is its square (4e-6) and rounding over it (1e-4).
            let slope = |a: f64, b: f64| (a - b) / f64::from(2.0 * step);
            let by_l = slope(value(l + step, h), value(l - step, h));
            let by_h = slope(value(l, h + step), value(l, h - step));
            assert!((by_l - f64::from(by_logprob)).abs() < 3e-3, "{name}: token {i}: {by_logprob}, difference {by_l}");
            assert!((by_h - f64::from(by_entropy)).abs() < 1e-3, "{name}: token {i}: {by_entropy}, difference {by_h}");
        }
    }
    assert!(checked >= 18 && kinks < checked, "{checked} cases of 18 tokens, {kinks} skipped");
}

/// However a sequence is cut into samples, it is one sequence.
#[test]
fn an_episode_in_two_timelines_weighs_as_much_as_one() {
    let root: Value = serde_json::from_str(GOLDENS).unwrap();
    let split = tokens(&root["tokens"]);
    let whole = Tokens {
        terms: split.sequences.iter().map(|s| split.terms[s.clone()].concat()).collect(),
        sequences: (0..4).map(|i| i..i + 1).collect(),
        logprobs: split.logprobs.clone(),
        entropies: split.entropies.clone(),
    };
    for (name, case) in root["tokens"]["cases"].as_object().unwrap() {
        let loss = loss_of(case);
        assert_eq!(split.run(&loss), whole.run(&loss), "{name}");
    }
}

/// Where sampler, trainer and reference are the same, every ratio is 1, and nothing is clipped, masked or counted.
#[test]
fn on_policy_every_objective_pushes_by_the_advantage() {
    let root: Value = serde_json::from_str(GOLDENS).unwrap();
    let mut tokens = tokens(&root["tokens"]);
    for (term, &l) in tokens.terms.iter_mut().flatten().zip(&tokens.logprobs) {
        *term = TokenTerm { behaviour_logprob: l, old_logprob: Some(l), reference_logprob: l, ..*term };
    }
    for (name, case) in root["tokens"]["cases"].as_object().unwrap() {
        let mut loss = loss_of(case);
        (loss.spec.aggregation, loss.spec.entropy_bonus) = (Aggregation::TokenMean, 0.0);
        if loss.spec.kl.estimator == KlEstimator::K1 {
            loss.spec.kl = ReferenceKl::default();
        }
        let (_, grads, sums) = tokens.run(&loss);
        assert_eq!((sums.clipped, sums.masked, sums.out_of_range), (0, 0, 0), "{name}");
        assert!(sums.kl.abs() < 1e-12 && sums.reference_kl.abs() < 1e-12, "{name}");
        for (g, term) in grads.iter().zip(tokens.terms.iter().flatten()) {
            let want = if loss.spec.objective == Objective::Supervised { -1.0 } else { -term.advantage };
            assert!((g[0] * 18.0 - f64::from(want)).abs() < 1e-6, "{name}: {} expected {want}", g[0] * 18.0);
        }
    }
}

#[test]
fn any_finite_log_probabilities_give_finite_losses_and_far_ratios_are_counted() {
    let root: Value = serde_json::from_str(GOLDENS).unwrap();
    let far = [0.0f32, -1e-30, -0.7, -19.0, -21.0, -88.0, -104.0, -3e4, -1e30];
    for (name, case) in root["tokens"]["cases"].as_object().unwrap() {
        let loss = loss_of(case);
        let mut sums = LossSums::default();
        for (i, &logprob) in far.iter().enumerate() {
            for &behaviour in &far {
                for advantage in [0.0, 1.0, -1.0, 1e6, -1e6] {
                    let term = TokenTerm {
                        behaviour_logprob: behaviour,
                        advantage,
                        shortcut: 0.5,
                        old_logprob: Some(far[(i * 5 + 3) % far.len()]),
                        reference_logprob: far[(i * 7 + 1) % far.len()],
                        ..TokenTerm::default()
                    };
                    let mut terms = vec![vec![term]];
                    loss.weigh_sequences(std::slice::from_ref(&(0..1)), &mut terms);
                    loss.rate_sequences(std::slice::from_ref(&(0..1)), &mut terms, &[vec![logprob]]);
                    let g = loss.token(logprob, 1.0, &terms[0][0], &mut sums);
                    assert!(g.iter().all(|g| g.is_finite()), "{name}: {logprob} {term:?} gives {g:?}");
                }
            }
        }
        assert!(sums.is_finite(), "{name}: {sums:?}");
        assert!(sums.out_of_range > 0, "{name}");
    }
    let nan = TokenTerm { behaviour_logprob: -1.0, advantage: 1.0, ..TokenTerm::default() };
    for case in root["tokens"]["cases"].as_object().unwrap().values() {
        let mut sums = LossSums::default();
        loss_of(case).token(f32::NAN, 1.0, &nan, &mut sums);
        assert!(!sums.is_finite(), "NaN must not pass: {case}");
    }
}

fn clip(ratio_max: Option<f32>) -> Loss {
    let objective = Objective::Clip { low: 0.2, high: 0.3, ratio_max };
    Loss { spec: AlgorithmSpec { objective, ..AlgorithmSpec::default() }, has_behaviour: true }
}

fn run(loss: &Loss, logprob: f32, behaviour_logprob: f32, advantage: f32) -> (f64, f32, u64) {
    let mut sums = LossSums::default();
    let term = TokenTerm { behaviour_logprob, advantage, ..TokenTerm::default() };
    let [g, _] = loss.token(logprob, 1.0, &term, &mut sums);
    (sums.loss, g, sums.clipped)
}

#[test]
fn each_side_is_clipped_only_where_it_would_gain() {
    let ppo = clip(None);
    assert_eq!(run(&ppo, -1.5, -1.5, 2.0), (-2.0, -2.0, 0));
    // r = e^0.5 = 1.6487: above 1.3. A > 0 is clipped, A < 0 is not.
    let (loss, g, clipped) = run(&ppo, -1.0, -1.5, 1.0);
    assert!((loss + 1.3).abs() < 1e-6 && g.abs() < 1e-9 && clipped == 1);
    let (loss, g, clipped) = run(&ppo, -1.0, -1.5, -1.0);
    assert!((loss - 1.648_721).abs() < 1e-5 && (g - 1.648_721).abs() < 1e-5 && clipped == 0);
    // Two-sided, that one stops at 1.5.
    let (loss, g, clipped) = run(&clip(Some(1.5)), -1.0, -1.5, -1.0);
    assert!((loss - 1.5).abs() < 1e-6 && g.abs() < 1e-9 && clipped == 1);
    // r = e^-0.5 = 0.6065: below 0.8. A < 0 is clipped, A > 0 is not.
    let (loss, _, clipped) = run(&ppo, -2.0, -1.5, -1.0);
    assert!((loss - 0.8).abs() < 1e-6 && clipped == 1);
    assert_eq!(run(&ppo, -2.0, -1.5, 1.0).2, 0);
}

#[test]
fn passes_are_made_only_where_a_loss_needs_them() {
    for preset in Preset::ALL {
        let loss = Loss { spec: preset.spec(24), has_behaviour: true };
        assert!(!loss.needs_old_pass(1), "{preset:?}: with one update, the weights of the start are the current ones");
        assert!(!loss.needs_current_pass(false), "{preset:?}");
        let recomputes = matches!(preset, Preset::Ppo | Preset::Gspo | Preset::DecoupledPpo);
        assert_eq!(loss.needs_old_pass(2), recomputes, "{preset:?}");
        assert_eq!(loss.needs_current_pass(true), preset == Preset::Gspo);
    }
    let mut guarded = clip(None);
    guarded.spec.outlier_guard = Some(Bounds { low: 1e-4, high: 100.0 });
    assert!(guarded.needs_old_pass(1));
}
