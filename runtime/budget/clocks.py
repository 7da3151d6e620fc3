"""Clocks: the timers of a loaded model for the tuner, with comparable readings.

Absolute times drift: a tuning that resumes tomorrow runs at another clock frequency. So a time with compensation is
kept as its ratio to that of the plain product, timed beside it, and the plain time is kept once.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Timers of a loaded model."""

    layers: Timer
    """Times single layers."""
    slowdown: Callable[[Mapping[str, int], Mapping[str, int]], float]
    """Times whole decoding steps: their slowdown in percent with a k_chunk and n_tb."""


def clocks(decoder: Decoder, cancelled: Callable[[], bool]) -> Clocks:
    """The clocks of a loaded model. They overwrite slot 0 of its cache.

    Raises:
        BackendError: this backend has no timer.
    """
    from runtime.measure.timing import DecodeTimer

    timer = backend(decoder.backend).timer(decoder, seconds=READING_S)
    return Clocks(layers=timer, slowdown=DecodeTimer(decoder, seconds=DECODING_S, cancelled=cancelled).slowdown)


class LayerTimes:
    """A timer of single layers that reads each point once, as the median of `READINGS`, and keeps it.

    Args:
        timer: The clock.
        times: Points that are known, as `Profile.times`.
        tell: Called with layer type and k_chunk before a point is read.
    """

    def __init__(
        self, timer: Timer, times: Iterable[tuple[str, int, int, float]], tell: Callable[[str, int], None]
    ) -> None:
        self._timer, self._tell = timer, tell
        self._kept = {(kind, n_tb, k_chunk): value for kind, n_tb, k_chunk, value in times}
        self._plain: dict[str, float] = {}
        self.measured = timer.measured

    @property
    def times(self) -> tuple[tuple[str, int, int, float], ...]:
        """All points so far."""
        return tuple((*point, value) for point, value in sorted(self._kept.items()))

    def seconds(self, kind: str, n_tb: int, k_chunk: int) -> float:
        """Time of one product, by one plain time of its type."""
        plain = self._kept.get((kind, 0, 0)) or self._plain_now(kind)
        if not k_chunk:
            return self._kept.setdefault((kind, 0, 0), plain)
        point = (kind, n_tb, k_chunk)
        if point not in self._kept:
            self._tell(kind, k_chunk)
            count = READINGS if self.measured else 1
            read = statistics.median([self._timer.seconds(*point) for _ in range(count)])
            self._kept[point] = read / self._plain_now(kind)
        return plain * self._kept[point]

    def _plain_now(self, kind: str) -> float:
        """The plain time as it is now; `times` may have one of another day."""
        if kind not in self._plain:
            self._plain[kind] = self._timer.seconds(kind, 0, 0)
        return self._plain[kind]
