"""What the service is asked for, and what it answers; HTTP has no part in them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.engine.engine import Engine
from runtime.text.sampling import Float32Array, SamplingOptions, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """How a request wants its model to be loaded."""

    seconds: float | None = None
    """Seconds without a request after which it is unloaded, `math.inf`: never; None: as the server was told."""
    context: int = 0
    """Tokens of context that it has at least, within what the model knows."""


KEPT = Keep()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A prompt and how to answer it."""

    model: str
    """The model that must answer; loaded first if necessary."""
    prompt: Callable[[Engine], Sequence[int]]
    """Produces the prompt's tokens; called in the engine's thread."""
    options: SamplingOptions
    left_open: Collection[str] = ()
    """Those that the client left to the model's maker, where one recommends something."""
    name: str | None = None
    """The client's name of the conversation, for `Service.forget`."""
    trim: bool = False
    """Whether to strip leading white space from the answer."""
    field: str = "messages"
    """The request's name for its prompt, for errors."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The conversation, if the prompt is one: a call that does not fit its schema is asked for again."""
    variables: Mapping[str, Any] | None = None
    """Further variables of the chat template."""
    keep: Keep = KEPT
    """How the model is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """The embedding of one text."""

    model: str
    """The model that made it."""
    tokens: int
    """Tokens of the text."""
    vector: Float32Array
    """[C], of length 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The tokens of one prompt, and those behind it."""

    model: str
    """The model that scored it."""
    prompt_tokens: int
    tokens: Sequence[TokenLogprob]
    """See `Engine.score`."""
    text: str
