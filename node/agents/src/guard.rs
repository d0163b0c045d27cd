//! Kills process groups when the node dies without having had the time to do so.
//!
//! `PR_SET_PDEATHSIG` reaches only the direct child, and `sh -c` or `uv run` put the real program one level below. So
//! each runner keeps one small shell that reads from a pipe which groups are alive. When the node is gone, however it
//! went, the pipe ends and the shell kills what is left.

use std::io::{self, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// `? GROUP` comes from a child before it becomes the program, `+ GROUP` from the runner when it has, `x` when it could not;
/// `- GROUP` when the group is gone. The end of input kills what is left. There is one launch at a time.
const SCRIPT: &str = r#"
trap '' TERM INT HUP QUIT
live=' ' starting=
while read -r op group; do
  case $op in
    '?') starting=$group ;;
    x) starting= ;;
    +) live="$live$group " starting= ;;
    -) case $live in *" $group "*) live="${live%%" $group "*} ${live#*" $group "}" ;; esac ;;
  esac
done
for group in $live $starting; do kill -KILL "-$group"; done
"#;

/// The writing end; clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Guard {
    pipe: Arc<Mutex<Option<ChildStdin>>>,
    /// Set when a message could not be written; said once.
    failed: Arc<AtomicBool>,
}

/// The shell itself; dropping it closes the pipe and waits for the shell's end.
#[derive(Debug)]
pub(crate) struct GuardProcess {
    guard: Guard,
    child: Option<Child>,
}

impl GuardProcess {
    /// Starts the shell. Without one (no `sh`), programs still get `PR_SET_PDEATHSIG`; this is logged.
    pub(crate) fn start() -> Self {
        let started = Self::spawn();
        if let Err(err) = &started {
            tracing::warn!(%err, "no guard process: an agent's own children may outlive a node that is killed with -9");
        }
        let (child, pipe) = started.map_or((None, None), |(child, pipe)| (Some(child), Some(pipe)));
        Self { guard: Guard { pipe: Arc::new(Mutex::new(pipe)), failed: Arc::default() }, child }
    }

    fn spawn() -> io::Result<(Child, ChildStdin)> {
        let mut child = Command::new("/bin/sh")
            .args(["-c", SCRIPT])
            .env_clear()
            .current_dir("/")
            .process_group(0) // a Ctrl-C at the node's terminal must not reach it
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let pipe = child.stdin.take().ok_or_else(|| io::Error::other("no pipe to the guard process"))?;
        // A guard that somebody stopped must not block the runner: then its messages are lost instead.
        // SAFETY: `fcntl` on a descriptor that `pipe` owns, with integer arguments.
        let set = unsafe { libc::fcntl(pipe.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
        if set == -1 { Err(io::Error::last_os_error()) } else { Ok((child, pipe)) }
    }

    pub(crate) fn guard(&self) -> Guard {
        self.guard.clone()
    }
}

impl Drop for GuardProcess {
    fn drop(&mut self) {
        drop(self.guard.pipe.lock().unwrap_or_else(PoisonError::into_inner).take());
        if let Some(mut child) = self.child.take() {
            // It has only a short loop left, so this wait is one too. A failure means it is gone already.
            let _gone = child.wait();
        }
    }
}

impl Guard {
    /// For a child that is about to become the program: see [`announce`].
    pub(crate) fn descriptor(&self) -> Option<RawFd> {
        self.pipe.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(AsRawFd::as_raw_fd)
    }

    /// The child that announced itself did not become a program.
    pub(crate) fn forget_announced(&self) {
        self.tell("x\n");
    }

    /// The group is alive: kill it if the node dies.
    pub(crate) fn add(&self, group: libc::pid_t) {
        self.tell(&format!("+ {group}\n"));
    }

    /// The group is gone. Call it before the leader is reaped, while the number cannot belong to anybody else.
    pub(crate) fn remove(&self, group: libc::pid_t) {
        self.tell(&format!("- {group}\n"));
    }

    fn tell(&self, message: &str) {
        let mut pipe = self.pipe.lock().unwrap_or_else(PoisonError::into_inner);
        // Shorter than PIPE_BUF: written whole or not at all. After a failure the descriptor stays open, because a
        // child that is being started may be about to use its number.
        if let Some(Err(err)) = pipe.as_mut().map(|pipe| pipe.write_all(message.as_bytes()))
            && !self.failed.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(%err, "the guard process is gone: an agent's own children may outlive a killed node");
        }
    }
}

/// Tells the guard of the calling process, which leads a new group. Between the fork and the first word of the runner the
/// program may have started children, and the node may die: so the child speaks for itself before there is a program.
///
/// Async-signal-safe: it allocates nothing and calls only getpid, write and signal.
pub(crate) fn announce(guard: RawFd) {
    // SAFETY: `getpid` has no preconditions.
    let mut pid = unsafe { libc::getpid() }.unsigned_abs();
    // Written from the end: a newline, at most ten digits, a blank and a question mark.
    let mut buffer = [b'\n'; 13];
    let mut at = buffer.len() - 1;
    while pid > 0 {
        at -= 1;
        buffer[at] = b"0123456789"[(pid % 10) as usize];
        pid /= 10;
    }
    (buffer[at - 1], buffer[at - 2]) = (b' ', b'?');
    let message = &buffer[at - 2..];
    // SAFETY: the message lives across the call; the descriptor is open or the call fails. A guard that is gone must not
    // end the child with SIGPIPE, which is back to its default here.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_IGN);
        libc::write(guard, message.as_ptr().cast(), message.len());
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
    }
}
