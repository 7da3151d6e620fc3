"""Costs of drafts and verification, measured when a loaded model starts to speculate."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from models.progress import never_cancelled
from runtime.backends.decoder import Decoder, Step
from runtime.drafting import Drafts
from runtime.engine.speculation.gamma import MAX_SEARCHED, Costs
from runtime.engine.speculation.sensitivity import TOKENS, most_sensitive
from runtime.errors import Cancelled, RequestError
from runtime.kv.kinds import KINDS

_FIRST = 8
"""Position of the timed rows."""
MIN_CONTEXT = _FIRST + MAX_SEARCHED + 1
"""Positions a decoder needs for the timings."""
_REPEATS, _SECONDS = 7, 1.5
"""Rounds of timings, and the time limit in seconds after which no further round begins."""
logger = logging.getLogger(__name__)


class Speculating(Protocol):
    """The parts of `runtime.engine.engine.Engine` used here."""

    def borrow(self, tokens: int = ...) -> AbstractContextManager[Decoder]:
        """Borrow the decoder, with room in slot 0."""
        ...

    def speculate(self, gamma: int | Costs | None, *, copied: bool = ...) -> None:
        """Speculate from the next answer on."""
        ...


def start(
    engine: Speculating,
    wanted: Drafts,
    *,
    text: Callable[[], Sequence[int]] = list,
    cancelled: Callable[[], bool] = never_cancelled,
) -> None:
    """Turn an engine's speculation on or off. Call again whenever its compensation changes.

    Args:
        engine: A loaded model.
        wanted: The request. None: drafts are only copied, as for a `Speculate` with a cache that has no draft.
        text: Gives the tokens on which sensitive layers are found, if there are to be any.
        cancelled: Polled between timings.

    Raises:
        RequestError: the context is too short to time steps in, or text or context to find sensitive layers.
        Cancelled: `cancelled` said so.
    """
    costs: int | Costs | None = None
    if wanted:
        with engine.borrow(TOKENS if wanted.sensitive_layers else MIN_CONTEXT) as decoder:
            if KINDS[decoder.options.kv].has_draft:
                _read_exactly(decoder, wanted.sensitive_layers, text, cancelled)
                costs = wanted.gamma or measure_costs(decoder, cancelled=cancelled)
    engine.speculate(costs, copied=wanted is not False)


def _read_exactly(
    decoder: Decoder, count: int, text: Callable[[], Sequence[int]], cancelled: Callable[[], bool]
) -> None:
    """Let drafts read so many layers as the target does: the most sensitive ones."""
    if len(decoder.options.sensitive_layers) != count:
        layers = most_sensitive(decoder, text() if count else (), count, cancelled=cancelled)
        decoder.set_sensitive_layers(layers)
        logger.info("drafts read the cache of layers %s as the target does", ", ".join(map(str, layers)) or "(none)")


def measure_costs(
    decoder: Decoder, *, position: int = _FIRST, cancelled: Callable[[], bool] = never_cancelled
) -> Costs:
    """Time a plain step, a draft step, and verifications, interleaved; the fastest of each counts.

    Args:
        decoder: A loaded model; slot 0 is overwritten from the position on.
        position: Position of the first row. The tokens before it are in the cache, or are written there if it is the
            default.
        cancelled: Polled between timings.

    Raises:
        RequestError: the context is too short.
        Cancelled: `cancelled` said so.
    """
    most = min(MAX_SEARCHED + 1, decoder.options.max_rows)
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
    """Seconds of a step of `count` rows from a position on, computing all their logits."""
    positions = np.arange(start, start + count, dtype=np.int32)
    step = Step.of((7919 * positions + 17) % decoder.spec.vocab_size, start, draft=draft, prefill=prefill)
    began = time.perf_counter()
    decoder.forward(step)
    return time.perf_counter() - began
