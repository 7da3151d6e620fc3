"""Results of a generation: pieces of text, and at the end its usage."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from runtime.engine.speculation.counts import Speculation
from runtime.text.constraint import Constraint
from runtime.text.sampling import SamplingOptions, TokenLogprob

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts and timings of a generation."""

    prompt_tokens: int
    """Tokens of the prompt."""
    cached_tokens: int
    """Prompt tokens that were already in the cache."""
    completion_tokens: int
    """Tokens generated, including the end-of-sequence token."""
    ttft_s: float
    """Seconds from the request to the first token, including time in the queue; 0 if no token was generated."""
    prefill_s: float
    """Seconds spent on the prompt."""
    decode_tokens_per_s: float
    """Tokens per second after the first; 0 where fewer than two tokens were generated."""

    speculation: Speculation | None = None
    """Speculation statistics; None if nothing was drafted and the model was not asked to draft."""

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second, not counting cached ones."""
        return (self.prompt_tokens - self.cached_tokens) / self.prefill_s if self.prefill_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A piece of an answer: usually a token, and the text that it completed."""

    text: str
    """Printable text, maybe empty: incomplete characters and possible stop strings are held back."""
    token: int | None = None
    """The token of this step; None in the last piece."""
    logprob: TokenLogprob | None = None
    """The token's log-probability, if requested."""
    finish_reason: FinishReason | None = None
    """In the last piece only: `stop` (end of sequence or stop string), `length`, or `cancelled`."""
    usage: Usage | None = None
    """In the last piece only."""


class Run:
    """Counts and timings of one generation."""

    def __init__(
        self, *, prompt: list[int], options: SamplingOptions, trim: bool, chat: str | None, begin: float
    ) -> None:
        self.prompt = prompt
        self.chat = chat
        self.options = options
        self.trim = trim
        self.completion = 0
        self.slot = 0
        self.cached = 0
        self.prefill_s = 0.0
        self.constraint: Constraint | None = None
        self.speculation: Callable[[], Speculation | None] = lambda: None
        self._begin = begin
        self._first = begin
        self._latest = begin

    def count(self) -> None:
        """Count a generated token."""
        self._latest = time.perf_counter()
        if self.completion == 0:
            self._first = self._latest
        self.completion += 1

    def last(self, finish: FinishReason, text: str) -> Piece:
        """The last piece of the generation."""
        seconds = self._latest - self._first
        usage = Usage(
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached,
            completion_tokens=self.completion,
            ttft_s=self._first - self._begin,
            prefill_s=self.prefill_s,
            decode_tokens_per_s=(self.completion - 1) / seconds if seconds > 0 else 0.0,
            speculation=self.speculation(),
        )
        return Piece(text=text, finish_reason=finish, usage=usage)
