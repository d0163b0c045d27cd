//! `starling demo`: five processes on loopback train the embedded model, lose their leader and heal.
//!
//! It drives the mesh as a person would, through the binary and its admin routes; what it reports of lost and
//! twice-consumed rollouts is read from the nodes' stores after they ended.

pub(crate) mod mesh;
mod report;
mod watch;

use crate::cli::DemoArgs;
use crate::{embedded, print};
use anyhow::Context;
use mesh::{Demo, NodeKind, Plan};
use report::Summary;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use watch::Watch;

/// Optimizer steps when none are asked for.
const STEPS: u64 = 70;
/// The whole run must end within this time, or it counts as failed.
const LIMIT: Duration = Duration::from_secs(290);
/// The killed leader comes back this many steps after the kill.
const RESTART_AFTER_STEPS: u64 = 4;

/// The job that the demo trains; also the example in `docs/jobs.md`.
pub const JOB_TOML: &str = include_str!("../../../examples/demo.toml");

/// Runs the demo. The exit code is a failure when a promise was broken.
///
/// # Errors
/// When the mesh cannot be started or watched.
pub async fn demo(args: &DemoArgs, json: bool) -> anyhow::Result<ExitCode> {
    let started = Instant::now();
    let steps = args.steps.unwrap_or(STEPS);
    if steps < 2 {
        return Err(crate::BadInput::wrap(anyhow::anyhow!("--steps: expected at least 2, got {steps}")));
    }
    std::fs::create_dir_all(&args.report).with_context(|| format!("cannot make {}", args.report.display()))?;
    let say = |text: String| {
        if !json {
            let _ = print(false, &(), || format!("{:6.1} s  {text}", started.elapsed().as_secs_f64()));
        }
    };
    let mut demo = Demo::new(&args.report, Plan { servers: 3, clients: 2, slots: 32, arguments: Vec::new() })?;
    say("starting three servers and two clients".into());
    demo.start_all().await?;
    let submission = mesh::submission(JOB_TOML, steps, args.seed)?;
    let job = demo.submit(&submission).await?;
    say(format!("job {} submitted: {steps} steps on {}", job.job, embedded::MODEL_NAME));

    let mut watch = Watch::new(&job.model, steps);
    let kill_at = steps / 2;
    let mut killed: Option<usize> = None;
    let mut restart_at = None;
    let outcome = loop {
        if started.elapsed() > LIMIT {
            break Err(format!("not finished within {LIMIT:?}: {}", watch.last_doing()));
        }
        tokio::time::sleep(Duration::from_millis(150)).await;
        demo.sample_memory();
        if let Some(dead) = demo.unexpected_exit()? {
            break Err(format!("{dead} ended by itself; its log is in {}", demo.logs().display()));
        }
        watch.poll(&demo).await;
        for line in watch.news() {
            say(line);
        }
        if killed.is_none()
            && watch.steps() >= kill_at
            && let Some(leader) = watch.leader_index(&demo)
        {
            watch.note_kill();
            demo.kill(leader)?;
            killed = Some(leader);
            restart_at = Some(watch.steps() + RESTART_AFTER_STEPS);
            say(format!("SIGKILL to the optimizer leader, {}", demo.name(leader)));
        }
        if let (Some(i), Some(at)) = (killed, restart_at)
            && watch.steps() >= at.min(steps.saturating_sub(1))
        {
            demo.start(NodeKind::Server, i).await?;
            restart_at = None;
            say(format!("{} is started again", demo.name(i)));
        }
        if watch.finished() {
            break Ok(());
        }
    };
    say("stopping all nodes and reading their stores".into());
    demo.stop_all().await;
    let audit = demo.audit()?;
    let summary = Summary::new(args.seed, steps, &watch, &demo, &audit, started.elapsed(), outcome.err());
    report::write(&args.report, &summary, watch.curve())?;
    print(json, &summary, || report::text(&summary, &args.report))?;
    if summary.broken.is_empty() {
        Ok(ExitCode::SUCCESS)
    } else {
        for b in &summary.broken {
            eprintln!("starling demo: {b}");
        }
        Ok(ExitCode::FAILURE)
    }
}
