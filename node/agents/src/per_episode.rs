//! One process per episode: the task on standard input, the result as the last JSON line on standard output.

use crate::cause::AbortCause;
use crate::host::EpisodeStart;
use crate::lines::{LINE_LEN_BYTES_MAX, Line};
use crate::process::{DRAIN_LIMIT, Process};
use crate::report::{EpisodeReport, ReportError, ResultScan, claimed_error, read_report};
use crate::slot::{Control, Shared, stopped};
use tokio::io::AsyncWriteExt;
use tokio::sync::watch;
use tokio::time::timeout;

/// Runs one episode from start to result.
pub(crate) async fn run_episode(
    shared: &Shared,
    start: &EpisodeStart,
    control: &mut watch::Receiver<Control>,
) -> Result<EpisodeReport, AbortCause> {
    let mut process = shared.launcher.launch(episode_env(start)).await?;
    let mut scan = ResultScan::default();
    let result = match follow(shared, &mut process, start, control, &mut scan).await {
        Ok(()) => finish(&mut process, start, scan).await,
        Err(mut cause) => {
            process.terminate(shared.config.kill_grace).await;
            if let AbortCause::TimeLimit { stderr, .. } = &mut cause {
                *stderr = process.stderr_tail(&start.api_key);
            }
            Err(cause)
        }
    };
    process.discard().await;
    result
}

fn episode_env(start: &EpisodeStart) -> Vec<(&'static str, String)> {
    vec![
        ("OPENAI_BASE_URL", start.base_url.clone()),
        ("OPENAI_API_KEY", start.api_key.clone()),
        ("STARLING_EPISODE", start.episode.to_string()),
        ("STARLING_MODEL", start.model.clone()),
        ("STARLING_SEED", start.seed.to_string()),
        ("STARLING_SET", start.set.clone()),
        ("STARLING_TASK_ID", start.task_id.clone()),
        ("STARLING_PURPOSE", start.purpose.to_string()),
    ]
}

/// Feeds the task in and reads output until the program has ended.
async fn follow(
    shared: &Shared,
    process: &mut Process,
    start: &EpisodeStart,
    control: &mut watch::Receiver<Control>,
    scan: &mut ResultScan,
) -> Result<(), AbortCause> {
    let config = &shared.config;
    let Process { stdin, stdout, exit, .. } = process;
    let mut stdin = stdin.take();
    let feed = async {
        if let Some(mut pipe) = stdin.take() {
            // A program that does not read its task closes the pipe early: its business. Dropping it ends the input.
            let _accepted = pipe.write_all(format!("{}\n", start.task_line).as_bytes()).await;
        }
    };
    let deadline = tokio::time::sleep(config.time_limit);
    tokio::pin!(feed, deadline);
    let (mut fed, mut reading) = (false, true);
    loop {
        tokio::select! {
            biased;
            cause = stopped(control) => return Err(cause),
            () = &mut deadline => {
                return Err(AbortCause::TimeLimit { limit: config.time_limit, stderr: Default::default() });
            }
            () = &mut feed, if !fed => fed = true,
            line = stdout.next(), if reading => {
                reading = take_line(line, scan);
                if stdout.read_bytes() > config.stdout_len_bytes_max {
                    return Err(AbortCause::OutputLimit { limit_bytes: config.stdout_len_bytes_max });
                }
            }
            () = exit.ended() => return Ok(()),
        }
    }
}

/// Whether there may be more.
fn take_line(line: Option<Line>, scan: &mut ResultScan) -> bool {
    match line {
        Some(Line::Text(text)) => scan.line(&text),
        Some(Line::TooLong { len_bytes, head }) => scan.too_long(LINE_LEN_BYTES_MAX, len_bytes, &head),
        Some(Line::End) => return false,
        None => {}
    }
    true
}

/// After the program has ended by itself.
async fn finish(
    process: &mut Process,
    start: &EpisodeStart,
    mut scan: ResultScan,
) -> Result<EpisodeReport, AbortCause> {
    let status = process.finish().await;
    // What was in the pipe when it ended. At most 64 KiB, so no limit of bytes is needed.
    let rest = async { while take_line(process.stdout.next().await, &mut scan) {} };
    let _in_time = timeout(DRAIN_LIMIT, rest).await;
    let stderr = process.stderr_tail(&start.api_key);
    if !process.succeeded() {
        return Err(AbortCause::Exit { status, stderr });
    }
    let refused = |reason: ReportError| AbortCause::Report { reason, stderr: stderr.clone() };
    let object = scan.finish().map_err(refused)?;
    match claimed_error(&object) {
        Some(error) => Err(AbortCause::Agent { error }),
        None => read_report(&object).map_err(refused),
    }
}
