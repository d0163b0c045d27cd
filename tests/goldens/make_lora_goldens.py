#!/usr/bin/env python3
"""Golden numbers for low-rank adapters: numpy in float64, differentiated by complex steps.

    python3 -m venv /tmp/npvenv && /tmp/npvenv/bin/pip install numpy
    /tmp/npvenv/bin/python tests/goldens/make_lora_goldens.py > tests/goldens/lora.json

The adapters are never merged here: `y = x W' + scale (x A') B'` as in the paper (arXiv:2106.09685) and in PEFT, where the
Rust code computes with `W + scale B A`. Model, samples, losses and complex steps are those of
`make_algorithm_goldens.py`. Log-probabilities of every token, and the gradient of every factor along two directions
(`node/engine/tests/lora.rs`).
"""

import json
import pathlib

import numpy as np

import make_algorithm_goldens as base

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = ["clip, token_mean", "gspo, recomputed", "everything"]


class Adapted:
    """A matrix with its adapter; `x @ m.T` is all that the forward pass asks of one."""

    def __init__(self, w, a, b, scale):
        self.w, self.a, self.b, self.scale = w, a, b, scale
        self.T = self

    def __rmatmul__(self, x):
        return x @ self.w.T + self.scale * ((x @ self.a.T) @ self.b.T)

    __array_ufunc__ = None  # so that numpy leaves `x @ m` to the method above


def factors(c, rank, targets):
    out = {}
    for name, shape in base.shapes(c).items():
        module = name.removesuffix(".weight")
        if module.split(".")[-1] in targets:
            t = 100 + len(out)
            out[f"base_model.model.{module}.lora_A.weight"] = base.formula(t, (rank, shape[1]))
            out[f"base_model.model.{module}.lora_B.weight"] = 0.25 * base.formula(t + 1, (shape[0], rank))
    return out


def adapted(w, f, scale):
    out = dict(w)
    for name in w:
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" in f:
            out[name] = Adapted(w[name], f[f"{key}.lora_A.weight"], f[f"{key}.lora_B.weight"], scale)
    return out


def part(model, rank, alpha, targets):
    c, batch = model["config"], model["samples"]
    w = {name: base.formula(i, s) for i, (name, s) in enumerate(base.shapes(c).items())}
    reference = {name: base.formula(i + 0.05, s) for i, (name, s) in enumerate(base.shapes(c).items())}
    f, scale = factors(c, rank, targets), alpha / rank

    def trained(weights):
        parts = [[x[np.array(s["loss_mask"])[1:]] for x in base.forward(weights, c, s["tokens"])] for s in batch]
        return [np.concatenate(x) for x in zip(*parts)]

    def per_token(of):
        return np.array([of(s, i) for s in batch for i, m in enumerate(s["loss_mask"]) if m])

    lp, entropy = trained(adapted(w, f, scale))
    t = {
        "mu": per_token(lambda s, i: s["behaviour_logprobs"][i]), "old": lp, "ref": trained(reference)[0],
        "advantage": per_token(lambda s, i: s["advantage"]), "sequence": per_token(lambda s, i: s["episode"]),
        "behind": per_token(lambda s, i: float(s["staleness"][i])),
    }
    base.far_from_edges(t, lp)
    moves = {}
    for name, value in f.items():
        at = np.arange(1, value.size + 1).reshape(value.shape)
        along = [trained(adapted(w, {**f, name: value + 1j * base.H * wave(at)}, scale)) for wave in (np.sin, np.cos)]
        moves[name] = [[np.imag(x) / base.H for x in a] for a in along]
    specs, out = base.cases(), {}
    for name in CASES:
        spec = specs[name]
        value, (g_lp, g_h) = base.by_complex_steps(lambda a, b: base.loss(spec, t, a, b)[0], lp, entropy)
        tensors = {n: [base.number(g_lp @ d[0] + g_h @ d[1]) for d in along] for n, along in moves.items()}
        out[name] = {"loss": base.number(value), "tensors": tensors}
    logprobs = [[base.number(v) for v in base.forward(adapted(w, f, scale), c, s["tokens"])[0]] for s in batch]
    return {"lora": {"rank": rank, "alpha": alpha, "targets": targets}, "logprobs": logprobs, "cases": out}


if __name__ == "__main__":
    golden = json.loads((pathlib.Path(__file__).parent / "algorithms.json").read_text())["model"]
    parts = [part(golden, 3, 6.0, ALL), part(golden, 2, 1.25, ["q_proj", "v_proj", "down_proj"])]
    print(json.dumps(parts, separators=(",", ":")))
