"""Reasoning ends when its budget is used up, however a model marks it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from runtime.text.channels import PAIRED_MARKS
from runtime.text.constraint import Constraint, Float32Array
from runtime.text.reasoning import TAGS
from runtime.text.sampling import Sampler, SamplingOptions
from runtime.text.thought_budget import ThoughtBudget
from runtime.text.tokenizer import Tokenizer
from tests.runtime.text.test_channels import MARKS, folder

GREEDY = SamplingOptions(temperature=0)
HARMONY = "<|channel|>analysis<|message|>abc<|end|><|start|>assistant<|channel|>final<|message|>"


class Call(Constraint):
    """Allows only a number of tokens in a row, as if they were a call."""

    def __init__(self, token: int, count: int) -> None:
        self.token, self.count, self.taken = token, count, list[int]()

    @property
    def free(self) -> bool:
        return len(self.taken) >= self.count

    def masked(self, logits: Float32Array) -> Float32Array:
        return logits if self.free else np.where(np.arange(logits.size) == self.token, logits, np.float32(-np.inf))

    def take(self, token: int) -> None:
        self.taken.append(token)


def answered(
    tokenizer: Tokenizer, budget: int, prompt: str, thought: str, answer: str, inner: Constraint | None = None
) -> str:
    """The tokens of a model that thinks until something else is forced on it, and then answers."""
    asked = tokenizer.encode(prompt, special=False)
    sampler = Sampler(GREEDY, constraint=ThoughtBudget(inner, budget, tokenizer, asked))
    text, wanted = "", tokenizer.encode(thought, special=False)
    while wanted:
        assert len(text) < 300
        logits = np.zeros(tokenizer.vocab_size, np.float32)
        logits[wanted[0]] = 1
        token = sampler.draw(logits)
        text += tokenizer.piece(token)
        if token == wanted[0]:
            del wanted[0]
        elif answer:
            wanted, answer = tokenizer.encode(answer, special=False), ""
    return text


@pytest.mark.parametrize(
    ("marks", "prompt", "begin", "budget", "expected"),
    [
        (TAGS, "", "<think>", 3, "<think>abc\n</think>\n\nyes"),
        (TAGS, "", "\n<think>", 0, "\n<think>\n</think>\n\nyes"),
        (TAGS, "<think>\n", "", 3, "abc\n</think>\n\nyes"),
        (TAGS, "<think>\n", "", 0, "\n</think>\n\nyes"),
        (("<x>",), "", "<think>", 3, "<think>abc\n</think>\n\nyes"),
        (MARKS, "", "<|channel|>analysis<|message|>", 3, f"{HARMONY}yes"),
        (PAIRED_MARKS, "", "<|channel>thought\n", 3, "<|channel>thought\nabcd<channel|>yes"),
    ],
)
def test_a_thought_is_ended(
    tmp_path: Path, marks: tuple[str, ...], prompt: str, begin: str, budget: int, expected: str
) -> None:
    """The tag that begins it does not count. Of Gemma's, the first letter is part of that tag."""
    tokenizer = Tokenizer(folder(tmp_path, marks, special=marks != TAGS))
    assert answered(tokenizer, budget, prompt, begin + "abcdefgh" * 20, "yes") == expected


@pytest.mark.parametrize("text", ["no thoughts", "<think>ab</think>an answer", "a <think>text"])
def test_nothing_else_is(tmp_path: Path, text: str) -> None:
    tokenizer = Tokenizer(folder(tmp_path, TAGS, special=False))
    constraint = ThoughtBudget(None, 3, tokenizer, [1])
    for token in tokenizer.encode(text, special=False):
        assert constraint.free
        assert constraint.allows(token)
        constraint.take(token)
    assert constraint.free


@pytest.mark.parametrize(("budget", "left"), [(5, "abc"), (2, ""), (1, "")])
def test_what_a_continued_thought_has_already_counts(tmp_path: Path, budget: int, left: str) -> None:
    tokenizer = Tokenizer(folder(tmp_path, TAGS, special=False))
    constraint = ThoughtBudget(None, budget, tokenizer, tokenizer.encode("xy", special=False), "<think>\nxy")
    for token in tokenizer.encode(left, special=False):
        assert constraint.free
        constraint.take(token)
    for token in tokenizer.encode("\n</think>\n\n", special=False):
        assert not constraint.free
        assert constraint.allows(token)
        constraint.take(token)
    assert constraint.free


def test_a_call_within_is_finished_first(tmp_path: Path) -> None:
    tokenizer = Tokenizer(folder(tmp_path, TAGS, special=False))
    (letter,) = tokenizer.encode("c", special=False)
    call = Call(letter, 5)
    assert answered(tokenizer, 2, "<think>\n", "a" * 99, "yes", call) == "ccccc\n</think>\n\nyes"
    assert tokenizer.decode(call.taken) == "ccccc\n</think>\n\nyes"
