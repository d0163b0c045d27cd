//! The byte-level model that the binary carries, made by `starling pretrain`.

use std::collections::BTreeMap;

/// Its default name in the mesh.
pub const MODEL_NAME: &str = "starling-byte";

/// The Hugging Face folder, file by file.
#[must_use]
pub fn files() -> BTreeMap<String, Vec<u8>> {
    let files: [(&str, &[u8]); 6] = [
        ("model.safetensors", include_bytes!("../embedded/model.safetensors")),
        ("config.json", include_bytes!("../embedded/config.json")),
        ("tokenizer.json", include_bytes!("../embedded/tokenizer.json")),
        ("tokenizer_config.json", include_bytes!("../embedded/tokenizer_config.json")),
        ("chat_template.jinja", include_bytes!("../embedded/chat_template.jinja")),
        ("generation_config.json", include_bytes!("../embedded/generation_config.json")),
    ];
    files.into_iter().map(|(n, b)| (n.to_owned(), b.to_vec())).collect()
}
