//! Chat templates: minijinja with what `transformers` gives a template.

use super::FormatError;
use super::python::{self, JsonStyle};
use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, Error, ErrorKind, context};
use std::fmt::Write as _;

/// A compiled chat template with its special tokens.
#[derive(Debug)]
pub(super) struct ChatTemplate {
    env: Environment<'static>,
    has_tool_variant: bool,
}

const DEFAULT: &str = "chat";
const WITH_TOOLS: &str = "chat_with_tools";

impl ChatTemplate {
    /// Compiles `source`, and the variant for conversations with tools where the model has one.
    ///
    /// `special_tokens` are `bos_token`, `eos_token` and the like; one that the model lacks is undefined in the template.
    pub(super) fn compile(
        source: &str,
        with_tools: Option<&str>,
        special_tokens: &[(&'static str, String)],
    ) -> Result<Self, FormatError> {
        let mut env = Environment::new();
        env.set_trim_blocks(true);
        env.set_lstrip_blocks(true);
        env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        env.set_formatter(|out, _, value| match value.as_str() {
            Some(text) => Ok(out.write_str(text)?),
            None => Ok(out.write_str(&python::str(value))?),
        });
        env.add_filter("string", python::str);
        env.add_filter("tojson", tojson);
        env.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        env.add_function("strftime_now", strftime_now);
        for (name, text) in special_tokens {
            env.add_global(*name, text.as_str());
        }
        let bad = |e: Error| FormatError::Template(chain(&e));
        env.add_template_owned(DEFAULT, without_generation_marks(source)).map_err(bad)?;
        if let Some(source) = with_tools {
            env.add_template_owned(WITH_TOOLS, without_generation_marks(source)).map_err(bad)?;
        }
        Ok(Self { env, has_tool_variant: with_tools.is_some() })
    }

    pub(super) fn render(&self, messages: &[Value], tools: &Value, gen_prompt: bool) -> Result<String, FormatError> {
        let name = if self.has_tool_variant && tools.is_true() { WITH_TOOLS } else { DEFAULT };
        let template = self.env.get_template(name).map_err(|e| FormatError::Template(chain(&e)))?;
        template
            .render(context! {
                messages => messages,
                tools => tools,
                documents => (),
                add_generation_prompt => gen_prompt,
            })
            .map_err(|e| FormatError::Render(chain(&e)))
    }
}

/// The template with `transformers`' own block `generation`, which marks what an assistant wrote, as a block that always
/// holds: the control of white space around it stays.
fn without_generation_marks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(end + 2);
        let inner = tag[2..tag.len() - 2].trim_matches(['-', '+']).trim();
        match inner {
            "generation" => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endif")),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// A template error in one line: the message of `raise_exception` alone, others with their place.
fn chain(e: &Error) -> String {
    match (e.kind(), e.detail()) {
        (ErrorKind::InvalidOperation, Some(detail)) => detail.to_owned(),
        _ => e.to_string(),
    }
}

/// The local time by a format of C's `strftime`, as `datetime.now().strftime(format)`.
fn strftime_now(format: &str) -> Result<String, Error> {
    let mut out = String::new();
    // chrono reports a directive that it does not know while it writes.
    write!(out, "{}", chrono::Local::now().format(format)).map_err(|e| {
        Error::new(ErrorKind::InvalidOperation, format!("strftime_now: no such format: {format}")).with_source(e)
    })?;
    Ok(out)
}

/// `tojson` as `transformers` defines it: Python's `json.dumps(ensure_ascii=False)`. minijinja's own escapes HTML.
fn tojson(value: &Value, kwargs: Kwargs) -> Result<String, Error> {
    let bad = |reason: String| Error::new(ErrorKind::BadSerialization, format!("tojson: {reason}"));
    let separators = match kwargs.get::<Option<Vec<String>>>("separators")? {
        None => None,
        Some(list) => {
            let wrong = |list: Vec<String>| bad(format!("separators: expected two texts, got {}", list.len()));
            Some(<[String; 2]>::try_from(list).map_err(wrong)?)
        }
    };
    let style = JsonStyle {
        indent: kwargs.get("indent")?,
        separators,
        sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        ensure_ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
    };
    kwargs.assert_all_used()?;
    if value.is_undefined() {
        return Err(Error::new(ErrorKind::UndefinedError, "tojson of an undefined value"));
    }
    python::json(value, style).map_err(bad)
}
