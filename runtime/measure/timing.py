"""How much slower a loaded model decodes with error compensation than without: the number that a budget limits.

The two are timed in turns, some tokens each, so that whatever else the machine does meets both alike. Of the tokens of
a turn the fastest tenth counts, for what disturbs a token only makes it slower; of the turns' ratios the median, for a
clock frequency that changes meets two turns that stand together. That repeats to half a percent of slowdown on a quiet
machine and stays near on a busy one. The context is short, where compensation weighs most: attention over a long one
costs the same with and without it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from models.progress import never_cancelled
from runtime.backends.decoder import Decoder, Step
from runtime.errors import Cancelled

_FIRST = 8
"""Position of the first timed token; those before it are a prompt."""
_TURN_S = 0.012
"""Seconds of one turn, where a token takes less than that."""
_LONGEST_TURN = 48
_LEAST_ROUNDS, _MOST_ROUNDS = 25, 201
UNDISTURBED = 0.1
"""The quantile of times that counts as undisturbed."""


def undisturbed(seconds: Sequence[float]) -> float:
    """What the fastest tenth of some measurements takes at most, in seconds; the fastest of ten or fewer."""
    return sorted(seconds)[max(0, math.ceil(UNDISTURBED * len(seconds)) - 1)]


class DecodeTimer:
    """Times decoding with and without compensation. Overwrites the first positions of slot 0.

    Args:
        decoder: A loaded model.
        seconds: How long one measurement may take; at least 25 rounds are made.
        cancelled: Asked between rounds.
    """

    def __init__(
        self, decoder: Decoder, *, seconds: float = 1.5, cancelled: Callable[[], bool] = never_cancelled
    ) -> None:
        self._decoder = decoder
        self._seconds = seconds
        self._cancelled = cancelled
        self._turn = 0

    def slowdown(self, k_chunk: Mapping[str, int] | int, n_tb: Mapping[str, int] | None = None) -> float:
        """Slowdown of decoding in percent of the time without compensation; below 0 where noise says so.

        The decoder's k_chunk is what it was before, afterwards.

        Args:
            k_chunk: As in `DecoderOptions`.
            n_tb: As in `DecoderOptions`.

        Raises:
            RequestError: k_chunk is not acceptable.
            Cancelled: `cancelled` said so.
        """
        before = self._decoder.options
        try:
            with self._decoder.session():
                return 100 * (self._ratio(k_chunk, n_tb) - 1)
        finally:
            self._decoder.set_k_chunk(before.k_chunk, before.n_tb)

    def _ratio(self, k_chunk: Mapping[str, int] | int, n_tb: Mapping[str, int] | None) -> float:
        self._decoder.set_k_chunk(k_chunk, n_tb)
        self._warm()
        self._decoder.set_k_chunk(0)
        self._warm()
        ratios: list[float] = []
        end = time.perf_counter() + self._seconds
        while len(ratios) < _LEAST_ROUNDS or (time.perf_counter() < end and len(ratios) < _MOST_ROUNDS):
            if self._cancelled():
                raise Cancelled("the measurement was stopped")
            times = {}
            for compensated in (False, True) if len(ratios) % 2 else (True, False):
                self._decoder.set_k_chunk(k_chunk if compensated else 0, n_tb)
                times[compensated] = undisturbed(self._tokens(self._turn))
            ratios.append(times[True] / times[False])
        return statistics.median(ratios)

    def _warm(self) -> None:
        """Fill the positions before the first timed one, and find how many tokens a turn takes."""
        for position in range(_FIRST):
            self._step(position)
        if not self._turn:
            each = min(self._tokens(2))
            room = self._decoder.options.context - _FIRST
            self._turn = max(1, min(int(_TURN_S / each), _LONGEST_TURN, room))

    def _tokens(self, count: int) -> list[float]:
        """Seconds of each of `count` tokens."""
        seconds = []
        for position in range(_FIRST, _FIRST + count):
            began = time.perf_counter()
            self._step(position)
            seconds.append(time.perf_counter() - began)
        return seconds

    def _step(self, position: int) -> None:
        token = (7919 * position + 17) % self._decoder.spec.vocab_size
        self._decoder.forward(Step.of([token], position))
