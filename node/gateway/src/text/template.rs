//! Chat templates: minijinja with what `transformers` gives a template.

use super::FormatError;
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, context};
use serde::Serialize;
use serde_json::ser::{CompactFormatter, Formatter, PrettyFormatter};
use std::io;

/// A compiled chat template with its special tokens.
#[derive(Debug)]
pub(super) struct ChatTemplate {
    env: Environment<'static>,
    bos_token: Value,
    eos_token: Value,
    has_tool_variant: bool,
}

const DEFAULT: &str = "chat";
const WITH_TOOLS: &str = "chat_with_tools";

impl ChatTemplate {
    /// Compiles `source`, and the variant for conversations with tools where the model has one.
    pub(super) fn compile(
        source: String,
        with_tools: Option<String>,
        bos_token: Option<&str>,
        eos_token: Option<&str>,
    ) -> Result<Self, FormatError> {
        let mut env = Environment::new();
        env.set_trim_blocks(true);
        env.set_lstrip_blocks(true);
        env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        env.add_filter("tojson", tojson);
        env.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        let bad = |e: Error| FormatError::Template(chain(&e));
        let has_tool_variant = with_tools.is_some();
        env.add_template_owned(DEFAULT, source).map_err(bad)?;
        if let Some(source) = with_tools {
            env.add_template_owned(WITH_TOOLS, source).map_err(bad)?;
        }
        Ok(Self { env, bos_token: bos_token.into(), eos_token: eos_token.into(), has_tool_variant })
    }

    pub(super) fn render(&self, messages: &[Value], tools: &Value, gen_prompt: bool) -> Result<String, FormatError> {
        let name = if self.has_tool_variant && tools.is_true() { WITH_TOOLS } else { DEFAULT };
        let template = self.env.get_template(name).map_err(|e| FormatError::Template(chain(&e)))?;
        template
            .render(context! {
                messages => messages,
                tools => tools,
                add_generation_prompt => gen_prompt,
                bos_token => self.bos_token,
                eos_token => self.eos_token,
            })
            .map_err(|e| FormatError::Render(chain(&e)))
    }
}

/// A template error in one line: the message of `raise_exception` alone, others with their place.
fn chain(e: &Error) -> String {
    match (e.kind(), e.detail()) {
        (ErrorKind::InvalidOperation, Some(detail)) => detail.to_owned(),
        _ => e.to_string(),
    }
}

/// `tojson` as `transformers` defines it: Python's `json.dumps(ensure_ascii=False)`, so `": "` and `", "`
/// unless `separators` or `indent` say otherwise. minijinja's own escapes HTML and prints compactly.
fn tojson(value: &Value, kwargs: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    let separators: Option<Vec<String>> = kwargs.get("separators")?;
    let _: Option<bool> = kwargs.get("ensure_ascii")?;
    let _: Option<bool> = kwargs.get("sort_keys")?;
    kwargs.assert_all_used()?;
    if value.is_undefined() {
        return Err(Error::new(ErrorKind::UndefinedError, "tojson of an undefined value"));
    }
    let mut out = Vec::with_capacity(64);
    let done = if let Some(indent) = indent {
        let indent = " ".repeat(indent);
        write(value, &mut out, PrettyFormatter::with_indent(indent.as_bytes()))
    } else {
        match separators.as_deref() {
            None => write(value, &mut out, Separated { item: ", ", key: ": " }),
            Some([item, key]) if item == "," && key == ":" => write(value, &mut out, CompactFormatter),
            Some([item, key]) => write(value, &mut out, Separated { item, key }),
            Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "tojson: separators are two texts")),
        }
    };
    let bad = |reason: String| Error::new(ErrorKind::BadSerialization, format!("tojson: {reason}"));
    done.map_err(|e| bad(e.to_string()))?;
    String::from_utf8(out).map_err(|e| bad(e.to_string()))
}

fn write<F: Formatter>(value: &Value, out: &mut Vec<u8>, formatter: F) -> serde_json::Result<()> {
    debug_assert!(value.kind() != ValueKind::Undefined);
    value.serialize(&mut serde_json::Serializer::with_formatter(out, formatter))
}

/// JSON on one line with the given separators.
struct Separated<'a> {
    item: &'a str,
    key: &'a str,
}

impl Separated<'_> {
    fn between<W: ?Sized + io::Write>(&self, w: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { w.write_all(self.item.as_bytes()) }
    }
}

impl Formatter for Separated<'_> {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        self.between(w, first)
    }
    fn begin_object_key<W: ?Sized + io::Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        self.between(w, first)
    }
    fn begin_object_value<W: ?Sized + io::Write>(&mut self, w: &mut W) -> io::Result<()> {
        w.write_all(self.key.as_bytes())
    }
}
