//! `job.toml` files for tests.

use crate::binaries::repository;
use anyhow::Context;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// A small job on the embedded model, without evaluation.
#[derive(Clone, Debug)]
pub struct Job {
    /// For people; also the file's name.
    pub name: String,
    /// Optimizer steps.
    pub steps: u64,
    /// Groups in a step.
    pub groups_per_step: u32,
    /// Episodes in a group.
    pub group_size: u32,
    /// Seconds until a silent episode goes to another.
    pub lease_ttl_s: u64,
    /// The optimizer's moments are kept with every n-th step.
    pub optimizer_state_every: u64,
    /// Seed of tasks and sampling.
    pub seed: u64,
    /// Folders under `tasks/`.
    pub sets: Vec<&'static str>,
}

impl Job {
    /// `steps` steps of one group of two on sums.
    #[must_use]
    pub fn tiny(name: &str, steps: u64) -> Self {
        Self {
            name: name.into(),
            steps,
            groups_per_step: 1,
            group_size: 2,
            lease_ttl_s: 60,
            optimizer_state_every: 1,
            seed: 1,
            sets: vec!["sums"],
        }
    }

    /// The file's text.
    #[must_use]
    pub fn toml(&self) -> String {
        let Self { name, steps, groups_per_step, group_size, lease_ttl_s, optimizer_state_every, seed, sets } = self;
        let mut text = format!(
            "name = {name:?}\nseed = {seed}\nsteps = {steps}\ngroups_per_step = {groups_per_step}\n\
             group_size = {group_size}\nlease_ttl_s = {lease_ttl_s}\n\
             optimizer_state_every = {optimizer_state_every}\n\n[model]\nname = {model:?}\n\n\
             [sampling]\nmax_tokens = 24\n\n[trainer]\nlearning_rate = 1e-5\n",
            model = crate::MODEL,
        );
        for set in sets {
            let train = repository().join("tasks").join(set).join("train.jsonl");
            // A text cannot fail to be written to.
            let _ = write!(text, "\n[[tasks]]\nname = {set:?}\ntrain = {:?}\n", train.display().to_string());
        }
        text
    }

    /// Writes the file into `folder`.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, folder: &Path) -> anyhow::Result<PathBuf> {
        let path = folder.join(format!("{}.toml", self.name));
        std::fs::write(&path, self.toml()).with_context(|| path.display().to_string())?;
        Ok(path)
    }
}
