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
///
/// The two scenarios that are not in the library are made for their bug.
const CASES: [(Bug, &str, &str); 11] = [
    (Bug::AcknowledgeBeforePersist, "calm", "I4"),
    (Bug::SkipFencing, CUT_WHILE_TRAINING, "I6"),
    (Bug::ConsumeBeforeCommit, "calm", "I3"),
    (Bug::ForgetHolder, "calm", "I4"),
    (Bug::CountTimelines, "calm", "whole groups"),
    (Bug::ForgetVote, "rolling-crashes", "I8"),
    (Bug::LoseLogTail, "blackout", "I2"),
    (Bug::AdmitStale, "slow-device", "I5"),
    (Bug::SkipReceipts, "dishonest", "I5"),
    (Bug::ReissueEpisode, SHORTLY_GONE, "I9"),
    (Bug::KeepOldMarks, "greater-line", "I3"),
];

/// The leader is cut off for as long as an election takes, mostly in the middle of a long step.
const CUT_WHILE_TRAINING: &str = r#"
name = "cut-while-training"
about = "Steps take three seconds, and the leader is cut off for four."
[[node]]
role = "server"
count = 3
[[node]]
role = "client"
count = 2
[device.default]
train_ms = 3000
[[fault]]
kind = "isolate"
at_s = 12
for_s = 4
nodes = "leader"
[[fault]]
kind = "isolate"
at_s = 26
for_s = 4
nodes = "leader"
[[fault]]
kind = "isolate"
at_s = 40
for_s = 4
nodes = "leader"
"#;

/// The leader's process is back before anyone misses it: it starts over in its own term.
const SHORTLY_GONE: &str = r#"
name = "shortly-gone"
about = "Again and again the leader's machine loses power for a third of a second."
[[node]]
role = "server"
count = 3
[[node]]
role = "client"
count = 3
[[fault]]
kind = "crash"
at_s = 10
nodes = "leader"
power_loss = true
away_s = 0.3
[[fault]]
kind = "crash"
at_s = 18
nodes = "leader"
power_loss = true
away_s = 0.3
[[fault]]
kind = "crash"
at_s = 26
nodes = "leader"
power_loss = true
away_s = 0.3
[[fault]]
kind = "crash"
at_s = 34
nodes = "leader"
power_loss = true
away_s = 0.3
[[fault]]
kind = "crash"
at_s = 42
nodes = "leader"
power_loss = true
away_s = 0.3
"#;

fn scenario(name: &str) -> Arc<Scenario> {
    Arc::new(parse(library::text(name).unwrap_or(name)).unwrap())
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
                println!("| {bug:?} | {} | {seed} | {} |", scenario.name, by.invariant);
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
