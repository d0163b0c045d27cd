//! What is run, how many at once, and within which limits.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// How the program is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentMode {
    /// A process for each episode.
    PerEpisode,
    /// Long-lived processes, each handed one episode after another.
    Worker,
}

/// Settings of a [`crate::Runner`].
#[derive(Clone, Debug)]
pub struct RunnerConfig {
    /// Program and arguments. A program with a `/` in it is resolved once, against `working_dir`.
    pub command: Vec<String>,
    /// A process for each episode, or workers.
    pub mode: AgentMode,
    /// Episodes at once; in worker mode also the number of worker processes. Default 4. Each costs whatever the
    /// program costs; the runner itself needs about 100 KiB and three file descriptors for it.
    pub slots: usize,
    /// Longest an episode may take. Default 10 minutes: long for an agent, short beside a night of training.
    pub time_limit: Duration,
    /// How long a program has between SIGTERM and SIGKILL. Default 2 s.
    pub kill_grace: Duration,
    /// Task sets that this agent takes; `None` for all. The host should not hand out others: they are aborted.
    pub sets: Option<Vec<String>>,
    /// Where the programs run, so that relative paths among the arguments keep their meaning. Default: where the node
    /// was started.
    pub working_dir: PathBuf,
    /// Under it each process gets a folder of its own, `TMPDIR` and `STARLING_SCRATCH` to the program, which is removed
    /// when the process is gone. Default: the system's folder for temporary files.
    pub scratch_dir: PathBuf,
    /// Environment variables handed through besides `PATH`, `HOME`, `LANG`, `LC_ALL`, `TZ`, `USER`. Default none.
    pub pass_env: Vec<String>,
    /// Environment variables set on top. Default none.
    pub env: BTreeMap<String, String>,
    /// Most bytes of standard output in an episode, the rest aborts it. Default 16 MiB. Memory stays bounded whatever
    /// it is: one line (64 KiB) and the last result are kept.
    pub stdout_len_bytes_max: u64,
    /// Most virtual memory of a process (`RLIMIT_AS`). Default none: Python with numpy reserves gigabytes it never uses.
    pub memory_len_bytes_max: Option<u64>,
    /// Largest file that a process may write (`RLIMIT_FSIZE`). Default 1 GiB.
    pub file_len_bytes_max: Option<u64>,
}

impl RunnerConfig {
    /// The defaults for a command.
    #[must_use]
    pub fn new(command: Vec<String>, mode: AgentMode) -> Self {
        Self {
            command,
            mode,
            slots: 4,
            time_limit: Duration::from_secs(600),
            kill_grace: Duration::from_secs(2),
            sets: None,
            working_dir: PathBuf::from("."),
            scratch_dir: std::env::temp_dir(),
            pass_env: Vec::new(),
            env: BTreeMap::new(),
            stdout_len_bytes_max: 16 << 20,
            memory_len_bytes_max: None,
            file_len_bytes_max: Some(1 << 30),
        }
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`ConfigError`] for the first field that is wrong.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let field = |field, expected, got: String| Err(ConfigError { field, expected, got });
        if self.command.first().is_none_or(String::is_empty) {
            return field("command", "a program and its arguments", format!("{:?}", self.command));
        }
        if !(1..=SLOTS_MAX).contains(&self.slots) {
            return field("slots", "1 to 4096", self.slots.to_string());
        }
        if self.time_limit.is_zero() {
            return field("time_limit", "more than 0", format!("{:?}", self.time_limit));
        }
        if self.sets.as_ref().is_some_and(Vec::is_empty) {
            return field("sets", "at least one set, or none given for all", "an empty list".into());
        }
        if self.stdout_len_bytes_max == 0 {
            return field("stdout_len_bytes_max", "more than 0", "0".into());
        }
        for (name, dir) in [("working_dir", &self.working_dir), ("scratch_dir", &self.scratch_dir)] {
            if !dir.is_dir() {
                return field(name, "an existing folder", dir.display().to_string());
            }
        }
        Ok(())
    }
}

/// Most slots: with three descriptors each they stay far under a limit of 65536.
pub(crate) const SLOTS_MAX: usize = 4096;

/// A setting that cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("agent runner: field `{field}`: expected {expected}, got {got}")]
pub struct ConfigError {
    /// Which one.
    pub field: &'static str,
    /// What it must be.
    pub expected: &'static str,
    /// What it is.
    pub got: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_setting_is_named_with_its_value() {
        let good = RunnerConfig::new(vec!["true".into()], AgentMode::Worker);
        assert_eq!(good.validate(), Ok(()));
        let bad = RunnerConfig { slots: 0, ..good.clone() };
        assert_eq!(bad.validate().unwrap_err().to_string(), "agent runner: field `slots`: expected 1 to 4096, got 0");
        assert!(RunnerConfig { command: vec![], ..good.clone() }.validate().is_err());
        assert!(RunnerConfig { sets: Some(vec![]), ..good.clone() }.validate().is_err());
        assert!(RunnerConfig { scratch_dir: "/no/such/folder".into(), ..good }.validate().is_err());
    }
}
