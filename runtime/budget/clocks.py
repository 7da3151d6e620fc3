"""Clocks: the timers of a loaded model for the tuner, with comparable readings.

Absolute times drift: a tuning that resumes tomorrow runs at another clock frequency. So a reading with compensation is
stored as its ratio to the plain product, timed together with it, and the plain time is stored once.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.backends import backend
from runtime.backends.decoder import Decoder

if TYPE_CHECKING:
    from tuner.timer import Timer

READING_S, READINGS = 0.013, 3
"""Time limit of one reading of a layer type, and readings of a point, of which the median counts; a large model's take
longer, since each needs a few passes."""
DECODING_S = 0.3
"""Time limit of one comparison of decoding with and without compensation, for a small model."""
NOISE_PERCENT = 2.0
"""A slowdown this far, plus a quarter of the allowed one, from the limit is not measured again. A more negative one is:
something else slowed down the plain decoding."""
_TURN_S = 0.006
"""Duration of a turn of a reading for refining."""
Slowdown = Callable[[Mapping[str, int], Mapping[str, int]], float]
"""Measured slowdown of decoding in percent, for k_chunk and n_tb."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Timers of a loaded model."""

    layers: Timer
    """Times single layers."""
    slowdown: Slowdown
    """Times whole decoding steps with compensation against those without."""


def clocks(decoder: Decoder, cancelled: Callable[[], bool]) -> Clocks:
    """The clocks of a loaded model. They overwrite slot 0 of its cache.

    Raises:
        BackendError: this backend has no timer.
    """
    from runtime.measure.timing import DecodeTimer

    timer = backend(decoder.backend).timer(decoder, seconds=READING_S)
    return Clocks(layers=timer, slowdown=DecodeTimer(decoder, seconds=DECODING_S, cancelled=cancelled).slowdown)


def refined_slowdown(decoder: Decoder, cancelled: Callable[[], bool]) -> Slowdown:
    """Readings of whole steps for refining: shorter turns, and so more of them. They overwrite slot 0 of the cache."""
    from runtime.measure.timing import DecodeTimer

    return DecodeTimer(decoder, seconds=DECODING_S, turn=_TURN_S, cancelled=cancelled).slowdown


class Ratios:
    """A timer whose readings with compensation are ratios to the plain product; those without are seconds."""

    def __init__(self, timer: Timer) -> None:
        """Wrap a clock."""
        self._timer = timer
        self._plain: dict[str, float] = {}
        self.measured = timer.measured

    def seconds(self, kind: str, n_tb: int, k_chunk: int) -> float:
        """See `tuner.timer.Timer`."""
        if kind not in self._plain:
            self._plain[kind] = self._timer.seconds(kind, 0, 0)
        if k_chunk == 0:
            return self._plain[kind]
        return self._timer.seconds(kind, n_tb, k_chunk) / self._plain[kind]


class Readings:
    """A timer that scales the readings of `Ratios` by one plain time, remembers them, and reports each new one."""

    def __init__(self, ratios: Timer, tell: Callable[[str, int], None]) -> None:
        """Wrap a timer.

        Args:
            ratios: `Ratios`, or a timer that stores its readings.
            tell: Called with layer type and k_chunk before a reading.
        """
        self._ratios = ratios
        self._tell = tell
        self._known: dict[tuple[str, int, int], float] = {}
        self.measured = ratios.measured

    def seconds(self, kind: str, n_tb: int, k_chunk: int) -> float:
        """See `tuner.timer.Timer`. Each point is the median of `READINGS`, and read only when it is first asked for."""
        point = (kind, n_tb if k_chunk else 0, k_chunk)
        if point not in self._known:
            self._tell(kind, k_chunk)
            count = READINGS if k_chunk and self.measured else 1
            self._known[point] = statistics.median([self._ratios.seconds(*point) for _ in range(count)])
        ratio = self._known[point]
        return ratio * self.seconds(kind, 0, 0) if k_chunk else ratio

    def curve(self, kind: str, n_tb: int) -> tuple[tuple[int, float], ...]:
        """(k_chunk, time relative to the plain time) of all readings so far, by k_chunk; begins with (0, 1)."""
        found = {
            k_chunk: ratio for (own, blocks, k_chunk), ratio in self._known.items() if (own, blocks) == (kind, n_tb)
        }
        return tuple(sorted({**found, 0: 1.0}.items()))


class Decided:
    """Slowdown measurements, cached once a configuration is clearly within or beyond the limit."""

    def __init__(self, slowdown: Slowdown, allowed: float, tell: Callable[[Mapping[str, int]], None]) -> None:
        """Wrap a measurement.

        Args:
            slowdown: The measurement.
            allowed: The limit in percent.
            tell: Called with k_chunk before a measurement.
        """
        self._slowdown = slowdown
        self._allowed = allowed
        self._tell = tell
        self._clear: tuple[dict[str, int], float] | None = None

    def __call__(self, k_chunk: Mapping[str, int], n_tb: Mapping[str, int]) -> float:
        """Slowdown in percent, measured now or earlier with the same k_chunk."""
        if self._clear is not None and self._clear[0] == k_chunk:
            return self._clear[1]
        self._tell(k_chunk)
        found = self._slowdown(k_chunk, n_tb)
        away = abs(found - self._allowed) > NOISE_PERCENT + self._allowed / 4
        if away and found > -NOISE_PERCENT:
            self._clear = (dict(k_chunk), found)
        return found
