//! One property a file, by its number in `ARCHITECTURE.md`.

mod i2_version_chain;
mod i3_consumed_once;
mod i5_staleness;
mod i9_one_lease;
mod quota;

use crate::world::World;

/// What a checker found: the property and the states that conflict.
pub type Violation = String;

/// Looks at the world after an event.
pub type Checker = fn(&World) -> Result<(), Violation>;

/// Every checker, with its name.
pub const ALL: [(&str, Checker); 5] = [
    ("I2 committed versions form one chain", i2_version_chain::check),
    ("I3 no rollout is consumed twice", i3_consumed_once::check),
    ("I5 consumed episodes are within the staleness bound", i5_staleness::check),
    ("I9 an episode is held by one lease", i9_one_lease::check),
    ("admission quota", quota::check),
];
