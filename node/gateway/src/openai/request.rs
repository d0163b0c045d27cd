//! A chat request: every field is honoured or refused by name.

use super::ApiError;
use super::content::Content;
use crate::text::{ChatFormat, TemplateValue};
use serde::de::{Deserializer, IgnoredAny};
use serde::{Deserialize, Serialize, de};
use serde_json::Value;
use starling_protocol::Hash;
use starling_protocol::job::Sampling;
use starling_protocol::timeline::CanonicalMessage;
use std::borrow::Cow;
use std::fmt;

/// Most answers to one call.
pub(crate) const CHOICES_MAX: u32 = 16;
const STOPS_MAX: usize = 4;
const STOP_LEN_BYTES_MAX: usize = 1024;

/// The body as it comes. A field that OpenAI knows and we do not honour stands here too, to be refused by name.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ChatRequest<'a> {
    #[serde(borrow)]
    pub(crate) model: Cow<'a, str>,
    #[serde(borrow)]
    messages: Vec<Message<'a>>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    stop: Option<Stop>,
    seed: Option<i64>,
    n: Option<u32>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    logprobs: Option<bool>,
    top_logprobs: Option<u8>,
    response_format: Option<Value>,
    // Labels for the provider's own books: they change no answer.
    #[serde(rename = "user")]
    _user: Option<IgnoredAny>,
    #[serde(rename = "metadata")]
    _metadata: Option<IgnoredAny>,
    #[serde(rename = "safety_identifier")]
    _safety_identifier: Option<IgnoredAny>,
    #[serde(rename = "prompt_cache_key")]
    _prompt_cache_key: Option<IgnoredAny>,
    // Not honoured; the value that changes nothing is let through.
    presence_penalty: Option<Value>,
    frequency_penalty: Option<Value>,
    logit_bias: Option<Value>,
    store: Option<Value>,
    service_tier: Option<Value>,
    modalities: Option<Value>,
    audio: Option<Value>,
    prediction: Option<Value>,
    reasoning_effort: Option<Value>,
    verbosity: Option<Value>,
    web_search_options: Option<Value>,
    functions: Option<Value>,
    function_call: Option<Value>,
    prompt_cache_retention: Option<Value>,
    moderation: Option<Value>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Message<'a> {
    #[serde(borrow)]
    role: Cow<'a, str>,
    #[serde(borrow)]
    content: Option<Content<'a>>,
    name: Option<String>,
    tool_calls: Option<Vec<MessageCall>>,
    tool_call_id: Option<String>,
    // Clients send an answer back with all its fields.
    refusal: Option<Value>,
    annotations: Option<Value>,
    audio: Option<Value>,
    function_call: Option<Value>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct MessageCall {
    #[serde(rename = "type")]
    kind: Option<String>,
    id: Option<String>,
    #[serde(rename = "index")]
    _index: Option<IgnoredAny>,
    function: CalledFunction,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CalledFunction {
    name: String,
    arguments: String,
}

#[derive(Debug, Default, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
struct StreamOptions {
    include_usage: Option<bool>,
    // Padding against eavesdroppers; there is none here.
    include_obfuscation: Option<bool>,
}

#[derive(Debug)]
struct Stop(Vec<String>);

/// A field's name, its value, and which values of it change nothing.
type Unhonoured<'a> = (&'static str, &'a Option<Value>, &'a dyn Fn(&Value) -> bool);

impl<'de> Deserialize<'de> for Stop {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct OneOrMore;
        impl<'de> de::Visitor<'de> for OneOrMore {
            type Value = Stop;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text or a list of texts")
            }
            fn visit_str<E: de::Error>(self, s: &str) -> Result<Stop, E> {
                Ok(Stop(vec![s.to_owned()]))
            }
            fn visit_seq<A: de::SeqAccess<'de>>(self, mut seq: A) -> Result<Stop, A::Error> {
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

/// How to answer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Options {
    pub(crate) sampling: Sampling,
    /// Whether the caller set the length, rather than leaving it to the defaults.
    pub(crate) max_tokens_given: bool,
    pub(crate) stops: Vec<String>,
    pub(crate) seed: Option<u64>,
    pub(crate) choices: u32,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) logprobs: bool,
    pub(crate) top_logprobs: u8,
    /// Whether tool calls are looked for.
    pub(crate) parse_tools: bool,
    pub(crate) parallel_tool_calls: bool,
}

/// The conversation as the template and the timeline tree take it.
#[derive(Debug)]
pub(crate) struct Conversation<'a> {
    pub(crate) messages: Vec<TemplateValue>,
    pub(crate) canonical: Vec<CanonicalMessage<'a>>,
    pub(crate) tools: TemplateValue,
    pub(crate) tools_hash: Hash,
}

impl<'a> ChatRequest<'a> {
    pub(crate) fn parse(body: &'a [u8]) -> Result<Self, ApiError> {
        let mut json = serde_json::Deserializer::from_slice(body);
        let request = serde_path_to_error::deserialize(&mut json).map_err(|e| ApiError::json(&e))?;
        json.end().map_err(|e| {
            ApiError::new(axum::http::StatusCode::BAD_REQUEST, "invalid_json", format!("after the body: {e}"))
        })?;
        Ok(request)
    }

    /// Checks every setting. `defaults` fill what the request leaves out; with `greedy`, its temperature is
    /// overruled.
    pub(crate) fn options(&self, defaults: &Sampling, greedy: bool) -> Result<Options, ApiError> {
        self.refuse_unhonoured()?;
        let mut sampling = *defaults;
        if let Some(t) = self.temperature {
            sampling.temperature = in_range("temperature", t, (0.0..=2.0).contains(&t), "a number from 0 to 2")?;
        }
        if greedy {
            sampling.temperature = 0.0;
        }
        if let Some(p) = self.top_p {
            sampling.top_p = in_range("top_p", p, p > 0.0 && p <= 1.0, "a number above 0, at most 1")?;
        }
        if let Some(k) = self.top_k {
            // -1 is what other servers call "all".
            let k = if k == -1 { 0 } else { k };
            sampling.top_k = u32::try_from(k).map_err(|_other| ApiError::invalid("top_k", "-1, 0 or a count"))?;
        }
        let given = match (self.max_completion_tokens, self.max_tokens) {
            (Some(a), Some(b)) if a != b => {
                let message = "`max_tokens` and `max_completion_tokens` differ: send one of them";
                return Err(ApiError::field("invalid_value", "max_tokens", message));
            }
            (Some(_), _) => Some((self.max_completion_tokens, "max_completion_tokens")),
            (None, Some(_)) => Some((self.max_tokens, "max_tokens")),
            (None, None) => None,
        };
        if let Some((Some(max), name)) = given {
            sampling.max_tokens = in_range(name, max, max >= 1, "at least 1")?;
        }
        let choices = self.n.unwrap_or(1);
        in_range("n", choices, (1..=CHOICES_MAX).contains(&choices), "1 to 16")?;
        let stream = self.stream.unwrap_or(false);
        let stream_options = self.stream_options.unwrap_or_default();
        if self.stream_options.is_some() && !stream {
            return Err(ApiError::field("invalid_value", "stream_options", "`stream_options` needs `stream`: true"));
        }
        if stream_options.include_obfuscation == Some(true) {
            return Err(ApiError::unsupported("stream_options.include_obfuscation", "chunks are not padded"));
        }
        let logprobs = self.logprobs.unwrap_or(false);
        let top_logprobs = self.top_logprobs.unwrap_or(0);
        in_range("top_logprobs", top_logprobs, top_logprobs <= 20, "0 to 20")?;
        if top_logprobs > 0 && !logprobs {
            return Err(ApiError::field("invalid_value", "top_logprobs", "`top_logprobs` needs `logprobs`: true"));
        }
        let stops = self.stop.as_ref().map_or(&[][..], |s| &s.0[..]);
        in_range("stop", (), stops.len() <= STOPS_MAX, "at most 4 texts")?;
        for stop in stops {
            let ok = !stop.is_empty() && stop.len() <= STOP_LEN_BYTES_MAX;
            in_range("stop", (), ok, "texts of 1 to 1024 bytes")?;
        }
        let parse_tools = match &self.tool_choice {
            None => self.tools.is_some(),
            Some(Value::String(s)) if s == "auto" => self.tools.is_some(),
            Some(Value::String(s)) if s == "none" => false,
            Some(_) => return Err(ApiError::unsupported("tool_choice", "only \"auto\" and \"none\" are")),
        };
        Ok(Options {
            sampling,
            max_tokens_given: given.is_some(),
            stops: stops.to_vec(),
            // Negative seeds are seeds too.
            seed: self.seed.map(i64::cast_unsigned),
            choices,
            stream,
            include_usage: stream_options.include_usage.unwrap_or(false),
            logprobs,
            top_logprobs,
            parse_tools,
            parallel_tool_calls: self.parallel_tool_calls.unwrap_or(true),
        })
    }

    fn refuse_unhonoured(&self) -> Result<(), ApiError> {
        let zero = |v: &Value| v.as_f64() == Some(0.0);
        let empty = |v: &Value| v.as_object().is_some_and(serde_json::Map::is_empty);
        let never = |_: &Value| false;
        let fields: [Unhonoured<'_>; 16] = [
            ("presence_penalty", &self.presence_penalty, &zero),
            ("frequency_penalty", &self.frequency_penalty, &zero),
            ("logit_bias", &self.logit_bias, &empty),
            ("store", &self.store, &|v| v == false),
            ("service_tier", &self.service_tier, &|v| v == "auto" || v == "default"),
            ("modalities", &self.modalities, &|v| *v == serde_json::json!(["text"])),
            ("audio", &self.audio, &never),
            ("prediction", &self.prediction, &never),
            ("reasoning_effort", &self.reasoning_effort, &never),
            ("verbosity", &self.verbosity, &never),
            ("web_search_options", &self.web_search_options, &never),
            ("functions", &self.functions, &never),
            ("function_call", &self.function_call, &never),
            ("prompt_cache_retention", &self.prompt_cache_retention, &never),
            ("moderation", &self.moderation, &never),
            ("response_format", &self.response_format, &|v| v["type"] == "text"),
        ];
        for (name, value, neutral) in fields {
            if value.as_ref().is_some_and(|v| !neutral(v)) {
                let why = match name {
                    "functions" | "function_call" => "use `tools`",
                    "response_format" => "only {\"type\": \"text\"} is",
                    _ => "leave it out",
                };
                return Err(ApiError::unsupported(name, why));
            }
        }
        Ok(())
    }

    /// Checks messages and tools and brings them into the template's and the tree's form.
    pub(crate) fn conversation(self, format: &ChatFormat) -> Result<Conversation<'a>, ApiError> {
        if self.messages.is_empty() {
            return Err(ApiError::invalid("messages", "at least one message"));
        }
        let mut messages = Vec::with_capacity(self.messages.len());
        let mut canonical = Vec::with_capacity(self.messages.len());
        for (i, message) in self.messages.into_iter().enumerate() {
            let (value, message) = message.convert(i, format)?;
            messages.push(value);
            canonical.push(message);
        }
        let tools = self.tools.unwrap_or_default();
        check_tools(&tools)?;
        let (tools, tools_hash) = if tools.is_empty() {
            (TemplateValue::from(()), Hash::default())
        } else {
            let text = serde_json::to_vec(&tools).unwrap_or_default();
            (TemplateValue::from_serialize(&tools), Hash::of(&text))
        };
        Ok(Conversation { messages, canonical, tools, tools_hash })
    }
}

fn in_range<T>(name: &'static str, value: T, ok: bool, expected: &str) -> Result<T, ApiError> {
    if ok { Ok(value) } else { Err(ApiError::invalid(name, expected)) }
}

/// What a template sees of a message.
#[derive(Serialize)]
struct TemplateMessage<'a> {
    role: &'a str,
    content: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<TemplateCall<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_call_id: Option<&'a str>,
}

#[derive(Serialize)]
struct TemplateCall<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    function: TemplateFunction<'a>,
}

#[derive(Serialize)]
struct TemplateFunction<'a> {
    name: &'a str,
    arguments: Value,
}

impl<'a> Message<'a> {
    fn convert(self, i: usize, format: &ChatFormat) -> Result<(TemplateValue, CanonicalMessage<'a>), ApiError> {
        let at = |field: &str| format!("messages[{i}].{field}");
        let role: Cow<'a, str> = match &*self.role {
            "developer" => "system".into(),
            "system" | "user" | "assistant" | "tool" => self.role,
            "function" => return Err(ApiError::unsupported(at("role"), "use role `tool`")),
            _ => return Err(ApiError::invalid(at("role"), "system, developer, user, assistant or tool")),
        };
        for (name, value) in [("audio", &self.audio), ("function_call", &self.function_call)] {
            if value.is_some() {
                return Err(ApiError::unsupported(at(name), "leave it out"));
            }
        }
        let empty = |v: &Value| v.as_array().is_some_and(Vec::is_empty);
        if self.annotations.as_ref().is_some_and(|v| !empty(v)) {
            return Err(ApiError::unsupported(at("annotations"), "leave it out"));
        }
        if self.refusal.as_ref().is_some_and(|v| v != "") {
            return Err(ApiError::unsupported(at("refusal"), "leave it out"));
        }
        let calls = self.tool_calls.unwrap_or_default();
        if !calls.is_empty() && role != "assistant" {
            return Err(ApiError::invalid(at("tool_calls"), "tool calls in an assistant's message only"));
        }
        if role == "tool" && self.tool_call_id.is_none() {
            let name = at("tool_call_id");
            let message = format!("`{name}` is required in a tool's message");
            return Err(ApiError::field("missing_required_parameter", name, message));
        }
        if role != "tool" && self.tool_call_id.is_some() {
            return Err(ApiError::invalid(at("tool_call_id"), "a call id in a tool's message only"));
        }
        let content: Cow<'a, str> = match self.content {
            Some(Content::Text(text)) => text,
            None if role == "assistant" => "".into(),
            None => {
                let name = at("content");
                let message = format!("`{name}` is required in a {role}'s message");
                return Err(ApiError::field("missing_required_parameter", name, message));
            }
            Some(Content::Parts(parts)) => {
                let mut text = String::new();
                for (j, part) in parts.into_iter().enumerate() {
                    let name = at(&format!("content[{j}].type"));
                    match (part.kind.as_str(), part.text) {
                        ("text", Some(t)) => text.push_str(&t),
                        ("text", None) => return Err(ApiError::invalid(at(&format!("content[{j}].text")), "a text")),
                        (kind, _) => {
                            let why = format!("only text parts are, and this is {kind:?}");
                            return Err(ApiError::unsupported(name, &why));
                        }
                    }
                }
                text.into()
            }
        };
        let mut arguments: Vec<Value> = Vec::with_capacity(calls.len());
        for (j, call) in calls.iter().enumerate() {
            if call.kind.as_deref().is_some_and(|kind| kind != "function") {
                return Err(ApiError::unsupported(at(&format!("tool_calls[{j}].type")), "only \"function\" is"));
            }
            let text = &call.function.arguments;
            arguments.push(serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.clone())));
        }
        let canonical_calls = calls
            .iter()
            .zip(&arguments)
            .map(|(call, a)| (Cow::Owned(call.function.name.clone()), Cow::Owned(canonical_arguments(a.clone()))));
        let canonical_calls = canonical_calls.collect();
        let value = TemplateValue::from_serialize(TemplateMessage {
            role: &role,
            content: &content,
            name: self.name.as_deref(),
            tool_calls: calls
                .iter()
                .zip(arguments)
                .map(|(call, arguments)| TemplateCall {
                    kind: "function",
                    id: call.id.as_deref(),
                    function: TemplateFunction { name: &call.function.name, arguments },
                })
                .collect(),
            tool_call_id: self.tool_call_id.as_deref(),
        });
        let text = if role == "assistant" { trim(content) } else { content };
        let canonical = CanonicalMessage {
            role,
            name: self.name.filter(|_| format.prints_name()).map(Cow::Owned),
            text,
            tool_calls: canonical_calls,
            tool_call_id: self.tool_call_id.filter(|_| format.prints_tool_call_id()).map(Cow::Owned),
        };
        Ok((value, canonical))
    }
}

/// Without white space at both ends, which clients trim off an answer.
fn trim(text: Cow<'_, str>) -> Cow<'_, str> {
    match text {
        Cow::Borrowed(s) => Cow::Borrowed(s.trim()),
        Cow::Owned(s) => Cow::Owned(s.trim().to_owned()),
    }
}

/// One spelling for one set of arguments: keys sorted, no white space.
pub(crate) fn canonical_arguments(mut arguments: Value) -> String {
    arguments.sort_all_objects();
    arguments.to_string()
}

/// The answer as the tree compares it with what the client sends back.
pub(crate) fn canonical_answer<'a>(
    content: &'a str,
    calls: impl Iterator<Item = (&'a str, &'a str)>,
) -> CanonicalMessage<'a> {
    let calls = calls.map(|(name, arguments)| {
        let value = serde_json::from_str(arguments).unwrap_or_else(|_| Value::String(arguments.to_owned()));
        (Cow::Borrowed(name), Cow::Owned(canonical_arguments(value)))
    });
    CanonicalMessage {
        role: "assistant".into(),
        text: content.trim().into(),
        tool_calls: calls.collect(),
        ..CanonicalMessage::default()
    }
}

fn check_tools(tools: &[Value]) -> Result<(), ApiError> {
    for (i, tool) in tools.iter().enumerate() {
        let at = |field: &str| format!("tools[{i}].{field}");
        match tool["type"].as_str() {
            Some("function") => {}
            Some(_) => return Err(ApiError::unsupported(at("type"), "only \"function\" is")),
            None => return Err(ApiError::invalid(at("type"), "\"function\"")),
        }
        let function = &tool["function"];
        if function["name"].as_str().is_none_or(str::is_empty) {
            return Err(ApiError::invalid(at("function.name"), "a name"));
        }
        if function["strict"] == true {
            return Err(ApiError::unsupported(at("function.strict"), "arguments are not constrained while sampling"));
        }
        if !function["parameters"].is_null() && !function["parameters"].is_object() {
            return Err(ApiError::invalid(at("function.parameters"), "a JSON schema"));
        }
    }
    Ok(())
}
