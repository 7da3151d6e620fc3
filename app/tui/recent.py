"""How fast the model was and what the runtime held lately, for sparklines."""

from __future__ import annotations

from collections import deque

KEPT = 120
"""Samples of each kind."""
SAMPLE_S = 1.0
"""Least time over which a speed is averaged."""


class Recent:
    """The latest speeds and amounts of memory, oldest first."""

    def __init__(self) -> None:
        self.speeds: deque[float] = deque(maxlen=KEPT)
        """Tokens a second while answers were written."""
        self.memory: deque[int] = deque(maxlen=KEPT)
        """Bytes of the runtime process."""
        self.last_speed: float | None = None
        """Tokens a second of the last answer that the runtime reported on."""
        self._since: float | None = None
        self._pieces = 0

    def begin(self) -> None:
        """An answer begins: the time before its first token is no time between tokens."""
        self._since = None

    def count(self, now: float) -> None:
        """One token came."""
        if self._since is None:
            self._since, self._pieces = now, 0
            return
        self._pieces += 1
        passed = now - self._since
        if passed >= SAMPLE_S:
            self.speeds.append(self._pieces / passed)
            self._since, self._pieces = now, 0

    def hold(self, memory_bytes: int | None) -> None:
        """The runtime told what it holds."""
        if memory_bytes is not None:
            self.memory.append(memory_bytes)
