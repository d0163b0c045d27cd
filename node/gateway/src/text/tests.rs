//! The byte model's own files, a ChatML model with Hermes tool calls, and the pieces in between.

use super::*;
use serde_json::json;
use std::sync::Arc;

fn byte_format() -> ChatFormat {
    crate::null::byte_format(4096).unwrap()
}

fn values(messages: Value) -> Vec<TemplateValue> {
    messages.as_array().unwrap().iter().map(TemplateValue::from_serialize).collect()
}

fn none() -> TemplateValue {
    TemplateValue::from(())
}

fn calc() -> TemplateValue {
    TemplateValue::from_serialize(json!([{ "type": "function", "function": {
        "name": "calc", "parameters": { "type": "object", "properties": { "x": { "type": "string" }, "base": {} } },
    } }]))
}

/// Byte-level too, with ChatML's special tokens and Qwen's way of printing tools.
fn chatml_format() -> ChatFormat {
    let mut tokenizer: Value = serde_json::from_str(&byte_model::tokenizer_json()).unwrap();
    for (i, token) in ["<|endoftext|>", "<|im_start|>", "<|im_end|>"].iter().enumerate() {
        tokenizer["added_tokens"][i]["content"] = json!(token);
    }
    tokenizer["added_tokens"].as_array_mut().unwrap().truncate(3);
    let template = r#"{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- endif %}
    {{- "\n\n# Tools\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\n' + message.content.strip() }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- raise_exception('no role ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"#;
    ChatFormat::new(&ModelFiles {
        tokenizer: tokenizer.to_string().as_bytes(),
        tokenizer_config: Some(json!({ "chat_template": template, "eos_token": "<|im_end|>" }).to_string().as_bytes()),
        chat_template: None,
        config: br#"{"max_position_embeddings": 2048, "eos_token_id": 256}"#,
        generation_config: None,
    })
    .unwrap()
}

#[test]
fn the_byte_model_prints_conversations_compactly() {
    let format = byte_format();
    let messages = values(json!([
        { "role": "system", "content": "Calculate." },
        { "role": "user", "content": "12*34?" },
        { "role": "assistant", "content": "", "tool_calls": [
            { "type": "function", "function": { "name": "calc", "arguments": { "x": "12*34", "base": 10 } } } ] },
        { "role": "tool", "content": "408" },
    ]));
    let text = format.render_full(&messages, &calc(), true).unwrap();
    assert_eq!(
        text,
        "<|tools|>calc(x,base)<|end|><|system|>Calculate.<|end|><|user|>12*34?<|end|>\
         <|assistant|><|call|>calc{\"x\":\"12*34\",\"base\":10}<|end|><|tool|>408<|end|><|assistant|>"
    );
    assert_eq!(format.stop_ids(), [byte_model::END]);
    let ids = format.encode("<|user|>é<|end|><|assistant|>").unwrap();
    assert_eq!(ids, [259, 0xC3, 0xA9, 257, 260]);
    assert_eq!(format.decode(&ids), "é");
}

#[test]
fn any_text_and_any_bytes_survive_the_byte_model() {
    let format = Arc::new(byte_format());
    for text in ["", "plain", "Grüße, 世界 🦜\r\n\t\0", "  two  spaces ", "\u{feff}\u{202e}x"] {
        let ids = format.encode(text).unwrap();
        assert_eq!(ids, text.bytes().map(u32::from).collect::<Vec<_>>());
        assert_eq!(format.decode(&ids), text);
    }
    // Bytes that are no UTF-8, in every pairing: the stream shows what Rust's lossy conversion shows.
    for a in 0..=255u8 {
        for b in [0, 0x41, 0x80, 0xBF, 0xC3, 0xE2, 0xF0, 0xFF] {
            let bytes = [a, b, 0x82, 0x41];
            let mut text = String::new();
            let mut detokenizer = Detokenizer::new(Arc::clone(&format));
            bytes.iter().for_each(|b| detokenizer.push(u32::from(*b), &mut text));
            detokenizer.flush(&mut text);
            assert_eq!(text, String::from_utf8_lossy(&bytes), "{bytes:?}");
        }
        assert_eq!(*format.token_bytes(u32::from(a)), [a]);
    }
}

#[test]
fn a_character_is_shown_once_its_last_byte_is_there() {
    let format = Arc::new(byte_format());
    let mut detokenizer = Detokenizer::new(format);
    let mut shown = Vec::new();
    for b in "a€".bytes() {
        let mut text = String::new();
        detokenizer.push(u32::from(b), &mut text);
        shown.push(text);
    }
    assert_eq!(shown, ["a", "", "", "€"]);
}

#[test]
fn a_suffix_completes_the_frame_of_the_answer_before_it() {
    let format = chatml_format();
    assert_eq!(format.stop_ids(), [256, 258]);
    let messages = values(json!([
        { "role": "user", "content": "q" }, { "role": "assistant", "content": "a" }, { "role": "user", "content": "r" },
    ]));
    let rest = "<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n";
    // The model sampled the end token: only the line feed after it is missing.
    let suffix = format.render_suffix(&messages, &none(), 2, Some(258)).unwrap().unwrap();
    assert_eq!(suffix, format!("\n{rest}"));
    // It was cut off: the end token is missing too.
    let suffix = format.render_suffix(&messages, &none(), 2, Some(97)).unwrap().unwrap();
    assert_eq!(suffix, format!("<|im_end|>\n{rest}"));
    // What is kept and what is rendered make up the whole.
    let whole = format.render_full(&messages, &none(), true).unwrap();
    assert_eq!(whole, format!("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n{rest}"));
}

#[test]
fn tools_and_calls_are_printed_as_transformers_prints_them() {
    let format = chatml_format();
    let messages = values(json!([
        { "role": "user", "content": "q" },
        { "role": "assistant", "content": "", "tool_calls": [
            { "type": "function", "function": { "name": "calc", "arguments": { "x": "<é>", "n": [1, 2] } } } ] },
    ]));
    let text = format.render_full(&messages, &calc(), false).unwrap();
    // json.dumps(…, ensure_ascii=False) of Python.
    assert!(text.contains(
        r#"{"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "properties": {"x": {"type": "string"}, "base": {}}}}}"#
    ), "{text}");
    assert!(text.ends_with("<tool_call>\n{\"name\": \"calc\", \"arguments\": {\"x\": \"<é>\", \"n\": [1, 2]}}\n</tool_call><|im_end|>\n"), "{text}");
}

#[test]
fn a_template_that_refuses_is_the_callers_fault_in_its_own_words() {
    let messages = values(json!([{ "role": "critic", "content": "q" }]));
    let e = chatml_format().render_full(&messages, &none(), true).unwrap_err();
    assert_eq!(e, FormatError::Render("no role critic".into()));
}

#[test]
fn a_template_that_rewrites_history_leaves_nothing_to_reuse() {
    let template = "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}[...]{% else %}\
                    {{ m.role }}: {{ m.content }}{% endif %}\n{% endfor %}";
    let config = json!({ "chat_template": template, "eos_token": "<|end|>" }).to_string();
    let format = ChatFormat::new(&ModelFiles {
        tokenizer: byte_model::tokenizer_json().as_bytes(),
        tokenizer_config: Some(config.as_bytes()),
        config: br#"{"max_position_embeddings": 2048}"#,
        ..ModelFiles::default()
    })
    .unwrap();
    let messages = values(json!([
        { "role": "user", "content": "q" }, { "role": "assistant", "content": "a" }, { "role": "user", "content": "r" },
    ]));
    assert_eq!(format.render_suffix(&messages, &none(), 2, Some(257)).unwrap(), None);
}

#[test]
fn files_that_make_no_format_are_named() {
    let tokenizer = byte_model::tokenizer_json();
    let files = ModelFiles {
        tokenizer: tokenizer.as_bytes(),
        chat_template: Some(byte_model::chat_template().as_bytes()),
        config: br#"{"max_position_embeddings": 8, "eos_token_id": 257}"#,
        ..ModelFiles::default()
    };
    assert_eq!(ChatFormat::new(&files).unwrap().tool_format(), ToolFormat::Hermes);
    let fails = |files: ModelFiles<'_>| ChatFormat::new(&files).unwrap_err().to_string();
    assert!(fails(ModelFiles { tokenizer: b"{}", ..files }).starts_with("tokenizer.json: "));
    assert!(fails(ModelFiles { config: b"{}", ..files }).starts_with("config.json: max_position_embeddings"));
    assert!(fails(ModelFiles { chat_template: None, ..files }).starts_with("tokenizer_config.json: chat_template"));
    let other = ModelFiles { tokenizer_config: Some(br#"{"tool_format": "xml"}"#), ..files };
    assert!(fails(other).contains("tool_format: expected \"hermes\" or \"starling-byte\", got \"xml\""));
    assert!(fails(ModelFiles { chat_template: Some(b"{% if"), ..files }).starts_with("chat template: "));
}

#[test]
fn stop_strings_are_found_across_pieces_and_never_shown() {
    let run = |stops: &[&str], pieces: &[&str]| {
        let mut scanner = StopScanner::new(stops.iter().map(|s| (*s).to_owned()).collect());
        let mut out = String::new();
        let found = pieces.iter().any(|p| scanner.push(p, &mut out));
        if !found {
            scanner.flush(&mut out);
        }
        (out, found)
    };
    let owned = |s: &str, found| (s.to_owned(), found);
    assert_eq!(run(&["STOP"], &["ab S", "TO", "P cd"]), owned("ab ", true));
    assert_eq!(run(&["STOP"], &["ab S", "TO", "X cd"]), owned("ab STOX cd", false));
    assert_eq!(run(&["aab"], &["a", "a", "a", "b"]), owned("a", true));
    assert_eq!(run(&["\n\n", "END"], &["x\n", "\ny"]), owned("x", true));
    assert_eq!(run(&["é!"], &["caf", "é", "?"]), owned("café?", false));
    assert_eq!(run(&["b", "ab"], &["a", "b"]), owned("", true));
    assert_eq!(run(&[], &["a"]), owned("a", false));
}

fn parse(mut parser: Box<dyn ToolCallParser>, text: &str, complete: bool) -> Vec<Piece> {
    // One character at a time, special tokens whole: the hardest way to cut it.
    let mut out = Vec::new();
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        if let Some(after) = rest.strip_prefix("<|call|>") {
            parser.special("<|call|>", &mut out);
            rest = after;
        } else {
            parser.text(&rest[..c.len_utf8()], &mut out);
            rest = &rest[c.len_utf8()..];
        }
    }
    parser.finish(complete, &mut out);
    // Neighbouring texts are one text.
    out.into_iter().fold(Vec::new(), |mut all, piece| {
        match (all.last_mut(), piece) {
            (Some(Piece::Content(last)), Piece::Content(more)) => last.push_str(&more),
            (_, piece) => all.push(piece),
        }
        all
    })
}

fn text(s: &str) -> Piece {
    Piece::Content(s.into())
}

fn call(name: &str, arguments: &str) -> Piece {
    Piece::Call(ToolCall { name: name.into(), arguments: arguments.into() })
}

#[test]
fn embedded_calls_are_parsed_and_malformed_ones_stay_text() {
    let run = |s: &str| parse(Box::<EmbeddedFormat>::default(), s, true);
    assert_eq!(run("plain {text}"), [text("plain {text}")]);
    assert_eq!(run(r#"<|call|>calc{"x":"12*34"}"#), [call("calc", r#"{"x":"12*34"}"#)]);
    assert_eq!(
        run(r#"hm <|call|>a{}<|call|>b{ "k" : 1 }"#),
        [text("hm "), call("a", "{}"), call("b", r#"{ "k" : 1 }"#)]
    );
    for bad in
        ["<|call|>calc", r#"<|call|>calc{"x":"#, "<|call|>{}", r#"<|call|>calc{"x":1}}"#, "<|call|>a b{}", "<|call|>"]
    {
        assert_eq!(run(bad), [text(bad)], "{bad}");
    }
    // Cut off at the limit: what looks whole may not be.
    assert_eq!(parse(Box::<EmbeddedFormat>::default(), "<|call|>a{}", false), [text("<|call|>a{}")]);
}

#[test]
fn hermes_calls_are_parsed_and_malformed_ones_stay_text() {
    let run = |s: &str| parse(Box::<HermesFormat>::default(), s, true);
    assert_eq!(run("a < b <tool"), [text("a < b <tool")]);
    assert_eq!(
        run(
            "Let me see.\n<tool_call>\n{\"name\": \"calc\", \"arguments\": {\"x\": \"1 + 2\"}}\n</tool_call>\n<tool_call>{\"name\":\"b\",\"arguments\":{}}</tool_call>\n"
        ),
        [text("Let me see.\n"), call("calc", "{\"x\": \"1 + 2\"}"), call("b", "{}")]
    );
    for bad in [
        "<tool_call>not json</tool_call>",
        "<tool_call>{\"name\": \"a\"}</tool_call>",
        "<tool_call>{\"name\": \"a\", \"arguments\": \"x\"}</tool_call>",
        "<tool_call>{\"name\": \"a\", \"arguments\": {}}",
    ] {
        assert_eq!(run(bad), [text(bad)], "{bad}");
    }
}

#[test]
fn without_tools_special_tokens_are_not_shown() {
    assert_eq!(parse(Box::new(PlainText), "a<|call|>b", true), [text("ab")]);
}
