"""Readers of tokenizer files and chat templates."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from models.errors import ModelError
from runtime.errors import RuntimeFailure
from runtime.text.template_process import TemplateProcess
from runtime.text.tokenizer import Tokenizer as OwnTokenizer
from tests.fuzz.mutation import Draw, addressed, altered, altered_json, damaged, mostly, pick, written
from tests.fuzz.reader import Reader

TEXTS = ("The 2 quick foxes,\n\n\tjumped.", "naïve ﬁ É ½ 日本語 🙂 \0\ud83d", "a" * 40 + "!", " ", "")
"""What tokenizers are asked to encode."""
SPECIAL = ["<unk>", "<s>", "</s>"]
LETTERS = "abcdefghijklmnopqrstuvwxyz TQ2,.\n"
PLAIN = {**dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False), "special": True}
SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
    "extra_special_tokens": {},
    "added_tokens_decoder": {str(at): {"content": text, **PLAIN} for at, text in enumerate(SPECIAL)},
    "clean_up_tokenization_spaces": False, "model_max_length": 512,
}  # fmt: skip
PARTS = [
    json.loads(line)
    for line in r"""
{"type": "NFKC"}
{"type": "NFD"}
{"type": "StripAccents"}
{"type": "Nmt"}
{"type": "Whitespace"}
{"type": "ByteFallback"}
{"type": "Fuse"}
{"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "aa"}
{"type": "Replace", "pattern": {"String": ""}, "content": "a"}
{"type": "Replace", "pattern": {"Regex": "(?=(a*))*?"}, "content": ""}
{"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8="}
{"type": "Split", "pattern": {"Regex": "(\\w*)*\\1"}, "behavior": "Isolated", "invert": true}
{"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}
{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}
{"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": false}
{"type": "Strip", "content": " ", "start": 1000000, "stop": 1000000}
{"type": "FixedLength", "length": 0}
{"type": "BPE", "vocab": {"a": 0, "aa": 1}, "merges": [["a", "a"]], "dropout": 1.5}
{"type": "WordPiece", "vocab": {}, "unk_token": "", "max_input_chars_per_word": 0, "continuing_subword_prefix": ""}
{"type": "Unigram", "vocab": [["a", -1.0], ["b", 1e400]], "unk_id": 9}
{"type": "RobertaProcessing", "sep": ["", 2], "cls": ["", 4294967295], "trim_offsets": true, "add_prefix_space": false}
{"strategy": {"Fixed": 1000000000}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
{"direction": "Left", "max_length": 2, "strategy": "OnlySecond", "stride": 2}
{"id": 4294967295, "content": "", "single_word": true, "lstrip": true, "rstrip": true, "special": true}
""".strip().splitlines()
]
"""Parts of a tokenizer.json that do odd things."""


def try_tokenizer(tokenizer: OwnTokenizer) -> None:
    """Encode and decode some texts."""
    for text in TEXTS:
        tokens = tokenizer.encode(text, most=1000)
        tokenizer.decode(tokens).encode()
        for token in tokens[:4]:
            tokenizer.piece(token).encode()
    if not tokenizer.has_chat_template:
        tokenizer.chat([{"role": "user", "content": "hi"}])


def tokenizers() -> list[Tokenizer]:
    """One of each kind, of few tokens."""
    words = {word: index for index, word in enumerate((*SPECIAL, *LETTERS))}
    by_word = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    by_word.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    by_word.decoder = decoders.Fuse()
    by_bytes = Tokenizer(
        models.BPE({**words, "Ġ": 40, "th": 41, "Ġth": 42}, [("t", "h"), ("Ġ", "th")], unk_token="<unk>")
    )
    by_bytes.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("  ", " ")])
    by_bytes.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{L}+|\s+"), "isolated"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    by_bytes.decoder = decoders.ByteLevel()
    by_bytes.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    scored = [(word, -float(index)) for word, index in words.items()]
    by_chance = Tokenizer(models.Unigram([*scored, ("▁", -3.0), ("▁t", -2.0)], 0, False))
    by_chance.pre_tokenizer = pre_tokenizers.Metaspace()
    by_chance.decoder = decoders.Metaspace()
    found = [by_word, by_bytes, by_chance]
    for one in found:
        one.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    return found


@contextmanager
def tokenizer(folder: Path) -> Iterator[Reader]:
    """The files of a folder's tokenizer, each in turn beside others that are sound."""
    described = [json.loads(one.to_str()) for one in tokenizers()]
    files = {"tokenizer.json": written(described[1]), "tokenizer_config.json": written(SETTINGS)}

    def read(content: bytes) -> None:
        name, _, content = content.partition(b"\n")
        shutil.rmtree(folder)
        folder.mkdir()
        for file, own in {**files, name.decode(): content}.items():
            (folder / file).write_bytes(own)
        try_tokenizer(OwnTokenizer(folder))

    sound = tuple(b"tokenizer.json\n" + written(one) for one in described)
    sound += (
        b'added_tokens.json\n{"<new>": 50}',
        b"tokenizer_config.json\n" + written(SETTINGS | {"split_special_tokens": False, "fix_mistral_regex": True}),
    )
    inputs = addressed(
        "tokenizer.json", mostly(st.sampled_from(described).flatmap(lambda one: altered_json(one, PARTS)))
    )
    more = (*SPECIAL, *PARTS, SPECIAL, "LlamaTokenizer", "PreTrainedTokenizerFast", "{{ messages }}")
    named = {f"{name}_token": "<s>" for name in ("bos", "eos", "unk", "pad", "cls", "mask")}
    inputs |= addressed("tokenizer_config.json", altered_json({**SETTINGS, **named}, more))
    inputs |= addressed("special_tokens_map.json", altered_json(named, more))
    inputs |= addressed("added_tokens.json", altered_json({"<s>": 1, "<new>": 50}, more))
    yield Reader(sound=sound, inputs=inputs, read=read, errors=(ModelError, RuntimeFailure))


# Templates

TEMPLATES = [
    text.replace("\n", "")
    for text in (
        r"""
{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}<|end|>{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}
""",
        r"""
{% set ns = namespace(last='') %}{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{% for m in messages %}{% if loop.first and m.role == 'system' %}{% set ns.last = m.content %}{% continue %}{% endif %}
{% if m.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('no ' + m.role) }}{% endif %}
{{ m.role }}{% generation %}{{ m.content }}{% endgeneration %}
{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}
{% endfor %}{{ strftime_now('%d %b %Y') }}
""",
        r"""
{% macro turn(m, deep=1) %}{{ m.content[:deep] ~ m['content'].split('\n') | join(' ') }}{% endmacro %}
{% for m in messages | selectattr('role', 'equalto', 'user') %}{{ turn(m, loop.index) }}{% endfor %}
{% for m in messages %}{{ m.content }}{% endfor %}
""",
    )
]
SNIPPETS = [
    *r"""
{{ messages }}
{{ tools }}
{{ messages[99].content }}
{{ 1 / 0 }}
{{ undefined.a.b }}
{{ ''.__class__ }}
{{ 'a' * 10**9 }}
{{ range(10**9) | list }}
{{ 9 ** 9 ** 9 }}
{{ '%s' % messages }}
{{ '{0.__class__}'.format(1) }}
{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}
{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}
{% set messages = 1 %}
{{ raise_exception() }}
{{ raise_exception(messages) }}
{{ strftime_now('%') }}
{{ strftime_now('%Y' * 10**5) }}
{{ strftime_now('\ud800') }}
{{ '\ud800' }}
{% include 'x' %}
{% import 'x' as y %}
{% extends 'x' %}
{% block a %}{% endblock %}
{% break %}
{#
{{
{% if
{% endfor %}
{% raw %}
{% call m() %}
{{ messages | tojson(indent=10**9) }}
{{ messages | map('upper') | list }}
{{ dict(messages) }}
{{ namespace(_a=1) }}
{% set ns = namespace() %}{% set ns.__class__ = 1 %}
{{ [1] | groupby('a') }}
{{ 1 | indent(10**9) }}
{{ 1e999 | int }}
{% filter upper %}a{% endfilter %}
""".strip().splitlines(),
    "{{ " + "(" * 100 + "1" + ")" * 100 + " }}",
    "{{ " + "[" * 5000,
    "{% if 1 %}" * 300,
]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": [1, None]}}}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hi\nthere"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "22", "tool_call_id": "1"},
    {"role": "assistant", "content": "It is "},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]


@st.composite
def _requests(draw: Draw) -> bytes:
    parts = list(draw(st.sampled_from(TEMPLATES)).partition("{% for m in messages"))
    for _ in range(draw(st.integers(0, 3))):
        parts.insert(draw(st.integers(0, len(parts))), pick(draw, SNIPPETS))
    template = "".join(parts)
    if draw(st.integers(0, 2)) == 0:
        template = draw(damaged(template.encode("utf-8", "surrogatepass"))).decode("utf-8", "replace")
    messages = draw(altered(MESSAGES)) if draw(st.booleans()) else MESSAGES
    chat = [one for one in messages if isinstance(one, dict)] if isinstance(messages, list) else []
    return written([template, chat or MESSAGES, draw(st.booleans()), TOOLS if draw(st.booleans()) else []])


@contextmanager
def template(folder: Path) -> Iterator[Reader]:
    """A chat template with a conversation, applied in the process that is for that."""
    del folder
    process = TemplateProcess(seconds=1.0)

    def read(content: bytes) -> None:
        try:
            text, messages, continue_final, tools = json.loads(content)
        except (ValueError, RecursionError):
            return  # messages have come through the server's reader, which refuses these
        process.knows_tools(text)
        process.render(text, messages, tokens={"bos_token": "<s>"}, continue_final=continue_final, tools=tools)

    sound = tuple(written([text, MESSAGES, False, TOOLS]) for text in TEMPLATES)
    yield Reader(sound=sound, inputs=_requests(), read=read, errors=(RuntimeFailure,))
    process.close()
