//! The library under fixed seeds: every promise holds, and every run replays.

use starling_simulations::scenario::library;
use starling_simulations::{Scenario, replays, run_all};
use std::sync::Arc;

/// Seeds that every scenario runs with here; `starling sim --seeds 1..2000` by hand goes further.
const SEEDS: std::ops::RangeInclusive<u64> = 1..=3;

/// Runs that once broke a promise: new weights collected while they waited for a second holder; a rollout of which no
/// token trains, which is never stale; a leader that came back within its term and read an old state; one without a quorum
/// whose heartbeats kept its follower from a new generation.
const FOUND: [(&str, u64); 6] =
    [("drawn", 981), ("drawn", 1093), ("blackout", 12), ("blackout", 14), ("drawn-lines", 1479), ("drawn-lines", 1812)];

/// The library, or those of it that `SIM_SCENARIOS` names, with commas: for work on one of them.
fn scenarios() -> Vec<Arc<Scenario>> {
    let only = std::env::var("SIM_SCENARIOS").ok();
    let wanted = |s: &Arc<Scenario>| only.as_ref().is_none_or(|o| o.split(',').any(|name| name == s.name));
    library::all().into_iter().filter(wanted).collect()
}

#[test]
fn every_scenario_keeps_every_promise() {
    let scenarios = scenarios();
    let mut plan: Vec<_> = SEEDS.flat_map(|seed| scenarios.iter().map(move |s| (Arc::clone(s), seed))).collect();
    for (name, seed) in FOUND {
        plan.extend(scenarios.iter().filter(|s| s.name == name).map(|s| (Arc::clone(s), seed)));
    }
    let outcomes = run_all(&plan, 2, |o| {
        for v in &o.violations {
            eprintln!("{} seed {}: {}: {}", o.scenario, o.seed, v.invariant, v.conflict);
        }
        true
    });
    let broken = outcomes.iter().filter(|o| !o.violations.is_empty()).count();
    assert_eq!(
        broken,
        0,
        "of {} runs; reproduce with `starling sim SCENARIO --seeds SEED --report report`",
        plan.len()
    );
    // A run in which nothing happens keeps every promise too.
    for o in &outcomes {
        assert!(o.counts.steps > 0 && o.counts.acknowledged > 0, "{} seed {}: {:?}", o.scenario, o.seed, o.counts);
    }
}

#[test]
fn a_seed_replays() {
    for s in scenarios().iter().step_by(5) {
        let (first, second) = replays(s, 3);
        assert_eq!(first, second, "{} seed 3", s.name);
    }
}
