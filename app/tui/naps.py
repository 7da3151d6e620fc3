"""Noticing that the machine slept: the time of day went on, and the clock that counts running time did not.

Where both go on in a suspend (not Linux), the wait between two looks tells it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LEAST_S = 20.0
"""A shorter absence is none: a busy machine, or a clock that was set."""


class Naps:
    """Looks at two clocks now and then."""

    def __init__(
        self, every_s: float, running: Callable[[], float] = time.monotonic, day: Callable[[], float] = time.time
    ) -> None:
        """Begin.

        Args:
            every_s: How often `slept` is asked.
            running: Seconds that the machine ran.
            day: Seconds of the time of day.
        """
        self._every_s = every_s
        self._running, self._day = running, day
        self._seen = (running(), day())

    def slept(self) -> float | None:
        """Seconds that the machine slept since the last look; None where it did not."""
        now = (self._running(), self._day())
        ran, passed = now[0] - self._seen[0], now[1] - self._seen[1]
        self._seen = now
        absence = max(passed - ran, min(ran, passed) - 2 * self._every_s)
        return absence if absence >= LEAST_S else None
