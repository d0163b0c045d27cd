//! Committed steps of each model, as a replica applied them: the record that audits and resumption read.

use crate::error::StoreError;
use crate::schema::{model_prefix, prefix_end, split_numbered_key, step_key, successor};
use crate::store::{Batch, Family, KeyValue, Store};
use serde::{Deserialize, Serialize};
use starling_protocol::codec::{DecodeError, decode, encode};
use starling_protocol::control::StepCommitted;
use starling_protocol::{ModelName, PolicyVersion, Term};

const PAGE: usize = 64;
/// A manifest of 64 Ki chunks takes 2 MiB, and there may be two, beside the consumed ids.
const STEP_LEN_BYTES_MAX: usize = 16 << 20;

/// A step's row: what was committed, and the term of the log entry that it came with. A replica applies only steps whose
/// own term is that one; the row keeps both, so that an auditor need not believe it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StoredStep {
    /// The step.
    pub step: StepCommitted,
    /// Term of its log entry.
    pub logged: Term,
}

impl StoredStep {
    /// Reads a row's value.
    ///
    /// # Errors
    /// [`DecodeError`] when it is none.
    pub fn from_row(value: &[u8]) -> Result<Self, DecodeError> {
        decode("committed step", value, STEP_LEN_BYTES_MAX)
    }
}

/// Adds a step that an entry of the term `logged` committed to `batch`; replaces one of the same version, as a new
/// generation of the model may.
pub fn put_step(batch: &mut Batch, model: &ModelName, step: &StepCommitted, logged: Term) {
    batch.put(Family::Models, step_key(model, step.version), encode(&(step, logged)));
}

/// Adds the removal of a step to `batch`: one of a line that the model's group left.
pub fn delete_step(batch: &mut Batch, model: &ModelName, version: PolicyVersion) {
    batch.delete(Family::Models, step_key(model, version));
}

/// One step.
///
/// # Errors
/// [`StoreError::Corrupt`] when it cannot be decoded; else as [`Store::get`].
pub fn step(store: &dyn Store, model: &ModelName, version: PolicyVersion) -> Result<Option<StepCommitted>, StoreError> {
    let key = step_key(model, version);
    let Some(value) = store.get(Family::Models, &key)? else {
        return Ok(None);
    };
    decode_step(&(key, value)).map(|(_, row)| Some(row.step))
}

/// All steps of a model, ascending by version.
///
/// # Errors
/// As [`step`].
pub fn steps(store: &dyn Store, model: &ModelName) -> Result<Vec<StepCommitted>, StoreError> {
    let prefix = model_prefix(model);
    let end = prefix_end(&prefix);
    let all = scan_steps(store, prefix, end.as_deref())?;
    Ok(all.into_iter().map(|(_, row)| row.step).collect())
}

/// The steps of a model from `version` on, ascending.
///
/// # Errors
/// As [`step`].
pub fn from_version(
    store: &dyn Store,
    model: &ModelName,
    version: PolicyVersion,
) -> Result<Vec<StepCommitted>, StoreError> {
    let end = prefix_end(&model_prefix(model));
    let all = scan_steps(store, step_key(model, version), end.as_deref())?;
    Ok(all.into_iter().map(|(_, row)| row.step).collect())
}

/// The first step of a model from `version` on.
///
/// # Errors
/// As [`step`].
pub fn first_from(
    store: &dyn Store,
    model: &ModelName,
    version: PolicyVersion,
) -> Result<Option<StepCommitted>, StoreError> {
    let end = prefix_end(&model_prefix(model));
    let row = store.scan(Family::Models, &step_key(model, version), end.as_deref(), 1)?;
    row.first().map(|pair| decode_step(pair).map(|(_, row)| row.step)).transpose()
}

/// The step with the greatest version.
///
/// # Errors
/// As [`step`].
pub fn newest(store: &dyn Store, model: &ModelName) -> Result<Option<StepCommitted>, StoreError> {
    let prefix = model_prefix(model);
    // No prefix is all 0xff: a name is text.
    let end = prefix_end(&prefix).unwrap_or_default();
    let last = store.last_key_before(Family::Models, &end)?.filter(|(key, _)| key.starts_with(&prefix));
    last.map(|pair| decode_step(&pair).map(|(_, row)| row.step)).transpose()
}

/// All steps of all models in this store.
///
/// # Errors
/// As [`step`].
pub fn all_steps(store: &dyn Store) -> Result<Vec<(ModelName, StoredStep)>, StoreError> {
    scan_steps(store, Vec::new(), None)
}

fn scan_steps(
    store: &dyn Store,
    mut from: Vec<u8>,
    to: Option<&[u8]>,
) -> Result<Vec<(ModelName, StoredStep)>, StoreError> {
    let mut all = Vec::new();
    loop {
        let page = store.scan(Family::Models, &from, to, PAGE)?;
        let Some((last, _)) = page.last() else {
            return Ok(all);
        };
        from = successor(last);
        for pair in &page {
            all.push(decode_step(pair)?);
        }
    }
}

fn decode_step((key, value): &KeyValue) -> Result<(ModelName, StoredStep), StoreError> {
    let corrupt = |reason: String| StoreError::corrupt(Family::Models, key, reason);
    let (model, version) = split_numbered_key(key).ok_or_else(|| corrupt("not a model and a version".to_owned()))?;
    let row = StoredStep::from_row(value).map_err(|e| corrupt(e.to_string()))?;
    if row.step.version.0 == version { Ok((model, row)) } else { Err(corrupt(format!("step to {}", row.step.version))) }
}
