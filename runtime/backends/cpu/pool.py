"""Thread pool of the CPU backend, and the choice of how many of its threads decode fastest.

While a session is open, its threads stay in compiled code. A step is announced by one word in memory, so no thread
needs the interpreter or its lock between two tokens. Between sessions there are no threads.

Threads that share a core with another program cost more than they contribute: the others wait milliseconds for a
preempted thread. So the pool measures token times and occasionally tries another number of threads for a few tokens;
the faster number is kept. Results do not depend on it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import psutil

from runtime.backends.cpu.data.records import ACTIVE, CLOSED, DONE, SLEEPERS, TURN, parameters_of
from runtime.backends.cpu.link import is_linked, link, most_scratch
from runtime.backends.cpu.units import execute, set_active
from tuner.sysctl import performance_cores

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


def default_threads() -> int:
    """Physical cores available to this process; of an Apple processor the fast ones."""
    allowed = len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else psutil.cpu_count()
    return max(1, min(performance_cores() or psutil.cpu_count(logical=False) or 1, allowed or 1))


class Pool:
    """Runs programs on several threads.

    Args:
        control: int64 control block (see `runtime.backends.cpu.machine.sync` and
            `runtime.backends.cpu.data.records`).
        threads: Number of threads, the caller included.
    """

    def __init__(self, control: npt.NDArray[np.int64], threads: int) -> None:
        self._control, self.threads = control, threads
        self._address = int(control.ctypes.data)
        self._parameters = parameters_of(control)
        self._thread_tuner, self._drafting = ThreadTuner(threads), ThreadTuner(threads)
        self._depth = 0
        self._program: npt.NDArray[np.int64] | None = None
        self._workers: list[threading.Thread] = []

    def prepare(self) -> None:
        """Compile the executor if necessary, before anybody waits for a token."""
        execute.prepare()
        set_active.prepare()

    @contextmanager
    def session(self) -> Iterator[None]:
        """Keep the threads in compiled code; sessions may be nested, but have one caller at a time."""
        if self._depth == 0:
            self._start()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._stop()

    def step(self, program: npt.NDArray[np.int64], *, token: bool = False, draft: bool = False) -> None:
        """Run a program once.

        Args:
            program: int64 [instructions, WIDTH]; arrays it refers to must be alive. It is linked first if necessary
                (`runtime.backends.cpu.link`); after changing the program of the last step, the caller links it again.
            token: Whether it decodes one token. Such programs use the number of threads that decodes fastest; any other
                program uses all threads.
            draft: Whether that token is a draft. Drafts take less time, so their durations are tracked separately.
        """
        if program is not self._program:
            self._take(program)
        thread_tuner = None if not token else self._drafting if draft else self._thread_tuner
        if self._depth:
            self._run(thread_tuner)
        else:
            with self.session():
                self._run(thread_tuner)

    def _take(self, program: npt.NDArray[np.int64]) -> None:
        """Make a program the current one."""
        if not is_linked(program):
            link(program, self.threads)
        assert most_scratch(program) <= self._parameters["scratch_stride"]
        self._parameters["program"], self._parameters["instructions"] = int(program.ctypes.data), len(program)
        self._program = program

    def _run(self, thread_tuner: ThreadTuner | None) -> None:
        wanted = thread_tuner.size if thread_tuner else self.threads
        if self._control[ACTIVE] != wanted:
            set_active(self._address, wanted)
        self._parameters["first"] = (int(self._control[TURN]) >> 32) + 1 & 0xFFFFFFFF
        began = time.perf_counter()
        execute(self._address, 0)
        if thread_tuner:
            thread_tuner.token(time.perf_counter() - began)

    def _start(self) -> None:
        self._control[[DONE, SLEEPERS]] = 0
        # Continue numbering from the last session: records of old turns must not match new ones.
        self._control[TURN] = int(self._control[TURN]) >> 32 << 32 | CLOSED
        self._control[ACTIVE] = self.threads
        self._workers = [
            threading.Thread(target=execute, args=(self._address, number), name=f"decoder-{number}", daemon=True)
            for number in range(1, self.threads)
        ]
        for worker in self._workers:
            worker.start()

    def _stop(self) -> None:
        set_active(self._address, 0)
        for worker in self._workers:
            worker.join()
        self._workers = []
