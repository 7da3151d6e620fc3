"""ThreadTuner: chooses the number of threads that decode fastest, by trial.

Threads that share a core with another program cost more than they contribute: the others wait milliseconds for a
preempted thread. So the pool measures token times and occasionally tries another number of threads for a few tokens;
the faster number is kept. Results do not depend on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

WINDOW_S = 0.03
"""Seconds for which a number of threads is observed before it is judged: several time slices of the system's
scheduler."""
_MIN_TOKENS = 4
_BETTER = 0.95
"""A new number of threads must need at most this fraction of the current one's time to be kept."""
_WORSE = 1.25
"""Tokens this many times slower than the best recent ones indicate a change, and trigger a trial at once."""
_SOON_S, _LATE_S = 0.25, 4.0
"""Seconds between two trials: at first and after a change, and after many without improvement."""
_SHARE = 25
"""After a trial, at least this many times its duration passes without one."""
_HOPELESS = 1.5
"""A trial is aborted after the second token if its tokens take this many times as long as before."""


class ThreadTuner:
    """Chooses a number of threads from the times of tokens.

    Args:
        most: Number of available threads.
        clock: Clock in seconds, replaceable in tests.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._most, self._clock = most, clock
        self.size = most
        """Threads to use for the next token."""
        self._kept = most
        self._seconds, self._tokens = 0.0, 0
        self._mean, self._best = 0.0, float("inf")
        self._pause, self._next = _SOON_S, clock() + _SOON_S
        self._trials = 0

    def token(self, seconds: float) -> None:
        """Record a token decoded by `size` threads; may change `size`.

        Args:
            seconds: Its duration.
        """
        if self._most == 1:
            return
        self._seconds += seconds
        self._tokens += 1
        mean, tried = self._seconds / self._tokens, self.size != self._kept
        hopeless = tried and self._tokens > 1 and mean > _HOPELESS * self._mean
        if not hopeless and (self._seconds < WINDOW_S or self._tokens < _MIN_TOKENS):
            return
        if tried:
            self._judge(mean)
        else:
            self._watch(mean)
        self._seconds, self._tokens = 0.0, 0

    def _watch(self, mean: float) -> None:
        """Record token times of the current number of threads, and start a trial when it is due."""
        now = self._clock()
        if mean > _WORSE * self._best:
            self._pause, self._best, self._next = _SOON_S, mean, now
        self._mean, self._best = mean, min(mean, self._best)
        if now >= self._next:
            self.size = self._other()

    def _other(self) -> int:
        """The number to try: one less, half as many, one more, and a single thread in turn, if possible."""
        kept, most = self._kept, self._most
        others = dict.fromkeys(n for n in (kept - 1, kept + 1, kept // 2, 1) if 1 <= n <= most and n != kept)
        self._trials += 1
        return list(others)[self._trials % len(others)]

    def _judge(self, mean: float) -> None:
        """Keep the tried number, or revert and wait longer for the next trial."""
        if mean < _BETTER * self._mean:
            self._kept, self._mean, self._best, self._pause = self.size, mean, mean, _SOON_S
        else:
            self._pause = min(2 * self._pause, _LATE_S)
        self.size = self._kept
        self._next = self._clock() + max(self._pause, _SHARE * self._seconds)
