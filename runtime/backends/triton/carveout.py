"""Shared memory reserved while a product runs, for the blocks of the compensation kernel on the other stream.

A multiprocessor's memory is cut into first-level cache and shared memory, as the kernels on it need, and changing the
cut waits until it is empty. A product takes next to no shared memory, so the driver would leave it next to none, and a
block of the compensation that arrives later would find no room until all blocks of the product are through. So products
ask for what both need.
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
"""Shared memory that a multiprocessor keeps while a product runs: a block of the compensation takes 16 KiB, the blocks
of a product under 2 each (docs/kernels.md)."""
_PREFERRED_CARVEOUT = 9
"""CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT of the CUDA driver: percent of the most there can be."""


def leave_room(launched: Any, device: torch.device) -> None:
    """Ask for shared memory beside a kernel; it holds from the kernel's next launch on.

    This is only a hint. A driver that refuses it costs overlap, but no results: nothing is raised.

    Args:
        launched: What the launch of a Triton kernel returned; nothing under the interpreter.
        device: Where it was launched.
    """
    function = getattr(launched, "function", None)
    if function is not None and device.type == "cuda":
        _ask(function, device)


@cache
def _ask(function: int, device: torch.device) -> None:
    """Once for each kernel."""
    most = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor // 1024
    percent = -(-100 * RESERVED_KIB // most)
    answer = _driver().cuFuncSetAttribute(ctypes.c_void_p(function), _PREFERRED_CARVEOUT, percent)
    if answer:
        logger.debug("the driver keeps no shared memory beside products: error %d", answer)


@cache
def _driver() -> Any:
    """The CUDA driver, which is loaded already where a kernel was launched."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
