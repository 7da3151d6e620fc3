"""Truncation of conversations that exceed the context."""

from __future__ import annotations

import pytest

from app.chat.prompts import ANSWER_SHARE, KEPT_SHARE, fit, rate_of
from app.conversation import Conversation, Message, Statistics

CONTEXT = 1000


def path_of(turns: int, characters: int = 100, *, counted: int | None = None) -> list[Message]:
    """So many prompts and answers, and a prompt at the end."""
    conversation = Conversation()
    for turn in range(turns):
        conversation.add("user", "x" * characters, parent=conversation.head)
        statistics = Statistics(tokens=1, context_used=counted * (turn + 1)) if counted else None
        conversation.add("assistant", "y" * characters, parent=conversation.head, statistics=statistics)
    conversation.add("user", "z" * characters, parent=conversation.head)
    return conversation.path()


def test_all_of_a_short_chat_is_read() -> None:
    assert fit(path_of(3), CONTEXT).first == 0


def test_the_oldest_are_left_out_down_to_half_and_whole_turns_stay() -> None:
    path = path_of(12)
    found = fit(path, CONTEXT)
    assert path[found.first].role == "user"
    assert 0 < found.first < len(path) - 1
    assert found.tokens <= KEPT_SHARE * CONTEXT


def test_what_is_left_out_stays_so_for_many_turns() -> None:
    path = path_of(12)
    first = fit(path, CONTEXT).first
    assert fit(path, CONTEXT, first=first).first == first
    assert fit(path_of(14), CONTEXT, first=first).first == first
    assert fit(path_of(20), CONTEXT, first=first).first > first


def test_the_last_prompt_is_always_given() -> None:
    path = path_of(3, characters=100_000)
    assert fit(path, CONTEXT).first == len(path) - 1


def test_room_is_kept_for_an_answer() -> None:
    path = path_of(7)
    tokens = fit(path, 1_000_000).tokens
    assert fit(path, round(tokens / (1 - ANSWER_SHARE)) + 2).first == 0
    assert fit(path, round(tokens / (1 - ANSWER_SHARE)) - 9).first > 0
    assert fit(path, tokens + 20, answer=10).first == 0


def test_tokens_are_counted_as_the_runtime_counts_them() -> None:
    assert rate_of(path_of(3, counted=50)) == pytest.approx(0.25)
    assert fit(path_of(12, counted=20), CONTEXT).first == 0


def test_a_system_prompt_takes_room() -> None:
    assert fit(path_of(7), CONTEXT).first == 0
    assert fit(path_of(7), CONTEXT, system="s" * 1000).first > 0
