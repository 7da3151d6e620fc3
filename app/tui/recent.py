"""Recent speeds and memory use, for sparklines."""

from __future__ import annotations

from collections import deque

KEPT = 120
"""Number of samples of each kind."""
SAMPLE_S = 1.0
"""Minimum time over which a speed is averaged."""


class Recent:
    """The latest speeds and memory sizes, oldest first."""

    def __init__(self) -> None:
        self.speeds: deque[float] = deque(maxlen=KEPT)
        """Tokens per second while answers were generated."""
        self.memory: deque[int] = deque(maxlen=KEPT)
        """Memory of the runtime process in bytes."""
        self.last_speed: float | None = None
        """Tokens per second of the last answer that the runtime reported."""
        self._since: float | None = None
        self._pieces = 0

    def begin(self) -> None:
        """Start an answer. The time before its first token does not count as time between tokens."""
        self._since = None

    def count(self, now: float) -> None:
        """Count one token."""
        if self._since is None:
            self._since, self._pieces = now, 0
            return
        self._pieces += 1
        passed = now - self._since
        if passed >= SAMPLE_S:
            self.speeds.append(self._pieces / passed)
            self._since, self._pieces = now, 0

    def hold(self, memory_bytes: int | None) -> None:
        """Record the runtime's memory use."""
        if memory_bytes is not None:
            self.memory.append(memory_bytes)
