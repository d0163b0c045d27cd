//! Which nodes a fault or link means.

use std::fmt;

/// A choice of nodes, as a scenario writes it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Select {
    /// `*`: all nodes (in the sides of a split: all that no other side names).
    All,
    /// `servers`, `clients`, `witnesses`.
    Role(RoleSet),
    /// `leader`: who leads the first model when the fault begins.
    Leader,
    /// `followers`: its other servers.
    Followers,
    /// `random-server`, `random-client`, `random-node`: one live node, drawn from the seed.
    Random(RoleSet),
    /// `server-2`: by name.
    Node(String),
    /// `edge-*`: all whose name begins so.
    Prefix(String),
}

/// Nodes by what they do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RoleSet {
    /// Hosts models.
    Servers,
    /// Runs agents.
    Clients,
    /// Votes only.
    Witnesses,
    /// Every node.
    Nodes,
}

impl Select {
    /// From text; any name is accepted here and checked against the scenario's nodes by the reader.
    #[must_use]
    pub fn from_text(s: &str) -> Self {
        match s {
            "*" => Self::All,
            "servers" => Self::Role(RoleSet::Servers),
            "clients" => Self::Role(RoleSet::Clients),
            "witnesses" => Self::Role(RoleSet::Witnesses),
            "leader" => Self::Leader,
            "followers" => Self::Followers,
            "random-server" => Self::Random(RoleSet::Servers),
            "random-client" => Self::Random(RoleSet::Clients),
            "random-witness" => Self::Random(RoleSet::Witnesses),
            "random-node" => Self::Random(RoleSet::Nodes),
            name => match name.strip_suffix('*') {
                Some(prefix) => Self::Prefix(prefix.to_owned()),
                None => Self::Node(name.to_owned()),
            },
        }
    }
}

impl fmt::Display for Select {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("*"),
            Self::Role(RoleSet::Servers) => f.write_str("servers"),
            Self::Role(RoleSet::Clients) => f.write_str("clients"),
            Self::Role(RoleSet::Witnesses) => f.write_str("witnesses"),
            Self::Role(RoleSet::Nodes) => f.write_str("nodes"),
            Self::Leader => f.write_str("leader"),
            Self::Followers => f.write_str("followers"),
            Self::Random(RoleSet::Servers) => f.write_str("random-server"),
            Self::Random(RoleSet::Clients) => f.write_str("random-client"),
            Self::Random(RoleSet::Witnesses) => f.write_str("random-witness"),
            Self::Random(RoleSet::Nodes) => f.write_str("random-node"),
            Self::Node(n) => f.write_str(n),
            Self::Prefix(p) => write!(f, "{p}*"),
        }
    }
}
