//! A host that keeps books, programs in temporary folders, and waits with deadlines.

use async_trait::async_trait;
use starling_agents::{
    AgentMode, ClaimOutcome, EpisodeHost, EpisodePurpose, EpisodeStart, Runner, RunnerConfig, RunnerStats,
};
use starling_protocol::EpisodeId;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Long enough for a machine that compiles something else meanwhile.
const DEADLINE: Duration = Duration::from_secs(60);

/// The key of every episode here.
pub(crate) const KEY: &str = "sk-secret-0123456789";

#[derive(Debug, Default)]
pub(crate) struct Books {
    pub(crate) queue: VecDeque<EpisodeStart>,
    pub(crate) open: BTreeSet<EpisodeId>,
    pub(crate) ended: BTreeMap<EpisodeId, (f64, BTreeMap<String, f64>)>,
    pub(crate) aborted: BTreeMap<EpisodeId, String>,
    pub(crate) to_revoke: Vec<EpisodeId>,
    /// The next so many ends are refused.
    pub(crate) refuse_ends: u32,
    pub(crate) end_calls: u32,
    pub(crate) no_renewals: bool,
    /// When, how many were wanted, how many ran.
    pub(crate) claims: Vec<(Instant, usize, usize)>,
}

#[derive(Debug, Default)]
pub(crate) struct Host(Mutex<Books>);

impl Host {
    pub(crate) fn books(&self) -> MutexGuard<'_, Books> {
        self.0.lock().unwrap()
    }

    /// Waits until the books say so.
    pub(crate) async fn until(&self, what: &str, holds: impl Fn(&Books) -> bool) {
        wait_for(what, || holds(&self.books()), || format!("{:#?}", self.books())).await;
    }
}

/// Waits until `holds`, and panics with `shown` after the deadline.
pub(crate) async fn wait_for(what: &str, holds: impl Fn() -> bool, shown: impl Fn() -> String) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < DEADLINE, "{what}: not after {DEADLINE:?}; {}", shown());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[async_trait]
impl EpisodeHost for Host {
    async fn claim(&self, want: usize, running: &[EpisodeId]) -> ClaimOutcome {
        let mut books = self.books();
        books.claims.push((Instant::now(), want, running.len()));
        let n = want.min(books.queue.len());
        let episodes: Vec<_> = books.queue.drain(..n).collect();
        books.open.extend(episodes.iter().map(|e| e.episode));
        let to_revoke = std::mem::take(&mut books.to_revoke);
        let (revoked, later) = to_revoke.into_iter().partition(|e| running.contains(e));
        books.to_revoke = later;
        let wait = (n < want).then(|| "no more episodes in the queue".to_owned());
        ClaimOutcome { episodes, revoked, wait, renewed: !books.no_renewals }
    }

    async fn end(&self, episode: EpisodeId, reward: f64, metrics: BTreeMap<String, f64>) -> Result<(), String> {
        let mut books = self.books();
        books.end_calls += 1;
        if books.refuse_ends > 0 {
            books.refuse_ends -= 1;
            return Err("no holder for the rollout".into());
        }
        assert!(books.open.remove(&episode), "{episode} is not open");
        books.ended.insert(episode, (reward, metrics));
        Ok(())
    }

    async fn abort(&self, episode: EpisodeId, cause: String) {
        let mut books = self.books();
        assert!(books.open.remove(&episode), "{episode} is not open");
        books.aborted.insert(episode, cause);
    }
}

/// An id that tells in a message which episode it was.
pub(crate) fn id(n: u8) -> EpisodeId {
    EpisodeId([n; 16])
}

pub(crate) fn episode(n: u8) -> EpisodeStart {
    EpisodeStart {
        episode: id(n),
        task_line: format!(r#"{{"id":"t-{n}","answer":"{n}"}}"#),
        base_url: "http://127.0.0.1:10086/v1".into(),
        api_key: KEY.into(),
        model: "tiny".into(),
        seed: 7,
        set: "sums".into(),
        task_id: format!("t-{n}"),
        purpose: EpisodePurpose::Train,
        lease_ttl: Duration::from_secs(20),
    }
}

/// A runner at work.
pub(crate) struct Run {
    pub(crate) host: Arc<Host>,
    runner: Runner,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
    dir: TempDir,
}

impl Run {
    /// Runs the shell script `body` for `episodes`; `$DIR` in it is a folder for its notes.
    pub(crate) fn start(
        mode: AgentMode,
        body: &str,
        episodes: impl IntoIterator<Item = EpisodeStart>,
        change: impl FnOnce(&mut RunnerConfig),
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = config(mode, body, dir.path(), change);
        let host = Arc::new(Host::default());
        host.books().queue.extend(episodes);
        let runner = Runner::new(config).unwrap();
        let (stop, stopped) = oneshot::channel();
        let (running, seam) = (runner.clone(), Arc::clone(&host));
        let task = tokio::spawn(async move {
            let stopped = async {
                let _dropped_is_stopped_too = stopped.await;
            };
            running.run(seam, stopped).await.unwrap();
        });
        Self { host, runner, stop, task, dir }
    }

    pub(crate) fn stats(&self) -> RunnerStats {
        self.runner.stats()
    }

    pub(crate) fn note_path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// What the program wrote to `$DIR/name`.
    pub(crate) fn note(&self, name: &str) -> String {
        std::fs::read_to_string(self.note_path(name)).unwrap_or_default()
    }

    /// The process ids in `$DIR/name`, once there are `n` of them.
    pub(crate) async fn pids(&self, name: &str, n: usize) -> Vec<u32> {
        let pids = || self.note(name).lines().filter_map(|l| l.trim().parse().ok()).collect::<Vec<u32>>();
        wait_for("process ids", || pids().len() >= n, || format!("{name}: {:?}", self.note(name))).await;
        pids()
    }

    /// Stops the runner and checks that nothing is left: no process, no scratch folder, no unanswered episode.
    pub(crate) async fn stop(self) -> (RunnerStats, Arc<Host>) {
        let Self { host, runner, stop, task, dir } = self;
        // It may have ended by itself, in a panic that the next line shows.
        let _sent = stop.send(());
        tokio::time::timeout(DEADLINE, task).await.expect("the runner stops").unwrap();
        assert_eq!(host.books().open, BTreeSet::new(), "unanswered episodes");
        let left: Vec<_> = std::fs::read_dir(dir.path().join("scratch")).unwrap().collect();
        assert!(left.is_empty(), "scratch folders left: {left:?}");
        if let Ok(all) = std::fs::read_to_string(dir.path().join("pids")) {
            for pid in all.lines().filter_map(|l| l.trim().parse().ok()) {
                gone(pid).await;
            }
        }
        (runner.stats(), host)
    }
}

/// A configuration that runs the shell script `body` with notes in `dir`.
pub(crate) fn config(mode: AgentMode, body: &str, dir: &Path, change: impl FnOnce(&mut RunnerConfig)) -> RunnerConfig {
    let script = dir.join("agent.sh");
    std::fs::write(&script, body).unwrap();
    let scratch_dir = dir.join("scratch");
    std::fs::create_dir(&scratch_dir).unwrap();
    let mut config = RunnerConfig::new(vec!["/bin/sh".into(), script.display().to_string()], mode);
    config.env.insert("DIR".into(), dir.display().to_string());
    config.scratch_dir = scratch_dir;
    config.slots = 1;
    config.kill_grace = Duration::from_millis(200);
    change(&mut config);
    config
}

/// Waits until a process is gone; one that only waits to be reaped by init counts as gone.
pub(crate) async fn gone(pid: u32) {
    let state = || std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let is_gone = || state().is_empty() || state().contains(") Z ");
    wait_for("the process is gone", is_gone, || format!("{pid} is alive: {}", state())).await;
}
