"""Arrays that end at memory nobody may touch, so that compiled code which writes behind one ends the process."""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.backends.cpu import tiles as arena

PAGE = mmap.PAGESIZE


def aligned_zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """As `runtime.backends.cpu.tiles.aligned_zeros`; on Linux at most 63 bytes from the end of what may be touched."""
    if sys.platform != "linux":
        return arena.aligned_zeros(shape, dtype)
    kind = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    room = max(PAGE, -(-size // PAGE) * PAGE)
    memory = np.frombuffer(mmap.mmap(-1, room + PAGE), np.uint8)
    forbidden = ctypes.c_void_p(memory.ctypes.data + room)
    assert ctypes.CDLL(None).mprotect(forbidden, ctypes.c_size_t(PAGE), 0) == 0
    start = (room - size) // arena.LINE * arena.LINE
    return memory[start : start + size].view(kind).reshape(shape)
