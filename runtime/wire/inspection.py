"""Records of token inspection: `POST /runtime/inspect`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from runtime.wire.codec import OneOf, Within

MAX_MESSAGES = 16_384
"""Most messages of a conversation: more than fit in any context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedMessage:
    """A message of the conversation."""

    role: Annotated[str, OneOf(("system", "user", "assistant"))]
    """Role of the author."""
    content: str
    """The text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectRequest:
    """`POST /runtime/inspect`: the answer to re-read token by token."""

    model: Annotated[str, Within(1, 300)]
    """The model to read it with; loaded first if necessary."""
    messages: Annotated[Sequence[InspectedMessage], Within(0, MAX_MESSAGES)]
    """The messages before the answer."""
    answer: Annotated[str, Within(1)]
    """The answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A candidate token."""

    text: str
    """The token on its own."""
    logit: float | None
    """Its logit; None: far from the best."""
    probability: float | None
    """Its probability, before temperature, penalties and filters."""
    base_logit: float | None = None
    """The logit without compensation; None: far from the best, or nothing is compensated."""
    base_probability: float | None = None
    """Of that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedToken:
    """A token of the answer, and its alternatives."""

    text: str
    """The text it adds to the answer; empty if a character needs the next token too."""
    candidates: Sequence[Candidate]
    """The most likely tokens and the token itself, most likely first."""
    chosen: int
    """Index of the token among the candidates."""
    base_best: int | None = None
    """Index of the most likely one without compensation; None if nothing is compensated."""
    draft: int | None = None
    """Index of the drafted one; None if nothing is drafted, as for the first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The tokens of an answer."""

    tokens: Sequence[InspectedToken]
    """In their order."""
    model: str
    """The model that read them."""
    compensated: bool
    """Whether they were read both with and without compensation."""
    complete: bool = True
    """Whether these are all tokens of the answer, rather than its beginning."""
    phase: Literal["done"] = "done"
    """Distinguishes the result from progress reports."""
