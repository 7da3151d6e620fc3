"""Answers with channels, as gpt-oss writes them, become the text that other models write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Fast

from runtime.text.channels import CHANNEL_MARKS
from runtime.text.reasoning import split_reasoning
from runtime.text.tokenizer import Detokenizer, Tokenizer

MARKS = (*CHANNEL_MARKS, "<|constrain|>", "<|call|>", "<|return|>")


def folder(path: Path, marks: tuple[str, ...] = MARKS) -> Path:
    """A byte-level tokenizer without merges, with special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Fast(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
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


@pytest.mark.parametrize("case", CASES)
def test_channels_become_tags(case: str, tmp_path: Path) -> None:
    written, expected = CASES[case]
    tokenizer = Tokenizer(folder(tmp_path))
    reader = tokenizer.detokenizer(tokenizer.encode("<|start|>assistant", special=False))
    assert "".join(map(reader.add, tokenizer.encode(written, special=False))) + reader.flush() == expected
    thought, _ = split_reasoning(expected)
    assert bool(thought) == expected.startswith("<think>")


def test_other_tokenizers_have_none(tmp_path: Path) -> None:
    tokenizer = Tokenizer(folder(tmp_path, ("<|start|>", "<|end|>")))
    assert isinstance(tokenizer.detokenizer(), Detokenizer)
