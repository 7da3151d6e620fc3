"""Memory of a loaded model: a few large regions, so that the system can map them by huge pages.

A token touches every weight once and residual rows here and there, in far more pages of 4 KiB than a processor keeps
translations of; in a virtual machine each miss costs two walks of the page tables. NumPy asks Linux for huge pages
(`madvise`) in arrays of 4 MiB and more, which single matrices of a small model are not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

LINE = 64
"""Bytes of a cache line; every array begins at one."""
_REGION_BYTES = 32 << 20


def aligned_zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A zeroed C-contiguous array that starts at a multiple of 64 bytes, in memory of its own."""
    return Arena(0).zeros(shape, dtype)


class Arena:
    """Hands out arrays that lie side by side. A region lives as long as one of its arrays.

    Args:
        region_bytes: What is asked of the system at a time; larger arrays have a region of their own.
    """

    def __init__(self, region_bytes: int = _REGION_BYTES) -> None:
        self._region_bytes = region_bytes
        self._free = np.zeros(0, np.uint8)

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A zeroed C-contiguous array that starts at a multiple of 64 bytes."""
        kind = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        own = size >= self._region_bytes
        region = np.zeros(size + LINE, np.uint8) if own else self._free
        start = -region.ctypes.data % LINE
        if not own and start + size > region.size:
            region = np.zeros(self._region_bytes + LINE, np.uint8)
            start = -region.ctypes.data % LINE
        if not own:
            self._free = region[start + size :]
        return region[start : start + size].view(kind).reshape(shape)
