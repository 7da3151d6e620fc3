"""What of a conversation a model still reads, when it grows longer than the context.

The oldest messages are left out first, down to half of the context at once: the cache of what is kept can then be used
again for many turns, which it could not be if every turn left out a little more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.conversation import Message

TOKENS_PER_CHARACTER = 0.4
"""Before anything was counted. Most text has fewer; too many are better than too few."""
TOKENS_PER_MESSAGE = 8
"""What a chat template writes around a message, about."""
ANSWER_SHARE = 0.25
"""Part of the context that is kept free for an answer, at most."""
KEPT_SHARE = 0.5
"""Part of the context that is filled after something was left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What a model is given of a path."""

    first: int
    """Index of the first message that it is given."""
    tokens: int
    """What that comes to, estimated."""


def fit(path: Sequence[Message], context: int, *, first: int = 0, answer: int | None = None, system: str = "") -> Fit:
    """Choose what a model is given.

    Args:
        path: the messages up to the prompt that is to be answered.
        context: tokens that fit.
        first: index of the first message that it was given the last time.
        answer: longest answer in tokens, where one is set.
        system: the system prompt.

    Returns:
        The choice. It always holds the last message that a person wrote, whether that fits or not.
    """
    rate = rate_of(path)
    costs = [message_tokens(message, rate) for message in path]
    fixed = len(system) * rate + (TOKENS_PER_MESSAGE if system else 0)
    free = context - min(ANSWER_SHARE * context, answer or context)
    if fixed + sum(costs[first:]) > free:
        first = _later(path, first)
        while first < len(path) - 1 and fixed + sum(costs[first:]) > KEPT_SHARE * context:
            later = _later(path, first)
            if later == first:
                break
            first = later
    return Fit(first=first, tokens=round(fixed + sum(costs[first:])))


def later(path: Sequence[Message], first: int) -> int | None:
    """The next place at which a path can be cut: the message of a person; None where there is none."""
    found = _later(path, first)
    return None if found == first else found


def rate_of(path: Sequence[Message]) -> float:
    """Tokens of a character of this conversation, as the runtime last counted them all."""
    characters, rate = 0, TOKENS_PER_CHARACTER
    for message in path:
        characters += len(message.text)
        counted = message.statistics
        if counted is not None and counted.context_used and not counted.left_out and characters:
            rate = counted.context_used / characters
    return rate


def message_tokens(message: Message, rate: float) -> float:
    """Tokens of a message, estimated."""
    return len(message.text) * rate + TOKENS_PER_MESSAGE


def _later(path: Sequence[Message], first: int) -> int:
    """Index of the next message of a person after `first`; `first` where there is none."""
    return next((at for at in range(first + 1, len(path)) if path[at].role == "user"), first)
