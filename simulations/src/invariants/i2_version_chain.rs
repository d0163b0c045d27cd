use super::Violation;
use crate::world::World;

/// I2: each committed version follows the one before it, and terms never fall along the chain.
pub(super) fn check(w: &World) -> Result<(), Violation> {
    for pair in w.committed().windows(2) {
        if pair[1].version != pair[0].version.next() || pair[1].term < pair[0].term {
            return Err(format!(
                "version {} of term {} follows version {} of term {}",
                pair[1].version, pair[1].term, pair[0].version, pair[0].term
            ));
        }
    }
    Ok(())
}
