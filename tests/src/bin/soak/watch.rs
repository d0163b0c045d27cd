//! What is looked at all the time: memory, open files and disk of every process, and what every node says.

use crate::log::Log;
use crate::patience::Meter;
use serde_json::{Value, json};
use starling_tests::Space;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

const SAMPLE_EVERY: Duration = Duration::from_secs(10);
const STATUS_EVERY: Duration = Duration::from_secs(5);
/// A node on a starved machine may be slow to answer; longer than this it counts as not having answered.
const ANSWER_LIMIT: Duration = Duration::from_secs(15);

/// What the watchers need to know of a node. The run keeps it current.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shown {
    pub(crate) name: String,
    /// Number of its starts.
    pub(crate) life: u32,
    /// While it runs.
    pub(crate) pid: Option<u32>,
    /// It answers requests: it is not just starting, and not paused.
    pub(crate) answers: bool,
    pub(crate) http: String,
    pub(crate) token: String,
    pub(crate) data: PathBuf,
    /// The namespace that it runs in.
    pub(crate) space: Option<Space>,
}

pub(crate) type Board = Rc<RefCell<Vec<Shown>>>;

pub(crate) async fn sample(board: Board, log: Rc<Log>) {
    let mut beat = tokio::time::interval(SAMPLE_EVERY);
    beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        beat.tick().await;
        let nodes = board.borrow().clone();
        for node in nodes {
            let Some(pid) = node.pid else { continue };
            let Some(line) = sample_line(&node, pid) else { continue };
            log.sample(&format!("{:.1},{line}", log.now()));
        }
    }
}

/// `None` when the process is gone.
fn sample_line(node: &Shown, pid: u32) -> Option<String> {
    let proc = PathBuf::from(format!("/proc/{pid}"));
    let status = std::fs::read_to_string(proc.join("status")).ok()?;
    let field = |name: &str| {
        let line = status.lines().find_map(|l| l.strip_prefix(name))?;
        line.trim_start_matches(':').split_whitespace().next()?.parse::<u64>().ok()
    };
    let files = std::fs::read_dir(proc.join("fd")).ok()?.count();
    let (rss, anon, file) = (field("VmRSS")?, field("RssAnon")?, field("RssFile")?);
    let (threads, bytes) = (field("Threads")?, folder_bytes(&node.data));
    Some(format!("{},{},{pid},{rss},{anon},{file},{files},{threads},{bytes}", node.name, node.life))
}

/// Bytes of all files in a folder. Files vanish meanwhile.
pub(crate) fn folder_bytes(folder: &Path) -> u64 {
    let mut sum = 0;
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        match entry.metadata() {
            Ok(m) if m.is_dir() => sum += folder_bytes(&entry.path()),
            Ok(m) => sum += m.len(),
            Err(_) => {}
        }
    }
    sum
}

pub(crate) async fn statuses(board: Board, log: Rc<Log>, client: reqwest::Client) {
    let mut beat = tokio::time::interval(STATUS_EVERY);
    beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut meters: BTreeMap<u32, Meter> = BTreeMap::new();
    loop {
        beat.tick().await;
        let nodes = board.borrow().clone();
        meters.retain(|pid, _| nodes.iter().any(|n| n.pid == Some(*pid)));
        let mut asked = tokio::task::JoinSet::new();
        for node in nodes.into_iter().filter(|n| n.pid.is_some() && n.answers) {
            let (log, client) = (log.clone(), client.clone());
            let starved = node.pid.map(|pid| meters.entry(pid).or_insert_with(|| Meter::new(&[pid])).look(&[pid]).1);
            asked.spawn_local(async move {
                let begun = Instant::now();
                let answer = get(&client, &node, "/status").await;
                let ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
                let facts = match answer {
                    Ok(status) => slim(&status),
                    Err(why) => json!({ "unanswered": why }),
                };
                let mut facts = facts;
                facts["life"] = json!(node.life);
                facts["ms"] = json!(ms);
                facts["starved"] = json!(starved);
                log.status(&node.name, &facts);
            });
        }
        while asked.join_next().await.is_some() {}
    }
}

/// GET of an admin route of a node.
pub(crate) async fn get(client: &reqwest::Client, node: &Shown, route: &str) -> Result<Value, String> {
    let request = client.get(format!("{}/starling/v1{route}", node.http)).bearer_auth(&node.token);
    let response = request.timeout(ANSWER_LIMIT).send().await.map_err(|e| format!("{e:?}"))?;
    let status = response.status();
    let text = response.text().await.map_err(|e| format!("{e:?}"))?;
    if !status.is_success() {
        return Err(format!("{status}: {text}"));
    }
    serde_json::from_str(&text).map_err(|e| format!("{e}: {text}"))
}

/// What the verdict needs of a status.
fn slim(status: &Value) -> Value {
    let m = &status["models"][0];
    let jobs: Vec<&Value> = m["jobs"].as_array().into_iter().flatten().filter(|j| j["end"].is_null()).collect();
    json!({
        "version": m["version"], "term": m["term"], "leads": m["is_leader"], "leader": m["leader"],
        "wait": m["wait"], "activity": m["activity"], "jobs_open": jobs.len(),
        "doing": status["doing"], "members": status["members"].as_array().map_or(0, Vec::len),
        "agents": status["agents"], "episodes_open": status["episodes_open"], "client": status["client"],
        "store": status["store"],
    })
}
