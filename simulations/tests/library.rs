//! The library under fixed seeds: every promise holds, and every run replays.

use starling_simulations::scenario::library;
use starling_simulations::{replays, run_all};
use std::sync::Arc;

/// Seeds of a test run; `starling sim --seeds 1..2000` by hand goes further.
const SEEDS: std::ops::RangeInclusive<u64> = 1..=1;

#[test]
fn every_scenario_keeps_every_promise() {
    let scenarios = library::all();
    let plan: Vec<_> = SEEDS.flat_map(|seed| scenarios.iter().map(move |s| (Arc::clone(s), seed))).collect();
    let outcomes = run_all(&plan, 2, |o| {
        eprintln!("{} seed {}: {:?} {:?}", o.scenario, o.seed, o.counts, o.violations);
        true
    });
    let broken: Vec<_> = outcomes.iter().filter(|o| !o.violations.is_empty()).collect();
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn a_seed_replays() {
    for s in library::all().iter().step_by(5) {
        let (first, second) = replays(s, 3);
        assert_eq!(first, second, "{} seed 3", s.name);
    }
}
