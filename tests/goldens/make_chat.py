#!/usr/bin/env python3
"""Conversations as `transformers` renders and tokenizes them, with real tokenizers and with templates of our own.

    scripts/fetch_models.sh /tmp/models
    python3 -m venv /tmp/hfvenv && /tmp/hfvenv/bin/pip install transformers==5.24.0 jinja2==3.1.6 gguf==0.19.0
    /tmp/hfvenv/bin/python tests/goldens/make_chat.py /tmp/models > tests/goldens/chat.json

The real models' templates and vocabularies are not in the result, only what comes out. SmolLM2's tokenizer is put
together with Hugging Face's `tokenizers` from its GGUF. Read by `node/gateway/tests/real_tokenizers.rs` and
`node/gateway/src/text/template_tests.rs`.
"""

import json
import sys
from pathlib import Path

from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

TOOLS = [
    {"type": "function", "function": {
        "name": "get_weather", "description": "Wetter für <Ort> & \"Zeit\"",
        "parameters": {"type": "object", "required": ["place"], "properties": {
            "place": {"type": "string", "description": "e.g. 'Zürich'"}, "days": {"type": "integer", "default": 3},
            "precision": {"type": "number", "minimum": 1e-07, "maximum": 1e+16, "multipleOf": 0.5},
            "tags": {"type": "array", "items": {}, "enum": [True, False, None]}}}}},
]
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"place": "Zürich 🦜", "days": 2, "tags": []}}}
CONVERSATIONS = {
    "question": [{"role": "user", "content": "What is the capital of France?"}],
    "system": [
        {"role": "system", "content": "You are terse."}, {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"}, {"role": "user", "content": "And 12345 + 678,90?"},
    ],
    "texts": [
        {"role": "user", "content": "  Grüße, 世界 🦜!\r\n\tIt's 'quoted' \"twice\" \\ {{ braces }} {% tag %}\n\n\n"},
        {"role": "assistant", "content": "e\u0301 is é; you'll SEE'LL   see\u00a0 \u3000x"},
        {"role": "user", "content": "def f(x):\n    return x**2  # 3.14159e-10\n"},
    ],
    "tools": [
        {"role": "system", "content": "Use tools."}, {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "{\"t\": 21.5}"}, {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny."}, {"role": "user", "content": "Thanks"},
    ],
    "reasoning": [
        {"role": "user", "content": "2*3?"},
        {"role": "assistant", "content": "<think>\ntwo times three\n</think>\n\n6"},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "checked"},
    ],
}
# What templates in the wild do with Jinja2, one feature a template.
TEMPLATES = {
    "values": "{{ none }}|{{ true }}|{{ 1.0 }}|{{ 1e16 }}|{{ 0.00001 }}|{{ 1e-4 }}|{{ 12345678901234567 }}|{{ undefined_name }}"
              "|{{ tools }}|{{ messages[0] }}|{{ ['a\\'b', \"it's\", 'x\\ny'] }}",
    "json": "{{ tools | tojson }}\n{{ tools | tojson(indent=4) }}\n{{ tools | tojson(separators=(',', ':')) }}\n"
            "{{ tools | tojson(indent=1, sort_keys=true) }}\n{{ tools | tojson(ensure_ascii=true) }}\n{{ {} | tojson(indent=2) }}",
    "tokens": "{{ bos_token }}[{{ eos_token }}][{{ pad_token is defined }}][{{ tools is none }}][{{ documents is none }}]",
    "loops": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ loop.index }}/{{ loop.length }}"
             "{{ m.content | trim | upper }}{% if loop.index == 3 %}{% break %}{% endif %},{% endfor %}"
             "{% for m in messages | selectattr('role', 'equalto', 'user') %}<{{ m['content'][:5] }}>{% endfor %}",
    "macro": "{%- macro turn(role, text='-', end=true) -%}\n<{{ role }}>{{ text }}{{ '</' ~ role ~ '>' if end }}\n{%- endmacro -%}"
             "{%- for m in messages -%}{{ turn(m.role, text=m.content) }}{{ turn('x', end=false) }}{%- endfor -%}",
    "namespace": "{% set ns = namespace(last=-1, text='') %}{% for m in messages[::-1] %}{% if m.role == 'user' and ns.last < 0 %}"
                 "{% set ns.last = messages | length - 1 - loop.index0 %}{% set ns.text = m.content %}{% endif %}{% endfor %}"
                 "{{ ns.last }}:{{ ns.text.split('?')[0].strip() }}",
    "space": "  {% if true %}\n    a\n  {%- endif %}\n  {# note #}\nb\n{% raw %}{{ x }}{% endraw %}\n\n",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}\n  {%- generation -%}\n  {{ m.content }}\n  "
                  "{%- endgeneration %}\n{% else %}{% generation %}{{ m.role }}{% endgeneration %}{% endif %}{% endfor %}",
    "strings": "{{ messages[0].content.startswith('What') }}{{ 'a,b'.split(',') }}{{ 'abc'.replace('b', 'x').title() }}"
               "{{ messages[0].content | length }}{{ 'x' in messages[0] }}{{ messages[0].get('nothing', 'else') }}"
               "{{ messages[0].items() | list | length }}{{ 'a' ~ 1 }}{{ [1, 2] | join('-') }}{{ messages[0] is mapping }}"
               "{{ messages[0].content is string }}{{ messages is iterable }}{{ (messages | first).role }}",
}


def render(template, messages, tools, prompt, **tokens):
    rendered, _ = render_jinja_template([messages], tools=tools, chat_template=template, add_generation_prompt=prompt, **tokens)
    return rendered[0]


def folder(path):
    about = json.loads((path / "tokenizer_config.json").read_text())
    tokens = {k: about[k] for k in ("bos_token", "eos_token", "pad_token", "unk_token") if about.get(k)}
    return PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"), **tokens), about["chat_template"], tokens


def from_gguf(path):
    fields = {k: f.contents() for k, f in GGUFReader(str(path)).fields.items() if k.startswith("tokenizer.")}
    ids = {n: fields[f"tokenizer.ggml.{k}_token_id"] for n, k in
           (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding"))}
    vocabulary = fields["tokenizer.ggml.tokens"]
    tokens = {n: vocabulary[i] for n, i in ids.items()}
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(vocabulary)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t, k in zip(vocabulary, kinds) if k == 3])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens), fields["tokenizer.chat_template"], tokens


def main():
    models = Path(sys.argv[1])
    loaded = {"qwen3": folder(models / "qwen3"), "llama3": folder(models / "llama3"),
              "smollm2": from_gguf(models / "smollm2.gguf")}
    real = {}
    for name, (tokenizer, template, tokens) in loaded.items():
        cases = []
        for conversation, messages in CONVERSATIONS.items():
            for tools in (None, TOOLS):
                for prompt in (False, True):
                    text = render(template, messages, tools, prompt, **tokens)
                    cases.append({"conversation": conversation, "tools": tools is not None, "prompt": prompt, "text": text,
                                  "ids": tokenizer(text, add_special_tokens=False)["input_ids"]})
        # Without tools in the template the two renderings are one.
        unique = [c for i, c in enumerate(cases) if not any(c["text"] == d["text"] and c["prompt"] == d["prompt"]
                  and c["conversation"] == d["conversation"] for d in cases[:i])]
        real[name] = unique
    own = []
    for name, template in TEMPLATES.items():
        for conversation in ("question", "system", "texts"):
            for tools in (None, TOOLS):
                if name == "json" and tools is None:
                    continue
                text = render(template, CONVERSATIONS[conversation], tools, True, bos_token="<s>", eos_token="</s>")
                own.append({"name": name, "conversation": conversation, "tools": tools is not None, "text": text})
    print(json.dumps({"tools": TOOLS, "conversations": CONVERSATIONS, "templates": TEMPLATES, "real": real, "own": own},
                     ensure_ascii=False, separators=(",", ":")))


if __name__ == "__main__":
    main()
