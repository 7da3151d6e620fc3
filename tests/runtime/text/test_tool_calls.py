"""Tool calls: found in answers however they are cut, described as text, and enforced."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assets import demo_path
from runtime.errors import RequestError
from runtime.text.constraint import Constraints
from runtime.text.sampling import Sampler, SamplingOptions
from runtime.text.tokenizer import Tokenizer
from runtime.text.tool_calls import CallReader, Tool, ToolCall, call_grammar, describe_tools

NAMES = ("weather", "add")
PARIS = ToolCall(name="weather", arguments='{"city": "Paris"}')
SUM = ToolCall(name="add", arguments='{"a": 1, "b": 2}')
W, A = '{"name": "weather", "arguments": {"city": "Paris"}}', '{"name": "add", "parameters": {"a": 1, "b": 2}}'
ANSWERS: dict[str, tuple[str, str, list[ToolCall]]] = {
    "tags": (f"<tool_call>\n{W}\n</tool_call>", "", [PARIS]),
    "text and tags": (
        f"Let me look.\n<tool_call>{W}</tool_call>\n<tool_call>{A}</tool_call>",
        "Let me look.\n",
        [PARIS, SUM],
    ),
    "a list in tags": (f"<tool_call>[{W}, {A}]</tool_call>", "", [PARIS, SUM]),
    "tags that stay open": (f"<tool_call>\n{W}", "", [PARIS]),
    "a mark": (f"[TOOL_CALLS][{W}, {A}]", "", [PARIS, SUM]),
    "another mark": (f"<|python_tag|>{A}", "", [SUM]),
    "alone": (f" {A}", "", [SUM]),
    "a list alone": (f"[{W}]", "", [PARIS]),
    "wrapped": (f'{{"type": "function", "function": {W}}}', "", [PARIS]),
    "arguments as text": ('{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}', "", [SUM]),
    "plain text": ("The sky is < blue [here].", "The sky is < blue [here].", []),
    "other JSON": ('{"answer": [1, 2]}', '{"answer": [1, 2]}', []),
    "a list": ("[1, 2, 3] is a list", "[1, 2, 3] is a list", []),
    "an unknown tool": ('<tool_call>{"name": "rm"}</tool_call>', '<tool_call>{"name": "rm"}</tool_call>', []),
    "an unknown tool alone": ('{"name": "rm", "arguments": {}}', '{"name": "rm", "arguments": {}}', []),
    "broken JSON": ('<tool_call>{"name": "add"', '<tool_call>{"name": "add"', []),
    "JSON behind text": (f"See: {W}", f"See: {W}", []),
    "a name of a person": ('{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    "arguments that are no object": ('{"name": "add", "arguments": [1]}', '{"name": "add", "arguments": [1]}', []),
    "an open brace": ("{", "{", []),
    "nothing": ("", "", []),
}


def read(pieces: list[str], **options: Any) -> tuple[str, list[ToolCall]]:
    reader = CallReader(NAMES, **options)
    parts = [*(reader.feed(piece) for piece in pieces), reader.finish()]
    return "".join(text for text, _ in parts), [call for _, calls in parts for call in calls]


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("step", [1, 3, 7, 1000])
def test_calls_are_found_however_the_answer_is_cut(kind: str, step: int) -> None:
    answer, text, calls = ANSWERS[kind]
    assert read([answer[at : at + step] for at in range(0, len(answer), step)]) == (text, calls)


@given(st.lists(st.text(alphabet='<>tool_cal/[]{}"TOLCAS |python: nameadd', max_size=12), max_size=12))
def test_text_that_is_no_call_is_never_lost(pieces: list[str]) -> None:
    text, calls = read(pieces)
    assert calls or text == "".join(pieces)


def test_text_is_not_held_back_without_need() -> None:
    reader = CallReader(NAMES)
    assert reader.feed("Hello <b") == ("Hello <b", [])
    assert reader.feed("> and <tool") == ("> and ", [])
    assert reader.feed("box>") == ("<toolbox>", [])


def test_only_as_many_calls_as_are_wanted() -> None:
    assert read([ANSWERS["a list in tags"][0]], most=1) == ("", [PARIS])


@pytest.mark.parametrize("text", ["{}", "<tool_call>{}</tool_call>"], ids=["bare", "in tags"])
def test_what_is_nested_too_deeply_is_text(text: str) -> None:
    deep = text.replace("{}", f'{{"name": "weather", "arguments": {{"a": {"[" * 3000}{"]" * 3000}}}}}')
    assert read([deep[:2500], deep[2500:]]) == (deep, [])


def test_half_a_character_in_arguments_is_replaced() -> None:
    """The runtime of a client would fail to write it, and an answer that does not stream could not be sent."""
    said, (call,) = read([r'{"name": "weather", "arguments": {"city": "\ud83d"}}'])
    assert (said, call.arguments) == ("", '{"city": "\ufffd"}')


def test_tools_are_told_in_words_where_a_template_knows_none() -> None:
    tools = [Tool(name="add", description="adds", parameters={"type": "object"})]
    messages = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "3", "tool_call_id": "x"},
    ]
    system, user, asked, result = describe_tools(messages, tools)
    assert system["role"] == "system"
    assert '{"name": "add", "description": "adds", "parameters": {"type": "object"}}' in system["content"]
    assert user == messages[0]
    assert read([asked["content"]]) == ("", [ToolCall(name="add", arguments='{"a": 1}')])
    assert result == {"role": "user", "content": "<tool_response>3</tool_response>"}
    own = describe_tools([{"role": "system", "content": "Be short."}, *messages], tools)
    assert len(own) == 4
    assert own[0]["content"].startswith("Be short.\n\nYou may call functions.")
    assert describe_tools(messages[:1], []) == messages[:1]


def test_a_call_can_be_demanded() -> None:
    place = {"type": "object", "properties": {"city": {"$ref": "#/$defs/city"}}, "required": ["city"]}
    place |= {"additionalProperties": False, "$defs": {"city": {"enum": ["Paris", "Rome"]}}}
    loose = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    grammar = call_grammar([Tool(name="weather", parameters=place), Tool(name="add", parameters=loose)])
    tokenizer = Tokenizer(demo_path())
    constraints = Constraints(tokenizer, vocab_size=tokenizer.vocab_size, eos=[tokenizer.eos_token_id or 0])
    names = set()
    for seed in range(12):
        sampler = Sampler(SamplingOptions(seed=seed, temperature=1.0), [], constraints.begin(grammar))
        random, tokens = np.random.default_rng(seed), []
        for _ in range(400):
            token = sampler.draw(random.normal(0, 2, tokenizer.vocab_size).astype(np.float32))
            if token == tokenizer.eos_token_id:
                text, (call,) = read([tokenizer.decode(tokens)])
                assert not text
                names.add(call.name)
                assert call.name == "add" or json.loads(call.arguments)["city"] in ("Paris", "Rome")
                break
            tokens.append(token)
    assert names == {"weather", "add"}
    with pytest.raises(RequestError, match=r"parameters of add cannot be enforced: .*uniqueItems"):
        call_grammar([Tool(name="add", parameters=loose, strict=True)])
