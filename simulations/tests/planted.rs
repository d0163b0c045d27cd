//! The harness is proven: each known way to break a promise is caught, by the checker that is there for it.
//!
//! `cargo test --release -p starling-simulations --features planted-bugs --test planted`
#![cfg(feature = "planted-bugs")]

use starling_protocol::planted::Bug;
use starling_simulations::scenario::{library, parse};
use starling_simulations::{Scenario, run_planted};
use std::sync::Arc;

/// Each is caught within so many seeds.
const SEEDS_MAX: u64 = 200;

/// A bug, the scenario that shows it, and words of the property that it breaks.
const CASES: [(Bug, &str, &str); 10] = [
    (Bug::AcknowledgeBeforePersist, "calm", "I4"),
    (Bug::SkipFencing, "flapping", "I6"),
    (Bug::ConsumeBeforeCommit, "calm", "I3"),
    (Bug::ForgetHolder, "calm", "I4"),
    (Bug::CountTimelines, "calm", "whole groups"),
    (Bug::ForgetVote, "rolling-crashes", "I8"),
    (Bug::LoseLogTail, "blackout", ""),
    (Bug::AdmitStale, "slow-device", "I5"),
    (Bug::SkipReceipts, "dishonest", "I5"),
    (Bug::ReissueEpisode, "disk-full", "I9"),
];

fn scenario(name: &str) -> Arc<Scenario> {
    Arc::new(parse(library::text(name).unwrap()).unwrap())
}

#[test]
fn every_planted_bug_is_caught() {
    let mut missed = Vec::new();
    println!("| bug | scenario | caught by seed | property |\n|---|---|---|---|");
    for (bug, name, property) in CASES {
        let scenario = scenario(name);
        let caught = (1..=SEEDS_MAX).find_map(|seed| {
            let outcome = run_planted(&scenario, seed, bug);
            outcome.violations.into_iter().next().map(|v| (seed, v))
        });
        match caught {
            Some((seed, by)) => {
                println!("| {bug:?} | {name} | {seed} | {} |", by.invariant);
                assert!(by.invariant.contains(property), "{bug:?} should break {property}: {by:?}");
            }
            None => missed.push(bug),
        }
    }
    assert!(missed.is_empty(), "not caught within {SEEDS_MAX} seeds: {missed:?}");
}

#[test]
fn every_bug_has_a_case() {
    for bug in Bug::ALL {
        assert!(CASES.iter().any(|(b, ..)| *b == bug), "{bug:?}");
    }
}
