#!/usr/bin/env python3
"""Golden numbers for the engine, from an independent implementation in JAX (float64).

    python3 -m venv /tmp/jaxvenv && /tmp/jaxvenv/bin/pip install jax
    /tmp/jaxvenv/bin/python tests/goldens/make_goldens.py > tests/goldens/engine.json

One sequence at a time, full attention matrices, no packing, no fused weights: nothing is shared with the Rust code
but the formula of the weights. Read by `node/engine/tests/goldens.rs`.
"""

import json
import math

import jax

jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp  # noqa: E402  (after the precision switch)
import numpy as np  # noqa: E402

CONFIG = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "model_type": "llama",
}
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
ADAMW = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1, "max_grad_norm": 0.5}


def shapes(c):
    h, i, v = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    out = [("model.embed_tokens.weight", (v, h))]
    for l in range(c["num_hidden_layers"]):
        p = f"model.layers.{l}."
        out += [
            (p + "input_layernorm.weight", (h,)), (p + "self_attn.q_proj.weight", (q, h)),
            (p + "self_attn.k_proj.weight", (kv, h)), (p + "self_attn.v_proj.weight", (kv, h)),
            (p + "self_attn.o_proj.weight", (h, q)), (p + "post_attention_layernorm.weight", (h,)),
            (p + "mlp.gate_proj.weight", (i, h)), (p + "mlp.up_proj.weight", (i, h)),
            (p + "mlp.down_proj.weight", (h, i)),
        ]
    out += [("model.norm.weight", (h,))]
    if not c["tie_word_embeddings"]:
        out += [("lm_head.weight", (v, h))]
    return out


def formula(t, shape):
    """Weights both sides compute: the square in the sine keeps the matrices from having rank 2."""
    n = math.prod(shape)
    wave = [math.sin(0.37 * i + 0.0113 * i * i + 1.7 * t) for i in range(n)]
    if len(shape) == 1:
        flat = [1.0 + 0.2 * w for w in wave]
    else:
        flat = [1.5 / math.sqrt(shape[1]) * w for w in wave]
    return np.array(flat, dtype=np.float32).reshape(shape)


def norm(x, w, eps):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + eps) * w


def rope(x, theta):
    """x [length, heads, dim]; angles in float32 as the Hugging Face implementation takes them."""
    length, _, d = x.shape
    freq = (1.0 / theta ** (np.arange(0, d, 2) / d)).astype(np.float32)
    angle = (np.arange(length, dtype=np.float32)[:, None] * freq[None, :]).astype(np.float64)
    cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]
    a, b = x[..., : d // 2], x[..., d // 2:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def logits(w, c, tokens):
    h, d = c["num_attention_heads"], c["head_dim"]
    g = h // c["num_key_value_heads"]
    n = len(tokens)
    x = w["model.embed_tokens.weight"][jnp.array(tokens)]
    mask = np.tril(np.ones((n, n), dtype=bool))
    for l in range(c["num_hidden_layers"]):
        p = f"model.layers.{l}."
        y = norm(x, w[p + "input_layernorm.weight"], c["rms_norm_eps"])
        heads = lambda name: (y @ w[p + f"self_attn.{name}_proj.weight"].T).reshape(n, -1, d)
        q, k, v = rope(heads("q"), c["rope_theta"]), rope(heads("k"), c["rope_theta"]), heads("v")
        mixed = []
        for i in range(h):
            s = q[:, i] @ k[:, i // g].T / math.sqrt(d)
            mixed.append(jax.nn.softmax(jnp.where(mask, s, -jnp.inf), -1) @ v[:, i // g])
        x = x + jnp.concatenate(mixed, -1) @ w[p + "self_attn.o_proj.weight"].T
        y = norm(x, w[p + "post_attention_layernorm.weight"], c["rms_norm_eps"])
        act = jax.nn.silu(y @ w[p + "mlp.gate_proj.weight"].T) * (y @ w[p + "mlp.up_proj.weight"].T)
        x = x + act @ w[p + "mlp.down_proj.weight"].T
    x = norm(x, w["model.norm.weight"], c["rms_norm_eps"])
    head = w["model.embed_tokens.weight"] if c["tie_word_embeddings"] else w["lm_head.weight"]
    return x @ head.T


def logprobs(w, c, tokens):
    """(log-probability of each token given those before, 0 first; log-softmax after each token)"""
    ls = jax.nn.log_softmax(logits(w, c, tokens), -1)
    picked = ls[jnp.arange(len(tokens) - 1), jnp.array(tokens[1:])]
    return jnp.concatenate([jnp.zeros(1), picked]), ls


def samples(w):
    """Lengths cross a block of 16; some ratios leave the clip on both sides, for both signs of the advantage."""
    out = []
    for n, (length, advantage) in enumerate([(3, 1.0), (21, -0.75), (16, 1.5), (9, -1.25), (33, 0.5)]):
        tokens = [(7 * t + 5 * n + t * t) % CONFIG["vocab_size"] for t in range(length)]
        mask = [t >= 1 + n and (t + n) % 4 != 0 for t in range(length)]
        lp = np.array(logprobs(w, CONFIG, tokens)[0])
        offset = [0.6 * math.sin(1.3 * t + n + 0.3) for t in range(length)]
        behaviour = [float(np.float32(lp[t] - offset[t])) if mask[t] else 0.0 for t in range(length)]
        for t in range(length):
            ratio = math.exp(lp[t] - behaviour[t])
            edges = (1 - CLIP_LOW, 1 + CLIP_HIGH)
            assert not mask[t] or min(abs(ratio - e) for e in edges) > 1e-3, "a ratio sits on a clip edge"
        out.append({"tokens": tokens, "loss_mask": mask, "behaviour_logprobs": behaviour, "advantage": advantage})
    return out


def grpo(w, batch):
    terms, clipped, kl, entropy = [], [], [], []
    for s in batch:
        lp, ls = logprobs(w, CONFIG, s["tokens"])
        h = -(jnp.exp(ls) * ls).sum(-1)
        for t, m in enumerate(s["loss_mask"]):
            if not m:
                continue
            k = jnp.exp(lp[t] - s["behaviour_logprobs"][t])
            a = s["advantage"]
            unclipped, bounded = k * a, jnp.clip(k, 1 - CLIP_LOW, 1 + CLIP_HIGH) * a
            terms.append(jnp.minimum(unclipped, bounded))
            clipped.append(bounded < unclipped)
            kl.append(k - 1 - jnp.log(k))
            entropy.append(h[t - 1])
    n = len(terms)
    return -sum(terms) / n, {"clip_fraction": sum(clipped) / n, "approx_kl": sum(kl) / n, "entropy": sum(entropy) / n, "trained_tokens": n}


def cross_entropy(w, batch):
    terms = [logprobs(w, CONFIG, s["tokens"])[0][t] for s in batch for t, m in enumerate(s["loss_mask"]) if m]
    return -sum(terms) / len(terms)


def adamw(w, grads):
    a = ADAMW
    total = math.sqrt(sum(float((g * g).sum()) for g in grads.values()))
    scale = min(1.0, a["max_grad_norm"] / total)
    out = {}
    for name, p in w.items():
        g = grads[name] * scale
        m, v = (1 - a["beta1"]) * g, (1 - a["beta2"]) * g * g
        decay = a["weight_decay"] if p.ndim > 1 else 0.0
        step = (m / (1 - a["beta1"])) / (jnp.sqrt(v / (1 - a["beta2"])) + a["eps"])
        out[name] = p * (1 - a["learning_rate"] * decay) - a["learning_rate"] * step
    return out, total, scale


def rounded(x):
    return [float(f"{v:.8g}") for v in np.array(x).reshape(-1)]


def main():
    w = {name: jnp.array(formula(t, s), dtype=jnp.float64) for t, (name, s) in enumerate(shapes(CONFIG))}
    batch = samples(w)
    (loss, extra), grads = jax.value_and_grad(grpo, has_aux=True)(w, batch)
    updated, total, scale = adamw(w, grads)
    sequences = [{"tokens": s["tokens"], "logprobs": rounded(logprobs(w, CONFIG, s["tokens"])[0]),
                  "last_log_softmax": rounded(logprobs(w, CONFIG, s["tokens"])[1][-1])} for s in batch]
    print(json.dumps({
        "config": CONFIG, "clip_low": CLIP_LOW, "clip_high": CLIP_HIGH, "adamw": ADAMW, "samples": batch,
        "sequences": sequences, "loss": float(loss), "grad_norm": total, "grad_scale": scale,
        **{k: float(v) for k, v in extra.items()}, "cross_entropy": float(cross_entropy(w, batch)),
        "gradients": {n: rounded(g) for n, g in grads.items()}, "updated": {n: rounded(p) for n, p in updated.items()},
        "loss_after_update": float(grpo(updated, batch)[0]),
    }, indent=None, separators=(",", ":")))


if __name__ == "__main__":
    main()
