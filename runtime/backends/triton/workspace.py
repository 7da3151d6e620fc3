"""Scratch memory and counters of launches, numbers of the card, and the carveout of its shared memory.

A multiprocessor's memory is divided between first-level cache and shared memory as its kernels require, and the
division only changes while it is empty. A product uses almost no shared memory, so the driver would reserve almost
none, and a block of the compensation kernel that arrives later would have to wait for all blocks of the product; the
compensation kernel arrives first, and for its 16 KiB the driver may reserve so much that the product has to wait for
it. So both request what both need (`leave_room`).
"""

from __future__ import annotations

import ctypes
import logging
import sys
from functools import cache
from typing import Any, Literal

import torch

RESERVED_KIB = {"product": 32, "compensation": 32, "both": 96}
"""Shared memory to reserve per multiprocessor, by kernel. While a product runs: a block of compensation takes 16 KiB,
those of a product under 2 KiB each (`make kernels`); of both in one launch six blocks, each of 14 KiB."""
_PREFERRED_CARVEOUT = 9
"""CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT of the CUDA driver, in percent of the maximum."""


class Workspace:
    """Counters and scratch of the kernels that run on one stream, one after another.

    Allocations stay at their addresses for the lifetime of the workspace, so a captured graph may use them. Concurrent
    kernels on two streams need separate workspaces.

    Args:
        device: Device of the memory.
        scratch: Initial values of float32 scratch; larger requests make it grow, and earlier allocations stay.
    """

    def __init__(self, device: torch.device | str, scratch: int = 0) -> None:
        self.device = torch.device(device)
        self._held: dict[tuple[str, torch.dtype], list[torch.Tensor]] = {}
        if scratch:
            self.scratch(scratch)

    def counters(self, n: int) -> torch.Tensor:
        """int32 [n], zero. A kernel that counts in them must reset them to zero."""
        return self._take("counters", n, torch.int32)

    def scratch(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[numel] of a type; contents are only valid for the call that requested it."""
        return self._take("scratch", numel, dtype)

    def sums(self, M: int, pieces: int) -> torch.Tensor:
        """float32 [M, pieces], for the sums of the pieces of a product's activations."""
        return self._take("sums", M * pieces, torch.float32).view(M, pieces)

    def lists(self, n: int) -> torch.Tensor:
        """int32 [n], for lists of channels beside other scratch."""
        return self._take("lists", n, torch.int32)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensors in self._held.values() for tensor in tensors)

    def _take(self, purpose: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        held = self._held.setdefault((purpose, dtype), [])
        if not held or held[-1].numel() < numel:
            held.append(torch.zeros(max(numel, 64), dtype=dtype, device=self.device))
        return held[-1][:numel]


@cache
def capability(device: torch.device) -> int:
    """The major compute capability of a device; 0 under the interpreter."""
    return torch.cuda.get_device_properties(device).major if device.type == "cuda" else 0


@cache
def sm_count(device: torch.device) -> int:
    """Multiprocessors of a device; 1 under the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


logger = logging.getLogger(__name__)

Kernel = Literal["product", "compensation", "both"]
_asked: dict[tuple[int, torch.device], Kernel] = {}
"""Functions that have asked, and for which kernel."""


def leave_room(launched: Any, device: torch.device, kernel: Kernel) -> None:
    """Request shared memory for both kernels, from this one's next launch on.

    This is a hint: if a driver refuses, there is less overlap, but no error. `launched` is the result of launching a
    Triton kernel, unused under the interpreter.
    """
    function = getattr(launched, "function", None)
    if function is None or device.type != "cuda" or (function, device) in _asked:
        return
    _asked[function, device] = kernel
    _ask(function, _percent(device, kernel))


def _percent(device: torch.device, kernel: Kernel) -> int:
    most = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor // 1024
    return -(-100 * RESERVED_KIB[kernel] // most)


def _ask(function: int, percent: int) -> None:
    answer = _driver().cuFuncSetAttribute(ctypes.c_void_p(function), _PREFERRED_CARVEOUT, percent)
    if answer:
        logger.debug("the driver does not divide shared memory as asked: error %d", answer)


@cache
def _driver() -> Any:
    """The CUDA driver, already loaded if a kernel was launched."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
