//! Where the programs under test are.

use anyhow::{Context, bail};
use std::path::{Path, PathBuf};

/// The repository's root.
#[must_use]
pub fn repository() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}

/// `starling`.
///
/// # Errors
/// When it is not built.
pub fn starling_binary() -> anyhow::Result<PathBuf> {
    built("starling")
}

/// The example agent in Rust.
///
/// # Errors
/// When it is not built.
pub fn agent_binary() -> anyhow::Result<PathBuf> {
    built("starling-agent-rust")
}

/// The interpreter that has the `openai` package.
///
/// # Errors
/// When the variable is not set: the test must not pass without having run.
pub fn python() -> anyhow::Result<PathBuf> {
    interpreter("STARLING_TEST_PYTHON", "examples/agents/python/requirements.txt")
}

/// The interpreter that has the `anthropic` package.
///
/// # Errors
/// When the variable is not set.
pub fn python_anthropic() -> anyhow::Result<PathBuf> {
    interpreter("STARLING_TEST_PYTHON_ANTHROPIC", "tests/python/requirements-anthropic.txt")
}

fn interpreter(variable: &str, requirements: &str) -> anyhow::Result<PathBuf> {
    let Some(path) = std::env::var_os(variable).map(PathBuf::from) else {
        bail!(
            "{variable}: expected a Python with {requirements} installed, it is not set (scripts/test.sh makes one and \
             sets it)"
        );
    };
    if !path.is_file() {
        bail!("{variable}: {} does not exist", path.display());
    }
    Ok(path)
}

fn built(name: &str) -> anyhow::Result<PathBuf> {
    let folder = match std::env::var_os("STARLING_TEST_BIN") {
        Some(folder) => PathBuf::from(folder),
        // target/release/deps/<test> and target/release/soak → target/release
        None => {
            let own = std::env::current_exe().context("cannot find this program's file")?;
            let folder = own.parent().context("a program lies in a folder")?;
            let profile = if folder.ends_with("deps") { folder.parent() } else { Some(folder) };
            profile.context("a test's binary lies in target/<profile>/deps")?.to_owned()
        }
    };
    let path = folder.join(name);
    if !path.is_file() {
        bail!("{} is missing: build it with `make build`, or set STARLING_TEST_BIN to its folder", path.display());
    }
    Ok(path)
}
