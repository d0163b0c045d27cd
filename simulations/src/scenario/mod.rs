//! What is simulated: nodes, network, job and faults, from a TOML file.
//!
//! ```text
//! text ─ parse ─▶ Scenario ─ plan::faults(seed) ─▶ the faults of one run, in the order of their time
//! ```
//!
//! The format is described in `docs/simulation.md`. Every error names the line, the key and what was expected.

pub mod fault;
pub mod library;
pub mod plan;
mod read;
pub mod select;

pub use fault::{Fault, FaultKind, Session};
pub use read::{Problem, parse};
pub use select::Select;

use serde::{Deserialize, Deserializer};
use starling_protocol::record::Role;
use std::collections::BTreeMap;
use std::time::Duration;

/// A checked scenario.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Its name: lower-case words joined by `-`.
    pub name: String,
    /// What it shows, for people.
    pub about: String,
    /// Which part of a node runs.
    pub mode: Mode,
    /// Length of the safety phase: faults happen in it.
    pub duration: Duration,
    /// After it everything is healed, and within this time every live server must have the newest version (I7), a
    /// step must be committed and nothing may wait without a reason.
    pub converge: Duration,
    /// How long a quorum must be lost before its survivors open a new generation; a node's default if not said.
    pub generation_after: Option<Duration>,
    /// Groups of equal nodes, in the order of the file.
    pub nodes: Vec<NodeGroup>,
    /// Device classes by name.
    pub devices: BTreeMap<String, Device>,
    /// How links behave unless a `link` says otherwise.
    pub network: LinkBehaviour,
    /// Exceptions, later ones win.
    pub links: Vec<Link>,
    /// What is trained.
    pub job: Job,
    /// Faults; drawn from the seed when there are none and the file does not forbid it.
    pub faults: Vec<Fault>,
    /// Whether faults are drawn from the seed.
    pub draws_faults: bool,
}

/// Which part of a node runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// All of it above the wire, and agents on the clients.
    #[default]
    Mesh,
    /// Membership and node records only: for very many nodes.
    Membership,
}

/// Equal nodes. The first is called `<role>-1` unless `name` says otherwise.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeGroup {
    /// Its part in the mesh.
    pub role: SimRole,
    /// Name of its nodes before `-1`, `-2`; the role's by default.
    #[serde(default)]
    pub name: Option<String>,
    /// How many.
    #[serde(default = "one")]
    pub count: u32,
    /// Device class; `default` unless named.
    #[serde(default)]
    pub device: Option<String>,
    /// Agents that run at once on a client.
    #[serde(default = "four")]
    pub slots: u32,
    /// They are not there at the start: a `join` fault brings them.
    #[serde(default)]
    pub absent: bool,
}

fn one() -> u32 {
    1
}
fn four() -> u32 {
    4
}

/// Role of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum SimRole {
    /// Hosts models.
    #[serde(rename = "server")]
    Server,
    /// Runs agents.
    #[serde(rename = "client")]
    Client,
    /// Both.
    #[serde(rename = "server,client")]
    Both,
    /// Votes only.
    #[serde(rename = "witness")]
    Witness,
}

impl SimRole {
    /// As the protocol has it.
    #[must_use]
    pub fn roles(self) -> Vec<Role> {
        match self {
            Self::Server => vec![Role::Server],
            Self::Client => vec![Role::Client],
            Self::Both => vec![Role::Server, Role::Client],
            Self::Witness => vec![Role::Witness],
        }
    }
    /// Default name of its nodes.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Server | Self::Both => "server",
            Self::Client => "client",
            Self::Witness => "witness",
        }
    }
    /// Whether it hosts models.
    #[must_use]
    pub fn serves(self) -> bool {
        matches!(self, Self::Server | Self::Both)
    }
    /// Whether it runs agents.
    #[must_use]
    pub fn runs_agents(self) -> bool {
        matches!(self, Self::Client | Self::Both)
    }
}

/// A device class.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// Tokens that all its sequences together get in a second.
    #[serde(default = "default_tokens_per_s")]
    pub tokens_per_s: u32,
    /// One optimizer step.
    #[serde(default = "default_train_ms")]
    pub train_ms: u64,
    /// Memory, GiB.
    #[serde(default = "default_memory")]
    pub memory_gib: u64,
}

fn default_tokens_per_s() -> u32 {
    400
}
fn default_train_ms() -> u64 {
    400
}
fn default_memory() -> u64 {
    16
}

impl Default for Device {
    fn default() -> Self {
        Self { tokens_per_s: default_tokens_per_s(), train_ms: default_train_ms(), memory_gib: default_memory() }
    }
}

/// How a link behaves, per direction.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LinkBehaviour {
    /// One way, drawn evenly between the two, milliseconds.
    pub latency_ms: (f64, f64),
    /// Share of messages lost.
    pub loss: f64,
    /// Share of messages that arrive twice.
    pub duplication: f64,
    /// Share of messages that are late by a further latency, so that later ones overtake them.
    pub reordering: f64,
    /// KiB/s; 0 for no limit.
    pub bandwidth_kib_s: u64,
}

impl Default for LinkBehaviour {
    fn default() -> Self {
        Self { latency_ms: (0.5, 5.0), loss: 0.0, duplication: 0.0, reordering: 0.0, bandwidth_kib_s: 0 }
    }
}

/// Links that differ.
#[derive(Clone, Debug)]
pub struct Link {
    /// Senders.
    pub from: Vec<Select>,
    /// Receivers.
    pub to: Vec<Select>,
    /// How.
    pub behaviour: LinkBehaviour,
}

/// What is trained.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Job {
    /// Models that train at once, each with a job of its own.
    pub models: u32,
    /// Groups in a step.
    pub groups_per_step: u32,
    /// Episodes in a group.
    pub group_size: u32,
    /// Steps to commit before the job ends; by default more than fit.
    pub steps: u64,
    /// η.
    pub staleness_max: u32,
    /// Holders of a rollout.
    pub replication: u8,
    /// Length of a lease.
    pub lease_ttl_s: f64,
    /// Steps between two copies of the optimizer's state; 0 for never.
    pub optimizer_state_every: u64,
    /// Model calls of an episode, drawn evenly.
    pub turns: (u32, u32),
    /// Tokens of an answer, drawn evenly.
    pub tokens: (u32, u32),
    /// Share of episodes whose agent crashes.
    pub agent_crash: f64,
    /// Share of episodes whose agent never ends.
    pub agent_hang: f64,
    /// Share of episodes with a second timeline, as a sub-agent makes one.
    pub agent_fork: f64,
    /// Share of rollouts that a dishonest client forges.
    pub forged: f64,
    /// KiB of weights.
    pub weights_kib: u32,
}

impl Default for Job {
    fn default() -> Self {
        Self {
            models: 1,
            groups_per_step: 4,
            group_size: 4,
            steps: 1_000_000,
            staleness_max: 1,
            replication: 2,
            lease_ttl_s: 10.0,
            optimizer_state_every: 1,
            turns: (1, 3),
            tokens: (4, 24),
            agent_crash: 0.02,
            agent_hang: 0.01,
            agent_fork: 0.1,
            forged: 0.0,
            weights_kib: 16,
        }
    }
}

/// Seconds in a file, as a time.
pub(crate) fn seconds<'de, D: Deserializer<'de>>(d: D) -> Result<Duration, D::Error> {
    let s = f64::deserialize(d)?;
    Duration::try_from_secs_f64(s)
        .ok()
        .filter(|d| *d <= Duration::from_secs(30 * 86_400))
        .ok_or_else(|| serde::de::Error::custom(format!("expected 0 to 2592000 seconds, got {s}")))
}

/// The same where it may be missing.
pub(crate) fn maybe_seconds<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Duration>, D::Error> {
    seconds(d).map(Some)
}

impl Scenario {
    /// Names of all nodes, in order, each with its group's index.
    #[must_use]
    pub fn node_names(&self) -> Vec<(String, usize)> {
        let mut counts: BTreeMap<String, u32> = BTreeMap::new();
        let mut names = Vec::new();
        for (i, group) in self.nodes.iter().enumerate() {
            let stem = group.name.clone().unwrap_or_else(|| group.role.name().to_owned());
            let n = counts.entry(stem.clone()).or_default();
            for _ in 0..group.count {
                *n += 1;
                names.push((format!("{stem}-{n}"), i));
            }
        }
        names
    }
    /// The device class of a group.
    #[must_use]
    pub fn device(&self, group: &NodeGroup) -> Device {
        let name = group.device.as_deref().unwrap_or("default");
        self.devices.get(name).cloned().unwrap_or_default()
    }
}
