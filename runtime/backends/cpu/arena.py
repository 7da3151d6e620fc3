"""Arena: memory of a loaded model in a few large regions, so that the system can map it with huge pages.

A token reads every weight once, and scattered residual rows, in far more 4 KiB pages than the TLB has entries; in a
virtual machine each miss costs two page-table walks. NumPy requests huge pages (`madvise`) only for arrays of 4 MiB and
more, but the matrices of a small model are smaller.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

LINE = 64
"""Bytes of a cache line; the alignment of every array."""
_REGION_BYTES = 32 << 20


def aligned_zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A zeroed C-contiguous array in its own memory, aligned to 64 bytes."""
    return Arena(0).zeros(shape, dtype)


class Arena:
    """Allocates adjacent arrays. A region lives as long as any of its arrays.

    Args:
        region_bytes: Size of a region; larger arrays get their own.
    """

    def __init__(self, region_bytes: int = _REGION_BYTES) -> None:
        self._region_bytes = region_bytes
        self._free = np.zeros(0, np.uint8)

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A zeroed C-contiguous array, aligned to 64 bytes."""
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
