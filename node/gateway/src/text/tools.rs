//! Tool calls in sampled text. A call that is malformed stays text: the agent sees what the model wrote.

use super::stop::partial_suffix;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::fmt::Debug;

/// A tool call as it was sampled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// The function's name; whether it exists is for the agent to say.
    pub name: String,
    /// A JSON object, in the model's own spelling.
    pub arguments: String,
}

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Text for the reader.
    Content(String),
    /// A complete tool call.
    Call(ToolCall),
}

/// Splits one answer into text and tool calls as it arrives. One instance an answer.
pub trait ToolCallParser: Debug + Send {
    /// Text came.
    fn text(&mut self, text: &str, out: &mut Vec<Piece>);
    /// A special token came, other than the one that ends the answer.
    fn special(&mut self, token: &str, out: &mut Vec<Piece>);
    /// The answer is over; `complete` unless it was cut at a limit.
    fn finish(&mut self, complete: bool, out: &mut Vec<Piece>);
}

fn content(text: &str, out: &mut Vec<Piece>) {
    if text.is_empty() {
        return;
    }
    match out.last_mut() {
        Some(Piece::Content(last)) => last.push_str(text),
        _ => out.push(Piece::Content(text.to_owned())),
    }
}

/// No tools: all text is content, special tokens are not shown.
#[derive(Debug)]
pub struct PlainText;

impl ToolCallParser for PlainText {
    fn text(&mut self, text: &str, out: &mut Vec<Piece>) {
        content(text, out);
    }
    fn special(&mut self, _: &str, _: &mut Vec<Piece>) {}
    fn finish(&mut self, _: bool, _: &mut Vec<Piece>) {}
}

/// Starling's byte-level model: the special token `<|call|>`, then `name{"argument":…}` up to the next call or
/// the end of the answer.
#[derive(Debug, Default)]
pub struct EmbeddedFormat {
    call: Option<String>,
}

const CALL_TOKEN: &str = "<|call|>";

impl EmbeddedFormat {
    fn close(&mut self, complete: bool, out: &mut Vec<Piece>) {
        let Some(text) = self.call.take() else { return };
        match Self::parse(&text) {
            Some(call) if complete => out.push(Piece::Call(call)),
            _ => content(&format!("{CALL_TOKEN}{text}"), out),
        }
    }

    fn parse(text: &str) -> Option<ToolCall> {
        let (name, arguments) = text.split_at(text.find('{')?);
        let named = !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-.".contains(&b));
        let object = serde_json::from_str::<&RawValue>(arguments).is_ok();
        (named && object).then(|| ToolCall { name: name.to_owned(), arguments: arguments.trim_end().to_owned() })
    }
}

impl ToolCallParser for EmbeddedFormat {
    fn text(&mut self, text: &str, out: &mut Vec<Piece>) {
        match &mut self.call {
            Some(call) => call.push_str(text),
            None => content(text, out),
        }
    }
    fn special(&mut self, token: &str, out: &mut Vec<Piece>) {
        if token == CALL_TOKEN {
            self.close(true, out);
            self.call = Some(String::new());
        }
    }
    fn finish(&mut self, complete: bool, out: &mut Vec<Piece>) {
        self.close(complete, out);
    }
}

/// Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.
#[derive(Debug, Default)]
pub struct HermesFormat {
    held: String,
    inside: bool,
    called: bool,
}

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

#[derive(Deserialize)]
struct HermesCall<'a> {
    name: String,
    #[serde(borrow)]
    arguments: &'a RawValue,
}

impl HermesFormat {
    fn parse(text: &str) -> Option<ToolCall> {
        let call: HermesCall<'_> = serde_json::from_str(text.trim()).ok()?;
        let arguments = call.arguments.get();
        (!call.name.is_empty() && arguments.starts_with('{'))
            .then(|| ToolCall { name: call.name, arguments: arguments.to_owned() })
    }

    /// White space between and after calls belongs to the format, not to the answer.
    fn content(&self, text: &str, out: &mut Vec<Piece>) {
        if !self.called || !text.trim().is_empty() {
            content(text, out);
        }
    }
}

impl ToolCallParser for HermesFormat {
    fn text(&mut self, text: &str, out: &mut Vec<Piece>) {
        self.held.push_str(text);
        loop {
            let tag = if self.inside { CLOSE } else { OPEN };
            let Some(at) = self.held.find(tag) else { break };
            let rest = self.held.split_off(at + tag.len());
            let before = std::mem::replace(&mut self.held, rest);
            let before = &before[..at];
            if !self.inside {
                self.content(before, out);
            } else if let Some(call) = Self::parse(before) {
                self.called = true;
                out.push(Piece::Call(call));
            } else {
                content(&format!("{OPEN}{before}{CLOSE}"), out);
            }
            self.inside = !self.inside;
        }
        if !self.inside {
            let certain = self.held.len() - partial_suffix(&self.held, OPEN);
            let text: String = self.held.drain(..certain).collect();
            self.content(&text, out);
        }
    }
    fn special(&mut self, token: &str, out: &mut Vec<Piece>) {
        // Some tokenizers mark the tags as special.
        if token == OPEN || token == CLOSE {
            self.text(token, out);
        }
    }
    fn finish(&mut self, _: bool, out: &mut Vec<Piece>) {
        let rest = std::mem::take(&mut self.held);
        if std::mem::take(&mut self.inside) {
            content(&format!("{OPEN}{rest}"), out);
        } else {
            self.content(&rest, out);
        }
    }
}
