"""What measures a loaded model for the tuner, and how its readings are kept comparable.

A clock's absolute times drift: a tuning that goes on tomorrow meets another frequency. So what is kept of a reading
with compensation is its ratio to the plain product, timed in the same breath, and the plain time is kept once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.backends import backend
from runtime.backends.decoder import Decoder

if TYPE_CHECKING:
    from tuner.timer import Timer

READING_S = 0.04
"""How long one reading of a layer type may take; a large model's takes longer, for it needs a few passes."""
DECODING_S = 0.3
"""How long one comparison of decoding with and without compensation may take, for a small model."""
NOISE_PERCENT = 2.0
"""A slowdown so much and a quarter of the allowed one away from it needs no second opinion. One that is negative by
more than this does: something else held up the machine."""
Slowdown = Callable[[Mapping[str, int], Mapping[str, int]], float]
"""Measured slowdown of decoding, in percent, by k_chunk and n_tb."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """What measures a loaded model."""

    layers: Timer
    """Times single layers."""
    slowdown: Slowdown
    """Times whole decoding steps with compensation against those without."""


def clocks(decoder: Decoder, cancelled: Callable[[], bool]) -> Clocks:
    """The clocks of a loaded model; slot 0 of its cache is overwritten by them.

    Raises:
        BackendError: this backend has none.
    """
    from runtime.measure.timing import DecodeTimer

    timer = backend(decoder.backend).timer(decoder, seconds=READING_S)
    return Clocks(layers=timer, slowdown=DecodeTimer(decoder, seconds=DECODING_S, cancelled=cancelled).slowdown)


class Ratios:
    """A timer whose readings with compensation are ratios to the plain product; without, they are seconds."""

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
    """A timer that multiplies the readings of `Ratios` by one plain time, remembers them, and tells of each new one."""

    def __init__(self, ratios: Timer, tell: Callable[[str, int], None]) -> None:
        """Wrap a timer.

        Args:
            ratios: `Ratios`, or what keeps its readings.
            tell: Called with layer type and k_chunk before a reading.
        """
        self._ratios = ratios
        self._tell = tell
        self._known: dict[tuple[str, int, int], float] = {}
        self.measured = ratios.measured

    def seconds(self, kind: str, n_tb: int, k_chunk: int) -> float:
        """See `tuner.timer.Timer`. A point is read once: a reading of a clock is a median already."""
        point = (kind, n_tb if k_chunk else 0, k_chunk)
        if point not in self._known:
            self._tell(kind, k_chunk)
            self._known[point] = self._ratios.seconds(*point)
        ratio = self._known[point]
        return ratio * self.seconds(kind, 0, 0) if k_chunk else ratio

    def curve(self, kind: str, n_tb: int) -> tuple[tuple[int, float], ...]:
        """(k_chunk, time over the plain time) of every reading so far, by k_chunk; begins with (0, 1)."""
        found = {
            k_chunk: ratio for (own, blocks, k_chunk), ratio in self._known.items() if (own, blocks) == (kind, n_tb)
        }
        return tuple(sorted({**found, 0: 1.0}.items()))


class Decided:
    """A slowdown that is not measured again with the same configuration once it is clear on which side it lies."""

    def __init__(self, slowdown: Slowdown, allowed: float, tell: Callable[[Mapping[str, int]], None]) -> None:
        """Wrap a measurement.

        Args:
            slowdown: Measures.
            allowed: Percent that it is compared with.
            tell: Called with k_chunk before a measurement.
        """
        self._slowdown = slowdown
        self._allowed = allowed
        self._tell = tell
        self._clear: tuple[dict[str, int], float] | None = None

    def __call__(self, k_chunk: Mapping[str, int], n_tb: Mapping[str, int]) -> float:
        """Measured slowdown in percent, or what was measured before of the same k_chunk."""
        if self._clear is not None and self._clear[0] == k_chunk:
            return self._clear[1]
        self._tell(k_chunk)
        found = self._slowdown(k_chunk, n_tb)
        away = abs(found - self._allowed) > NOISE_PERCENT + self._allowed / 4
        if away and found > -NOISE_PERCENT:
            self._clear = (dict(k_chunk), found)
        return found
