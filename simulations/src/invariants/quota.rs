use super::Violation;
use crate::world::World;

/// Admission: what a leader has leased and accepted never exceeds `(η + 1)·B`, but for the groups that it adopted
/// from its predecessors, which were admitted under their quota.
pub(super) fn check(w: &World) -> Result<(), Violation> {
    let Some(ledger) = w.ledger() else { return Ok(()) };
    let (have, max) = (
        ledger.accepted() + ledger.running(),
        ledger.quota() + ledger.adopted_groups() * u64::from(w.spec().group_size),
    );
    if have > max { Err(format!("{have} episodes accepted and running, at most {max}")) } else { Ok(()) }
}
