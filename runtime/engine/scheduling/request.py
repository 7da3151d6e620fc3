"""One request in the scheduler's hands: from its prompt to its last token, step by step."""

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
        answer: Takes the tokens.
        cancelled: Asked between steps; may be asked in any thread.
        rounds: Makes what decodes in a slot.
    """

    def __init__(self, answer: Answer, cancelled: Callable[[], bool], rounds: Callable[[int], Rounds]) -> None:
        self.answer, self.run, self.cancelled = answer, answer.run, cancelled
        self._rounds = rounds
        self._work: Work[None] | None = None
        self.rows: Rows | None = None
        """What it needs next; None before it has begun, and when it is done."""
        self.forgotten = False
        """Whether what the cache holds of it is to be dropped at the end."""

    @property
    def end(self) -> int:
        """Tokens that prompt and answer have together, at most."""
        return len(self.run.prompt) + self.answer.limit

    def begin(self, slot: int, cached: int, held: list[int], chunk: Callable[[int, int], int]) -> None:
        """Take a slot.

        Args:
            slot: The slot; it holds the first `cached` tokens of the prompt.
            cached: Tokens.
            held: The slot's tokens; what has entered the cache is appended.
            chunk: Says how many rows of a prompt to run next, given how many have been run and how many are left.
        """
        self.run.slot, self.run.cached = slot, cached
        self._work = self._steps(held, chunk)
        self.rows = next(self._work)

    def go_on(self, found: Any) -> None:
        """Take what the rows that were needed gave; see `runtime.engine.rows.Work`."""
        assert self._work is not None
        try:
            self.rows = self._work.send(found)
        except StopIteration:
            self.rows = None

    def _steps(self, held: list[int], chunk: Callable[[int, int], int]) -> Work[None]:
        """The prompt behind what is cached, then rounds of decoding, of one token each where nothing is drafted."""
        run, answer, began, start = self.run, self.answer, time.perf_counter(), self.run.cached
        while start < len(run.prompt):
            tokens = run.prompt[start : start + chunk(start - run.cached, len(run.prompt) - start)]
            last = start + len(tokens) == len(run.prompt)
            logits = yield Rows(slot=run.slot, start=start, tokens=tokens, wanted=int(last), kind="prompt")
            held += tokens
            start += len(tokens)
        run.prefill_s = time.perf_counter() - began
        yield from self._rounds(run.slot).decode(logits[0], answer.take, lambda: answer.remaining)
