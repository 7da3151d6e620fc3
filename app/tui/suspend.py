"""Detection of a suspend: the time of day advanced, but the monotonic clock did not.

On systems where both advance during a suspend (not Linux), the gap between two checks reveals it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

MIN_SUSPEND_S = 20.0
"""Shorter gaps are ignored: a busy machine, or a clock that was set."""


class SuspendDetector:
    """Compares two clocks at regular checks."""

    def __init__(
        self, every_s: float, running: Callable[[], float] = time.monotonic, day: Callable[[], float] = time.time
    ) -> None:
        """Start.

        Args:
            every_s: Interval in seconds at which `suspended_s` is called.
            running: Seconds that the machine has run.
            day: Time of day in seconds.
        """
        self._every_s = every_s
        self._running, self._day = running, day
        self._seen = (running(), day())

    def suspended_s(self) -> float | None:
        """Seconds that the machine was suspended since the last check; None if it was not."""
        now = (self._running(), self._day())
        ran, passed = now[0] - self._seen[0], now[1] - self._seen[1]
        self._seen = now
        absence = max(passed - ran, min(ran, passed) - 2 * self._every_s)
        return absence if absence >= MIN_SUSPEND_S else None
