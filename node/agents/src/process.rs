//! A running program and everything in its process group.

use crate::cause::Stderr;
use crate::guard::Guard;
use crate::lines::{LineReader, Tail};
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tempfile::TempDir;
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncReadExt, Interest};
use tokio::process::{ChildStderr, ChildStdin, ChildStdout};
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// How often an exit is looked for where the kernel has no pidfd.
const EXIT_POLL: Duration = Duration::from_millis(10);
/// How long output is read after the group was killed: only a process that left the group can still hold the pipe.
pub(crate) const DRAIN_LIMIT: Duration = Duration::from_secs(1);

/// A process group, led by the program that was started. Killed whole and reaped on drop.
#[derive(Debug)]
pub(crate) struct Group {
    child: Child,
    id: libc::pid_t,
    guard: Guard,
    reaped: Option<ExitStatus>,
}

impl Group {
    /// Takes over `child`, which leads a process group of its own.
    pub(crate) fn new(child: Child, guard: Guard) -> Self {
        let id = libc::pid_t::try_from(child.id()).unwrap_or_else(|_| unreachable!("process ids are positive i32"));
        guard.add(id);
        Self { child, id, guard, reaped: None }
    }

    fn signal(&self, signal: libc::c_int) {
        // Until the leader is reaped the number cannot belong to another group.
        if self.reaped.is_none() {
            // SAFETY: `kill` on a process group that is ours, with integer arguments. It fails only when nobody is
            // left in the group, which is what it is for.
            unsafe { libc::kill(-self.id, signal) };
        }
    }

    /// Kills the group and reaps its leader. Returns soon: SIGKILL cannot be refused.
    fn finish(&mut self) -> io::Result<ExitStatus> {
        if let Some(status) = self.reaped {
            return Ok(status);
        }
        self.signal(libc::SIGKILL);
        self.guard.remove(self.id);
        let status = self.child.wait()?;
        self.reaped = Some(status);
        Ok(status)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Err(err) = self.finish() {
            tracing::warn!(%err, pid = self.id, "agent process could not be reaped");
        }
    }
}

/// A started program, not yet tied to tokio.
#[derive(Debug)]
pub(crate) struct Started {
    pub(crate) group: Group,
    pub(crate) scratch: TempDir,
}

/// A program with its pipes and its scratch folder.
#[derive(Debug)]
pub(crate) struct Process {
    /// Taken by who writes to it.
    pub(crate) stdin: Option<ChildStdin>,
    /// Lines of standard output.
    pub(crate) stdout: LineReader<ChildStdout>,
    /// Tells when the program has ended.
    pub(crate) exit: ExitWatch,
    stderr: Arc<Mutex<Tail>>,
    /// Reads standard error until it ends.
    stderr_task: Option<JoinHandle<()>>,
    // Fields drop in this order: first the group dies, then its folder goes.
    group: Group,
    scratch: TempDir,
}

impl Process {
    /// Ties a started program to the runtime.
    pub(crate) fn from_started(started: Started) -> io::Result<Self> {
        let Started { mut group, scratch } = started;
        let missing = || io::Error::other("a pipe of the program is missing");
        let stdin = ChildStdin::from_std(group.child.stdin.take().ok_or_else(missing)?)?;
        let stdout = ChildStdout::from_std(group.child.stdout.take().ok_or_else(missing)?)?;
        let stderr = ChildStderr::from_std(group.child.stderr.take().ok_or_else(missing)?)?;
        let tail = Arc::new(Mutex::new(Tail::default()));
        let stderr_task = Some(tokio::spawn(read_tail(stderr, Arc::clone(&tail))));
        Ok(Self {
            stdin: Some(stdin),
            stdout: LineReader::new(stdout),
            exit: ExitWatch::new(group.id),
            stderr: tail,
            stderr_task,
            group,
            scratch,
        })
    }

    /// After the program has ended: kills what it left in its group, and reaps it. Says how it ended.
    pub(crate) async fn finish(&mut self) -> String {
        let status = self.group.finish();
        if let Some(mut task) = self.stderr_task.take() {
            // With the group dead the pipe ends, and so does this task, unless somebody who left the group holds it.
            if timeout(DRAIN_LIMIT, &mut task).await.is_err() {
                task.abort();
            }
        }
        status.map_or_else(|err| format!("unknown status ({err})"), describe)
    }

    /// Ends the program: SIGTERM, and after `grace` SIGKILL, to the whole group.
    pub(crate) async fn terminate(&mut self, grace: Duration) -> String {
        self.group.signal(libc::SIGTERM);
        if timeout(grace, self.exit.ended()).await.is_err() {
            self.group.signal(libc::SIGKILL);
            self.exit.ended().await;
        }
        self.finish().await
    }

    /// Whether the program ended with exit code 0; after [`Self::finish`].
    pub(crate) fn succeeded(&self) -> bool {
        self.group.reaped.is_some_and(|status| status.success())
    }

    /// The end of standard error, with `secret` blotted out.
    pub(crate) fn stderr_tail(&self, secret: &str) -> Stderr {
        let text = self.stderr.lock().unwrap_or_else(PoisonError::into_inner).text();
        Stderr(if secret.is_empty() { text } else { text.replace(secret, "[key]") })
    }

    /// Forgets standard error so far, so that an episode is not shown what an earlier one wrote.
    pub(crate) fn clear_stderr(&self) {
        self.stderr.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Removes the scratch folder, off the runtime: it may hold gigabytes. The program must have ended.
    pub(crate) async fn discard(self) {
        let Self { scratch, group, .. } = self;
        drop(group);
        let removal = tokio::task::spawn_blocking(move || {
            if let Err(err) = scratch.close() {
                tracing::warn!(%err, "scratch folder of an agent could not be removed");
            }
        });
        // It fails only when the runtime stops, and then dropping the closure removes the folder.
        let _removed = removal.await;
    }
}

async fn read_tail(mut stderr: ChildStderr, tail: Arc<Mutex<Tail>>) {
    let mut buffer = [0; 4096];
    while let Ok(n @ 1..) = stderr.read(&mut buffer).await {
        tail.lock().unwrap_or_else(PoisonError::into_inner).push(&buffer[..n]);
    }
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(libc::SIGKILL)) => "signal 9 (SIGKILL)".into(),
        (None, Some(libc::SIGSEGV)) => "signal 11 (SIGSEGV)".into(),
        (None, Some(libc::SIGTERM)) => "signal 15 (SIGTERM)".into(),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => format!("{status}"),
    }
}

/// Tells when a child has ended, without reaping it: until then its number, and so its group's, stays taken.
#[derive(Debug)]
pub(crate) struct ExitWatch {
    pid: libc::pid_t,
    pidfd: Option<AsyncFd<OwnedFd>>,
}

impl ExitWatch {
    fn new(pid: libc::pid_t) -> Self {
        // SAFETY: the `AsyncFd` owns the open descriptor until it is dropped, and an `OwnedFd` never changes its number.
        let watch = |fd| unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }.ok();
        Self { pid, pidfd: pidfd(pid).and_then(watch) }
    }

    /// Returns when the child has ended. Cancel-safe.
    pub(crate) async fn ended(&self) {
        if let Some(fd) = &self.pidfd
            && fd.readable().await.is_ok()
        {
            return; // without clearing the readiness: an ended process stays ended
        }
        while !self.has_ended() {
            tokio::time::sleep(EXIT_POLL).await;
        }
    }

    /// Whether the child has ended by now.
    pub(crate) fn has_ended(&self) -> bool {
        // SAFETY: an all-zero `siginfo_t` is a valid value of this plain C struct.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        let id = libc::id_t::try_from(self.pid).unwrap_or_else(|_| unreachable!("process ids are positive"));
        let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
        // SAFETY: `info` lives across the call; the child is ours and stays unreaped.
        let failed = unsafe { libc::waitid(libc::P_PID, id, &raw mut info, flags) } == -1;
        // SAFETY: `waitid` filled the struct in or left it zero.
        failed || unsafe { info.si_pid() } != 0
    }
}

#[cfg(target_os = "linux")]
fn pidfd(pid: libc::pid_t) -> Option<OwnedFd> {
    // SAFETY: a system call with integer arguments; it returns a new descriptor (close-on-exec) or -1.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, libc::PIDFD_NONBLOCK) };
    let fd = libc::c_int::try_from(fd).ok().filter(|fd| *fd >= 0)?;
    // SAFETY: the descriptor is open and nobody else has it.
    Some(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(not(target_os = "linux"))]
fn pidfd(_pid: libc::pid_t) -> Option<OwnedFd> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guard::{GuardProcess, announce};
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    #[tokio::test]
    async fn an_exit_is_seen_with_and_without_a_pidfd() {
        let guard = GuardProcess::start();
        for with_pidfd in [true, false] {
            let child = Command::new("/bin/sh").args(["-c", "sleep 0.1; exit 3"]).process_group(0).spawn().unwrap();
            let mut group = Group::new(child, guard.guard());
            let mut watch = ExitWatch::new(group.id);
            if !with_pidfd {
                watch.pidfd = None;
            }
            assert!(!watch.has_ended());
            timeout(Duration::from_secs(10), watch.ended()).await.unwrap();
            assert_eq!(describe(group.finish().unwrap()), "exit code 3");
        }
    }

    #[test]
    fn a_guard_kills_what_is_left_when_its_pipe_ends() {
        let spawn = || Command::new("/bin/sleep").arg("60").process_group(0).spawn().unwrap();
        let guard = GuardProcess::start();
        let pid = |child: &Child| libc::pid_t::try_from(child.id()).unwrap();
        let (mut gone, mut kept, mut left) = (spawn(), spawn(), spawn());
        for child in [&gone, &kept, &left] {
            guard.guard().add(pid(child));
        }
        guard.guard().remove(pid(&kept));
        gone.kill().unwrap();
        let descriptor = guard.guard().descriptor().unwrap();
        let mut command = Command::new("/bin/sleep");
        // SAFETY: `announce` is async-signal-safe.
        unsafe {
            command.pre_exec(move || {
                announce(descriptor);
                Ok(())
            })
        };
        let mut starting = command.arg("60").process_group(0).spawn().unwrap();
        drop(guard);
        assert_eq!(describe(left.wait().unwrap()), "signal 9 (SIGKILL)");
        assert_eq!(describe(starting.wait().unwrap()), "signal 9 (SIGKILL)");
        assert!(kept.try_wait().unwrap().is_none(), "a removed group must not be killed");
        kept.kill().unwrap();
        kept.wait().unwrap();
        gone.wait().unwrap();
    }
}
