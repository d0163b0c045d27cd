//! Checks that several APIs share. Each takes the field's name as its API spells it.

use super::ApiError;
use serde::de::{Deserialize, Deserializer, SeqAccess, Visitor};
use serde_json::Value;
use std::fmt;

const STOP_LEN_BYTES_MAX: usize = 1024;

pub(crate) fn in_range<T>(name: &'static str, value: T, ok: bool, expected: &str) -> Result<T, ApiError> {
    if ok { Ok(value) } else { Err(ApiError::invalid(name, expected)) }
}

/// `max` is 2 for OpenAI and 1 for Anthropic.
pub(crate) fn temperature(value: Option<f32>, max: u8) -> Result<Option<f32>, ApiError> {
    let ok = value.is_none_or(|t| (0.0..=f32::from(max)).contains(&t));
    in_range("temperature", value, ok, &format!("a number from 0 to {max}"))
}

pub(crate) fn top_p(value: Option<f32>) -> Result<Option<f32>, ApiError> {
    in_range("top_p", value, value.is_none_or(|p| p > 0.0 && p <= 1.0), "a number above 0, at most 1")
}

/// 0, and −1 as other servers write it, keep all.
pub(crate) fn top_k(value: Option<i64>) -> Result<Option<u32>, ApiError> {
    let Some(k) = value else { return Ok(None) };
    let k = if k == -1 { 0 } else { k };
    u32::try_from(k).map(Some).map_err(|_other| ApiError::invalid("top_k", "-1, 0 or a count"))
}

pub(crate) fn max_tokens(name: &'static str, value: Option<u32>) -> Result<Option<u32>, ApiError> {
    in_range(name, value, value.is_none_or(|n| n >= 1), "at least 1")
}

pub(crate) fn stops(name: &'static str, stops: Vec<String>, max: usize) -> Result<Vec<String>, ApiError> {
    in_range(name, (), stops.len() <= max, &format!("at most {max} texts"))?;
    let ok = stops.iter().all(|stop| !stop.is_empty() && stop.len() <= STOP_LEN_BYTES_MAX);
    in_range(name, stops, ok, "texts of 1 to 1024 bytes")
}

/// Negative seeds are seeds too.
pub(crate) fn seed(value: Option<i64>) -> Option<u64> {
    value.map(i64::cast_unsigned)
}

/// A field's name, its value, which values of it change nothing, and what to do instead.
pub(crate) type Unhonoured<'a> = (&'static str, &'a Option<Value>, fn(&Value) -> bool, &'a str);

/// Refuses the first field that has a value which would change something.
pub(crate) fn refuse(fields: &[Unhonoured<'_>]) -> Result<(), ApiError> {
    for (name, value, neutral, why) in fields {
        if value.as_ref().is_some_and(|v| !neutral(v)) {
            return Err(ApiError::unsupported(*name, why));
        }
    }
    Ok(())
}

pub(crate) const LEAVE_IT_OUT: &str = "leave it out";

pub(crate) fn never(_: &Value) -> bool {
    false
}

pub(crate) fn zero(v: &Value) -> bool {
    v.as_f64() == Some(0.0)
}

pub(crate) fn is_false(v: &Value) -> bool {
    *v == Value::Bool(false)
}

pub(crate) fn is_empty(v: &Value) -> bool {
    v.as_object().is_some_and(serde_json::Map::is_empty) || v.as_array().is_some_and(Vec::is_empty)
}

pub(crate) fn default_tier(v: &Value) -> bool {
    v == "auto" || v == "default"
}

/// OpenAI's `stop`: a text or a list of texts.
#[derive(Debug, Default)]
pub(crate) struct Stop(pub(crate) Vec<String>);

impl<'de> Deserialize<'de> for Stop {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct OneOrMore;
        impl<'de> Visitor<'de> for OneOrMore {
            type Value = Stop;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text or a list of texts")
            }
            fn visit_str<E: serde::de::Error>(self, s: &str) -> Result<Stop, E> {
                Ok(Stop(vec![s.to_owned()]))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Stop, A::Error> {
                let mut stops = Vec::new();
                while let Some(stop) = seq.next_element()? {
                    stops.push(stop);
                }
                Ok(Stop(stops))
            }
        }
        d.deserialize_any(OneOrMore)
    }
}

/// OpenAI's `stream_options`.
#[derive(Debug, Default, Clone, Copy, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StreamOptions {
    pub(crate) include_usage: Option<bool>,
    /// Padding against eavesdroppers; there is none here.
    include_obfuscation: Option<bool>,
}

impl StreamOptions {
    /// Whether the last chunk tells the usage.
    pub(crate) fn check(options: Option<Self>, stream: bool) -> Result<bool, ApiError> {
        if options.is_some() && !stream {
            return Err(ApiError::field("invalid_value", "stream_options", "`stream_options` needs `stream`: true"));
        }
        let options = options.unwrap_or_default();
        if options.include_obfuscation == Some(true) {
            return Err(ApiError::unsupported("stream_options.include_obfuscation", "chunks are not padded"));
        }
        Ok(options.include_usage.unwrap_or(false))
    }
}

/// Of an HTTP request: a JSON object and nothing behind it. An empty body is an empty object.
pub(crate) fn parse<'de, T: Deserialize<'de>>(body: &'de [u8]) -> Result<T, ApiError> {
    let body = if body.is_empty() { b"{}" } else { body };
    let mut json = serde_json::Deserializer::from_slice(body);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|e| ApiError::json(&e))?;
    match json.end() {
        Ok(()) => Ok(value),
        Err(e) => {
            Err(ApiError::new(axum::http::StatusCode::BAD_REQUEST, "invalid_json", format!("after the body: {e}")))
        }
    }
}

/// An object of the body, taken apart field by field: what is left in the end is unknown. A null is as good as absent.
#[derive(Debug)]
pub(crate) struct Object {
    path: String,
    map: serde_json::Map<String, Value>,
}

impl Object {
    /// The value at `path` of the body, which must be an object.
    pub(crate) fn new(path: impl Into<String>, value: Value) -> Result<Self, ApiError> {
        let path = path.into();
        match value {
            Value::Object(map) => Ok(Self { path, map }),
            _ => Err(ApiError::invalid(path, "an object")),
        }
    }

    /// The path of one of its fields.
    pub(crate) fn at(&self, field: &str) -> String {
        format!("{}.{field}", self.path)
    }

    pub(crate) fn take(&mut self, field: &str) -> Option<Value> {
        self.map.remove(field).filter(|v| !v.is_null())
    }

    fn required<T>(&self, field: &str, value: Option<T>) -> Result<T, ApiError> {
        value.ok_or_else(|| {
            let name = self.at(field);
            ApiError::field("missing_required_parameter", name.clone(), format!("`{name}` is required"))
        })
    }

    /// A field that must be there.
    pub(crate) fn need(&mut self, field: &str) -> Result<Value, ApiError> {
        let value = self.take(field);
        self.required(field, value)
    }

    pub(crate) fn text(&mut self, field: &str) -> Result<Option<String>, ApiError> {
        match self.take(field) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(ApiError::invalid(self.at(field), "a text")),
        }
    }

    /// A text that must be there.
    pub(crate) fn need_text(&mut self, field: &str) -> Result<String, ApiError> {
        let text = self.text(field)?;
        self.required(field, text)
    }

    pub(crate) fn bool(&mut self, field: &str) -> Result<Option<bool>, ApiError> {
        match self.take(field) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(b)),
            Some(_) => Err(ApiError::invalid(self.at(field), "true or false")),
        }
    }

    /// Drops fields that change no answer.
    pub(crate) fn ignore(&mut self, fields: &[&str]) {
        for field in fields {
            self.map.remove(*field);
        }
    }

    /// Refuses a field that has another value than one that changes nothing.
    pub(crate) fn refuse(&mut self, field: &str, neutral: fn(&Value) -> bool, why: &str) -> Result<(), ApiError> {
        match self.take(field) {
            Some(v) if !neutral(&v) => Err(ApiError::unsupported(self.at(field), why)),
            _ => Ok(()),
        }
    }

    /// Refuses what was not taken.
    pub(crate) fn finish(self) -> Result<(), ApiError> {
        match self.map.keys().next() {
            None => Ok(()),
            Some(field) => {
                let name = self.at(field);
                let message = format!("`{name}` is not a field that this server knows");
                Err(ApiError::field("unknown_parameter", name, message))
            }
        }
    }
}

/// The elements of a list, each an object with its path.
pub(crate) fn objects(path: &str, value: Value) -> Result<Vec<Object>, ApiError> {
    let Value::Array(list) = value else { return Err(ApiError::invalid(path.to_owned(), "a list")) };
    list.into_iter().enumerate().map(|(i, v)| Object::new(format!("{path}[{i}]"), v)).collect()
}

/// A text, or the joined texts of a list of parts whose `type` is one of `kinds`.
pub(crate) fn text_or_parts(path: &str, value: Value, kinds: &[&str]) -> Result<String, ApiError> {
    match value {
        Value::String(text) => return Ok(text),
        Value::Array(_) => {}
        _ => return Err(ApiError::invalid(path.to_owned(), "a text or a list of text parts")),
    }
    let mut joined = String::new();
    for mut part in objects(path, value)? {
        let kind = part.need_text("type")?;
        if !kinds.contains(&kind.as_str()) {
            let why = format!("only parts of type {} are, and this is {kind:?}", kinds.join(" or "));
            return Err(ApiError::unsupported(part.at("type"), &why));
        }
        joined.push_str(&part.need_text("text")?);
        // What providers put beside the text of an answer, and marks for their caches.
        part.refuse("annotations", is_empty, LEAVE_IT_OUT)?;
        part.refuse("citations", is_empty, LEAVE_IT_OUT)?;
        part.ignore(&["logprobs", "cache_control", "prompt_cache_breakpoint"]);
        part.finish()?;
    }
    Ok(joined)
}
