//! Real tokenizers and chat templates against `transformers` (`tests/goldens/make_chat.py`): Qwen3 and Llama 3 from
//! their files, SmolLM2 from its GGUF.
//!
//! The files come from the package registries by `scripts/fetch_models.sh` and are not in the repository.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, helpers included")]

use serde_json::{Value, json};
use starling_engine::{Checkpoint, Device};
use starling_gateway::text::{ChatFormat, ModelFiles, TemplateValue};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

const GOLDENS: &str = include_str!("../../../tests/goldens/chat.json");

/// The folder with the files of one model; `None`, said loudly, when they cannot be had.
fn models(what: &str) -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    // target/release/deps/this
    let target = std::env::current_exe().unwrap().ancestors().nth(3).unwrap().to_owned();
    let dir = target.join("models");
    match Command::new(root.join("scripts/fetch_models.sh")).arg(&dir).arg(what).output() {
        Ok(out) if out.status.success() => Some(dir),
        other => {
            eprintln!("SKIPPED: the real models cannot be fetched: {other:?}");
            None
        }
    }
}

fn format(files: &BTreeMap<String, Vec<u8>>) -> ChatFormat {
    let file = |name: &str| files.get(name).map(Vec::as_slice);
    ChatFormat::new(&ModelFiles {
        tokenizer: file("tokenizer.json").unwrap(),
        tokenizer_config: file("tokenizer_config.json"),
        config: file("config.json").unwrap(),
        ..ModelFiles::default()
    })
    .unwrap()
}

fn folder(dir: &Path, config: &Value) -> ChatFormat {
    let mut files = BTreeMap::from([("config.json".to_owned(), config.to_string().into_bytes())]);
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        files.insert(name.to_owned(), std::fs::read(dir.join(name)).unwrap());
    }
    format(&files)
}

fn check(name: &str, format: &ChatFormat) {
    let goldens: Value = serde_json::from_str(GOLDENS).unwrap();
    let cases = goldens["real"][name].as_array().unwrap();
    assert!(cases.len() >= 5, "{name}: {} cases", cases.len());
    for case in cases {
        let what = format!("{name}, {}, prompt {}", case["conversation"], case["prompt"]);
        let messages: Vec<_> = goldens["conversations"][case["conversation"].as_str().unwrap()]
            .as_array()
            .unwrap()
            .iter()
            .map(TemplateValue::from_serialize)
            .collect();
        let tools = if case["tools"] == true {
            TemplateValue::from_serialize(&goldens["tools"])
        } else {
            TemplateValue::from(())
        };
        let want = case["text"].as_str().unwrap();
        assert_eq!(format.render_full(&messages, &tools, case["prompt"] == true).unwrap(), want, "{what}");
        let ids = format.encode(want).unwrap();
        assert_eq!(serde_json::to_value(&ids).unwrap(), case["ids"], "{what}");
        let bytes: Vec<u8> = ids.iter().flat_map(|id| format.token_bytes(*id).into_owned()).collect();
        if name != "qwen3" {
            // Qwen's normalizer composes characters; the others' tokens spell the text out.
            assert_eq!(String::from_utf8(bytes).unwrap(), want, "{what}");
        }
    }
}

#[test]
fn qwen3() {
    let Some(models) = models("qwen3") else { return };
    let config = json!({ "max_position_embeddings": 40960, "vocab_size": 151_936, "eos_token_id": 151_645 });
    let format = folder(&models.join("qwen3"), &config);
    assert_eq!(format.stop_ids(), [151_645]);
    check("qwen3", &format);
    let small = json!({ "max_position_embeddings": 40960, "vocab_size": 151_643 }).to_string();
    let tokenizer = std::fs::read(models.join("qwen3/tokenizer.json")).unwrap();
    let files = ModelFiles { tokenizer: &tokenizer, config: small.as_bytes(), ..ModelFiles::default() };
    let e = ChatFormat::new(&files).unwrap_err().to_string();
    assert!(e.starts_with("tokenizer.json: expected ids below 151643"), "{e}");
}

#[test]
fn llama3() {
    let Some(models) = models("llama3") else { return };
    let config = json!({ "max_position_embeddings": 8192, "vocab_size": 128_256, "eos_token_id": 128_001 });
    let format = folder(&models.join("llama3"), &config);
    // The end of the text and the end of the turn.
    assert_eq!(format.stop_ids(), [128_001, 128_009]);
    check("llama3", &format);
}

#[test]
fn smollm2_from_its_gguf() {
    let Some(models) = models("smollm2") else { return };
    let checkpoint = Checkpoint::load(&models.join("smollm2.gguf"), &Device::Cpu).unwrap();
    let mut files = checkpoint.files;
    files.insert("config.json".into(), checkpoint.config.to_json().into_bytes());
    let format = format(&files);
    assert_eq!((format.stop_ids(), format.context_len()), ([2].as_slice(), 8192));
    check("smollm2", &format);
}
