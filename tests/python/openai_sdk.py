"""Checks of the `openai` package against a node. Prints a JSON line per check: {"check": ..., "error": null or text}.

    openai_sdk.py http://127.0.0.1:PORT MODEL
"""

import json
import re
import sys
import time
import traceback
import urllib.request

import openai
from openai import OpenAI

HTTP, MODEL = sys.argv[1], sys.argv[2]
TOOLS = [{
    "type": "function",
    "function": {
        "name": "calc",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}]
SUMS = ["12+34", "91-18", "45+39", "60+90", "12-32", "38+57"]
PRODUCTS = ["45+39*82", "72+64*86", "58-74*30", "93*25+95"]
client = OpenAI(base_url=f"{HTTP}/v1", api_key="none", max_retries=0, timeout=60)
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def fetch(path, key=None, body=None):
    """JSON over HTTP, without the package: for the routes that are not OpenAI's."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    data = None if body is None else json.dumps(body).encode()
    with opener.open(urllib.request.Request(HTTP + path, data, headers), timeout=60) as answer:
        return json.load(answer)


def user(text):
    return [{"role": "user", "content": text}]


def create(**more):
    return client.chat.completions.create(**{"model": MODEL, "messages": user("12+34"), "max_tokens": 16, **more})


def an_answer_of_three():
    """A sampled answer of at least three characters, printable ones if possible, and the request that gives it."""
    other = None
    for seed in range(12):
        for text in ("12-32", "45*82", "abcdefgh"):
            request = {"messages": user(text), "temperature": 1, "seed": seed}
            content = create(**request).choices[0].message.content or ""
            if len(content) >= 3:
                if content.isascii() and content.isprintable():
                    return content, request
                other = other or (content, request)
    assert other, "no answer of three characters"
    return other


def can_add():
    """Whether the model was trained at all: it knows one of a few sums."""
    right = [create(messages=user(t), temperature=0).choices[0].message.content == str(eval(t)) for t in SUMS]
    return any(right)


def refused(kind, **more):
    try:
        create(**more)
    except kind as err:
        return err
    raise AssertionError(f"{more} was accepted, expected {kind.__name__}")


@check
def models_list():
    assert MODEL in [m.id for m in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


@check
def plain_chat():
    for seed, text in enumerate(SUMS):
        reply = create(messages=user(text), temperature=1, seed=seed)
        choice = reply.choices[0]
        assert reply.object == "chat.completion" and reply.model == MODEL and reply.id, reply
        assert choice.message.role == "assistant" and choice.message.content is not None, reply
        assert choice.finish_reason in ("stop", "length"), reply
        usage = reply.usage
        assert usage.prompt_tokens > 0 and usage.completion_tokens > 0, usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage
    cut = create(max_tokens=1, **an_answer_of_three()[1])
    assert cut.choices[0].finish_reason == "length" and cut.usage.completion_tokens == 1, cut
    greedy = {create(temperature=0, seed=seed).choices[0].message.content for seed in range(3)}
    assert len(greedy) == 1, greedy


@check
def streaming():
    _, request = an_answer_of_three()
    whole = create(**request)
    pieces, finish, usage, arrivals = [], None, None, []
    stream = create(**request, stream=True, stream_options={"include_usage": True})
    for chunk in stream:
        assert chunk.object == "chat.completion.chunk", chunk
        usage = chunk.usage or usage
        for choice in chunk.choices:
            if choice.delta.content:
                pieces.append(choice.delta.content)
                arrivals.append(time.monotonic())
            finish = choice.finish_reason or finish
    assert len(pieces) > 1, pieces
    assert "".join(pieces) == whole.choices[0].message.content, (pieces, whole)
    assert finish == whole.choices[0].finish_reason, (finish, whole)
    assert usage.completion_tokens == whole.usage.completion_tokens, (usage, whole.usage)
    assert arrivals[-1] > arrivals[0], "all at once"


@check
def tools_round_trip():
    """With a model that can add, its own call; with any model, a call that stands in the history."""
    called = None
    for text in PRODUCTS:
        reply = create(messages=user(text), tools=TOOLS, temperature=0, max_tokens=40).choices[0]
        assert reply.finish_reason == ("tool_calls" if reply.message.tool_calls else reply.finish_reason), reply
        if not reply.message.tool_calls:
            continue
        called = called or (text, reply.message)
        call = reply.message.tool_calls[0]
        assert call.id and call.type == "function" and call.function.name == "calc", reply
        assert "x" in json.loads(call.function.arguments), reply
    if can_add():
        assert called, "the model used its tool in none of the examples"
    function = {"name": "calc", "arguments": json.dumps({"x": "39*82"})}
    made_up = {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}
    asked, message = called or (PRODUCTS[0], None)
    message = message.model_dump(exclude_none=True) if message else made_up
    results = [{"role": "tool", "tool_call_id": c["id"], "content": "3198"} for c in message["tool_calls"]]
    messages = [*user(asked), message, *results]
    after = create(messages=messages, tools=TOOLS, temperature=0, max_tokens=40).choices[0]
    assert after.message.tool_calls or after.message.content is not None, after
    silent = create(messages=user(PRODUCTS[0]), tools=TOOLS, tool_choice="none", temperature=0).choices[0]
    assert not silent.message.tool_calls, silent
    if called is None:
        return
    whole, calls = called[1], {}
    for chunk in create(messages=user(asked), tools=TOOLS, temperature=0, max_tokens=40, stream=True):
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or []:
                name, arguments = calls.get(call.index, ("", ""))
                calls[call.index] = (name + (call.function.name or ""), arguments + (call.function.arguments or ""))
    assert list(calls.values()) == [(c.function.name, c.function.arguments) for c in whole.tool_calls], (calls, whole)


@check
def logprobs():
    reply = create(temperature=1, seed=3, logprobs=True, top_logprobs=3)
    tokens = reply.choices[0].logprobs.content
    content = reply.choices[0].message.content
    raw = b"".join(bytes(t.bytes) for t in tokens)
    assert tokens and raw.decode(errors="replace") == content, (tokens, content)
    for token in tokens:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3, token
        ranked = [t.logprob for t in token.top_logprobs]
        assert ranked == sorted(ranked, reverse=True) and ranked[0] >= token.logprob - 1e-4, token


@check
def several_answers():
    reply = create(n=2, temperature=1, seed=1)
    assert [c.index for c in reply.choices] == [0, 1], reply
    assert all(c.message.content is not None for c in reply.choices), reply
    texts = {}
    for chunk in create(n=2, temperature=1, seed=1, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    assert texts == {c.index: c.message.content for c in reply.choices}, (texts, reply)


@check
def a_seed_repeats():
    def answer(seed):
        return create(messages=user("abcdefgh"), temperature=1, seed=seed).choices[0].message.content

    for seed in (1, 2, 3):
        assert answer(seed) == answer(seed), seed
    assert len({answer(seed) for seed in range(12)}) > 1, "twelve seeds, one answer"


@check
def stop_texts():
    content, request = an_answer_of_three()
    stop = content[2]
    expected = content.split(stop)[0]
    reply = create(**request, stop=[stop, "never"]).choices[0]
    assert reply.message.content == expected and reply.finish_reason == "stop", (content, stop, reply)
    streamed = create(**request, stop=stop, stream=True)
    pieces = [c.delta.content or "" for chunk in streamed for c in chunk.choices]
    assert "".join(pieces) == expected, (content, stop, pieces)


@check
def refused_fields():
    err = refused(openai.BadRequestError, presence_penalty=0.5)
    assert err.param == "presence_penalty" and err.code == "unsupported_parameter", err.body
    assert err.type == "invalid_request_error" and "presence_penalty" in err.message, err.body
    err = refused(openai.BadRequestError, temperature=3)
    assert err.param == "temperature" and err.code == "invalid_value", err.body
    err = refused(openai.BadRequestError, extra_body={"made_up": 1})
    assert err.param == "made_up" and err.code == "unknown_parameter", err.body
    err = refused(openai.BadRequestError, response_format={"type": "json_object"}, stream=True)
    assert err.param == "response_format", err.body
    err = refused(openai.NotFoundError, model="nobody")
    assert err.param == "model" and err.code == "model_not_found", err.body
    create(presence_penalty=0, frequency_penalty=0.0)  # changes nothing, so it is let through


@check
def legacy_completions():
    reply = client.completions.create(model=MODEL, prompt="12+34", max_tokens=8, seed=1, echo=True)
    assert reply.object == "text_completion" and reply.choices[0].text.startswith("12+34"), reply
    assert reply.usage.prompt_tokens == 5 and reply.choices[0].finish_reason in ("stop", "length"), reply
    ids = client.completions.create(model=MODEL, prompt=[49, 50, 43, 51, 52], max_tokens=8, seed=1)
    assert "12+34" + ids.choices[0].text == reply.choices[0].text, (ids, reply)
    several = client.completions.create(model=MODEL, prompt=["1+1", "2+2"], n=2, max_tokens=4, seed=1)
    assert [c.index for c in several.choices] == [0, 1, 2, 3], several
    scored = client.completions.create(model=MODEL, prompt="12+34", max_tokens=8, seed=1, logprobs=2)
    logprobs = scored.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset), logprobs
    assert len(logprobs.top_logprobs) == len(logprobs.tokens), logprobs
    pieces, finish = [], None
    for chunk in client.completions.create(model=MODEL, prompt="12+34", max_tokens=8, seed=1, stream=True):
        pieces += [c.text for c in chunk.choices]
        finish = finish or chunk.choices[0].finish_reason
    assert "".join(pieces) == ids.choices[0].text and finish == ids.choices[0].finish_reason, (pieces, ids)
    try:
        client.completions.create(model=MODEL, prompt="a", suffix="b")
        raise AssertionError("suffix was accepted")
    except openai.BadRequestError as err:
        assert err.param == "suffix" and err.code == "unsupported_parameter", err.body


RESPONSE_TOOLS = [{"type": "function", "name": "calc", "parameters": TOOLS[0]["function"]["parameters"], "strict": False}]


@check
def responses():
    asked = {"model": MODEL, "input": "12+34", "temperature": 0, "max_output_tokens": 16}
    reply = client.responses.create(**asked, instructions="Calculate.", metadata={"run": "1"})
    assert reply.object == "response" and reply.status in ("completed", "incomplete"), reply
    assert reply.output[0].type == "message" and isinstance(reply.output_text, str), reply
    assert reply.metadata == {"run": "1"} and reply.instructions == "Calculate.", reply
    usage = reply.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens, usage
    chat = create(temperature=0, max_tokens=16).choices[0].message.content
    assert client.responses.create(**asked).output_text == chat
    cut = client.responses.create(**{**asked, "max_output_tokens": 1, "input": PRODUCTS[0]})
    if cut.status == "incomplete":
        assert cut.incomplete_details.reason == "max_output_tokens", cut
    more = client.responses.create(**{**asked, "input": "1+1"}, previous_response_id=reply.id)
    assert more.previous_response_id == reply.id, more
    assert more.usage.input_tokens > client.responses.create(**{**asked, "input": "1+1"}).usage.input_tokens
    for wrong, param in [
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
    ]:
        try:
            client.responses.create(**asked, **wrong)
            raise AssertionError(f"{wrong} was accepted")
        except openai.BadRequestError as err:
            assert err.param == param, err.body


@check
def responses_stream():
    asked = {"model": MODEL, "input": "12+34", "temperature": 0, "max_output_tokens": 16}
    whole = client.responses.create(**asked)
    names, text, last = [], "", None
    with client.responses.stream(**asked) as stream:
        for number, event in enumerate(stream):
            assert event.sequence_number == number, event
            names.append(event.type)
            text += event.delta if event.type == "response.output_text.delta" else ""
            last = event
        # The package knows a final response of complete answers only.
        final = stream.get_final_response() if last.type == "response.completed" else last.response
    assert names[:3] == ["response.created", "response.in_progress", "response.output_item.added"], names
    assert names[-1] in ("response.completed", "response.incomplete"), names
    assert text == final.output_text == whole.output_text, (text, final, whole)


@check
def responses_tools():
    """With a model that can add, its own call and events; with any model, a call that stands in the input."""
    called = None
    for text in PRODUCTS:
        asked = {"model": MODEL, "input": text, "tools": RESPONSE_TOOLS, "temperature": 0, "max_output_tokens": 40}
        reply = client.responses.create(**asked)
        calls = [item for item in reply.output if item.type == "function_call"]
        if calls:
            called = (asked, reply, calls)
            break
    if can_add():
        assert called, "the model used its tool in none of the examples"
    if called:
        asked, reply, calls = called
        events = list(client.responses.create(**asked, stream=True))
        done = [e for e in events if e.type == "response.function_call_arguments.done"]
        deltas = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
        assert [e.arguments for e in done] == [c.arguments for c in calls], (events, calls)
        assert deltas == "".join(c.arguments for c in calls), (deltas, calls)
        outputs = [{"type": "function_call_output", "call_id": c.call_id, "output": "3198"} for c in calls]
        after = client.responses.create(
            model=MODEL, input=outputs, tools=RESPONSE_TOOLS, previous_response_id=reply.id, max_output_tokens=40)
        assert after.output, after
    items = [
        {"role": "user", "content": PRODUCTS[0]},
        {"type": "function_call", "call_id": "call_1", "name": "calc", "arguments": json.dumps({"x": "39*82"})},
        {"type": "function_call_output", "call_id": "call_1", "output": "3198"},
    ]
    assert client.responses.create(model=MODEL, input=items, tools=RESPONSE_TOOLS, max_output_tokens=40).output


@check
def an_episode():
    begun = fetch("/v1/episodes", body={"model": MODEL, "agent": "sdk"})
    key = begun["api_key"]
    own = client.with_options(base_url=begun["base_url"], api_key=key)
    messages = user(begun["task"]["expression"].replace(" ", ""))
    for _ in range(2):
        reply = own.chat.completions.create(model=begun["model"], messages=messages).choices[0].message
        messages += [reply.model_dump(exclude_none=True), *user("1+1")]
    other = client.with_options(api_key="sk-starling-guessed")
    try:
        other.chat.completions.create(model=MODEL, messages=messages)
        raise AssertionError("a guessed key was accepted")
    except openai.AuthenticationError as err:
        assert err.code == "invalid_api_key", err.body
    listed = fetch("/v1/episodes", key)["data"]
    assert len(listed) == 1 and listed[0]["turns"] == 2 and listed[0]["timelines"] == 1, listed
    ended = fetch(f"/v1/episodes/{begun['episode']}/end", key, {"reward": 1.0, "task_id": begun["task_id"]})
    assert re.fullmatch("[0-9a-f]{64}", ended["rollout"]), ended
    try:
        own.chat.completions.create(model=MODEL, messages=messages)
        raise AssertionError("an ended episode was answered")
    except openai.ConflictError as err:
        assert err.code == "episode_ended", err.body


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
