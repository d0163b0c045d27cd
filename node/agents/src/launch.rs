//! Starts agent programs, all from one thread.

use crate::cause::AbortCause;
use crate::config::{ConfigError, RunnerConfig};
use crate::guard::{Guard, GuardProcess, announce};
use crate::process::{Group, Process, Started};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread::JoinHandle;
use tokio::sync::oneshot;

/// What every program gets of the node's environment.
const PASSED_ENV: [&str; 6] = ["PATH", "HOME", "LANG", "LC_ALL", "TZ", "USER"];

struct Request {
    env: Vec<(&'static str, String)>,
    reply: oneshot::Sender<io::Result<Started>>,
}

/// Starts programs on a thread of its own, for two reasons: a fork of a large process takes milliseconds, and
/// `PR_SET_PDEATHSIG` fires when the *thread* that forked ends, which tokio's threads may do at any time.
#[derive(Debug)]
pub(crate) struct Launcher {
    requests: Option<mpsc::SyncSender<Request>>,
    thread: Option<JoinHandle<()>>,
    program: String,
}

impl Launcher {
    /// Starts the thread and the guard process.
    pub(crate) fn start(config: &RunnerConfig) -> io::Result<Self> {
        let recipe = Recipe::new(config)?;
        let program = recipe.program.display().to_string();
        // Each slot waits for its one request, so the channel never fills.
        let (requests, inbox) = mpsc::sync_channel::<Request>(config.slots);
        let thread = std::thread::Builder::new().name("agent-launcher".into()).spawn(move || {
            let guard = GuardProcess::start();
            for Request { env, reply } in inbox {
                let started = recipe.launch(&env, guard.guard());
                // A program that nobody waits for any more is dropped, and so killed.
                drop(reply.send(started));
            }
        })?;
        Ok(Self { requests: Some(requests), thread: Some(thread), program })
    }

    /// Starts the program with `env` on top of the clean environment.
    pub(crate) async fn launch(&self, env: Vec<(&'static str, String)>) -> Result<Process, AbortCause> {
        let failed = |reason: String| AbortCause::Launch { program: self.program.clone(), reason };
        let (reply, answer) = oneshot::channel();
        let sent = self.requests.as_ref().is_some_and(|r| r.try_send(Request { env, reply }).is_ok());
        if !sent {
            return Err(failed("the launcher is gone".into()));
        }
        let started = answer.await.map_err(|_gone| failed("the launcher is gone".into()))?;
        started.and_then(Process::from_started).map_err(|err| failed(err.to_string()))
    }

    /// Ends the thread and the guard process, and waits for both.
    pub(crate) async fn stop(mut self) {
        let (requests, thread) = (self.requests.take(), self.thread.take());
        drop(requests);
        if let Some(thread) = thread {
            // Neither a panic of the thread nor of the waiting task leaves anything to be done here.
            let _ended = tokio::task::spawn_blocking(move || thread.join()).await;
        }
    }
}

struct Recipe {
    program: PathBuf,
    args: Vec<String>,
    env: Vec<(String, String)>,
    working_dir: PathBuf,
    scratch_dir: PathBuf,
    memory_len_bytes_max: Option<u64>,
    file_len_bytes_max: Option<u64>,
}

impl Recipe {
    fn new(config: &RunnerConfig) -> io::Result<Self> {
        let invalid = |err: ConfigError| io::Error::new(io::ErrorKind::InvalidInput, err);
        config.validate().map_err(invalid)?;
        let working_dir = config.working_dir.canonicalize()?;
        // A program that has no folder in its name is looked up in PATH.
        let program = match config.command[0].contains('/') {
            true => working_dir.join(&config.command[0]),
            false => config.command[0].clone().into(),
        };
        let passed = PASSED_ENV.into_iter().chain(config.pass_env.iter().map(String::as_str));
        let mut env: Vec<_> = passed.filter_map(|name| Some((name.to_owned(), std::env::var(name).ok()?))).collect();
        env.extend(config.env.clone());
        Ok(Self {
            program,
            args: config.command[1..].to_vec(),
            env,
            working_dir,
            scratch_dir: config.scratch_dir.canonicalize()?,
            memory_len_bytes_max: config.memory_len_bytes_max,
            file_len_bytes_max: config.file_len_bytes_max,
        })
    }

    fn launch(&self, env: &[(&'static str, String)], guard: Guard) -> io::Result<Started> {
        let scratch = tempfile::Builder::new().prefix("starling-agent-").tempdir_in(&self.scratch_dir)?;
        let mut command = Command::new(&self.program);
        command
            .args(&self.args)
            .env_clear()
            .envs(self.env.iter().map(|(k, v)| (k, v)))
            .envs(["TMPDIR", "STARLING_SCRATCH"].map(|name| (name, scratch.path())))
            .envs(env.iter().map(|(k, v)| (k, v)))
            .current_dir(&self.working_dir)
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let limits = [
            (libc::RLIMIT_AS, self.memory_len_bytes_max),
            (libc::RLIMIT_FSIZE, self.file_len_bytes_max),
            (libc::RLIMIT_CORE, Some(0)),
        ];
        // SAFETY: `getpid` has no preconditions.
        let parent = unsafe { libc::getpid() };
        let descriptor = guard.descriptor();
        // SAFETY: between fork and exec the closure calls only system calls that are async-signal-safe, and allocates
        // nothing: an error code becomes an `io::Error` without memory. It runs after the new group was made.
        unsafe {
            command.pre_exec(move || {
                die_with(parent)?;
                if let Some(descriptor) = descriptor {
                    announce(descriptor);
                }
                limits.iter().try_for_each(|(resource, max)| max.map_or(Ok(()), |max| limit(*resource, max)))
            })
        };
        let child = command.spawn().map_err(|err| {
            guard.forget_announced();
            explain(err, &self.program, &self.working_dir)
        })?;
        Ok(Started { group: Group::new(child, guard), scratch })
    }
}

#[cfg(target_os = "linux")]
fn die_with(parent: libc::pid_t) -> io::Result<()> {
    // SAFETY: plain system calls with integer arguments.
    let (set, now) = unsafe { (libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL), libc::getppid()) };
    match (set, now == parent) {
        (-1, _) => Err(io::Error::last_os_error()),
        // The node died before the wish was registered.
        (_, false) => Err(io::Error::from_raw_os_error(libc::ESRCH)),
        (_, true) => Ok(()),
    }
}

#[cfg(not(target_os = "linux"))]
#[expect(clippy::unnecessary_wraps, reason = "the same signature as on Linux")]
fn die_with(_parent: libc::pid_t) -> io::Result<()> {
    Ok(()) // the guard process does it alone
}

#[cfg(target_os = "linux")]
type Resource = libc::__rlimit_resource_t;
#[cfg(not(target_os = "linux"))]
type Resource = libc::c_int;

fn limit(resource: Resource, max: u64) -> io::Result<()> {
    let value = libc::rlimit { rlim_cur: max, rlim_max: max };
    // SAFETY: `value` lives across the call.
    match unsafe { libc::setrlimit(resource, &raw const value) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn explain(err: io::Error, program: &Path, working_dir: &Path) -> io::Error {
    let hint = match err.kind() {
        io::ErrorKind::NotFound if program.is_absolute() => "no such program, or its interpreter is missing",
        io::ErrorKind::NotFound => "no such program in PATH; write ./NAME for one in the working directory",
        io::ErrorKind::PermissionDenied => "not executable for this user; is the x bit set?",
        _ => return err,
    };
    io::Error::new(err.kind(), format!("{err} ({hint}; working directory {})", working_dir.display()))
}
