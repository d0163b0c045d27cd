use super::Violation;
use crate::world::World;

/// I5: a step trains version `v − 1` on episodes whose oldest token is at most `staleness_max` versions older.
pub(super) fn check(w: &World) -> Result<(), Violation> {
    let bound = u64::from(w.spec().staleness_max);
    for step in w.committed() {
        let trained = step.version.0 - 1;
        for id in &step.consumed {
            let oldest = w.sampled_by(*id).ok_or_else(|| format!("rollout {id} was consumed and never sealed"))?;
            if trained - oldest.0 > bound {
                return Err(format!("version {trained} was trained on a rollout of version {oldest}, bound {bound}"));
            }
        }
    }
    Ok(())
}
