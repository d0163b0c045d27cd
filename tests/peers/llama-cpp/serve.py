#!/usr/bin/env python3
"""llama.cpp (prebuilt, from the package `xllamacpp`) as the peer of `starling bench generate`: docs/benchmarks.md.

    python3 serve.py MODEL.gguf THREADS

Says `ready`, then answers each line {"prompts": [[ids]], "new": n, "cache": bool} of standard input, all prompts at once,
each continued by the n likeliest tokens, with a line {"seconds", "prompt_seconds", "decode_seconds", "cpu_seconds", "tokens", "peak_bytes"}:
wall time from the first request to the last answer, llama.cpp's own times for prompt and new tokens (of the slowest), and
the process's processor time and peak of resident memory. Ends with its input.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import xllamacpp

SLOTS = 16
# A slot: 512 tokens of a prompt and 64 new ones, and room.
SLOT_TOKENS = 640


def peak_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:"))


def main():
    model, threads = sys.argv[1], int(sys.argv[2])
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_parallel = SLOTS
    params.n_ctx = SLOTS * SLOT_TOKENS
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.verbosity = -1
    server = xllamacpp.Server(params)
    pool = ThreadPoolExecutor(SLOTS)
    print("ready", flush=True)
    for line in sys.stdin:
        ask = json.loads(line)

        def complete(ids):
            body = {"prompt": ids, "max_tokens": ask["new"], "temperature": 0, "ignore_eos": True, "cache_prompt": ask["cache"]}
            answer = server.handle_completions(body)
            answer = json.loads(answer) if isinstance(answer, str) else answer
            assert answer["usage"]["completion_tokens"] == ask["new"], answer
            return answer["timings"]

        start, cpu = time.monotonic(), time.process_time()
        timings = list(pool.map(complete, ask["prompts"]))
        print(json.dumps({
            "seconds": time.monotonic() - start,
            "prompt_seconds": max(t["prompt_ms"] for t in timings) / 1000,
            "decode_seconds": max(t["predicted_ms"] for t in timings) / 1000,
            "cpu_seconds": time.process_time() - cpu,
            "tokens": sum(t["predicted_n"] for t in timings),
            "peak_bytes": peak_bytes(),
        }), flush=True)


main()
