//! A message's content: a text, a list of text parts, or nothing.

use super::ApiError;
use serde::de::{Deserializer, SeqAccess, Visitor};
use serde::{Deserialize, de};
use std::borrow::Cow;
use std::fmt;

#[derive(Debug, PartialEq)]
pub(crate) enum Content<'a> {
    Text(Cow<'a, str>),
    Parts(Vec<Part>),
}

#[derive(Debug, PartialEq, Deserialize)]
pub(crate) struct Part {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) text: Option<String>,
}

impl<'de: 'a, 'a> Deserialize<'de> for Content<'a> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Content<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text or a list of text parts")
            }
            fn visit_borrowed_str<E: de::Error>(self, s: &'de str) -> Result<Self::Value, E> {
                Ok(Content::Text(Cow::Borrowed(s)))
            }
            fn visit_str<E: de::Error>(self, s: &str) -> Result<Self::Value, E> {
                Ok(Content::Text(Cow::Owned(s.to_owned())))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let mut parts = Vec::new();
                while let Some(part) = seq.next_element()? {
                    parts.push(part);
                }
                Ok(Content::Parts(parts))
            }
        }
        d.deserialize_any(Either)
    }
}

/// The text of parts that are all of kind `text`; anything else is refused by its place, `at` being the list's.
pub(crate) fn join_parts(parts: Vec<Part>, text: &str, at: &str) -> Result<String, ApiError> {
    let mut joined = String::new();
    for (j, part) in parts.into_iter().enumerate() {
        match (part.kind == text, part.text) {
            (true, Some(t)) => joined.push_str(&t),
            (true, None) => return Err(ApiError::invalid(format!("{at}[{j}].text"), "a text")),
            (false, _) => {
                let why = format!("only text parts are, and this is {:?}", part.kind);
                return Err(ApiError::unsupported(format!("{at}[{j}].type"), &why));
            }
        }
    }
    Ok(joined)
}
