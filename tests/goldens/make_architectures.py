#!/usr/bin/env python3
"""Golden numbers for the architectures (Llama, Qwen2, Qwen3, scaled rotary positions), from mlx-lm's models.

    python3 -m venv /tmp/mlxvenv && /tmp/mlxvenv/bin/pip install "mlx[cpu]==0.32.4" mlx-lm==0.32.2
    /tmp/mlxvenv/bin/python tests/goldens/make_architectures.py > tests/goldens/architectures.json

mlx-lm reads the same `config.json` and the same tensor names; only the formula of the weights is shared with the Rust
side. Log-probabilities and the gradients of the mean cross-entropy are in float32. Read by
`node/engine/tests/architectures.rs`.
"""

import importlib
import json
import math

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

mx.set_default_device(mx.cpu)

BASE = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 64,
}
CONFIGS = {
    "llama": {"model_type": "llama", "head_dim": 8, "tie_word_embeddings": True},
    "llama3_scaling": {
        "model_type": "llama", "head_dim": 8, "tie_word_embeddings": False,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2_untied": {"model_type": "qwen2", "tie_word_embeddings": False},
    # Heads wider than hidden / heads.
    "qwen3": {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
    "qwen3_untied": {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": False},
}
# Lengths cross a block of 16.
SEQUENCES = [[(7 * t + 5 * n + t * t) % BASE["vocab_size"] for t in range(length)] for n, length in enumerate([3, 21, 33])]
# Gradient values kept of each tensor, besides their Euclidean norm.
KEPT = 24


def formula(name, shape):
    """Weights both sides compute; the phase comes from the name, so that the order of tensors does not matter."""
    phase = 0.37 * (sum(name.encode()) % 101)
    wave = [math.sin(0.37 * i + 0.0113 * i * i + phase) for i in range(math.prod(shape))]
    if name.endswith(".bias"):
        flat = [0.5 * w for w in wave]
    elif len(shape) == 1:
        flat = [1.0 + 0.2 * w for w in wave]
    else:
        flat = [1.5 / math.sqrt(shape[1]) * w for w in wave]
    return mx.array(flat, dtype=mx.float32).reshape(shape)


def logprobs(model, tokens):
    logits = model(mx.array([tokens]))[0]
    ls = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return mx.take_along_axis(ls[:-1], mx.array(tokens[1:])[:, None], axis=-1)[:, 0]


def loss(model):
    terms = [logprobs(model, tokens) for tokens in SEQUENCES]
    return -mx.concatenate(terms).mean()


def rounded(values):
    return [float(f"{v:.7g}") for v in values]


def main():
    out = {}
    for name, extra in CONFIGS.items():
        config = BASE | extra
        module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
        model = module.Model(module.ModelArgs.from_dict(config))
        weights = [(n, formula(n, p.shape)) for n, p in tree_flatten(model.parameters())]
        model.load_weights(weights)
        value, gradients = nn.value_and_grad(model, loss)(model)
        out[name] = {
            "config": config,
            "sequences": [{"tokens": s, "logprobs": rounded(logprobs(model, s).tolist())} for s in SEQUENCES],
            "loss": float(f"{value.item():.7g}"),
            "gradients": {
                n: {"norm": float(f"{mx.sqrt((g * g).sum()).item():.7g}"), "first": rounded(g.flatten()[:KEPT].tolist())}
                for n, g in sorted(tree_flatten(gradients))
            },
        }
    print(json.dumps(out, separators=(",", ":")))


if __name__ == "__main__":
    main()
