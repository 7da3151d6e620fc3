"""Shared-memory carveout: reserves space on a multiprocessor for the compensation kernel on the other stream.

A multiprocessor's memory is divided between first-level cache and shared memory as its kernels require, and the
division only changes while it is empty. A product uses almost no shared memory, so the driver would reserve almost
none, and a block of the compensation kernel that arrives later would have to wait for all blocks of the product. So
products request what both kernels need.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from functools import cache
from typing import Any

import torch

logger = logging.getLogger(__name__)

RESERVED_KIB = 32
"""Shared memory to reserve per multiprocessor while a product runs: a block of compensation takes 16 KiB, those of a
product under 2 KiB each (docs/kernels.md)."""
_PREFERRED_CARVEOUT = 9
"""CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT of the CUDA driver, in percent of the maximum."""


def leave_room(launched: Any, device: torch.device) -> None:
    """Request shared memory beside a kernel, from its next launch on.

    This is a hint. If a driver refuses, there is less overlap, but no error.

    Args:
        launched: The result of launching a Triton kernel; unused under the interpreter.
        device: The device it was launched on.
    """
    function = getattr(launched, "function", None)
    if function is not None and device.type == "cuda":
        _ask(function, device)


@cache
def _ask(function: int, device: torch.device) -> None:
    """Make the request once per kernel."""
    most = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor // 1024
    percent = -(-100 * RESERVED_KIB // most)
    answer = _driver().cuFuncSetAttribute(ctypes.c_void_p(function), _PREFERRED_CARVEOUT, percent)
    if answer:
        logger.debug("the driver keeps no shared memory beside products: error %d", answer)


@cache
def _driver() -> Any:
    """The CUDA driver, already loaded if a kernel was launched."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
