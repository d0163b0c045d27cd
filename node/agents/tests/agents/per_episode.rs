use crate::support::{KEY, Run, episode, gone, id};
use starling_agents::AgentMode::PerEpisode;
use starling_agents::{EpisodePurpose, EpisodeStart, RunnerConfig};
use std::time::Duration;

fn unchanged(_config: &mut RunnerConfig) {}

/// Runs `body` for one episode and returns the cause of its abort.
async fn cause_of_abort(body: &str, change: impl FnOnce(&mut RunnerConfig)) -> String {
    let run = Run::start(PerEpisode, body, [episode(1)], change);
    run.host.until("an abort", |b| b.aborted.contains_key(&id(1))).await;
    let (stats, host) = run.stop().await;
    assert_eq!((stats.started, stats.ended, stats.aborted.values().sum()), (1, 0, 1));
    host.books().aborted[&id(1)].clone()
}

#[tokio::test]
async fn reward_and_metrics_of_the_last_json_line_reach_the_host() {
    let body = r#"
        read -r task; echo "$task" > $DIR/task; cat > $DIR/rest
        env > $DIR/env; pwd > $DIR/pwd; touch $TMPDIR/file; ls $STARLING_SCRATCH > $DIR/scratch-listing
        echo 'thinking'; echo '{"reward": 0.0}'; echo '{"reward": 0.5, "metrics": {"turns": 2}}'; echo 'bye'
    "#;
    let eval = EpisodeStart { purpose: EpisodePurpose::Eval, ..episode(1) };
    let run = Run::start(PerEpisode, body, [eval], unchanged);
    run.host.until("an end", |b| b.ended.contains_key(&id(1))).await;
    let (reward, metrics) = run.host.books().ended[&id(1)].clone();
    assert_eq!((reward.to_string(), metrics["turns"].to_string()), ("0.5".into(), "2".into()));
    assert_eq!(run.note("task"), "{\"id\":\"t-1\",\"answer\":\"1\"}\n");
    assert_eq!(run.note("rest"), "", "standard input ends after the task");
    assert_eq!(run.note("scratch-listing"), "file\n");
    let env = run.note("env");
    for expected in [
        "OPENAI_BASE_URL=http://127.0.0.1:10086/v1",
        &format!("OPENAI_API_KEY={KEY}"),
        &format!("STARLING_EPISODE={}", id(1)),
        "STARLING_MODEL=tiny",
        "STARLING_SEED=7",
        "STARLING_SET=sums",
        "STARLING_TASK_ID=t-1",
        "STARLING_PURPOSE=eval",
    ] {
        assert!(env.lines().any(|l| l == expected), "{expected} in {env}");
    }
    assert!(std::env::var_os("CARGO_MANIFEST_DIR").is_some() && !env.contains("CARGO_MANIFEST_DIR"), "{env}");
    assert_eq!(run.note("pwd").trim(), std::env::current_dir().unwrap().display().to_string());
    run.stop().await;
}

#[tokio::test]
async fn many_episodes_run_in_their_slots_and_each_ends_once() {
    let body = r#"read -r task; answer=${task##*answer\":\"}; echo "{\"reward\": ${answer%%\"*}}""#;
    let run = Run::start(PerEpisode, body, (1..=50).map(episode), |c| c.slots = 8);
    run.host.until("50 ends", |b| b.ended.len() == 50).await;
    let (stats, host) = run.stop().await;
    assert_eq!((stats.started, stats.ended, stats.running, stats.ending), (50, 50, 0, 0));
    for n in 1..=50 {
        assert_eq!(host.books().ended[&id(n)].0.to_string(), n.to_string());
    }
    let first = host.books().claims[0].1;
    assert_eq!(first, 8, "slots that are free together are filled with one claim");
}

#[tokio::test]
async fn a_crash_names_the_exit_code_and_stderr_without_the_key() {
    let body = r#"echo '{"reward": 1}'; echo "boom with $OPENAI_API_KEY" >&2; exit 3"#;
    let cause = cause_of_abort(body, unchanged).await;
    assert_eq!(cause, "agent exited with exit code 3; stderr ends with: boom with [key]");
    let cause = cause_of_abort("kill -SEGV $$", unchanged).await;
    assert_eq!(cause, "agent exited with signal 11 (SIGSEGV)");
}

#[tokio::test]
async fn output_without_a_result_is_refused_with_what_came() {
    let cause = cause_of_abort("echo hello; echo oops >&2", unchanged).await;
    assert!(cause.contains("got as its last line \"hello\"; stderr ends with: oops"), "{cause}");
    let cause = cause_of_abort("head -c 5000 /dev/urandom", unchanged).await;
    assert!(cause.contains("expected a JSON"), "{cause}");
    let cause = cause_of_abort("echo '{\"reward\": 1'", unchanged).await;
    assert!(cause.contains("expected a JSON object, got \"{\\\"reward\\\": 1\": EOF"), "{cause}");
    let cause = cause_of_abort("echo '{\"error\": \"no model\"}'", unchanged).await;
    assert_eq!(cause, "agent reported an error: no model");
}

#[tokio::test]
async fn a_reward_that_is_not_finite_is_refused_by_name() {
    let cause = cause_of_abort("echo '{\"reward\": NaN}'", unchanged).await;
    assert_eq!(cause, "agent's result: field `reward`: expected a finite number, got NaN");
    let cause = cause_of_abort("echo '{\"reward\": 0, \"metrics\": {\"kl\": \"x\"}}'", unchanged).await;
    assert_eq!(cause, "agent's result: field `metrics.kl`: expected a finite number, got \"x\"");
}

#[tokio::test]
async fn a_program_that_hangs_is_killed_at_the_limit_with_all_its_children() {
    let body = r#"
        trap '' TERM; sleep 600 & echo $! >> $DIR/pids; sh -c 'trap "" TERM; sleep 601' & echo $! >> $DIR/pids
        echo $$ >> $DIR/pids; echo stuck >&2; while :; do sleep 1; done
    "#;
    let cause = cause_of_abort(body, |c| c.time_limit = Duration::from_secs(3)).await;
    assert_eq!(cause, "agent ran past its time limit of 3s; stderr ends with: stuck");
}

#[tokio::test]
async fn a_flood_costs_its_own_episode_only() {
    let limit = |c: &mut RunnerConfig| c.stdout_len_bytes_max = 1 << 17;
    for body in ["yes", "yes | tr -d '\\n'", "yes '{\"reward\": 1}'"] {
        let cause = cause_of_abort(body, limit).await;
        assert_eq!(cause, "agent wrote more than 131072 bytes to its standard output in one episode");
    }
    // A flood of standard error is read and forgotten.
    let body = "yes error | head -c 1000000 >&2; echo '{\"reward\": 1}'";
    let run = Run::start(PerEpisode, body, [episode(1)], limit);
    run.host.until("an end", |b| b.ended.len() == 1).await;
    run.stop().await;
}

#[tokio::test]
async fn what_a_program_leaves_behind_is_killed_when_it_ends() {
    let body = r#"sleep 600 & echo $! > $DIR/pids; echo '{"reward": 1}'"#;
    let run = Run::start(PerEpisode, body, [episode(1)], unchanged);
    run.host.until("an end", |b| b.ended.len() == 1).await;
    for pid in run.pids("pids", 1).await {
        gone(pid).await;
    }
    run.stop().await;
}

#[tokio::test]
async fn a_revoked_episode_is_killed_and_its_slot_used_again() {
    let body = r#"
        [ $STARLING_TASK_ID = t-1 ] || { echo '{"reward": 1}'; exit; }
        echo $$ >> $DIR/pids; exec sleep 600
    "#;
    let short = EpisodeStart { lease_ttl: Duration::from_millis(300), ..episode(1) };
    let run = Run::start(PerEpisode, body, [short, episode(2)], unchanged);
    let pids = run.pids("pids", 1).await;
    run.host.books().to_revoke.push(id(1));
    run.host.until("the next end", |b| b.ended.contains_key(&id(2))).await;
    assert_eq!(run.host.books().aborted[&id(1)], "the lease was revoked");
    gone(pids[0]).await;
    assert_eq!(run.stop().await.0.aborted, [("revoked", 1)].into());
}

#[tokio::test]
async fn shutdown_leaves_no_process_and_no_unanswered_episode() {
    let body = r#"sleep 600 & echo $! >> $DIR/pids; echo $$ >> $DIR/pids; wait"#;
    let run = Run::start(PerEpisode, body, (1..=5).map(episode), |c| c.slots = 3);
    run.pids("pids", 6).await;
    let (stats, host) = run.stop().await; // checks the processes
    assert_eq!((stats.started, stats.aborted["shutdown"]), (3, 3));
    assert_eq!(host.books().queue.len(), 2);
}

#[tokio::test]
async fn a_program_that_does_not_exist_is_named_and_does_not_burn_the_queue() {
    let run = Run::start(PerEpisode, "", (1..=50).map(episode), |c| c.command = vec!["./no-such-agent".into()]);
    run.host.until("two aborts", |b| b.aborted.len() >= 2).await;
    tokio::time::sleep(Duration::from_millis(400)).await;
    let failure = run.stats().last_failure.unwrap();
    assert!(failure.contains("/./no-such-agent` could not be started: No such file"), "{failure}");
    let (stats, _) = run.stop().await;
    assert!(stats.aborted["launch"] <= 5, "pauses of 0.1, 0.2, 0.4 s: {stats:?}");
}

#[tokio::test]
async fn an_episode_of_a_foreign_set_is_refused() {
    let cause = cause_of_abort("echo '{\"reward\": 1}'", |c| c.sets = Some(vec!["chess".into()])).await;
    assert_eq!(cause, "task set \"sums\" is not among those that this agent takes");
}

#[tokio::test]
async fn a_file_limit_holds() {
    let body = r#"head -c 100000 /dev/zero > $TMPDIR/f || { echo too big >&2; exit 1; }; echo '{"reward": 1}'"#;
    let cause = cause_of_abort(body, |c| c.file_len_bytes_max = Some(50_000)).await;
    assert!(cause.contains("exit code 1") && cause.contains("too big"), "{cause}");
}
