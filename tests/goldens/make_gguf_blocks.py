#!/usr/bin/env python3
"""One block row of every GGUF format with its values, dequantized by ggml's own Python package.

    python3 -m venv /tmp/ggufvenv && /tmp/ggufvenv/bin/pip install gguf==0.19.0
    /tmp/ggufvenv/bin/python tests/goldens/make_gguf_blocks.py > tests/goldens/gguf_blocks.json

Two super-blocks of 256 values each. Bytes are random except the scales, which are halves from 0.01 to 1. Read by
`node/engine/src/gguf/tests.rs`.
"""

import json

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T
from gguf.quants import dequantize

# Where the half-precision scales of a block lie.
SCALES = {
    T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0], T.Q2_K: [80, 82], T.Q3_K: [108], T.Q4_K: [0, 2],
    T.Q5_K: [0, 2], T.Q6_K: [208],
}
VALUES = 512


def main():
    rng = np.random.default_rng(1)
    out = {}
    for kind in (T.F32, T.F16, T.BF16, *SCALES):
        block, size = GGML_QUANT_SIZES[kind]
        if kind in SCALES:
            raw = rng.integers(0, 256, (VALUES // block, size), dtype=np.uint8)
            for at in SCALES[kind]:
                raw[:, at:at + 2] = rng.uniform(0.01, 1.0, (len(raw), 1)).astype(np.float16).view(np.uint8)
            raw = raw.reshape(-1)
        else:
            numbers = rng.normal(size=VALUES).astype(np.float32)
            half = {T.F32: numbers, T.F16: numbers.astype(np.float16), T.BF16: (numbers.view(np.uint32) >> 16).astype(np.uint16)}
            raw = half[kind].view(np.uint8)
        values = dequantize(raw.reshape(1, -1), kind).reshape(-1)
        assert np.isfinite(values).all() and len(values) == VALUES
        out[kind.name] = {"code": int(kind), "bytes": raw.tobytes().hex(), "values": [float(f"{v:.8g}") for v in values]}
    print(json.dumps(out, separators=(",", ":")))


if __name__ == "__main__":
    main()
