use crate::support::{Host, config, episode, gone, wait_for};
use starling_agents::{AgentMode, Runner};
use std::process::{Command, Stdio};
use std::sync::Arc;

const NOTES: &str = "STARLING_TEST_KILLED_NODE";

/// Not a test by itself: the node that the next test kills. It runs this binary again.
#[tokio::test(flavor = "multi_thread")]
async fn node_that_will_be_killed() {
    let Ok(dir) = std::env::var(NOTES) else { return };
    let body = r#"
        trap '' TERM HUP; echo $$ >> $DIR/pids
        sh -c 'trap "" TERM HUP; echo $$ >> $DIR/pids; sleep 600; sleep 600' &
        sleep 600 & echo $! >> $DIR/pids; wait; sleep 600
    "#;
    let config = config(AgentMode::PerEpisode, body, dir.as_ref(), |c| c.slots = 2);
    let host = Arc::new(Host::default());
    host.books().queue.extend((1..=2).map(episode));
    Runner::new(config).unwrap().run(host, std::future::pending()).await.unwrap();
}

#[tokio::test]
async fn a_node_killed_with_9_leaves_no_agent_and_no_child_of_one() {
    let dir = tempfile::tempdir().unwrap();
    let mut node = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "killed_node::node_that_will_be_killed"])
        .env(NOTES, dir.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let notes = || std::fs::read_to_string(dir.path().join("pids")).unwrap_or_default();
    let pids = || notes().lines().filter_map(|l| l.trim().parse().ok()).collect::<Vec<u32>>();
    wait_for("six processes", || pids().len() == 6, notes).await;
    node.kill().unwrap();
    node.wait().unwrap();
    for pid in pids() {
        gone(pid).await;
    }
}
