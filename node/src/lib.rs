//! The `starling` program: configuration, the running node, HTTP, and the command line.

pub mod admin;
mod admin_store;
pub mod backend;
pub mod bench;
pub mod cli;
pub mod commands;
pub mod data_dir;
pub mod demo;
pub mod embedded;
pub mod host;
pub mod job_file;
pub mod listening;
pub mod model_files;
pub mod pretrain;
pub mod run;
pub mod settings;
pub mod units;

use serde::Serialize;
use std::fmt;
use std::io::Write;

/// What the user gave is wrong: exit code 2.
#[derive(Debug)]
pub struct BadInput(anyhow::Error);

impl BadInput {
    /// Marks an error as the user's.
    pub fn wrap(e: impl Into<anyhow::Error>) -> anyhow::Error {
        anyhow::Error::new(Self(e.into()))
    }
}

impl fmt::Display for BadInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#}", self.0)
    }
}

impl std::error::Error for BadInput {}

/// Prints facts: as JSON, or as text for people. A closed pipe is not an error.
///
/// # Errors
/// When standard output fails otherwise.
pub fn print<T: Serialize>(json: bool, facts: &T, text: impl FnOnce() -> String) -> anyhow::Result<()> {
    let out = if json { serde_json::to_string_pretty(facts)? } else { text() };
    match writeln!(std::io::stdout(), "{out}") {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        r => Ok(r?),
    }
}
