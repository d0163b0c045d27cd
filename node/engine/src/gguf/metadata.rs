//! Typed access to a GGUF's metadata; every refusal names the key.

use std::collections::HashMap;
use std::fmt::Display;

use candle_core::quantized::gguf_file::Value;

use crate::config::Architecture;
use crate::error::CheckpointError;

/// The metadata of a file.
#[derive(Clone, Copy)]
pub(super) struct Metadata<'a>(&'a HashMap<String, Value>);

/// The error for a key that is missing or has a value that cannot be used.
pub(super) fn refused(key: impl Into<String>, expected: impl Into<String>, got: impl Display) -> CheckpointError {
    CheckpointError::Metadata { key: key.into(), expected: expected.into(), got: got.to_string() }
}

/// Any kind of integer that is not negative.
fn unsigned(v: &Value) -> Option<u64> {
    match v {
        Value::U8(n) => Some(u64::from(*n)),
        Value::U16(n) => Some(u64::from(*n)),
        Value::U32(n) => Some(u64::from(*n)),
        Value::U64(n) => Some(*n),
        Value::I8(n) => u64::try_from(*n).ok(),
        Value::I16(n) => u64::try_from(*n).ok(),
        Value::I32(n) => u64::try_from(*n).ok(),
        Value::I64(n) => u64::try_from(*n).ok(),
        _ => None,
    }
}

/// What a value is, for a message; long ones by their kind only.
fn shown(v: &Value) -> String {
    match v {
        Value::Array(list) => format!("a list of {}", list.len()),
        other => format!("{other:?}"),
    }
}

impl<'a> Metadata<'a> {
    pub(super) fn new(map: &'a HashMap<String, Value>) -> Self {
        Self(map)
    }

    /// `general.architecture`, if it is one of ours.
    pub(super) fn architecture(self) -> Result<Architecture, CheckpointError> {
        let got = self.text("general.architecture");
        let known = Architecture::ALL.into_iter().find(|a| got == Some(a.name()));
        known.ok_or_else(|| {
            let expected = Architecture::ALL.map(Architecture::name).join(" or ");
            refused("general.architecture", expected, got.unwrap_or("nothing"))
        })
    }

    /// A text, if there is one.
    pub(super) fn text(self, key: &str) -> Option<&'a str> {
        match self.0.get(key) {
            Some(Value::String(s)) => Some(s),
            _ => None,
        }
    }

    /// A flag, if there is one.
    pub(super) fn flag(self, key: &str) -> Option<bool> {
        match self.0.get(key) {
            Some(Value::Bool(b)) => Some(*b),
            _ => None,
        }
    }

    /// A list of texts, if there is a list.
    pub(super) fn texts(self, key: &str) -> Result<Option<Vec<&'a str>>, CheckpointError> {
        self.list(key, "a list of texts", |v| match v {
            Value::String(s) => Some(s.as_str()),
            _ => None,
        })
    }

    /// A list of numbers, if there is a list.
    pub(super) fn numbers(self, key: &str) -> Result<Option<Vec<u64>>, CheckpointError> {
        self.list(key, "a list of numbers", unsigned)
    }

    fn list<T>(
        self,
        key: &str,
        expected: &str,
        item: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<Vec<T>>, CheckpointError> {
        match self.0.get(key) {
            None => Ok(None),
            Some(Value::Array(list)) => match list.iter().map(item).collect() {
                Some(items) => Ok(Some(items)),
                None => Err(refused(key, expected, "a list with something else")),
            },
            Some(other) => Err(refused(key, expected, shown(other))),
        }
    }

    /// A size, if there is one; a list with one value for each layer counts when they are equal.
    pub(super) fn size(self, key: &str) -> Result<Option<usize>, CheckpointError> {
        let Some(v) = self.0.get(key) else { return Ok(None) };
        let n = match v {
            Value::Array(list) => match list.split_first() {
                Some((first, rest)) if rest.iter().all(|v| unsigned(v) == unsigned(first)) => unsigned(first),
                _ => return Err(refused(key, "the same number for every layer", shown(v))),
            },
            one => unsigned(one),
        };
        let n = n.and_then(|n| usize::try_from(n).ok());
        n.map(Some).ok_or_else(|| refused(key, "a number of at least 0", shown(v)))
    }

    /// A size that must be there.
    pub(super) fn required(self, key: &str) -> Result<usize, CheckpointError> {
        self.size(key)?.ok_or_else(|| refused(key, "a number", "nothing"))
    }

    /// A real number, if there is one; single precision is read by its shortest decimal, as `config.json` would have it.
    pub(super) fn float(self, key: &str) -> Result<Option<f64>, CheckpointError> {
        match self.0.get(key) {
            None => Ok(None),
            Some(Value::F32(v)) => Ok(Some(v.to_string().parse().unwrap_or_else(|_| f64::from(*v)))),
            Some(Value::F64(v)) => Ok(Some(*v)),
            Some(other) => Err(refused(key, "a real number", shown(other))),
        }
    }

    /// A token's id, if there is one.
    pub(super) fn token_id(self, key: &str) -> Result<Option<u32>, CheckpointError> {
        let Some(v) = self.0.get(key) else { return Ok(None) };
        let id = unsigned(v).and_then(|n| u32::try_from(n).ok());
        id.map(Some).ok_or_else(|| refused(key, "a token id", shown(v)))
    }

    /// Tokens that end an answer: of the text, of the turn, of the message.
    pub(super) fn end_token_ids(self) -> Result<Vec<u32>, CheckpointError> {
        let mut ids = Vec::new();
        for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
            ids.extend(self.token_id(key)?.filter(|id| !ids.contains(id)));
        }
        Ok(ids)
    }
}
