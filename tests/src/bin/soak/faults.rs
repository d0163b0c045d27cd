//! What happens to the mesh: its places, the faults, and how they are drawn.

use rand::RngExt;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;
use std::time::Duration;

pub(crate) const SERVERS: [usize; 3] = [0, 1, 2];
pub(crate) const WITNESS: usize = 3;
const SECOND_CLIENT: usize = 5;
/// They come and go: each time a volunteer leaves its folder is deleted, and who comes next is somebody new.
pub(crate) const VOLUNTEERS: [usize; 2] = [6, 7];
pub(crate) const NODES: usize = 8;
/// A server, the witness and a client are cut and paused, but never killed and never stopped: leaks are looked for in them.
const LONG_LIVED: [usize; 3] = [0, WITNESS, 4];

/// The name of the node at a place.
pub(crate) fn name(place: usize) -> String {
    match place {
        0..=2 => format!("server-{}", place + 1),
        WITNESS => "witness".to_owned(),
        4 | 5 => format!("client-{}", place - 3),
        _ => format!("volunteer-{}", place - 5),
    }
}

/// A fault; nodes by their places.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Fault {
    /// SIGKILL, and started again.
    Kill { nodes: Vec<usize>, away: Duration },
    /// SIGTERM, and started again.
    Stop { node: usize, away: Duration },
    /// SIGSTOP, SIGCONT.
    Pause { node: usize, time: Duration },
    /// The groups reach only themselves.
    Split { groups: Vec<Vec<usize>>, time: Duration },
    /// One node only hears, or only speaks.
    OneWay { node: usize, speaks: bool, time: Duration },
    /// A cable pulled and put back, several times.
    Flap { node: usize, times: u32, period: Duration },
    /// All lose this share of what they send.
    Loss { percent: u32, time: Duration },
    /// A volunteer leaves for good: drained and stopped, or killed.
    Leave { node: usize, drained: bool },
    /// A volunteer comes.
    Join { node: usize },
}

/// What faults are drawn from.
#[derive(Clone, Debug)]
pub(crate) struct Scene {
    /// Links can be cut.
    pub(crate) cuttable: bool,
    pub(crate) leader: Option<usize>,
    /// Nodes that run.
    pub(crate) up: Vec<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    KillOne,
    /// Two servers: no quorum until they are back.
    KillServers,
    KillServerAndClient,
    Stop,
    Pause,
    Volunteer,
    LeaderAlone,
    OneWay,
    Halves,
    Bridge,
    Flap,
    Loss,
}

/// How often each kind is drawn, and whether it cuts links.
const KINDS: [(Kind, u32, bool); 12] = [
    (Kind::KillOne, 16, false),
    (Kind::KillServers, 6, false),
    (Kind::KillServerAndClient, 4, false),
    (Kind::Stop, 10, false),
    (Kind::Pause, 8, false),
    (Kind::Volunteer, 20, false),
    (Kind::LeaderAlone, 9, true),
    (Kind::OneWay, 7, true),
    (Kind::Halves, 7, true),
    (Kind::Bridge, 5, true),
    (Kind::Flap, 5, true),
    (Kind::Loss, 4, true),
];

impl Fault {
    /// Draws one. Without cuts the other kinds keep their shares.
    pub(crate) fn draw(rng: &mut ChaCha8Rng, scene: &Scene) -> Self {
        let kinds: Vec<_> = KINDS.iter().filter(|(_, _, cuts)| scene.cuttable || !cuts).collect();
        let kind = kinds.choose_weighted(rng, |k| k.1).map_or(Kind::KillOne, |k| k.0);
        let leader = scene.leader.unwrap_or(SERVERS[0]);
        let time = seconds(rng, 8, 40);
        let away = seconds(rng, 0, 20);
        match kind {
            Kind::KillOne => Self::Kill { nodes: vec![victim(rng, scene)], away },
            Kind::KillServers => Self::Kill { nodes: vec![SERVERS[1], SERVERS[2]], away },
            Kind::KillServerAndClient => Self::Kill { nodes: vec![SERVERS[1], SECOND_CLIENT], away },
            Kind::Stop => Self::Stop { node: victim(rng, scene), away },
            Kind::Pause => Self::Pause { node: any(rng, scene), time: seconds(rng, 2, 20) },
            Kind::Volunteer => {
                let node = *VOLUNTEERS.choose(rng).unwrap_or(&VOLUNTEERS[0]);
                let drained = rng.random_bool(0.6);
                if scene.up.contains(&node) { Self::Leave { node, drained } } else { Self::Join { node } }
            }
            Kind::LeaderAlone => {
                let others = scene.up.iter().copied().filter(|i| *i != leader).collect();
                Self::Split { groups: vec![vec![leader], others], time }
            }
            Kind::OneWay => {
                let node = if rng.random_bool(0.6) { leader } else { any(rng, scene) };
                Self::OneWay { node, speaks: rng.random_bool(0.5), time }
            }
            Kind::Halves => Self::Split { groups: halves(rng, scene, None), time },
            Kind::Bridge => {
                let middle = SERVERS.choose(rng).copied();
                Self::Split { groups: halves(rng, scene, middle), time }
            }
            Kind::Flap => {
                Self::Flap { node: any(rng, scene), times: rng.random_range(3..=8), period: seconds(rng, 1, 5) }
            }
            Kind::Loss => Self::Loss { percent: rng.random_range(5..=25), time },
        }
    }

    /// A node that is cut off from all others.
    pub(crate) fn alone(&self) -> Option<usize> {
        let Self::Split { groups, .. } = self else { return None };
        let single = groups.iter().find(|g| g.len() == 1)?[0];
        (groups.iter().filter(|g| g.contains(&single)).count() == 1).then_some(single)
    }
}

/// Everyone on one of two sides; `middle` on both.
fn halves(rng: &mut ChaCha8Rng, scene: &Scene, middle: Option<usize>) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = vec![middle.into_iter().collect(), middle.into_iter().collect()];
    for i in scene.up.iter().filter(|i| Some(**i) != middle) {
        groups[rng.random_range(0..2)].push(*i);
    }
    groups
}

/// A node that may be killed: the leader more often than by chance.
fn victim(rng: &mut ChaCha8Rng, scene: &Scene) -> usize {
    let killable: Vec<usize> = scene.up.iter().copied().filter(|i| !LONG_LIVED.contains(i)).collect();
    match scene.leader {
        Some(leader) if killable.contains(&leader) && rng.random_bool(0.4) => leader,
        _ => killable.choose(rng).copied().unwrap_or(SERVERS[1]),
    }
}

fn any(rng: &mut ChaCha8Rng, scene: &Scene) -> usize {
    scene.up.choose(rng).copied().unwrap_or(SERVERS[0])
}

fn seconds(rng: &mut ChaCha8Rng, from: u64, to: u64) -> Duration {
    Duration::from_millis(rng.random_range(from * 1000..=to * 1000))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    fn drawn(seed: u64, scene: &Scene) -> Vec<Fault> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        (0..400).map(|_| Fault::draw(&mut rng, scene)).collect()
    }

    fn scene(cuttable: bool) -> Scene {
        Scene { cuttable, leader: Some(1), up: (0..NODES - 1).collect() }
    }

    #[test]
    fn the_same_seed_draws_the_same_faults() {
        assert_eq!(drawn(7, &scene(true)), drawn(7, &scene(true)));
        assert_ne!(drawn(7, &scene(true)), drawn(8, &scene(true)));
    }

    #[test]
    fn every_kind_is_drawn_and_long_lived_processes_are_spared() {
        let faults = drawn(1, &scene(true));
        let mut kinds: Vec<_> = faults.iter().map(std::mem::discriminant).collect();
        kinds.dedup();
        kinds.sort_by_key(|k| format!("{k:?}"));
        kinds.dedup();
        assert_eq!(kinds.len(), 9, "all kinds of faults: {faults:?}");
        for fault in &faults {
            let ended = match fault {
                Fault::Kill { nodes, .. } => nodes.clone(),
                Fault::Stop { node, .. } | Fault::Leave { node, .. } => vec![*node],
                _ => vec![],
            };
            assert!(!ended.iter().any(|i| LONG_LIVED.contains(i)), "{fault:?}");
        }
        assert!(faults.contains(&Fault::Join { node: NODES - 1 }), "a volunteer that is not there joins");
    }

    #[test]
    fn nothing_is_cut_where_nothing_can_be() {
        let cuts = |f: &Fault| {
            matches!(f, Fault::Split { .. } | Fault::OneWay { .. } | Fault::Flap { .. } | Fault::Loss { .. })
        };
        assert!(!drawn(1, &scene(false)).iter().any(cuts));
        assert!(drawn(1, &scene(true)).iter().any(cuts));
    }

    #[test]
    fn who_reaches_a_second_group_is_not_alone() {
        let split = |groups: &[&[usize]]| Fault::Split {
            groups: groups.iter().map(|g| g.to_vec()).collect(),
            time: Duration::ZERO,
        };
        assert_eq!(split(&[&[1], &[0, 2, 3]]).alone(), Some(1));
        assert_eq!(split(&[&[1], &[1, 0, 2, 3]]).alone(), None);
        assert_eq!(split(&[&[0, 1], &[2, 3]]).alone(), None);
    }
}
