//! A chat request: every field is honoured or refused by name.

use crate::api::ApiError;
use crate::api::content::{Content, join_parts};
use crate::api::fields::{
    self, LEAVE_IT_OUT, Stop, StreamOptions, default_tier, in_range, is_empty, is_false, never, zero,
};
use crate::request::{CHOICES_MAX, Chat, Message as ChatMessage, MessageCall as ChatCall, Prompt, Request, Role};
use crate::request::{Settings, parse_arguments};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use std::borrow::Cow;

const STOPS_MAX: usize = 4;

/// The body as it comes. A field that OpenAI knows and we do not honour stands here too, to be refused by name.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ChatRequest<'a> {
    #[serde(borrow)]
    model: Cow<'a, str>,
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

/// What concerns the form of the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Options {
    pub(super) stream: bool,
    pub(super) include_usage: bool,
}

impl<'a> ChatRequest<'a> {
    pub(super) fn parse(body: &'a [u8]) -> Result<Self, ApiError> {
        fields::parse(body)
    }

    pub(super) fn options(&self) -> Result<Options, ApiError> {
        let stream = self.stream.unwrap_or(false);
        Ok(Options { stream, include_usage: StreamOptions::check(self.stream_options, stream)? })
    }

    /// Checks everything.
    pub(super) fn into_request(mut self) -> Result<Request<'a>, ApiError> {
        let settings = self.settings()?;
        if self.messages.is_empty() {
            return Err(ApiError::invalid("messages", "at least one message"));
        }
        let messages = self.messages.into_iter().enumerate().map(|(i, m)| m.convert(i));
        let messages = messages.collect::<Result<_, _>>()?;
        let tools = self.tools.unwrap_or_default();
        check_tools(&tools)?;
        Ok(Request { model: self.model, prompt: Prompt::Chat(Chat { messages, tools }), settings })
    }

    fn settings(&mut self) -> Result<Settings, ApiError> {
        self.refuse_unhonoured()?;
        let max_tokens = match (self.max_completion_tokens, self.max_tokens) {
            (Some(a), Some(b)) if a != b => {
                let message = "`max_tokens` and `max_completion_tokens` differ: send one of them";
                return Err(ApiError::field("invalid_value", "max_tokens", message));
            }
            (given @ Some(_), _) => fields::max_tokens("max_completion_tokens", given)?,
            (None, given) => fields::max_tokens("max_tokens", given)?,
        };
        let choices = self.n.unwrap_or(1);
        in_range("n", choices, (1..=CHOICES_MAX).contains(&choices), "1 to 16")?;
        let logprobs = self.logprobs.unwrap_or(false);
        let top_logprobs = self.top_logprobs.unwrap_or(0);
        in_range("top_logprobs", top_logprobs, top_logprobs <= 20, "0 to 20")?;
        if top_logprobs > 0 && !logprobs {
            return Err(ApiError::field("invalid_value", "top_logprobs", "`top_logprobs` needs `logprobs`: true"));
        }
        let parse_tools = match &self.tool_choice {
            None => self.tools.is_some(),
            Some(Value::String(s)) if s == "auto" => self.tools.is_some(),
            Some(Value::String(s)) if s == "none" => false,
            Some(_) => return Err(ApiError::unsupported("tool_choice", "only \"auto\" and \"none\" are")),
        };
        Ok(Settings {
            temperature: fields::temperature(self.temperature, 2)?,
            top_p: fields::top_p(self.top_p)?,
            top_k: fields::top_k(self.top_k)?,
            max_tokens,
            open_max_tokens: None,
            stops: fields::stops("stop", self.stop.take().unwrap_or_default().0, STOPS_MAX)?,
            seed: fields::seed(self.seed),
            choices,
            logprobs,
            top_logprobs,
            parse_tools,
            parallel_tool_calls: self.parallel_tool_calls.unwrap_or(true),
        })
    }

    fn refuse_unhonoured(&self) -> Result<(), ApiError> {
        let text = |v: &Value| *v == serde_json::json!(["text"]);
        fields::refuse(&[
            ("presence_penalty", &self.presence_penalty, zero, LEAVE_IT_OUT),
            ("frequency_penalty", &self.frequency_penalty, zero, LEAVE_IT_OUT),
            ("logit_bias", &self.logit_bias, is_empty, LEAVE_IT_OUT),
            ("store", &self.store, is_false, LEAVE_IT_OUT),
            ("service_tier", &self.service_tier, default_tier, LEAVE_IT_OUT),
            ("modalities", &self.modalities, text, LEAVE_IT_OUT),
            ("audio", &self.audio, never, LEAVE_IT_OUT),
            ("prediction", &self.prediction, never, LEAVE_IT_OUT),
            ("reasoning_effort", &self.reasoning_effort, never, LEAVE_IT_OUT),
            ("verbosity", &self.verbosity, never, LEAVE_IT_OUT),
            ("web_search_options", &self.web_search_options, never, LEAVE_IT_OUT),
            ("functions", &self.functions, never, "use `tools`"),
            ("function_call", &self.function_call, never, "use `tools`"),
            ("prompt_cache_retention", &self.prompt_cache_retention, never, LEAVE_IT_OUT),
            ("moderation", &self.moderation, never, LEAVE_IT_OUT),
            ("response_format", &self.response_format, |v| v["type"] == "text", "only {\"type\": \"text\"} is"),
        ])
    }
}

impl<'a> Message<'a> {
    fn convert(self, i: usize) -> Result<ChatMessage<'a>, ApiError> {
        let at = |field: &str| format!("messages[{i}].{field}");
        let role = match &*self.role {
            "developer" | "system" => Role::System,
            "user" => Role::User,
            "assistant" => Role::Assistant,
            "tool" => Role::Tool,
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
        if !calls.is_empty() && role != Role::Assistant {
            return Err(ApiError::invalid(at("tool_calls"), "tool calls in an assistant's message only"));
        }
        if role == Role::Tool && self.tool_call_id.is_none() {
            let name = at("tool_call_id");
            let message = format!("`{name}` is required in a tool's message");
            return Err(ApiError::field("missing_required_parameter", name, message));
        }
        if role != Role::Tool && self.tool_call_id.is_some() {
            return Err(ApiError::invalid(at("tool_call_id"), "a call id in a tool's message only"));
        }
        let content: Cow<'a, str> = match self.content {
            Some(Content::Text(text)) => text,
            None if role == Role::Assistant => "".into(),
            None => {
                let name = at("content");
                let message = format!("`{name}` is required in a {}'s message", self.role);
                return Err(ApiError::field("missing_required_parameter", name, message));
            }
            Some(Content::Parts(parts)) => join_parts(parts, "text", &at("content"))?.into(),
        };
        let mut converted = Vec::with_capacity(calls.len());
        for (j, call) in calls.into_iter().enumerate() {
            if call.kind.as_deref().is_some_and(|kind| kind != "function") {
                return Err(ApiError::unsupported(at(&format!("tool_calls[{j}].type")), "only \"function\" is"));
            }
            converted.push(ChatCall {
                id: call.id.map(Cow::Owned),
                name: call.function.name.into(),
                arguments: parse_arguments(&call.function.arguments),
            });
        }
        Ok(ChatMessage {
            role,
            name: self.name.map(Cow::Owned),
            text: content,
            calls: converted,
            tool_call_id: self.tool_call_id.map(Cow::Owned),
        })
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
