"""Truncation of a conversation that grows longer than the context.

The oldest messages are dropped first, down to half of the context at once. The cache of the rest then stays valid for
many turns, which it would not if every turn dropped a little more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.conversation import Message

TOKENS_PER_CHARACTER = 0.4
"""Assumed tokens per character before anything was counted. Most text has fewer; too many is the safer guess."""
TOKENS_PER_MESSAGE = 8
"""Approximate number of tokens that a chat template adds to a message."""
ANSWER_SHARE = 0.25
"""Maximum share of the context that is reserved for the answer."""
USUAL_CONTEXT = 4096
"""Tokens of context that are assumed where no model is loaded, or a server does not report it."""
KEPT_SHARE = 0.5
"""Share of the context that is filled after messages were dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The part of a path that the model sees."""

    first: int
    """Index of the first message that it sees."""
    tokens: int
    """Estimated number of tokens."""


def fit(path: Sequence[Message], context: int, *, first: int = 0, answer: int | None = None, system: str = "") -> Fit:
    """Choose the messages that the model sees.

    Args:
        path: the messages up to the prompt to answer.
        context: size of the context in tokens.
        first: index of the first message that it saw last time.
        answer: maximum length of the answer in tokens, if set.
        system: the system prompt, and as many characters as the descriptions of tools have.

    Returns:
        The choice. It always contains the user's last message, whether that fits or not.
    """
    rate = rate_of(path, len(system))
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
    """Index of the next user message, where a path can be cut; None if there is none."""
    found = _later(path, first)
    return None if found == first else found


def rate_of(path: Sequence[Message], fixed: int = 0, usual: float = TOKENS_PER_CHARACTER) -> float:
    """Tokens per character of this conversation, by the runtime's last count.

    Args:
        path: its messages.
        fixed: characters that every prompt holds besides: the system prompt, and what describes tools.
        usual: what to assume before anything was counted.
    """
    characters, rate = fixed, usual
    for message in path:
        characters += message.length
        counted = message.statistics
        if counted is not None and counted.context_used and not counted.left_out and characters:
            rate = counted.context_used / characters
    return rate


def message_tokens(message: Message, rate: float) -> float:
    """Estimated number of tokens of a message."""
    return message.length * rate + TOKENS_PER_MESSAGE * (1 + len(message.calls))


def _later(path: Sequence[Message], first: int) -> int:
    """Index of the next user message after `first`; `first` if there is none."""
    return next((at for at in range(first + 1, len(path)) if path[at].role == "user"), first)
