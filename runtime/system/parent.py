"""Parent watch: detects that the process that started this one has ended, for whatever reason."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator

POLL_S = 0.5
"""Polling interval in seconds, if the system does not signal the parent's end."""
_PR_SET_PDEATHSIG = 1


class ParentWatch:
    """Tracks whether the parent is alive: the very process, not another one with its id."""

    def __init__(self, pid: int) -> None:
        """Watch a process that is expected to be alive."""
        self._pid = pid
        self._created = process_create_time(pid)
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Pipe that a signal handler may write to. An event's lock is not reentrant: the end of a parent with several
        threads sends several signals, and the second would deadlock inside the first."""
        self._ended = False

    def gone(self) -> bool:
        """Whether it has ended; a zombie counts as ended."""
        return self._created is None or process_create_time(self._pid) != self._created

    @contextlib.contextmanager
    def watching(self, lost: Callable[[], object]) -> Iterator[None]:
        """Context manager: calls `lost` in a separate thread once the parent is gone.

        On Linux the system also sends a signal. It is sent, too, when the parent's thread that started this process
        ends, so it only triggers a check.
        """
        thread = threading.Thread(target=self._watch, args=(lost,), name="parent-watch", daemon=True)
        self._ask_for_signal()
        thread.start()
        try:
            yield
        finally:
            self._ended = True
            self._wake.put(None)
            thread.join()

    def _watch(self, lost: Callable[[], object]) -> None:
        while not self._ended:
            if self.gone():
                lost()
                return
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=POLL_S)

    def _ask_for_signal(self) -> None:
        if not sys.platform.startswith("linux") or threading.current_thread() is not threading.main_thread():
            return
        signal.signal(signal.SIGUSR1, lambda _number, _frame: self._wake.put(None))
        with contextlib.suppress(OSError, AttributeError):  # another C library: the thread polls anyway
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGUSR1), 0, 0, 0)


def own_record_time() -> float:
    """Creation time of this process as others see it, in seconds since 1970."""
    created = process_create_time(os.getpid())
    assert created is not None
    return created


def process_create_time(pid: int) -> float | None:
    """Creation time of a process, in seconds since 1970; None if it does not exist or is a zombie."""
    import psutil

    try:
        process = psutil.Process(pid)
        created = float(process.create_time())
        return None if process.status() == psutil.STATUS_ZOMBIE else created
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:
        return created
