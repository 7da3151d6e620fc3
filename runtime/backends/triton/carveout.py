"""Shared-memory carveout: a product and the compensation beside it ask for the same division of a multiprocessor.

A multiprocessor's memory is divided between first-level cache and shared memory as its kernels require, and the
division only changes while it is empty. A product uses almost no shared memory, so the driver would reserve almost
none, and a block of the compensation kernel that arrives later would have to wait for all blocks of the product; the
compensation kernel arrives first, and for its 16 KiB the driver may reserve so much that the product has to wait for
it. So both request what both need.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from functools import cache
from typing import Any, Literal

import torch

logger = logging.getLogger(__name__)

RESERVED_KIB = 32
"""Shared memory to reserve per multiprocessor while a product runs: a block of compensation takes 16 KiB, those of a
product under 2 KiB each (docs/kernels.md)."""
Kernel = Literal["product", "compensation"]
_PREFERRED_CARVEOUT = 9
"""CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT of the CUDA driver, in percent of the maximum."""
_DEFAULT = -1
"""CU_SHAREDMEM_CARVEOUT_DEFAULT: the driver decides."""
_asked: dict[tuple[int, torch.device], Kernel] = {}
"""Functions that have asked, and for which kernel."""


def leave_room(launched: Any, device: torch.device, kernel: Kernel) -> None:
    """Request shared memory for both kernels, from this one's next launch on.

    This is a hint. If a driver refuses, there is less overlap, but no error.

    Args:
        launched: The result of launching a Triton kernel; unused under the interpreter.
        device: The device it was launched on.
        kernel: Which of the two it is.
    """
    function = getattr(launched, "function", None)
    if function is None or device.type != "cuda" or (function, device) in _asked:
        return
    _asked[function, device] = kernel
    _ask(function, _percent(device))


def request(kernel: Kernel, *, asked: bool) -> None:
    """Let every such kernel launched so far ask, or leave the division to the driver, to measure what asking does."""
    for (function, device), own in _asked.items():
        if own == kernel:
            _ask(function, _percent(device) if asked else _DEFAULT)


def _percent(device: torch.device) -> int:
    most = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor // 1024
    return -(-100 * RESERVED_KIB // most)


def _ask(function: int, percent: int) -> None:
    answer = _driver().cuFuncSetAttribute(ctypes.c_void_p(function), _PREFERRED_CARVEOUT, percent)
    if answer:
        logger.debug("the driver does not divide shared memory as asked: error %d", answer)


@cache
def _driver() -> Any:
    """The CUDA driver, already loaded if a kernel was launched."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
