//! Long-lived programs: a line in for each episode, a line out for each result, one episode at a time.

use crate::cause::AbortCause;
use crate::host::EpisodeStart;
use crate::lines::{LINE_LEN_BYTES_MAX, Line};
use crate::process::{DRAIN_LIMIT, Process};
use crate::report::{EpisodeReport, Object, ReportError, claimed_error, parse_object, read_report, shown};
use crate::slot::{Control, Shared, stopped};
use serde_json::Value;
use tokio::io::AsyncWriteExt;
use tokio::sync::watch;
use tokio::time::Instant;

/// The line that hands an episode to a worker.
fn episode_line(start: &EpisodeStart) -> Result<String, AbortCause> {
    let task = start.task_line.trim();
    let refused = || AbortCause::TaskLine { got: shown(task) };
    if task.contains(['\n', '\r']) || !task.starts_with('{') {
        return Err(refused());
    }
    serde_json::from_str::<serde::de::IgnoredAny>(task).map_err(|_not_json| refused())?;
    let text = |s: &str| Value::from(s).to_string();
    // The task goes in as it stands: parsing and printing it again could change its numbers.
    Ok(format!(
        concat!(
            r#"{{"episode":"{}","task":{},"base_url":{},"api_key":{},"model":{},"seed":{},"#,
            r#""set":{},"task_id":{},"purpose":"{}"}}"#,
            "\n"
        ),
        start.episode,
        task,
        text(&start.base_url),
        text(&start.api_key),
        text(&start.model),
        start.seed,
        text(&start.set),
        text(&start.task_id),
        start.purpose,
    ))
}

/// Runs one episode in a worker. `true` beside the result: the worker is in order and can take the next one.
pub(crate) async fn run_episode(
    shared: &Shared,
    worker: &mut Process,
    start: &EpisodeStart,
    control: &mut watch::Receiver<Control>,
) -> (Result<EpisodeReport, AbortCause>, bool) {
    let line = match episode_line(start) {
        Ok(line) => line,
        Err(cause) => return (Err(cause), true),
    };
    worker.clear_stderr();
    match exchange(shared, worker, start, line, control).await {
        Ok(object) => match claimed_error(&object) {
            Some(error) => (Err(AbortCause::Agent { error }), true),
            None => {
                let stderr = || worker.stderr_tail(&start.api_key);
                let report = read_report(&object).map_err(|reason| AbortCause::Report { reason, stderr: stderr() });
                (report, true)
            }
        },
        // Whatever it still does belongs to an episode that is over: the next one gets a fresh process.
        Err(mut cause) => {
            let exit = worker.terminate(shared.config.kill_grace).await;
            let tail = worker.stderr_tail(&start.api_key);
            match &mut cause {
                AbortCause::TimeLimit { stderr, .. } | AbortCause::Report { stderr, .. } => *stderr = tail,
                AbortCause::WorkerGone { status, stderr } => (*status, *stderr) = (exit, tail),
                _ => {}
            }
            (Err(cause), false)
        }
    }
}

/// Sends the line and waits for the answer to it.
async fn exchange(
    shared: &Shared,
    worker: &mut Process,
    start: &EpisodeStart,
    line: String,
    control: &mut watch::Receiver<Control>,
) -> Result<Object, AbortCause> {
    let config = &shared.config;
    let Process { stdin, stdout, exit, .. } = worker;
    let gone = || AbortCause::WorkerGone { status: String::new(), stderr: Default::default() };
    let pipe = stdin.as_mut().ok_or_else(gone)?;
    let output_before = stdout.read_bytes();
    let feed = async { pipe.write_all(line.as_bytes()).await.is_ok() };
    let deadline = tokio::time::sleep(config.time_limit);
    // Armed when the program has ended: what it wrote before is still read.
    let drained = tokio::time::sleep(config.time_limit);
    tokio::pin!(feed, deadline, drained);
    let (mut fed, mut ended) = (false, false);
    loop {
        let line = tokio::select! {
            biased;
            cause = stopped(control) => return Err(cause),
            () = &mut deadline => {
                return Err(AbortCause::TimeLimit { limit: config.time_limit, stderr: Default::default() });
            }
            ok = &mut feed, if !fed => match ok {
                true => {
                    fed = true;
                    continue;
                }
                false => return Err(gone()),
            },
            line = stdout.next() => line,
            () = exit.ended(), if !ended => {
                ended = true;
                drained.as_mut().reset(Instant::now() + DRAIN_LIMIT);
                continue;
            }
            () = &mut drained, if ended => return Err(gone()),
        };
        let report = |reason| AbortCause::Report { reason, stderr: Default::default() };
        match line {
            Some(Line::Text(text)) if text.trim_start().starts_with('{') => {
                let object = parse_object(&text).map_err(report)?;
                let expected = start.episode;
                return match object.get("episode") {
                    Some(Value::String(got)) if *got == expected.to_string() => Ok(object),
                    got => {
                        let got = got.map_or("nothing".into(), |v| shown(&v.to_string()));
                        Err(AbortCause::WrongEpisode { expected, got })
                    }
                };
            }
            Some(Line::TooLong { len_bytes, head }) if head.starts_with('{') => {
                let limit_bytes = LINE_LEN_BYTES_MAX;
                return Err(report(ReportError::TooLong { limit_bytes, got_bytes: len_bytes, head: shown(&head) }));
            }
            Some(Line::End) => return Err(gone()),
            // Other lines are the program's chatter.
            Some(Line::Text(_) | Line::TooLong { .. }) | None => {}
        }
        if stdout.read_bytes() - output_before > config.stdout_len_bytes_max {
            return Err(AbortCause::OutputLimit { limit_bytes: config.stdout_len_bytes_max });
        }
    }
}

/// Returns when an idle worker can no longer be used, and why.
pub(crate) async fn idle(worker: &mut Process) -> String {
    loop {
        let line = tokio::select! {
            biased;
            line = worker.stdout.next() => line,
            () = worker.exit.ended() => Some(Line::End),
        };
        match line {
            Some(Line::Text(text)) if text.trim_start().starts_with('{') => {
                return format!("it wrote a result although it has no episode: {}", shown(&text));
            }
            Some(Line::End) => return "it ended, or closed its output".into(),
            Some(Line::Text(_) | Line::TooLong { .. }) | None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::EpisodePurpose;
    use starling_protocol::EpisodeId;
    use std::time::Duration;

    fn start(task_line: &str) -> EpisodeStart {
        EpisodeStart {
            episode: EpisodeId([1; 16]),
            task_line: task_line.into(),
            base_url: "http://127.0.0.1:1/v1".into(),
            api_key: "k\"ey".into(),
            model: "m".into(),
            seed: u64::MAX,
            set: "sums".into(),
            task_id: "a".into(),
            purpose: EpisodePurpose::Eval,
            lease_ttl: Duration::from_secs(1),
        }
    }

    #[test]
    fn a_line_for_a_worker_is_json_with_the_task_as_it_stands() {
        let line = episode_line(&start(r#"{"id":"a","x":1.10}"#)).unwrap();
        assert!(line.ends_with("}\n") && line.contains(r#""task":{"id":"a","x":1.10},"#), "{line}");
        let object = parse_object(&line).unwrap();
        assert_eq!(object["api_key"], "k\"ey");
        assert_eq!(object["seed"], u64::MAX);
        assert_eq!(object["purpose"], "eval");
    }

    #[test]
    fn a_task_line_that_would_break_the_protocol_is_refused() {
        for bad in ["", "[1]", "{\"a\":\n1}", "{", "{} {}"] {
            assert!(episode_line(&start(bad)).is_err(), "{bad:?}");
        }
    }
}
