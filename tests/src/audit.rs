//! What the stores of stopped nodes say.

use anyhow::{Context, ensure};
use starling_protocol::control::StepCommitted;
use starling_protocol::{ModelName, RolloutId};
use starling_storage::{AuditReport, RocksStore, SharedStore, audit, steps};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

/// The audit over all stores, and the committed steps of one model.
#[derive(Debug)]
pub struct StoresReport {
    /// Over all stores together.
    pub audit: AuditReport,
    /// By version, from all stores.
    pub steps: BTreeMap<u64, StepCommitted>,
}

impl StoresReport {
    /// Opens the stores read-only; their nodes must have ended. `acknowledged` was acknowledged to the caller, whatever
    /// the stores say of it.
    ///
    /// # Errors
    /// When a store cannot be read or its own versions are out of order.
    pub fn read(stores: &[PathBuf], acknowledged: &[RolloutId]) -> anyhow::Result<Self> {
        let model: ModelName = crate::MODEL.parse().context("the model's name")?;
        let mut opened: Vec<SharedStore> = Vec::new();
        let mut all = BTreeMap::new();
        for path in stores {
            let store = RocksStore::open_read_only(path).with_context(|| path.display().to_string())?;
            let own = steps::steps(&store, &model).with_context(|| path.display().to_string())?;
            for pair in own.windows(2) {
                let (a, b) = (&pair[0], &pair[1]);
                ensure!(
                    a.version.0 < b.version.0 && a.term.0 <= b.term.0,
                    "{}: version {} of term {} comes after version {} of term {}",
                    path.display(),
                    b.version,
                    b.term,
                    a.version,
                    a.term
                );
            }
            all.extend(own.into_iter().map(|s| (s.version.0, s)));
            opened.push(Arc::new(store));
        }
        Ok(Self { audit: audit(&opened, acknowledged.iter().copied())?, steps: all })
    }

    /// Checks every promise that stores can prove: nothing lost, nothing consumed twice, no fork, one chain of
    /// versions from 1 on whose terms never fall.
    ///
    /// # Errors
    /// Names what was broken.
    pub fn ensure_clean(&self) -> anyhow::Result<()> {
        let a = &self.audit;
        ensure!(a.lost.is_empty(), "acknowledged and lost: {:?}", a.lost);
        ensure!(a.consumed_twice.is_empty(), "consumed twice: {:?}", a.consumed_twice);
        ensure!(a.forked_versions.is_empty(), "forked versions: {:?}", a.forked_versions);
        ensure!(a.deposed.is_empty(), "steps of deposed leaders: {:?}", a.deposed);
        ensure!(a.corrupt.is_empty(), "corrupt: {:?}", a.corrupt);
        let mut term = 0;
        for (expected, (version, step)) in (1..).zip(&self.steps) {
            ensure!(*version == expected, "no store has version {expected}; the next one is {version}");
            ensure!(step.term.0 >= term, "version {version}: its term fell from {term} to {}", step.term);
            term = step.term.0;
        }
        Ok(())
    }
}
