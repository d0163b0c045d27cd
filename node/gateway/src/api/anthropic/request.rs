//! A request for a message: every field is honoured or refused by name.

use crate::api::ApiError;
use crate::api::fields::{self, LEAVE_IT_OUT, Object, is_empty, is_false, never, objects, text_or_parts};
use crate::request::{Chat, Message, MessageCall, Prompt, Request, Role, Settings, function_tool};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use std::borrow::Cow;

const STOPS_MAX: usize = 16;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MessageRequest<'a> {
    #[serde(borrow)]
    model: Cow<'a, str>,
    messages: Value,
    system: Option<Value>,
    tools: Option<Value>,
    tool_choice: Option<Value>,
    max_tokens: Option<u32>,
    stop_sequences: Option<Vec<String>>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    stream: Option<bool>,
    // Labels and marks for the provider's own books and caches: they change no answer.
    #[serde(rename = "metadata")]
    _metadata: Option<IgnoredAny>,
    #[serde(rename = "cache_control")]
    _cache_control: Option<IgnoredAny>,
    // Not honoured; the value that changes nothing is let through.
    thinking: Option<Value>,
    service_tier: Option<Value>,
    speed: Option<Value>,
    container: Option<Value>,
    context_management: Option<Value>,
    diagnostics: Option<Value>,
    inference_geo: Option<Value>,
    mcp_servers: Option<Value>,
    output_config: Option<Value>,
    output_format: Option<Value>,
    user_profile_id: Option<Value>,
    workspace_id: Option<Value>,
}

pub(super) struct Checked<'a> {
    pub(super) request: Request<'a>,
    pub(super) stream: bool,
}

impl<'a> MessageRequest<'a> {
    pub(super) fn parse(body: &'a [u8]) -> Result<Self, ApiError> {
        fields::parse(body)
    }

    pub(super) fn check(mut self) -> Result<Checked<'a>, ApiError> {
        self.refuse_unhonoured()?;
        if self.max_tokens.is_none() {
            return Err(ApiError::field("missing_required_parameter", "max_tokens", "`max_tokens` is required"));
        }
        let stream = self.stream.unwrap_or(false);
        let (offered, parallel_tool_calls) = tool_choice(self.tool_choice.take())?;
        let mut settings = Settings {
            temperature: fields::temperature(self.temperature, 1)?,
            top_p: fields::top_p(self.top_p)?,
            top_k: fields::top_k(self.top_k)?,
            max_tokens: fields::max_tokens("max_tokens", self.max_tokens)?,
            stops: fields::stops("stop_sequences", self.stop_sequences.take().unwrap_or_default(), STOPS_MAX)?,
            parallel_tool_calls,
            ..Settings::default()
        };
        let (model, chat) = self.chat()?;
        settings.parse_tools = offered && !chat.tools.is_empty();
        Ok(Checked { request: Request { model, prompt: Prompt::Chat(chat), settings }, stream })
    }

    /// For a count: what only concerns the answer may be there and is checked, but is not required.
    pub(super) fn check_count(mut self) -> Result<(Cow<'a, str>, Chat<'static>), ApiError> {
        self.refuse_unhonoured()?;
        for (name, given) in [
            ("max_tokens", self.max_tokens.is_some()),
            ("stop_sequences", self.stop_sequences.is_some()),
            ("temperature", self.temperature.is_some()),
            ("top_p", self.top_p.is_some()),
            ("top_k", self.top_k.is_some()),
            ("stream", self.stream.is_some()),
        ] {
            if given {
                let message = format!("`{name}` is not a field of a count");
                return Err(ApiError::field("unknown_parameter", name, message));
            }
        }
        tool_choice(self.tool_choice.take())?;
        self.chat()
    }

    fn chat(self) -> Result<(Cow<'a, str>, Chat<'static>), ApiError> {
        let mut messages = Vec::new();
        if let Some(system) = self.system {
            messages.push(Message::new(Role::System, text_or_parts("system", system, &["text"])?));
        }
        let list = objects("messages", self.messages)?;
        if list.is_empty() {
            return Err(ApiError::invalid("messages", "at least one message"));
        }
        for message in list {
            read_message(message, &mut messages)?;
        }
        if messages.last().is_some_and(|m| m.role == Role::Assistant) {
            let why = "the last message may not be the assistant's: an answer is not begun by the caller";
            return Err(ApiError::unsupported("messages", why));
        }
        let tools = self.tools.map(tools).transpose()?.unwrap_or_default();
        Ok((self.model, Chat { messages, tools }))
    }

    fn refuse_unhonoured(&self) -> Result<(), ApiError> {
        let disabled = |v: &Value| v["type"] == "disabled";
        fields::refuse(&[
            ("thinking", &self.thinking, disabled, "only {\"type\": \"disabled\"} is"),
            ("service_tier", &self.service_tier, |v| v == "auto" || v == "standard_only", LEAVE_IT_OUT),
            ("speed", &self.speed, |v| v == "standard", LEAVE_IT_OUT),
            ("container", &self.container, never, LEAVE_IT_OUT),
            ("context_management", &self.context_management, is_empty, LEAVE_IT_OUT),
            ("diagnostics", &self.diagnostics, never, LEAVE_IT_OUT),
            ("inference_geo", &self.inference_geo, never, LEAVE_IT_OUT),
            ("mcp_servers", &self.mcp_servers, is_empty, LEAVE_IT_OUT),
            ("output_config", &self.output_config, is_empty, LEAVE_IT_OUT),
            ("output_format", &self.output_format, never, LEAVE_IT_OUT),
            ("user_profile_id", &self.user_profile_id, never, LEAVE_IT_OUT),
            ("workspace_id", &self.workspace_id, never, LEAVE_IT_OUT),
        ])
    }
}

/// Whether calls are looked for, and whether there may be several.
fn tool_choice(choice: Option<Value>) -> Result<(bool, bool), ApiError> {
    let Some(choice) = choice else { return Ok((true, true)) };
    let mut choice = Object::new("tool_choice", choice)?;
    let offered = match choice.need_text("type")?.as_str() {
        "auto" => true,
        "none" => false,
        "any" | "tool" => {
            return Err(ApiError::unsupported("tool_choice.type", "only \"auto\" and \"none\" are"));
        }
        _ => return Err(ApiError::invalid("tool_choice.type", "auto, any, tool or none")),
    };
    let one = choice.bool("disable_parallel_tool_use")?.unwrap_or(false);
    choice.finish()?;
    Ok((offered, !one))
}

/// Tools of the caller's, in the shape of OpenAI's chat completions.
fn tools(tools: Value) -> Result<Vec<Value>, ApiError> {
    let mut list = Vec::new();
    for mut tool in objects("tools", tools)? {
        if tool.text("type")?.is_some_and(|kind| kind != "custom") {
            return Err(ApiError::unsupported(tool.at("type"), "only \"custom\" is"));
        }
        let name = tool.need_text("name")?;
        if name.is_empty() {
            return Err(ApiError::invalid(tool.at("name"), "a name"));
        }
        let description = tool.text("description")?;
        let schema = tool.need("input_schema")?;
        if !schema.is_object() {
            return Err(ApiError::invalid(tool.at("input_schema"), "a JSON schema"));
        }
        tool.refuse("strict", is_false, "arguments are not constrained while sampling")?;
        for field in ["defer_loading", "eager_input_streaming"] {
            tool.refuse(field, is_false, LEAVE_IT_OUT)?;
        }
        tool.refuse("allowed_callers", |v| *v == serde_json::json!(["direct"]), LEAVE_IT_OUT)?;
        tool.refuse("input_examples", is_empty, LEAVE_IT_OUT)?;
        tool.ignore(&["cache_control"]);
        tool.finish()?;
        list.push(function_tool(&name, description.as_deref(), Some(&schema)));
    }
    Ok(list)
}

/// One message. Results of tools become messages of their own, in their order; so does the text between them.
fn read_message(mut message: Object, messages: &mut Vec<Message<'static>>) -> Result<(), ApiError> {
    let role = match message.need_text("role")?.as_str() {
        "user" => Role::User,
        "assistant" => Role::Assistant,
        _ => return Err(ApiError::invalid(message.at("role"), "user or assistant")),
    };
    let content = message.need("content")?;
    let at = message.at("content");
    message.finish()?;
    let blocks = match content {
        Value::String(text) => {
            messages.push(Message::new(role, text));
            return Ok(());
        }
        Value::Array(_) => objects(&at, content)?,
        _ => return Err(ApiError::invalid(at, "a text or a list of blocks")),
    };
    // Text that waits for what follows it: blocks of text that stand together are one text.
    let mut text: Option<String> = None;
    let mut calls = Vec::new();
    let before = messages.len();
    for mut block in blocks {
        let kind = block.need_text("type")?;
        block.ignore(&["cache_control"]);
        match (kind.as_str(), role) {
            ("text", _) => {
                block.refuse("citations", is_empty, LEAVE_IT_OUT)?;
                let more = block.need_text("text")?;
                text.get_or_insert_default().push_str(&more);
            }
            ("tool_use", Role::Assistant) => {
                block.refuse("caller", |v| v["type"] == "direct", LEAVE_IT_OUT)?;
                block.refuse("toolset_name", never, LEAVE_IT_OUT)?;
                let id = block.need_text("id")?;
                let name = block.need_text("name")?;
                let arguments = block.need("input")?;
                if !arguments.is_object() {
                    return Err(ApiError::invalid(block.at("input"), "an object"));
                }
                calls.push(MessageCall { id: Some(id.into()), name: name.into(), arguments });
            }
            ("tool_result", Role::User) => {
                if let Some(text) = text.take() {
                    messages.push(Message::new(Role::User, text));
                }
                block.refuse("toolset_name", never, LEAVE_IT_OUT)?;
                let id = block.need_text("tool_use_id")?;
                let mut result = match block.take("content") {
                    Some(content) => text_or_parts(&block.at("content"), content, &["text"])?,
                    None => String::new(),
                };
                if block.bool("is_error")? == Some(true) {
                    // Chat templates know no failed results: the model reads it.
                    result.insert_str(0, "Error: ");
                }
                messages.push(Message { tool_call_id: Some(id.into()), ..Message::new(Role::Tool, result) });
            }
            ("tool_use" | "tool_result", _) => {
                let expected = "tool_use in an assistant's message, tool_result in a user's";
                return Err(ApiError::invalid(block.at("type"), expected));
            }
            (other, _) => {
                let why = format!("only text, tool_use and tool_result are, and this is {other:?}");
                return Err(ApiError::unsupported(block.at("type"), &why));
            }
        }
        block.finish()?;
    }
    // A message without any block is one all the same.
    if text.is_some() || !calls.is_empty() || messages.len() == before {
        messages.push(Message { calls, ..Message::new(role, text.unwrap_or_default()) });
    }
    Ok(())
}
