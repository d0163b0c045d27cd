//! Reads everything in one store, checks it, and mends what can be mended from the store alone.
//!
//! What is corrupt goes to quarantine, so that the node knows that it lacks it and fetches it from another holder.
//! Indexes are made to agree with what is there. Nothing intact is ever deleted.

use crate::acknowledged::acknowledged;
use crate::blobs::{get_checked, has_blob, list_blobs};
use crate::consumed::is_consumed;
use crate::error::StoreError;
use crate::quarantine::{quarantine_blob, quarantine_rollout};
use crate::rollouts::page;
use crate::schema::{hash_at_end, hex, job_rollout_key, successor};
use crate::steps::all_steps;
use crate::store::{Batch, Durability, Family, Store};
use starling_protocol::Hash;
use starling_protocol::manifest::Manifest;
use starling_protocol::rollout::read_rollout;

/// Rows of an index read at once.
const ROWS: usize = 1024;
/// Values read at once: 8 × 4 MiB is the most a page takes.
const VALUES: usize = 8;

/// What is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The value is not what was written.
    Corrupt(String),
    /// The index names a value that is not here.
    RowWithoutValue,
    /// A value that the index does not name.
    ValueWithoutRow,
    /// A chunk that a manifest in use needs is not here.
    MissingChunk {
        /// Which manifest, in words.
        of: String,
    },
    /// All chunks of a manifest in use are here, and do not add up to it.
    WrongManifest {
        /// Which manifest, in words.
        of: String,
        /// What does not fit.
        reason: String,
    },
    /// The family cannot be read beyond this key.
    Unreadable(String),
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Corrupt(reason) => write!(f, "corrupt: {reason}"),
            Self::RowWithoutValue => f.write_str("the index names it and it is not here"),
            Self::ValueWithoutRow => f.write_str("it is here and the index does not name it"),
            Self::MissingChunk { of } => write!(f, "missing, {of} needs it"),
            Self::WrongManifest { of, reason } => write!(f, "{of}: {reason}"),
            Self::Unreadable(reason) => write!(f, "the rest cannot be read: {reason}"),
        }
    }
}

/// One fault and what became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Where.
    pub family: Family,
    /// The key in hexadecimal.
    pub key: String,
    /// What is wrong.
    pub fault: Fault,
    /// Whether it was moved to quarantine: it is missing here now.
    pub quarantined: bool,
    /// Whether nothing is missing any more.
    pub mended: bool,
}

/// What a check of a store found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FsckReport {
    /// Chunks read and hashed, and their bytes.
    pub blobs: (u64, u64),
    /// Rollouts read and hashed, and their bytes.
    pub rollouts: (u64, u64),
    /// Everything found.
    pub findings: Vec<Finding>,
}

impl FsckReport {
    /// Whether something is missing or broken that this store alone cannot mend.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.findings.iter().any(|f| !f.mended)
    }

    fn add(&mut self, family: Family, key: &[u8], fault: Fault, mended: bool) {
        self.findings.push(Finding { family, key: hex(key), fault, quarantined: false, mended });
    }

    fn add_quarantined(&mut self, family: Family, key: &[u8], reason: String) {
        self.findings.push(Finding {
            family,
            key: hex(key),
            fault: Fault::Corrupt(reason),
            quarantined: true,
            mended: false,
        });
    }
}

/// Checks all of `store`. `needed` are the manifests in use, each with a name for people.
///
/// # Errors
/// Failures other than corruption, which is part of the report. What was mended stays mended.
pub fn fsck(store: &dyn Store, needed: &[(String, Manifest)]) -> Result<FsckReport, StoreError> {
    let mut report = FsckReport::default();
    check_blobs(store, &mut report)?;
    check_rollouts(store, &mut report)?;
    find_values_without_rows(store, Family::Blobs, &mut report)?;
    find_values_without_rows(store, Family::Rollouts, &mut report)?;
    check_records(store, &mut report)?;
    for (of, manifest) in needed {
        check_manifest(store, of, manifest, &mut report)?;
    }
    Ok(report)
}

/// Every blob that the index names.
fn check_blobs(store: &dyn Store, report: &mut FsckReport) -> Result<(), StoreError> {
    let mut after = None;
    loop {
        let rows = match list_blobs(store, after, ROWS) {
            Ok(rows) => rows,
            Err(StoreError::Corrupt { reason, .. }) => {
                let key = after.map_or([0; 32], |h: Hash| h.0);
                report.add(Family::BlobIndex, &key, Fault::Unreadable(reason), false);
                return Ok(());
            }
            Err(e) => return Err(e),
        };
        let Some((last, _)) = rows.last() else { return Ok(()) };
        after = Some(*last);
        for (hash, _) in rows {
            match get_checked(store, Family::Blobs, hash) {
                Ok(Some(bytes)) => {
                    report.blobs.0 += 1;
                    report.blobs.1 += bytes.len() as u64;
                }
                Ok(None) => {
                    let mut batch = Batch::new();
                    batch.delete(Family::BlobIndex, hash.0);
                    store.write(batch, Durability::Buffered)?;
                    report.add(Family::Blobs, &hash.0, Fault::RowWithoutValue, false);
                }
                Err(StoreError::Corrupt { reason, .. }) => {
                    quarantine_blob(store, hash)?;
                    report.add_quarantined(Family::Blobs, &hash.0, reason);
                }
                Err(e) => return Err(e),
            }
        }
    }
}

/// Every rollout that the index names.
fn check_rollouts(store: &dyn Store, report: &mut FsckReport) -> Result<(), StoreError> {
    let mut after = None;
    loop {
        let rows = match page(store, after, ROWS) {
            Ok(rows) => rows,
            Err(StoreError::Corrupt { family, key, reason }) => {
                report.findings.push(Finding {
                    family,
                    key,
                    fault: Fault::Unreadable(reason),
                    quarantined: false,
                    mended: false,
                });
                return Ok(());
            }
            Err(e) => return Err(e),
        };
        let Some((job, id, _)) = rows.last() else { return Ok(()) };
        after = Some((*job, *id));
        for (job, id, consumed) in rows {
            match get_checked(store, Family::Rollouts, id) {
                Ok(Some(bytes)) => {
                    report.rollouts.0 += 1;
                    report.rollouts.1 += bytes.len() as u64;
                }
                Ok(None) => {
                    let mut batch = Batch::new();
                    batch.delete(Family::RolloutsByJob, job_rollout_key(job, id));
                    store.write(batch, Durability::Buffered)?;
                    report.add(Family::Rollouts, &id.0, Fault::RowWithoutValue, consumed.is_some());
                }
                Err(StoreError::Corrupt { reason, .. }) => {
                    quarantine_rollout(store, Some(job), id)?;
                    report.add_quarantined(Family::Rollouts, &id.0, reason);
                    // Nobody needs it any more.
                    if let Some(finding) = report.findings.last_mut() {
                        finding.mended = consumed.is_some();
                    }
                }
                Err(e) => return Err(e),
            }
        }
    }
}

/// Values of `family` that no row names get one; those that are not what their key says go to quarantine.
fn find_values_without_rows(store: &dyn Store, family: Family, report: &mut FsckReport) -> Result<(), StoreError> {
    let mut from = Vec::new();
    loop {
        let values = match store.scan(family, &from, None, VALUES) {
            Ok(values) => values,
            // The values that the index names were read one by one before: only others can lie behind this.
            Err(StoreError::Corrupt { reason, .. }) => {
                report.add(family, &from, Fault::Unreadable(reason), false);
                return Ok(());
            }
            Err(e) => return Err(e),
        };
        let Some((last, _)) = values.last() else { return Ok(()) };
        from = successor(last);
        for (key, value) in values {
            let Some(hash) = hash_at_end(&key).filter(|_| key.len() == 32) else {
                report.add(family, &key, Fault::Corrupt("the key is no hash".into()), false);
                continue;
            };
            let row = match family {
                Family::Rollouts => read_rollout(&value)
                    .map(|r| (Family::RolloutsByJob, job_rollout_key(r.job, hash).to_vec(), Vec::new()))
                    .map_err(|e| e.to_string()),
                _ => Ok((Family::BlobIndex, key.clone(), (value.len() as u64).to_be_bytes().to_vec())),
            };
            let got = Hash::of(&value);
            let row = row.and_then(|r| if got == hash { Ok(r) } else { Err(format!("bytes with hash {got}")) });
            match row {
                Ok((index, row_key, row)) => {
                    if store.get(index, &row_key)?.is_none() {
                        let mut batch = Batch::new();
                        batch.put(index, row_key, row);
                        store.write(batch, Durability::Buffered)?;
                        report.add(family, &key, Fault::ValueWithoutRow, true);
                    }
                }
                Err(reason) => {
                    match family {
                        Family::Rollouts => quarantine_rollout(store, None, hash)?,
                        _ => quarantine_blob(store, hash)?,
                    }
                    report.add_quarantined(family, &key, reason);
                }
            }
        }
    }
}

/// The small families: read, decoded, and left alone; a wrong row there has no other copy to come back from.
fn check_records(store: &dyn Store, report: &mut FsckReport) -> Result<(), StoreError> {
    let mut after = None;
    let read_acknowledged = loop {
        match acknowledged(store, after, ROWS) {
            Ok(rows) => match rows.last() {
                Some(last) => after = Some(last.id),
                None => break Ok(()),
            },
            Err(e) => break Err(e),
        }
    };
    let read_consumed = all_steps(store).and_then(|steps| {
        for (_, row) in steps {
            for id in row.step.consumed {
                is_consumed(store, id)?;
            }
        }
        Ok(())
    });
    for read in [read_acknowledged, read_consumed] {
        match read {
            Ok(()) => {}
            Err(StoreError::Corrupt { family, key, reason }) => {
                let fault = Fault::Corrupt(reason);
                report.findings.push(Finding { family, key, fault, quarantined: false, mended: false });
            }
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

fn check_manifest(store: &dyn Store, of: &str, manifest: &Manifest, report: &mut FsckReport) -> Result<(), StoreError> {
    let wrong = |reason: String| Fault::WrongManifest { of: of.to_owned(), reason };
    if let Err(e) = manifest.check() {
        report.add(Family::Blobs, &manifest.hash.0, wrong(e.to_string()), false);
        return Ok(());
    }
    let mut whole = true;
    for chunk in &manifest.chunks {
        if !has_blob(store, *chunk)? {
            whole = false;
            report.add(Family::Blobs, &chunk.0, Fault::MissingChunk { of: of.to_owned() }, false);
        }
    }
    if !whole {
        return Ok(());
    }
    let read = |chunk: &Hash| Ok(get_checked(store, Family::Blobs, *chunk)?.unwrap_or_default());
    let got = Hash::of_parts::<StoreError>(manifest.chunks.iter().map(read))?;
    if got != manifest.hash {
        report.add(Family::Blobs, &manifest.hash.0, wrong(format!("its chunks add up to hash {got}")), false);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryStore;
    use crate::blobs::{get_blob, put_blob, put_manifest_bytes};
    use crate::quarantine::quarantined;
    use crate::suite::noise;

    fn set(store: &MemoryStore, family: Family, key: &[u8], value: Option<&[u8]>) {
        let mut batch = Batch::new();
        match value {
            Some(v) => batch.put(family, key, v),
            None => batch.delete(family, key),
        }
        store.write(batch, Durability::Synced).unwrap();
    }

    #[test]
    fn a_healthy_store_has_no_findings() {
        let store = MemoryStore::new();
        let m = put_manifest_bytes(&store, &noise(1, 3 << 20)).unwrap();
        let report = fsck(&store, &[("weights".into(), m)]).unwrap();
        assert_eq!((report.findings.as_slice(), report.blobs), (&[][..], (3, 3 << 20)));
    }

    #[test]
    fn a_corrupt_blob_goes_to_quarantine_and_is_missed() {
        let store = MemoryStore::new();
        let m = put_manifest_bytes(&store, &noise(1, 2 << 20)).unwrap();
        set(&store, Family::Blobs, &m.chunks[1].0, Some(b"bad"));
        let report = fsck(&store, &[("weights".into(), m.clone())]).unwrap();
        let faults: Vec<_> = report.findings.iter().map(|f| (f.fault.clone(), f.quarantined)).collect();
        assert!(matches!(&faults[0], (Fault::Corrupt(_), true)), "{faults:?}");
        assert_eq!(faults[1], (Fault::MissingChunk { of: "weights".into() }, false));
        assert!(report.is_broken());
        assert_eq!(get_blob(&store, m.chunks[1]).unwrap(), None);
        assert_eq!(quarantined(&store).unwrap(), [(format!("blobs/{}", m.chunks[1]), 3)]);
        // What is left is a store that lacks a chunk, and once that is back all is well.
        put_blob(&store, &noise(1, 2 << 20)[1 << 20..], Durability::Synced).unwrap();
        assert!(!fsck(&store, &[("weights".into(), m)]).unwrap().is_broken());
    }

    #[test]
    fn indexes_are_made_to_agree_with_what_is_there() {
        let store = MemoryStore::new();
        let kept = put_blob(&store, b"here", Durability::Synced).unwrap();
        set(&store, Family::BlobIndex, &kept.0, None);
        set(&store, Family::BlobIndex, &[7; 32], Some(&[0; 8]));
        let report = fsck(&store, &[]).unwrap();
        let faults: Vec<_> = report.findings.iter().map(|f| (f.fault.clone(), f.mended)).collect();
        assert_eq!(faults, [(Fault::RowWithoutValue, false), (Fault::ValueWithoutRow, true)]);
        assert!(has_blob(&store, kept).unwrap() && !has_blob(&store, Hash([7; 32])).unwrap());
        assert_eq!(fsck(&store, &[]).unwrap().findings, []);
    }

    #[test]
    fn a_manifest_that_its_chunks_do_not_add_up_to_is_named() {
        let store = MemoryStore::new();
        let mut m = put_manifest_bytes(&store, &noise(1, 2 << 20)).unwrap();
        m.chunks.swap(0, 1);
        let report = fsck(&store, &[("file config.json".into(), m)]).unwrap();
        assert!(report.findings[0].to_owned().fault.to_string().starts_with("file config.json: its chunks"));
    }
}
