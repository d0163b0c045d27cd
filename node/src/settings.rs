//! What was typed, turned into what a node runs with; every refusal names the option.

use crate::cli::{AgentModeArg, RunArgs};
use crate::units::{parse_bytes, parse_time};
use anyhow::{Context, anyhow, bail};
use libp2p::Multiaddr;
use starling_agents::{AgentMode, RunnerConfig};
use starling_engine::WeightFormat;
use starling_protocol::ModelName;
use starling_protocol::record::Role;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A store with 64 MiB of log and blob files of 64 MiB needs some room to collect garbage in.
const STORE_QUOTA_BYTES_MIN: u64 = 256 << 20;
/// Below this a heartbeat is later than a busy machine lets its threads run.
const HEARTBEAT_MIN: Duration = Duration::from_millis(20);
/// An election timeout of fewer heartbeats is over when one of them is late.
const HEARTBEATS_PER_ELECTION_MIN: u32 = 4;
/// Longer, and nobody would call it healing.
const ELECTION_TIMEOUT_MAX: Duration = Duration::from_secs(600);

/// A node's settings, checked.
#[derive(Debug, Clone)]
pub struct RunSettings {
    /// Sorted, without repetition.
    pub roles: Vec<Role>,
    /// Empty for the default.
    pub listen: Vec<Multiaddr>,
    /// Agents and the command line.
    pub http: SocketAddr,
    /// Asked of HTTP callers outside an episode.
    pub http_token: Option<String>,
    /// With the client role and a program.
    pub agent: Option<RunnerConfig>,
    /// For rollouts.
    pub agent_name: String,
    /// Episodes at once.
    pub slots: usize,
    /// Empty for all.
    pub models: Vec<ModelName>,
    /// To bring to the mesh: name and folder or file.
    pub bring: Vec<(ModelName, PathBuf)>,
    /// Compute threads.
    pub threads: usize,
    /// Of generation.
    pub weight_format: WeightFormat,
    /// Look on the local network.
    pub mdns: bool,
    /// Most bytes of the store.
    pub store_quota_bytes: Option<u64>,
    /// How long consumed rollouts are kept.
    pub rollouts_kept: Duration,
    /// How often a leader is heard.
    pub heartbeat: Duration,
    /// How long it may be silent.
    pub election_timeout: Duration,
    /// How long a quorum must be lost before a new generation; `None`: never.
    pub generation_after: Option<Duration>,
}

impl RunSettings {
    /// Checks `args`; `data` is where agents get their scratch folders.
    ///
    /// # Errors
    /// Names the option, what was expected and what came.
    pub fn new(args: &RunArgs, data: &Path) -> anyhow::Result<Self> {
        let mut roles = args.role.iter().map(|r| r.parse()).collect::<Result<Vec<Role>, _>>().context("--role")?;
        roles.sort_unstable();
        roles.dedup();
        let listen = args
            .listen
            .iter()
            .map(|a| {
                a.parse::<Multiaddr>()
                    .with_context(|| format!("--listen {a}: expected a multiaddr such as /ip4/127.0.0.1/udp/0/quic-v1"))
            })
            .collect::<anyhow::Result<Vec<_>>>()?;
        let http: SocketAddr =
            args.http.parse().with_context(|| format!("--http {}: expected ADDRESS:PORT", args.http))?;
        if !http.ip().is_loopback() && args.http_token.is_none() {
            bail!("--http {http}: beyond loopback, --http-token is needed");
        }
        if args.slots == 0 || args.slots > 1024 {
            bail!("--slots: expected 1 to 1024, got {}", args.slots);
        }
        let store_quota_bytes = args.store_quota.as_deref().map(parse_bytes).transpose().context("--store-quota")?;
        if let Some(bytes) = store_quota_bytes.filter(|b| *b < STORE_QUOTA_BYTES_MIN) {
            bail!(
                "--store-quota: expected at least 256MiB, which the store's own log and files need, got {bytes} bytes"
            );
        }
        let (heartbeat, election_timeout) = group_times(args)?;
        let is_client = roles.contains(&Role::Client);
        if args.agent.is_some() && !is_client {
            bail!("--agent: only with the client role, add --role client");
        }
        if !args.model.is_empty() && !roles.contains(&Role::Server) {
            bail!("--model: only with the server role, add --role server");
        }
        let agent = args.agent.as_deref().map(|c| runner(args, c, data)).transpose()?;
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Ok(Self {
            roles,
            listen,
            http,
            http_token: args.http_token.clone(),
            agent,
            agent_name: args.agent.clone().unwrap_or_default(),
            slots: args.slots,
            models: args.models.iter().map(|m| m.parse()).collect::<Result<_, _>>().context("--models")?,
            bring: args.model.iter().map(|m| model_source(m)).collect::<anyhow::Result<_>>()?,
            weight_format: args.weight_format.parse().context("--weight-format")?,
            threads: args.threads.unwrap_or(cores).clamp(1, 256),
            mdns: args.mdns,
            store_quota_bytes,
            rollouts_kept: parse_time(&args.rollouts_kept).context("--rollouts-kept")?,
            heartbeat,
            election_timeout,
            generation_after: generation_after(&args.generation_after).context("--generation-after")?,
        })
    }
}

/// The times of the models' groups.
fn group_times(args: &RunArgs) -> anyhow::Result<(Duration, Duration)> {
    let heartbeat = parse_time(&args.heartbeat).context("--heartbeat")?;
    if heartbeat < HEARTBEAT_MIN {
        bail!("--heartbeat: expected at least {HEARTBEAT_MIN:?}, got {heartbeat:?}");
    }
    let election_timeout = parse_time(&args.election_timeout).context("--election-timeout")?;
    let least = heartbeat * HEARTBEATS_PER_ELECTION_MIN;
    if election_timeout < least || election_timeout > ELECTION_TIMEOUT_MAX {
        bail!(
            "--election-timeout: expected {least:?} (four times --heartbeat {heartbeat:?}) to {ELECTION_TIMEOUT_MAX:?}, \
             got {election_timeout:?}"
        );
    }
    Ok((heartbeat, election_timeout))
}

/// A minute at least: a shorter break is an election, a restart or a bad link, and heals by itself.
fn generation_after(text: &str) -> anyhow::Result<Option<Duration>> {
    if text == "never" {
        return Ok(None);
    }
    let after = parse_time(text).map_err(|e| anyhow!("{e}, or never"))?;
    if after < Duration::from_secs(60) {
        bail!("expected at least 1m, or never, got {text}");
    }
    Ok(Some(after))
}

/// `[NAME=]PATH` of `--model`; the path has to be there.
fn model_source(text: &str) -> anyhow::Result<(ModelName, PathBuf)> {
    let (name, path) = match text.split_once('=') {
        Some((name, path)) => (Some(name.to_owned()), Path::new(path)),
        None => (None, Path::new(text)),
    };
    let found = path.canonicalize().with_context(|| format!("--model {text}"))?;
    let of_path = || {
        let stem = if found.is_file() { found.file_stem() } else { found.file_name() };
        stem.unwrap_or_default().to_string_lossy().into_owned()
    };
    let name = name.unwrap_or_else(of_path);
    let name =
        name.parse().with_context(|| format!("--model {text}: put a name before the path, NAME={}", path.display()))?;
    Ok((name, found))
}

fn runner(args: &RunArgs, command: &str, data: &Path) -> anyhow::Result<RunnerConfig> {
    let command: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
    let mode = match args.agent_mode {
        AgentModeArg::PerEpisode => AgentMode::PerEpisode,
        AgentModeArg::Worker => AgentMode::Worker,
    };
    let mut config = RunnerConfig::new(command, mode);
    config.slots = args.slots;
    config.time_limit = Duration::from_secs(args.time_limit.max(1));
    config.scratch_dir = data.join("scratch");
    std::fs::create_dir_all(&config.scratch_dir)
        .with_context(|| format!("cannot make {}", config.scratch_dir.display()))?;
    config.validate().context("--agent")?;
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command, NodeCommand};
    use clap::Parser;

    fn settings(more: &[&str]) -> anyhow::Result<RunSettings> {
        let cli = Cli::try_parse_from(["starling", "node", "run"].iter().chain(more))?;
        let Command::Node(NodeCommand::Run(args)) = cli.command else { unreachable!("it was typed") };
        RunSettings::new(&args, Path::new("."))
    }

    #[test]
    fn an_election_timeout_leaves_room_for_heartbeats() {
        let fast = settings(&["--heartbeat", "100ms", "--election-timeout", "1s"]).unwrap();
        assert_eq!((fast.heartbeat, fast.election_timeout), (Duration::from_millis(100), Duration::from_secs(1)));
        let usual = settings(&[]).unwrap();
        let group = starling_core::consensus::GroupConfig::default();
        assert_eq!((usual.heartbeat, usual.election_timeout), (group.heartbeat, group.election_timeout_max));
        for (bad, said) in [
            (["--heartbeat", "1s"], "--election-timeout: expected 4s (four times --heartbeat 1s) to 600s, got 2s"),
            (["--heartbeat", "0ms"], "--heartbeat: expected at least 20ms, got 0ns"),
            (["--heartbeat", "often"], "--heartbeat"),
            (["--election-timeout", "1h"], "--election-timeout: expected 1s"),
        ] {
            let error = settings(&bad).unwrap_err().to_string();
            assert!(error.starts_with(said), "{bad:?}: {error}");
        }
    }

    #[test]
    fn a_generation_comes_after_a_minute_or_more_or_never() {
        assert_eq!(generation_after("15m").unwrap(), Some(Duration::from_secs(900)));
        assert_eq!(generation_after("never").unwrap(), None);
        assert!(generation_after("59s").unwrap_err().to_string().contains("at least 1m"));
        let error = generation_after("soon").unwrap_err().to_string();
        assert!(error.contains("got \"soon\"") && error.ends_with("or never"), "{error}");
    }
}
