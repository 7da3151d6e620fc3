"""Bandwidth measurements: from main memory to this GPU, and of its own memory.

Laptops often have fewer lanes than the data sheet says, and slots share lanes. Compensation depends on the measured
value.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from runtime.backends.triton.reclaim import return_cached

_BYTES = 64 << 20
_REPEATS = 8
_READ_BYTES = 512 << 20
"""Several times the L2 cache of any card."""


def host_to_device_gb_s(device: torch.device | str = "cuda", *, nbytes: int = _BYTES) -> float:
    """Copy page-locked memory to the device a few times; returns the speed of the second fastest copy.

    Args:
        device: A CUDA device, or `cpu` for tests.
        nbytes: Bytes of a copy.

    Returns:
        10^9 bytes per second.

    Raises:
        RuntimeError: the driver refused page-locked memory, or the device does not respond.
    """
    device = torch.device(device)
    source = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    seconds = _second_fastest(partial(target.copy_, source, non_blocking=True), device)
    del source, target
    if device.type == "cuda":
        return_cached()
    return nbytes / seconds / 1e9


def device_read_gb_s(device: torch.device | str = "cuda", *, nbytes: int = _READ_BYTES) -> float:
    """Add up and copy memory of the device a few times; returns the speed of the faster way.

    Args:
        device: A CUDA device, or `cpu` for tests.
        nbytes: Bytes that are read at a time; as many again are written by a copy, and counted.

    Returns:
        10^9 bytes per second.

    Raises:
        RuntimeError: too little memory is free, or the device does not respond.
    """
    device = torch.device(device)
    source = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    added = _second_fastest(source.sum, device)
    copied = _second_fastest(partial(target.copy_, source), device)
    del source, target
    if device.type == "cuda":
        return_cached()
    return nbytes * max(1 / added, 2 / copied) / 1e9


def _second_fastest(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the second fastest of a few rounds."""
    seconds = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return sorted(seconds)[1]
