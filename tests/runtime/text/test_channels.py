"""Answers with channels, as gpt-oss and Gemma 4 write them, become the text that other models write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Fast

from runtime.text.channels import CHANNEL_MARKS, PAIRED_MARKS
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


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    ("marks", "begin", "case"),
    [*((MARKS, "<|start|>assistant", case) for case in CASES), *((PAIRED_MARKS, "", case) for case in PAIRED)],
)
def test_channels_and_marks_that_open_and_close_become_tags(
    marks: tuple[str, ...], begin: str, case: str, special: bool, tmp_path: Path
) -> None:
    """Whether their marks are special tokens, as in folders, or not, as in GGUF files."""
    written, expected = (CASES if begin else PAIRED)[case]
    tokenizer = Tokenizer(folder(tmp_path, marks, special=special))
    reader = tokenizer.detokenizer(tokenizer.encode(begin, special=False))
    assert "".join(map(reader.add, tokenizer.encode(written, special=False))) + reader.flush() == expected
    thought, _ = split_reasoning(expected)
    assert bool(thought) == expected.startswith("<think>")


def test_other_tokenizers_have_none(tmp_path: Path) -> None:
    tokenizer = Tokenizer(folder(tmp_path, ("<|start|>", "<|end|>")))
    assert isinstance(tokenizer.detokenizer(), Detokenizer)
