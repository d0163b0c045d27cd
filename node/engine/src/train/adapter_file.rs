//! Adapters in optimizer state, and as the two files that PEFT loads.

use std::collections::HashMap;

use safetensors::tensor::{SafeTensors, TensorView};
use serde_json::json;
use starling_protocol::lora::LoraSpec;

use crate::error::TrainError;

/// The entry of the metadata with the adapters' description, JSON.
pub(super) const LORA: &str = "lora";

/// What PEFT's `PeftModel.from_pretrained` reads from a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeftAdapter {
    /// `adapter_config.json`.
    pub config: String,
    /// `adapter_model.safetensors`: F32, `base_model.model.model.layers.N.self_attn.q_proj.lora_A.weight` and so on.
    pub weights: Vec<u8>,
}

/// The description of the adapters that optimizer state holds, if it holds some.
pub(super) fn spec_of(state: &[u8]) -> Result<Option<LoraSpec>, TrainError> {
    let (_, header) = SafeTensors::read_metadata(state)?;
    let Some(text) = header.metadata().as_ref().and_then(|m| m.get(LORA)) else { return Ok(None) };
    let wrong = |got: String| TrainError::OptimizerState {
        field: LORA.into(),
        expected: "a description of adapters".into(),
        got,
    };
    let spec: LoraSpec = serde_json::from_str(text).map_err(|e| wrong(format!("{text:?}: {e}")))?;
    spec.validate().map_err(|e| wrong(e.to_string()))?;
    Ok(Some(spec))
}

/// Whether optimizer state is that of adapters. False for bytes that are no such state.
#[must_use]
pub fn has_adapters(state: &[u8]) -> bool {
    SafeTensors::read_metadata(state)
        .is_ok_and(|(_, header)| header.metadata().as_ref().is_some_and(|m| m.contains_key(LORA)))
}

/// The adapters of optimizer state as PEFT's files; `None` if it holds none. `base_model` becomes
/// `base_model_name_or_path`: the adapters belong on the weights that their job started from.
///
/// # Errors
/// `Safetensors` for broken bytes, `OptimizerState` for a description that cannot be.
pub fn peft_adapter(state: &[u8], base_model: &str) -> Result<Option<PeftAdapter>, TrainError> {
    let Some(spec) = spec_of(state)? else { return Ok(None) };
    let file = SafeTensors::deserialize(state)?;
    let mut names: Vec<&str> = file.names().into_iter().filter(|n| n.starts_with("base_model.")).collect();
    names.sort_unstable();
    let mut views = Vec::with_capacity(names.len());
    for name in names {
        let view = file.tensor(name)?;
        views.push((name, TensorView::new(view.dtype(), view.shape().to_vec(), view.data())?));
    }
    // `transformers` and PEFT refuse files without this entry.
    let weights = safetensors::serialize(views, Some(HashMap::from([("format".to_owned(), "pt".to_owned())])))?;
    let targets: Vec<&str> = spec.targets.iter().map(|t| t.name()).collect();
    let config = json!({
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "lora_alpha": spec.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": null,
        "peft_type": "LORA",
        "r": spec.rank,
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
        "use_dora": false,
        "use_rslora": false,
    });
    Ok(Some(PeftAdapter { config: format!("{config:#}\n"), weights }))
}
