"""One generation: its tokens become pieces of text, its end is detected, and its usage counted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from runtime.backends.decoder import Float32Array
from runtime.text.constraint import Constraint
from runtime.text.sampling import Drawn, SamplingOptions, TokenLogprob, token_logprob
from runtime.text.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "loop", "cancelled"]
Source = Literal["copies", "head", "model"]
"""What drafts: the text itself, the block that predicts further tokens, or the low-bit weights."""
CONTEXT_TOKENS = 8
"""Prompt tokens shown to the detokenizer before the answer, so that a continuation keeps its leading space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Speculation statistics of an answer or a measurement."""

    gamma: int
    """Tokens that the model drafts per round, at the end of the answer; 0: drafting did not pay, so decoding continued
    without. If the model drafts none, the average number of copied tokens per round."""
    acceptance_rate: float
    """Accepted share of the drafted tokens; 0 if none was drafted."""
    tokens_per_verify: float
    """Tokens per round, including the one that verification adds; 0 if there was no round."""
    rounds: int
    drafted: int
    """Tokens drafted."""
    plain: int
    """Tokens decoded one by one between rounds."""
    source: Source | None = None
    """What drafted most of the tokens; None: none were drafted."""


class Counts:
    def __init__(self) -> None:
        self.rounds = self.drafted = self.accepted = self.plain = 0
        self._sources: Counter[Source] = Counter()

    def add(self, drafted: int, accepted: int, source: Source) -> None:
        """Record a round; a round without drafted tokens is a plain step."""
        self._sources[source] += drafted
        self.rounds += drafted > 0
        self.plain += drafted == 0
        self.drafted += drafted
        self.accepted += accepted

    def result(self, gamma: int) -> Speculation:
        """The statistics, with the next gamma."""
        return Speculation(
            gamma=gamma,
            acceptance_rate=self.accepted / self.drafted if self.drafted else 0.0,
            tokens_per_verify=(self.accepted + self.rounds) / self.rounds if self.rounds else 0.0,
            rounds=self.rounds,
            drafted=self.drafted,
            plain=self.plain,
            source=self._sources.most_common(1)[0][0] if self.drafted else None,
        )


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
    """In the last piece only: `stop` (end of sequence or stop string), `length`, `loop`, or `cancelled`."""
    usage: Usage | None = None
    """In the last piece only."""
    stop: str | None = None
    """The stop string that ended the answer, in the last piece."""


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
        self._latest = time.perf_counter()
        if self.completion == 0:
            self._first = self._latest
        self.completion += 1

    def last(self, finish: FinishReason, text: str, stop: str | None) -> Piece:
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
        return Piece(text=text, finish_reason=finish, usage=usage, stop=stop)


class StopMatcher:
    """Passes text through, holds back a possible beginning of a stop string, and ends at the first complete one.

    The first stop string is the one whose match begins first; the text after it is dropped. The output does not depend
    on how the text is split.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Watch for stop strings; empty ones are ignored."""
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found: str | None = None
        """The stop string that was found; all further text is dropped."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.found is not None

    def add(self, text: str) -> str:
        """Add text, and return what can be emitted."""
        if self.stopped:
            return ""
        self._held += text
        begin, stop = self._first()
        waiting = self._earliest_beginning()
        if stop and begin <= waiting:
            given, self._held, self.found = self._held[:begin], "", stop
            return given
        given, self._held = self._held[:waiting], self._held[waiting:]
        return given

    def flush(self) -> str:
        """The held-back text, once the input has ended without a stop string."""
        begin, stop = self._first()
        given, self._held = self._held[:begin] if stop else self._held, ""
        self.found = self.found or stop or None
        return given

    def _first(self) -> tuple[int, str]:
        """Position of the first stop string in the held-back text, and which it is; empty if there is none."""
        return min(((at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0), default=(-1, ""))

    def _earliest_beginning(self) -> int:
        """Position of a possible beginning of a stop string in the held-back text; its length if there is none."""
        longest = max((len(stop) for stop in self._stops), default=1)
        for at in range(max(0, len(self._held) - longest + 1), len(self._held)):
            tail = self._held[at:]
            if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                return at
        return len(self._held)


class LoopWatch:
    """Notices an answer that only repeats itself: its last tokens are one passage of up to 256, five times over.

    Short passages come more often before that, for 160 tokens: rulers, tables and rows of zeros are shorter.
    """

    _LONGEST = 256
    _LEAST = np.maximum(160, 4 * np.arange(1, _LONGEST + 1))
    """By length of the passage, tokens that equal those one passage before."""

    def __init__(self) -> None:
        self._latest = np.full(self._LONGEST, -1, np.int64)  # the last tokens, the latest first
        self._alike = np.zeros(self._LONGEST, np.int64)

    def add(self, token: int) -> bool:
        """Add a token. Returns whether the answer is in a loop."""
        self._alike = (self._alike + 1) * (self._latest == token)
        self._latest[1:] = self._latest[:-1]
        self._latest[0] = token
        return bool((self._alike >= self._LEAST).any())


Receive = Callable[[Piece | Exception], None]
"""Receives the pieces of an answer. The last item has a `finish_reason`, or is the error that ended the answer."""


class Answer:
    """One answer. Its receiver always gets exactly one last item.

    Args:
        run: The generation.
        tokenizer: Decodes tokens.
        ends: Tokens that end an answer.
        limit: Most tokens of the answer.
        receive: Gets the pieces.
    """

    def __init__(self, run: Run, tokenizer: Tokenizer, ends: Collection[int], limit: int, receive: Receive) -> None:
        self.run, self.limit, self._receive = run, limit, receive
        self._tokenizer, self._ends = tokenizer, ends
        self._stops = StopMatcher(run.options.stop)
        self._loops = LoopWatch() if run.options.end_loops else None
        self._blank = run.trim  # whether leading white space is still to be stripped
        self._text = tokenizer.detokenizer(run.prompt[-CONTEXT_TOKENS:])
        self.ended = False
        """Whether the last item was delivered."""

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.limit - self.run.completion

    def take(self, token: int, own: Float32Array | Drawn) -> bool:
        """Take the next token.

        Args:
            token: The token.
            own: The logits float32 [V] that it was sampled from, or the decoder's own sample.

        Returns:
            Whether to continue; otherwise the answer has ended.
        """
        self.run.count()
        if token in self._ends:
            self.end("stop")
            return False
        given = self._stops.add(self._text.add(token))
        if self._blank:
            given, self._blank = given.lstrip(), not given.strip()
        logprob = token_logprob(own, token, self.run.options.logprobs, self._tokenizer.piece)
        self._receive(Piece(text=given, token=token, logprob=logprob))
        looped = self._loops is not None and self._loops.add(token)
        if not self._stops.stopped and self.remaining and not looped:
            return True
        self.end("stop" if self._stops.stopped else "loop" if looped else "length")
        return False

    def end(self, finish: FinishReason) -> None:
        """Deliver the held-back text and the finish reason. Does nothing if the answer has ended."""
        if self.ended:
            return
        rest = self._stops.add(self._text.flush()) + self._stops.flush()
        finish = "stop" if self._stops.stopped and finish in ("length", "loop") else finish
        self._last(self.run.last(finish, rest.lstrip() if self._blank else rest, self._stops.found))

    def fail(self, error: Exception) -> None:
        """End with an error. Does nothing if the answer has ended."""
        if not self.ended:
            self._last(error)

    def _last(self, item: Piece | Exception) -> None:
        self.ended = True
        self._receive(item)
