//! Values as Python prints them: chat templates were written for Jinja2.

use minijinja::value::{Value, ValueKind};
use serde::Serialize;
use serde_json::ser::Formatter;
use std::fmt::Write as _;
use std::io;

/// `str(value)`: texts as they are, `True`, `None`, lists and dicts with their items' `repr`.
pub(super) fn str(value: &Value) -> String {
    let mut out = String::new();
    write_str(value, &mut out);
    out
}

/// [`str()`] appended to `out`.
pub(super) fn write_str(value: &Value, out: &mut String) {
    match value.kind() {
        ValueKind::Undefined => {}
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(v) => out.push_str(&float(v)),
            Err(_) => out.push_str(&value.to_string()),
        },
        ValueKind::Seq => {
            out.push('[');
            for (i, item) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                write_repr(&item, out);
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                write_repr(&key, out);
                out.push_str(": ");
                write_repr(&value.get_item(&key).unwrap_or_default(), out);
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
}

fn write_repr(value: &Value, out: &mut String) {
    match value.as_str() {
        Some(text) if value.kind() == ValueKind::String => write_quoted(text, out),
        _ => write_str(value, out),
    }
}

/// `repr` of a text: single quotes unless only double ones need no escape.
fn write_quoted(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if u32::from(c) < 0x100 && c.is_control() || c == '\u{a0}' || c == '\u{ad}' => {
                let _ = write!(out, "\\x{:02x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push(quote);
}

/// `repr` of a float: the shortest digits that come back, with an exponent below 1e-4 and from 1e16.
fn float(v: f64) -> String {
    if v.is_nan() {
        return "nan".into();
    }
    if v.is_infinite() {
        return if v > 0.0 { "inf" } else { "-inf" }.into();
    }
    let scientific = format!("{v:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = v.to_string();
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}

/// Arguments of `json.dumps`.
#[derive(Debug, Default)]
pub(super) struct JsonStyle {
    /// Spaces of one level; everything on one line without.
    pub(super) indent: Option<usize>,
    /// Between items, and between a key and its value.
    pub(super) separators: Option<[String; 2]>,
    /// Keys in order of their text.
    pub(super) sort_keys: bool,
    /// What is not ASCII becomes an escape: a backslash, `u` and four hexadecimal digits for each UTF-16 unit.
    pub(super) ensure_ascii: bool,
}

/// `json.dumps(value, **style)`.
///
/// # Errors
/// When the value has parts that are not JSON.
pub(super) fn json(value: &Value, style: JsonStyle) -> Result<String, String> {
    let item = if style.indent.is_some() { "," } else { ", " };
    let [item, key] = style.separators.unwrap_or_else(|| [item.to_owned(), ": ".to_owned()]);
    let formatter = PythonJson { indent: style.indent, item, key, depth: 0, filled: false };
    let mut out = Vec::with_capacity(64);
    let mut serializer = serde_json::Serializer::with_formatter(&mut out, formatter);
    if style.sort_keys {
        let tree = serde_json::to_value(value).map_err(|e| e.to_string())?;
        sorted(tree).serialize(&mut serializer)
    } else {
        value.serialize(&mut serializer)
    }
    .map_err(|e| e.to_string())?;
    let text = String::from_utf8(out).map_err(|e| e.to_string())?;
    if !style.ensure_ascii {
        return Ok(text);
    }
    let mut ascii = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_ascii() {
            ascii.push(c);
        } else {
            for unit in c.encode_utf16(&mut [0; 2]) {
                let _ = write!(ascii, "\\u{unit:04x}");
            }
        }
    }
    Ok(ascii)
}

fn sorted(value: serde_json::Value) -> serde_json::Value {
    use serde_json::Value as Json;
    match value {
        Json::Array(items) => items.into_iter().map(sorted).collect(),
        Json::Object(map) => {
            let mut entries: Vec<_> = map.into_iter().map(|(k, v)| (k, sorted(v))).collect();
            entries.sort_by(|a, b| a.0.cmp(&b.0));
            Json::Object(entries.into_iter().collect())
        }
        other => other,
    }
}

/// Python's layout of JSON.
struct PythonJson {
    indent: Option<usize>,
    item: String,
    key: String,
    depth: usize,
    /// The innermost open list or dict has items.
    filled: bool,
}

impl PythonJson {
    fn line<W: ?Sized + io::Write>(&self, w: &mut W) -> io::Result<()> {
        match self.indent {
            Some(indent) => write!(w, "\n{:1$}", "", indent * self.depth),
            None => Ok(()),
        }
    }

    fn open(&mut self) {
        self.depth += 1;
        self.filled = false;
    }

    fn close<W: ?Sized + io::Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.depth -= 1;
        if self.filled { self.line(w) } else { Ok(()) }
    }

    fn next<W: ?Sized + io::Write>(&self, w: &mut W, first: bool) -> io::Result<()> {
        if !first {
            w.write_all(self.item.as_bytes())?;
        }
        self.line(w)
    }
}

impl Formatter for PythonJson {
    fn write_f64<W: ?Sized + io::Write>(&mut self, w: &mut W, v: f64) -> io::Result<()> {
        w.write_all(float(v).as_bytes())
    }
    fn begin_array<W: ?Sized + io::Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.open();
        w.write_all(b"[")
    }
    fn end_array<W: ?Sized + io::Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.close(w)?;
        w.write_all(b"]")
    }
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        self.next(w, first)
    }
    fn end_array_value<W: ?Sized + io::Write>(&mut self, _w: &mut W) -> io::Result<()> {
        self.filled = true;
        Ok(())
    }
    fn begin_object<W: ?Sized + io::Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.open();
        w.write_all(b"{")
    }
    fn end_object<W: ?Sized + io::Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.close(w)?;
        w.write_all(b"}")
    }
    fn begin_object_key<W: ?Sized + io::Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        self.next(w, first)
    }
    fn begin_object_value<W: ?Sized + io::Write>(&mut self, w: &mut W) -> io::Result<()> {
        w.write_all(self.key.as_bytes())
    }
    fn end_object_value<W: ?Sized + io::Write>(&mut self, _w: &mut W) -> io::Result<()> {
        self.filled = true;
        Ok(())
    }
}
