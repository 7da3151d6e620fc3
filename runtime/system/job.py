"""Job objects of Windows: a child process that ends with this one, whatever happens to it.

Source: https://learn.microsoft.com/windows/win32/procthread/job-objects. Not yet seen on Windows.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

_KILL_ON_CLOSE = 0x2000
"""JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE: when the last handle of the job is closed, its processes end."""
_EXTENDED_LIMITS = 9
"""JobObjectExtendedLimitInformation."""
_MAY_ASSIGN = 0x0100 | 0x0001
"""PROCESS_SET_QUOTA and PROCESS_TERMINATE."""


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
