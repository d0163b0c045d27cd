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

#[cfg(test)]
mod tests {
    use super::*;
    use starling_storage::blobs::{get_blob, put_blob};
    use starling_storage::suite::noise;
    use starling_storage::{Batch, Durability, Family};

    fn data() -> (tempfile::TempDir, DataDir) {
        let dir = tempfile::tempdir().unwrap();
        let data = DataDir::open(Some(dir.path())).unwrap();
        (dir, data)
    }
    fn code(code: ExitCode) -> String {
        format!("{code:?}")
    }

    #[test]
    fn a_running_nodes_store_is_refused_with_what_to_do_and_a_missing_one_is_not_made() {
        let (_dir, data) = data();
        let err = format!("{:#}", fsck(&data, true).unwrap_err());
        assert!(err.starts_with("there is no store at"), "{err}");
        assert!(!data.store().exists());
        let _running = RocksStore::open(data.store(), &RocksOptions::default()).unwrap();
        for err in [fsck(&data, true).unwrap_err(), gc(&data, Duration::ZERO, false, true).unwrap_err()] {
            let err = format!("{err:#}");
            assert!(err.starts_with("stop the node first") && err.contains("is open elsewhere"), "{err}");
        }
    }

    #[test]
    fn fsck_fails_once_for_a_corrupt_chunk_and_leaves_a_store_that_lacks_it() {
        let (_dir, data) = data();
        let bytes = noise(1, 10_000);
        let hash = {
            let store = RocksStore::open(data.store(), &RocksOptions::default()).unwrap();
            put_blob(&store, &bytes, Durability::Synced).unwrap()
        };
        assert_eq!(code(fsck(&data, true).unwrap()), code(ExitCode::SUCCESS));
        {
            let store = RocksStore::open(data.store(), &RocksOptions::default()).unwrap();
            let mut batch = Batch::new();
            batch.put(Family::Blobs, hash.0, b"bad".to_vec());
            store.write(batch, Durability::Synced).unwrap();
        }
        assert_eq!(code(fsck(&data, true).unwrap()), code(ExitCode::FAILURE));
        assert_eq!(code(fsck(&data, true).unwrap()), code(ExitCode::SUCCESS));
        gc(&data, Duration::ZERO, true, true).unwrap();
        let store = RocksStore::open(data.store(), &RocksOptions::default()).unwrap();
        assert_eq!(get_blob(&store, hash).unwrap(), None);
        assert_eq!(quarantine::quarantined(&store).unwrap(), []);
    }

    #[test]
    fn a_log_that_was_cut_is_told_in_the_databases_words() {
        let (_dir, data) = data();
        {
            let store = RocksStore::open(data.store(), &RocksOptions::default()).unwrap();
            for i in 0..12 {
                put_blob(&store, &noise(i, 1 << 20), Durability::Synced).unwrap();
            }
        }
        let is_log = |p: &std::path::PathBuf| p.extension().is_some_and(|e| e == "log");
        let files = std::fs::read_dir(data.store()).unwrap().map(|e| e.unwrap().path());
        let mut logs: Vec<_> = files.filter(is_log).collect();
        logs.sort();
        assert!(logs.len() > 1, "{logs:?}");
        // Cut in the middle, as a disk that lied about a sync leaves it.
        let file = std::fs::OpenOptions::new().write(true).open(&logs[0]).unwrap();
        file.set_len(file.metadata().unwrap().len() / 2).unwrap();
        let err = format!("{:#}", fsck(&data, true).unwrap_err());
        assert!(err.starts_with("cannot open the store") && err.contains("damaged"), "{err}");
        assert!(err.contains("Corruption"), "{err}");
    }
}
