"""Decode timer: the slowdown that error compensation causes in a loaded model, which a budget limits.

Decoding with and without compensation is timed in alternating turns of several tokens, so that interference from other
processes affects both. The fastest tenth of a turn's tokens counts, since a disturbance can only slow a token down. The
result is the median of the ratios of adjacent turns, so that changes of the clock frequency cancel. It repeats within
half a percent of slowdown on a quiet machine, and stays close on a busy one. The context is short, where compensation
weighs most: attention over a long context costs the same with and without it.
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
TURN_S = 0.012
"""Duration of a turn in seconds, unless another is asked for."""
_LONGEST_TURN = 48
_MIN_ROUNDS, _MAX_ROUNDS = 25, 201
UNDISTURBED = 0.1
"""Quantile of times that counts as undisturbed."""


def undisturbed(seconds: Sequence[float]) -> float:
    """The time within which the fastest tenth of the measurements lie, in seconds; the minimum of ten or fewer."""
    return sorted(seconds)[max(0, math.ceil(UNDISTURBED * len(seconds)) - 1)]


class DecodeTimer:
    """Times decoding with and without compensation. Overwrites the first positions of slot 0.

    Args:
        decoder: A loaded model.
        seconds: Time limit of a measurement; at least 25 rounds are made.
        turn: Duration of a turn in seconds, for tokens that take less than that.
        cancelled: Polled between tokens.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        seconds: float = 1.5,
        turn: float = TURN_S,
        cancelled: Callable[[], bool] = never_cancelled,
    ) -> None:
        self._decoder = decoder
        self._seconds = seconds
        self._cancelled = cancelled
        self._turn_s, self._turn = turn, 0

    def slowdown(self, k_chunk: Mapping[str, int] | int, n_tb: Mapping[str, int] | None = None) -> float:
        """Slowdown of decoding, in percent of the time without compensation; noise can make it negative.

        Restores the decoder's k_chunk afterwards.

        Raises:
            RequestError: k_chunk is invalid.
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
        while len(ratios) < _MIN_ROUNDS or (time.perf_counter() < end and len(ratios) < _MAX_ROUNDS):
            times = {}
            for compensated in (False, True) if len(ratios) % 2 else (True, False):
                self._decoder.set_k_chunk(k_chunk if compensated else 0, n_tb)
                times[compensated] = undisturbed(self._tokens(self._turn))
            ratios.append(times[True] / times[False])
        return statistics.median(ratios)

    def _warm(self) -> None:
        """Fill the positions before the first timed one, and choose the number of tokens per turn."""
        for position in range(_FIRST):
            self._check()
            self._step(position)
        if not self._turn:
            each = min(self._tokens(2))
            room = self._decoder.options.context - _FIRST
            self._turn = max(1, min(int(self._turn_s / each), _LONGEST_TURN, room))

    def _tokens(self, count: int) -> list[float]:
        """Seconds of each of `count` tokens. States that cannot be cut back to the first one's begin anew."""
        for position in range(self._decoder.cache.reach(0, _FIRST), _FIRST):
            self._step(position)
        seconds = []
        for position in range(_FIRST, _FIRST + count):
            self._check()
            began = time.perf_counter()
            self._step(position)
            seconds.append(time.perf_counter() - began)
        return seconds

    def _check(self) -> None:
        if self._cancelled():
            raise Cancelled("the measurement was stopped")

    def _step(self, position: int) -> None:
        token = (7919 * position + 17) % self._decoder.spec.vocab_size
        self._decoder.forward(Step.of([token], position))
