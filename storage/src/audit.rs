//! Whether the promises held: computed from the stores of many nodes and nothing else.
//!
//! Nothing acknowledged may be lost, nothing may count twice, and there is one step for each version. The
//! auditor trusts no index, no consumed set and no node's word: it hashes every copy and reads every step.

use crate::acknowledged::all_acknowledged;
use crate::error::StoreError;
use crate::rollouts::get_rollout;
use crate::schema::{hash_at_end, hex, successor};
use crate::steps::{StoredStep, all_steps};
use crate::store::{Family, SharedStore, Store};
use starling_protocol::control::StepCommitted;
use starling_protocol::{Hash, ModelName, PolicyVersion, RolloutId};
use std::collections::{BTreeMap, BTreeSet};

/// Values read at once: 8 × 4 MiB is the most a page takes.
const PAGE: usize = 8;

/// A value that is not what its key says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CorruptValue {
    /// Which of the audited stores, from 0.
    pub store: usize,
    /// Where in it.
    pub family: Family,
    /// Its key in hexadecimal.
    pub key: String,
    /// What does not fit.
    pub reason: String,
}

/// A version of a model whose step breaks a promise.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ModelVersion {
    /// The model.
    pub model: ModelName,
    /// The version.
    pub version: PolicyVersion,
}

/// What an audit found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuditReport {
    /// Rollouts that were acknowledged.
    pub acknowledged: usize,
    /// Acknowledged ones of which no store has an intact copy, and which no step consumed. Must be empty.
    pub lost: Vec<RolloutId>,
    /// Acknowledged ones that a step consumed and whose last copy was deleted afterwards, as it may be.
    pub consumed_and_deleted: usize,
    /// Rollouts with an intact copy in some store, acknowledged or not.
    pub held: usize,
    /// Rollouts consumed by some step.
    pub consumed: usize,
    /// Rollouts in the consumed list of more than one step of a line, or twice in one, with the models and versions.
    /// Must be empty. Two lines that went apart may each consume a rollout: one of them was given up.
    pub consumed_twice: Vec<(RolloutId, Vec<(ModelName, PolicyVersion)>)>,
    /// Steps, each model and version once.
    pub steps: usize,
    /// Versions with more than one step. Must be empty: lines that went apart share no number.
    pub forked_versions: Vec<ModelVersion>,
    /// Steps that stand in a log entry of another term than their own: a deposed leader's. Must be empty (I6).
    pub deposed: Vec<ModelVersion>,
    /// Copies and rows that are not what was written; another store may have a good one.
    pub corrupt: Vec<CorruptValue>,
}

impl AuditReport {
    /// Whether every promise held. Corrupt copies that were detected do not break one.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.lost.is_empty()
            && self.consumed_twice.is_empty()
            && self.forked_versions.is_empty()
            && self.deposed.is_empty()
    }
}

/// Audits `stores` together. What was acknowledged is the union of the stores' own records and of
/// `acknowledged`, which a client or a test may add.
///
/// # Errors
/// Failures of a store other than corruption, which is part of the report.
pub fn audit(
    stores: &[SharedStore],
    acknowledged: impl IntoIterator<Item = RolloutId>,
) -> Result<AuditReport, StoreError> {
    let mut report = AuditReport::default();
    let mut promised: BTreeSet<RolloutId> = acknowledged.into_iter().collect();
    let mut held = BTreeSet::new();
    let mut steps: BTreeMap<(ModelName, PolicyVersion), Vec<StepCommitted>> = BTreeMap::new();
    for (at, store) in stores.iter().enumerate() {
        let own = tolerate(at, all_acknowledged(store), &mut report.corrupt)?.unwrap_or_default();
        promised.extend(own.into_iter().map(|a| a.id));
        hash_all(at, store, Family::Rollouts, &mut report.corrupt, |id| {
            held.insert(id);
        })?;
        hash_all(at, store, Family::Blobs, &mut report.corrupt, |_| {})?;
        for (model, row) in tolerate(at, all_steps(store), &mut report.corrupt)?.unwrap_or_default() {
            let StoredStep { step, logged } = row;
            if step.term != logged {
                report.deposed.push(ModelVersion { model: model.clone(), version: step.version });
            }
            let variants = steps.entry((model, step.version)).or_default();
            if !variants.contains(&step) {
                variants.push(step);
            }
        }
    }
    report.deposed.sort_unstable();
    report.deposed.dedup();
    report.acknowledged = promised.len();
    report.held = held.len();
    report.steps = steps.len();
    let consumed = audit_steps(&steps, &mut report);
    for id in promised {
        if held.contains(&id) || held_by_any(stores, id)? {
            continue;
        }
        // Only a step says that it may be gone: the consumed set is derived, and no store's word for it counts.
        if consumed.contains(&id) {
            report.consumed_and_deleted += 1;
        } else {
            report.lost.push(id);
        }
    }
    Ok(report)
}

/// Fills in what the steps say; returns every rollout that one consumed.
fn audit_steps(
    steps: &BTreeMap<(ModelName, PolicyVersion), Vec<StepCommitted>>,
    report: &mut AuditReport,
) -> BTreeSet<RolloutId> {
    let mut uses: BTreeMap<RolloutId, Vec<(ModelName, PolicyVersion)>> = BTreeMap::new();
    for ((model, version), variants) in steps {
        if variants.len() > 1 {
            report.forked_versions.push(ModelVersion { model: model.clone(), version: *version });
        }
        // Variants of one step may well agree on a rollout: the most uses in any of them count.
        let mut most: BTreeMap<RolloutId, usize> = BTreeMap::new();
        for step in variants {
            let mut times: BTreeMap<RolloutId, usize> = BTreeMap::new();
            for id in &step.consumed {
                *times.entry(*id).or_default() += 1;
            }
            for (id, n) in times {
                let most = most.entry(id).or_default();
                *most = n.max(*most);
            }
        }
        for (id, n) in most {
            let of_id = uses.entry(id).or_default();
            of_id.extend(std::iter::repeat_n((model.clone(), *version), n));
        }
    }
    report.consumed = uses.len();
    let consumed = uses.keys().copied().collect();
    report.consumed_twice = uses.into_iter().filter(|(_, by)| is_twice(by, steps)).collect();
    consumed
}

/// Whether two of the steps `by` stand in one history.
fn is_twice(
    by: &[(ModelName, PolicyVersion)],
    steps: &BTreeMap<(ModelName, PolicyVersion), Vec<StepCommitted>>,
) -> bool {
    by.iter()
        .enumerate()
        .any(|(i, a)| by[i + 1..].iter().any(|b| a.0 != b.0 || descends(a, b.1, steps) || descends(b, a.1, steps)))
}

/// Whether the step `late` goes back to the step to `early`, by the parents that the steps name.
fn descends(
    late: &(ModelName, PolicyVersion),
    early: PolicyVersion,
    steps: &BTreeMap<(ModelName, PolicyVersion), Vec<StepCommitted>>,
) -> bool {
    let mut at = late.clone();
    loop {
        if at.1.mark() == early.mark() {
            return at.1 >= early;
        }
        if at.1.steps() <= early.steps() {
            return false;
        }
        // Of a step that no store has any more, the one before it is likely of the same line.
        let parent = steps.get(&at).and_then(|variants| variants.first()).map(|s| s.parent);
        at.1 = parent.unwrap_or(PolicyVersion(at.1.0 - 1));
    }
}

/// A scan that ended at a corrupt block may have missed a good copy behind it.
fn held_by_any(stores: &[SharedStore], id: RolloutId) -> Result<bool, StoreError> {
    for store in stores {
        match get_rollout(store, id) {
            Ok(Some(_)) => return Ok(true),
            Ok(None) | Err(StoreError::Corrupt { .. }) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(false)
}

fn hash_all(
    at: usize,
    store: &dyn Store,
    family: Family,
    corrupt: &mut Vec<CorruptValue>,
    mut intact: impl FnMut(Hash),
) -> Result<(), StoreError> {
    let mut from = Vec::new();
    loop {
        let page = tolerate(at, store.scan(family, &from, None, PAGE), corrupt)?.unwrap_or_default();
        let Some((last, _)) = page.last() else {
            return Ok(());
        };
        from = successor(last);
        for (key, value) in page {
            let got = Hash::of(&value);
            if key == got.0 {
                intact(got);
            } else {
                let expected = hash_at_end(&key).map_or_else(|| "not a hash".to_owned(), |h| h.to_string());
                let reason = format!("{} bytes with hash {got}, key {expected}", value.len());
                corrupt.push(CorruptValue { store: at, family, key: hex(&key), reason });
            }
        }
    }
}

/// Turns corruption into a line of the report.
fn tolerate<T>(
    at: usize,
    result: Result<T, StoreError>,
    corrupt: &mut Vec<CorruptValue>,
) -> Result<Option<T>, StoreError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(StoreError::Corrupt { family, key, reason }) => {
            corrupt.push(CorruptValue { store: at, family, key, reason });
            Ok(None)
        }
        Err(e) => Err(e),
    }
}
