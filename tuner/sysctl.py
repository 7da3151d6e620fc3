"""Numbers of macOS's kernel, by name. Not yet seen on macOS.

Source: sysctlbyname(3), and https://developer.apple.com/documentation/kernel/1387446-sysctlbyname.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any


def number(name: str, library: Any = None) -> int | None:
    """A number, such as `hw.perflevel0.physicalcpu`; None where there is none, as on other systems.

    Args:
        name: Its name.
        library: The C library, replaceable in tests.
    """
    if library is None:
        system: str = sys.platform  # a variable, so that type checkers also look at what follows
        if system != "darwin":
            return None
        library = ctypes.CDLL(None)
    ask = getattr(library, "sysctlbyname", None)
    if ask is None:
        return None
    value, size = ctypes.c_int64(0), ctypes.c_size_t(8)
    failed = ask(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return None if failed or not 0 < size.value <= 8 else value.value


def performance_cores() -> int | None:
    """Number of fast cores of an Apple processor; the others would hold them up. None elsewhere."""
    return number("hw.perflevel0.physicalcpu")
