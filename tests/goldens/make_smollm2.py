#!/usr/bin/env python3
"""Greedy continuations of SmolLM2-135M-Instruct by mlx-lm, and the proof that the folder which we save loads there.

    scripts/fetch_models.sh /tmp/models smollm2
    starling node run --role server --model smollm2=/tmp/models/smollm2.gguf &
    starling checkpoint export smollm2 --out /tmp/folder
    python3 -m venv /tmp/mlxvenv && /tmp/mlxvenv/bin/pip install "mlx[cpu]==0.32.4" mlx-lm==0.32.2 gguf==0.19.0
    /tmp/mlxvenv/bin/python tests/goldens/make_smollm2.py /tmp/models/smollm2.gguf /tmp/folder > tests/goldens/smollm2.json

Two models in mlx-lm, both float32: one from our folder by `mlx_lm.load`, one from the GGUF without any of our code (blocks
dequantized by ggml's Python package, rows of q and k put back into halves). The script fails unless both give equal logits,
bit for bit, so `folder_sha256` names a folder that an independent implementation reads as it should.

`continuations`: ids of a prompt (by `transformers` from our folder's tokenizer), the 64 most likely next tokens, one after the
other, end of turn or not, their natural-log probabilities, and `margins`: how far the second likeliest is behind. Read by
`node/engine/tests/smollm2.rs`.
"""

import hashlib
import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from mlx_lm import load
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

mx.set_default_device(mx.cpu)

NEW = 64
TEXTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n",
    "1, 2, 3, 4, 5,",
    "Water boils at 100 degrees Celsius because",
]
QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Explain in one sentence why the sky is blue.",
    "List three fruits.",
    "What is 12 + 34?",
]
# GGUF's name of a layer's tensor -> Hugging Face's.
LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
HEADS = {"attn_q": 9, "attn_k": 3}


def from_gguf(path, args):
    """mlx-lm's model with the GGUF's weights."""
    weights = {}
    for t in GGUFReader(path).tensors:
        value = dequantize(t.data, t.tensor_type).astype(np.float32)
        parts = t.name.split(".")
        if parts[0] == "blk":
            if heads := HEADS.get(parts[2]):
                rows, columns = value.shape
                value = value.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
            name = f"model.layers.{parts[1]}.{LAYER[parts[2]]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[parts[0]] + ".weight"
        weights[name] = mx.array(value)
    model = llama.Model(args)
    model.load_weights(list(weights.items()))
    return model


def greedy(model, ids):
    """NEW steps: token, its log-probability, and the margin to the next."""
    cache = make_prompt_cache(model)
    out = {"tokens": [], "logprobs": [], "margins": []}
    step = ids
    for _ in range(NEW):
        logits = np.array(model(mx.array([step]), cache=cache)[0, -1].astype(mx.float32), dtype=np.float64)
        best = int(logits.argmax())
        top = logits[best]
        out["tokens"].append(best)
        out["logprobs"].append(round(float(-np.log(np.exp(logits - top).sum())), 6))
        out["margins"].append(round(float(top - np.partition(logits, -2)[-2]), 6))
        step = [best]
    return out


def main():
    gguf, folder = sys.argv[1:]
    model, tokenizer = load(folder)
    assert all(w.dtype == mx.float32 for _, w in model.named_modules() if isinstance(w, mx.array))
    other = from_gguf(gguf, model.args)
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        prompts.append(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False))
    for ids in prompts:
        difference = mx.abs(model(mx.array([ids])) - other(mx.array([ids]))).max().item()
        assert difference == 0.0, f"logits differ by {difference}"
    files = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    hashes = {name: hashlib.sha256((Path(folder) / name).read_bytes()).hexdigest() for name in files}
    continuations = [{"prompt": ids, **greedy(other, ids)} for ids in prompts]
    lines = ",\n".join("  " + json.dumps(c) for c in continuations)
    print(f'{{"folder_sha256": {json.dumps(hashes)},\n "continuations": [\n{lines}\n]}}')


main()
