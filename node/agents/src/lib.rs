//! Runs agent programs: one subprocess per episode, or long-lived workers that are handed one episode after another.
//!
//! The crate knows no network. Where episodes come from and where their rewards go is an [`EpisodeHost`]; the node
//! implements it over its gateway. [`Runner::run`] keeps a number of slots busy with what the host hands out, and
//! owes the host exactly one answer for each episode: an accepted `end`, or one `abort` with a cause.
//!
//! An agent program can only hurt its own episode. It runs in its own process group, with a clean environment, a
//! scratch folder, a time limit and bounded output. Whatever it leaves behind in that group is killed when the episode
//! ends, when the runner stops, and when the node itself is killed with -9.
//!
//! What a program is given and must print is in `docs/agents.md`.

#[cfg(not(unix))]
compile_error!("starling-agents needs process groups and signals: it runs on unix only");

mod cause;
mod config;
mod guard;
mod host;
mod launch;
mod lines;
mod per_episode;
mod process;
mod report;
mod runner;
mod slot;
mod stats;
mod worker;

pub use cause::{AbortCause, Stderr};
pub use config::{AgentMode, ConfigError, RunnerConfig};
pub use host::{ClaimOutcome, EpisodeHost, EpisodePurpose, EpisodeStart};
pub use report::{EpisodeReport, ReportError};
pub use runner::{RunError, Runner};
pub use stats::RunnerStats;
