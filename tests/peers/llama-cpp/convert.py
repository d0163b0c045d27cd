#!/usr/bin/env python3
"""Writes a GGUF's matrices in another format, so that llama.cpp and Starling compute on weights of one precision.

    python3 convert.py IN.gguf OUT.gguf F32|F16|Q8_0

Metadata and vectors stay as they are. Q8_0 is what ggml's Python package makes of the dequantized weights. Needs `gguf`.
"""

import sys

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize


def main():
    source, target, name = sys.argv[1:]
    kind = GGMLQuantizationType[name]
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for t in reader.tensors:
        value = dequantize(t.data, t.tensor_type).astype(np.float32)
        matrix = value.ndim > 1 and kind != GGMLQuantizationType.F32
        if matrix:
            writer.add_tensor(t.name, quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(t.name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main()
