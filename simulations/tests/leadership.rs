//! Where leadership goes when devices differ.

use starling_simulations::event::{Event, NodeIx};
use starling_simulations::scenario::{library, parse};
use starling_simulations::{Outcome, run};
use std::sync::Arc;

fn outcome(name: &str, seed: u64) -> Outcome {
    let text = library::text(name).expect("a scenario of the library");
    let scenario = Arc::new(parse(text).expect("the library's scenarios are right"));
    let outcome = run(&scenario, seed, true);
    assert!(outcome.violations.is_empty(), "{name} seed {seed}: {:?}", outcome.violations);
    outcome
}

/// Who led, one entry a term and node, in order, with the seconds at which it began.
fn reigns(outcome: &Outcome) -> Vec<(NodeIx, f64)> {
    let mut seen = Vec::new();
    let mut reigns = Vec::new();
    for (at, event) in &outcome.record {
        if let Event::Leads { node, term, is_self: true, .. } = event
            && !seen.contains(&(*node, *term))
        {
            seen.push((*node, *term));
            reigns.push((*node, at.as_secs_f64()));
        }
    }
    reigns
}

fn named(outcome: &Outcome, name: &str) -> NodeIx {
    let at = outcome.names.iter().position(|n| n == name).expect("a node of the scenario");
    NodeIx(u32::try_from(at).expect("few nodes"))
}

#[test]
fn a_fast_device_that_joins_takes_over_once_and_keeps_the_leadership() {
    for seed in 1..=5 {
        let outcome = outcome("fast-joins", seed);
        let (fast, reigns) = (named(&outcome, "fast-1"), reigns(&outcome));
        assert_eq!(reigns.last().map(|(n, _)| *n), Some(fast), "seed {seed}: {reigns:?}");
        assert_eq!(reigns.iter().filter(|(n, _)| *n == fast).count(), 1, "seed {seed}: {reigns:?}");
    }
}

#[test]
fn a_fast_device_that_crashes_again_and_again_costs_no_more_changes_than_it_makes() {
    for seed in 1..=5 {
        let outcome = outcome("fast-flaky", seed);
        let (fast, reigns) = (named(&outcome, "fast-1"), reigns(&outcome));
        let of_fast = reigns.iter().filter(|(n, _)| *n == fast).count();
        // Five crashes: it may lead before the first and after each, and each ends in one election, rarely in two.
        assert!((1..=6).contains(&of_fast) && reigns.len() <= 14, "seed {seed}: {reigns:?}");
    }
}

#[test]
fn a_device_that_is_too_small_leads_for_no_longer_than_it_takes_to_measure_it() {
    for seed in 1..=5 {
        let outcome = outcome("small-device", seed);
        let (small, reigns) = (named(&outcome, "small-1"), reigns(&outcome));
        assert!(reigns.iter().all(|(n, at)| *n != small || *at < 10.0), "seed {seed}: {reigns:?}");
        assert!(reigns.len() >= 3, "seed {seed}: {reigns:?}");
    }
}
