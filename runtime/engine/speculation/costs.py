"""What drafts of a model and their verification cost, and how a loaded model begins to speculate."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from models.progress import never_cancelled
from runtime.backends.decoder import Decoder, Step
from runtime.drafting import Drafts
from runtime.engine.speculation.gamma import MOST_SEARCHED, Costs
from runtime.errors import Cancelled, RequestError
from runtime.kv.kinds import KINDS

_FIRST = 8
"""Position of the rows that are timed."""
LEAST_CONTEXT = _FIRST + MOST_SEARCHED + 1
"""Positions that a decoder needs for being timed."""
_REPEATS, _SECONDS = 7, 1.5
"""Rounds of timings, and after how many seconds no further one is begun."""


class Speculating(Protocol):
    """The part of `runtime.engine.engine.Engine` that is needed here."""

    def lent(self, tokens: int = ...) -> AbstractContextManager[Decoder]:
        """The decoder, with room in slot 0."""
        ...

    def speculate(self, gamma: int | Costs | None, *, copied: bool = ...) -> None:
        """Speculate from the next answer on."""
        ...


def start(engine: Speculating, wanted: Drafts, *, cancelled: Callable[[], bool] = never_cancelled) -> None:
    """Let an engine speculate, or no more. To be called again where its compensation changes.

    Args:
        engine: A loaded model.
        wanted: What was asked for. None: drafts are copied alone, as for a `Speculate` where the cache's kind has no
            draft.
        cancelled: Asked between timings.

    Raises:
        RequestError: the context is too short to time steps in.
        Cancelled: `cancelled` said so.
    """
    costs: int | Costs | None = None
    if wanted:
        with engine.lent(LEAST_CONTEXT) as decoder:
            if KINDS[decoder.options.kv].has_draft:
                costs = wanted.gamma or measure_costs(decoder, cancelled=cancelled)
    engine.speculate(costs, copied=wanted is not False)


def measure_costs(
    decoder: Decoder, *, position: int = _FIRST, cancelled: Callable[[], bool] = never_cancelled
) -> Costs:
    """Time a plain step, a drafted one, and verifications, in turns; the fastest of each counts.

    Args:
        decoder: A loaded model; slot 0 is overwritten from the position on.
        position: Of the first row. Those before it are in the cache, or are put there where it is the default.
        cancelled: Asked between timings.

    Raises:
        RequestError: the context is too short.
        Cancelled: `cancelled` said so.
    """
    most = min(MOST_SEARCHED + 1, decoder.options.max_rows)
    if position + most > decoder.options.context or most < 2:
        raise RequestError(
            f"speculation needs a context of {position + most} tokens at least and steps of 2 rows, and this model has "
            f"{decoder.options.context} and {decoder.options.max_rows}: use a longer context, or no speculation"
        )
    rows = range(2, most + 1)
    seconds: dict[int, list[float]] = {count: [] for count in (0, 1, *rows)}
    with decoder.session():
        if position == _FIRST:
            _timed(decoder, 0, _FIRST, prefill=True)
        end = time.perf_counter() + _SECONDS
        for repeat in range(_REPEATS):
            for count in seconds:
                if cancelled():
                    raise Cancelled("the measurement was stopped")
                seconds[count].append(_timed(decoder, position, max(1, count), draft=count == 0))
            if repeat and time.perf_counter() > end:
                break
    fastest = {count: min(times) for count, times in seconds.items()}
    return Costs(plain=fastest[1], draft=fastest[0], verify=[fastest[count] for count in rows])


def _timed(decoder: Decoder, start: int, count: int, *, draft: bool = False, prefill: bool = False) -> float:
    """Seconds of a step of `count` rows from a position on, whose logits are all wanted."""
    positions = np.arange(start, start + count, dtype=np.int32)
    step = Step.of((7919 * positions + 17) % decoder.spec.vocab_size, start, draft=draft, prefill=prefill)
    began = time.perf_counter()
    decoder.forward(step)
    return time.perf_counter() - began
