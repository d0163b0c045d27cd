//! A request for a response: every field is honoured or refused by name.

use super::store::Shelf;
use crate::api::ApiError;
use crate::api::fields::{
    self, LEAVE_IT_OUT, Object, default_tier, is_empty, is_false, never, objects, text_or_parts, zero,
};
use crate::request::{Chat, Message, MessageCall, Prompt, Request, Role, Settings, function_tool, parse_arguments};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::borrow::Cow;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ResponseRequest<'a> {
    #[serde(borrow)]
    model: Cow<'a, str>,
    input: Value,
    instructions: Option<String>,
    tools: Option<Value>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    max_output_tokens: Option<u32>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    text: Option<Value>,
    metadata: Option<Map<String, Value>>,
    previous_response_id: Option<String>,
    store: Option<bool>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    // Labels for the provider's own books: they change no answer.
    user: Option<String>,
    safety_identifier: Option<String>,
    prompt_cache_key: Option<String>,
    // Not honoured; the value that changes nothing is let through.
    truncation: Option<Value>,
    include: Option<Value>,
    reasoning: Option<Value>,
    background: Option<Value>,
    background_options: Option<Value>,
    context_management: Option<Value>,
    conversation: Option<Value>,
    image: Option<Value>,
    max_tool_calls: Option<Value>,
    moderation: Option<Value>,
    prompt: Option<Value>,
    prompt_cache_options: Option<Value>,
    prompt_cache_retention: Option<Value>,
    service_tier: Option<Value>,
    top_logprobs: Option<Value>,
    access_programs: Option<Value>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct StreamOptions {
    include_obfuscation: Option<bool>,
}

/// What the response says again of its request.
#[derive(Debug)]
pub(super) struct Echo {
    pub(super) instructions: Option<String>,
    pub(super) tools: Value,
    pub(super) tool_choice: &'static str,
    pub(super) max_output_tokens: Option<u32>,
    pub(super) metadata: Map<String, Value>,
    pub(super) previous_response_id: Option<String>,
    pub(super) store: bool,
    pub(super) user: Option<String>,
    pub(super) safety_identifier: Option<String>,
    pub(super) prompt_cache_key: Option<String>,
}

pub(super) struct Checked<'a> {
    pub(super) request: Request<'a>,
    pub(super) stream: bool,
    pub(super) stored: bool,
    /// What a later `previous_response_id` goes on from, without the answer: instructions are not inherited.
    pub(super) conversation: Vec<Message<'static>>,
    pub(super) echo: Echo,
}

const METADATA_MAX: usize = 16;

impl<'a> ResponseRequest<'a> {
    pub(super) fn parse(body: &'a [u8]) -> Result<Self, ApiError> {
        fields::parse(body)
    }

    pub(super) fn check(self, shelf: &Shelf) -> Result<Checked<'a>, ApiError> {
        self.refuse_unhonoured()?;
        let (tool_choice, offered) = match &self.tool_choice {
            None => ("auto", true),
            Some(Value::String(s)) if s == "auto" => ("auto", true),
            Some(Value::String(s)) if s == "none" => ("none", false),
            Some(_) => return Err(ApiError::unsupported("tool_choice", "only \"auto\" and \"none\" are")),
        };
        let metadata = self.metadata.unwrap_or_default();
        if metadata.len() > METADATA_MAX || !metadata.values().all(Value::is_string) {
            return Err(ApiError::invalid("metadata", "at most 16 texts by name"));
        }
        let stream = self.stream.unwrap_or(false);
        if let Some(options) = &self.stream_options {
            if !stream {
                return Err(ApiError::field(
                    "invalid_value",
                    "stream_options",
                    "`stream_options` needs `stream`: true",
                ));
            }
            if options.include_obfuscation == Some(true) {
                return Err(ApiError::unsupported("stream_options.include_obfuscation", "events are not padded"));
            }
        }
        check_text(self.text)?;
        let raw_tools = self.tools.unwrap_or_else(|| json!([]));
        let tools = tools(raw_tools.clone())?;
        let settings = Settings {
            temperature: fields::temperature(self.temperature, 2)?,
            top_p: fields::top_p(self.top_p)?,
            top_k: fields::top_k(self.top_k)?,
            max_tokens: fields::max_tokens("max_output_tokens", self.max_output_tokens)?,
            parse_tools: offered && !tools.is_empty(),
            parallel_tool_calls: self.parallel_tool_calls.unwrap_or(true),
            ..Settings::default()
        };
        let mut conversation = Vec::new();
        if let Some(id) = &self.previous_response_id {
            let previous = shelf.get(id).ok_or_else(|| {
                let message =
                    format!("response {id:?} is not kept here for this key: it was never stored, or is forgotten");
                ApiError::field("previous_response_not_found", "previous_response_id", message)
            })?;
            conversation.extend(previous.iter().cloned());
        }
        read_input(self.input, &mut conversation)?;
        let mut messages = Vec::with_capacity(conversation.len() + 1);
        messages.extend(self.instructions.as_ref().map(|text| Message::new(Role::System, text.clone())));
        messages.extend(conversation.iter().cloned());
        let stored = self.store.unwrap_or(true);
        let echo = Echo {
            instructions: self.instructions,
            tools: raw_tools,
            tool_choice,
            max_output_tokens: self.max_output_tokens,
            metadata,
            previous_response_id: self.previous_response_id,
            store: stored,
            user: self.user,
            safety_identifier: self.safety_identifier,
            prompt_cache_key: self.prompt_cache_key,
        };
        let request = Request { model: self.model, prompt: Prompt::Chat(Chat { messages, tools }), settings };
        Ok(Checked { request, stream, stored, conversation, echo })
    }

    fn refuse_unhonoured(&self) -> Result<(), ApiError> {
        // There is no reasoning to be included.
        fn without_effect(v: &Value) -> bool {
            v.as_array().is_some_and(|list| list.iter().all(|i| i == "reasoning.encrypted_content"))
        }
        fn no_reasoning(v: &Value) -> bool {
            v.as_object().is_some_and(|o| o.values().all(|v| v.is_null() || v == "none"))
        }
        fields::refuse(&[
            ("truncation", &self.truncation, |v| v == "disabled", "history is never cut"),
            ("include", &self.include, without_effect, LEAVE_IT_OUT),
            ("reasoning", &self.reasoning, no_reasoning, LEAVE_IT_OUT),
            ("background", &self.background, is_false, LEAVE_IT_OUT),
            ("background_options", &self.background_options, never, LEAVE_IT_OUT),
            ("context_management", &self.context_management, is_empty, LEAVE_IT_OUT),
            ("conversation", &self.conversation, never, "use `previous_response_id`"),
            ("image", &self.image, never, LEAVE_IT_OUT),
            ("max_tool_calls", &self.max_tool_calls, never, "there are no built-in tools"),
            ("moderation", &self.moderation, never, LEAVE_IT_OUT),
            ("prompt", &self.prompt, never, LEAVE_IT_OUT),
            ("prompt_cache_options", &self.prompt_cache_options, never, LEAVE_IT_OUT),
            ("prompt_cache_retention", &self.prompt_cache_retention, never, LEAVE_IT_OUT),
            ("service_tier", &self.service_tier, default_tier, LEAVE_IT_OUT),
            ("top_logprobs", &self.top_logprobs, zero, "use chat completions for logprobs"),
            ("access_programs", &self.access_programs, never, LEAVE_IT_OUT),
        ])
    }
}

fn check_text(text: Option<Value>) -> Result<(), ApiError> {
    let Some(text) = text else { return Ok(()) };
    let mut text = Object::new("text", text)?;
    text.refuse("format", |v| v["type"] == "text", "only {\"type\": \"text\"} is")?;
    text.refuse("verbosity", |v| v == "medium", LEAVE_IT_OUT)?;
    text.finish()
}

/// Function tools, in the shape of chat completions.
fn tools(tools: Value) -> Result<Vec<Value>, ApiError> {
    let mut list = Vec::new();
    for mut tool in objects("tools", tools)? {
        if tool.need_text("type")? != "function" {
            return Err(ApiError::unsupported(tool.at("type"), "only \"function\" is"));
        }
        let name = tool.need_text("name")?;
        if name.is_empty() {
            return Err(ApiError::invalid(tool.at("name"), "a name"));
        }
        let description = tool.text("description")?;
        let parameters = tool.take("parameters");
        if parameters.as_ref().is_some_and(|p| !p.is_object()) {
            return Err(ApiError::invalid(tool.at("parameters"), "a JSON schema"));
        }
        tool.refuse("strict", is_false, "arguments are not constrained while sampling")?;
        for field in ["allowed_callers", "async", "defer_loading", "output_schema"] {
            tool.refuse(field, is_false, LEAVE_IT_OUT)?;
        }
        tool.finish()?;
        list.push(function_tool(&name, description.as_deref(), parameters.as_ref()));
    }
    Ok(list)
}

/// Items as messages. An assistant's calls, and text that follows them, belong to one message: so the model wrote them.
fn read_input(input: Value, messages: &mut Vec<Message<'static>>) -> Result<(), ApiError> {
    if let Value::String(text) = input {
        messages.push(Message::new(Role::User, text));
        return Ok(());
    }
    let items = objects("input", input).map_err(|e| {
        if e.param.as_deref() == Some("input") { ApiError::invalid("input", "a text or a list of items") } else { e }
    })?;
    if items.is_empty() && messages.is_empty() {
        return Err(ApiError::invalid("input", "at least one item"));
    }
    let inherited = messages.len();
    for mut item in items {
        // Clients send the items of an answer back with all their fields.
        item.ignore(&["id", "status", "phase"]);
        let kind = item.text("type")?;
        // Only what stands in this input goes together; an inherited answer is complete.
        let own = messages.len() > inherited;
        let last = messages.last_mut().filter(|m| own && m.role == Role::Assistant);
        match kind.as_deref() {
            None | Some("message") => {
                let role = item.need_text("role")?;
                let role = match role.as_str() {
                    "user" => Role::User,
                    "assistant" => Role::Assistant,
                    "system" | "developer" => Role::System,
                    _ => return Err(ApiError::invalid(item.at("role"), "user, assistant, system or developer")),
                };
                let kinds: &[&str] = if role == Role::Assistant { &["output_text"] } else { &["input_text"] };
                let content = item.need("content")?;
                let text = text_or_parts(&item.at("content"), content, kinds)?;
                match last {
                    Some(last) if role == Role::Assistant && !last.calls.is_empty() => {
                        last.text.to_mut().push_str(&text)
                    }
                    _ => messages.push(Message::new(role, text)),
                }
            }
            Some("function_call") => {
                item.refuse("namespace", never, LEAVE_IT_OUT)?;
                item.refuse("caller", |v| v["type"] == "direct", LEAVE_IT_OUT)?;
                item.refuse("async", is_false, LEAVE_IT_OUT)?;
                let call = MessageCall {
                    id: Some(item.need_text("call_id")?.into()),
                    name: item.need_text("name")?.into(),
                    arguments: parse_arguments(&item.need_text("arguments")?),
                };
                match last {
                    Some(last) => last.calls.push(call),
                    None => messages.push(Message { calls: vec![call], ..Message::new(Role::Assistant, "") }),
                }
            }
            Some("function_call_output") => {
                item.refuse("caller", |v| v["type"] == "direct", LEAVE_IT_OUT)?;
                let id = item.need_text("call_id")?;
                let output = item.need("output")?;
                let text = text_or_parts(&item.at("output"), output, &["input_text"])?;
                messages.push(Message { tool_call_id: Some(id.into()), ..Message::new(Role::Tool, text) });
            }
            Some(kind) => {
                let why = format!("only message, function_call and function_call_output are, and this is {kind:?}");
                return Err(ApiError::unsupported(item.at("type"), &why));
            }
        }
        item.finish()?;
    }
    Ok(())
}
