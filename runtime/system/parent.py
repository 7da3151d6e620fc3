"""Parent watch: detects that the process that started this one has ended, for whatever reason."""

from __future__ import annotations

import contextlib
import os
import queue
import stat
import threading
from collections.abc import Callable, Iterator

POLL_S = 0.5
"""Seconds between two looks at the parent."""


class ParentWatch:
    """Tracks whether the parent is alive: the very process, not another one with its id."""

    def __init__(self, pid: int, leash: int | None = None) -> None:
        """Watch a process that is expected to be alive.

        Args:
            pid: The parent.
            leash: Descriptor of a pipe whose other end only the parent holds; it closes when the parent ends, or when
                it wants this process to. None: the parent is only looked at every now and then.
        """
        self._pid, self._leash = pid, leash
        self._created = process_create_time(pid)
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ended = self._let_go = False

    def gone(self) -> bool:
        """Whether it has ended or let go; a zombie counts as ended."""
        return self._let_go or self._created is None or process_create_time(self._pid) != self._created

    @contextlib.contextmanager
    def watching(self, lost: Callable[[], object]) -> Iterator[None]:
        """Context manager: calls `lost` in a separate thread once the parent is gone."""
        thread = threading.Thread(target=self._watch, args=(lost,), name="parent-watch", daemon=True)
        thread.start()
        if self._leash is not None:  # this thread may wait until the process ends
            threading.Thread(target=self._hold, args=(self._leash,), name="leash", daemon=True).start()
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

    def _hold(self, leash: int) -> None:
        with contextlib.suppress(OSError):
            while os.read(leash, 1):
                pass
        self._let_go = True
        self._wake.put(None)


def leash_on_stdin() -> int | None:
    """The descriptor of standard input if it is a pipe, for `ParentWatch`."""
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.fstat(0).st_mode):
            return 0
    return None


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
