#!/usr/bin/env python3
"""Golden numbers for every algorithm, correction, aggregation and KL, from JAX's autograd in float64.

    python3 -m venv /tmp/jaxvenv && /tmp/jaxvenv/bin/pip install jax
    /tmp/jaxvenv/bin/python tests/goldens/make_algorithm_goldens.py > tests/goldens/algorithms.json

Written over whole arrays from the papers' formulas, with `stop_gradient` where a paper has it; the Rust code goes token
by token with derivatives by hand. Each case carries its options as `AlgorithmSpec` reads them. `tokens` gives loss and
gradient per token (`node/engine/src/train/loss_tests.rs`), `model` the gradient of a small Llama as two numbers a tensor
(`node/engine/tests/algorithms.rs`).
"""

import json
import math

import jax

jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp  # noqa: E402  (after the precision switch)
import numpy as np  # noqa: E402

import make_goldens as base  # noqa: E402

sg = jax.lax.stop_gradient

BASE = {
    "preset": "grpo", "advantage": "grpo", "objective": {"clip": {"low": 0.2, "high": 0.3, "ratio_max": None}},
    "old_policy": "sampler", "correction": "none", "outlier_guard": None, "aggregation": "token_mean",
    "kl": {"estimator": "k3", "coefficient": 0.0}, "mismatch_penalty": 0.0, "entropy_bonus": 0.0,
}
TWO_SIDED = {"clip": {"low": 0.2, "high": 0.3, "ratio_max": 1.6}}
GSPO = {"gspo": {"low": 0.03, "high": 0.04}}
CISPO = {"cispo": {"ratio_min": 0.7, "ratio_max": 1.25}}
SUM = {"sequence_sum": {"divisor": 24.0}}
GUARD = {"low": 0.58, "high": 1.74}


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
    r, k, rho = jnp.exp(lp - old), jnp.exp(lp - mu), jnp.exp(old - mu)

    def ppo(ratio, o, most):
        return jnp.minimum(jnp.minimum(ratio, most) * A, jnp.clip(ratio, 1 - o["low"], 1 + o["high"]) * A)

    if (o := only(spec["objective"], "clip")) is not None:
        gain = ppo(r, o, jnp.inf if o["ratio_max"] is None else o["ratio_max"])
    elif (o := only(spec["objective"], "gspo")) is not None:
        mean = (member @ (lp - old)) / length
        gain = ppo(jnp.exp(sg(mean @ member) + lp - sg(lp)), o, jnp.inf)
    elif (o := only(spec["objective"], "cispo")) is not None:
        gain = sg(jnp.clip(k, o["ratio_min"], o["ratio_max"])) * A * lp
    elif spec["objective"] == "ratio":
        gain = k * A
    elif spec["objective"] == "reinforce":
        gain = A * lp
    else:
        gain = lp
    weight = jnp.ones(n)
    start = np.exp(t["old"] - mu)  # at the step's start, whatever the ratio is taken against
    if (o := only(spec["correction"], "tis")) is not None:
        product = np.exp(member @ np.log(start))
        weight = jnp.minimum(rho, o["cap"]) if o["level"] == "token" else np.minimum(product, o["cap"]) @ member
    elif (o := only(spec["correction"], "ice_pop")) is not None:
        weight = jnp.where((rho >= o["low"]) & (rho <= o["high"]), rho, 0.0)
    elif (o := only(spec["correction"], "decoupled")) is not None:
        weight = jnp.where(rho <= o["cap"], rho, 0.0)
    elif (o := only(spec["correction"], "dppo_mask")) is not None:
        moved = jnp.exp(lp) - jnp.exp(mu)
        weight = jnp.where(((A > 0) & (moved > o["threshold"])) | ((A < 0) & (moved < -o["threshold"])), 0.0, 1.0)
    if (o := spec["outlier_guard"]) is not None:
        out = member @ ((start < o["low"]) | (start > o["high"])).astype(np.float64) > 0
        weight = weight * ((~out).astype(np.float64) @ member)
    weight = sg(weight)
    token = -weight * gain
    x = t["ref"] - lp
    token += spec["kl"]["coefficient"] * {"k1": -x, "k2": x * x / 2, "k3": jnp.exp(x) - x - 1}[spec["kl"]["estimator"]]
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
    edges = [0.8, 1.3, 1.6, 0.7, 1.25, 1.2, 1.4, 0.58, 1.74]
    for a, b in [(lp, t["mu"]), (lp, t["old"]), (t["old"], t["mu"]), (lp, short), (short, t["mu"])]:
        for e in edges:
            assert np.abs(np.exp(a - b) - e).min() > 1e-4, ("a ratio sits on an edge", e)
    assert np.abs(np.abs(np.exp(lp) - np.exp(t["mu"])) - 0.004).min() > 1e-6, "a difference sits on the threshold"


def number(x):
    return float(f"{float(x):.8g}")


def f32(x):
    return np.array(x, dtype=np.float32).astype(np.float64)


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
        (value, masked), (g_lp, g_h) = jax.value_and_grad(
            lambda a, b: loss(case["spec"], t, a, b), argnums=(0, 1), has_aux=True)(jnp.array(lp), jnp.array(entropy))
        case.update(loss=number(value), masked=number(masked), by_logprob=[number(v) for v in g_lp],
                    by_entropy=[number(v) for v in g_h])
    inputs = {k: [number(v) for v in np.array(a)] for k, a in {**t, "logprob": lp, "entropy": entropy}.items()}
    return {"inputs": inputs, "lengths": lengths, "cases": out}


def model_part():
    w = {name: jnp.array(base.formula(i, s), dtype=jnp.float64) for i, (name, s) in enumerate(base.shapes(base.CONFIG))}
    reference = {name: jnp.array(base.formula(i + 0.05, s), dtype=jnp.float64)
                 for i, (name, s) in enumerate(base.shapes(base.CONFIG))}
    batch = base.samples(w)
    # The second and third sample are two timelines of one episode.
    episodes = [0, 1, 1, 2, 3]
    for s in batch:
        s["advantage"] = float(batch[1]["advantage"]) if s is batch[2] else float(s["advantage"])
        s["staleness"] = [(i * 5 + len(s["tokens"])) % 4 if m else 0 for i, m in enumerate(s["loss_mask"])]

    def trained(weights):
        lps, hs = [], []
        for s in batch:
            lp, ls = base.logprobs(weights, base.CONFIG, s["tokens"])
            h = -(jnp.exp(ls) * ls).sum(-1)
            at = np.flatnonzero(np.array(s["loss_mask"]))
            lps.append(lp[at])
            hs.append(h[at - 1])
        return jnp.concatenate(lps), jnp.concatenate(hs)

    (lp, entropy), back = jax.vjp(trained, w)
    per_token = lambda f: np.concatenate([np.array([f(j, s, i) for i, m in enumerate(s["loss_mask"]) if m])
                                          for j, s in enumerate(batch)])
    t = {
        "mu": per_token(lambda j, s, i: s["behaviour_logprobs"][i]), "old": np.array(lp),
        "ref": np.array(trained(reference)[0]), "advantage": per_token(lambda j, s, i: s["advantage"]),
        "behind": per_token(lambda j, s, i: float(s["staleness"][i])), "sequence": per_token(lambda j, s, i: episodes[j]),
    }
    far_from_edges(t, np.array(lp))
    out = {name: {"spec": spec} for name, spec in cases().items()}
    for case in out.values():
        (value, masked), by = jax.value_and_grad(
            lambda a, b: loss(case["spec"], t, a, b), argnums=(0, 1), has_aux=True)(lp, entropy)
        (grads,) = back(by)
        norm = math.sqrt(sum(float((g * g).sum()) for g in grads.values()))
        tensors = {}
        for name, g in grads.items():
            flat = np.array(g).reshape(-1)
            tensors[name] = [number(np.sqrt((flat * flat).sum())), number((flat * np.sin(np.arange(1, flat.size + 1))).sum())]
        case.update(loss=number(value), masked=number(masked), grad_norm=number(norm), tensors=tensors)
    for s, e in zip(batch, episodes):
        s["episode"] = e
    return {"config": base.CONFIG, "samples": batch, "cases": out}


if __name__ == "__main__":
    print(json.dumps({"tokens": token_part(), "model": model_part()}, separators=(",", ":")))
