#!/usr/bin/env python3
"""An agent in Python: solves the task sets `sums` and `calculator` with the openai package, and nothing else.

    agent.py [--worker] [--set sums|calculator]

Without --worker it runs one episode: task on standard input, result on standard output. With it, one episode per line of
input; importing openai takes about a second, so that pays. The contract is in docs/agents.md; `solve` is the part to
replace with an agent of yours.
"""

import argparse
import json
import os
import re
import sys

from openai import OpenAI

TURNS_MAX = 4  # two for the operations, one for the answer, one to spare
TOOLS = [{
    "type": "function",
    "function": {
        "name": "calc",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}]


def calc(arguments: str) -> str | None:
    """The tool: `a+b`, `a-b` or `a*b` of integers. None for anything else, so that the model may try again."""
    try:
        x = json.loads(arguments)["x"].replace(" ", "")
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    match = re.fullmatch(r"(-?[0-9]{1,18})([-+*])(-?[0-9]{1,18})", x)
    if match is None:
        return None
    a, op, b = int(match[1]), match[2], int(match[3])
    return str(a + b if op == "+" else a - b if op == "-" else a * b)


def solve(client: OpenAI, model: str, task: dict, set_name: str) -> dict:
    """Runs one episode and returns reward and metrics."""
    # Sampling is left to the job, and there is no system prompt: a model that reads bytes pays for each.
    messages = [{"role": "user", "content": task["expression"].replace(" ", "")}]
    if set_name == "sums":
        reply = client.chat.completions.create(model=model, messages=messages)
        return {"reward": float(reply.choices[0].message.content == task["answer"]), "metrics": {}}
    metrics = {"turns": 0, "tool_calls": 0, "tool_errors": 0}
    for _ in range(TURNS_MAX):
        reply = client.chat.completions.create(model=model, messages=messages, tools=TOOLS).choices[0].message
        metrics["turns"] += 1
        if not reply.tool_calls:
            return {"reward": float(reply.content == task["answer"]), "metrics": metrics}
        # The message goes back as it came, so that the gateway knows its own tokens again.
        messages.append(reply.model_dump(exclude_none=True))
        for call in reply.tool_calls:
            result = calc(call.function.arguments) if call.function.name == "calc" else None
            metrics["tool_calls"] += 1
            metrics["tool_errors"] += result is None
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result or "error"})
    return {"reward": 0.0, "metrics": metrics}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--worker", action="store_true", help="one episode per line of input")
    parser.add_argument("--set", choices=["sums", "calculator"], help="default: what the task's id starts with")
    args = parser.parse_args()

    def set_name(task: dict) -> str:
        name = args.set or task["id"].split("-")[0]
        if name not in ("sums", "calculator"):
            raise ValueError(f"set: expected sums or calculator, got {name!r}")
        return name

    if not args.worker:
        task = json.loads(sys.stdin.readline())
        client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
        print(json.dumps(solve(client, os.environ["STARLING_MODEL"], task, set_name(task))))
        return
    client = OpenAI(base_url="http://127.0.0.1/v1", api_key="given with each episode")
    for line in sys.stdin:
        start = json.loads(line)
        try:
            # A copy with this episode's key keeps the connection.
            episode_client = client.with_options(base_url=start["base_url"], api_key=start["api_key"])
            result = solve(episode_client, start["model"], start["task"], set_name(start["task"]))
        except Exception as err:  # it costs this episode; the worker goes on
            result = {"error": f"{type(err).__name__}: {err}"}
        print(json.dumps({"episode": start["episode"], **result}), flush=True)


if __name__ == "__main__":
    main()
