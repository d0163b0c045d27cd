use super::Violation;
use crate::world::World;
use std::collections::BTreeMap;

/// I9: an episode id is given to one client only, ever.
pub(super) fn check(w: &World) -> Result<(), Violation> {
    let mut holder = BTreeMap::new();
    for (episode, client) in w.grants() {
        if let Some(first) = holder.insert(*episode, *client)
            && first != *client
        {
            return Err(format!("episode {episode} was leased to {first:?} and to {client:?}"));
        }
    }
    Ok(())
}
