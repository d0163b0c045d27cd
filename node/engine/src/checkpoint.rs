//! A model on disk, a Hugging Face folder or a GGUF file: configuration, weights, and the small files that travel along.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device};
use serde_json::Value;

use crate::config::LlamaConfig;
use crate::error::CheckpointError;
use crate::gguf;
use crate::weights::Weights;

/// Files kept as they are besides `config.json` and the weights.
const COMPANIONS: [&str; 12] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE",
    "NOTICE",
    "README.md",
];
/// Largest companion file that is read; real tokenizers stay below 20 MB.
const COMPANION_MAX_BYTES: u64 = 64 << 20;

/// Element type of saved weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SaveDtype {
    /// Exact.
    #[default]
    F32,
    /// Half the size, rounded to nearest even.
    Bf16,
}

/// A model in memory, with the files of its folder.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// From `config.json`, or a GGUF's metadata.
    pub config: LlamaConfig,
    /// From `model.safetensors`, or the shards of `model.safetensors.index.json`, or a GGUF's tensors.
    pub weights: Weights,
    /// Tokenizer, chat template, licence and the like, by file name. A GGUF's tokenizer becomes `tokenizer.json` and
    /// `tokenizer_config.json`.
    pub files: BTreeMap<String, Vec<u8>>,
}

impl Checkpoint {
    /// Reads a Hugging Face folder, or a GGUF file whose blocks are dequantized to f32.
    ///
    /// # Errors
    /// `Io` with the path; `Field` or `Metadata` naming the key, and `MissingTensor`, `UnexpectedTensor`, `Shape`, `Dtype`,
    /// `Quantization` or `NonFinite` naming the tensor, that is not as it should be.
    pub fn load(path: &Path, device: &Device) -> Result<Self, CheckpointError> {
        if path.is_file() { gguf::load(path, device) } else { Self::load_folder(path, device) }
    }

    fn load_folder(dir: &Path, device: &Device) -> Result<Self, CheckpointError> {
        let config = LlamaConfig::from_json(&read(&dir.join("config.json"))?)?;
        let index = dir.join("model.safetensors.index.json");
        let weights = if index.exists() {
            let shards = shard_names(&read(&index)?)?;
            let bytes = shards.iter().map(|s| read(&dir.join(s))).collect::<Result<Vec<_>, _>>()?;
            Weights::from_shards(&config, &bytes.iter().map(Vec::as_slice).collect::<Vec<_>>(), device)?
        } else {
            Weights::from_safetensors(&config, &read(&dir.join("model.safetensors"))?, device)?
        };
        weights.check_finite()?;
        let mut files = BTreeMap::new();
        for name in COMPANIONS {
            let path = dir.join(name);
            if std::fs::metadata(&path).is_ok_and(|m| m.is_file() && m.len() <= COMPANION_MAX_BYTES) {
                files.insert(name.to_owned(), read(&path)?);
            }
        }
        Ok(Self { config, weights, files })
    }

    /// Writes a folder that `transformers` loads: `config.json`, `model.safetensors`, and `files`.
    ///
    /// Each file is written beside its place and renamed, so that a crash leaves the old or the new one.
    ///
    /// # Errors
    /// `Io` with the path; `Field` if `files` holds a name with a path separator.
    pub fn save(&self, dir: &Path, dtype: SaveDtype) -> Result<(), CheckpointError> {
        std::fs::create_dir_all(dir).map_err(|source| CheckpointError::Io { path: dir.to_owned(), source })?;
        let (kind, label) = match dtype {
            SaveDtype::F32 => (DType::F32, "float32"),
            SaveDtype::Bf16 => (DType::BF16, "bfloat16"),
        };
        for (name, bytes) in &self.files {
            plain_name("files", name)?;
            write(&dir.join(name), bytes)?;
        }
        write(&dir.join("model.safetensors"), &self.weights.serialize(kind)?)?;
        let config =
            self.config.to_json().replace("\"torch_dtype\": \"float32\"", &format!("\"torch_dtype\": \"{label}\""));
        write(&dir.join("config.json"), config.as_bytes())
    }
}

/// The distinct files of a shard index, in name order.
fn shard_names(index: &[u8]) -> Result<BTreeSet<String>, CheckpointError> {
    let file = "model.safetensors.index.json";
    let root: Value = serde_json::from_slice(index).map_err(|source| CheckpointError::Json { file, source })?;
    let wrong = |got: String| CheckpointError::Field {
        field: "weight_map",
        expected: "tensor names to file names".into(),
        got,
    };
    let map = root.get("weight_map").and_then(Value::as_object).ok_or_else(|| wrong("nothing".into()))?;
    map.values()
        .map(|v| {
            let name = v.as_str().ok_or_else(|| wrong(v.to_string()))?;
            plain_name("weight_map", name)?;
            Ok(name.to_owned())
        })
        .collect()
}

/// Refuses names that would leave the folder.
fn plain_name(field: &'static str, name: &str) -> Result<(), CheckpointError> {
    let plain = !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', '\0']);
    if plain {
        Ok(())
    } else {
        Err(CheckpointError::Field { field, expected: "a plain file name".into(), got: name.to_owned() })
    }
}

fn read(path: &Path) -> Result<Vec<u8>, CheckpointError> {
    std::fs::read(path).map_err(|source| CheckpointError::Io { path: path.to_owned(), source })
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
    let io = |path: &PathBuf| {
        let path = path.clone();
        move |source| CheckpointError::Io { path, source }
    };
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    std::fs::write(&partial, bytes).map_err(io(&partial))?;
    std::fs::rename(&partial, path).map_err(io(&path.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{scratch_dir, tiny_config};

    #[test]
    fn a_saved_folder_loads_back_with_its_companions() {
        let dir = scratch_dir("checkpoint");
        let config = tiny_config();
        let weights = Weights::random(&config, &Device::Cpu, 3).unwrap();
        let files = BTreeMap::from([("tokenizer.json".to_owned(), b"{}".to_vec())]);
        let saved = Checkpoint { config, weights, files };
        saved.save(&dir, SaveDtype::F32).unwrap();
        let loaded = Checkpoint::load(&dir, &Device::Cpu).unwrap();
        assert_eq!(loaded.config, saved.config);
        assert_eq!(loaded.files, saved.files);
        assert_eq!(loaded.weights.to_safetensors().unwrap(), saved.weights.to_safetensors().unwrap());
        saved.save(&dir, SaveDtype::Bf16).unwrap();
        assert!(Checkpoint::load(&dir, &Device::Cpu).is_ok());
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_shard_index_cannot_leave_the_folder() {
        assert!(shard_names(br#"{"weight_map": {"a": "../../etc/passwd"}}"#).is_err());
        let names =
            shard_names(br#"{"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "m-1.safetensors"}}"#);
        assert_eq!(names.unwrap().len(), 2);
    }
}
