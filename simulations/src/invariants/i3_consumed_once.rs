use super::Violation;
use crate::world::World;
use std::collections::BTreeMap;

/// I3: over all committed steps, no rollout id appears twice.
pub(super) fn check(w: &World) -> Result<(), Violation> {
    let mut seen = BTreeMap::new();
    for step in w.committed() {
        for id in &step.consumed {
            if let Some(first) = seen.insert(*id, step.version) {
                return Err(format!("rollout {id} was consumed by versions {first} and {}", step.version));
            }
        }
    }
    Ok(())
}
