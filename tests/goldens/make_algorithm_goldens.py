#!/usr/bin/env python3
"""Golden numbers for every algorithm, correction, aggregation and KL: numpy in float64, differentiated by complex steps.

    python3 -m venv /tmp/npvenv && /tmp/npvenv/bin/pip install numpy
    /tmp/npvenv/bin/python tests/goldens/make_algorithm_goldens.py > tests/goldens/algorithms.json

Written over whole arrays from the papers' formulas; the Rust code goes token by token with derivatives by hand. A
complex step (Squire and Trapp 1998: the derivative of f is Im f(x + ih)/h, exact to rounding for h = 1e-30) needs no
rule for any derivative, so nothing of the kind can be wrong on both sides; a paper's stop-gradient is the real part.
The model's forward pass is checked against JAX's numbers in `engine.json`.

Each case carries its options as `AlgorithmSpec` reads them. `tokens` gives loss and gradient per token
(`node/engine/src/train/loss_tests.rs`); `model` the gradient of a small Llama along two directions of every tensor
(`node/engine/tests/algorithms.rs`).
"""

import json
import math
import pathlib

import numpy as np

H = 1e-30


def sg(x):
    return np.real(x) + 0.0


def smaller(a, b):
    a, b = np.broadcast_arrays(a, b)
    return np.where(np.real(a) < np.real(b), a, b)


def clip(x, low, high):
    return np.where(np.real(x) < low, low, np.where(np.real(x) > high, high, x))


BASE = {
    "preset": "grpo", "advantage": "grpo", "objective": {"clip": {"low": 0.2, "high": 0.3, "ratio_max": None}},
    "old_policy": "sampler", "correction": "none", "outlier_guard": None, "aggregation": "token_mean",
    "kl": {"estimator": "k3", "coefficient": 0.0}, "mismatch_penalty": 0.0, "entropy_bonus": 0.0,
}
TWO_SIDED = {"clip": {"low": 0.2, "high": 0.3, "ratio_max": 1.6}}
GSPO = {"gspo": {"low": 0.03, "high": 0.04}}
CISPO = {"cispo": {"ratio_min": 0.7, "ratio_max": 1.25}}
SUM = {"sequence_sum": {"divisor": 24.0}}
GUARD = {"low": 0.55, "high": 1.8199}


def tis(level):
    return {"tis": {"cap": 1.2, "level": level}}


def cases():
    out = {}

    def case(name, **changes):
        out[name] = {**BASE, **changes}

    for aggregation in ["token_mean", "sequence_mean", SUM]:
        case(f"clip, {aggregation if isinstance(aggregation, str) else 'sequence_sum'}", aggregation=aggregation)
    for old in ["sampler", "recomputed", "shortcut"]:
        case(f"two-sided clip, {old}", objective=TWO_SIDED, old_policy=old)
    for old in ["sampler", "recomputed"]:
        case(f"gspo, {old}", objective=GSPO, old_policy=old, aggregation="sequence_mean")
    case("gspo, token_mean, tis", objective=GSPO, old_policy="recomputed", correction=tis("token"))
    case("cispo", objective=CISPO)
    case("cispo, no lower clip, sequence_mean", objective={"cispo": {"ratio_min": 0.0, "ratio_max": 1.25}},
         aggregation="sequence_mean")
    case("ratio", objective="ratio")
    case("reinforce, sequence_sum", objective="reinforce", aggregation=SUM)
    case("supervised", objective="supervised")
    for old in ["recomputed", "shortcut"]:
        case(f"tis, {old}", old_policy=old, correction=tis("token"))
        case(f"ice_pop, {old}", old_policy=old, correction={"ice_pop": {"low": 0.8, "high": 1.3}})
        case(f"decoupled, {old}", old_policy=old, correction={"decoupled": {"cap": 1.4}})
    case("tis of sequences", old_policy="recomputed", correction=tis("sequence"), aggregation="sequence_mean")
    case("reinforce, tis", objective="reinforce", old_policy="recomputed", correction=tis("token"))
    case("dppo", objective="ratio", correction={"dppo_mask": {"threshold": 0.004}}, mismatch_penalty=0.05)
    case("clip, dppo_mask", correction={"dppo_mask": {"threshold": 0.004}})
    case("outlier guard", outlier_guard=GUARD)
    case("outlier guard, tis of sequences", old_policy="recomputed", correction=tis("sequence"), outlier_guard=GUARD)
    for k in ["k1", "k2", "k3"]:
        case(f"kl {k}", kl={"estimator": k, "coefficient": 0.1})
    case("entropy bonus, sequence_mean", entropy_bonus=0.2, aggregation="sequence_mean")
    case("everything", objective=TWO_SIDED, old_policy="recomputed", correction=tis("token"), outlier_guard=GUARD,
         aggregation="sequence_mean", kl={"estimator": "k3", "coefficient": 0.1}, mismatch_penalty=0.05,
         entropy_bonus=0.2)
    return out


def only(option, name):
    """The parameters of a variant, or None if it is another."""
    if option == name:
        return {}
    return option.get(name) if isinstance(option, dict) else None


def loss(spec, t, lp, entropy):
    """`t`: mu, old, ref, advantage, behind (versions), sequence (index), all per token."""
    n, count = lp.shape[0], int(t["sequence"].max()) + 1
    member = (np.arange(count)[:, None] == t["sequence"][None, :]).astype(np.float64)  # [sequences, tokens]
    length = member.sum(1)
    A, mu = t["advantage"], t["mu"]
    alpha = t["behind"] / (t["behind"] + 1.0)
    old = {"sampler": mu, "recomputed": t["old"], "shortcut": sg(mu + alpha * (lp - mu))}[spec["old_policy"]]
    r, k, rho = np.exp(lp - old), np.exp(lp - mu), np.exp(old - mu)

    def ppo(ratio, o, most):
        return smaller(smaller(ratio, most) * A, clip(ratio, 1 - o["low"], 1 + o["high"]) * A)

    if (o := only(spec["objective"], "clip")) is not None:
        gain = ppo(r, o, np.inf if o["ratio_max"] is None else o["ratio_max"])
    elif (o := only(spec["objective"], "gspo")) is not None:
        mean = (member @ (lp - old)) / length
        gain = ppo(np.exp(sg(mean @ member) + lp - sg(lp)), o, np.inf)
    elif (o := only(spec["objective"], "cispo")) is not None:
        gain = sg(clip(k, o["ratio_min"], o["ratio_max"])) * A * lp
    elif spec["objective"] == "ratio":
        gain = k * A
    elif spec["objective"] == "reinforce":
        gain = A * lp
    else:
        gain = lp
    weight = np.ones(n)
    start = np.exp(t["old"] - mu)  # at the step's start, whatever the ratio is taken against
    if (o := only(spec["correction"], "tis")) is not None:
        product = np.exp(member @ np.log(start))
        weight = smaller(rho, o["cap"]) if o["level"] == "token" else np.minimum(product, o["cap"]) @ member
    elif (o := only(spec["correction"], "ice_pop")) is not None:
        weight = np.where((rho >= o["low"]) & (rho <= o["high"]), rho, 0.0)
    elif (o := only(spec["correction"], "decoupled")) is not None:
        weight = np.where(rho <= o["cap"], rho, 0.0)
    elif (o := only(spec["correction"], "dppo_mask")) is not None:
        moved = np.exp(lp) - np.exp(mu)
        weight = np.where(((A > 0) & (moved > o["threshold"])) | ((A < 0) & (moved < -o["threshold"])), 0.0, 1.0)
    if (o := spec["outlier_guard"]) is not None:
        out = member @ ((start < o["low"]) | (start > o["high"])).astype(np.float64) > 0
        weight = weight * ((~out).astype(np.float64) @ member)
    weight = sg(weight)
    token = -weight * gain
    x = t["ref"] - lp
    token += spec["kl"]["coefficient"] * {"k1": -x, "k2": x * x / 2, "k3": np.exp(x) - x - 1}[spec["kl"]["estimator"]]
    token += spec["mismatch_penalty"] * (lp - mu) ** 2 - spec["entropy_bonus"] * entropy
    if spec["aggregation"] == "token_mean":
        total = token.mean()
    elif spec["aggregation"] == "sequence_mean":
        total = ((member @ token) / length).mean()
    else:
        total = (member @ token).mean() / spec["aggregation"]["sequence_sum"]["divisor"]
    return total, (weight == 0).mean()


def far_from_edges(t, lp):
    """No ratio sits where float32 and float64 could disagree on a branch."""
    alpha = t["behind"] / (t["behind"] + 1.0)
    short = t["mu"] + alpha * (lp - t["mu"])
    edges = [0.8, 1.3, 1.6, 0.7, 1.25, 1.2, 1.4, 0.55, 1.8199]
    for a, b in [(lp, t["mu"]), (lp, t["old"]), (t["old"], t["mu"]), (lp, short), (short, t["mu"])]:
        for e in edges:
            assert np.abs(np.exp(a - b) - e).min() > 1e-4, ("a ratio sits on an edge", e)
    assert np.abs(np.abs(np.exp(lp) - np.exp(t["mu"])) - 0.004).min() > 1e-6, "a difference sits on the threshold"


def number(x):
    return float(f"{float(x):.8g}")


def f32(x):
    return np.array(x, dtype=np.float32).astype(np.float64)


def by_complex_steps(f, *arrays):
    """Value and gradient of a real function of float arrays."""
    grads = []
    for which, array in enumerate(arrays):
        grad = np.zeros(array.size)
        for i in range(array.size):
            moved = [a.astype(complex) for a in arrays]
            moved[which][i] += 1j * H
            grad[i] = np.imag(f(*moved)) / H
        grads.append(grad)
    return float(np.real(f(*arrays))), grads


def token_part():
    lengths = [4, 6, 1, 7]
    n = sum(lengths)
    i = np.arange(n)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    lp = f32(-2.2 + 1.4 * np.sin(1.7 * i + 0.2))
    t = {
        "mu": f32(lp + 0.55 * np.sin(2.3 * i + 1.0)), "old": f32(lp + 0.3 * np.sin(0.9 * i + 0.4)),
        "ref": f32(lp + 0.7 * np.sin(1.1 * i)), "advantage": f32(np.array([1.25, -0.75, 0.5, -1.5])[sequence]),
        "behind": (i % 4).astype(np.float64), "sequence": sequence,
    }
    entropy = f32(1.5 + np.cos(0.8 * i))
    far_from_edges(t, lp)
    out = {name: {"spec": spec} for name, spec in cases().items()}
    for case in out.values():
        value, (g_lp, g_h) = by_complex_steps(lambda a, b: loss(case["spec"], t, a, b)[0], lp, entropy)
        case.update(loss=number(value), masked=number(loss(case["spec"], t, lp, entropy)[1]),
                    by_logprob=[number(v) for v in g_lp], by_entropy=[number(v) for v in g_h])
    inputs = {k: [number(v) for v in np.array(a)] for k, a in {**t, "logprob": lp, "entropy": entropy}.items()}
    return {"inputs": inputs, "lengths": lengths, "cases": out}


def formula(t, shape):
    """As in `make_goldens.py`."""
    n = math.prod(shape)
    wave = [math.sin(0.37 * i + 0.0113 * i * i + 1.7 * t) for i in range(n)]
    flat = [1.0 + 0.2 * w for w in wave] if len(shape) == 1 else [1.5 / math.sqrt(shape[1]) * w for w in wave]
    return np.array(flat, dtype=np.float32).astype(np.float64).reshape(shape)


def shapes(c):
    h, i, v = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    layer = {"input_layernorm": (h,), "self_attn.q_proj": (q, h), "self_attn.k_proj": (kv, h),
             "self_attn.v_proj": (kv, h), "self_attn.o_proj": (h, q), "post_attention_layernorm": (h,),
             "mlp.gate_proj": (i, h), "mlp.up_proj": (i, h), "mlp.down_proj": (h, i)}
    out = {"model.embed_tokens.weight": (v, h)}
    for l in range(c["num_hidden_layers"]):
        out.update({f"model.layers.{l}.{name}.weight": shape for name, shape in layer.items()})
    return {**out, "model.norm.weight": (h,), "lm_head.weight": (v, h)}


def softmax(x):
    e = np.exp(x - np.max(np.real(x), -1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def forward(w, c, tokens):
    """Log-probability of each token but the first, and the entropy of the distribution that it is drawn from."""
    n, d, heads = len(tokens), c["head_dim"], c["num_attention_heads"]
    freq = (1.0 / c["rope_theta"] ** (np.arange(0, d, 2) / d)).astype(np.float32)
    angle = (np.arange(n, dtype=np.float32)[:, None] * freq[None, :]).astype(np.float64)
    cos, sin = np.cos(angle)[None], np.sin(angle)[None]

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + c["rms_norm_eps"]) * w[name]

    def rotate(x):
        a, b = x[..., : d // 2], x[..., d // 2:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = w["model.embed_tokens.weight"][tokens]
    for l in range(c["num_hidden_layers"]):
        of = lambda name: w[f"model.layers.{l}.{name}.weight"]
        y = norm(x, f"model.layers.{l}.input_layernorm.weight")
        split = lambda name: (y @ of(name).T).reshape(n, -1, d).transpose(1, 0, 2)
        q, k, v = rotate(split("self_attn.q_proj")), rotate(split("self_attn.k_proj")), split("self_attn.v_proj")
        k, v = (np.repeat(z, heads // c["num_key_value_heads"], 0) for z in (k, v))
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(d) + np.triu(np.full((n, n), -1e9), 1)
        x = x + (softmax(scores) @ v).transpose(1, 0, 2).reshape(n, -1) @ of("self_attn.o_proj").T
        y = norm(x, f"model.layers.{l}.post_attention_layernorm.weight")
        gate = y @ of("mlp.gate_proj").T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ of("mlp.up_proj").T)) @ of("mlp.down_proj").T
    p = softmax(norm(x, "model.norm.weight") @ w["lm_head.weight"].T)[:-1]
    return np.log(p[np.arange(n - 1), tokens[1:]]), -(p * np.log(p)).sum(-1)


def model_part():
    golden = json.loads((pathlib.Path(__file__).parent / "engine.json").read_text())
    c, batch = golden["config"], golden["samples"]
    w = {name: formula(i, s) for i, (name, s) in enumerate(shapes(c).items())}
    reference = {name: formula(i + 0.05, s) for i, (name, s) in enumerate(shapes(c).items())}
    for s, jax in zip(batch, golden["sequences"]):
        assert np.abs(forward(w, c, s["tokens"])[0] - np.array(jax["logprobs"][1:])).max() < 1e-7, "not JAX's numbers"
    # The second and third sample are two timelines of one episode.
    batch[2]["advantage"] = batch[1]["advantage"]
    for s, episode in zip(batch, [0, 1, 1, 2, 3]):
        s["episode"] = episode
        s["staleness"] = [(i * 5 + len(s["tokens"])) % 4 if m else 0 for i, m in enumerate(s["loss_mask"])]

    def trained(weights):
        parts = [[x[np.array(s["loss_mask"])[1:]] for x in forward(weights, c, s["tokens"])] for s in batch]
        return [np.concatenate(x) for x in zip(*parts)]

    def per_token(of):
        return np.array([of(s, i) for s in batch for i, m in enumerate(s["loss_mask"]) if m])

    lp, entropy = trained(w)
    t = {
        "mu": per_token(lambda s, i: s["behaviour_logprobs"][i]), "old": lp, "ref": trained(reference)[0],
        "advantage": per_token(lambda s, i: s["advantage"]), "sequence": per_token(lambda s, i: s["episode"]),
        "behind": per_token(lambda s, i: float(s["staleness"][i])),
    }
    far_from_edges(t, lp)
    # How the trained tokens move along sin(1), sin(2), … and cos(1), cos(2), … of one tensor after the other.
    moves = {}
    for name, value in w.items():
        at = np.arange(1, value.size + 1).reshape(value.shape)
        along = [trained({**w, name: value + 1j * H * wave(at)}) for wave in (np.sin, np.cos)]
        moves[name] = [[np.imag(x) / H for x in a] for a in along]
    out = {name: {"spec": spec} for name, spec in cases().items()}
    for case in out.values():
        value, (g_lp, g_h) = by_complex_steps(lambda a, b: loss(case["spec"], t, a, b)[0], lp, entropy)
        tensors = {name: [number(g_lp @ d[0] + g_h @ d[1]) for d in along] for name, along in moves.items()}
        case.update(loss=number(value), masked=number(loss(case["spec"], t, lp, entropy)[1]), tensors=tensors)
    return {"config": c, "samples": batch, "cases": out}


if __name__ == "__main__":
    print(json.dumps({"tokens": token_part(), "model": model_part()}, separators=(",", ":")))
