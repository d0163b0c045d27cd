"""Checks of the `anthropic` package against a node. Prints a JSON line per check: {"check": ..., "error": null or text}.

    anthropic_sdk.py http://127.0.0.1:PORT MODEL
"""

import json
import re
import sys
import traceback
import urllib.request

import anthropic
from anthropic import Anthropic

HTTP, MODEL = sys.argv[1], sys.argv[2]
TOOLS = [{
    "name": "calc",
    "description": "Calculates.",
    "input_schema": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
}]
SUMS = ["12+34", "91-18", "45+39", "60+90", "12-32", "38+57"]
PRODUCTS = ["45+39*82", "72+64*86", "58-74*30", "93*25+95"]
# The service speaks this version of the API; the package asks for a later one by itself.
VERSION = {"anthropic-version": "2023-06-01"}
# Fields of that version that the package has no arguments for any more.
SAMPLING = ("temperature", "top_p", "top_k")
client = Anthropic(base_url=HTTP, api_key="none", max_retries=0, timeout=60, default_headers=VERSION)
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def fetch(path, key=None, body=None):
    """JSON over HTTP, without the package: for the routes that are not Anthropic's."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    data = None if body is None else json.dumps(body).encode()
    with opener.open(urllib.request.Request(HTTP + path, data, headers), timeout=60) as answer:
        return json.load(answer)


def user(content):
    return {"role": "user", "content": content}


def arguments(**more):
    """What is sent, as the package takes it."""
    body = {**more.pop("extra_body", {}), **{name: more.pop(name) for name in SAMPLING if name in more}}
    return {"model": MODEL, "messages": [user("12+34")], "max_tokens": 16, **more, "extra_body": body}


def create(**more):
    return client.messages.create(**arguments(**more))


def can_add():
    """Whether the model was trained at all: it knows one of a few sums."""
    answers = [create(messages=[user(t)], temperature=0).content for t in SUMS]
    return any(a and a[0].type == "text" and a[0].text == str(eval(t)) for t, a in zip(SUMS, answers))


def refused(kind, words, **more):
    try:
        create(**more)
    except kind as err:
        assert words in err.message, (words, err.body)
        return err
    raise AssertionError(f"{more} was accepted, expected {kind.__name__}")


@check
def plain_message():
    for text in SUMS:
        reply = create(messages=[user(text)], temperature=1, top_k=50, metadata={"user_id": "u"})
        assert reply.type == "message" and reply.role == "assistant" and reply.model == MODEL, reply
        assert reply.stop_reason in ("end_turn", "max_tokens"), reply
        assert reply.usage.input_tokens > 0 and reply.usage.output_tokens > 0, reply
        assert all(block.type == "text" for block in reply.content), reply
    greedy = {json.dumps([b.text for b in create(temperature=0).content]) for _ in range(3)}
    assert len(greedy) == 1, greedy
    assert reply._request_id.startswith("req_"), reply._request_id
    cut = create(max_tokens=1, messages=[user(PRODUCTS[0])], temperature=0)
    assert cut.usage.output_tokens == 1, cut


@check
def system_and_blocks():
    blocks = [{"type": "text", "text": "12+", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "34"}]
    assert create(messages=[user(blocks)], temperature=0).content == create(temperature=0).content
    without = create(temperature=0).usage.input_tokens
    assert create(system="Calculate.", temperature=0).usage.input_tokens == without + len("Calculate.") + 2


@check
def streaming():
    whole = create(temperature=0)
    with client.messages.stream(**arguments(temperature=0)) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    # A stream's blocks are of classes of their own, which never equal those of a whole message.
    written = [[(b.type, b.text) for b in message.content] for message in (final, whole)]
    assert written[0] == written[1] and text == "".join(b.text for b in whole.content), (final, whole)
    assert final.stop_reason == whole.stop_reason and final.usage.output_tokens == whole.usage.output_tokens, final
    names = [event.type for event in create(temperature=0, stream=True)]
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"], names


@check
def tools_round_trip():
    """With a model that can add, its own call; with any model, a call that stands in the history."""
    called = None
    for text in PRODUCTS:
        reply = create(messages=[user(text)], tools=TOOLS, temperature=0, max_tokens=40)
        uses = [block for block in reply.content if block.type == "tool_use"]
        if uses:
            assert reply.stop_reason == "tool_use" and uses[0].name == "calc" and "x" in uses[0].input, reply
            called = called or (text, reply, uses)
    if can_add():
        assert called, "the model used its tool in none of the examples"
    if called:
        text, reply, uses = called
        more = {"messages": [user(text)], "tools": TOOLS, "temperature": 0, "max_tokens": 40}
        with client.messages.stream(**arguments(**more)) as stream:
            streamed = [b for b in stream.get_final_message().content if b.type == "tool_use"]
        assert [(b.name, b.input) for b in streamed] == [(b.name, b.input) for b in uses], (streamed, uses)
        results = [{"type": "tool_result", "tool_use_id": b.id, "content": "3198"} for b in uses]
        history = [user(text), {"role": "assistant", "content": reply.content}, user(results)]
        assert create(messages=history, tools=TOOLS, max_tokens=40).usage.input_tokens > reply.usage.input_tokens
    made_up = [{"type": "tool_use", "id": "toolu_1", "name": "calc", "input": {"x": "39*82"}}]
    result = [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "3198"}]}]
    history = [user(PRODUCTS[0]), {"role": "assistant", "content": made_up}, user(result)]
    assert create(messages=history, tools=TOOLS, max_tokens=40).role == "assistant"
    silent = create(messages=[user(PRODUCTS[0])], tools=TOOLS, tool_choice={"type": "none"}, temperature=0)
    assert all(block.type == "text" for block in silent.content), silent


@check
def stop_sequences():
    for text in [*SUMS, *PRODUCTS]:
        content = "".join(b.text for b in create(messages=[user(text)], temperature=0).content)
        if len(content) >= 2:
            break
    stop = content[1]
    reply = create(messages=[user(text)], temperature=0, stop_sequences=["never", stop])
    assert reply.stop_reason == "stop_sequence" and reply.stop_sequence == stop, (content, reply)
    assert "".join(b.text for b in reply.content) == content.split(stop)[0], (content, reply)


@check
def counting():
    asked = {"model": MODEL, "messages": [user("12+34")], "system": "Calculate.", "tools": TOOLS}
    assert client.messages.count_tokens(**asked).input_tokens == create(**asked).usage.input_tokens


@check
def refusals():
    err = refused(anthropic.BadRequestError, "thinking", thinking={"type": "enabled", "budget_tokens": 1024})
    assert err.body["error"]["type"] == "invalid_request_error" and err.body["request_id"], err.body
    image = [{"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}]
    refused(anthropic.BadRequestError, "messages[0].content[0].type", messages=[user(image)])
    refused(anthropic.BadRequestError, "tool_choice", tools=TOOLS, tool_choice={"type": "any"})
    refused(anthropic.BadRequestError, "temperature", temperature=1.5)
    refused(anthropic.BadRequestError, "made_up", extra_body={"made_up": 1})
    refused(anthropic.NotFoundError, "nobody", model="nobody")


@check
def an_episode():
    begun = fetch("/v1/episodes", body={"model": MODEL, "agent": "sdk"})
    key = begun["api_key"]
    own = client.with_options(api_key=key)
    messages = [user(begun["task"]["expression"].replace(" ", ""))]
    for _ in range(2):
        reply = own.messages.create(model=begun["model"], messages=messages, max_tokens=16)
        messages += [{"role": "assistant", "content": reply.content}, user("1+1")]
    try:
        client.with_options(api_key="sk-starling-guessed").messages.create(
            model=MODEL, messages=messages, max_tokens=16)
        raise AssertionError("a guessed key was accepted")
    except anthropic.AuthenticationError as err:
        assert "invalid_api_key" in err.message, err.body
    listed = fetch("/v1/episodes", key)["data"]
    assert len(listed) == 1 and listed[0]["turns"] == 2 and listed[0]["timelines"] == 1, listed
    ended = fetch(f"/v1/episodes/{begun['episode']}/end", key, {"reward": 1.0, "task_id": begun["task_id"]})
    assert re.fullmatch("[0-9a-f]{64}", ended["rollout"]), ended
    try:
        own.messages.create(model=begun["model"], messages=messages, max_tokens=16)
        raise AssertionError("an ended episode was answered")
    except anthropic.ConflictError as err:
        assert "episode_ended" in err.message, err.body


def main():
    failed = False
    for function in CHECKS:
        error = None
        try:
            function()
        except Exception:
            error = traceback.format_exc(limit=-2)
            failed = True
        print(json.dumps({"check": function.__name__, "error": error}), flush=True)
    sys.exit(failed)


main()
