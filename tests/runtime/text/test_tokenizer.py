"""Encoding, chat templates and streaming decoding, on small tokenizers made here and on real ones."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Fast

from models.plain_tokenizer import TOOL_TEMPLATE, plain_tokenizer, several
from models.quantize.text import convert_tokenizer
from runtime.errors import BackendError, ContextOverflowError, RequestError
from runtime.load.catalogue import template_in
from runtime.text.chat_template import render
from runtime.text.reasoning import split_reasoning, switch
from runtime.text.tokenizer import SLICE, Detokenizer, Tokenizer, plain_chat
from runtime.text.tool_calls import Tool

CORPUS = [
    "the sea and the captain said to the sea: I am the sea",
    "Ελληνικά και 日本語 と emoji 🐙🐙",
    "once upon a time",
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'critic' %}"
    "{{ raise_exception('no critics here') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


PLAIN = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
"""Settings of an added token."""


def byte_level() -> Fast:
    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(CORPUS, trainer)
    return fast


def byte_fallback() -> Fast:
    letters = sorted(set("".join(CORPUS[0] + CORPUS[2]).replace(" ", "")))
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for token in ["▁", *letters, "th", "▁th", "▁the", "se", "▁se", "▁sea"]:
        vocab.setdefault(token, len(vocab))
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("s", "e"), ("▁", "se"), ("▁se", "a")]
    fast = Fast(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    fast.add_special_tokens(["<unk>", "<s>", "</s>"])
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return fast


def save(fast: Fast, folder: Path, **config: object) -> Tokenizer:
    folder.mkdir(exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    base = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(base | config))
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return save(byte_level(), tmp_path_factory.mktemp("bytes"), chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def pieces_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return save(byte_fallback(), tmp_path_factory.mktemp("pieces"))


MARKS = (
    "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<turn|>",
    "[INST]", "[/INST]", "[TOOL_CALLS]", "<|channel|>", "<|channel>", "<channel|>", '<|"|>', "<｜User｜>", "▁<EOT>",
    "<tool_call>", "</tool_call>", "<tool_response>", "<think>", "</think>", "]~b]", "<|START_OF_TURN_TOKEN|>",
    "<<nested<s>>", "<| of words |>",
)  # fmt: skip
"""Control tokens of various families; the second half is not special."""
EVERY_FIELD = (
    "{{ bos_token }}{% for t in tools or () %}{{ t | tojson }}{{ t.function.name }}{{ t.function.description }}"
    "{% for key, value in t.function.parameters.properties.items() %}{{ key }}{{ value.description | upper }}"
    "{% endfor %}{% endfor %}{{ wish }}{% for m in messages %}<|im_start|>{{ m.role }}{{ m.name }}"
    "{{ m.reasoning_content }}{{ m.content | trim }}{% for c in m.tool_calls or () %}<tool_call>{{ c.id }}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% for key, value in c.function.arguments.items() %}"
    "{{ key }}{{ value }}{% endfor %}</tool_call>{% endfor %}{{ m.tool_call_id }}<|im_end|>{% endfor %}"
)
"""A template that writes whatever it is told, some of it without anything in between."""


def wide(mark: str) -> str:
    """A text that some normalizers turn into a mark."""
    return "".join(chr(ord(letter) + 0xFEE0) if letter in "<>[]|/" else letter.upper() for letter in mark)


def unigram() -> Fast:
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("<0x0A>", -9.0), ("▁", -2.0)]
    letters = set("".join(map(wide, MARKS)) + "".join(MARKS) + "\n") | set(map(chr, range(33, 127)))
    pieces += [(letter, -3.0) for letter in sorted(letters - {"▁"})]
    fast = Fast(models.Unigram(pieces, 0, False))
    fast.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always")
    fast.decoder = decoders.Metaspace("▁", prepend_scheme="always")
    return fast


def normalizing() -> Fast:
    fast = byte_level()
    fast.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return fast


@pytest.fixture(
    scope="module", params=[byte_level, byte_fallback, unigram, normalizing], ids=lambda made: made.__name__
)
def marked_tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    fast: Fast = request.param()
    kind = {"normalized": request.param is normalizing}
    fast.add_special_tokens([AddedToken(mark, **kind) for mark in MARKS[: len(MARKS) // 2]])
    fast.add_tokens([AddedToken(mark, **kind) for mark in MARKS[len(MARKS) // 2 :]])
    return save(fast, tmp_path_factory.mktemp("marked"), chat_template=EVERY_FIELD)


def controls(tokenizer: Tokenizer, text: str) -> list[int]:
    """The control tokens of a conversation in which everything is named, described and answered by a text."""
    call = {
        "id": text,
        "type": "function",
        "function": {"name": text, "arguments": {text: text, "list": [{text: text}]}},
    }
    messages = [
        {"role": "system", "content": text},
        {"role": "user", "content": text, "name": text},
        {"role": "assistant", "content": f"Yes. {text}", "reasoning_content": text, "tool_calls": [call]},
        {"role": "tool", "content": text, "tool_call_id": text, "name": text},
        {"role": "assistant", "content": f"<think>{text}x</think>{text}"},
    ]
    kind = {"type": "object", "properties": {text: {"description": text, "enum": [text]}}}
    tools = [Tool(name=text, description=text, parameters=kind)]
    found = tokenizer.chat(messages, tools=tools, variables={"wish": text, text: {text: [text]}})
    return [token for token in found if token in set(tokenizer.added_tokens.values())]


@settings(max_examples=60, deadline=None)
@given(
    mark=st.sampled_from([*MARKS, *map(wide, MARKS)]),
    at=st.integers(0, 12),
    around=st.tuples(*[st.text("a<[|s/>] \n", max_size=3)] * 2),
)
@example(mark="<<nested<s>>", at=0, around=("<", ">"))
def test_data_writes_no_control_token(marked_tokenizer: Tokenizer, mark: str, at: int, around: tuple[str, str]) -> None:
    """Neither whole nor in two pieces that meet in the prompt; the end of a thought is its writer's own."""
    at %= len(mark)
    text = mark[at:] + around[0] + mark + around[1] + (mark[:at] or "x")
    assert controls(marked_tokenizer, text) == controls(marked_tokenizer, "x")


def test_an_answers_reasoning_keeps_its_tags(marked_tokenizer: Tokenizer) -> None:
    """Templates find reasoning by them; a second pair is data."""
    answer = {"role": "assistant", "content": "<think>\na <think>\n</think>\n\nb </think>"}
    prompt = marked_tokenizer.chat([{"role": "user", "content": "Go."}, answer])
    assert [prompt.count(marked_tokenizer.added_tokens[tag]) for tag in ("<think>", "</think>")] == [1, 1]


def test_data_reads_the_same_without_control_tokens(marked_tokenizer: Tokenizer) -> None:
    text = "Is </s> the end, or <|im_end|>?"
    prompt = marked_tokenizer.chat([{"role": "user", "content": text}])
    assert text.casefold() in marked_tokenizer.decode(prompt).casefold()


def stream(tokenizer: Tokenizer, tokens: list[int], context: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, context or [])
    return [*(detokenizer.add(token) for token in tokens), detokenizer.flush()]


@settings(max_examples=150)
@given(text=st.text(max_size=40), drawn=st.lists(st.integers(0, 399), max_size=40))
def test_what_is_streamed_is_the_text(
    bytes_tokenizer: Tokenizer, pieces_tokenizer: Tokenizer, text: str, drawn: list[int]
) -> None:
    """Of texts, and of any tokens at all."""
    for tokenizer in (bytes_tokenizer, pieces_tokenizer):
        tokens = tokenizer.encode(text)
        assert "".join(stream(tokenizer, tokens)) == tokenizer.decode(tokens)
    assert "".join(stream(bytes_tokenizer, drawn)) == bytes_tokenizer.decode(drawn)


@pytest.mark.parametrize("which", ["bytes_tokenizer", "pieces_tokenizer"])
def test_no_piece_holds_half_a_character(which: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(which)
    text = "the 🐙 sea 日本"
    tokens = tokenizer.encode(text, special=False)
    pieces = stream(tokenizer, tokens)
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert "".join(pieces) == text
    assert "" in pieces


def test_an_unfinished_character_shows_at_the_end_only(bytes_tokenizer: Tokenizer) -> None:
    tokens = bytes_tokenizer.encode("a🧿")[:-1]
    detokenizer = Detokenizer(bytes_tokenizer)
    given_out = "".join(detokenizer.add(token) for token in tokens)
    assert "\N{REPLACEMENT CHARACTER}" not in given_out
    assert detokenizer.flush().endswith("\N{REPLACEMENT CHARACTER}")
    assert detokenizer.flush() == ""


def test_a_continuation_keeps_its_leading_space(pieces_tokenizer: Tokenizer) -> None:
    prompt, more = pieces_tokenizer.encode("the"), pieces_tokenizer.encode("sea", special=False)
    assert "".join(stream(pieces_tokenizer, more)) == "sea"
    assert "".join(stream(pieces_tokenizer, more, prompt)) == " sea"


def test_special_tokens_are_added_once(pieces_tokenizer: Tokenizer) -> None:
    assert pieces_tokenizer.encode("the sea")[0] == 1
    assert 1 not in pieces_tokenizer.encode("the sea", special=False)
    doubled = pieces_tokenizer.encode("<s>the sea")
    assert doubled.count(1) == 1


def test_the_chat_template_is_the_models_own(bytes_tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "be the sea"}, {"role": "user", "content": "the"}]
    tokens = bytes_tokenizer.chat(messages)
    ids = {text: bytes_tokenizer.encode(text)[0] for text in ("<s>", "<|user|>", "<|assistant|>", "<|end|>")}
    assert tokens[0] == ids["<s>"]
    assert tokens.count(ids["<s>"]) == 1
    assert tokens[-1] == ids["<|assistant|>"]
    assert bytes_tokenizer.decode(tokens) == "be the seathe"
    assert bytes_tokenizer.has_chat_template
    final = [*messages, {"role": "assistant", "content": "I am"}]
    continued = bytes_tokenizer.chat(final, continue_final=True)
    assert bytes_tokenizer.decode(continued).endswith("I am")
    assert continued[-1] != ids["<|end|>"]


REASONING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
)
"""A template that begins the reasoning itself, as those of Qwen3.5 and DeepSeek R1 do."""


@pytest.mark.parametrize(
    ("template", "thinking", "tag"),
    [
        (REASONING, "auto", "<think>\n"),
        (REASONING, "on", "<think>\n"),
        (REASONING, "off", ""),
        (TEMPLATE, "on", ""),
    ],
)
def test_reasoning_is_switched_and_its_tag_known(tmp_path: Path, template: str, thinking: str, tag: str) -> None:
    tokenizer = save(byte_level(), tmp_path, chat_template=template)
    prompt = tokenizer.chat([{"role": "user", "content": "<think>"}], variables=switch(thinking))
    assert tokenizer.reasoning_opened(prompt) == tag


def test_variables_replace_nothing_of_the_request(bytes_tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "the sea"}]
    taken = {"messages": [], "bos_token": "", "add_generation_prompt": False}
    assert bytes_tokenizer.chat(messages, variables=taken) == bytes_tokenizer.chat(messages)


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("plain", "", "plain"),
        ("<think>\nhm", "hm", ""),
        ("<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        ("a <think> b", "", "a <think> b"),
    ],
)
def test_reasoning_is_split_from_its_answer(text: str, thought: str, answer: str) -> None:
    assert split_reasoning(text) == (thought, answer)


def test_without_a_template_a_conversation_is_one_text(pieces_tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "the sea"},
        {"role": "assistant", "content": " I am"},
        {"role": "user", "content": "time</s>"},
    ]
    assert plain_chat(messages) == "be brief\n\nthe sea I am\n\ntime</s>"
    prompt = pieces_tokenizer.chat(messages)
    assert prompt[0] == 1
    assert pieces_tokenizer.eos_token_id not in prompt
    assert not pieces_tokenizer.has_chat_template


@pytest.mark.parametrize(
    ("messages", "continue_final", "words"),
    [
        ([], False, "empty"),
        ([{"role": "user"}], False, r"messages\[0\]"),
        ([{"role": "user", "content": 3}], False, r"messages\[0\]"),
        ([{"role": "user", "content": "x"}], True, "assistant"),
        ([{"role": "critic", "content": "x"}], False, "no critics here"),
    ],
)
def test_bad_messages_are_refused(
    bytes_tokenizer: Tokenizer, messages: list[dict[str, str]], continue_final: bool, words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        bytes_tokenizer.chat(messages, continue_final=continue_final)


def test_tools_reach_the_model_with_or_without_a_template_for_them(bytes_tokenizer: Tokenizer, tmp_path: Path) -> None:
    tools = [Tool(name="add", description="adds numbers")]
    messages = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "3"},
    ]
    told = bytes_tokenizer.decode(bytes_tokenizer.chat(messages, tools=tools))
    assert "adds numbers" in told
    assert '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' in told
    assert "<tool_response>3</tool_response>" in told
    source = bytes_tokenizer.folder
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["chat_template"] = (
        "{% for t in tools %}({{ t.function.name }}: {{ t.function.description }}){% endfor %}{% for m in messages %}"
        "{{ m.role }}={{ m.content }}{% for c in m.tool_calls %}!{{ c.function.arguments.a }}{% endfor %};{% endfor %}"
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    own = Tokenizer(tmp_path)
    assert own.decode(own.chat(messages, tools=tools)) == "(add: adds numbers)user=1 + 2?;assistant=!1;tool=3;"


def test_a_broken_or_missing_tokenizer_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="missing"):
        Tokenizer(tmp_path / "nowhere")
    with pytest.raises(BackendError, match="cannot be read"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{ not json")
    with pytest.raises(BackendError, match="cannot be read"):
        Tokenizer(tmp_path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_file_nested_without_end_is_one_clear_error(name: str, tmp_path: Path) -> None:
    save(byte_level(), tmp_path)
    (tmp_path / name).write_text('{"a":' * 100_000)
    with pytest.raises(BackendError, match=r"cannot be read: (it is nested too deeply|.* line 1 column)") as raised:
        Tokenizer(tmp_path)
    assert len(str(raised.value)) < 500


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "vocab.json"])
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    os.mkfifo(tmp_path / name)
    with pytest.raises(BackendError, match="it is not a regular file"):
        Tokenizer(tmp_path)


def test_a_text_on_which_the_tokenizer_crashes_is_refused(tmp_path: Path) -> None:
    """An expression that backtracks without end makes the package panic, which is no Exception."""
    fast = byte_level()
    fast.pre_tokenizer = pre_tokenizers.Split(Regex("(q|qq)+$"), "isolated")
    tokenizer = save(fast, tmp_path)
    with pytest.raises(RequestError, match=r"tokenizer cannot encode this text of 51 characters: .*crashed"):
        tokenizer.encode("q" * 50 + "x")
    assert tokenizer.decode(tokenizer.encode("the sea", special=False)) == "thesea"


def test_opening_a_tokenizer_leaves_torch_and_transformers_alone(tmp_path: Path) -> None:
    save(byte_level(), tmp_path, chat_template=TEMPLATE)
    code = (
        "import sys; from pathlib import Path; from runtime.text.tokenizer import Tokenizer; "
        f"t = Tokenizer(Path({str(tmp_path)!r})); t.chat([{{'role': 'user', 'content': 'x'}}]); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[3])


@pytest.mark.parametrize(
    ("files", "plainly"),
    [
        ({}, True),
        ({"unk_token": {"__type": "AddedToken", "content": "<s>"}}, True),
        (
            {
                "additional_special_tokens": ["<|user|>", {"__type": "AddedToken", "content": "<|end|>"}],
                "image_token": "<s>",
            },
            True,
        ),
        ({"extra_special_tokens": {"turn_token": "<|user|>"}}, True),
        ({"chat_template": [{"name": "default", "template": TEMPLATE}]}, True),
        ({"chat_template": {"default": TEMPLATE, "tool_use": "none"}}, True),
        ({"pad_token": "<|pad|>"}, False),
        ({"additional_special_tokens": ["<|more|>"]}, False),
        ({"added_tokens_decoder": {"400": {"content": "<|more|>", "special": True}}}, False),
        ({"added_tokens_decoder": {"1": {"content": "</s>", "special": False}}}, False),
        ({"special_tokens_map.json": {"cls_token": "<|cls|>"}}, False),
        ({"special_tokens_map.json": {"cls_token": "<s>"}}, True),
        ({"added_tokens.json": {"<|more|>": 400}}, False),
        ({"split_special_tokens": True}, False),
    ],
)
def test_transformers_reads_what_tokenizer_json_does_not_say(
    files: dict[str, object], plainly: bool, tmp_path: Path
) -> None:
    from transformers import PreTrainedTokenizerFast

    for name in [name for name in files if name.endswith(".json")]:
        (tmp_path / name).write_text(json.dumps(files[name]))
    config = {name: value for name, value in files.items() if not name.endswith(".json")}
    tokenizer = save(byte_level(), tmp_path, **{"chat_template": TEMPLATE, **config})
    peer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert (plain_tokenizer(tmp_path) is not None) == plainly
    text = "the <|user|> sea <|more|> and <|pad|> <|cls|> </s> time"
    assert tokenizer.encode(text) == peer(text).input_ids
    messages = [{"role": "user", "content": "the sea and time"}]  # special tokens in it would be broken up
    assert tokenizer.chat(messages) == peer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (peer.bos_token_id, peer.eos_token_id)
    assert tokenizer.vocab_size == len(peer)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"400": {"content": "<|more|>", "\x1b]52;c;aGk=\x07": True}}},
        ),
        ("tokenizer_config.json", {"pad_token": {"content": "<|pad|>", "__type": "AddedToken", "\u202e": 1}}),
        ("special_tokens_map.json", {"cls_token": {"content": "<|cls|>", "\x9b": [1]}}),
        ("tokenizer.json", {"added_tokens": [{"id": 0, "content": "<s>", "special": True, **PLAIN, "\x1b[2J": 1}]}),
    ],
    ids=["decoder", "named", "map", "tokenizer"],
)
def test_what_a_library_would_print_of_a_folder_reaches_no_terminal(
    name: str, said: dict[str, object], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save(byte_level(), tmp_path, split_special_tokens=True)
    file = tmp_path / name
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | said))
    with pytest.raises(BackendError, match=rf"cannot be read: {name} has a key that cannot be printed"):
        Tokenizer(tmp_path)
    assert capfd.readouterr() == ("", "")


TURNS = [
    {"role": "system", "content": " be the <sea> "},
    {"role": "user", "content": 'a "quoted" & <b>bold</b> 日本'},
    {"role": "assistant", "content": "I am \n"},
]
TEMPLATES = {
    "trimmed": "{% for m in messages %}\n  {% if m.role != 'system' %}\n<{{ m.role }}>{{ m.content | trim }}\n"
    "    {%- endif %}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
    "json": "{% for m in messages %}{{ m.content | tojson }}{{ {'b': 1, 'a': '<é>'} | tojson(indent=1) }}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}"
    "{% if loop.last %}{% break %}{% endif %}{% endfor %}",
    "namespace": "{% set ns = namespace(count=0) %}{% for m in messages %}{% set ns.count = ns.count + 1 %}"
    "{{ m.content }}{% endfor %}{{ ns.count }}{{ dict(a=1)['a'] }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "tokens": "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ tools is none }}{{ documents is none }}"
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "date": "{{ strftime_now('%Y')[:2] }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "refusing": "{{ raise_exception('not here') }}",
    "broken": "{% for m in messages %}",
    "private": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ messages[0].content }}",
    "escaping": "{{ messages.__class__.__mro__ }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "forgetful": "{{ messages[0].content }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("continue_final", [False, True], ids=["answer", "continue"])
def test_templates_are_applied_as_transformers_does(name: str, continue_final: bool, tmp_path: Path) -> None:
    from jinja2 import TemplateError
    from transformers import PreTrainedTokenizerFast

    tokenizer = save(byte_level(), tmp_path, chat_template=TEMPLATES[name])
    peer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for turns in (TURNS, [*TURNS[:2], {"role": "assistant", "content": "open"}], [TURNS[2]]):
        try:
            expected = peer.apply_chat_template(
                turns, add_generation_prompt=not continue_final, continue_final_message=continue_final, tokenize=False
            )
        except (TemplateError, ValueError):
            with pytest.raises(RequestError, match="chat template"):
                tokenizer.chat(turns, continue_final=continue_final)
            continue
        given_out = render(
            TEMPLATES[name], turns, tokens={"bos_token": "<s>", "eos_token": "</s>"}, continue_final=continue_final
        )
        assert given_out == expected
        assert tokenizer.chat(turns, continue_final=continue_final) == tokenizer.encode(expected, special=False)


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
    "{% if not loop.first and m.role == messages[loop.index0 - 1].role and m.role != 'tool' %}"
    "{{ raise_exception('turns alternate') }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    "[{{ c.id }}]{% endfor %}{% if m.role == 'tool' and m.tool_call_id | length != 9 %}"
    "{{ raise_exception('nine') }}{% endif %}<{{ m.role }}{{ m.tool_call_id }}>{{ m.content }}{% endfor %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + STRICT
SILENT = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}<{{ m.role }}>{{ m.content }}{% endif %}"
    "{% endfor %}"
)
S, T, U, A = ("system", "b"), ("system", "c"), ("user", "u"), ("assistant", "a")


@pytest.mark.parametrize(
    ("template", "turns", "expected"),
    [
        (STRICT, [S, T, U], "<system>b\n\nc<user>u"),
        (STRICT, [S, U, A, T, S, U], "<system>b<user>u<assistant>a<user>c\n\nb\n\nu"),
        (STRICT, [U, A, T], "<user>u<assistant>a<user>c"),
        (STRICT, [U, T, A], "<user>u<assistant>a<user>c"),
        (STRICT, [S, U, T], "<system>b<user>u\n\nc"),
        (STRICT, [U, U, A, A, U], "<user>u\n\nu<assistant>a\n\na<user>u"),
        (STRICT, [T, A, U, U], "<system>c<user><assistant>a<user>u\n\nu"),
        (NO_SYSTEM, [S, U, A, T, U], "<user>b\n\nu<assistant>a<user>c\n\nu"),
        (NO_SYSTEM, [S], "<user>b"),
        (SILENT, [S, U, A, T, U], "<system>b<user>u<assistant>a<user>c\n\nu"),
        (SILENT, [S, U, U], "<system>b<user>u<user>u"),
    ],
    ids=range(11),
)
def test_strict_templates_get_conversations_as_they_take_them(
    template: str, turns: list[tuple[str, str]], expected: str
) -> None:
    messages = [{"role": role, "content": content} for role, content in turns]
    assert render(template, messages, tokens={}) == expected


def test_ids_of_calls_become_what_the_strictest_template_takes() -> None:
    def messages(*ids: str | None) -> list[dict[str, Any]]:
        calls = [{"id": own, "type": "function", "function": {"name": "f", "arguments": {}}} for own in ids]
        results = [{"role": "tool", "content": "r", "tool_call_id": own} for own in ids]
        return [{"role": "assistant", "content": "", "tool_calls": calls}, *results, {"role": "user", "content": "u"}]

    said = render(STRICT, messages("call_7ccdeddc05b64bd085aa7cf6", "abcdefghi", None), tokens={})
    asked, answered = re.findall(r"\[(\w+)\]", said), re.findall(r"<tool(\w+)>", said)
    assert asked == answered
    assert asked[1] == "abcdefghi"
    assert len({*asked}) == 3
    loose = "{% for m in messages %}{{ m.tool_call_id }};{% endfor %}"
    assert render(loose, messages("call_1"), tokens={}) == ";call_1;;"


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_in_the_history_has_the_templates_name(name: str) -> None:
    template = (
        "{% for m in messages %}{% if m." + name + " %}<{{ m." + name + " }}>{% endif %}{{ m.content }}{% endfor %}"
    )
    messages = [{"role": "assistant", "content": "x", "reasoning_content": "hm"}]
    assert render(template, messages, tokens={}) == "<hm>x"


def prepare(name: str, shared: Path, tmp_path: Path) -> Path:
    """A folder that transformers can open: two of the shared tokenizers lack a file that says what they are."""
    if name == "gpt2":
        shutil.copytree(shared / "tokenizers/gpt2", tmp_path / "gpt2")
        (tmp_path / "gpt2/tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
        return tmp_path / "gpt2"
    if name == "mistral":
        pytest.importorskip("google.protobuf", reason="transformers reads sentencepiece files through protobuf")
        (tmp_path / "mistral").mkdir()
        shutil.copy(shared / "tokenizers/mistral/tokenizer.model.v1", tmp_path / "mistral/tokenizer.model")
        config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        (tmp_path / "mistral/tokenizer_config.json").write_text(json.dumps(config))
        return tmp_path / "mistral"
    return shared / name


REAL = [
    "models/english3m",
    "models/babyllama105",
    "models/stories260k",
    "tokenizers/minimind6400",
    "tokenizers/qwen2.5",
    "gpt2",
    "mistral",
]


@pytest.fixture(scope="module")
def real(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    opened: dict[str, Tokenizer] = {}

    def get(name: str) -> Tokenizer:
        if name not in opened:
            opened[name] = Tokenizer(prepare(name, shared_data, tmp_path_factory.mktemp("real")))
        return opened[name]

    return get


@pytest.mark.data
@pytest.mark.parametrize("name", REAL)
def test_real_tokenizers_stream_what_they_decode(
    name: str, real: Callable[[str], Tokenizer], shared_data: Path
) -> None:
    tokenizer = real(name)
    book = (shared_data / "text/alice.md").read_text()[3000:5000]
    for text in (book, "naïve café — 日本語 🐙👩‍👩‍👧 \n\n\tx = 1;  end", "  two spaces", "\n", ""):
        tokens = tokenizer.encode(text)
        pieces = stream(tokenizer, tokens)
        assert "".join(pieces) == tokenizer.decode(tokens)
        if "babyllama" not in name:  # its 105 characters do not spell every text
            assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


@pytest.mark.data
@pytest.mark.parametrize("name", REAL)
@settings(max_examples=30)
@given(text=st.text(max_size=30))
def test_real_tokenizers_stream_any_text(name: str, real: Callable[[str], Tokenizer], text: str) -> None:
    tokenizer = real(name)
    tokens = tokenizer.encode(text)
    assert "".join(stream(tokenizer, tokens)) == tokenizer.decode(tokens)


@pytest.mark.data
@pytest.mark.parametrize("name", REAL)
def test_real_tokenizers_encode_as_transformers_does(
    name: str, real: Callable[[str], Tokenizer], shared_data: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = real(name)
    text = (shared_data / "text/alice.md").read_text()[:3000]
    assert tokenizer.encode(text) == AutoTokenizer.from_pretrained(tokenizer.folder)(text).input_ids


@pytest.mark.data
@pytest.mark.parametrize("name", ["tokenizers/minimind6400", "tokenizers/qwen2.5"])
def test_real_templates_match_transformers(name: str, real: Callable[[str], Tokenizer]) -> None:
    from transformers import AutoTokenizer

    tokenizer = real(name)
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi <there>\n🐙"}]
    own = AutoTokenizer.from_pretrained(tokenizer.folder)
    expected = own.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert tokenizer.chat(messages) == expected
    continued = tokenizer.chat([*messages, {"role": "assistant", "content": "Hello, I"}], continue_final=True)
    assert tokenizer.decode(continued).endswith("Hello, I")


@pytest.mark.parametrize("of", ["the ", "x"])
def test_a_text_without_room_is_refused_before_it_is_encoded(
    pieces_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    """Encoding takes some hundred bytes for each token: 16 MB of text took 6 GB, and minutes."""
    fast, read = pieces_tokenizer._fast, []

    class Watched:
        def encode(self, text: str, **options: bool) -> object:
            read.append(len(text))
            return fast.encode(text, **options)

        def __getattr__(self, name: str) -> object:
            return getattr(fast, name)

    monkeypatch.setattr(pieces_tokenizer, "_fast", Watched())
    text = of * (3 * SLICE // len(of))
    with pytest.raises(ContextOverflowError, match="far more tokens than the 1000 that the context holds"):
        pieces_tokenizer.encode(text, most=1000)
    with pytest.raises(ContextOverflowError):
        pieces_tokenizer.chat([{"role": "user", "content": text}], most=1000)
    assert read == [SLICE, SLICE]
    assert pieces_tokenizer.encode(text, most=len(text) + 2)
    assert read[2:] == [len(text)]


def test_a_long_text_of_few_tokens_is_encoded(bytes_tokenizer: Tokenizer) -> None:
    text = "<|assistant|>" * SLICE
    assert len(bytes_tokenizer.encode(text, special=False, most=SLICE + 1000)) == SLICE


def test_half_a_character_is_replaced(bytes_tokenizer: Tokenizer) -> None:
    assert bytes_tokenizer.encode("a\ud83d") == bytes_tokenizer.encode("a\ufffd")


@pytest.mark.parametrize("plainly", [True, False])
@pytest.mark.parametrize("in_files", [True, False])
def test_conversations_with_tools_have_the_template_that_is_made_for_them(
    in_files: bool, plainly: bool, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    own, stored = several(TEMPLATE, "{{ tools[0].function.name }}!"), tmp_path / "stored"
    config = {} if plainly else {"tokenizer_class": "PreTrainedTokenizerFast", "split_special_tokens": True}
    tokenizer = save(byte_level(), tmp_path, **config, **({} if in_files else {"chat_template": own}))
    if in_files:
        for name, text in (("chat_template.jinja", own[0]["template"]), (TOOL_TEMPLATE, own[1]["template"])):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        tokenizer = Tokenizer(tmp_path)
    assert (plain_tokenizer(tmp_path) is not None) == plainly
    stored.mkdir()
    convert_tokenizer(tmp_path, stored, lambda name, data: (stored / name).write_bytes(data) and None)
    asked = [{"role": "user", "content": "the sea"}]
    for one in (tokenizer, Tokenizer(stored)):
        assert one.decode(one.chat(asked, tools=[Tool(name="look")])) == "look!"
        assert "the sea" in one.decode(one.chat(asked))
    assert template_in(stored) == TEMPLATE
    assert AutoTokenizer.from_pretrained(stored).chat_template == {one["name"]: one["template"] for one in own}


def test_tools_are_functions_and_arguments_texts_for_a_template_that_wants_them_so() -> None:
    template = (
        "{% for tool in tools or [] %}{{ tool.name + ': ' + tool.description }} {% endfor %}{% for said in messages %}"
        "{{ said.content }}{% for call in said.tool_calls or [] %}{{ call.function.name + call.function.arguments }}"
        "{% endfor %}{% endfor %}"
    )
    tools = [Tool(name="look", description="Looks.").record()]
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": "→"}}}
    asked = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert render(template, asked, tokens={}, tools=tools) == 'look: Looks. Hilook{"at": "→"}'
    assert render(template, asked, tokens={}) == 'Hilook{"at": "→"}'


def test_messages_too_deep_for_a_template_are_refused(tmp_path: Path) -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    call = {"id": "1", "function": {"name": "f", "arguments": {"a": deep}}}
    tokenizer = save(byte_level(), tmp_path, chat_template="{{ tools }}{{ messages[0].tool_calls | tojson }}")
    with pytest.raises(RequestError, match="chat template does not accept"):
        tokenizer.chat([{"role": "assistant", "content": "", "tool_calls": [call]}])
