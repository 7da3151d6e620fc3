"""Answer: turns the tokens of one request into pieces of text, and detects its end."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from runtime.backends.decoder import Float32Array
from runtime.engine.generation import FinishReason, Piece, Run
from runtime.text.sampling import Drawn, token_logprob
from runtime.text.stopping import StopMatcher
from runtime.text.tokenizer import Tokenizer

CONTEXT_TOKENS = 8
"""Prompt tokens shown to the detokenizer before the answer, so that a continuation keeps its leading space."""
Receive = Callable[[Piece | Exception], None]
"""Receives the pieces of an answer. The last item has a `finish_reason`, or is the error that ended the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """The conversion of a model's tokens to text."""

    tokenizer: Tokenizer
    """Decodes tokens."""
    ends: Collection[int]
    """Tokens that end an answer."""


class Answer:
    """One answer. Its receiver always gets exactly one last item.

    Args:
        run: The generation.
        language: The model's.
        limit: Most tokens of the answer.
        receive: Gets the pieces.
    """

    def __init__(self, run: Run, language: Language, limit: int, receive: Receive) -> None:
        self.run, self.limit, self._language, self._receive = run, limit, language, receive
        self._stops = StopMatcher(run.options.stop)
        self._blank = run.trim  # whether leading white space is still to be stripped
        self._text = language.tokenizer.detokenizer(run.prompt[-CONTEXT_TOKENS:])
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
        if token in self._language.ends:
            self.end("stop")
            return False
        given = self._stops.add(self._text.add(token))
        if self._blank:
            given, self._blank = given.lstrip(), not given.strip()
        logprob = token_logprob(own, token, self.run.options.logprobs, self._language.tokenizer.piece)
        self._receive(Piece(text=given, token=token, logprob=logprob))
        if not self._stops.stopped and self.remaining:
            return True
        self.end("stop" if self._stops.stopped else "length")
        return False

    def end(self, finish: FinishReason) -> None:
        """Deliver the held-back text and the finish reason. Does nothing if the answer has ended."""
        if self.ended:
            return
        rest = self._stops.add(self._text.flush()) + self._stops.flush()
        finish = "stop" if self._stops.stopped and finish == "length" else finish
        self._last(self.run.last(finish, rest.lstrip() if self._blank else rest))

    def fail(self, error: Exception) -> None:
        """End with an error. Does nothing if the answer has ended."""
        if not self.ended:
            self._last(error)

    def _last(self, item: Piece | Exception) -> None:
        self.ended = True
        self._receive(item)
