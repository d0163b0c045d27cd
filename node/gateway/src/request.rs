//! What every API's request becomes: a prompt and settings. Each API is a parser into this and a renderer out of
//! [`crate::answer::Answer`]; between them nobody knows which API was called.

use crate::text::{ChatFormat, TemplateValue};
use serde::Serialize;
use serde_json::{Value, json};
use starling_protocol::Hash;
use starling_protocol::job::Sampling;
use starling_protocol::timeline::CanonicalMessage;
use std::borrow::Cow;

/// Most answers to one prompt.
pub(crate) const CHOICES_MAX: u32 = 16;

/// A request that was checked: what its API does not honour was refused before.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Request<'a> {
    pub(crate) model: Cow<'a, str>,
    pub(crate) prompt: Prompt<'a>,
    pub(crate) settings: Settings,
}

/// What is to be answered.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Prompt<'a> {
    /// A conversation, for the model's chat template.
    Chat(Chat<'a>),
    /// A text as it stands; the text of a special token is that token.
    Text(Cow<'a, str>),
    /// Token ids, each of them in the vocabulary.
    Tokens(Vec<u32>),
}

/// A conversation and the tools that are offered.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Chat<'a> {
    pub(crate) messages: Vec<Message<'a>>,
    /// In OpenAI's chat shape, which is what chat templates print.
    pub(crate) tools: Vec<Value>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    System,
    User,
    Assistant,
    Tool,
}

impl Role {
    /// The name that templates and timelines know it by.
    fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// One message.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Message<'a> {
    pub(crate) role: Role,
    pub(crate) name: Option<Cow<'a, str>>,
    pub(crate) text: Cow<'a, str>,
    /// Of an assistant's message.
    pub(crate) calls: Vec<MessageCall<'a>>,
    /// Of a tool's message: which call it answers.
    pub(crate) tool_call_id: Option<Cow<'a, str>>,
}

/// A tool call in a message.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct MessageCall<'a> {
    pub(crate) id: Option<Cow<'a, str>>,
    pub(crate) name: Cow<'a, str>,
    /// An object, or the text that was no JSON.
    pub(crate) arguments: Value,
}

impl<'a> Message<'a> {
    pub(crate) fn new(role: Role, text: impl Into<Cow<'a, str>>) -> Self {
        Self { role, name: None, text: text.into(), calls: Vec::new(), tool_call_id: None }
    }

    fn template_value(&self) -> TemplateValue {
        let call = |c: &'_ MessageCall<'a>| TemplateCall {
            kind: "function",
            id: c.id.as_deref().map(str::to_owned),
            function: TemplateFunction { name: c.name.to_string(), arguments: c.arguments.clone() },
        };
        TemplateValue::from_serialize(TemplateMessage {
            role: self.role.name(),
            content: &self.text,
            name: self.name.as_deref(),
            tool_calls: self.calls.iter().map(call).collect(),
            tool_call_id: self.tool_call_id.as_deref(),
        })
    }

    /// As the timeline tree compares it: an assistant's text without the white space that clients trim.
    fn canonical(self, format: &ChatFormat) -> CanonicalMessage<'a> {
        let text = if self.role == Role::Assistant { trim(self.text) } else { self.text };
        let call = |c: MessageCall<'a>| (c.name, Cow::Owned(canonical_arguments(c.arguments)));
        CanonicalMessage {
            role: self.role.name().into(),
            name: self.name.filter(|_| format.prints_name()),
            text,
            tool_calls: self.calls.into_iter().map(call).collect(),
            tool_call_id: self.tool_call_id.filter(|_| format.prints_tool_call_id()),
        }
    }
}

/// How to answer. What is `None` is left to the job, or outside an episode to [`Sampling::default`].
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Settings {
    pub(crate) temperature: Option<f32>,
    pub(crate) top_p: Option<f32>,
    pub(crate) top_k: Option<u32>,
    /// Left out and outside an episode: [`Settings::open_max_tokens`].
    pub(crate) max_tokens: Option<u32>,
    /// The API's own default; `None`: all the room that the context has.
    pub(crate) open_max_tokens: Option<u32>,
    pub(crate) stops: Vec<String>,
    pub(crate) seed: Option<u64>,
    /// Answers to each prompt, 1 to [`CHOICES_MAX`].
    pub(crate) choices: u32,
    pub(crate) logprobs: bool,
    pub(crate) top_logprobs: u8,
    /// Whether tool calls are looked for.
    pub(crate) parse_tools: bool,
    /// Otherwise an answer ends after its first call.
    pub(crate) parallel_tool_calls: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            temperature: None,
            top_p: None,
            top_k: None,
            max_tokens: None,
            open_max_tokens: None,
            stops: Vec::new(),
            seed: None,
            choices: 1,
            logprobs: false,
            top_logprobs: 0,
            parse_tools: false,
            parallel_tool_calls: true,
        }
    }
}

impl Settings {
    /// The job's sampling with what the request overrules; with `greedy`, at temperature 0 whatever it says.
    pub(crate) fn sampling(&self, defaults: &Sampling, greedy: bool) -> Sampling {
        Sampling {
            temperature: if greedy { 0.0 } else { self.temperature.unwrap_or(defaults.temperature) },
            top_p: self.top_p.unwrap_or(defaults.top_p),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            max_tokens: self.max_tokens.unwrap_or(defaults.max_tokens),
        }
    }
}

/// The conversation as the template and the timeline tree take it.
#[derive(Debug)]
pub(crate) struct Conversation<'a> {
    pub(crate) messages: Vec<TemplateValue>,
    pub(crate) canonical: Vec<CanonicalMessage<'a>>,
    pub(crate) tools: TemplateValue,
    pub(crate) tools_hash: Hash,
}

impl<'a> Chat<'a> {
    pub(crate) fn conversation(self, format: &ChatFormat) -> Conversation<'a> {
        let messages = self.messages.iter().map(Message::template_value).collect();
        let canonical = self.messages.into_iter().map(|m| m.canonical(format)).collect();
        let (tools, tools_hash) = if self.tools.is_empty() {
            (TemplateValue::from(()), Hash::default())
        } else {
            let text = serde_json::to_vec(&self.tools).unwrap_or_default();
            (TemplateValue::from_serialize(&self.tools), Hash::of(&text))
        };
        Conversation { messages, canonical, tools, tools_hash }
    }
}

/// A function tool in the shape that chat templates print. Absent parts are left out, as a client of OpenAI's chat
/// completions would leave them out.
pub(crate) fn function_tool(name: &str, description: Option<&str>, parameters: Option<&Value>) -> Value {
    let mut function = serde_json::Map::new();
    function.insert("name".into(), name.into());
    if let Some(description) = description {
        function.insert("description".into(), description.into());
    }
    if let Some(parameters) = parameters {
        function.insert("parameters".into(), parameters.clone());
    }
    json!({ "type": "function", "function": function })
}

/// What a template sees of a message.
#[derive(Serialize)]
struct TemplateMessage<'a> {
    role: &'a str,
    content: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<TemplateCall>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_call_id: Option<&'a str>,
}

#[derive(Serialize)]
struct TemplateCall {
    #[serde(rename = "type")]
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    function: TemplateFunction,
}

#[derive(Serialize)]
struct TemplateFunction {
    name: String,
    arguments: Value,
}

/// Without white space at both ends, which clients trim off an answer.
fn trim(text: Cow<'_, str>) -> Cow<'_, str> {
    match text {
        Cow::Borrowed(s) => Cow::Borrowed(s.trim()),
        Cow::Owned(s) => Cow::Owned(s.trim().to_owned()),
    }
}

/// One spelling for one set of arguments: keys sorted, no white space.
fn canonical_arguments(mut arguments: Value) -> String {
    arguments.sort_all_objects();
    arguments.to_string()
}

/// Arguments as they are written; what is no JSON stays a text.
pub(crate) fn parse_arguments(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()))
}

/// The answer as the tree compares it with what the client sends back.
pub(crate) fn canonical_answer<'a>(
    content: Cow<'a, str>,
    calls: impl Iterator<Item = (&'a str, &'a str)>,
) -> CanonicalMessage<'a> {
    let calls = calls
        .map(|(name, arguments)| (Cow::Borrowed(name), Cow::Owned(canonical_arguments(parse_arguments(arguments)))));
    CanonicalMessage {
        role: Role::Assistant.name().into(),
        text: trim(content),
        tool_calls: calls.collect(),
        ..CanonicalMessage::default()
    }
}
