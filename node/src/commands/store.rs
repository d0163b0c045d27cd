//! `starling store`: what is in a node's store, whether it is intact, and deleting what is of no use.

use super::client::AdminClient;
use crate::data_dir::DataDir;
use crate::print;
use crate::units::show_bytes;
use anyhow::Context;
use serde_json::{Value, json};
use starling_core::consensus::stored_states;
use starling_core::maintenance::{Collected, Collector, Known, MaintenanceConfig};
use starling_protocol::ModelName;
use starling_protocol::control::ModelState;
use starling_protocol::manifest::Manifest;
use starling_storage::stat::{StoreStat, stat as count};
use starling_storage::{RocksOptions, RocksStore, SharedStore, Store, StoreError, quarantine};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// `store stat`: from the running node if there is one, else from its folder.
///
/// # Errors
/// When there is no store, or it cannot be read.
pub async fn stat(data: &DataDir, json: bool) -> anyhow::Result<()> {
    let asked = match AdminClient::of(data) {
        Ok(client) => client.get::<StoreStat>("/store").await.ok(),
        Err(_nobody_runs) => None,
    };
    let s = match asked {
        Some(s) => s,
        None => count(&RocksStore::open_read_only(data.store())?).context("cannot count what is in the store")?,
    };
    print(json, &s, || {
        let room = s.headroom_bytes.map_or("no limit".into(), show_bytes);
        let mut out = format!("size         {} ({room} left)\n", show_bytes(s.size_bytes));
        out.push_str(&format!("chunks       {} ({})\n", s.blobs, show_bytes(s.blob_bytes)));
        for (job, c) in &s.jobs {
            out.push_str(&format!("rollouts     {} of job {job}, {} not consumed\n", c.rollouts, c.unconsumed));
        }
        out.push_str(&format!("acknowledged {}\nquarantined  {}", s.acknowledged, s.quarantined));
        out
    })
}

/// `store fsck`: reads and checks everything, sets aside what is corrupt. Exit code 1 when something is missing or
/// broken that this store alone cannot mend.
///
/// # Errors
/// When the store cannot be opened, with the database's own words: a truncated log, a missing file.
pub fn fsck(data: &DataDir, json: bool) -> anyhow::Result<ExitCode> {
    let store = open(data)?;
    let states = stored_states(&store).context("cannot read the models' states")?;
    let report = starling_storage::fsck(&*store, &needed(&states)).context("cannot check the store")?;
    store.flush()?;
    let findings: Vec<Value> = report
        .findings
        .iter()
        .map(|f| {
            json!({
                "family": f.family.name(), "key": f.key, "fault": f.fault.to_string(),
                "quarantined": f.quarantined, "mended": f.mended,
            })
        })
        .collect();
    let v = json!({
        "blobs": report.blobs.0, "blob_bytes": report.blobs.1,
        "rollouts": report.rollouts.0, "rollout_bytes": report.rollouts.1,
        "findings": findings, "broken": report.is_broken(),
    });
    print(json, &v, || {
        let mut out = format!(
            "read {} chunks ({}) and {} rollouts ({})\n",
            report.blobs.0,
            show_bytes(report.blobs.1),
            report.rollouts.0,
            show_bytes(report.rollouts.1)
        );
        for f in &report.findings {
            let done = match (f.quarantined, f.mended) {
                (true, _) => "quarantined",
                (false, true) => "mended",
                (false, false) => "missing or broken",
            };
            out.push_str(&format!("{done:<18} {}/{}: {}\n", f.family, f.key, f.fault));
        }
        out.push_str(match (report.findings.is_empty(), report.is_broken()) {
            (true, _) => "everything is as it was written",
            (false, false) => "all mended",
            (false, true) => "what is missing is fetched from other holders when the node runs",
        });
        out
    })?;
    Ok(if report.is_broken() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// `store gc`: deletes what is no longer of use, now instead of little by little.
///
/// # Errors
/// When the store cannot be opened or written.
pub fn gc(data: &DataDir, rollouts_kept: Duration, orphans: bool, json: bool) -> anyhow::Result<()> {
    let store = open(data)?;
    let before = store.size_bytes()?;
    let states = stored_states(&store).context("cannot read the models' states")?;
    let models = states.into_iter().map(|(m, s)| (m, Arc::new(s))).collect();
    let known = Known { models, complete: orphans, now: crate::run::wall_clock() };
    let config = MaintenanceConfig { rollouts_kept, orphans_kept: Duration::ZERO, ..MaintenanceConfig::default() };
    let mut collector = Collector::default();
    let mut sum = Collected::default();
    while !sum.wrapped {
        let done = collector.step(&*store, &known, &config, false).context("cannot delete")?;
        sum.rollouts += done.rollouts;
        sum.blobs += done.blobs;
        sum.blob_bytes += done.blob_bytes;
        sum.wrapped = done.wrapped;
    }
    let set_aside = quarantine::quarantined(&*store)?.len();
    quarantine::empty(&*store)?;
    store.reclaim().context("cannot give the space back")?;
    let after = store.size_bytes()?;
    let v = json!({
        "rollouts": sum.rollouts, "blobs": sum.blobs, "blob_bytes": sum.blob_bytes, "quarantined": set_aside,
        "size_before_bytes": before, "size_bytes": after,
    });
    print(json, &v, || {
        format!(
            "deleted {} consumed rollouts, {} chunks ({}) and {set_aside} quarantined values\nsize {}, was {}",
            sum.rollouts,
            sum.blobs,
            show_bytes(sum.blob_bytes),
            show_bytes(after),
            show_bytes(before)
        )
    })
}

/// Opens a stopped node's store for writing, and does not make one.
fn open(data: &DataDir) -> anyhow::Result<SharedStore> {
    if !data.store().join("CURRENT").exists() {
        return Err(StoreError::Missing { path: data.store() }.into());
    }
    match RocksStore::open(data.store(), &RocksOptions::default()) {
        Ok(store) => Ok(Arc::new(store)),
        Err(e @ StoreError::Locked { .. }) => Err(anyhow::Error::new(e)
            .context("stop the node first (`starling store stat` asks a running one for its numbers)")),
        Err(e) => Err(anyhow::Error::new(e).context("cannot open the store")),
    }
}

/// Every manifest in use, with a name for people.
fn needed(states: &[(ModelName, ModelState)]) -> Vec<(String, Manifest)> {
    let mut all = Vec::new();
    for (model, s) in states {
        let mut add = |what: String, m: &Manifest| all.push((format!("{what} of {model}"), m.clone()));
        s.weights.iter().for_each(|m| add(format!("weights of version {}", s.version), m));
        s.optimizer_state.iter().for_each(|(v, m)| add(format!("optimizer state of version {v}"), m));
        s.files.iter().for_each(|(name, m)| add(format!("file {name}"), m));
        for job in s.jobs.iter().filter(|j| j.end.is_none()) {
            for t in &job.spec.tasks {
                let sets = std::iter::once(&t.train).chain(&t.heldout);
                sets.for_each(|m| add(format!("a task set of job {}", job.spec.name), m));
            }
        }
    }
    all
}
