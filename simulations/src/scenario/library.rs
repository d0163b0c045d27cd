//! The scenarios that come with Starling.

use super::{Scenario, parse};
use std::sync::Arc;

/// Name and text of each, in the order of `docs/simulation.md`.
pub const ALL: &[(&str, &str)] = &[
    ("calm", include_str!("../../scenarios/calm.toml")),
    ("drawn", include_str!("../../scenarios/drawn.toml")),
    ("drawn-five", include_str!("../../scenarios/drawn-five.toml")),
    ("leader-isolated", include_str!("../../scenarios/leader-isolated.toml")),
    ("leader-muted", include_str!("../../scenarios/leader-muted.toml")),
    ("leader-deaf", include_str!("../../scenarios/leader-deaf.toml")),
    ("split", include_str!("../../scenarios/split.toml")),
    ("islands", include_str!("../../scenarios/islands.toml")),
    ("client-island", include_str!("../../scenarios/client-island.toml")),
    ("bridge", include_str!("../../scenarios/bridge.toml")),
    ("flapping", include_str!("../../scenarios/flapping.toml")),
    ("rolling-crashes", include_str!("../../scenarios/rolling-crashes.toml")),
    ("blackout", include_str!("../../scenarios/blackout.toml")),
    ("volunteers", include_str!("../../scenarios/volunteers.toml")),
    ("mass-leave", include_str!("../../scenarios/mass-leave.toml")),
    ("mass-join", include_str!("../../scenarios/mass-join.toml")),
    ("disk-lost", include_str!("../../scenarios/disk-lost.toml")),
    ("key-kept", include_str!("../../scenarios/key-kept.toml")),
    ("disk-full", include_str!("../../scenarios/disk-full.toml")),
    ("disk-fails", include_str!("../../scenarios/disk-fails.toml")),
    ("disk-slow", include_str!("../../scenarios/disk-slow.toml")),
    ("disk-rot", include_str!("../../scenarios/disk-rot.toml")),
    ("clocks", include_str!("../../scenarios/clocks.toml")),
    ("slow-device", include_str!("../../scenarios/slow-device.toml")),
    ("fast-joins", include_str!("../../scenarios/fast-joins.toml")),
    ("fast-flaky", include_str!("../../scenarios/fast-flaky.toml")),
    ("small-device", include_str!("../../scenarios/small-device.toml")),
    ("lossy-wan", include_str!("../../scenarios/lossy-wan.toml")),
    ("thin-links", include_str!("../../scenarios/thin-links.toml")),
    ("two-models", include_str!("../../scenarios/two-models.toml")),
    ("dishonest", include_str!("../../scenarios/dishonest.toml")),
    ("fresh-only", include_str!("../../scenarios/fresh-only.toml")),
    ("witness", include_str!("../../scenarios/witness.toml")),
    ("quorum-lost", include_str!("../../scenarios/quorum-lost.toml")),
    ("two-lines", include_str!("../../scenarios/two-lines.toml")),
    ("greater-line", include_str!("../../scenarios/greater-line.toml")),
    ("drawn-lines", include_str!("../../scenarios/drawn-lines.toml")),
];

/// Scenarios for scale, which take minutes each: not part of a run over the library.
pub const SCALE: &[(&str, &str)] = &[
    ("mesh-100", include_str!("../../scenarios/scale/mesh-100.toml")),
    ("mesh-1000", include_str!("../../scenarios/scale/mesh-1000.toml")),
    ("members-100", include_str!("../../scenarios/scale/members-100.toml")),
    ("members-1000", include_str!("../../scenarios/scale/members-1000.toml")),
    ("members-10000", include_str!("../../scenarios/scale/members-10000.toml")),
];

/// One of either, by name.
#[must_use]
pub fn text(name: &str) -> Option<&'static str> {
    ALL.iter().chain(SCALE).find(|(n, _)| *n == name).map(|(_, text)| *text)
}

/// The library, parsed.
///
/// # Panics
/// Never: a test parses every scenario of the library.
#[must_use]
pub fn all() -> Vec<Arc<Scenario>> {
    #[expect(clippy::expect_used, reason = "tested below")]
    let read = |text: &str| Arc::new(parse(text).expect("a scenario of the library"));
    ALL.iter().map(|(_, text)| read(text)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scenario_is_right_and_has_its_files_name() {
        for (name, text) in ALL.iter().chain(SCALE) {
            let scenario = parse(text).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(scenario.name, *name);
            assert!(scenario.about.ends_with('.'), "{name}: `about` is a sentence");
        }
        assert!(ALL.len() >= 15);
    }
}
