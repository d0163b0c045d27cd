//! The tokenizer inside a GGUF as `tokenizer.json` and `tokenizer_config.json`.
//!
//! A GGUF names its way of cutting text (`tokenizer.ggml.pre`) where Hugging Face spells it out; the patterns are those
//! of the models' own `tokenizer.json`.

use serde_json::{Map, Value, json};

use super::Files;
use super::metadata::{Metadata, refused};
use crate::config::LlamaConfig;
use crate::error::CheckpointError;

/// `tokenizer.ggml.token_type` of a special token.
const CONTROL: u64 = 3;
/// Of a token that is found in any text before it is cut.
const USER_DEFINED: u64 = 4;
/// Of an id without a token: padding of the embedding matrix.
const UNUSED: u64 = 5;

/// How a text is cut before merging.
struct Cut {
    normalizer: Value,
    pre_tokenizer: Value,
    /// Words of the vocabulary are taken whole, without merges that would lead to them.
    ignore_merges: bool,
    /// Whether a text starts with the begin token where the file does not say.
    add_bos: bool,
}

/// The way that `tokenizer.ggml.pre` names.
fn cut(pre: &str) -> Option<Cut> {
    let bytes = |use_regex: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex });
    // Contractions; a word with at most one other character before it; digits; punctuation with the line breaks
    // behind it; line breaks; white space except the last character before a word.
    let words = |digits: &str| {
        let pattern = format!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        );
        let split =
            json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false });
        json!({ "type": "Sequence", "pretokenizers": [split, bytes(false)] })
    };
    let plain =
        |pre_tokenizer: Value| Cut { normalizer: Value::Null, pre_tokenizer, ignore_merges: false, add_bos: false };
    Some(match pre {
        "gpt-2" => plain(bytes(true)),
        "smollm" => plain(json!({
            "type": "Sequence",
            "pretokenizers": [{ "type": "Digits", "individual_digits": true }, bytes(true)],
        })),
        "qwen2" | "deepseek-r1-qwen" => Cut { normalizer: json!({ "type": "NFC" }), ..plain(words(r"\p{N}")) },
        "llama-bpe" | "llama3" | "llama-v3" => {
            Cut { ignore_merges: true, add_bos: true, ..plain(words(r"\p{N}{1,3}")) }
        }
        _ => return None,
    })
}

/// The tokenizer's files; none if the GGUF has no tokenizer.
///
/// # Errors
/// `Metadata` naming the key at fault.
pub(super) fn files(meta: &Metadata<'_>, config: &LlamaConfig) -> Result<Files, CheckpointError> {
    let Some(model) = meta.text("tokenizer.ggml.model") else { return Ok(Files::new()) };
    if model != "gpt2" {
        return Err(refused("tokenizer.ggml.model", "\"gpt2\", byte-level BPE", model));
    }
    let pre = meta.text("tokenizer.ggml.pre").unwrap_or("nothing");
    let cut = cut(pre)
        .ok_or_else(|| refused("tokenizer.ggml.pre", "gpt-2, smollm, qwen2, deepseek-r1-qwen or llama-bpe", pre))?;
    let vocabulary = Vocabulary::read(*meta, config)?;
    let mut special = Map::new();
    for (name, key) in [
        ("bos_token", "tokenizer.ggml.bos_token_id"),
        ("eos_token", "tokenizer.ggml.eos_token_id"),
        ("unk_token", "tokenizer.ggml.unknown_token_id"),
        ("pad_token", "tokenizer.ggml.padding_token_id"),
    ] {
        if let Some(id) = meta.token_id(key)? {
            special.insert(name.into(), vocabulary.text(key, id)?.into());
        }
    }
    let add_bos = meta.flag("tokenizer.ggml.add_bos_token").unwrap_or(cut.add_bos);
    let bos = special.get("bos_token").and_then(Value::as_str).zip(config.bos_token_id).filter(|_| add_bos);
    let tokenizer = vocabulary.tokenizer_json(&cut, bos);
    let mut about = special.clone();
    about.insert("add_bos_token".into(), bos.is_some().into());
    about.insert("clean_up_tokenization_spaces".into(), false.into());
    about.insert("model_max_length".into(), config.max_position_embeddings.into());
    about.insert("tokenizer_class".into(), "PreTrainedTokenizerFast".into());
    if let Some(templates) = chat_templates(*meta)? {
        about.insert("chat_template".into(), templates);
    }
    Ok(Files::from([
        ("tokenizer.json".to_owned(), tokenizer.to_string().into_bytes()),
        ("tokenizer_config.json".to_owned(), format!("{:#}\n", Value::Object(about)).into_bytes()),
    ]))
}

/// The template, or the list of named ones with the plain one as `default`.
fn chat_templates(meta: Metadata<'_>) -> Result<Option<Value>, CheckpointError> {
    let Some(plain) = meta.text("tokenizer.chat_template") else { return Ok(None) };
    let mut named = Vec::new();
    for name in meta.texts("tokenizer.chat_templates")?.unwrap_or_default() {
        let key = format!("tokenizer.chat_template.{name}");
        let template = meta.text(&key).ok_or_else(|| refused(key.as_str(), "a text", "nothing"))?;
        named.push(json!({ "name": name, "template": template }));
    }
    if named.is_empty() {
        return Ok(Some(plain.into()));
    }
    named.push(json!({ "name": "default", "template": plain }));
    Ok(Some(named.into()))
}

/// Tokens, their kinds, and the merges.
struct Vocabulary<'a> {
    tokens: Vec<&'a str>,
    kinds: Vec<u64>,
    merges: Vec<[&'a str; 2]>,
}

impl<'a> Vocabulary<'a> {
    fn read(meta: Metadata<'a>, config: &LlamaConfig) -> Result<Self, CheckpointError> {
        let key = "tokenizer.ggml.tokens";
        let tokens = meta.texts(key)?.ok_or_else(|| refused(key, "a list of texts", "nothing"))?;
        if tokens.len() > config.vocab_size {
            let expected = format!("at most {}, the rows of token_embd.weight", config.vocab_size);
            return Err(refused(key, expected, format!("{} tokens", tokens.len())));
        }
        let key = "tokenizer.ggml.token_type";
        let kinds = meta.numbers(key)?.unwrap_or_else(|| vec![1; tokens.len()]);
        if kinds.len() != tokens.len() {
            return Err(refused(key, format!("{} numbers, one a token", tokens.len()), kinds.len()));
        }
        let key = "tokenizer.ggml.merges";
        let merges = meta.texts(key)?.ok_or_else(|| refused(key, "a list of texts", "nothing"))?;
        let pair = |m: &&'a str| {
            let (a, b) = m.split_once(' ')?;
            Some([a, b])
        };
        let merges = merges.iter().map(|m| pair(m).ok_or_else(|| refused(key, "two tokens and a space between", m)));
        let merges = merges.collect::<Result<Vec<_>, _>>()?;
        let known: std::collections::HashSet<&str> = tokens.iter().copied().collect();
        if let Some([a, b]) = merges.iter().find(|[a, b]| !known.contains(format!("{a}{b}").as_str())) {
            return Err(refused(key, "merges of tokens to tokens", format!("{a} {b}")));
        }
        Ok(Self { tokens, kinds, merges })
    }

    /// The text of a token.
    fn text(&self, key: &str, id: u32) -> Result<&'a str, CheckpointError> {
        let text = self.tokens.get(id as usize).copied();
        text.ok_or_else(|| refused(key, format!("an id below {}", self.tokens.len()), id))
    }

    fn tokenizer_json(&self, cut: &Cut, bos: Option<(&str, u32)>) -> Value {
        let used = || self.tokens.iter().zip(&self.kinds).enumerate().filter(|(_, (_, kind))| **kind != UNUSED);
        let vocab: Map<String, Value> = used().map(|(id, (text, _))| ((*text).to_owned(), id.into())).collect();
        let added: Vec<Value> = used()
            .filter(|(_, (_, kind))| [CONTROL, USER_DEFINED].contains(kind))
            .map(|(id, (text, kind))| {
                json!({
                    "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": *kind == CONTROL,
                })
            })
            .collect();
        let post_processor = bos.map(|(text, id)| {
            let begin = json!({ "SpecialToken": { "id": text, "type_id": 0 } });
            let sequence = |id: &str, kind: u32| json!({ "Sequence": { "id": id, "type_id": kind } });
            let mut special = Map::new();
            special.insert(text.into(), json!({ "id": text, "ids": [id], "tokens": [text] }));
            json!({
                "type": "TemplateProcessing", "special_tokens": special,
                "single": [begin, sequence("A", 0)], "pair": [begin, sequence("A", 0), begin, sequence("B", 1)],
            })
        });
        json!({
            "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": added,
            "normalizer": cut.normalizer,
            "pre_tokenizer": cut.pre_tokenizer,
            "post_processor": post_processor,
            "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                "ignore_merges": cut.ignore_merges, "vocab": vocab, "merges": self.merges,
            },
        })
    }
}
