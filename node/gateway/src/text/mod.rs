//! The text side of a model: chat template, tokenizer, stop tokens and tool calls.

pub mod byte_model;
mod detokenize;
mod python;
mod stop;
mod template;
mod tools;

pub use detokenize::Detokenizer;
pub use minijinja::Value as TemplateValue;
pub use stop::StopScanner;
pub use tools::{EmbeddedFormat, HermesFormat, Piece, PlainText, ToolCall, ToolCallParser};

use detokenize::ByteTable;
use serde_json::Value;
use std::borrow::Cow;
use std::collections::BTreeMap;
use template::ChatTemplate;
use tokenizers::Tokenizer;

/// A model's files, as bytes of its Hugging Face folder.
#[derive(Clone, Copy, Debug, Default)]
pub struct ModelFiles<'a> {
    /// `tokenizer.json`.
    pub tokenizer: &'a [u8],
    /// `tokenizer_config.json`.
    pub tokenizer_config: Option<&'a [u8]>,
    /// `chat_template.jinja`; goes before the template in `tokenizer_config.json`.
    pub chat_template: Option<&'a [u8]>,
    /// `config.json`.
    pub config: &'a [u8],
    /// `generation_config.json`.
    pub generation_config: Option<&'a [u8]>,
}

/// Why a model's files make no chat format, or a conversation cannot be rendered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// A file is malformed or lacks something. The model cannot be served.
    #[error("{file}: {reason}")]
    File {
        /// Its name.
        file: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// The template does not compile. The model cannot be served.
    #[error("chat template: {0}")]
    Template(String),
    /// The template refuses this conversation, in its own words. The caller's fault.
    #[error("the model's chat template refuses the conversation: {0}")]
    Render(String),
    /// The tokenizer failed.
    #[error("tokenizer: {0}")]
    Encode(String),
}

/// How the model writes tool calls: `tool_format` in `tokenizer_config.json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// `starling-byte`, see [`EmbeddedFormat`].
    StarlingByte,
    /// `hermes`, the default, see [`HermesFormat`].
    Hermes,
}

/// Everything between messages and token ids for one model. Built once a model, shared by all calls.
#[derive(Debug)]
pub struct ChatFormat {
    tokenizer: Tokenizer,
    template: ChatTemplate,
    bytes: Option<ByteTable>,
    /// Special tokens and their text.
    specials: BTreeMap<u32, String>,
    stop_ids: Vec<u32>,
    /// What the template prints after an assistant's content, end token included.
    terminator: String,
    /// The token in `terminator` that ends the turn, and where its text ends there.
    end: Option<(u32, usize)>,
    context_len: usize,
    tool_format: ToolFormat,
    prints_tool_call_id: bool,
    prints_name: bool,
}

/// What `transformers` hands a template by these names, where the tokenizer has it.
const SPECIAL_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Refuses a tokenizer with ids that the model has no embedding for.
fn check_vocabulary(tokenizer: &Tokenizer, config: &Value) -> Result<(), FormatError> {
    let Some(size) = config["vocab_size"].as_u64() else { return Ok(()) };
    match tokenizer.get_vocab(true).into_iter().max_by_key(|(_, id)| *id) {
        Some((text, id)) if u64::from(id) >= size => Err(FormatError::File {
            file: "tokenizer.json",
            reason: format!("expected ids below {size}, the vocab_size of config.json, got {id} for {text:?}"),
        }),
        _ => Ok(()),
    }
}

fn parse_json(file: &'static str, bytes: &[u8]) -> Result<Value, FormatError> {
    serde_json::from_slice(bytes).map_err(|e| FormatError::File { file, reason: e.to_string() })
}

impl ChatFormat {
    /// Reads a model's files.
    ///
    /// # Errors
    /// [`FormatError`] naming the file or template at fault.
    pub fn new(files: &ModelFiles<'_>) -> Result<Self, FormatError> {
        let tokenizer = Tokenizer::from_bytes(files.tokenizer)
            .map_err(|e| FormatError::File { file: "tokenizer.json", reason: e.to_string() })?;
        let tokenizer_json = parse_json("tokenizer.json", files.tokenizer)?;
        let config = parse_json("config.json", files.config)?;
        check_vocabulary(&tokenizer, &config)?;
        let tokenizer_config = match files.tokenizer_config {
            Some(bytes) => parse_json("tokenizer_config.json", bytes)?,
            None => Value::Null,
        };
        let generation_config = match files.generation_config {
            Some(bytes) => parse_json("generation_config.json", bytes)?,
            None => Value::Null,
        };
        let token_text = |key: &str| {
            let v = &tokenizer_config[key];
            v.as_str().or_else(|| v["content"].as_str())
        };
        let (source, with_tools) = template_source(files, &tokenizer_config)?;
        let prints_tool_call_id = source.contains("tool_call_id");
        let prints_name = source.contains("message.name") || source.contains("message['name']");
        let special_tokens: Vec<_> =
            SPECIAL_TOKENS.into_iter().filter_map(|name| Some((name, token_text(name)?.to_owned()))).collect();
        let template = ChatTemplate::compile(&source, with_tools.as_deref(), &special_tokens)?;
        let tool_format = match tokenizer_config["tool_format"].as_str() {
            None | Some("hermes") => ToolFormat::Hermes,
            Some("starling-byte") => ToolFormat::StarlingByte,
            Some(other) => {
                let reason = format!("tool_format: expected \"hermes\" or \"starling-byte\", got {other:?}");
                return Err(FormatError::File { file: "tokenizer_config.json", reason });
            }
        };
        let context_len = [&config, &config["text_config"]]
            .iter()
            .find_map(|c| c["max_position_embeddings"].as_u64())
            .and_then(|n| usize::try_from(n).ok())
            .ok_or_else(|| FormatError::File {
                file: "config.json",
                reason: "max_position_embeddings: expected a number".into(),
            })?;
        let mut stop_ids = Vec::new();
        let eos = [&generation_config, &config].into_iter().map(|c| &c["eos_token_id"]).find(|e| !e.is_null());
        for id in eos.into_iter().flat_map(|e| e.as_array().map_or(std::slice::from_ref(e), Vec::as_slice)) {
            stop_ids.extend(id.as_u64().and_then(|id| u32::try_from(id).ok()));
        }
        stop_ids.extend(token_text("eos_token").and_then(|t| tokenizer.token_to_id(t)));
        let specials = tokenizer
            .get_added_tokens_decoder()
            .into_iter()
            .filter(|(_, token)| token.special)
            .map(|(id, token)| (id, token.content))
            .collect();
        let bytes = is_byte_level(&tokenizer_json["decoder"]).then(|| ByteTable::new(&tokenizer));
        let mut format = Self {
            tokenizer,
            template,
            bytes,
            specials,
            stop_ids,
            terminator: String::new(),
            end: None,
            context_len,
            tool_format,
            prints_tool_call_id,
            prints_name,
        };
        format.find_terminator()?;
        format.stop_ids.extend(format.end.map(|(id, _)| id));
        format.stop_ids.sort_unstable();
        format.stop_ids.dedup();
        if format.stop_ids.is_empty() {
            let reason = "eos_token_id: expected a token that ends an answer".into();
            return Err(FormatError::File { file: "config.json", reason });
        }
        Ok(format)
    }

    /// Learns from a sample conversation what the template prints after an answer.
    fn find_terminator(&mut self) -> Result<(), FormatError> {
        const PROBE: &str = "starlingprobe";
        let message = |role: &str, content: &str| {
            TemplateValue::from_iter([("role", TemplateValue::from(role)), ("content", content.into())])
        };
        let conversation = [message("user", "a"), message("assistant", PROBE)];
        let text = self.render_full(&conversation, &TemplateValue::from(()), false)?;
        let Some((_, terminator)) = text.rsplit_once(PROBE) else {
            return Err(FormatError::Template("an assistant's content is not printed".into()));
        };
        self.end = self.encode(terminator)?.into_iter().find_map(|id| {
            let token = self.specials.get(&id)?;
            Some((id, terminator.find(token.as_str())? + token.len()))
        });
        self.terminator = terminator.to_owned();
        Ok(())
    }

    /// Renders a whole conversation; with `gen_prompt`, up to where the assistant's answer begins.
    ///
    /// # Errors
    /// [`FormatError::Render`] when the template refuses it.
    pub fn render_full(
        &self,
        messages: &[TemplateValue],
        tools: &TemplateValue,
        gen_prompt: bool,
    ) -> Result<String, FormatError> {
        self.template.render(messages, tools, gen_prompt)
    }

    /// Renders what follows the first `known` messages, the last of which is an answer that ended with the
    /// sampled token `last`, up to where the next answer begins. The rest of the old answer's frame is included,
    /// which the model did not sample. `None` when the template prints the known messages differently now that
    /// more follow: then nothing of it can be kept.
    ///
    /// # Errors
    /// [`FormatError::Render`] when the template refuses the conversation.
    pub fn render_suffix(
        &self,
        messages: &[TemplateValue],
        tools: &TemplateValue,
        known: usize,
        last: Option<u32>,
    ) -> Result<Option<String>, FormatError> {
        let all = self.render_full(messages, tools, true)?;
        let Ok(before) = self.render_full(&messages[..known], tools, false) else { return Ok(None) };
        let Some(suffix) = all.strip_prefix(before.as_str()) else { return Ok(None) };
        let frame = match self.end {
            Some((id, len)) if last == Some(id) => &self.terminator[len..],
            _ => &self.terminator,
        };
        Ok(Some([frame, suffix].concat()))
    }

    /// Text to ids; special tokens in the text become their ids, and none is added.
    ///
    /// # Errors
    /// [`FormatError::Encode`] when the tokenizer fails.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, FormatError> {
        let encoding = self.tokenizer.encode_fast(text, false).map_err(|e| FormatError::Encode(e.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Ids to text, special tokens left out; bytes that are not UTF-8 as U+FFFD.
    #[must_use]
    pub fn decode(&self, ids: &[u32]) -> String {
        if let Some(table) = &self.bytes {
            let plain = ids.iter().filter(|id| !self.specials.contains_key(id));
            let bytes: Vec<u8> = plain.flat_map(|id| table.get(*id)).copied().collect();
            return String::from_utf8_lossy(&bytes).into_owned();
        }
        self.tokenizer.decode(ids, true).unwrap_or_default()
    }

    /// The bytes of one token, special ones included.
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> Cow<'_, [u8]> {
        match &self.bytes {
            Some(table) => Cow::Borrowed(table.get(id)),
            None => Cow::Owned(self.tokenizer.decode(&[id], false).unwrap_or_default().into_bytes()),
        }
    }

    /// Whether `id` is a token of the vocabulary.
    #[must_use]
    pub fn has_token(&self, id: u32) -> bool {
        self.tokenizer.id_to_token(id).is_some()
    }

    /// The text of a special token.
    #[must_use]
    pub fn special(&self, id: u32) -> Option<&str> {
        self.specials.get(&id).map(String::as_str)
    }

    /// Ids that end an answer, ascending; at least one.
    #[must_use]
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// Most tokens of prompt and answer together.
    #[must_use]
    pub fn context_len(&self) -> usize {
        self.context_len
    }

    /// How the model writes tool calls.
    #[must_use]
    pub fn tool_format(&self) -> ToolFormat {
        self.tool_format
    }

    /// Whether the template prints a tool result's call id: then it is part of the conversation's identity.
    #[must_use]
    pub fn prints_tool_call_id(&self) -> bool {
        self.prints_tool_call_id
    }

    /// Whether the template prints a participant's name.
    #[must_use]
    pub fn prints_name(&self) -> bool {
        self.prints_name
    }

    /// A parser for one answer, when tools were offered.
    #[must_use]
    pub fn tool_parser(&self) -> Box<dyn ToolCallParser> {
        match self.tool_format {
            ToolFormat::StarlingByte => Box::<EmbeddedFormat>::default(),
            ToolFormat::Hermes => Box::<HermesFormat>::default(),
        }
    }
}

/// The template and, where the model has one, its variant for conversations with tools.
fn template_source(files: &ModelFiles<'_>, config: &Value) -> Result<(String, Option<String>), FormatError> {
    if let Some(bytes) = files.chat_template {
        let text = std::str::from_utf8(bytes)
            .map_err(|e| FormatError::File { file: "chat_template.jinja", reason: e.to_string() })?;
        return Ok((text.to_owned(), None));
    }
    let missing = || FormatError::File {
        file: "tokenizer_config.json",
        reason: "chat_template: expected a text, or the file chat_template.jinja".into(),
    };
    match &config["chat_template"] {
        Value::String(text) => Ok((text.clone(), None)),
        Value::Array(list) => {
            let named = |name: &str| {
                let entry = list.iter().find(|t| t["name"] == name)?;
                entry["template"].as_str().map(str::to_owned)
            };
            Ok((named("default").ok_or_else(missing)?, named("tool_use")))
        }
        _ => Err(missing()),
    }
}

fn is_byte_level(decoder: &Value) -> bool {
    decoder["type"] == "ByteLevel" || decoder["decoders"].as_array().is_some_and(|list| list.iter().any(is_byte_level))
}

#[cfg(test)]
mod template_tests;
#[cfg(test)]
mod tests;
