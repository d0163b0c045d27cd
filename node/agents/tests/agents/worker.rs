use crate::support::{KEY, Run, episode, gone, id, wait_for};
use starling_agents::AgentMode::Worker;
use starling_agents::RunnerConfig;
use std::collections::BTreeSet;
use std::time::Duration;

/// Before each `body`: reads a line into `$line` and its episode and task id into `$ep` and `$task`.
fn worker(body: &str) -> String {
    format!(
        r#"
        echo $$ >> $DIR/pids; echo ready
        reward() {{ echo "{{\"episode\":\"$ep\",\"reward\":$1,\"metrics\":{{\"n\":$n}}}}"; }}
        n=0
        while read -r line; do
            n=$((n + 1)); ep=${{line#*\"episode\":\"}}; ep=${{ep%%\"*}}; task=${{line#*\"id\":\"}}; task=${{task%%\"*}}
            {body}
        done"#
    )
}

fn unchanged(_config: &mut RunnerConfig) {}

#[tokio::test]
async fn one_process_serves_one_episode_after_another() {
    let run =
        Run::start(Worker, &worker("echo chatter; echo $line > $DIR/line; reward 1"), (1..=20).map(episode), unchanged);
    run.host.until("20 ends", |b| b.ended.len() == 20).await;
    let most = run.host.books().ended.values().map(|(_, m)| format!("{:02}", m["n"])).max();
    assert_eq!(most.unwrap(), "20", "all in one process");
    for part in [
        format!("\"episode\":\"{}\"", id(20)),
        r#""task":{"id":"t-20","answer":"20"}"#.into(),
        r#""base_url":"http://127.0.0.1:10086/v1""#.into(),
        format!("\"api_key\":\"{KEY}\""),
        r#""model":"tiny","seed":7,"set":"sums","task_id":"t-20","purpose":"train""#.into(),
    ] {
        assert!(run.note("line").contains(&part), "{part} in {}", run.note("line"));
    }
    assert_eq!(run.pids("pids", 1).await.len(), 1);
    assert_eq!(run.stop().await.0.worker_restarts, 0);
}

#[tokio::test]
async fn slots_have_a_worker_each() {
    let run = Run::start(Worker, &worker("sleep 0.05; reward 0"), (1..=40).map(episode), |c| c.slots = 4);
    run.host.until("40 ends", |b| b.ended.len() == 40).await;
    assert_eq!(run.pids("pids", 4).await.into_iter().collect::<BTreeSet<_>>().len(), 4);
    run.stop().await;
}

#[tokio::test]
async fn a_crash_costs_its_episode_and_a_new_worker_takes_the_next() {
    let body = worker("[ $task = t-2 ] && { echo lost >&2; exit 9; }; reward 1");
    let run = Run::start(Worker, &body, (1..=3).map(episode), unchanged);
    run.host.until("all", |b| b.ended.len() == 2 && b.aborted.len() == 1).await;
    let cause = run.host.books().aborted[&id(2)].clone();
    assert_eq!(cause, "agent worker ended during the episode: exit code 9; stderr ends with: lost");
    assert_eq!(run.pids("pids", 2).await.len(), 2);
    let (stats, _) = run.stop().await;
    assert_eq!((stats.worker_restarts, stats.aborted["worker_gone"]), (1, 1));
}

#[tokio::test]
async fn an_answer_before_the_end_counts() {
    let run = Run::start(Worker, &worker("reward 1; exit 0"), [episode(1)], unchanged);
    run.host.until("an end", |b| b.ended.len() == 1).await;
    run.stop().await;
}

#[tokio::test]
async fn a_hang_costs_its_episode_and_the_worker() {
    let body =
        worker("[ $task = t-1 ] && { trap '' TERM; sleep 600 & echo $! >> $DIR/pids; wait; sleep 600; }; reward 1");
    let run = Run::start(Worker, &body, (1..=2).map(episode), |c| c.time_limit = Duration::from_secs(3));
    run.host.until("the next end", |b| b.ended.contains_key(&id(2))).await;
    assert_eq!(run.host.books().aborted[&id(1)], "agent ran past its time limit of 3s");
    let pids = run.pids("pids", 3).await;
    for pid in &pids[..2] {
        gone(*pid).await;
    }
    run.stop().await;
}

#[tokio::test]
async fn an_answer_for_another_episode_is_refused_with_both_names() {
    let body = worker("[ $task = t-1 ] && ep=nonsense; reward 1");
    let run = Run::start(Worker, &body, (1..=2).map(episode), unchanged);
    run.host.until("the next end", |b| b.ended.contains_key(&id(2))).await;
    let expected = format!("agent worker: field `episode`: expected \"{}\", got \"nonsense\"", id(1));
    assert_eq!(run.host.books().aborted[&id(1)], expected);
    assert_eq!(run.stop().await.0.worker_restarts, 1);
}

#[tokio::test]
async fn errors_and_bad_fields_cost_the_episode_but_not_the_worker() {
    let body = worker(
        r#"case $task in
            t-1) echo "{\"episode\":\"$ep\",\"error\":\"model said 503\"}" ;;
            t-2) reward NaN ;;
            *) reward 1 ;;
        esac"#,
    );
    let run = Run::start(Worker, &body, (1..=3).map(episode), unchanged);
    run.host.until("all", |b| b.ended.len() == 1 && b.aborted.len() == 2).await;
    let aborted = run.host.books().aborted.clone();
    assert_eq!(aborted[&id(1)], "agent reported an error: model said 503");
    assert_eq!(aborted[&id(2)], "agent's result: field `reward`: expected a finite number, got NaN");
    assert_eq!(run.stop().await.0.worker_restarts, 0);
}

#[tokio::test]
async fn lines_that_are_not_json_or_too_long_cost_the_episode_and_the_worker() {
    let body = worker(
        r#"case $task in
            t-1) echo "{reward}" ;;
            t-2) printf '{'; head -c 100000 /dev/zero | tr '\0' x; echo ;;
            t-3) yes ;;
            *) reward 1 ;;
        esac"#,
    );
    let run = Run::start(Worker, &body, (1..=4).map(episode), |c| c.stdout_len_bytes_max = 1 << 17);
    run.host.until("all", |b| b.ended.len() == 1 && b.aborted.len() == 3).await;
    let aborted = run.host.books().aborted.clone();
    assert!(aborted[&id(1)].contains("expected a JSON object, got \"{reward}\""), "{}", aborted[&id(1)]);
    assert!(aborted[&id(2)].contains("got a line of 100001 that starts with \"{xxx"), "{}", aborted[&id(2)]);
    assert!(aborted[&id(3)].contains("more than 131072 bytes"), "{}", aborted[&id(3)]);
    run.stop().await;
}

#[tokio::test]
async fn a_worker_that_ends_or_talks_while_idle_is_replaced_at_no_episodes_cost() {
    // The first ends by itself, the second answers without being asked, the third is good.
    let body = format!(
        r#"[ -e $DIR/one ] || {{ touch $DIR/one; echo $$ >> $DIR/pids; exit 0; }}
        [ -e $DIR/two ] || {{ touch $DIR/two; echo '{{"episode":"x","reward":1}}'; }}
        {}"#,
        worker("reward 1")
    );
    let run = Run::start(Worker, &body, [], unchanged);
    let replaced = || run.stats().worker_restarts == 2;
    wait_for("the third worker", replaced, || format!("{:?}", run.stats())).await;
    run.host.books().queue.push_back(episode(1));
    run.host.until("an end", |b| b.ended.len() == 1).await;
    let (stats, host) = run.stop().await;
    assert_eq!((stats.worker_restarts, host.books().aborted.len()), (2, 0));
}

#[tokio::test]
async fn a_worker_that_cannot_be_started_takes_no_episode() {
    let run = Run::start(Worker, "", (1..=3).map(episode), |c| c.command = vec!["no-such-agent-anywhere".into()]);
    let named = || run.stats().last_failure.is_some_and(|f| f.contains("no such program in PATH"));
    wait_for("a failure", named, || format!("{:?}", run.stats())).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let (stats, host) = run.stop().await;
    let books = host.books();
    assert_eq!((stats.started, books.queue.len(), books.claims.len()), (0, 3, 0));
}

#[tokio::test]
async fn shutdown_ends_idle_and_busy_workers() {
    let body = worker("sleep 600 & echo $! >> $DIR/pids; wait");
    let run = Run::start(Worker, &body, [episode(1)], |c| c.slots = 3);
    run.pids("pids", 4).await;
    let (stats, _) = run.stop().await; // checks the processes
    assert_eq!(stats.aborted, [("shutdown", 1)].into());
}
