"""Request: the state of one generation in the scheduler, from its prompt to its last token."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from runtime.engine.rows import Rows, Work
from runtime.engine.scheduling.answer import Answer
from runtime.engine.speculation.rounds import Rounds


class Request:
    """A generation, and the rows that it needs next.

    Args:
        answer: Receives the tokens.
        cancelled: Polled between steps, from any thread.
        rounds: Creates the decoding loop of a slot.
    """

    def __init__(self, answer: Answer, cancelled: Callable[[], bool], rounds: Callable[[int], Rounds]) -> None:
        self.answer, self.run, self.cancelled = answer, answer.run, cancelled
        self._rounds = rounds
        self._work: Work[None] | None = None
        self.rows: Rows | None = None
        """The rows it needs next; None before it begins and after it ends."""
        self.forgotten = False
        """Whether to drop its cache entries at the end."""

    @property
    def end(self) -> int:
        """Most tokens of prompt and answer together."""
        return len(self.run.prompt) + self.answer.limit

    def begin(self, slot: int, cached: int, held: list[int], chunk: Callable[[int, int], int]) -> None:
        """Start in a slot.

        Args:
            slot: The slot; it holds the first `cached` tokens of the prompt.
            cached: Number of prompt tokens in the slot.
            held: The slot's tokens; tokens that enter the cache are appended.
            chunk: Returns how many rows of the prompt to run next, given how many were run and how many are left.
        """
        self.run.slot, self.run.cached = slot, cached
        self._work = self._steps(held, chunk)
        self.rows = next(self._work)

    def go_on(self, found: Any) -> None:
        """Continue with the results of the requested rows; see `runtime.engine.rows.Work`."""
        assert self._work is not None
        try:
            self.rows = self._work.send(found)
        except StopIteration:
            self.rows = None

    def _steps(self, held: list[int], chunk: Callable[[int, int], int]) -> Work[None]:
        """Run the uncached part of the prompt, then rounds of decoding (of one token each without speculation)."""
        run, answer, began, start = self.run, self.answer, time.perf_counter(), self.run.cached
        while start < len(run.prompt):
            tokens = run.prompt[start : start + chunk(start - run.cached, len(run.prompt) - start)]
            last = start + len(tokens) == len(run.prompt)
            logits = yield Rows(slot=run.slot, start=start, tokens=tokens, wanted=int(last), kind="prompt")
            held += tokens
            start += len(tokens)
        run.prefill_s = time.perf_counter() - began
        yield from self._rounds(run.slot).decode(logits[0], answer.take, lambda: answer.remaining)
