"""Answers in marked parts, as gpt-oss, Gemma 4 and others write them, become the text that other models write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Fast

from runtime.text.channels import APERTUS_MARKS, CHANNEL_MARKS, COHERE_MARKS, PAIRED_MARKS
from runtime.text.reasoning import split_reasoning
from runtime.text.tokenizer import Detokenizer, Tokenizer

MARKS = (*CHANNEL_MARKS, "<|constrain|>", "<|call|>", "<|return|>")


def folder(path: Path, marks: tuple[str, ...] = MARKS, *, special: bool = True) -> Path:
    """A byte-level tokenizer without merges, with special tokens, or others that are whole."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Fast(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    added = [AddedToken(mark, special=special, normalized=False) for mark in marks]
    fast.add_special_tokens(added) if special else fast.add_tokens(added)
    fast.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return path


THOUGHT = "<|channel|>analysis<|message|>Two and two – four.<|end|><|start|>assistant"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
CASES = {
    "answer": ("<|channel|>final<|message|>Four.", "Four."),
    "thought": (THOUGHT + "<|channel|>final<|message|>Four 🙂.", "<think>\nTwo and two – four.\n</think>\n\nFour 🙂."),
    "cut off": ("<|channel|>analysis<|message|>Two and", "<think>\nTwo and"),
    "header cut off": (THOUGHT + "<|channel|>fin", "<think>\nTwo and two – four."),
    "two thoughts": (
        THOUGHT + "<|channel|>analysis<|message|>Sure?<|end|><|start|>assistant<|channel|>final<|message|>4",
        "<think>\nTwo and two – four.\n\nSure?\n</think>\n\n4",
    ),
    "preamble and call": (
        THOUGHT + "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.add <|constrain|>json<|message|>{"a": 2}',
        "<think>\nTwo and two – four.\n</think>\n\nI look.\n\n" + CALL,
    ),
    "recipient first": (
        '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 2}<|end|>',
        CALL,
    ),
    "plain": ("Four.", "Four."),
}


SUM = 'call:add{a:2,of:[<|"|>one, {x}<|"|>,{in:{b:null,c:-1.5}}],why:<|"|>"it\nis"<|"|>}'
ADDED = (
    '{"name": "add", "arguments": {"a": 2, "of": ["one, {x}", {"in": {"b": null, "c": -1.5}}], "why": "\\"it\\nis\\""}}'
)
NO_ARGUMENTS = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
A_WORD = '<tool_call>{"name": "a-b.c", "arguments": {"x": "yes"}}</tool_call>'
PAIRED = {
    "answer": ("Four.", "Four."),
    "thought": ("<|channel>thought\nTwo – four.<channel|>Four 🙂.", "<think>\nTwo – four.\n</think>\n\nFour 🙂."),
    "no thought": ("<|channel>thought\n<channel|>Four.", "Four."),
    "cut off": ("<|channel>thought\nTwo and", "<think>\nTwo and"),
    "header cut off": ("<|channel>thou", ""),
    "call": (f"I add. <|tool_call>{SUM}<tool_call|>", f"I add. <tool_call>{ADDED}</tool_call>"),
    "thought and two calls": (
        "<|channel>thought\nHm.<channel|><|tool_call>call:f{}<tool_call|><|tool_call>call:a-b.c{x:yes}<tool_call|>",
        f"<think>\nHm.\n</think>\n\n{NO_ARGUMENTS}{A_WORD}",
    ),
    "call not ended": ("<|tool_call>call:f{a:1}", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'),
    "call cut off": ('<|tool_call>call:f{a:<|"|>b', 'call:f{a:"b'),
    "no call": ('<|tool_call>f(<|"|>b<|"|>)<tool_call|>', 'f("b")'),
    "too deep": ("<|tool_call>call:f{a:" + "[" * 99 + "<tool_call|>", "call:f{a:" + "[" * 99),
    "quote outside": ('Say <|"|>b<|"|>.', 'Say "b".'),
}


WEATHER = '<tool_call>{"name": "weather", "arguments": {"x": 1}}</tool_call>'
TIME = '<tool_call>{"name": "time", "arguments": {"x": "→"}}</tool_call>'
ACTIONS = """<|START_ACTION|>[
    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"x": 1}},
    {"tool_call_id": "1", "tool_name": "time", "parameters": {"x": "→"}}
]<|END_ACTION|>"""
NO_ACTION = '[{"tool_name": "f", "parameters": 3}]'
COHERE = {
    "answer": ("<|START_RESPONSE|>Four.<|END_RESPONSE|>", "Four."),
    "thought and two calls": (
        f"<|START_THINKING|>I look – twice.<|END_THINKING|>{ACTIONS}",
        f"<think>\nI look – twice.\n</think>\n\n{WEATHER}{TIME}",
    ),
    "thought and answer": (
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>4<|END_RESPONSE|>",
        "<think>\nHm.\n</think>\n\n4",
    ),
    "thought not ended": ("<|START_THINKING|>Hm.<|START_RESPONSE|>4", "<think>\nHm.\n</think>\n\n4"),
    "call not ended": ('<|START_ACTION|>[{"tool_name": "weather", "parameters": {"x": 1}}]', WEATHER),
    "call cut off": ('<|START_ACTION|>[{"tool_name": "weather", "par', '[{"tool_name": "weather", "par'),
    "no call": (f"<|START_ACTION|>{NO_ACTION}<|END_ACTION|>", NO_ACTION),
}
APERTUS = {
    "answer": ("Four.", "Four."),
    "thought and two calls": (
        '<|inner_prefix|>Hm.<|inner_suffix|><|tools_prefix|>[{"weather": {"x": 1}}, {"time": {"x": "→"}}]',
        f"<think>\nHm.\n</think>\n\n{WEATHER}{TIME}",
    ),
    "no thought": ("<|inner_prefix|><|inner_suffix|>4", "4"),
    "call": ('I look. <|tools_prefix|>[{"weather": {"x": 1}}]<|tools_suffix|>', f"I look. {WEATHER}"),
    "no call": ('<|tools_prefix|>[{"a": 1, "b": {}}]<|tools_suffix|>', '[{"a": 1, "b": {}}]'),
}
WRITTEN = {MARKS: CASES, PAIRED_MARKS: PAIRED, COHERE_MARKS: COHERE, APERTUS_MARKS: APERTUS}


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    ("marks", "begin", "case"),
    [(marks, "<|start|>assistant" if marks == MARKS else "", case) for marks, of in WRITTEN.items() for case in of],
)
def test_channels_and_marks_that_open_and_close_become_tags(
    marks: tuple[str, ...], begin: str, case: str, special: bool, tmp_path: Path
) -> None:
    """Whether their marks are special tokens, as in folders, or not, as in GGUF files."""
    written, expected = WRITTEN[marks][case]
    tokenizer = Tokenizer(folder(tmp_path, marks, special=special))
    reader = tokenizer.detokenizer(tokenizer.encode(begin, special=False))
    assert "".join(map(reader.add, tokenizer.encode(written, special=False))) + reader.flush() == expected
    thought, _ = split_reasoning(expected)
    assert bool(thought) == expected.startswith("<think>")


def test_reasoning_that_a_prompt_begins_is_reasoning(tmp_path: Path) -> None:
    tokenizer = Tokenizer(folder(tmp_path, COHERE_MARKS))
    reader = tokenizer.detokenizer(tokenizer.encode("Hi<|START_THINKING|>", special=False))
    written = tokenizer.encode("Hm.<|END_THINKING|><|START_RESPONSE|>4", special=False)
    assert "".join(map(reader.add, written)) + reader.flush() == "<think>\nHm.\n</think>\n\n4"


def test_other_tokenizers_have_none(tmp_path: Path) -> None:
    tokenizer = Tokenizer(folder(tmp_path, ("<|start|>", "<|end|>")))
    assert isinstance(tokenizer.detokenizer(), Detokenizer)
