//! `soak`: a mesh of real processes trains for hours while its nodes are killed, stopped, paused and replaced and its
//! links cut, and everything that can be seen of it is written down. See docs/testing.md.

mod audit;
mod chart;
mod faults;
mod ledger;
mod log;
mod patience;
mod read;
mod report;
mod run;
mod silence;
mod slope;
mod verdict;
mod watch;

use clap::Parser;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// A month: statuses of longer runs would fill the disk, and their reading the memory.
const HOURS_MAX: f64 = 720.0;

/// A mesh under churn, cuts and kills for hours
#[derive(Debug, Parser)]
struct Args {
    /// How long faults go on, in hours
    #[arg(long, default_value_t = 2.0)]
    hours: f64,
    /// Seconds between two faults, on average
    #[arg(long, default_value_t = 25.0, value_name = "SECONDS")]
    calm: f64,
    /// What is drawn follows from it; the moments at which the machine does it do not
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Where everything is written; it must not hold an earlier run. A file named `stop` in it ends the run early
    #[arg(long, value_name = "DIR")]
    log: PathBuf,
    /// Only read what an earlier run wrote into DIR, and judge it again; also while it goes on
    #[arg(long)]
    report: bool,
    /// With --report, of a run that was killed: audit the stores that it left first
    #[arg(long, requires = "report")]
    audit: bool,
}

fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    if args.audit {
        audit::of_killed_run(&args.log)?;
    }
    if args.report {
        return Ok(exit_code(report::write(&args.log)?));
    }
    anyhow::ensure!(
        args.hours > 0.0 && args.hours <= HOURS_MAX,
        "--hours: expected a number above 0, at most {HOURS_MAX}, got {}",
        args.hours
    );
    anyhow::ensure!((0.0..=3600.0).contains(&args.calm), "--calm: expected 0 to 3600 seconds, got {}", args.calm);
    // Nodes die with the thread that started them, so all of it is on this one.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let calm = Duration::from_secs_f64(args.calm);
    let plan = run::Plan { hours: args.hours, calm, seed: args.seed, folder: args.log.clone() };
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime, run::run(&plan))?;
    Ok(exit_code(report::write(&args.log)?))
}

fn exit_code(held: bool) -> ExitCode {
    if held { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
