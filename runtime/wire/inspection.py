"""What is told of the tokens of an answer: `POST /runtime/inspect`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from runtime.wire.codec import OneOf, Within

MOST_MESSAGES = 16_384
"""Messages of a conversation, at most: more than fit any context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A message of the conversation."""

    role: Annotated[str, OneOf(("system", "user", "assistant"))]
    """Who said it."""
    content: str
    """What was said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectRequest:
    """`POST /runtime/inspect`: which answer is to be read again, token by token."""

    model: Annotated[str, Within(1, 300)]
    """The model that reads it; loaded first if it is another one."""
    messages: Annotated[Sequence[Said], Within(0, MOST_MESSAGES)]
    """What was said before the answer."""
    answer: Annotated[str, Within(1)]
    """The answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A token that could have come at a place."""

    text: str
    """The token on its own."""
    logit: float | None
    """The model's logit; None: far from the best."""
    probability: float | None
    """Of it, before temperature, penalties and filters."""
    base_logit: float | None = None
    """The logit without compensation; None: far from the best, or nothing is compensated."""
    base_probability: float | None = None
    """Of that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedToken:
    """A token of the answer, and what else could have come in its place."""

    text: str
    """What it adds to the answer; empty where a character needs the next token too."""
    candidates: Sequence[Candidate]
    """The most likely ones, most likely first, the token itself among them."""
    chosen: int
    """Which of the candidates is the token."""
    base_best: int | None = None
    """Which is the most likely one without compensation; None where nothing is compensated."""
    draft: int | None = None
    """Which one a draft gives; None where nothing is drafted, as before the first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The tokens of an answer."""

    tokens: Sequence[InspectedToken]
    """In their order."""
    model: str
    """The model that read them."""
    compensated: bool
    """Whether they were read with and without compensation."""
    complete: bool = True
    """Whether these are all tokens of the answer, not its beginning alone."""
    phase: Literal["done"] = "done"
    """Tells the answer from reports of progress."""
