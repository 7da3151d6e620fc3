"""Lifetimes of processes: a child that notices its parent's end, and one that ends with it.

Source: https://learn.microsoft.com/windows/win32/procthread/job-objects, for the jobs of Windows, which are not yet
seen there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from psutil import Process


POLL_S = 0.5
"""Seconds between two looks at the parent."""
_KILL_ON_CLOSE = 0x2000
"""JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE: when the last handle of the job is closed, its processes end."""
_EXTENDED_LIMITS = 9
"""JobObjectExtendedLimitInformation."""
_MAY_ASSIGN = 0x0100 | 0x0001
"""PROCESS_SET_QUOTA and PROCESS_TERMINATE."""


class ParentWatch:
    """Tracks whether the parent is alive: the very process, not another one with its id."""

    def __init__(self, pid: int, leash: int | None = None) -> None:
        """Watch a process that is expected to be alive.

        Args:
            pid: The parent.
            leash: Descriptor of a pipe whose other end only the parent holds; it closes when the parent ends, or when
                it wants this process to. None: the parent is only looked at every now and then.
        """
        self._leash = leash
        self._parent = running_process(pid)
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ended = self._let_go = False

    def runs(self) -> bool:
        """Whether it is still running, even if it has let go."""
        return still_runs(self._parent)

    def gone(self) -> bool:
        """Whether it has ended or let go."""
        return self._let_go or not self.runs()

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


def running_process(pid: int) -> Process | None:
    """The process that has an id now, for `still_runs`; None if there is none, or only a zombie."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        with contextlib.suppress(psutil.AccessDenied):
            return None if process.status() == psutil.STATUS_ZOMBIE else process
        return process
    return None


def still_runs(process: Process | None) -> bool:
    """Whether the very same process is still running, whatever happened to the system's clock in the meantime."""
    return process is not None and running_process(process.pid) == process


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


class _Limits(ctypes.Structure):
    """JOBOBJECT_EXTENDED_LIMIT_INFORMATION."""

    _fields_ = (
        ("process_time", ctypes.c_int64),
        ("job_time", ctypes.c_int64),
        ("flags", ctypes.c_uint32),
        ("least_working_set", ctypes.c_size_t),
        ("most_working_set", ctypes.c_size_t),
        ("active_processes", ctypes.c_uint32),
        ("affinity", ctypes.c_size_t),
        ("priority", ctypes.c_uint32),
        ("scheduling", ctypes.c_uint32),
        ("transfers", ctypes.c_uint64 * 6),
        ("process_memory", ctypes.c_size_t),
        ("job_memory", ctypes.c_size_t),
        ("process_peak", ctypes.c_size_t),
        ("job_peak", ctypes.c_size_t),
    )


class Job:
    """A job whose processes end with this one, even if it is killed: the system then closes its handle.

    Args:
        kernel: kernel32, replaceable in tests.

    Raises:
        OSError: the system refuses.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        for name in ("CreateJobObjectW", "OpenProcess"):
            getattr(kernel, name).restype = ctypes.c_void_p
        self._handle = ctypes.c_void_p(self._checked(kernel.CreateJobObjectW(None, None)))
        limits = _Limits(flags=_KILL_ON_CLOSE)
        size = ctypes.c_uint32(ctypes.sizeof(limits))
        self._checked(kernel.SetInformationJobObject(self._handle, _EXTENDED_LIMITS, ctypes.byref(limits), size))

    def add(self, pid: int) -> None:
        """Put a process into the job.

        Raises:
            OSError: it has ended, or the system refuses.
        """
        process = ctypes.c_void_p(self._checked(self._kernel.OpenProcess(_MAY_ASSIGN, 0, pid)))
        try:
            self._checked(self._kernel.AssignProcessToJobObject(self._handle, process))
        finally:
            self._kernel.CloseHandle(process)

    def _checked(self, result: int | None) -> int:
        if not result:
            raise OSError(f"a call of Windows failed with error {self._kernel.GetLastError()}")
        return result


def own_job() -> Job | None:
    """A job for children of this process; None on other systems than Windows."""
    system: str = sys.platform  # a variable, so that type checkers also look at what follows
    if system != "win32":
        return None
    return Job(ctypes.WinDLL("kernel32"))  # type: ignore[attr-defined, unused-ignore]
