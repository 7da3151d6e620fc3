"""Thread pool of the CPU backend.

While a session is open, its threads stay in compiled code. A step is announced by one word in memory, so no thread
needs the interpreter or its lock between two tokens. Between sessions there are no threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import psutil

from runtime.backends.cpu.data.control import ACTIVE, CLOSED, DONE, SLEEPERS, TURN
from runtime.backends.cpu.data.step import parameters_of
from runtime.backends.cpu.link import is_linked, link, most_scratch
from runtime.backends.cpu.thread_tuner import ThreadTuner
from runtime.backends.cpu.units import execute, set_active
from tuner.sysctl import performance_cores


def default_threads() -> int:
    """Physical cores available to this process; of an Apple processor the fast ones."""
    allowed = len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else psutil.cpu_count()
    return max(1, min(performance_cores() or psutil.cpu_count(logical=False) or 1, allowed or 1))


class Pool:
    """Runs programs on several threads.

    Args:
        control: int64 control block (see `runtime.backends.cpu.machine.sync` and
            `runtime.backends.cpu.data.step`).
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
