//! Kills process groups when the node dies without having had the time to do so.
//!
//! `PR_SET_PDEATHSIG` reaches only the direct child, and `sh -c` or `uv run` put the real program one level below. So
//! each runner keeps one small shell that reads from a pipe which groups are alive. When the node is gone, however it
//! went, the pipe ends and the shell kills what is left.

use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

/// `+ PGID` adds a group, `- PGID` takes it out, the end of input kills what is left.
const SCRIPT: &str = r#"
trap '' TERM INT HUP QUIT
live=' '
while read -r op group; do
  case $op in
    +) live="$live$group " ;;
    -) case $live in *" $group "*) live="${live%%" $group "*} ${live#*" $group "}" ;; esac ;;
  esac
done
for group in $live; do kill -KILL "-$group"; done
"#;

/// The writing end; clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Guard {
    pipe: Arc<Mutex<Option<ChildStdin>>>,
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
        Self { guard: Guard { pipe: Arc::new(Mutex::new(pipe)) }, child }
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
    /// The group is alive: kill it if the node dies.
    pub(crate) fn add(&self, group: libc::pid_t) {
        self.tell('+', group);
    }

    /// The group is gone. Call it before the leader is reaped, while the number cannot belong to anybody else.
    pub(crate) fn remove(&self, group: libc::pid_t) {
        self.tell('-', group);
    }

    fn tell(&self, op: char, group: libc::pid_t) {
        let mut pipe = self.pipe.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(writer) = pipe.as_mut() {
            // Shorter than PIPE_BUF: written whole or not at all.
            if let Err(err) = writer.write_all(format!("{op} {group}\n").as_bytes()) {
                tracing::warn!(%err, "the guard process is gone: an agent's own children may outlive a killed node");
                *pipe = None;
            }
        }
    }
}
