//! The faults of one run: those of the scenario, and those drawn from the seed where it names none.

use super::fault::{Fault, FaultKind, Session};
use super::select::{RoleSet, Select};
use super::{Mode, Scenario};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::time::Duration;

/// Keeps the plan's draws apart from those of network, nodes and agents under the same seed.
const STREAM: u64 = 0x00fa_0175;

/// All faults of the run with `seed`, ascending in time.
#[must_use]
pub fn faults(scenario: &Scenario, seed: u64) -> Vec<Fault> {
    let mut faults = scenario.faults.clone();
    if scenario.draws_faults {
        let mut rng = ChaCha8Rng::seed_from_u64(seed ^ STREAM);
        faults.extend(drawn(scenario, &mut rng));
    }
    faults.sort_by_key(|f| f.at);
    faults
}

fn drawn(scenario: &Scenario, rng: &mut ChaCha8Rng) -> Vec<Fault> {
    let end = scenario.duration.as_secs_f64();
    let n = rng.random_range(2..=6);
    let mut disk_lost = false;
    let mut faults = Vec::with_capacity(n + 1);
    // Where survivors may go on without a quorum, it may be lost for good.
    if scenario.generation_after.is_some() && rng.random_bool(0.6) {
        faults.extend(lost_quorum(scenario, rng, end));
        // Then the survivors' disks have what there is: one more lost may lose the model, by right.
        disk_lost = !faults.is_empty();
    }
    for _ in 0..n {
        let at = Duration::from_secs_f64(rng.random_range(0.1..0.8) * end);
        let lasts = Duration::from_secs_f64(rng.random_range(1.0..(end / 3.0).max(2.0)));
        let kind = match scenario.mode {
            Mode::Membership => network_fault(scenario, rng),
            Mode::Mesh => match rng.random_range(0..10) {
                0..4 => network_fault(scenario, rng),
                4..7 => {
                    // More than `replication - 1` lost disks may lose rollouts by right: one a run.
                    let lost = !disk_lost && scenario.job.replication > 1 && rng.random_bool(0.15);
                    disk_lost |= lost;
                    FaultKind::Crash {
                        nodes: vec![victim(scenario, rng)],
                        power_loss: lost || rng.random_bool(0.6),
                        disk_lost: lost,
                        // An operator's backup of the key, now and then.
                        key_kept: lost && rng.random_bool(0.5),
                        away: Some(Duration::from_secs_f64(rng.random_range(0.2..15.0))),
                    }
                }
                7 => node_fault(scenario, rng),
                8 => FaultKind::Churn {
                    nodes: vec![Select::Role(RoleSet::Clients)],
                    session: [Session::Exponential, Session::Weibull, Session::Pareto][rng.random_range(0..3)],
                    mean: Duration::from_secs_f64(rng.random_range(5.0..30.0)),
                    away: Duration::from_secs_f64(rng.random_range(1.0..10.0)),
                },
                _ => FaultKind::Degrade {
                    nodes: vec![Select::All],
                    loss: rng.random_range(0.0..0.25),
                    latency: Duration::from_secs_f64(rng.random_range(0.0..0.2)),
                    bandwidth_kib_s: 0,
                },
            },
        };
        let over_at_once =
            matches!(kind, FaultKind::Crash { .. } | FaultKind::DiskCorrupt { .. } | FaultKind::ClockJump { .. });
        faults.push(Fault { at, lasts: (!over_at_once).then_some(lasts), kind });
    }
    faults
}

/// So many servers die at once, for good, that the others are no majority; at least one survives.
fn lost_quorum(scenario: &Scenario, rng: &mut ChaCha8Rng, end: f64) -> Option<Fault> {
    let names = scenario.node_names();
    let serves = |(name, group): &(String, usize)| scenario.nodes[*group].role.serves().then(|| name.clone());
    let mut servers: Vec<String> = names.iter().filter_map(serves).collect();
    if servers.len() < 2 {
        return None;
    }
    let lost = rng.random_range(servers.len().div_ceil(2)..servers.len());
    let nodes = (0..lost).map(|_| Select::Node(servers.swap_remove(rng.random_range(0..servers.len()))));
    let kind = FaultKind::Crash {
        nodes: nodes.collect(),
        power_loss: rng.random_bool(0.5),
        disk_lost: false,
        key_kept: false,
        away: None,
    };
    Some(Fault { at: Duration::from_secs_f64(rng.random_range(0.15..0.5) * end), lasts: None, kind })
}

/// Mostly whoever matters most.
fn victim(scenario: &Scenario, rng: &mut ChaCha8Rng) -> Select {
    let has_clients = scenario.nodes.iter().any(|g| g.role.runs_agents() && !g.role.serves());
    match rng.random_range(0..4) {
        0 => Select::Leader,
        1 if has_clients => Select::Random(RoleSet::Clients),
        2 => Select::Random(RoleSet::Nodes),
        _ => Select::Random(RoleSet::Servers),
    }
}

fn network_fault(scenario: &Scenario, rng: &mut ChaCha8Rng) -> FaultKind {
    let nodes: u32 = scenario.nodes.iter().map(|g| g.count).sum();
    let leader_and_rest = || vec![vec![Select::Leader], vec![Select::All]];
    match rng.random_range(0..6) {
        0 if nodes >= 2 => FaultKind::Islands { count: rng.random_range(2..=nodes.min(4)) },
        1 => FaultKind::Isolate { nodes: vec![victim(scenario, rng)] },
        2 => FaultKind::OneWay { from: vec![Select::Leader], to: vec![Select::All] },
        3 => FaultKind::OneWay { from: vec![Select::All], to: vec![Select::Leader] },
        4 => FaultKind::Flapping {
            sides: leader_and_rest(),
            period: Duration::from_secs_f64(rng.random_range(0.5..6.0)),
        },
        _ => FaultKind::Split { sides: vec![vec![Select::Leader, Select::Random(RoleSet::Nodes)], vec![Select::All]] },
    }
}

fn node_fault(scenario: &Scenario, rng: &mut ChaCha8Rng) -> FaultKind {
    let nodes = vec![victim(scenario, rng)];
    match rng.random_range(0..7) {
        0 => FaultKind::DiskSlow { nodes, delay: Duration::from_millis(rng.random_range(5..500)) },
        1 => FaultKind::DiskFull { nodes },
        2 => FaultKind::DiskFails { nodes },
        3 => FaultKind::DiskCorrupt { nodes, values: rng.random_range(1..4) },
        4 => FaultKind::ClockJump { nodes, by_ms: rng.random_range(-120_000..120_000) },
        5 => FaultKind::ClockSkew { nodes, rate: rng.random_range(0.8..1.25) },
        _ => FaultKind::SlowDevice { nodes, factor: rng.random_range(2.0..20.0) },
    }
}
