"""How many threads take part in decoding: as many as make tokens come fastest, found by trying.

Threads that share a core with another program cost more than they bring: whoever waits for one that was put aside
waits for milliseconds. So a pool watches how long its tokens take and now and then tries another number of threads for
a few of them; what was better is kept. Nothing that is computed depends on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

WINDOW_S = 0.03
"""How long a number of threads is watched before it is judged: several turns of the system's scheduler."""
_LEAST_TOKENS = 4
_BETTER = 0.95
"""What another number of threads has to take, of the time of the present one, to be kept."""
_WORSE = 1.25
"""Tokens that take so much longer than the best of late: something else began, and another number is tried at once."""
_SOON_S, _LATE_S = 0.25, 4.0
"""Time between two trials: at first and after a change, and when many have shown nothing better."""
_SHARE = 25
"""A trial is followed by so many times its duration without one."""
_HOPELESS = 1.5
"""A trial whose tokens take so many times as long as those before is given up after the second."""


class Crew:
    """Chooses a number of threads from the times of tokens.

    Args:
        most: Threads that there are.
        clock: Seconds; tests bring their own.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._most, self._clock = most, clock
        self.size = most
        """Threads that are to work on the next token."""
        self._kept = most
        self._seconds, self._tokens = 0.0, 0
        self._mean, self._best = 0.0, float("inf")
        self._pause, self._next = _SOON_S, clock() + _SOON_S
        self._trials = 0

    def token(self, seconds: float) -> None:
        """A token was decoded by `size` threads; afterwards `size` may be another.

        Args:
            seconds: How long it took.
        """
        if self._most == 1:
            return
        self._seconds += seconds
        self._tokens += 1
        mean, tried = self._seconds / self._tokens, self.size != self._kept
        hopeless = tried and self._tokens > 1 and mean > _HOPELESS * self._mean
        if not hopeless and (self._seconds < WINDOW_S or self._tokens < _LEAST_TOKENS):
            return
        if tried:
            self._judge(mean)
        else:
            self._watch(mean)
        self._seconds, self._tokens = 0.0, 0

    def _watch(self, mean: float) -> None:
        """Note how long tokens take with the number of threads that is kept, and begin a trial when it is time."""
        now = self._clock()
        if mean > _WORSE * self._best:
            self._pause, self._best, self._next = _SOON_S, mean, now
        self._mean, self._best = mean, min(mean, self._best)
        if now >= self._next:
            self.size = self._other()

    def _other(self) -> int:
        """The number to try: one less, half as many, one more, and one alone in turns, as far as there are."""
        kept, most = self._kept, self._most
        others = dict.fromkeys(n for n in (kept - 1, kept + 1, kept // 2, 1) if 1 <= n <= most and n != kept)
        self._trials += 1
        return list(others)[self._trials % len(others)]

    def _judge(self, mean: float) -> None:
        """Keep what was tried, or go back and wait longer for the next trial."""
        if mean < _BETTER * self._mean:
            self._kept, self._mean, self._best, self._pause = self.size, mean, mean, _SOON_S
        else:
            self._pause = min(2 * self._pause, _LATE_S)
        self.size = self._kept
        self._next = self._clock() + max(self._pause, _SHARE * self._seconds)
