//! Faults at work: which nodes they mean, what they cut, and how they end.

use super::node::SimNode;
use crate::event::NodeIx;
use crate::scenario::select::RoleSet;
use crate::scenario::{Select, Session};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use starling_core::memory_network::MemoryNetwork;
use starling_protocol::ModelName;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Cut links. Faults overlap: a link is whole again when the last fault that cuts it is over.
#[derive(Debug, Default)]
pub(crate) struct Cuts {
    links: BTreeMap<(NodeIx, NodeIx), u32>,
    /// Splits that last, by the network's number.
    splits: BTreeMap<u64, Vec<Vec<NodeIx>>>,
}

/// What one fault cuts.
#[derive(Clone, Debug)]
pub(crate) enum CutSet {
    /// Both directions of every link between different sides: of ten thousand nodes, fifty million.
    Between(Vec<Vec<NodeIx>>),
    /// These links, each in one direction.
    Links(BTreeSet<(NodeIx, NodeIx)>),
}

/// What has been cut, so that it can be healed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    Split(u64),
    Links,
}

impl Cuts {
    pub(crate) fn cut(&mut self, set: &CutSet, nodes: &[SimNode], network: &MemoryNetwork) -> Cut {
        match set {
            CutSet::Between(sides) => {
                let ids = |side: &Vec<NodeIx>| side.iter().map(|n| nodes[n.0 as usize].id).collect();
                let split = network.begin_partition(&sides.iter().map(ids).collect::<Vec<_>>());
                self.splits.insert(split, sides.clone());
                Cut::Split(split)
            }
            CutSet::Links(links) => {
                for &(from, to) in links {
                    let count = self.links.entry((from, to)).or_default();
                    *count += 1;
                    if *count == 1 {
                        network.cut_one_way(nodes[from.0 as usize].id, nodes[to.0 as usize].id);
                    }
                }
                Cut::Links
            }
        }
    }
    pub(crate) fn heal(&mut self, cut: Cut, set: &CutSet, nodes: &[SimNode], network: &MemoryNetwork) {
        let links = match (cut, set) {
            (Cut::Split(split), _) => {
                self.splits.remove(&split);
                return network.end_partition(split);
            }
            (Cut::Links, CutSet::Between(_)) => return,
            (Cut::Links, CutSet::Links(links)) => links,
        };
        for &(from, to) in links {
            let Some(count) = self.links.get_mut(&(from, to)) else { continue };
            *count -= 1;
            if *count == 0 {
                self.links.remove(&(from, to));
                network.heal_one_way(nodes[from.0 as usize].id, nodes[to.0 as usize].id);
            }
        }
    }
    /// What is cut now stays cut for a node that has got another identity.
    pub(crate) fn follow(&self, node: NodeIx, nodes: &[SimNode], network: &MemoryNetwork) {
        for &(from, to) in self.links.keys().filter(|(from, to)| *from == node || *to == node) {
            network.cut_one_way(nodes[from.0 as usize].id, nodes[to.0 as usize].id);
        }
        for (split, sides) in &self.splits {
            if let Some(side) = sides.iter().position(|s| s.contains(&node)) {
                network.join_side(*split, side, nodes[node.0 as usize].id);
            }
        }
    }
    pub(crate) fn heal_all(&mut self, network: &MemoryNetwork) {
        *self = Self::default();
        network.heal_all();
    }
}

/// Every link from one of these to one of those.
pub(crate) fn one_way(from: &[NodeIx], to: &[NodeIx]) -> CutSet {
    CutSet::Links(from.iter().flat_map(|a| to.iter().filter(move |b| *b != a).map(move |b| (*a, *b))).collect())
}

/// Both directions of every link that ends at one of these, those among them included.
pub(crate) fn isolated(nodes: &[NodeIx], count: usize) -> CutSet {
    let mut set = BTreeSet::new();
    for &node in nodes {
        for i in 0..count {
            let other = NodeIx(u32::try_from(i).unwrap_or(u32::MAX));
            if other != node {
                set.insert((node, other));
                set.insert((other, node));
            }
        }
    }
    CutSet::Links(set)
}

/// Nodes dealt into `count` islands of about equal size.
pub(crate) fn islands(count: u32, nodes: usize, rng: &mut ChaCha8Rng) -> Vec<Vec<NodeIx>> {
    let mut order: Vec<u32> = (0..u32::try_from(nodes).unwrap_or(u32::MAX)).collect();
    shuffle(&mut order, rng);
    let mut islands = vec![Vec::new(); count as usize];
    for (i, node) in order.into_iter().enumerate() {
        islands[i % count as usize].push(NodeIx(node));
    }
    islands
}

fn shuffle<T>(list: &mut [T], rng: &mut ChaCha8Rng) {
    for i in (1..list.len()).rev() {
        list.swap(i, rng.random_range(0..=i));
    }
}

/// Who leads `model`, as the leader itself says.
pub(crate) fn leader(nodes: &[SimNode], model: &ModelName) -> Option<NodeIx> {
    let leads = |n: &&SimNode| {
        let view = n.core().and_then(|c| c.groups().leadership(model));
        view.is_some_and(|v| v.get().is_self)
    };
    nodes.iter().find(leads).map(|n| n.ix)
}

/// The nodes that `selects` mean now. `taken` are those that other sides have already: `*` means the rest.
pub(crate) fn resolve(
    selects: &[Select],
    taken: &BTreeSet<NodeIx>,
    nodes: &[SimNode],
    model: &ModelName,
    rng: &mut ChaCha8Rng,
) -> Vec<NodeIx> {
    let mut chosen = BTreeSet::new();
    for select in selects {
        let of = |want: &dyn Fn(&SimNode) -> bool| nodes.iter().filter(|n| want(n)).map(|n| n.ix).collect::<Vec<_>>();
        let found = match select {
            Select::All => of(&|_| true),
            Select::Role(set) => of(&|n| is_of(n, *set)),
            Select::Node(name) => of(&|n| n.name == *name),
            Select::Prefix(prefix) => of(&|n| n.name.starts_with(prefix.as_str())),
            // Without a leader any server will do: the fault must hit something that matters.
            Select::Leader => match leader(nodes, model) {
                Some(l) => vec![l],
                None => one_of(&of(&|n| n.is_up() && n.group.role.serves()), rng),
            },
            Select::Followers => {
                let l = leader(nodes, model);
                of(&|n| n.group.role.serves() && Some(n.ix) != l)
            }
            Select::Random(set) => one_of(&of(&|n| n.is_up() && is_of(n, *set) && !taken.contains(&n.ix)), rng),
        };
        chosen.extend(found.into_iter().filter(|n| !taken.contains(n)));
    }
    chosen.into_iter().collect()
}

fn one_of(list: &[NodeIx], rng: &mut ChaCha8Rng) -> Vec<NodeIx> {
    if list.is_empty() { Vec::new() } else { vec![list[rng.random_range(0..list.len())]] }
}

fn is_of(node: &SimNode, set: RoleSet) -> bool {
    let role = node.group.role;
    match set {
        RoleSet::Servers => role.serves(),
        RoleSet::Clients => role.runs_agents(),
        RoleSet::Witnesses => role == crate::scenario::SimRole::Witness,
        RoleSet::Nodes => true,
    }
}

/// The sides of a split, each with what the ones before it left.
pub(crate) fn sides(
    selects: &[Vec<Select>],
    except: Option<NodeIx>,
    nodes: &[SimNode],
    model: &ModelName,
    rng: &mut ChaCha8Rng,
) -> Vec<Vec<NodeIx>> {
    let mut taken: BTreeSet<NodeIx> = except.into_iter().collect();
    // `*` is the rest whatever its place: named sides first.
    let mut order: Vec<usize> = (0..selects.len()).collect();
    order.sort_by_key(|i| selects[*i].contains(&Select::All));
    let mut sides = vec![Vec::new(); selects.len()];
    for i in order {
        sides[i] = resolve(&selects[i], &taken, nodes, model, rng);
        taken.extend(sides[i].iter().copied());
    }
    sides
}

/// A share of `nodes`, rounded up, drawn from the seed.
pub(crate) fn share_of(mut nodes: Vec<NodeIx>, share: f64, rng: &mut ChaCha8Rng) -> Vec<NodeIx> {
    shuffle(&mut nodes, rng);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a node count"
    )]
    let keep = (nodes.len() as f64 * share).ceil() as usize;
    nodes.truncate(keep);
    nodes.sort_unstable();
    nodes
}

/// Length of one session with the given mean.
pub(crate) fn session(kind: Session, mean: Duration, rng: &mut ChaCha8Rng) -> Duration {
    let u: f64 = rng.random_range(1e-9..1.0);
    let relative = match kind {
        Session::Exponential => -u.ln(),
        // Shape 0.5: the mean is scale · Γ(1 + 1/0.5) = 2 · scale.
        Session::Weibull => u.ln().powi(2) / 2.0,
        // Shape 1.5: the mean is 3 · scale. Cut at 100 means, where one in 5000 sessions would end.
        Session::Pareto => (u.powf(-1.0 / 1.5) / 3.0).min(100.0),
    };
    mean.mul_f64(relative.max(1e-3))
}
