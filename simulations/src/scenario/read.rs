//! From text to a [`Scenario`], with the line and key of whatever is wrong.

use super::fault::{Fault, FaultKind, Session};
use super::select::Select;
use super::{Device, Job, Link, LinkBehaviour, Mode, NodeGroup, Scenario, maybe_seconds, seconds};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;
use toml::Spanned;

/// Most nodes of a scenario: what one machine simulates in membership mode.
const NODES_MAX: u32 = 20_000;

/// What is wrong with a scenario file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Line, from 1.
    pub line: usize,
    /// Which key, as far as it is known.
    pub key: String,
    /// What was expected and what came.
    pub what: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: ", self.line)?;
        if !self.key.is_empty() {
            write!(f, "`{}`: ", self.key)?;
        }
        f.write_str(&self.what)
    }
}

impl std::error::Error for Problem {}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    name: Spanned<String>,
    about: String,
    #[serde(default)]
    mode: Mode,
    #[serde(deserialize_with = "seconds", default = "a_minute")]
    duration_s: Duration,
    #[serde(deserialize_with = "seconds", default = "a_minute")]
    converge_s: Duration,
    #[serde(default, deserialize_with = "maybe_seconds")]
    generation_after_s: Option<Duration>,
    #[serde(rename = "node")]
    nodes: Vec<Spanned<NodeGroup>>,
    #[serde(default)]
    device: BTreeMap<String, Spanned<Device>>,
    #[serde(default)]
    network: Option<Spanned<LinkBehaviour>>,
    #[serde(default, rename = "link")]
    links: Vec<Spanned<RawLink>>,
    #[serde(default)]
    job: Option<Spanned<Job>>,
    #[serde(default, rename = "fault")]
    faults: Vec<Spanned<RawFault>>,
    /// Whether faults come from the seed too; by default if the file has none.
    #[serde(default)]
    drawn_faults: Option<bool>,
}

fn a_minute() -> Duration {
    Duration::from_secs(60)
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl OneOrMany {
    fn selects(&self) -> Vec<Select> {
        match self {
            Self::One(s) => vec![Select::from_text(s)],
            Self::Many(list) => list.iter().map(|s| Select::from_text(s)).collect(),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawLink {
    from: OneOrMany,
    to: OneOrMany,
    #[serde(default)]
    latency_ms: Option<(f64, f64)>,
    #[serde(default)]
    loss: Option<f64>,
    #[serde(default)]
    duplication: Option<f64>,
    #[serde(default)]
    reordering: Option<f64>,
    #[serde(default)]
    bandwidth_kib_s: Option<u64>,
}

/// Every key that some kind of fault has; which ones a kind takes is checked by [`Reader::check_keys`].
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawFault {
    kind: String,
    #[serde(deserialize_with = "seconds")]
    at_s: Duration,
    #[serde(default, deserialize_with = "maybe_seconds")]
    for_s: Option<Duration>,
    #[serde(default)]
    nodes: Option<OneOrMany>,
    #[serde(default)]
    node: Option<String>,
    #[serde(default)]
    sides: Option<Vec<OneOrMany>>,
    #[serde(default)]
    from: Option<OneOrMany>,
    #[serde(default)]
    to: Option<OneOrMany>,
    #[serde(default)]
    count: Option<u32>,
    #[serde(default, deserialize_with = "maybe_seconds")]
    period_s: Option<Duration>,
    #[serde(default)]
    share: Option<f64>,
    #[serde(default)]
    session: Option<String>,
    #[serde(default, deserialize_with = "maybe_seconds")]
    mean_s: Option<Duration>,
    #[serde(default, deserialize_with = "maybe_seconds")]
    away_s: Option<Duration>,
    #[serde(default)]
    power_loss: Option<bool>,
    #[serde(default)]
    disk_lost: Option<bool>,
    #[serde(default)]
    key_kept: Option<bool>,
    #[serde(default)]
    loss: Option<f64>,
    #[serde(default)]
    latency_ms: Option<f64>,
    #[serde(default)]
    bandwidth_kib_s: Option<u64>,
    #[serde(default)]
    delay_ms: Option<f64>,
    #[serde(default)]
    values: Option<u32>,
    #[serde(default)]
    by_s: Option<f64>,
    #[serde(default)]
    rate: Option<f64>,
    #[serde(default)]
    factor: Option<f64>,
}

/// Reads and checks a scenario.
///
/// # Errors
/// [`Problem`] for the first thing that is wrong.
pub fn parse(text: &str) -> Result<Scenario, Problem> {
    let raw: Raw = toml::from_str(text).map_err(|e| from_toml(text, &e))?;
    Reader { text }.scenario(raw)
}

fn line_of(text: &str, offset: usize) -> usize {
    text.as_bytes().iter().take(offset).filter(|b| **b == b'\n').count() + 1
}

fn from_toml(text: &str, e: &toml::de::Error) -> Problem {
    let line = e.span().map_or(1, |s| line_of(text, s.start));
    let key = e.message().split('`').nth(1).filter(|_| e.message().starts_with("unknown field"));
    Problem { line, key: key.unwrap_or_default().to_owned(), what: e.message().to_owned() }
}

struct Reader<'a> {
    text: &'a str,
}

impl Reader<'_> {
    fn problem<T>(&self, at: usize, key: &str, what: impl Into<String>) -> Result<T, Problem> {
        // The key's own line, where the table that starts at `at` has it.
        let rest = &self.text[at.min(self.text.len())..];
        let own = rest
            .lines()
            .enumerate()
            .take_while(|(i, l)| *i == 0 || !l.trim_start().starts_with("[["))
            .position(|(_, l)| l.trim_start().strip_prefix(key).is_some_and(|r| r.trim_start().starts_with('=')));
        Err(Problem { line: line_of(self.text, at) + own.unwrap_or(0), key: key.to_owned(), what: what.into() })
    }

    fn share(&self, at: usize, key: &str, value: f64) -> Result<f64, Problem> {
        if (0.0..=1.0).contains(&value) {
            Ok(value)
        } else {
            self.problem(at, key, format!("expected a share from 0 to 1, got {value}"))
        }
    }

    fn behaviour(&self, at: usize, b: &LinkBehaviour) -> Result<(), Problem> {
        let (low, high) = b.latency_ms;
        if !(low >= 0.0 && low <= high && high <= 60_000.0) {
            return self.problem(
                at,
                "latency_ms",
                format!("expected [low, high] in milliseconds, 0 <= low <= high <= 60000, got [{low}, {high}]"),
            );
        }
        self.share(at, "loss", b.loss)?;
        self.share(at, "duplication", b.duplication)?;
        self.share(at, "reordering", b.reordering)?;
        Ok(())
    }

    fn scenario(&self, raw: Raw) -> Result<Scenario, Problem> {
        let at = raw.name.span().start;
        let name = raw.name.into_inner();
        if name.is_empty() || !name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-') {
            return self.problem(at, "name", format!("expected lower-case words joined by `-`, got {name:?}"));
        }
        let mut devices = BTreeMap::new();
        for (name, device) in raw.device {
            let at = device.span().start;
            let device = device.into_inner();
            if device.tokens_per_s == 0 {
                return self.problem(at, "tokens_per_s", "expected at least 1, got 0");
            }
            devices.insert(name, device);
        }
        let nodes = self.nodes(&raw.nodes, &devices)?;
        let network = match raw.network {
            Some(n) => {
                self.behaviour(n.span().start, n.get_ref())?;
                n.into_inner()
            }
            None => LinkBehaviour::default(),
        };
        let job = match raw.job {
            Some(j) => {
                self.job(j.span().start, j.get_ref())?;
                j.into_inner()
            }
            None => Job::default(),
        };
        let mut scenario = Scenario {
            name,
            about: raw.about,
            mode: raw.mode,
            duration: raw.duration_s,
            converge: raw.converge_s,
            generation_after: raw.generation_after_s,
            nodes,
            devices,
            network,
            links: Vec::new(),
            job,
            draws_faults: raw.drawn_faults.unwrap_or(raw.faults.is_empty()),
            faults: Vec::new(),
        };
        let names: BTreeSet<String> = scenario.node_names().into_iter().map(|(n, _)| n).collect();
        for link in raw.links {
            let at = link.span().start;
            scenario.links.push(self.link(at, link.into_inner(), &scenario.network, &names)?);
        }
        for fault in raw.faults {
            let at = fault.span().start;
            let fault = self.fault(at, fault.into_inner(), &names, scenario.duration)?;
            scenario.faults.push(fault);
        }
        scenario.faults.sort_by_key(|f| f.at);
        Ok(scenario)
    }

    fn nodes(
        &self,
        groups: &[Spanned<NodeGroup>],
        devices: &BTreeMap<String, Device>,
    ) -> Result<Vec<NodeGroup>, Problem> {
        let mut total = 0_u32;
        for group in groups {
            let (at, g) = (group.span().start, group.get_ref());
            if g.count == 0 {
                return self.problem(at, "count", "expected at least 1, got 0");
            }
            total = total.saturating_add(g.count);
            if total > NODES_MAX {
                return self.problem(at, "count", format!("expected at most {NODES_MAX} nodes in all, got {total}"));
            }
            if let Some(d) = &g.device
                && !devices.contains_key(d)
            {
                let known: Vec<&str> = devices.keys().map(String::as_str).collect();
                return self.problem(
                    at,
                    "device",
                    format!("expected one of {known:?} (a table [device.NAME]), got {d:?}"),
                );
            }
            if g.slots == 0 && g.role.runs_agents() {
                return self.problem(at, "slots", "expected at least 1, got 0");
            }
        }
        if !groups.iter().any(|g| g.get_ref().role.serves() && !g.get_ref().absent) {
            let at = groups.first().map_or(0, |g| g.span().start);
            return self.problem(at, "role", "expected at least one server that is there from the start");
        }
        Ok(groups.iter().map(|g| g.get_ref().clone()).collect())
    }

    fn job(&self, at: usize, j: &Job) -> Result<(), Problem> {
        let range = |key: &str, ok: bool, expected: &str, got: String| {
            if ok { Ok(()) } else { self.problem(at, key, format!("expected {expected}, got {got}")) }
        };
        range("models", (1..=16).contains(&j.models), "1 to 16", j.models.to_string())?;
        range("groups_per_step", (1..=4096).contains(&j.groups_per_step), "1 to 4096", j.groups_per_step.to_string())?;
        range("group_size", (2..=256).contains(&j.group_size), "2 to 256", j.group_size.to_string())?;
        range("steps", (1..=1_000_000).contains(&j.steps), "1 to 1000000", j.steps.to_string())?;
        range("staleness_max", j.staleness_max <= 4, "0 to 4", j.staleness_max.to_string())?;
        range("replication", (1..=16).contains(&j.replication), "1 to 16", j.replication.to_string())?;
        range("lease_ttl_s", (1.0..=86_400.0).contains(&j.lease_ttl_s), "1 to 86400", j.lease_ttl_s.to_string())?;
        let ordered = |(a, b): (u32, u32), max| a >= 1 && a <= b && b <= max;
        range("turns", ordered(j.turns, 32), "[low, high] from 1 to 32", format!("{:?}", j.turns))?;
        range("tokens", ordered(j.tokens, 1024), "[low, high] from 1 to 1024", format!("{:?}", j.tokens))?;
        range("weights_kib", (1..=65_536).contains(&j.weights_kib), "1 to 65536", j.weights_kib.to_string())?;
        self.share(at, "agent_crash", j.agent_crash)?;
        self.share(at, "agent_hang", j.agent_hang)?;
        self.share(at, "agent_fork", j.agent_fork)?;
        self.share(at, "forged", j.forged)?;
        Ok(())
    }

    fn selects(
        &self,
        at: usize,
        key: &str,
        list: &OneOrMany,
        names: &BTreeSet<String>,
    ) -> Result<Vec<Select>, Problem> {
        let selects = list.selects();
        if selects.is_empty() {
            return self.problem(at, key, "expected at least one node");
        }
        for select in &selects {
            let known = match select {
                Select::Node(name) => names.contains(name),
                Select::Prefix(p) => names.iter().any(|n| n.starts_with(p)),
                _ => true,
            };
            if !known {
                let some: Vec<&String> = names.iter().take(8).collect();
                return self.problem(
                    at,
                    key,
                    format!(
                        "expected a node of the scenario (such as {some:?}), a prefix with `*`, `servers`, `clients`, \
                         `witnesses`, `leader`, `followers`, `random-server`, `random-client`, `random-node` or `*`, \
                         got {:?}",
                        select.to_string()
                    ),
                );
            }
        }
        Ok(selects)
    }

    fn link(&self, at: usize, raw: RawLink, base: &LinkBehaviour, names: &BTreeSet<String>) -> Result<Link, Problem> {
        let behaviour = LinkBehaviour {
            latency_ms: raw.latency_ms.unwrap_or(base.latency_ms),
            loss: raw.loss.unwrap_or(base.loss),
            duplication: raw.duplication.unwrap_or(base.duplication),
            reordering: raw.reordering.unwrap_or(base.reordering),
            bandwidth_kib_s: raw.bandwidth_kib_s.unwrap_or(base.bandwidth_kib_s),
        };
        self.behaviour(at, &behaviour)?;
        let from = self.selects(at, "from", &raw.from, names)?;
        let to = self.selects(at, "to", &raw.to, names)?;
        if from.iter().chain(&to).any(|s| matches!(s, Select::Leader | Select::Followers | Select::Random(_))) {
            return self.problem(at, "from", "expected names or roles: a link does not move with the leader");
        }
        Ok(Link { from, to, behaviour })
    }

    fn sides(
        &self,
        at: usize,
        raw: Option<&Vec<OneOrMany>>,
        exactly: Option<usize>,
        names: &BTreeSet<String>,
    ) -> Result<Vec<Vec<Select>>, Problem> {
        let Some(raw) = raw else { return self.problem(at, "sides", "expected a list of sides, got nothing") };
        let fits = exactly.map_or(raw.len() >= 2, |n| raw.len() == n);
        if !fits {
            let expected = exactly.map_or("at least 2 sides".to_owned(), |n| format!("exactly {n} sides"));
            return self.problem(at, "sides", format!("expected {expected}, got {}", raw.len()));
        }
        let sides: Vec<Vec<Select>> =
            raw.iter().map(|s| self.selects(at, "sides", s, names)).collect::<Result<_, _>>()?;
        let mut seen = BTreeSet::new();
        for select in sides.iter().flatten() {
            if !seen.insert(select) {
                return self.problem(at, "sides", format!("impossible: {:?} is on two sides", select.to_string()));
            }
        }
        Ok(sides)
    }

    fn fault(&self, at: usize, raw: RawFault, names: &BTreeSet<String>, end: Duration) -> Result<Fault, Problem> {
        if raw.at_s >= end {
            let (got, max) = (raw.at_s.as_secs_f64(), end.as_secs_f64());
            return self.problem(
                at,
                "at_s",
                format!("expected a time before the end of the safety phase, {max} s, got {got}"),
            );
        }
        self.check_keys(at, &raw)?;
        let nodes = |key: &str| match (&raw.nodes, &raw.node) {
            (Some(list), _) => self.selects(at, key, list, names),
            (None, _) => self.problem(at, key, "expected at least one node, got nothing"),
        };
        let need = |key: &str, value: Option<f64>, ok: &dyn Fn(f64) -> bool, expected: &str| match value {
            Some(v) if ok(v) => Ok(v),
            Some(v) => self.problem(at, key, format!("expected {expected}, got {v}")),
            None => self.problem(at, key, format!("expected {expected}, got nothing")),
        };
        let positive = |v: f64| v > 0.0 && v.is_finite();
        let time = |key: &str, value: Option<Duration>| match value {
            Some(d) if !d.is_zero() => Ok(d),
            _ => self.problem(at, key, "expected a number of seconds above 0"),
        };
        let millis = |ms: f64| Duration::from_secs_f64(ms / 1000.0);
        let kind = match raw.kind.as_str() {
            "split" => FaultKind::Split { sides: self.sides(at, raw.sides.as_ref(), None, names)? },
            "islands" => match raw.count {
                Some(count) if count >= 2 && count as usize <= names.len() => FaultKind::Islands { count },
                got => {
                    let n = names.len();
                    return self.problem(
                        at,
                        "count",
                        format!("expected 2 to {n} islands, one node each at least, got {got:?}"),
                    );
                }
            },
            "one_way" => match (&raw.from, &raw.to) {
                (Some(from), Some(to)) => FaultKind::OneWay {
                    from: self.selects(at, "from", from, names)?,
                    to: self.selects(at, "to", to, names)?,
                },
                (None, _) => return self.problem(at, "from", "expected senders, got nothing"),
                (_, None) => return self.problem(at, "to", "expected receivers, got nothing"),
            },
            "bridge" => {
                let Some(node) = &raw.node else {
                    return self.problem(at, "node", "expected the node that reaches both sides, got nothing");
                };
                let node = self.selects(at, "node", &OneOrMany::One(node.clone()), names)?.remove(0);
                FaultKind::Bridge { node, sides: self.sides(at, raw.sides.as_ref(), Some(2), names)? }
            }
            "flapping" => FaultKind::Flapping {
                sides: self.sides(at, raw.sides.as_ref(), None, names)?,
                period: time("period_s", raw.period_s)?,
            },
            "isolate" => FaultKind::Isolate { nodes: nodes("nodes")? },
            "degrade" => FaultKind::Degrade {
                nodes: nodes("nodes")?,
                loss: self.share(at, "loss", raw.loss.unwrap_or(0.0))?,
                latency: millis(need(
                    "latency_ms",
                    raw.latency_ms.or(Some(0.0)),
                    &|v| (0.0..=60_000.0).contains(&v),
                    "0 to 60000",
                )?),
                bandwidth_kib_s: raw.bandwidth_kib_s.unwrap_or(0),
            },
            "crash" => FaultKind::Crash {
                nodes: nodes("nodes")?,
                power_loss: raw.power_loss.unwrap_or(false),
                disk_lost: raw.disk_lost.unwrap_or(false),
                key_kept: raw.key_kept.unwrap_or(false),
                away: raw.away_s,
            },
            "churn" => FaultKind::Churn {
                nodes: nodes("nodes")?,
                session: match raw.session.as_deref() {
                    None | Some("exponential") => Session::Exponential,
                    Some("weibull") => Session::Weibull,
                    Some("pareto") => Session::Pareto,
                    Some(other) => {
                        return self.problem(
                            at,
                            "session",
                            format!("expected \"exponential\", \"weibull\" or \"pareto\", got {other:?}"),
                        );
                    }
                },
                mean: time("mean_s", raw.mean_s)?,
                away: time("away_s", raw.away_s)?,
            },
            "mass_leave" => FaultKind::MassLeave {
                nodes: nodes("nodes")?,
                share: need("share", raw.share, &|v| v > 0.0 && v <= 1.0, "a share above 0, at most 1")?,
                away: raw.away_s,
            },
            "join" => FaultKind::Join { nodes: nodes("nodes")? },
            "disk_slow" => FaultKind::DiskSlow {
                nodes: nodes("nodes")?,
                delay: millis(need("delay_ms", raw.delay_ms, &|v| v > 0.0 && v <= 60_000.0, "above 0, at most 60000")?),
            },
            "disk_full" => FaultKind::DiskFull { nodes: nodes("nodes")? },
            "disk_fails" => FaultKind::DiskFails { nodes: nodes("nodes")? },
            "disk_corrupt" => FaultKind::DiskCorrupt { nodes: nodes("nodes")?, values: raw.values.unwrap_or(1).max(1) },
            "clock_jump" => {
                let by =
                    need("by_s", raw.by_s, &|v| v != 0.0 && v.abs() <= 1e6, "seconds other than 0, within ±1000000")?;
                #[expect(clippy::cast_possible_truncation, reason = "at most 10^9 milliseconds")]
                let by_ms = (by * 1000.0) as i64;
                FaultKind::ClockJump { nodes: nodes("nodes")?, by_ms }
            }
            "clock_skew" => FaultKind::ClockSkew {
                nodes: nodes("nodes")?,
                rate: need("rate", raw.rate, &|v| (0.1..=10.0).contains(&v), "0.1 to 10")?,
            },
            "slow_device" => FaultKind::SlowDevice {
                nodes: nodes("nodes")?,
                factor: need("factor", raw.factor, &|v| positive(v) && v <= 1000.0, "above 0, at most 1000")?,
            },
            other => {
                let kinds: Vec<&str> = KEYS.iter().map(|(k, _)| *k).collect();
                return self.problem(at, "kind", format!("expected one of {kinds:?}, got {other:?}"));
            }
        };
        Ok(Fault { at: raw.at_s, lasts: raw.for_s, kind })
    }

    /// A key that the kind has no use for is a mistake, not a thing to pass over.
    fn check_keys(&self, at: usize, raw: &RawFault) -> Result<(), Problem> {
        let Some((_, takes)) = KEYS.iter().find(|(k, _)| *k == raw.kind) else { return Ok(()) };
        let given = [
            ("for_s", raw.for_s.is_some()),
            ("nodes", raw.nodes.is_some()),
            ("node", raw.node.is_some()),
            ("sides", raw.sides.is_some()),
            ("from", raw.from.is_some()),
            ("to", raw.to.is_some()),
            ("count", raw.count.is_some()),
            ("period_s", raw.period_s.is_some()),
            ("share", raw.share.is_some()),
            ("session", raw.session.is_some()),
            ("mean_s", raw.mean_s.is_some()),
            ("away_s", raw.away_s.is_some()),
            ("power_loss", raw.power_loss.is_some()),
            ("disk_lost", raw.disk_lost.is_some()),
            ("key_kept", raw.key_kept.is_some()),
            ("loss", raw.loss.is_some()),
            ("latency_ms", raw.latency_ms.is_some()),
            ("bandwidth_kib_s", raw.bandwidth_kib_s.is_some()),
            ("delay_ms", raw.delay_ms.is_some()),
            ("values", raw.values.is_some()),
            ("by_s", raw.by_s.is_some()),
            ("rate", raw.rate.is_some()),
            ("factor", raw.factor.is_some()),
        ];
        match given.iter().find(|(key, is)| *is && !takes.contains(key)) {
            Some((key, _)) => {
                self.problem(at, key, format!("a fault of kind {:?} takes {takes:?} besides kind and at_s", raw.kind))
            }
            None => Ok(()),
        }
    }
}

/// Kinds with the keys that they take.
const KEYS: [(&str, &[&str]); 18] = [
    ("split", &["for_s", "sides"]),
    ("islands", &["for_s", "count"]),
    ("one_way", &["for_s", "from", "to"]),
    ("bridge", &["for_s", "node", "sides"]),
    ("flapping", &["for_s", "sides", "period_s"]),
    ("isolate", &["for_s", "nodes"]),
    ("degrade", &["for_s", "nodes", "loss", "latency_ms", "bandwidth_kib_s"]),
    ("crash", &["nodes", "power_loss", "disk_lost", "key_kept", "away_s"]),
    ("churn", &["for_s", "nodes", "session", "mean_s", "away_s"]),
    ("mass_leave", &["nodes", "share", "away_s"]),
    ("join", &["nodes"]),
    ("disk_slow", &["for_s", "nodes", "delay_ms"]),
    ("disk_full", &["for_s", "nodes"]),
    ("disk_fails", &["for_s", "nodes"]),
    ("disk_corrupt", &["nodes", "values"]),
    ("clock_jump", &["nodes", "by_s"]),
    ("clock_skew", &["for_s", "nodes", "rate"]),
    ("slow_device", &["for_s", "nodes", "factor"]),
];

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str =
        "name = \"t\"\nabout = \"a test\"\n[[node]]\nrole = \"server\"\ncount = 3\n[[node]]\nrole = \"client\"\n";

    fn wrong(tail: &str) -> Problem {
        parse(&format!("{HEAD}{tail}")).unwrap_err()
    }

    #[test]
    fn a_good_one_is_read() {
        let s = parse(&format!(
            "{HEAD}[[fault]]\nkind = \"split\"\nat_s = 10\nfor_s = 5.5\nsides = [[\"leader\", \"client-1\"], \"*\"]\n"
        ))
        .unwrap();
        assert_eq!(s.node_names().len(), 4);
        assert!(!s.draws_faults);
        assert_eq!(s.faults[0].lasts, Some(Duration::from_millis(5500)));
        assert!(parse(HEAD).unwrap().draws_faults, "without faults of its own they come from the seed");
    }

    #[test]
    fn an_unknown_key_is_named_with_its_line_and_what_was_expected() {
        let e = wrong("colour = 3\n");
        assert_eq!((e.line, e.key.as_str()), (8, "colour"), "{e}");
        assert!(e.what.contains("slots"), "{e}");
        let e = wrong("[[fault]]\nkind = \"isolate\"\nat_s = 1\nnodes = \"leader\"\nperiod_s = 2\n");
        assert_eq!((e.line, e.key.as_str()), (12, "period_s"), "{e}");
    }

    #[test]
    fn impossible_partitions_are_refused() {
        for (tail, key, says) in [
            ("[[fault]]\nkind = \"split\"\nat_s = 1\nsides = [\"*\"]\n", "sides", "at least 2"),
            ("[[fault]]\nkind = \"split\"\nat_s = 1\nsides = [\"server-1\", \"server-1\"]\n", "sides", "two sides"),
            ("[[fault]]\nkind = \"split\"\nat_s = 1\nsides = [\"server-9\", \"*\"]\n", "sides", "server-9"),
            ("[[fault]]\nkind = \"islands\"\nat_s = 1\ncount = 5\n", "count", "2 to 4"),
            ("[[fault]]\nkind = \"bridge\"\nat_s = 1\nsides = [\"server-1\", \"server-2\"]\n", "node", "nothing"),
        ] {
            let e = wrong(tail);
            assert!(e.key == key && e.what.contains(says), "{e}");
        }
    }

    #[test]
    fn numbers_out_of_range_are_refused_where_they_stand() {
        for (tail, line, key) in [
            ("[network]\nloss = 1.5\n", 9, "loss"),
            ("[network]\nlatency_ms = [5, 1]\n", 9, "latency_ms"),
            ("[job]\ngroup_size = 1\n", 9, "group_size"),
            ("[[fault]]\nkind = \"crash\"\nat_s = 600\nnodes = \"leader\"\n", 10, "at_s"),
            ("[[fault]]\nkind = \"slow_device\"\nat_s = 6\nnodes = \"leader\"\nfactor = 0\n", 12, "factor"),
            ("[[fault]]\nkind = \"meteor\"\nat_s = 6\n", 9, "kind"),
        ] {
            let e = wrong(tail);
            assert_eq!((e.line, e.key.as_str()), (line, key), "{e}");
        }
    }
}
