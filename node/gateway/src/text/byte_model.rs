//! The tokenizer and chat template of Starling's own byte-level model, as Hugging Face files.
//!
//! Ids 0 to 255 are the raw bytes, then come eight special tokens. Every byte is a token, so the template is
//! as short as it can be:
//!
//! ```text
//! <|tools|>calc(x)<|end|><|user|>12*34?<|end|><|assistant|><|call|>calc{"x":"12*34"}<|end|><|tool|>408<|end|><|assistant|>
//! ```
//!
//! `starling pretrain` writes these into the model's folder; `transformers` loads them too.

use serde_json::{Map, Value, json};

/// Padding; never sampled.
pub const PAD: u32 = 256;
/// Ends every message; the only stop token.
pub const END: u32 = 257;
/// Opens a system message.
pub const SYSTEM: u32 = 258;
/// Opens a user's message.
pub const USER: u32 = 259;
/// Opens an answer; the generation prompt.
pub const ASSISTANT: u32 = 260;
/// Opens a tool's result.
pub const TOOL: u32 = 261;
/// Opens a tool call: its name, then its arguments as a JSON object.
pub const CALL: u32 = 262;
/// Opens the list of tools.
pub const TOOLS: u32 = 263;
/// Ids, special tokens included.
pub const VOCAB_SIZE: u32 = 264;

/// Text of the special tokens, from id 256.
pub const SPECIALS: [&str; 8] =
    ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|call|>", "<|tools|>"];

/// The character that stands for `byte` in a byte-level vocabulary (GPT-2's map): printable Latin-1 characters
/// stand for themselves, the other 68 bytes for U+0100 and on, in order.
#[must_use]
pub fn byte_symbol(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if printable(byte) {
        return char::from(byte);
    }
    let rank = (0..byte).filter(|&b| !printable(b)).count();
    u32::try_from(rank).ok().and_then(|r| char::from_u32(0x100 + r)).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// `tokenizer.json`.
#[must_use]
pub fn tokenizer_json() -> String {
    let vocab: Map<String, Value> = (0..=255u8).map(|b| (byte_symbol(b).to_string(), json!(b))).collect();
    let special = |(i, content): (usize, &&str)| {
        json!({
            "id": 256 + i, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        })
    };
    let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false });
    let file = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": SPECIALS.iter().enumerate().map(special).collect::<Vec<_>>(),
        "normalizer": null,
        "pre_tokenizer": bytes,
        "post_processor": null,
        "decoder": bytes,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": [],
        },
    });
    format!("{file:#}\n")
}

/// `tokenizer_config.json`.
#[must_use]
pub fn tokenizer_config_json() -> String {
    let file = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": null,
        "eos_token": SPECIALS[1],
        "pad_token": SPECIALS[0],
        "additional_special_tokens": &SPECIALS[2..],
        "clean_up_tokenization_spaces": false,
        "tool_format": "starling-byte",
    });
    format!("{file:#}\n")
}

/// `chat_template.jinja`.
#[must_use]
pub fn chat_template() -> &'static str {
    concat!(
        "{%- if tools %}<|tools|>{% for t in tools %}{% if not loop.first %} {% endif %}",
        "{{ t.function.name }}({{ (t.function.parameters or {}).properties | default({}) | join(',') }})",
        "{% endfor %}<|end|>{% endif %}",
        "{%- for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}",
        "{% for c in m.tool_calls or [] %}<|call|>{{ c.function.name }}",
        "{% if c.function.arguments is string %}{{ c.function.arguments }}",
        "{% else %}{{ c.function.arguments | tojson(separators=(',', ':')) }}{% endif %}",
        "{% endfor %}<|end|>{% endfor %}",
        "{%- if add_generation_prompt %}<|assistant|>{% endif %}",
    )
}
