#!/usr/bin/env python3
"""Golden numbers for timelines that share prefixes: numpy in float64, each sequence computed on its own.

    python3 -m venv /tmp/npvenv && /tmp/npvenv/bin/pip install numpy
    /tmp/npvenv/bin/python tests/goldens/make_tree_goldens.py > tests/goldens/tree.json

Model, losses and complex steps are those of `make_algorithm_goldens.py`; the samples are two episodes of one prompt, one of
which forked twice, once behind a turn that trains in every timeline. The Rust code computes each prefix once
(`node/engine/tests/algorithms.rs`).
"""

import json
import pathlib

import numpy as np

import make_algorithm_goldens as base

CASES = ["clip, token_mean", "gspo, recomputed", "everything"]


def tokens(start, n, c):
    return [(start * 7 + 5 * i + i * i) % c["vocab_size"] for i in range(n)]


def batch_of(c):
    prompt = tokens(1, 9, c)
    turn = prompt + tokens(2, 6, c)
    paths = [turn + tokens(3, 7, c), turn + tokens(4, 5, c), turn[:12] + tokens(5, 8, c), prompt + tokens(6, 10, c), turn]
    episodes, advantages = [0, 0, 0, 1, 1], [0.75, 0.75, 0.75, -1.25, -1.25]
    return [{"tokens": p, "loss_mask": [i >= 9 and i % 5 != 1 for i in range(len(p))], "advantage": a, "episode": e,
             "staleness": [i % 3 if i >= 9 and i % 5 != 1 else 0 for i in range(len(p))]}
            for p, e, a in zip(paths, episodes, advantages)]


if __name__ == "__main__":
    c = json.loads((pathlib.Path(__file__).parent / "engine.json").read_text())["config"]
    batch = batch_of(c)
    w = {name: base.formula(i, s) for i, (name, s) in enumerate(base.shapes(c).items())}
    reference = {name: base.formula(i + 0.05, s) for i, (name, s) in enumerate(base.shapes(c).items())}
    for k, s in enumerate(batch):
        lp = base.forward(w, c, s["tokens"])[0]
        moved = base.f32(lp + 0.5 * np.sin(1.3 * np.arange(len(lp)) + 0.9 * k))
        s["behaviour_logprobs"] = [float(moved[i - 1]) if m else 0.0 for i, m in enumerate(s["loss_mask"])]

    def trained(weights):
        parts = [[x[np.array(s["loss_mask"])[1:]] for x in base.forward(weights, c, s["tokens"])] for s in batch]
        return [np.concatenate(x) for x in zip(*parts)]

    def per_token(of):
        return np.array([of(s, i) for s in batch for i, m in enumerate(s["loss_mask"]) if m])

    lp, entropy = trained(w)
    t = {
        "mu": per_token(lambda s, i: s["behaviour_logprobs"][i]), "old": lp, "ref": trained(reference)[0],
        "advantage": per_token(lambda s, i: s["advantage"]), "sequence": per_token(lambda s, i: s["episode"]),
        "behind": per_token(lambda s, i: float(s["staleness"][i])),
    }
    base.far_from_edges(t, lp)
    moves = {}
    for name, value in w.items():
        at = np.arange(1, value.size + 1).reshape(value.shape)
        along = [trained({**w, name: value + 1j * base.H * wave(at)}) for wave in (np.sin, np.cos)]
        moves[name] = [[np.imag(x) / base.H for x in a] for a in along]
    specs, out = base.cases(), {}
    for name in CASES:
        spec = specs[name]
        value, (g_lp, g_h) = base.by_complex_steps(lambda a, b: base.loss(spec, t, a, b)[0], lp, entropy)
        tensors = {n: [base.number(g_lp @ d[0] + g_h @ d[1]) for d in along] for n, along in moves.items()}
        masked = base.number(base.loss(spec, t, lp, entropy)[1])
        out[name] = {"spec": spec, "loss": base.number(value), "masked": masked, "tensors": tensors}
    print(json.dumps({"config": c, "samples": batch, "cases": out}, separators=(",", ":")))
